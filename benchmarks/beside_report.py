"""What the runs of bench_beside.py say: percentiles, slices, rows of links, goals and tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.report import table
from benchmarks.restore_report import GOAL_OVER_BEST, GOAL_OVER_BEST_S, MB, Goal

__all__ = [
    "DEAD",
    "DEADLINE_S",
    "SLOWER",
    "STEADY",
    "Beside",
    "Slices",
    "gaps_within",
    "goals",
    "itl_report",
    "link_row",
    "percentile",
    "read_slices",
    "show",
]

STEADY, SLOWER, DEAD = "steady", "10x slower", "dead"
GOAL_SLICES = 1.0
GOAL_OVER_RECOMPUTE = 2.0  # where the link changes in mid-restore
DEADLINE_S = 1.0  # and how long a read of a dead link takes to fail

_TOGETHER_S = 0.005  # slices with less between them ran in one round: a decode step takes longer

Row = dict[str, Any]


@dataclass(frozen=True)
class Slices:
    """The compute stream of one restore. `full_s`: seconds of each slice of the largest block, K and V alone
    left out. `rounds`: for each round of the scheduler the number of slices and their seconds together.
    `both`: share of the restore in which loads were under way.
    """

    full_s: tuple[float, ...]
    rounds: tuple[tuple[int, float], ...]
    tokens: int
    both: float


@dataclass(frozen=True)
class Beside:
    """One round. `gaps_s`: seconds between the messages of each chat, while the session was restored or, in a
    round without, all along. `restore_s` 0: without.
    """

    gaps_s: tuple[float, ...]
    restore_s: float = 0.0
    slices: Slices | None = None


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that `share` of all values do not exceed.

    Raises:
        ValueError: no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values: expected one at least")
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def gaps_within(arrivals: Sequence[float], start: float, end: float) -> list[float]:
    """Seconds between neighbouring arrivals, of those pairs that overlap [start, end]."""
    return [after - before for before, after in pairwise(arrivals) if after > start and before < end]


def read_slices(timeline: dict[str, Any]) -> Slices:
    """The slices of a timeline as `GET .../timeline` gives it.

    The first and the last layer of a block may be K and V alone, which takes a fraction: where a block is
    measured, only what takes at least half as long as the median counts.

    Raises:
        ValueError: nothing was computed, or nothing loaded.
    """
    computed = sorted((span for span in timeline["spans"] if span[0] == "compute"), key=lambda span: span[1])
    loaded = [span for span in timeline["spans"] if span[0] == "load"]
    if not computed or not loaded:
        raise ValueError(f"{len(computed)} slices and {len(loaded)} loads: expected both streams at work")
    tokens = max(span[4] for span in computed)
    largest = [span[2] - span[1] for span in computed if span[4] == tokens]
    usual = statistics.median(largest)
    rounds: list[tuple[int, float]] = []
    reached = -math.inf
    for span in computed:
        seconds = span[2] - span[1]
        if span[1] - reached < _TOGETHER_S:
            rounds[-1] = (rounds[-1][0] + 1, rounds[-1][1] + seconds)
        else:
            rounds.append((1, seconds))
        reached = span[2]
    return Slices(
        tuple(seconds for seconds in largest if 2 * seconds >= usual),
        tuple(rounds),
        tokens,
        1 - timeline["idle"]["load"],
    )


def itl_report(rounds: Sequence[Beside]) -> Row:
    """Inter-token times of all rounds: alone, beside a restore, and how many slices lie between them.

    Raises:
        ValueError: no round with a restore, or none without.
    """
    alone = [gap for one in rounds if one.slices is None for gap in one.gaps_s]
    with_one = [one for one in rounds if one.slices is not None]
    beside = [gap for one in with_one for gap in one.gaps_s]
    slices = [one.slices for one in with_one if one.slices is not None]
    full = [seconds for one in slices for seconds in one.full_s]
    steps = [step for one in slices for step in one.rounds]
    slice_s = {"p50": percentile(full, 0.5), "p99": percentile(full, 0.99), "max": max(full)}
    found = {
        name: {
            "p50": percentile(gaps, 0.5),
            "p99": percentile(gaps, 0.99),
            "max": max(gaps),
            "gaps": len(gaps),
        }
        for name, gaps in (("alone", alone), ("beside", beside))
    }
    rise = {name: found["beside"][name] - found["alone"][name] for name in ("p50", "p99")}
    return {
        "alone_s": _rounded(found["alone"]),
        "beside_s": _rounded(found["beside"]),
        "slice_s": _rounded(slice_s | {"count": len(full), "tokens": max(one.tokens for one in slices)}),
        "rise_s": _rounded(rise),
        "rise_slices": {name: round(value / slice_s["p50"], 3) for name, value in rise.items()},
        "round_s": _rounded(
            {
                "p50": percentile((seconds for _, seconds in steps), 0.5),
                "p99": percentile((seconds for _, seconds in steps), 0.99),
                "slices_mean": statistics.mean(count for count, _ in steps),
                "slices_most": max(count for count, _ in steps),
            }
        ),
        "restore_s": round(statistics.median(one.restore_s for one in with_one), 4),
        "load_busy": round(statistics.median(one.both for one in slices), 4),
        "rounds": len(with_one),
    }


def link_row(
    tokens: int,
    link_bytes_s: float,
    link: str,
    recompute_s: Sequence[float],
    restore_s: Sequence[float],
    loaded_bytes: Sequence[int],
) -> Row:
    """Medians of restores over one link, and what they may take: `link` is STEADY, SLOWER or DEAD.

    Where the link changes, the slowest counts.
    """
    recompute = statistics.median(recompute_s)
    steady = link == STEADY
    bound = (
        GOAL_OVER_BEST * recompute + GOAL_OVER_BEST_S
        if steady
        else GOAL_OVER_RECOMPUTE * recompute + DEADLINE_S
    )
    value = statistics.median(restore_s) if steady else max(restore_s)
    return {
        "tokens": tokens,
        "link_MBps": round(link_bytes_s / MB, 2),
        "link": link,
        "recompute_s": round(recompute, 4),
        "restore_s": round(value, 4),
        "over_recompute": round(value / recompute, 3),
        "bound_s": round(bound, 4),
        "met": value <= bound,
        "spread": [round(min(restore_s), 4), round(max(restore_s), 4)],
        "bytes": round(statistics.median(loaded_bytes)),
        "repetitions": len(restore_s),
    }


def goals(itl: Row, links: Sequence[Row]) -> list[Goal]:
    """What issue 4 asks."""
    return [
        Goal(
            "inter-token time beside a restore, rise at p99, slices", itl["rise_slices"]["p99"], GOAL_SLICES
        ),
        *(
            Goal(
                f"restore, {row['tokens']} tokens, {row['link_MBps']:g} MB/s {row['link']}, s",
                row["restore_s"],
                row["bound_s"],
            )
            for row in links
        ),
    ]


def show(itl: Row, links: Sequence[Row]) -> None:
    """The readable tables."""
    print(
        table(
            ("ms", "p50", "p99", "max", "count"),
            [
                ["inter-token, alone", *_ms(itl["alone_s"]), str(itl["alone_s"]["gaps"])],
                ["inter-token, beside", *_ms(itl["beside_s"]), str(itl["beside_s"]["gaps"])],
                ["slice", *_ms(itl["slice_s"]), str(itl["slice_s"]["count"])],
            ],
        )
    )
    print(
        f"slice: {itl['slice_s']['tokens']} tokens, one layer; in a round of the scheduler "
        f"{itl['round_s']['slices_mean']:.2f} of them ({itl['round_s']['slices_most']} at most), p50 "
        f"{1e3 * itl['round_s']['p50']:.1f} ms, p99 {1e3 * itl['round_s']['p99']:.1f} ms together; "
        f"restores of {itl['restore_s']:.2f} s, loads under way in {itl['load_busy']:.0%} of it"
    )
    names = ("tokens", "link_MBps", "link", "recompute_s", "restore_s", "ratio", "bound_s", "bytes", "runs")
    cells = [
        [
            str(row["tokens"]),
            f"{row['link_MBps']:g}",
            row["link"],
            f"{row['recompute_s']:.3f}",
            f"{row['restore_s']:.3f}",
            f"{row['over_recompute']:.2f}",
            f"{row['bound_s']:.3f}",
            f"{row['bytes']:,}",
            str(row["repetitions"]),
        ]
        for row in links
    ]
    print(table(names, cells))
    print(
        table(
            ("goal", "value", "bound", ""),
            [
                [goal.name, f"{goal.value:.3f}", f"<= {goal.bound:.3f}", "met" if goal.met else "MISSED"]
                for goal in goals(itl, links)
            ],
        )
    )


def _ms(row: Row) -> list[str]:
    return [f"{1e3 * row[name]:.1f}" for name in ("p50", "p99", "max")]


def _rounded(row: Row) -> Row:
    return {name: value if isinstance(value, int) else round(value, 5) for name, value in row.items()}

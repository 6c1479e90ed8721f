"""What the runs of bench_restore.py say: the balanced link, rows, goals, tables and a chart."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import table

__all__ = ["Goal", "Run", "balanced_speed", "chart", "goals", "make_row", "show", "speedups"]

RECOMPUTE, LOAD, OURS = "recompute-all", "load-all", "ours"
GOAL_SPEEDUP, GOAL_BUBBLE, GOAL_OVER_PREDICTION = 1.8, 0.08, 1.15
GOAL_OVER_BEST, GOAL_OVER_BEST_S = 1.10, 0.050
MB = 1e6

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One measured resume. `bytes` came over the link; `predicted_s` None: nothing was predicted."""

    ttft_s: float
    bytes: int = 0
    bubble: float = 0.0
    recomputed_tokens: float = 0.0
    predicted_s: float | None = None


@dataclass(frozen=True)
class Goal:
    """A number and what it should be: at least `bound` if `at_least`, else at most that."""

    name: str
    value: float
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether it is so."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def balanced_speed(size_bytes: int, cold_s: float, warm_s: float, latency_s: float = 0.0) -> float:
    """Bytes a second at which loading `size_bytes` takes as long as computing them.

    `cold_s`: TTFT with nothing stored. `warm_s`: TTFT with everything on the device already, which both ways
    have to do at the end.

    Raises:
        ValueError: computing takes no longer than not computing.
    """
    seconds = cold_s - warm_s - latency_s
    if seconds <= 0:
        raise ValueError(f"cold {cold_s:g} s, warm {warm_s:g} s, latency {latency_s:g} s: no link is so fast")
    return size_bytes / seconds


def make_row(
    tokens: int, link_bytes_s: float, method: str, runs: Sequence[Run], *, balanced: bool, stored_bytes: int
) -> Row:
    """Medians of some runs. `over_prediction`: TTFT over the predicted one; None without a prediction."""
    times = [run.ttft_s for run in runs]
    predicted = [run.predicted_s for run in runs if run.predicted_s]
    over = [run.ttft_s / run.predicted_s for run in runs if run.predicted_s]
    return {
        "tokens": tokens,
        "link_MBps": round(link_bytes_s / MB, 2),
        "balanced": balanced,
        "method": method,
        "ttft_s": round(statistics.median(times), 4),
        "bytes": round(statistics.median(run.bytes for run in runs)),
        "bubble": round(statistics.median(run.bubble for run in runs), 4),
        "predicted_s": round(statistics.median(predicted), 4) if predicted else None,
        "over_prediction": round(statistics.median(over), 4) if over else None,
        "recomputed_tokens": round(statistics.median(run.recomputed_tokens for run in runs), 1),
        "stored_bytes": stored_bytes,
        "repetitions": len(runs),
        "spread": [round(min(times), 4), round(max(times), 4)],
    }


def speedups(rows: Iterable[Row]) -> dict[int, float]:
    """At the balanced link, by tokens: TTFT of the better of recompute-all and load-all, over ours."""
    return {
        tokens: round(_best(point) / point[OURS]["ttft_s"], 3)
        for (tokens, _), point in _points(row for row in rows if row["balanced"]).items()
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """What issue 4 asks of these rows."""
    found = [
        Goal(f"speedup at the balanced link, {tokens} tokens", value, GOAL_SPEEDUP, at_least=True)
        for tokens, value in speedups(rows).items()
    ]
    for (tokens, link), point in _points(rows).items():
        if point[OURS]["balanced"]:
            found.append(
                Goal(f"bubble at the balanced link, {tokens} tokens", point[OURS]["bubble"], GOAL_BUBBLE)
            )
        bound = round(GOAL_OVER_BEST * _best(point) + GOAL_OVER_BEST_S, 4)
        found.append(Goal(f"TTFT at {link:g} MB/s, {tokens} tokens, s", point[OURS]["ttft_s"], bound))
    over = [row["over_prediction"] for row in rows if row["method"] == OURS and row["over_prediction"]]
    if over:
        found.append(Goal("TTFT over predicted, median", statistics.median(over), GOAL_OVER_PREDICTION))
    return found


def show(rows: Sequence[Row]) -> None:
    """The readable tables."""
    names = (
        "tokens",
        "link_MBps",
        "method",
        "ttft_s",
        "spread",
        "bytes",
        "recomputed",
        "bubble",
        "predicted_s",
    )
    cells = [
        [
            str(row["tokens"]),
            f"{row['link_MBps']:g}{'*' if row['balanced'] else ''}",
            row["method"],
            f"{row['ttft_s']:.3f}",
            f"{row['spread'][0]:.2f}-{row['spread'][1]:.2f}",
            f"{row['bytes']:,}",
            f"{row['recomputed_tokens']:,.0f}",
            f"{row['bubble']:.1%}",
            "" if row["predicted_s"] is None else f"{row['predicted_s']:.3f}",
        ]
        for row in rows
    ]
    print(table(names, cells))
    print("*: the balanced link, where load-all and recompute-all should cost the same")
    print(
        table(
            ("goal", "value", "bound", ""),
            [
                [
                    goal.name,
                    f"{goal.value:.3f}",
                    f"{'>=' if goal.at_least else '<='} {goal.bound:.3f}",
                    "met" if goal.met else "MISSED",
                ]
                for goal in goals(rows)
            ],
        )
    )


def chart(rows: Sequence[Row], path: Path, title: str) -> None:
    """TTFT by link (both logarithmic), a line for each method and a picture for each number of tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = sorted({row["tokens"] for row in rows})
    figure, pictures = pyplot.subplots(
        1, len(sizes), figsize=(4.6 * len(sizes), 4.4), layout="constrained", squeeze=False
    )
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for axes, tokens in zip(pictures[0], sizes, strict=True):
        of_size = [row for row in rows if row["tokens"] == tokens]
        for method in methods:
            line = sorted(
                (row for row in of_size if row["method"] == method), key=lambda row: row["link_MBps"]
            )
            times = [row["ttft_s"] for row in line]
            low = [row["ttft_s"] - row["spread"][0] for row in line]
            high = [row["spread"][1] - row["ttft_s"] for row in line]
            links = [row["link_MBps"] for row in line]
            style = {
                "marker": "o",
                "markersize": 4,
                "capsize": 2,
                "linewidth": 2.4 if method == OURS else 1.2,
            }
            axes.errorbar(links, times, yerr=[low, high], label=method, **style)
        for link in {row["link_MBps"] for row in of_size if row["balanced"]}:
            axes.axvline(link, color="grey", linestyle=":", linewidth=1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("link, MB/s (dotted: balanced)")
        axes.set_title(f"{tokens:,} tokens", fontsize=10)
    pictures[0][0].set_ylabel("time to first token, s")
    pictures[0][0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _points(rows: Iterable[Row]) -> dict[tuple[int, float], dict[str, Row]]:
    """Rows by method, for each number of tokens and link at which everything needed was measured."""
    points: dict[tuple[int, float], dict[str, Row]] = {}
    for row in rows:
        points.setdefault((row["tokens"], row["link_MBps"]), {})[row["method"]] = row
    return {place: point for place, point in points.items() if {RECOMPUTE, LOAD, OURS} <= point.keys()}


def _best(point: dict[str, Row]) -> float:
    """TTFT of the better of the two that do one thing only."""
    return float(min(point[RECOMPUTE]["ttft_s"], point[LOAD]["ttft_s"]))

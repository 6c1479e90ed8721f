"""What the tiers cost: each against a bare loop over the same bytes, in the same run, in alternation.

The bytes are a session of the demo model as a pause stores it: 12 chunks of 256 tokens, each 30 layers of
393,216 bytes and its header. Each ratio is our speed over that of the baseline (1 is as fast; the median of
the rounds' ratios). What exactly is compared with what is said in tier_ssd.py (fsync and page cache the same
on both sides), tier_redis.py, tier_memory.py and tier_index.py.

    python -m benchmarks.bench_tiers --json

Writes about 0.3 GB a round below --place, removed at the end. `index_bytes_per_chunk` is what a server keeps
in memory for each chunk on its SSD, keyed by the object's key; the chunk's identity, the chained hash of its
last page, is in manifest and header.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compare import Comparison
from benchmarks.harness import stamp, workspace
from benchmarks.report import table
from benchmarks.sample import Sample
from benchmarks.tier_index import IndexResult, measure_index
from benchmarks.tier_memory import LookupResult, measure_lookup, measure_memory
from benchmarks.tier_redis import measure_redis
from benchmarks.tier_ssd import SsdResult, measure_ssd

CHUNKS = 12
INDEX_SESSIONS = 400
_MEMORY_ROUNDS = 4  # for each round of the others: they are short


@dataclass(frozen=True)
class Line:
    """One result. `goal`: at least that if it is a ratio, else less than that; None: no goal, to compare."""

    key: str
    value: float
    goal: float | None = None
    comparison: Comparison | None = None

    @property
    def met(self) -> str:
        """Whether the goal is met."""
        if self.goal is None:
            return ""
        good = self.value >= self.goal if self.comparison is not None else self.value < self.goal
        return "met" if good else "MISSED"

    def row(self) -> list[str]:
        """For the table."""
        if self.comparison is None:
            goal = "" if self.goal is None else f"< {self.goal:,.0f}"
            return [self.key, "", "", f"{self.value:,.0f}", "", goal, self.met]
        low, high = self.comparison.spread
        speeds = [f"{self.comparison.ours_mb_s:,.0f}", f"{self.comparison.baseline_mb_s:,.0f}"]
        goal = "" if self.goal is None else f">= {self.goal:.2f}"
        return [self.key, *speeds, f"{self.value:.3f}", f"{low:.2f}-{high:.2f}", goal, self.met]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--place", type=Path, help="directory for the files (default: the cache directory)")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args()
    start = time.perf_counter()
    machine = stamp()
    sample = Sample(CHUNKS, options.seed)
    with workspace("bench-tiers", options.place) as place:
        lines, notes = measure(place, sample, options.rounds, options.seed)
    show(lines, notes)
    print(f"{time.perf_counter() - start:.0f} s, load {machine['load_average']} before")
    if options.json:
        print(json.dumps(as_json(lines) | notes | {"rounds": options.rounds, **machine}))


def measure(place: Path, sample: Sample, rounds: int, seed: int) -> tuple[list[Line], dict[str, Any]]:
    """One after another, so that none disturbs the next."""
    progress("SSD")
    (place / "ssd").mkdir()
    ssd = measure_ssd(place / "ssd", sample, rounds)
    progress("Redis")
    get, put = measure_redis(place / "redis", sample, rounds)
    progress("memory")
    in_runs, scattered = measure_memory(sample, _MEMORY_ROUNDS * rounds, seed)
    lookup = measure_lookup(2 * rounds)
    progress("index")
    index = measure_index(place / "index", INDEX_SESSIONS)
    lines = [
        *ssd_lines(ssd),
        Line("redis_get_ratio", get.ratio, 0.75, get),
        Line("redis_put_ratio", put.ratio, 0.75, put),
        Line("memory_ratio", in_runs.ratio, 0.80, in_runs),
        Line("memory_scattered_ratio", scattered.ratio, None, scattered),
        *other_lines(lookup, index),
    ]
    notes = {
        "session_bytes": sample.size_bytes,
        "ssd_read_page_cache": "cold on both sides (POSIX_FADV_DONTNEED before each read)",
        "ssd_read_resident_before": round(ssd.cold_resident, 4),
        "ssd_write_fsync": "files and directories before the clock stops, on both sides",
    }
    return lines, notes


def ssd_lines(result: SsdResult) -> list[Line]:
    return [
        Line("ssd_read_ratio", result.cold.ratio, 0.80, result.cold),
        Line("ssd_read_warm_ratio", result.warm.ratio, None, result.warm),
        Line("ssd_write_ratio", result.write.ratio, 0.70, result.write),
    ]


def other_lines(lookup: LookupResult, index: IndexResult) -> list[Line]:
    return [
        Line("lookup_100k_us", lookup.lookup_median_us, 20_000),
        Line("sglang_hashing_100k_us", lookup.hashing_median_us),
        Line("index_bytes_per_chunk", index.ssd, 1_000),
        Line("redis_index_bytes_per_chunk", index.redis),
        Line("redis_recent_shape_bytes", index.shapes),
    ]


def progress(text: str) -> None:
    print(f"measuring: {text}", file=sys.stderr, flush=True)


def show(lines: Sequence[Line], notes: dict[str, Any]) -> None:
    """The readable table."""
    names = ("what", "ours MB/s", "baseline MB/s", "result", "quartiles", "goal", "")
    print(table(names, [line.row() for line in lines]))
    print(
        f"SSD: writes with {notes['ssd_write_fsync']}; reads {notes['ssd_read_page_cache']}, "
        f"{notes['ssd_read_resident_before']:.1%} of the bytes were resident at most"
    )


def as_json(lines: Sequence[Line]) -> dict[str, Any]:
    """The keys with their values; speeds (MB/s) and quartiles apart."""
    compared = {line.key: line.comparison for line in lines if line.comparison is not None}
    return {
        **{line.key: round(line.value, 4 if line.key in compared else 1) for line in lines},
        "mb_s": {
            key.removesuffix("_ratio"): {
                "ours": round(found.ours_mb_s, 1),
                "baseline": round(found.baseline_mb_s, 1),
            }
            for key, found in compared.items()
        },
        "spread": {key: [round(value, 4) for value in found.spread] for key, found in compared.items()},
        "missed": [line.key for line in lines if line.met == "MISSED"],
    }


if __name__ == "__main__":
    main()

"""Time to first token of the next turn: cold, KV still in the radix tree, from memory, from SSD, from Redis.

One server with the krul backend measures cold, radix and memory; then it is killed, and a new one measures
SSD after one unrelated warm-up request of 64 tokens. Same prompts, same flags and same attention backend
for every row. A round is: a history of N random tokens under a session; the next turn (32 new tokens) with
the history in the tree; pause; the next turn again (32 others) from memory; pause. And one cold request of
the same length under another cache salt.

Redis: a third server without an SSD tier pauses the same histories into a Valkey of its own on loopback, and
is killed; a fourth one measures them, after such a warm-up request too.

    python -m benchmarks.bench_resume --json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import (
    Server,
    model_arguments,
    progress,
    resident_share,
    stamp,
    tokens,
    workspace,
    write_config,
    write_redis_config,
)
from benchmarks.redis_server import RedisServer
from benchmarks.report import bars, table

TURN_TOKENS = 32
QUIET_S = 0.5  # before every measured request: what the one before left to do is done by then
COLUMNS = ("cold_s", "radix_s", "memory_s", "ssd_s", "redis_s")
TIERS = ("memory", "ssd", "redis")
GOAL_TOKENS, GOAL_REDIS = 3000, 2.0

Paused = list[tuple[int, str, list[int]]]  # tokens, session, history


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 3000, 6000], help="history tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--plot", type=Path, default=Path(__file__).parent / "results" / "resume.png")
    options = parser.parse_args()
    with workspace("bench-resume") as place:
        times, resident = measure(place, options.sizes, options.rounds, random.Random(options.seed))
    rows = [row(size, times[size]) for size in options.sizes]
    machine = stamp()
    show(rows, resident)
    bars(rows, COLUMNS, options.plot, f"time to first token, {machine['cpu']}, {machine['cores']} cores")
    print(f"plot: {options.plot}")
    if options.json:
        result = {"rows": rows, "rounds": options.rounds, "ssd_page_cache_resident": resident, **machine}
        print(json.dumps(result))


def measure(
    place: Path, sizes: list[int], rounds: int, rng: random.Random
) -> tuple[dict[int, dict[str, list[float]]], float]:
    """Seconds by size and column, and the share of the store in the page cache before the SSD rows."""
    config = write_config(place / "krul.yaml", place / "store")
    times: dict[int, dict[str, list[float]]] = {size: defaultdict(list) for size in sizes}
    paused: Paused = []
    with serving(config, rng) as server:
        for number in range(rounds):
            for size in sizes:
                name = f"bench-{number}-{size}"
                paused.append((size, name, one_round(server, name, size, times[size], rng)))
                progress(f"round {number + 1}/{rounds}: {size} tokens")
    resident = resident_share((place / "store").rglob("*"))
    progress("SSD")
    with serving(config, rng) as server:
        resume_all(server, paused, "ssd", times, rng)
    with RedisServer(place / "redis") as redis:
        config = write_redis_config(place / "redis.yaml", redis.url)
        progress("pausing to Redis")
        with serving(config, rng) as server:
            for _, name, history in paused:
                server.generate(history, session_id=name)
                server.pause(name)
        progress("Redis")
        with serving(config, rng) as server:
            resume_all(server, paused, "redis", times, rng)
    return times, resident


@contextmanager
def serving(config: Path, rng: random.Random) -> Iterator[Server]:
    """A server with the krul backend that has answered one unrelated request; killed at the end."""
    arguments = [*model_arguments(), "--radix-cache-backend", "krul"]
    server = Server(arguments, {"KRUL_CONFIG": str(config)}, config.with_suffix(".log"))
    try:
        server.wait_ready()
        server.generate(tokens(rng, 64), new_tokens=4)
        yield server
    finally:
        server.kill()


def resume_all(
    server: Server, paused: Paused, tier: str, times: dict[int, dict[str, list[float]]], rng: random.Random
) -> None:
    """The next turn of every session, which rests in `tier`."""
    for size, name, history in paused:
        time.sleep(QUIET_S)
        timed = server.generate(history + tokens(rng, TURN_TOKENS), session_id=name)
        require_restored(timed.meta, size, tier)
        times[size][f"{tier}_s"].append(timed.ttft_s)
        times[size][f"{tier}_hold_s"].append(timed.meta["krul"]["held_ms"] / 1000)


def one_round(
    server: Server, name: str, size: int, times: dict[str, list[float]], rng: random.Random
) -> list[int]:
    """Measure cold, radix and memory; leaves the session paused and returns its history."""
    history = tokens(rng, size)
    time.sleep(QUIET_S)
    cold = server.generate(tokens(rng, size + TURN_TOKENS), cache_salt=f"cold-{name}")
    assert cold.meta["cached_tokens"] == 0, cold.meta
    times["cold_s"].append(cold.ttft_s)
    server.generate(history, session_id=name)
    time.sleep(QUIET_S)
    radix = server.generate(history + tokens(rng, TURN_TOKENS), session_id=name)
    assert radix.meta["cached_tokens_details"]["device"] >= size - 16, radix.meta
    times["radix_s"].append(radix.ttft_s)
    server.pause(name)
    time.sleep(QUIET_S)
    memory = server.generate(history + tokens(rng, TURN_TOKENS), session_id=name)
    require_restored(memory.meta, size, "memory")
    times["memory_s"].append(memory.ttft_s)
    server.pause(name)
    return history


def require_restored(meta: dict[str, Any], size: int, tier: str) -> None:
    """A row must be what it says: all full pages of the history came from `tier`."""
    restored, origin = meta["krul"]["restored_tokens"], meta["krul"]["restored_from"]
    if restored < size // 16 * 16 or origin != tier:
        raise RuntimeError(f"{restored} of {size} tokens were restored from {origin}, not {tier}: {meta}")


def row(size: int, times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians and their ratios."""
    medians = {column: statistics.median(times[column]) for column in COLUMNS}
    return {
        "tokens": size,
        **{column: round(value, 4) for column, value in medians.items()},
        "ssd_hold_s": round(statistics.median(times["ssd_hold_s"]), 4),
        "redis_hold_s": round(statistics.median(times["redis_hold_s"]), 4),
        "memory_over_radix": round(medians["memory_s"] / medians["radix_s"], 3),
        "ssd_over_radix": round(medians["ssd_s"] / medians["radix_s"], 3),
        "redis_over_radix": round(medians["redis_s"] / medians["radix_s"], 3),
        "cold_over_memory": round(medians["cold_s"] / medians["memory_s"], 2),
        "cold_over_ssd": round(medians["cold_s"] / medians["ssd_s"], 2),
        "cold_over_redis": round(medians["cold_s"] / medians["redis_s"], 2),
        "spread": {
            column: [round(min(times[column]), 4), round(max(times[column]), 4)] for column in COLUMNS
        },
    }


def show(rows: list[dict[str, Any]], resident: float) -> None:
    """The readable table."""
    ratios = [f"{tier}_over_radix" for tier in TIERS] + [f"cold_over_{tier}" for tier in TIERS]
    names = ("tokens", *COLUMNS, *ratios)
    print(table(names, [[str(entry[name]) for name in names] for entry in rows]))
    for entry in rows:
        if entry["tokens"] == GOAL_TOKENS:
            met = "met" if entry["redis_over_radix"] <= GOAL_REDIS else "MISSED"
            print(f"redis_over_radix at {GOAL_TOKENS} tokens, goal at most {GOAL_REDIS}: {met}")
    print(f"page cache before the SSD rows: {resident:.0%} of the stored bytes resident")


if __name__ == "__main__":
    main()

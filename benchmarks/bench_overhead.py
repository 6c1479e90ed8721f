"""What the krul backend costs while nothing is paused: throughput with it over throughput without it.

Two servers with the same model, flags, platform plugin and attention backend, one of them with
`--radix-cache-backend krul`, get the same chats in alternation (A B B A ...), both with `--sleep-on-idle` so
that the one that rests takes no core. A round is a few chats of several turns each, some at once; every
request names its session, so the write-through works. The ratio is the median of the rounds' ratios.

    python -m benchmarks.bench_overhead --json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Server, model_arguments, stamp, tokens, workspace, write_config
from benchmarks.report import table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--chats", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args()
    with workspace("bench-overhead") as place:
        config = write_config(place / "krul.yaml", place / "store")
        arguments = [*model_arguments(), "--sleep-on-idle"]
        plain = Server(arguments, {}, place / "plain.log")
        ours = None
        try:
            plain.wait_ready()
            ours = Server(
                [*arguments, "--radix-cache-backend", "krul"],
                {"KRUL_CONFIG": str(config)},
                place / "krul.log",
            )
            ours.wait_ready()
            seconds = rounds(plain, ours, options)
        finally:
            plain.kill()
            if ours is not None:
                ours.kill()
    ratios = [without / with_ for without, with_ in seconds]
    ratio = statistics.median(ratios)
    rows = [[f"{w:.2f}", f"{k:.2f}", f"{r:.3f}"] for (w, k), r in zip(seconds, ratios, strict=True)]
    print(table(("plain_s", "krul_s", "throughput_ratio"), rows))
    print(f"median ratio {ratio:.3f} (above 1: krul is faster)")
    if options.json:
        spread = [round(min(ratios), 4), round(max(ratios), 4)]
        print(
            json.dumps(
                {"throughput_ratio": round(ratio, 4), "spread": spread, "rounds": len(ratios), **stamp()}
            )
        )


def rounds(plain: Server, ours: Server, options: argparse.Namespace) -> list[tuple[float, float]]:
    """(seconds without, seconds with) of every round; the order alternates."""
    result = []
    for number in range(-1, options.rounds):  # round -1 warms both up
        seconds = {}
        for server in (plain, ours) if number % 2 else (ours, plain):
            rng = random.Random(options.seed * 1000 + number)  # the same chats for both
            seconds[server.port] = chat_round(server, f"{number}", options, rng)
        if number >= 0:
            result.append((seconds[plain.port], seconds[ours.port]))
        print(f"round {number + 1}/{options.rounds}", file=sys.stderr, flush=True)
    return result


def chat_round(server: Server, name: str, options: argparse.Namespace, rng: random.Random) -> float:
    """Seconds that all chats take."""
    chats = [
        (f"{name}-{index}", [tokens(rng, rng.randrange(100, 500)) for _ in range(options.turns)])
        for index in range(options.chats)
    ]
    start = time.perf_counter()
    with ThreadPoolExecutor(options.concurrency) as pool:
        list(pool.map(lambda chat: one_chat(server, *chat), chats))
    return time.perf_counter() - start


def one_chat(server: Server, session: str, turns: list[list[int]]) -> None:
    """Every turn holds the whole history, as chat frontends send it."""
    history: list[int] = []
    for turn in turns:
        history += turn
        history += server.generate(history, new_tokens=24, session_id=session).output_ids


if __name__ == "__main__":
    main()

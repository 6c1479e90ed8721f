"""What the estimator costs while chats are served, and how well few rows tell what all rows tell.

Cost: two servers with the same flags, one of them with `estimator.enabled: true`, get the same chats in
alternation (A B B A ...), both with `--sleep-on-idle`. `throughput_ratio` is the median over the rounds of
seconds without over seconds with; a round ends with its last answer, rows that still wait are not waited for.
`dropped_share`: of all rows planned in the run, those that were dropped.

Rows: for each number of rows per 1,000 tokens a server estimates the same chats. `spearman`: rank correlation
of the distances of every two layers with those of all rows (1000 per 1,000), mean and least over the chats.
The chats are real ones (see quality_data.py; fetched at run time), or with `--texts docs` our documents, cut
into turns.

    python -m benchmarks.bench_estimator --json
    python -m benchmarks.bench_estimator --quick --texts docs
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_overhead import rounds
from benchmarks.harness import Server, model_arguments, progress, stamp, workspace
from benchmarks.quality_claims import upper
from benchmarks.quality_metrics import spearman
from benchmarks.report import table
from sgl_krul.cli.demo_model import demo_model_path
from sgl_krul.config import cache_home
from sgl_krul.session.catalog import read_manifest
from sgl_krul.session.record import SessionKey
from sgl_krul.similarity import Similarity
from sgl_krul.store.ssd import SsdTier

ALL_ROWS = 1000
RATES = (4, 8, 16, 32, 64)
_DRAIN_S = 600
_ROOT = Path(__file__).resolve().parents[1]

Chats = dict[str, list[list[int]]]
"""By session: the token ids of each turn."""


def main() -> None:
    options = _options()
    result: dict[str, Any] = {}
    with workspace("bench-estimator") as place:
        if not options.no_throughput:
            result["throughput"] = [throughput(place, rate, options) for rate in options.throughput_rates]
            _show(
                result["throughput"],
                ("rows_per_1000", "throughput_ratio", "lo", "hi", "rows", "dropped_share"),
            )
        if not options.no_rows:
            result["rows"] = row_table(place, chats_of(options.texts, options.texts_count), options.rates)
            _show(result["rows"], ("rows_per_1000", "rows", "spearman", "spearman_min", "ir_same"))
    if options.json:
        print(json.dumps({**result, **stamp()}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--chats", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--throughput-rates", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--rates", type=int, nargs="+", default=list(RATES))
    parser.add_argument("--texts", choices=["chats", "docs"], default="chats")
    parser.add_argument("--texts-count", type=int, default=8)
    parser.add_argument("--no-throughput", action="store_true")
    parser.add_argument("--no-rows", action="store_true")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 4 chats at one rate, 3 texts")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.chats, options.throughput_rates, options.texts_count = 2, 4, [8], 3
    return options


def _show(rows: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    print(table(names, [[str(row[name]) for name in names] for row in rows]), flush=True)


# ---- what it costs ----


def throughput(place: Path, rate: int, options: argparse.Namespace) -> dict[str, Any]:
    """The same chats without and with, in alternation."""
    off, on = None, None
    try:
        off = _server(place, "off", "")
        off.wait_ready()
        on = _server(place, f"on{rate}", f"estimator: {{enabled: true, rows_per_1000: {rate}}}")
        on.wait_ready()
        seconds = rounds(off, on, options)
        counts = _counts(on)
    finally:
        for server in (off, on):
            if server is not None:
                server.kill()
    ratios = [without / with_ for without, with_ in seconds]
    planned = counts["rows"] + counts["dropped"]
    return {
        "rows_per_1000": rate,
        "throughput_ratio": round(statistics.median(ratios), 4),
        "lo": round(min(ratios), 4),
        "hi": round(max(ratios), 4),
        "rounds": len(ratios),
        "off_s": round(statistics.median(without for without, _ in seconds), 3),
        "on_s": round(statistics.median(with_ for _, with_ in seconds), 3),
        "rows": counts["rows"],
        "dropped_share": round(counts["dropped"] / planned, 4) if planned else 0.0,
    }


def _server(place: Path, name: str, more: str) -> Server:
    config = place / f"{name}.yaml"
    config.write_text(
        "memory: {capacity_bytes: 2GiB}\n"
        f"ssd: {{path: {place / name}, capacity_bytes: 32GiB, free_space_floor_bytes: 0}}\n{more}\n"
    )
    arguments = [*model_arguments(), "--sleep-on-idle", "--radix-cache-backend", "krul"]
    return Server(arguments, {"KRUL_CONFIG": str(config)}, place / f"{name}.log")


def _counts(server: Server) -> dict[str, int]:
    """Rows of all sessions, once none is under way."""
    deadline = time.monotonic() + _DRAIN_S
    while True:
        shown = [info["similarity"] for info in server.http.get("/v1/sessions").json()["sessions"]]
        estimates = [one for one in shown if one is not None]
        if not any(one["waiting"] for one in estimates):
            return {name: sum(one[name] for one in estimates) for name in ("rows", "dropped")}
        if time.monotonic() > deadline:
            raise TimeoutError(f"rows are still under way after {_DRAIN_S} s")
        time.sleep(0.2)


# ---- what few rows tell ----


def row_table(place: Path, chats: Chats, rates: list[int]) -> list[dict[str, Any]]:
    """One row for each rate, against all rows."""
    every = estimates_of(place, ALL_ROWS, chats)
    table_rows = []
    for rate in rates:
        few = estimates_of(place, rate, chats)
        scores = [
            spearman(upper(few[name].distances()).tolist(), upper(every[name].distances()).tolist())
            for name in chats
        ]
        same = [float(np.mean((few[n].mass() >= 0.5) == (every[n].mass() >= 0.5))) for n in chats]
        table_rows.append(
            {
                "rows_per_1000": rate,
                "rows": sum(one.rows for one in few.values()),
                "spearman": round(statistics.mean(scores), 4),
                "spearman_min": round(min(scores), 4),
                "ir_same": round(statistics.mean(same), 4),
            }
        )
    return table_rows


def estimates_of(place: Path, rate: int, chats: Chats) -> dict[str, Similarity]:
    """What a server that samples so many rows stores of the chats."""
    more = f"estimator: {{enabled: true, rows_per_1000: {rate}, budget_bytes: 4GiB}}"
    server = _server(place, f"rows{rate}", more)
    try:
        server.wait_ready()
        for name, turns in chats.items():
            history: list[int] = []
            for turn in turns:
                history += turn
                history += server.generate(history, new_tokens=16, session_id=name).output_ids
            _counts(server)
            server.pause(name)
        namespace = server.http.get("/v1/sessions").json()["namespace"]
    finally:
        server.kill()
    progress(f"{rate} rows per 1,000 tokens: {len(chats)} chats")
    return _stored(place / f"rows{rate}", namespace, list(chats))


def _stored(store: Path, namespace: str, names: list[str]) -> dict[str, Similarity]:
    tier = SsdTier(store, capacity_bytes=32 << 30, free_space_floor_bytes=0, fsync="never")
    try:
        found = {}
        for name in names:
            manifest = read_manifest(tier, namespace, SessionKey(name).digest)
            if manifest is None:
                raise RuntimeError(f"{name} has no manifest in {store}")
            found[name] = Similarity.decode(manifest.statistics)
        return found
    finally:
        tier.close()


def chats_of(texts: str, count: int) -> Chats:
    """Chats as token ids of the demo model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path(cache_home(os.environ), progress))
    if texts == "docs":
        return _documents(tokenizer, count)
    from benchmarks.quality_data import EVALUATION, pick, sharegpt

    chats: Chats = {}
    for chat in pick(sharegpt(cache_home(os.environ)), "prose", EVALUATION, count, seed=1):
        messages = [f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in chat.history]
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in messages]
        half = (len(ids) + 1) // 2  # two turns: the second continues what the first left
        chats[chat.name] = [list(chain(*ids[:half])), list(chain(*ids[half:]))]
    return chats


def _documents(tokenizer: Any, count: int, tokens: int = 1000) -> Chats:
    text = "\n\n".join((_ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "DESIGN.md"))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = [ids[start : start + tokens] for start in range(0, len(ids) - tokens, tokens)][:count]
    return {f"docs-{i}": [piece[: tokens // 2], piece[tokens // 2 :]] for i, piece in enumerate(pieces)}


if __name__ == "__main__":
    main()

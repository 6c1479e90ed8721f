"""What the similarity statistics cost: attention rows of sampled queries, and their sums, on one thread.

For histories of some lengths and so many rows sampled per 1,000 tokens: seconds per 1,000 tokens of history
for the rows of all layers (`rows_s`), for the sums over them (`sums_s`), and for both through the estimator's
thread, keys gathered from pages as the engine gathers them (`worker_s`). `share` is rows_s + sums_s over
`attention_rows` of every position of the same history in the same process. Random q and k, in the demo
model's shape unless told otherwise. Medians; asserts nothing.

    python -m benchmarks.bench_similarity --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import progress, stamp
from benchmarks.report import table
from sgl_krul.similarity import Estimator, RowJob, Similarity, attention_rows, sampled_positions
from sgl_krul.similarity.rows import row_tiles

PAGE_TOKENS = 16
BUDGET_BYTES = 256 << 20
COLUMNS = ("tokens", "rows_per_1000", "rows", "rows_s", "sums_s", "worker_s", "all_rows_s", "share")


class Shape(NamedTuple):
    """Layers, query heads, KV heads, head dim."""

    layers: int
    heads: int
    kv_heads: int
    dim: int


class Pages:
    """Keys in pages, gathered layer by layer: a KeySource."""

    def __init__(self, k: torch.Tensor) -> None:
        layers, tokens, kv_heads, dim = k.shape
        self._tokens = tokens
        pages = -(-tokens // PAGE_TOKENS)
        self._order = torch.randperm(pages)
        self._pages = torch.zeros((layers, pages, PAGE_TOKENS, kv_heads, dim), dtype=k.dtype)
        padded = torch.zeros((layers, pages * PAGE_TOKENS, kv_heads, dim), dtype=k.dtype)
        padded[:, :tokens] = k
        self._pages[:, self._order] = padded.view(layers, pages, PAGE_TOKENS, kv_heads, dim)

    @contextmanager
    def keys(self, layer: int) -> Iterator[torch.Tensor | None]:
        """See KeySource."""
        yield self._pages[layer].index_select(0, self._order).flatten(0, 1)[: self._tokens]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="per 1,000 tokens")
    parser.add_argument("--shape", type=int, nargs=4, default=[30, 9, 3, 64], help=" ".join(Shape._fields))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of q and k")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape, dtype = Shape(*options.shape), getattr(torch, options.dtype)
    rows = []
    with estimator() as worker:
        for tokens in options.tokens:
            rows += one_length(worker, shape, dtype, tokens, options)
    print(table(COLUMNS, [[text(row[column]) for column in COLUMNS] for row in rows]))
    if options.json:
        print(json.dumps({"rows": rows, "shape": shape._asdict(), "dtype": options.dtype, **stamp()}))


def one_length(
    worker: Estimator, shape: Shape, dtype: torch.dtype, tokens: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A line for every number of rows."""
    q = torch.randn((shape.layers, tokens, shape.heads, shape.dim)).to(dtype)
    k = torch.randn((shape.layers, tokens, shape.kv_heads, shape.dim)).to(dtype)
    pages = Pages(k)
    scale = shape.dim**-0.5
    everything = torch.arange(tokens)
    progress(f"{tokens} tokens: all rows")
    # Layer by layer: n x n rows of one layer are all that is held, and thrown away.
    all_rows_s = timed(lambda: [attention_rows(q[i], k[i], everything, scale) for i in range(len(q))], 1)
    lines = []
    for per_thousand in options.rows:
        progress(f"{tokens} tokens: {per_thousand} rows per 1,000")
        at = torch.from_numpy(sampled_positions("bench", "session", 0, tokens, per_thousand))
        sampled = q[:, at].contiguous()
        rows = torch.empty((shape.layers, len(at), tokens))

        def fill(sampled: torch.Tensor = sampled, at: torch.Tensor = at, rows: torch.Tensor = rows) -> None:
            for layer in range(shape.layers):
                for _ in row_tiles(sampled[layer], k[layer], at, scale, rows[layer]):
                    pass

        rows_s = timed(fill, options.repeats)
        sums_s = timed(lambda rows=rows, at=at: Similarity(shape.layers).add(rows, at), options.repeats)
        job = RowJob(sampled, at, scale, tokens, pages, lambda sums: None)
        worker_s = timed(lambda job=job: through(worker, job), options.repeats)
        per = 1000 / tokens
        lines.append(
            {
                "tokens": tokens,
                "rows_per_1000": per_thousand,
                "rows": len(at),
                "rows_s": rows_s * per,
                "sums_s": sums_s * per,
                "worker_s": worker_s * per,
                "all_rows_s": all_rows_s * per,
                "share": (rows_s + sums_s) / all_rows_s,
            }
        )
    return lines


def through(worker: Estimator, job: RowJob) -> None:
    """A job from submit to its sums."""
    if not worker.submit(job) or not worker.drain(600):
        raise RuntimeError(f"a job of {job.rows} rows was not done: give the estimator more bytes")


def timed(work: Callable[[], object], repeats: int) -> float:
    """Median seconds, after one run to warm up if there are several."""
    seconds = []
    for number in range(repeats + (repeats > 1)):
        start = time.perf_counter()
        work()
        if number or repeats == 1:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


@contextmanager
def estimator() -> Iterator[Estimator]:
    """One as in a server."""
    made = Estimator(BUDGET_BYTES)
    try:
        yield made
    finally:
        made.close()


def text(value: float) -> str:
    """Counts as they are, the rest with four digits."""
    return str(value) if isinstance(value, int) else f"{value:.4f}"


if __name__ == "__main__":
    main()

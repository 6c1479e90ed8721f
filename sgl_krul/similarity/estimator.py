"""Attention rows in the background: sampled queries in, the sums of their rows out.

Krul (arXiv 2507.08045) compares the attention of a prefill on the CPU, beside the serving. Here the queries
of a few sampled positions come with a source of the session's keys; one thread computes the rows of all
layers and adds them to a `Similarity`. Serving never waits for it: what does not fit in the budget, or whose
keys have gone by the time it is its turn, is dropped and counted.

    submit(job): accepted?  ->  keys of layers 0, 1, ... L - 1  ->  rows [L, tile, n]  ->  sums  ->  job.done

Held at once: the queries of the accepted jobs and one set of rows of all layers, both within `budget_bytes`;
beside them three tiles (`tile_bytes`) and the keys of one layer, which are the source's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from threading import Condition

import torch

from sgl_krul.similarity.gram import Similarity, Windows
from sgl_krul.similarity.job import KeySource, RowCounts, RowJob, check_job
from sgl_krul.similarity.rows import TILE_BYTES, row_tiles
from sgl_krul.similarity.single_thread import compute_alone
from sgl_krul.store.workers import Workers

__all__ = ["Estimator", "KeySource", "RowCounts", "RowJob"]

logger = logging.getLogger(__name__)

_ROW_SHARE = 4  # one part in so many of the budget is for the rows under way, the rest for queries that wait


class Estimator:
    """One thread that computes rows. `submit` and `drop` may be called from any thread, and never wait.

    `budget_bytes`: a quarter is for the rows under way, so 16 L n bytes are needed for a context of n tokens;
    three quarters are for queries that wait. `nice`: 0 to 19, how far the thread stands back behind the
    others (Linux). `clock`: seconds.

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        windows: Windows = Windows.relative,
        tile_bytes: int = TILE_BYTES,
        nice: int = 10,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if budget_bytes < 1 or tile_bytes < 1 or not 0 <= nice <= 19:
            raise ValueError(
                f"budget_bytes {budget_bytes}, tile_bytes {tile_bytes}, nice {nice}: "
                "expected at least 1 byte each, and 0 to 19"
            )
        self.budget_bytes = budget_bytes
        self.windows = Windows(windows)
        self._row_bytes = budget_bytes // _ROW_SHARE
        self._tile_bytes = tile_bytes
        self._clock = clock
        self._area = torch.empty(0, dtype=torch.float32)  # rows under way; grows up to _row_bytes
        self._changed = Condition()  # guards what follows
        self._planned = self._seen = self._dropped = 0
        self._waiting_jobs = self._waiting_rows = self._waiting_bytes = 0
        self._busy_s = 0.0
        self._closed = False
        self._workers = Workers("estimator", 1)
        self._workers.submit(compute_alone, nice).result()

    @property
    def counts(self) -> RowCounts:
        """Rows planned, seen and dropped so far."""
        with self._changed:
            return RowCounts(self._planned, self._seen, self._dropped)

    @property
    def pending_rows(self) -> int:
        """Rows accepted and not yet seen or dropped."""
        return self._waiting_rows

    @property
    def busy_s(self) -> float:
        """Seconds the thread has spent on jobs."""
        return self._busy_s

    def submit(self, job: RowJob) -> bool:
        """Take a job. False: refused, its rows count as dropped here and `done` is not called. Never waits.

        Refused is what would pass the budget: too many queries waiting, or a context whose rows are too long.

        Raises:
            ValueError: shapes or positions that do not fit; nothing is counted.
        """
        check_job(job)
        longest = job.longest_bytes
        with self._changed:
            self._planned += job.rows
            room = self.budget_bytes - self._row_bytes - self._waiting_bytes
            if self._closed or longest > self._row_bytes or job.nbytes > room:
                self._dropped += job.rows
                return False
            self._waiting_jobs += 1
            self._waiting_rows += job.rows
            self._waiting_bytes += job.nbytes
            future = self._workers.submit(self._run, job)
        future.add_done_callback(partial(self._if_cancelled, job))
        return True

    def drop(self, rows: int) -> None:
        """Count rows that were planned and could not even be submitted. ValueError for less than 0."""
        if rows < 0:
            raise ValueError(f"{rows} dropped rows: expected 0 or more")
        with self._changed:
            self._planned += rows
            self._dropped += rows

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; False after `timeout_s`. Not for the scheduler's thread."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting_jobs, timeout_s)

    def close(self) -> None:
        """Drop what waits, end what runs after its tile, stop the thread. Repeating it changes nothing."""
        with self._changed:
            self._closed = True
        self._workers.close()

    def check(self) -> list[str]:
        """Problems found; empty when sound."""
        with self._changed:
            problems = []
            if self._planned != self._seen + self._dropped + self._waiting_rows:
                problems.append(
                    f"{self._planned} rows planned, but {self._seen} seen, {self._dropped} dropped, "
                    f"{self._waiting_rows} waiting"
                )
            if not 0 <= self._waiting_bytes <= self.budget_bytes - self._row_bytes:
                problems.append(f"{self._waiting_bytes} bytes wait, the budget is {self.budget_bytes}")
            if 4 * self._area.numel() > self._row_bytes:
                problems.append(f"{4 * self._area.numel()} bytes of rows, {self._row_bytes} allowed")
            return problems

    # -- on the thread --

    def _run(self, job: RowJob) -> None:
        start = self._clock()
        sums = Similarity(job.layers, self.windows)
        try:
            self._estimate(job, sums)
        except Exception:  # a key source or a job that is wrong must not end the thread
            logger.exception("krul: the attention rows of a job failed; they count as dropped")
        self._finish(job, sums, self._clock() - start)

    def _estimate(self, job: RowJob, sums: Similarity) -> None:
        """Add rows to `sums`, tile by tile; returns early when the keys are gone or at `close`."""
        positions: list[int] = job.positions.tolist()
        for begin, end in _row_ranges(positions, self._row_bytes // (4 * job.layers)):
            rows = self._rows(job.layers, end - begin, positions[end - 1] + 1)
            for layer in range(job.layers):
                if not self._one_layer(job, layer, slice(begin, end), rows[layer]):
                    return
            sums.add(rows, job.positions[begin:end], history=job.history)

    def _one_layer(self, job: RowJob, layer: int, tile: slice, out: torch.Tensor) -> bool:
        with job.keys.keys(layer) as keys:
            if keys is None:
                return False
            tiles = row_tiles(
                job.q[layer, tile], keys, job.positions[tile], job.scale, out, tile_bytes=self._tile_bytes
            )
            # A tile takes about a millisecond. Between two of them a thread of Python runs if one wants to,
            # and by `nice` the system gives the core to any other thread that has something to do.
            for _ in tiles:
                if self._closed:
                    return False
        return True

    def _rows(self, layers: int, rows: int, keys: int) -> torch.Tensor:
        """The area for a set of rows, float32 [layers, rows, keys]. Kept: fresh memory costs page faults."""
        count = layers * rows * keys
        if self._area.numel() < count:
            self._area = torch.empty(0)  # let go of the old one first
            self._area = torch.empty(count, dtype=torch.float32)
        return self._area[:count].view(layers, rows, keys)

    def _finish(self, job: RowJob, sums: Similarity, seconds: float) -> None:
        sums.drop(job.rows - sums.rows)
        try:
            job.done(sums)
        except Exception:  # as in _run
            logger.exception("krul: the sums of %d attention rows were not taken", sums.rows)
        with self._changed:
            self._busy_s += seconds
            self._seen += sums.rows
            self._dropped += sums.dropped
            self._waiting_jobs -= 1
            self._waiting_rows -= job.rows
            self._waiting_bytes -= job.nbytes
            self._changed.notify_all()

    def _if_cancelled(self, job: RowJob, future: Future[None]) -> None:
        """Queued at `close`: nobody has run it."""
        if future.cancelled():
            self._finish(job, Similarity(job.layers, self.windows), 0.0)


def _row_ranges(positions: list[int], limit: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of rows that are computed together: with the last one's length, at most `limit` numbers a
    layer, and at least one row. Positions ascend.
    """
    begin = 0
    for index, position in enumerate(positions):
        if index > begin and (index + 1 - begin) * (position + 1) > limit:
            yield begin, index
            begin = index
    if begin < len(positions):
        yield begin, len(positions)

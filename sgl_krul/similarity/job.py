"""What the estimator works on: sampled queries of a session, and where its keys are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from sgl_krul.similarity.gram import Similarity

__all__ = ["KeySource", "RowCounts", "RowJob", "check_job"]


class KeySource(Protocol):
    """The keys of one session, as they are when asked for."""

    def keys(self, layer: int) -> AbstractContextManager[torch.Tensor | None]:
        """Keys [n, G, D] of the tokens 0..n-1 of the session in `layer`, on the CPU, of any float dtype.

        n is more than the job's last position. The tensor is read inside the context only. None: the keys
        are gone, and the job's remaining rows are dropped. Called on the estimator's thread, in layer order;
        for a job of many rows once more from layer 0 on for every set of rows.
        """
        ...


@dataclass(frozen=True, eq=False)
class RowJob:
    """Sampled queries of one session. The estimator owns the tensors from `submit` on.

    q: [L, r, H, D], CPU, any float dtype, rotated as the keys are. positions: int64 [r], ascending.
    scale: of q.k before the softmax. history: tokens of the session by now (for absolute windows), more than
    the last position. done: gets the sums of these rows, `dropped` in it being those that were not computed;
    called exactly once for an accepted job, on the estimator's thread or in `close`; `deque.append` will do.
    """

    q: torch.Tensor
    positions: torch.Tensor
    scale: float
    history: int
    keys: KeySource
    done: Callable[[Similarity], None]

    @property
    def rows(self) -> int:
        """r."""
        return int(self.positions.shape[0])

    @property
    def layers(self) -> int:
        """L."""
        return int(self.q.shape[0])

    @property
    def nbytes(self) -> int:
        """What waits in memory."""
        return int(self.q.nbytes + self.positions.nbytes)

    @property
    def longest_bytes(self) -> int:
        """Bytes of the longest row of all layers: the least that has to be held at once."""
        return 4 * self.layers * (int(self.positions[-1]) + 1) if self.rows else 0


class RowCounts(NamedTuple):
    """Rows so far: `planned` by whoever samples; of them `seen` in sums, `dropped`, the rest under way."""

    planned: int
    seen: int
    dropped: int

    @property
    def dropped_share(self) -> float:
        """Dropped rows of all planned ones; 0 when none was planned."""
        return self.dropped / self.planned if self.planned else 0.0


def check_job(job: RowJob) -> None:
    """ValueError naming what does not fit."""
    q, positions = job.q, job.positions
    if q.ndim != 4 or 0 in (q.shape[0], *q.shape[2:]) or not q.is_floating_point() or q.device.type != "cpu":
        raise ValueError(
            f"q {q.dtype} {tuple(q.shape)} on {q.device}: expected floats [L, r, H, D] on the CPU"
        )
    if positions.dtype != torch.int64 or tuple(positions.shape) != (q.shape[1],):
        raise ValueError(
            f"positions {positions.dtype} {tuple(positions.shape)}: expected int64 [{q.shape[1]}]"
        )
    if not job.rows:
        return
    if int(positions[0]) < 0 or bool((positions.diff() <= 0).any()):
        raise ValueError("positions: expected them to ascend from 0 or more, none twice")
    if job.history <= int(positions[-1]):
        raise ValueError(f"history {job.history}: expected more than the last position, {int(positions[-1])}")

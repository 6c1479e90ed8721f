"""Sampled rows of q on their way out of SGLang's forwards.

Three functions of SGLang are wrapped where the estimator is on (`engine.hooks.probe_hooks`): the one that
makes a forward's batch, where it is known which request and which positions a row belongs to; the forward;
and the attention of each layer, where q is at hand, after the rotation. In a forward without a sampled
position its layers pay one look.

    ForwardBatch.init_new -> which rows -> ModelRunner.forward ( AttentionBackend.forward ) x L -> collect

Only rows that a forward computes exist: of a prefix that came from the radix tree, from another session or
from a restore there are none. (A restore that recomputes runs under an attention of its own, which is not
wrapped.) Under CUDA graphs no Python runs in a decode step: its sampled rows are missed, and count so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_krul.engine.forward_rows import ForwardRows, QueryShape, Span, spans_of
from sgl_krul.session.private import caller_key
from sgl_krul.session.record import SessionKey

__all__ = ["Positions", "RowProbe", "Sampled", "Sampler"]

Positions = NDArray[np.int64]
Sampler = Callable[[str, int, int], Positions]
"""From a session's digest, start and end: the sampled positions of [start, end), ascending."""

_MARK = "krul_rows"
_AHEAD = 4096  # tokens that are looked through at once for the next sampled one
_NONE: Positions = np.empty(0, np.int64)


@dataclass
class _Piece:
    """The rows [begin, end) of a forward: those of one request."""

    positions: Positions
    rows: ForwardRows
    begin: int

    @property
    def end(self) -> int:
        return self.begin + len(self.positions)


@dataclass
class _Watched:
    """One request of a session. No position of [clear_from, clear_to) is sampled."""

    digest: str
    pieces: list[_Piece] = field(default_factory=list)
    missed: list[Positions] = field(default_factory=list)
    clear_from: int = 0
    clear_to: int = 0

    def sampled(self, sampler: Sampler, start: int, end: int) -> Positions:
        """The sampled positions of [start, end)."""
        if self.clear_from <= start and end <= self.clear_to:
            return _NONE
        found = sampler(self.digest, start, max(end, start + _AHEAD))
        count = int(np.searchsorted(found, end))
        self.clear_from = end
        self.clear_to = int(found[count]) if count < len(found) else max(end, start + _AHEAD)
        return found[:count]


@dataclass(frozen=True)
class Sampled:
    """What the forwards of one request gave. `positions` int64 [r], ascending, none twice; `q` [L, r, H, D]
    on the CPU (None when r is 0); `missed`: sampled positions that were computed and whose rows got lost.
    """

    positions: Positions
    q: torch.Tensor | None
    missed: Positions

    def between(self, start: int, end: int) -> Sampled:
        """Only the positions of [start, end)."""
        first, last = np.searchsorted(self.positions, (start, end)).tolist()
        missed = self.missed[(start <= self.missed) & (self.missed < end)]
        if self.q is None or first == last:
            return Sampled(_NONE, None, missed)
        whole = last - first == len(self.positions)
        return Sampled(
            self.positions[first:last], self.q if whole else self.q[:, first:last].contiguous(), missed
        )


class RowProbe:
    """Watches the requests of sessions. All methods are for the scheduler's thread.

    It holds rows of at most `budget_bytes`. For new ones those of the request seen longest ago give way (one
    that was aborted tells nobody); what gave way, or found no room, is missed.
    """

    def __init__(
        self, sampler: Sampler, shape: QueryShape, device: torch.device, budget_bytes: int, max_requests: int
    ) -> None:
        self._sampler = sampler
        self._shape = shape
        self._device = device
        self._budget_bytes = budget_bytes
        self._max_requests = max_requests
        self._held_bytes = 0
        self._current: ForwardRows | None = None  # what the forward that runs now is to give
        self._watched: OrderedDict[str, _Watched] = OrderedDict()  # seen longest ago first

    @property
    def held_bytes(self) -> int:
        """Rows held now, in bytes."""
        return self._held_bytes

    # ---- hooks ----

    def after_init_new(self, forward_batch: Any, _cls: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
        """After `ForwardBatch.init_new(batch, ...)`: mark the batch if it has sampled positions."""
        rows = self.plan(spans_of(batch.reqs, forward_batch))
        if rows is not None:
            setattr(forward_batch, _MARK, rows)

    def around_forward(
        self, original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Around `ModelRunner.forward`: layers see copies of the batch, without the mark."""
        self._current = getattr(forward_batch, _MARK, None)
        try:
            return original(runner, forward_batch, *args, **kwargs)
        finally:
            self._current = None

    def around_attention(
        self,
        original: Callable[..., Any],
        backend: Any,
        q: torch.Tensor,
        k: Any,
        v: Any,
        layer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Around `AttentionBackend.forward`."""
        if self._current is not None:
            self._current.take(layer.layer_id, q)
        return original(backend, q, k, v, layer, *args, **kwargs)

    # ---- what they do ----

    def plan(self, spans: Iterator[Span]) -> ForwardRows | None:
        """What to take from a forward with these requests; None for nothing."""
        wanted: list[tuple[_Watched, Positions]] = []
        rows: list[int] = []
        for span in spans:
            watched = self._watch(span.request)
            positions = watched.sampled(self._sampler, span.start, span.end)
            if len(positions):
                self._watched.move_to_end(span.request.rid)
                wanted.append((watched, positions))
                rows += (positions + (span.row - span.start)).tolist()
        if not wanted:
            return None
        if not self._make_room(len(rows) * self._shape.row_bytes, {id(watched) for watched, _ in wanted}):
            for watched, positions in wanted:
                watched.missed.append(positions)
            return None
        forward = ForwardRows(rows, self._shape, self._device)
        self._held_bytes += forward.nbytes
        begin = 0
        for watched, positions in wanted:
            watched.pieces.append(_Piece(positions, forward, begin))
            begin += len(positions)
        forward.users = len(wanted)
        return forward

    def collect(self, rid: str) -> Sampled | None:
        """The rows of a request that has ended, which is not watched any more; None when there are none."""
        watched = self._watched.pop(rid, None)
        if watched is None:
            return None
        positions: list[Positions] = [_NONE]
        parts: list[torch.Tensor] = []
        for piece in watched.pieces:
            part = piece.rows.part(piece.begin, piece.end)
            if part is None:
                watched.missed.append(piece.positions)
            else:
                positions.append(piece.positions)
                parts.append(part)
        self._release(watched)
        return _joined(positions, parts, watched.missed)

    def clear(self) -> None:
        """Forget all requests: the weights changed."""
        for watched in self._watched.values():
            self._release(watched)
        self._watched.clear()

    def check(self) -> list[str]:
        """Problems found; empty when sound."""
        forwards = {id(p.rows): p.rows for w in self._watched.values() for p in w.pieces}
        held = sum(rows.nbytes for rows in forwards.values())
        problems = []
        if held != self._held_bytes:
            problems.append(f"{held} bytes of rows are held, {self._held_bytes} are counted")
        if self._held_bytes > self._budget_bytes:
            problems.append(f"{self._held_bytes} bytes of rows are held, the budget is {self._budget_bytes}")
        return problems

    # ---- inside ----

    def _watch(self, request: Any) -> _Watched:
        watched = self._watched.get(request.rid)
        if watched is None:
            key = SessionKey(request.session_id, request.cache_salt or None, request.extra_key or None)
            key, _ = caller_key(key)
            watched = self._watched[request.rid] = _Watched(key.digest)
            while len(self._watched) > self._max_requests:
                self._release(self._watched.popitem(last=False)[1])
        return watched

    def _make_room(self, size: int, wanted: set[int]) -> bool:
        """Whether `size` more bytes fit, after rows of requests that are not `wanted` gave way."""
        if size > self._budget_bytes:
            return False
        for watched in list(self._watched.values()):
            if self._held_bytes + size <= self._budget_bytes:
                break
            if id(watched) not in wanted:
                watched.missed += [piece.positions for piece in watched.pieces]
                self._release(watched)
        return self._held_bytes + size <= self._budget_bytes

    def _release(self, watched: _Watched) -> None:
        """Let its rows go. Those of a forward are freed by the last request that shares them."""
        for piece in watched.pieces:
            piece.rows.users -= 1
            if not piece.rows.users:
                self._held_bytes -= piece.rows.nbytes
        watched.pieces = []


def _joined(positions: list[Positions], parts: list[torch.Tensor], missed: list[Positions]) -> Sampled:
    """Pieces as one, in the order of positions. A request that was sent back computes some of them twice."""
    found, first = np.unique(np.concatenate(positions), return_index=True)
    lost = np.setdiff1d(np.concatenate([_NONE, *missed]), found)
    if not parts:
        return Sampled(_NONE, None, lost)
    with torch.inference_mode(False):
        q = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if len(first) != q.shape[1] or not np.array_equal(first, np.arange(len(first))):
            q = q.index_select(1, torch.from_numpy(first))
    return Sampled(found, q, lost)

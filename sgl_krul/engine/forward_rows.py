"""What is taken from one forward of SGLang: which rows of q, and the rows themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["ForwardRows", "QueryShape", "Span", "spans_of"]


class QueryShape(NamedTuple):
    """The queries of one token: all layers, the heads of this rank."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of the queries of one token, all layers."""
        itemsize: int = self.dtype.itemsize
        return self.layers * self.heads * self.head_dim * itemsize


class Span(NamedTuple):
    """Tokens [start, end) of a request of a session, in a forward: they are the rows of q from `row` on."""

    request: Any
    start: int
    end: int
    row: int


def spans_of(requests: Sequence[Any], batch: Any) -> Iterator[Span]:
    """The requests of sessions in SGLang's ForwardBatch. Host values only: nothing waits for the device."""
    if batch.forward_mode.is_decode():
        lengths = batch.seq_lens_cpu
        if lengths is None:
            return
        for row, (request, length) in enumerate(zip(requests, lengths.tolist(), strict=False)):
            if request.session_id is not None:
                yield Span(request, length - 1, length, row)
    elif batch.forward_mode.is_extend() and batch.extend_seq_lens_cpu is not None:
        row = 0
        for request, start, new in zip(
            requests, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=False
        ):
            if request.session_id is not None:
                yield Span(request, start, start + new, row)
            row += new


class ForwardRows:
    """The sampled rows of one forward: [L, r, H, D], on the host once all layers were seen."""

    def __init__(self, rows: Sequence[int], shape: QueryShape, device: torch.device) -> None:
        """`rows`: which rows of q. They lie on `device` until the last layer."""
        self._shape = shape
        self._last = max(rows)
        self._index = torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
        with torch.inference_mode(False):  # read by another thread, outside of it
            self._rows = torch.empty(
                (shape.layers, len(rows), shape.heads, shape.head_dim), dtype=shape.dtype, device=device
            )
        self._missing = (1 << shape.layers) - 1
        self._landed: Any = None
        self.nbytes = len(rows) * shape.row_bytes
        self.users = 0

    def take(self, layer: int, q: torch.Tensor) -> None:
        """q [tokens, H * D] or [tokens, H, D] of one layer. Of another shape: the rows stay missing."""
        size = self._shape.heads * self._shape.head_dim
        if q.numel() % size or q.numel() // size <= self._last or layer >= self._shape.layers:
            return
        rows = q.reshape(-1, self._shape.heads, self._shape.head_dim)
        self._rows[layer].copy_(rows.index_select(0, self._index))
        self._missing &= ~(1 << layer)
        if not self._missing and self._rows.device.type != "cpu":
            self._to_host()

    def part(self, begin: int, end: int) -> torch.Tensor | None:
        """Rows [L, end - begin, H, D] on the CPU, contiguous; None when a layer is missing or under way."""
        if self._missing or (self._landed is not None and not self._landed.query()):
            return None
        return self._rows[:, begin:end].contiguous()

    def _to_host(self) -> None:
        """Leave the device. The stream goes on; `part` looks whether the copy is done."""
        with torch.inference_mode(False):
            host = torch.empty(self._rows.shape, dtype=self._rows.dtype, pin_memory=True)
        host.copy_(self._rows, non_blocking=True)
        self._landed = torch.cuda.Event()
        self._landed.record()
        self._rows = host

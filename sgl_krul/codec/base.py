"""How one layer of one chunk is stored: the modes, and what a codec of pages does."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from sgl_krul.store import Buffer

__all__ = ["Mode", "SegmentCodec"]


class Mode(StrEnum):
    """The mode of a segment. Of these `lowrank`, `patch` and `predicted` have no codec yet."""

    recompute = "recompute"
    raw = "raw"
    quantized = "quantized"
    shared = "shared"
    lowrank = "lowrank"
    patch = "patch"
    predicted = "predicted"


class SegmentCodec(Protocol):
    """Turns the page segments of one layer of one chunk into a stored segment, and back.

    A page segment is K [page_size, kv_heads, head_dim], then V [page_size, kv_heads, v_head_dim], C order, in
    the layout's dtype. `pages` are buffers of one or more whole page segments, in token order.
    """

    @property
    def mode(self) -> Mode:
        """The mode this codec stores."""
        ...

    def encode(self, pages: Sequence[Buffer]) -> list[memoryview]:
        """The stored segment, as buffers to be written one after another. They may be `pages` themselves.

        Raises:
            ValueError: a buffer that is not whole page segments.
        """
        ...

    def landing(self, pages: Sequence[memoryview], length: int) -> list[memoryview]:
        """The buffers a stored segment of `length` bytes is to be read into. They may be `pages` themselves.

        Raises:
            ValueError: a buffer that is not whole page segments, or is read-only.
            Corrupt: "length": no segment of these pages has so many bytes.
        """
        ...

    def decode(self, landed: Sequence[memoryview], pages: Sequence[memoryview]) -> None:
        """Fill `pages` from what was read and verified. Both as at `landing`."""
        ...

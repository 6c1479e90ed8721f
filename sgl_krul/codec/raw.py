"""The raw mode: a stored segment is its page segments one after another. Nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sgl_krul.codec.base import Mode
from sgl_krul.errors import Corrupt
from sgl_krul.store import Buffer, Slots, runs
from sgl_krul.store.tier import byte_view, writable_view

__all__ = ["RawCodec", "page_rows"]


def page_rows(layer: NDArray[np.uint8], slots: Slots) -> list[memoryview]:
    """Views of the rows `slots` (int64 [n]) of one layer, uint8 [slots, page segment bytes], in that order.

    One view for each run of neighbouring slots, so a chunk in neighbouring slots is one buffer.
    """
    if not layer.flags.c_contiguous:
        raise ValueError(f"layer of strides {layer.strides}: expected C-contiguous")
    order = np.arange(slots.size, dtype=np.int64)
    return [layer[first : first + count].reshape(-1).data for first, _, count in runs(slots, order)]


class RawCodec:
    """A SegmentCodec that reads and writes page slots directly."""

    mode = Mode.raw

    def __init__(self, page_segment_bytes: int) -> None:
        if page_segment_bytes < 1:
            raise ValueError(f"page_segment_bytes {page_segment_bytes}: expected at least 1")
        self.page_segment_bytes = page_segment_bytes

    def encode(self, pages: Sequence[Buffer]) -> list[memoryview]:
        """See SegmentCodec: the pages themselves."""
        return [self._whole(byte_view(page)) for page in pages]

    def landing(self, pages: Sequence[memoryview], length: int) -> list[memoryview]:
        """See SegmentCodec: the pages themselves."""
        views = [self._whole(writable_view(page)) for page in pages]
        expected = sum(view.nbytes for view in views)
        if length != expected:
            raise Corrupt("length", f"raw segment of {length} bytes, its pages take {expected}")
        return views

    def decode(self, landed: Sequence[memoryview], pages: Sequence[memoryview]) -> None:
        """See SegmentCodec: nothing is left to do."""

    def _whole(self, view: memoryview) -> memoryview:
        if view.nbytes % self.page_segment_bytes:
            raise ValueError(
                f"buffer of {view.nbytes} bytes: expected a multiple of {self.page_segment_bytes}"
            )
        return view

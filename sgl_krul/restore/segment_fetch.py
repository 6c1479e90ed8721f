"""Segments from a copy of a chunk to rows of pages in staging: read, verified, decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Event, Lock

import numpy as np
from numpy.typing import NDArray

from sgl_krul.codec.base import Mode, SegmentCodec
from sgl_krul.codec.frame import SegmentEntry, verify_segment
from sgl_krul.codec.raw import RawCodec
from sgl_krul.errors import Corrupt, StoreError
from sgl_krul.restore.chunk_reader import READ_ERRORS, ChunkCopy, ChunkReader
from sgl_krul.restore.load_log import LoadLog
from sgl_krul.restore.pace import Pace
from sgl_krul.restore.staging import Staging

__all__ = ["SegmentFetch", "stored_modes"]


def stored_modes() -> frozenset[Mode]:
    """The modes of segments that have bytes and that can be read."""
    return frozenset({Mode.raw})


class SegmentFetch:
    """Reads for one restore. Thread safe. `page_bytes`: of one layer of a page."""

    def __init__(
        self, reader: ChunkReader, page_bytes: int, staging: Staging, pace: Pace, log: LoadLog
    ) -> None:
        self._reader = reader
        self._page_bytes = page_bytes
        self._staging = staging
        self._pace = pace
        self._log = log
        self._codecs: Mapping[Mode, SegmentCodec] = {Mode.raw: RawCodec(page_bytes)}
        self._lock = Lock()
        self._staged_bytes = 0

    @contextmanager
    def room(self, layers: int, pages: int, cancelled: Event) -> Iterator[NDArray[np.uint8] | None]:
        """Staging uint8 [layers, pages, page_bytes], given back at the end; None: cancelled meanwhile."""
        size = layers * pages * self._page_bytes
        buffer = self._staging.take(size, cancelled)
        if buffer is None:
            yield None
            return
        with self._lock:
            self._staged_bytes += size
        try:
            yield buffer.data.reshape(layers, pages, self._page_bytes)
        finally:
            buffer.give()
            with self._lock:
                self._staged_bytes -= size

    def entries(self, copy: ChunkCopy, first_layer: int, layers: int) -> Sequence[SegmentEntry]:
        """The segments of some layers.

        Raises:
            Corrupt: "identity": the copy does not have them.
        """
        entries = copy.header.segments[first_layer : first_layer + layers]
        for layer, entry in enumerate(entries, first_layer):
            if entry.mode not in self._codecs:
                raise Corrupt("identity", f"layer {layer} is wanted, and in mode {entry.mode.value} here")
        return entries

    def read(
        self, copy: ChunkCopy, entries: Sequence[SegmentEntry], rows: NDArray[np.uint8]
    ) -> Callable[[], None]:
        """Fetch neighbouring segments in one read. What is returned verifies and decodes them into `rows`
        (one for each, as from `room`); before that they hold anything.

        Raises:
            Corrupt, Missing, StoreUnavailable: also what is returned raises Corrupt.
        """
        pages = [layer.reshape(-1).data for layer in rows]
        landed = [
            self._codecs[entry.mode].landing([page], entry.length)
            for entry, page in zip(entries, pages, strict=True)
        ]
        size = sum(entry.length for entry in entries)
        self._read_into(copy, entries[0].offset, size, [view for views in landed for view in views])

        def finish() -> None:
            for entry, views in zip(entries, landed, strict=True):
                verify_segment(entry, views)
            for entry, views, page in zip(entries, landed, pages, strict=True):
                self._codecs[entry.mode].decode(views, [page])

        return finish

    def check(self) -> list[str]:
        """Problems found once nothing is under way."""
        with self._lock:
            return [f"loader: {self._staged_bytes} bytes of staging are held"] if self._staged_bytes else []

    def _read_into(self, copy: ChunkCopy, offset: int, size: int, into: Sequence[memoryview]) -> None:
        began = self._reader.clock()
        problem: StoreError | None = None
        try:
            with self._log.transfer(copy.tier.name, size) as timed:
                copy.tier.read_segments(copy.ref.key, offset, into)
        except READ_ERRORS as error:
            problem = error
            raise
        finally:
            self._reader.outcome(copy.tier, problem, began)
        self._pace.answered(copy.header_s)
        self._pace.fetched(size, timed.seconds)

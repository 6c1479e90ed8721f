"""Segments from a copy of a chunk to rows of pages in staging: read, verified, decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Lock

import numpy as np
from numpy.typing import NDArray

from sgl_krul.codec.base import Mode
from sgl_krul.codec.coder import ChunkCoder
from sgl_krul.codec.frame import verify_segment
from sgl_krul.codec.raw import RawCodec
from sgl_krul.errors import Corrupt, StoreError
from sgl_krul.restore.chunk_reader import READ_ERRORS, ChunkCopy, ChunkReader
from sgl_krul.restore.load_log import LoadLog
from sgl_krul.restore.pace import Pace
from sgl_krul.restore.staging import Staging
from sgl_krul.session.record import ChunkRef

__all__ = ["STORED_MODES", "Room", "SegmentFetch"]

STORED_MODES = frozenset({Mode.raw, Mode.recompute, Mode.quantized, Mode.shared})
"""The modes of segments that a chunk may have."""


@dataclass(frozen=True)
class Room:
    """Staging for some layers of a chunk. `rows`: by layer, uint8 [pages, page_bytes], the pages as they will
    be. `landing`: by layer, the bytes of the stored segments that it takes, those of layers that others are
    coded on included; of a raw layer the rows themselves. `first_token`: of the chunk, in its session.
    """

    first_token: int
    rows: Mapping[int, NDArray[np.uint8]]
    landing: Mapping[int, memoryview]

    @property
    def fetched_bytes(self) -> int:
        """What is read from the tier."""
        return sum(view.nbytes for view in self.landing.values())


class SegmentFetch:
    """Reads for one restore. Thread safe. `page_bytes`: of one layer of a page. `coders`: by plan id."""

    def __init__(
        self,
        reader: ChunkReader,
        page_bytes: int,
        staging: Staging,
        pace: Pace,
        log: LoadLog,
        coders: Mapping[str, ChunkCoder],
    ) -> None:
        self._reader = reader
        self._page_bytes = page_bytes
        self._staging = staging
        self._pace = pace
        self._log = log
        self._raw = RawCodec(page_bytes)
        self._coders = coders
        self._lock = Lock()
        self._staged_bytes = 0

    def bases(self, ref: ChunkRef, first_layer: int, layers: int) -> list[int]:
        """Other layers whose segments it takes to decode these: they are fetched with them."""
        coder = self._coders.get(ref.plan_id)
        if coder is None:
            return []
        wanted = range(first_layer, first_layer + layers)
        return sorted({base for layer in wanted for base in coder.needs(layer)} - set(wanted))

    @contextmanager
    def room(
        self, copy: ChunkCopy, layers: Sequence[int], first_token: int, cancelled: Event
    ) -> Iterator[Room | None]:
        """Staging for these layers, given back at the end; None: cancelled meanwhile.

        Raises:
            Corrupt: the copy does not have them, or not as its plan says.
        """
        needed = self._needed(copy, layers, first_token)
        pages = copy.ref.pages
        row_bytes = pages * self._page_bytes
        coded = [layer for layer in needed if self._is_coded(copy, layer) or layer not in layers]
        size = len(layers) * row_bytes + sum(copy.header.segments[layer].length for layer in coded)
        buffer = self._staging.take(size, cancelled)
        if buffer is None:
            yield None
            return
        with self._lock:
            self._staged_bytes += size
        try:
            whole = buffer.data
            rows = whole[: len(layers) * row_bytes].reshape(len(layers), pages, self._page_bytes)
            by_layer = dict(zip(layers, rows, strict=True))
            landing: dict[int, memoryview] = {}
            end = len(layers) * row_bytes
            for layer in needed:
                if layer in coded:
                    start, end = end, end + copy.header.segments[layer].length
                    landing[layer] = whole[start:end].data
                else:
                    landing[layer] = by_layer[layer].reshape(-1).data
            yield Room(first_token, by_layer, landing)
        finally:
            buffer.give()
            with self._lock:
                self._staged_bytes -= size

    def read(self, copy: ChunkCopy, room: Room) -> Callable[[], None]:
        """Fetch the segments of a room, neighbours in one read. What is returned verifies and decodes them
        into its rows; before that they hold anything.

        Raises:
            Corrupt, Missing, StoreUnavailable: also what is returned raises Corrupt.
        """
        for run in _runs(sorted(room.landing)):
            views = [room.landing[layer] for layer in run]
            for layer, view in zip(run, views, strict=True):
                if not self._is_coded(copy, layer):
                    self._raw.landing([view], copy.header.segments[layer].length)
            self._read_into(copy, copy.header.segments[run[0]].offset, views)

        def finish() -> None:
            coded = [layer for layer in room.rows if self._is_coded(copy, layer)]
            for layer in room.rows.keys() - coded:
                verify_segment(copy.header.segments[layer], [room.landing[layer]])
            coder = self._coders.get(copy.ref.plan_id)
            if coder is not None and coded:  # which verifies all that it reads
                out = {layer: [room.rows[layer].reshape(-1).data] for layer in coded}
                coder.decode_group(coded, copy.header, room.landing, room.first_token, out)

        return finish

    def check(self) -> list[str]:
        """Problems found once nothing is under way."""
        with self._lock:
            return [f"loader: {self._staged_bytes} bytes of staging are held"] if self._staged_bytes else []

    def _is_coded(self, copy: ChunkCopy, layer: int) -> bool:
        return copy.header.segments[layer].mode is not Mode.raw

    def _needed(self, copy: ChunkCopy, layers: Sequence[int], first_token: int) -> list[int]:
        """These layers, and those that they are coded on."""
        coder = self._coders.get(copy.ref.plan_id)
        if coder is not None:
            coder.check_header(copy.header, first_token)
        for layer in layers:
            mode = copy.header.segments[layer].mode
            if mode is Mode.recompute or (coder is None and mode is not Mode.raw):
                raise Corrupt("identity", f"layer {layer} is wanted, and in mode {mode.value} here")
        if coder is None:
            return sorted(layers)
        return sorted({needed for layer in layers for needed in coder.needs(layer, copy.header)})

    def _read_into(self, copy: ChunkCopy, offset: int, into: Sequence[memoryview]) -> None:
        size = sum(view.nbytes for view in into)
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


def _runs(layers: Sequence[int]) -> list[list[int]]:
    """Ascending layers, neighbours together."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs

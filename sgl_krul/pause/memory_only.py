"""Pause to the memory tier: the session's pages stay there, for the time being or until the server ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from sgl_krul.errors import StoreFull
from sgl_krul.pause.pipeline import PageSource, Segments, Snapshot
from sgl_krul.session.record import page_key
from sgl_krul.store.memory import MemoryTier, PinnedPages, runs

__all__ = ["MemoryPages", "keep_in_memory"]


class MemoryPages:
    """A PageSource over the memory tier: for a session that rests there and is written out later."""

    def __init__(self, memory: MemoryTier, keys: Sequence[str]) -> None:
        self._memory = memory
        self._keys = keys

    @contextmanager
    def segments(self, first_page: int, pages: int) -> Iterator[Segments | None]:
        """See PageSource. None when one of the pages has been evicted."""
        pinned = self._memory.pin(self._keys[first_page : first_page + pages])
        if pinned is None:
            yield None
            return
        with pinned:
            spans = runs(pinned.slots, np.arange(len(pinned.slots)))
            yield [
                [self._memory.layer(index)[slot : slot + count].reshape(-1).data for slot, _, count in spans]
                for index in range(self._memory.layers)
            ]


def keep_in_memory(snapshot: Snapshot, source: PageSource, memory: MemoryTier, chunk_tokens: int) -> int:
    """Pause without a slower tier: copy what the write-through has not brought to memory yet.

    Where memory is too small for all, the leading pages stay: they are held until the last one is in place,
    and age like any others from then on. Returns the leading tokens that are there.

    Raises:
        StoreFull: not even the first page found room.
    """
    keys = [page_key(snapshot.namespace, page_hash) for page_hash in snapshot.names_in_memory]
    step = max(1, chunk_tokens // snapshot.layout.page_size)
    held: list[PinnedPages] = []
    first = 0
    try:
        while first < len(keys):
            batch = keys[first : first + step]
            pinned = memory.pin(batch)
            if pinned is None:
                with source.segments(first, len(batch)) as segments:
                    if segments is None:
                        break
                    pinned = _copy_pages(batch, segments, memory)
            if pinned is not None:
                held.append(pinned)
                first += len(batch)
            elif step > 1:
                step = 1  # no room for a whole batch: the rest page by page
            elif first == 0:
                raise StoreFull("memory tier: no slot for the session's first page; give it more bytes")
            else:
                break
    finally:
        for pinned in reversed(held):  # the last page is to be evicted first
            pinned.release()
    return first * snapshot.layout.page_size


def _copy_pages(batch: list[str], segments: Segments, memory: MemoryTier) -> PinnedPages | None:
    """Copy those of the pages that memory has not; pins them all, or returns None when there is no room."""
    reservation = memory.reserve(batch)
    if reservation is None:
        return None
    wanted = set(reservation.keys)
    rows = [row for row, key in enumerate(batch) if key in wanted]
    try:
        for index, layer in enumerate(segments):
            pages = np.frombuffer(b"".join(layer), np.uint8).reshape(len(batch), -1)
            memory.layer(index)[reservation.slots] = pages[rows]
    except BaseException:
        memory.abandon(reservation)
        raise
    memory.publish(reservation)
    return memory.pin(batch)

"""Where a pause finds a session's pages: in memory where the write-through put them, else on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np

from sgl_krul.engine.pool import KvPages, Rows
from sgl_krul.store.memory import MemoryTier, PinnedPages, runs

__all__ = ["DevicePageSource"]

Segments = Sequence[Sequence[memoryview]]


class DevicePageSource:
    """A PageSource over the memory tier and locked device pages.

    `keys` are the memory keys of all the session's pages; the first `len(device_pages)` of them also lie on
    the device, locked in the tree, until `revoke()`.
    """

    def __init__(
        self,
        pages: KvPages,
        memory: MemoryTier,
        keys: Sequence[str],
        device_pages: np.ndarray[Any, np.dtype[np.int64]],
    ) -> None:
        self._pages = pages
        self._memory = memory
        self._keys = tuple(keys)
        self._device_pages = device_pages
        self._lock = Lock()

    def revoke(self) -> None:
        """The device pages are about to be freed: only memory counts now. Waits for a copy under way."""
        with self._lock:
            self._device_pages = self._device_pages[:0]

    @contextmanager
    def segments(self, first_page: int, pages: int) -> Iterator[Segments | None]:
        """See PageSource."""
        keys = self._keys[first_page : first_page + pages]
        pinned = self._memory.pin(keys)
        if pinned is not None:
            with pinned:
                yield self._from_memory(pinned)
            return
        staging = self._from_device(keys, first_page)
        yield None if staging is None else [[layer.data.cast("B")] for layer in staging]

    def _from_memory(self, pinned: PinnedPages) -> Segments:
        """Zero copy: runs of rows of the arena."""
        moves = runs(pinned.slots, pinned.slots)
        layers = range(self._pages.layout.layers)
        return [
            [self._memory.layer(layer)[row : row + n].data.cast("B") for row, _, n in moves]
            for layer in layers
        ]

    def _from_device(
        self, keys: tuple[str, ...], first_page: int
    ) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """A copy of the pages [layers, pages, bytes], mixing memory and device where need be."""
        layout = self._pages.layout
        staging = np.empty((layout.layers, len(keys), layout.page_segment_bytes), np.uint8)
        missing = [i for i, key in enumerate(keys) if not self._copy_from_memory(key, staging[:, i])]
        with self._lock:
            if missing and first_page + missing[-1] >= len(self._device_pages):
                return None
            rows = np.array(missing, np.int64)
            moves = runs(rows, self._device_pages[first_page + rows])
            for layer in range(layout.layers):
                self._pages.to_host(layer, staging[layer], moves)
        return staging

    def _copy_from_memory(self, key: str, target: Rows) -> bool:
        """Copy one page of [layers, bytes], if memory has it."""
        pinned = self._memory.pin((key,))
        if pinned is None:
            return False
        with pinned:
            slot = int(pinned.slots[0])
            for layer in range(self._pages.layout.layers):
                target[layer] = self._memory.layer(layer)[slot]
        return True

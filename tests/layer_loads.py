"""Pages in memory, a pool to bring them to, and ways to look at and into the copies between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_krul.store.memory import MemoryTier, PinnedPages, runs
from sgl_krul.store.workers import Workers
from tests.pools import KvPages, fill_rows, make_pool, page_bytes, pages_of
from tests.sessions import free_slots

__all__ = ["LAYERS", "SLOTS", "LoadBench", "Watched", "open_bench"]

LAYERS = 3
SLOTS = 8
LOADER = "krul-test-loader"
Moves = list[tuple[int, int, int]]


class Watched(KvPages):
    """Pages that call `on_copy(layer, is the loader's thread)` before each copy to the device."""

    on_copy: Callable[[int, bool], None] = staticmethod(lambda layer, loader: None)

    def to_device(self, layer: int, rows: Any, moves: Sequence[tuple[int, int, int]]) -> None:
        """See KvPages."""
        self.on_copy(layer, threading.current_thread().name.startswith(LOADER))
        super().to_device(layer, rows, moves)


@dataclass
class LoadBench:
    """Eight pages in memory, and a device to bring them to."""

    pool: Any
    pages: Watched
    memory: MemoryTier
    rows: list[Any]
    workers: Workers

    def pin(self, keys: Sequence[str]) -> PinnedPages:
        """Pin pages."""
        pinned = self.memory.pin(keys)
        assert pinned is not None
        return pinned

    def part(self, keys: Sequence[str], targets: Sequence[int]) -> tuple[PinnedPages, Moves]:
        """One request's part of a load: pages (by key) and the device pages they go to."""
        pinned = self.pin(keys)
        return pinned, runs(pinned.slots, np.array(targets, np.int64))

    def landed(self, layer: int, keys: Sequence[str], targets: Sequence[int]) -> bool:
        """Whether one layer of the pages is on the device."""
        wanted = [self.rows[layer][int(key)].tobytes() for key in keys]
        return wanted == [page_bytes(self.pool, layer, target) for target in targets]


@contextmanager
def open_bench() -> Iterator[LoadBench]:
    """A bench; at the end nothing may be pinned or broken."""
    pool = make_pool()
    _, layout = pages_of(pool)
    memory = MemoryTier(layout.layers, layout.page_segment_bytes, SLOTS * layout.page_bytes)
    rows = fill_rows(layout, SLOTS)
    for page in range(SLOTS):
        memory.put(str(page), b"", [layer[page].tobytes() for layer in rows])
    workers = Workers("test-loader", 1)
    yield LoadBench(pool, Watched(pool, layout), memory, rows, workers)
    workers.close()
    assert memory.check() == []
    assert free_slots(memory) == SLOTS

"""Device -> memory: pages of active sessions are copied to the memory tier as soon as the tree has them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from sgl_krul.engine.pool import KvPages
from sgl_krul.store.memory import MemoryTier, runs
from sgl_krul.store.workers import Workers

__all__ = ["WriteThrough", "device_pages"]

logger = logging.getLogger(__name__)


def device_pages(device_indices: torch.Tensor, page_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Page numbers (int64 [n]) of token slots (int64 [n * page_size]) that come in whole pages."""
    pages: np.ndarray[Any, np.dtype[np.int64]] = (device_indices[::page_size] // page_size).cpu().numpy()
    return pages


class WriteThrough:
    """Copies whole tree nodes; SGLang keeps a node locked until its copy is reported done.

    Pages that are in memory already are not copied again. When memory has no slot to give, the node is left
    out: it stays on the device, and a pause will read it from there.
    """

    def __init__(self, pages: KvPages, memory: MemoryTier) -> None:
        self._pages = pages
        self._memory = memory
        self._workers = Workers("write-through", 1)
        self._running: deque[Future[bool]] = deque()

    def submit(self, keys: Sequence[str], device_indices: torch.Tensor, ready: Sequence[Any]) -> None:
        """Queue a copy of the pages `keys`, which lie in the token slots `device_indices`.

        `ready` are device events after which the slots hold the KV (none on a CPU).
        """
        pages = device_pages(device_indices, self._pages.layout.page_size)
        self._running.append(self._workers.submit(self._copy, list(keys), pages, ready))

    @property
    def completed(self) -> int:
        """Leading copies that are done: they are taken in the order they came."""
        count = 0
        for future in self._running:
            if not future.done():
                break
            count += 1
        return count

    @property
    def pending(self) -> int:
        """Copies submitted and not yet taken."""
        return len(self._running)

    def take_completed(self) -> bool:
        """Take the oldest copy; True when all its pages are in memory."""
        future = self._running.popleft()
        error = future.exception()
        if error is not None:
            logger.error("write-through failed, the pages stay on the device only: %r", error)
            return False
        return future.result()

    def barrier(self) -> None:
        """Wait, on a worker of somebody else, until every copy submitted so far is done."""
        self._workers.submit(lambda: None).result()

    def quiesce(self) -> None:
        """Wait for all copies and forget them."""
        while self._running:
            self.take_completed()

    def close(self) -> None:
        """Stop the thread."""
        self._workers.close()
        self._running.clear()

    def _copy(
        self, keys: list[str], pages: np.ndarray[Any, np.dtype[np.int64]], ready: Sequence[Any]
    ) -> bool:
        for event in ready:
            event.synchronize()
        reservation = self._memory.reserve(keys)
        if reservation is None:
            return False
        try:
            page_of = dict(zip(keys, pages.tolist(), strict=True))
            sources = np.array([page_of[key] for key in reservation.keys], np.int64)
            moves = runs(reservation.slots, sources)
            for layer in range(self._pages.layout.layers):
                self._pages.to_host(layer, self._memory.layer(layer), moves)
        except BaseException:
            self._memory.abandon(reservation)
            raise
        self._memory.publish(reservation)
        return True

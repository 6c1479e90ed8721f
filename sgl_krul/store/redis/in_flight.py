"""How many bytes a tier may have on their way, and how many it counts as stored."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sgl_krul.errors import StoreFull, StoreUnavailable
from sgl_krul.store.tier import TierUsage

__all__ = ["InFlight", "StoredCount"]


class InFlight:
    """A bound on the bytes on their way at one moment. First come, first served: large ones get in too."""

    def __init__(self, place: str, capacity_bytes: int) -> None:
        self._place = place
        self._capacity_bytes = capacity_bytes
        self._changed = threading.Condition()
        self._taken = 0
        self._queue: deque[object] = deque()

    @contextmanager
    def taken(self, size_bytes: int, timeout_s: float) -> Iterator[None]:
        """Have `size_bytes` on their way inside. More than the bound goes alone.

        Raises:
            StoreUnavailable: no room for `timeout_s`.
        """
        share = min(size_bytes, self._capacity_bytes)
        me = object()
        with self._changed:
            self._queue.append(me)
            fits = self._changed.wait_for(
                lambda: self._queue[0] is me and self._taken + share <= self._capacity_bytes, timeout_s
            )
            self._queue.remove(me)
            self._changed.notify_all()
            if not fits:
                raise StoreUnavailable(
                    f"{self._place}: {self._taken} of {self._capacity_bytes} bytes on their way for "
                    f"{timeout_s:g} s, no room for {size_bytes}; raise redis.max_in_flight_bytes"
                )
            self._taken += share
        try:
            yield
        finally:
            with self._changed:
                self._taken -= share
                self._changed.notify_all()


class StoredCount:
    """Bytes and objects of a place that others write too, as far as one server knows."""

    def __init__(self, place: str, capacity_bytes: int) -> None:
        self._place = place
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._bytes = 0
        self._objects = 0
        self._pending_bytes = 0

    def add(self, size_bytes: int, objects: int) -> None:
        """Count a change."""
        with self._lock:
            self._bytes += size_bytes
            self._objects += objects

    def set(self, size_bytes: int, objects: int) -> None:
        """Start anew from what was found."""
        with self._lock:
            self._bytes, self._objects = size_bytes, objects

    def usage(self) -> TierUsage:
        """Never negative, though what others had put may have been deleted before it was counted."""
        with self._lock:
            return TierUsage(max(self._bytes, 0), max(self._objects, 0), self._capacity_bytes)

    @contextmanager
    def claimed(self, size_bytes: int) -> Iterator[Callable[[int, int], None]]:
        """Hold `size_bytes` while they are written. Call what it gives with the change, once they are.

        Raises:
            StoreFull: over the cap.
        """
        claim = [size_bytes]

        def settle(change_bytes: int, objects: int) -> None:
            with self._lock:
                self._pending_bytes -= claim.pop()
                self._bytes += change_bytes
                self._objects += objects

        with self._lock:
            taken = max(self._bytes, 0) + self._pending_bytes
            if taken + size_bytes > self._capacity_bytes:
                raise StoreFull(
                    f"{self._place}: {size_bytes} bytes on top of {taken} pass the cap of "
                    f"{self._capacity_bytes}; delete sessions or raise redis.capacity_bytes"
                )
            self._pending_bytes += size_bytes
        try:
            yield settle
        finally:
            if claim:
                settle(0, 0)

"""What a tier on disk knows without asking the disk: its objects, their bytes, and the bytes on their way."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sgl_krul.errors import StoreFull
from sgl_krul.store.tier import Entry, TierUsage

__all__ = ["ObjectIndex"]


class ObjectIndex:
    """The entries by key. Its lock is never held over I/O, so no call waits for a disk."""

    def __init__(self, place: str, capacity_bytes: int) -> None:
        self._place = place  # for messages
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._bytes = 0
        self._pending_bytes = 0

    def set(self, key: str, entry: Entry | None) -> None:
        """Record an object, or with None that there is none."""
        with self._lock:
            old = self._entries.pop(key, None)
            self._bytes -= old.bytes if old else 0
            if entry is not None:
                self._entries[key] = entry
                self._bytes += entry.bytes

    def has(self, key: str) -> bool:
        """Whether an object is recorded."""
        with self._lock:
            return key in self._entries

    def select(self, prefix: str) -> list[Entry]:
        """The entries whose key starts with `prefix`, by key."""
        with self._lock:
            found = [entry for key, entry in self._entries.items() if key.startswith(prefix)]
        return sorted(found)

    def usage(self) -> TierUsage:
        """Bytes and objects recorded; what is on its way is not among them."""
        with self._lock:
            return TierUsage(self._bytes, len(self._entries), self._capacity_bytes)

    @contextmanager
    def claimed(self, total: int, spare_bytes: int | None) -> Iterator[None]:
        """Hold `total` bytes while they are written.

        `spare_bytes`: how many bytes the place may still take, not knowing of those on their way (None: no
        bound).

        Raises:
            StoreFull: over the cap, or more than is to spare.
        """
        with self._lock:
            taken = self._bytes + self._pending_bytes
            if taken + total > self._capacity_bytes:
                raise StoreFull(
                    f"{self._place}: {total} bytes on top of {taken} pass the cap of {self._capacity_bytes}; "
                    "delete sessions or raise it"
                )
            if spare_bytes is not None and self._pending_bytes + total > spare_bytes:
                raise StoreFull(
                    f"{self._place}: {total} bytes, and {max(spare_bytes, 0)} above the free-space floor; "
                    "free some space or lower it"
                )
            self._pending_bytes += total
        try:
            yield
        finally:
            with self._lock:
                self._pending_bytes -= total

    def problems(self, found: Sequence[Entry]) -> list[str]:
        """How the entries differ from what was found on disk."""
        on_disk = {entry.key: entry for entry in found}
        with self._lock:
            problems = [
                f"{key}: {on_disk.get(key)} on disk, {self._entries.get(key)} recorded"
                for key in sorted(on_disk.keys() | self._entries.keys())
                if on_disk.get(key) != self._entries.get(key)
            ]
            total = sum(entry.bytes for entry in self._entries.values())
            if self._bytes != total:
                problems.append(f"{self._bytes} bytes counted, the objects have {total}")
        return problems

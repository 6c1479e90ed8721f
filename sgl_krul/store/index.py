"""What a tier on disk knows without asking the disk: its objects, their bytes, and the bytes on their way."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from sgl_krul.errors import StoreFull
from sgl_krul.store.tier import Entry, TierUsage

__all__ = ["ObjectIndex"]


class _Directory:
    """Objects and directories by the last part of their path: a path that many objects share is kept once."""

    __slots__ = ("directories", "objects")

    def __init__(self) -> None:
        self.directories: dict[str, _Directory] = {}
        self.objects: dict[str, tuple[int, float]] = {}  # bytes, modified

    def entries(self, path: str) -> Iterator[Entry]:
        """Everything here and below, in no order. `path`: of this directory, with its slash."""
        for name, (size, modified) in self.objects.items():
            yield Entry(path + name, size, modified)
        for name, directory in self.directories.items():
            yield from directory.entries(f"{path}{name}/")


class ObjectIndex:
    """The entries by key. Its lock is never held over I/O, so no call waits for a disk."""

    def __init__(self, place: str, capacity_bytes: int) -> None:
        self._place = place  # for messages
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._top = _Directory()
        self._bytes = 0
        self._objects = 0
        self._pending_bytes = 0

    def set(self, key: str, entry: Entry | None) -> None:
        """Record an object, or with None that there is none."""
        with self._lock:
            self._drop(key)
            if entry is not None:
                self._add(entry)

    def reset(self, entries: Iterable[Entry]) -> None:
        """Record these objects and no others. What is on its way stays so."""
        with self._lock:
            self._top = _Directory()
            self._bytes = self._objects = 0
            for entry in entries:
                self._add(entry)

    def has(self, key: str) -> bool:
        """Whether an object is recorded."""
        directory, _, name = key.rpartition("/")
        with self._lock:
            found = self._find(directory)
            return found is not None and name in found.objects

    def select(self, prefix: str) -> list[Entry]:
        """The entries whose key starts with `prefix`, by key. Costs what is found, and one directory."""
        path, slash, start = prefix.rpartition("/")
        found: list[Entry] = []
        with self._lock:
            directory = self._find(path) if path or not slash else None
            if directory is None:
                return found
            if not start:
                found.extend(directory.entries(prefix))
            else:
                found.extend(
                    Entry(path + slash + name, size, modified)
                    for name, (size, modified) in directory.objects.items()
                    if name.startswith(start)
                )
                for name, below in directory.directories.items():
                    if name.startswith(start):
                        found.extend(below.entries(f"{path}{slash}{name}/"))
        return sorted(found)

    def usage(self) -> TierUsage:
        """Bytes and objects recorded; what is on its way is not among them."""
        with self._lock:
            return TierUsage(self._bytes, self._objects, self._capacity_bytes)

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
            recorded = {entry.key: entry for entry in self._top.entries("")}
            counted = (self._bytes, self._objects)
        problems = [
            f"{key}: {on_disk.get(key)} on disk, {recorded.get(key)} recorded"
            for key in sorted(on_disk.keys() | recorded.keys())
            if on_disk.get(key) != recorded.get(key)
        ]
        total = (sum(entry.bytes for entry in recorded.values()), len(recorded))
        if counted != total:
            problems.append(f"{counted} bytes and objects counted, there are {total}")
        return problems

    # -- inside; the caller has the lock --

    def _find(self, path: str) -> _Directory | None:
        """The directory of that path ("": the top), or None when nothing is in it."""
        directory: _Directory | None = self._top
        for name in path.split("/") if path else ():
            if directory is None:
                return None
            directory = directory.directories.get(name)
        return directory

    def _add(self, entry: Entry) -> None:
        path, _, name = entry.key.rpartition("/")
        directory = self._top
        for part in path.split("/") if path else ():
            below = directory.directories.get(part)
            if below is None:
                below = directory.directories[part] = _Directory()
            directory = below
        directory.objects[name] = (entry.bytes, entry.modified)
        self._bytes += entry.bytes
        self._objects += 1

    def _drop(self, key: str) -> None:
        """Take an object out, and the directories that are empty then."""
        path, _, name = key.rpartition("/")
        above: list[tuple[_Directory, str]] = []
        directory = self._top
        for part in path.split("/") if path else ():
            below = directory.directories.get(part)
            if below is None:
                return
            above.append((directory, part))
            directory = below
        old = directory.objects.pop(name, None)
        if old is None:
            return
        self._bytes -= old[0]
        self._objects -= 1
        for parent, part in reversed(above):
            if directory.objects or directory.directories:
                break
            del parent.directories[part]
            directory = parent

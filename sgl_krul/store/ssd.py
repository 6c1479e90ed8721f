"""The SSD tier: one file an object, written beside its place and renamed into it.

`_names_lock` is held over the short calls that change names (mkdir, create, rename, unlink, rmdir), so no
directory is removed as empty while a file is being made in it. Bytes are read, written and fsynced without
it, and `usage` and `scan` ask the index only.

When the root directory was removed, the next call that stumbles over it makes and locks it anew, and the
objects of before are misses.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, get_args

from sgl_krul.errors import ConfigError, Corrupt, Missing, StoreUnavailable
from sgl_krul.store.index import ObjectIndex
from sgl_krul.store.object_file import head_bytes, read_at, read_head, write_all
from sgl_krul.store.root import TEMPORARY, FsyncLedger, RootDirectory, as_store_error
from sgl_krul.store.tier import Buffer, Entry, TierUsage, byte_view, check_header, check_key, writable_view
from sgl_krul.store.write_budget import WriteBudget

__all__ = ["FsyncPolicy", "SsdTier"]

FsyncPolicy = Literal["always", "commit", "never"]


class SsdTier:
    """A Tier of files below `root`, for one server at a time.

    `capacity_bytes` bounds the files, heads included; while an object is replaced, the old and the new one
    count. `free_space_floor_bytes` of the file system are left free (0: no floor). `daily_write_bytes` bounds
    what is written in one day of `now` (unix seconds), in UTC (0: no bound). `fsync`: "always" file and
    directory at each put; "commit" at a put of a key whose last part is "manifest", everything written below
    its directory first; "never". When the fsync of a directory fails after the rename, put raises and the new
    object is in place.

    Raises:
        ConfigError: a setting out of range.
        StoreUnavailable: `root` cannot be made, read or written, or another server has it for `lock_wait_s`.
    """

    name = "ssd"

    def __init__(
        self,
        root: Path,
        *,
        capacity_bytes: int,
        free_space_floor_bytes: int,
        fsync: FsyncPolicy,
        lock_wait_s: float = 5.0,
        daily_write_bytes: int = 0,
        now: Callable[[], float] = time.time,
    ) -> None:
        if capacity_bytes < 1:
            raise ConfigError(f"capacity_bytes {capacity_bytes}: expected at least 1")
        if free_space_floor_bytes < 0:
            raise ConfigError(f"free_space_floor_bytes {free_space_floor_bytes}: expected 0 or more")
        if fsync not in get_args(FsyncPolicy):
            raise ConfigError(f"fsync {fsync!r}: expected one of {get_args(FsyncPolicy)}")
        self.root = root
        self.free_space_floor_bytes = free_space_floor_bytes
        self.fsync = fsync
        self._index = ObjectIndex(str(root), capacity_bytes)
        self._budget = WriteBudget(daily_write_bytes, str(root), now)
        self._names_lock = threading.Lock()
        self._idle = threading.Condition()
        self._running = 0  # calls that use the directory
        self._closed = False
        self._counter = itertools.count()
        self._temporaries: set[str] = set()  # of puts under way
        self._ledger = FsyncLedger()
        self._openings = 1  # of the directory
        self._directory = RootDirectory(root, lock_wait_s)
        try:
            with self._using(""):
                self._index.reset(_tidied(self._directory))
                self._budget.load(self._directory)
        except BaseException:
            self.close()
            raise

    # -- Tier --

    def put(self, key: str, header: bytes, segments: Sequence[Buffer]) -> int:
        """See Tier."""
        check_key(key)
        body = [byte_view(segment) for segment in segments]
        head = head_bytes(check_header(header), sum(view.nbytes for view in body))
        views = [memoryview(head), *body]
        total = sum(view.nbytes for view in views)
        with self._using(key):
            openings = self._openings
            try:
                self._put(key, views, total)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE) or not self._reopened(openings):
                    raise
                self._put(key, views, total)
        return total

    def read_header(self, key: str) -> bytes | None:
        """See Tier."""
        with self._opened(key) as fd:
            return None if fd is None else read_head(fd, key).header

    def read_segments(self, key: str, offset: int, into: Sequence[memoryview]) -> None:
        """See Tier."""
        if offset < 0:
            raise ValueError(f"offset {offset}: expected 0 or more")
        views = [writable_view(buffer) for buffer in into]
        end = offset + sum(view.nbytes for view in views)
        with self._opened(key) as fd:
            if fd is None:
                raise Missing(f"{self.root / key} has gone")
            head = read_head(fd, key)
            if end > head.body_length:
                raise Corrupt("length", f"{key}: byte {end} asked for, the body has {head.body_length}")
            read_at(fd, views, head.body_start + offset, key)

    def delete(self, key: str) -> bool:
        """See Tier. Directories that are empty then go too."""
        check_key(key)
        with self._using(key):
            with self._names_lock:
                try:
                    os.unlink(key, dir_fd=self._directory.fd)
                except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    self._index.set(key, None)
                    return False
                self._index.set(key, None)
                self._ledger.files.discard(key)
                changed = self._directory.prune(key)
            if self._is_commit(key):
                self._directory.sync(changed)
        return True

    def scan(self, prefix: str) -> Iterator[Entry]:
        """See Tier. What another hand adds or removes is seen at the next construction or read."""
        return iter(self._index.select(prefix))

    def usage(self) -> TierUsage:
        """See Tier."""
        return self._index.usage()

    @property
    def write_left_bytes(self) -> int | None:
        """What may still be written today; None without a daily budget. Never waits for I/O."""
        return self._budget.left_bytes

    # -- upkeep --

    def sweep_temporaries(self) -> int:
        """Remove what killed servers left half written (the constructor does it too). Returns how many."""
        with self._using(""), self._names_lock:
            dead = [name for name in self._directory.walk().temporaries if name not in self._temporaries]
            self._directory.remove_temporaries(dead)
        return len(dead)

    def check(self) -> list[str]:
        """Problems found; empty when sound. Reads the head of every object; others may wait."""
        with self._using(""):
            openings = self._openings
            problems = self._problems()
            return self._problems() if problems and self._reopened(openings) else problems

    def _problems(self) -> list[str]:
        with self._names_lock:
            found = self._directory.walk()
            problems = [f"{name}: left over" for name in found.temporaries if name not in self._temporaries]
            problems += self._index.problems(found.objects)
            for entry in found.objects:
                fd = self._directory.open(entry.key)
                if fd is None:
                    continue
                try:
                    read_head(fd, entry.key)
                except Corrupt as error:
                    problems.append(str(error))
                finally:
                    os.close(fd)
        return problems

    def close(self) -> None:
        """Wait for the calls under way, then let the directory and its lock go. Once is enough."""
        with self._idle:
            if self._closed:
                return
            self._closed = True
            self._idle.wait_for(lambda: self._running == 0)
        self._budget.save()
        self._directory.close()

    def __enter__(self) -> SsdTier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside --

    @contextmanager
    def _using(self, key: str) -> Iterator[None]:
        """The directory stays open inside; an OSError leaves as a StoreError that names the path."""
        with self._idle:
            if self._closed:
                raise StoreUnavailable(f"{self.root}: this tier is closed; make a new one")
            self._running += 1
        try:
            yield
        except OSError as error:
            raise as_store_error(error, self.root / key) from error
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

    @contextmanager
    def _opened(self, key: str) -> Iterator[int | None]:
        """A descriptor to read `key`, or None when it has gone."""
        check_key(key)
        with self._using(key):
            fd = self._open(key)
            try:
                yield fd
            finally:
                if fd is not None:
                    os.close(fd)

    def _open(self, key: str) -> int | None:
        openings = self._openings
        fd = self._directory.open(key)
        if fd is None and self._index.has(key):  # another hand removed it, or the whole root
            self._reopened(openings)
            with self._names_lock:
                fd = self._directory.open(key)  # a put may just have made it
                if fd is None:
                    self._index.set(key, None)
        return fd

    def _reopened(self, openings: int) -> bool:
        """Whether the directory is another than after so many openings; opens it anew if it has gone.

        Raises:
            StoreUnavailable: it has gone and cannot be made, or another server has it now.
        """
        with self._names_lock:
            if self._openings == openings and self._directory.gone():
                fresh = RootDirectory(self.root, lock_wait_s=0.0)
                try:
                    objects = _tidied(fresh)
                except BaseException:
                    fresh.close()
                    raise
                self._directory.take_over(fresh)
                self._index.reset(objects)
                self._ledger.clear()
                self._budget.lost()
                self._openings += 1
            return self._openings != openings

    def _spare_bytes(self) -> int | None:
        """Free bytes of the file system above the floor; None without one: the write itself finds out."""
        if not self.free_space_floor_bytes:
            return None
        status = os.fstatvfs(self._directory.fd)
        return status.f_bavail * status.f_frsize - self.free_space_floor_bytes

    def _is_commit(self, key: str) -> bool:
        return self.fsync == "always" or (self.fsync == "commit" and key.rpartition("/")[2] == "manifest")

    def _put(self, key: str, views: Sequence[memoryview], total: int) -> None:
        with self._index.claimed(total, self._spare_bytes()):
            self._budget.claim(total)
            try:
                temporary, fd = self._create(os.path.dirname(key), key)
            except BaseException:
                self._budget.give_back(total)
                raise
            self._write(key, temporary, fd, views, total)

    def _write(self, key: str, temporary: str, fd: int, views: Sequence[memoryview], total: int) -> None:
        directory = os.path.dirname(key)
        commit = self._is_commit(key)
        try:
            modified = self._fill(fd, views, total, fsync=commit)
            if commit:
                self._sync_written(directory)
            with self._names_lock:
                os.replace(temporary, key, src_dir_fd=self._directory.fd, dst_dir_fd=self._directory.fd)
                self._temporaries.discard(temporary)
                self._index.set(key, Entry(key, total, modified))
                if self.fsync == "commit" and not commit:
                    self._ledger.files.add(key)
                    self._ledger.directories.add(directory)
        except BaseException:
            self._remove(temporary)
            raise
        if commit:
            self._directory.sync(directory)

    def _create(self, directory: str, key: str) -> tuple[str, int]:
        """Make a temporary file in `directory`, where `key` is to be. Returns its name and a descriptor."""
        unique = f"{TEMPORARY}{os.getpid()}-{next(self._counter)}-{secrets.token_hex(4)}"
        temporary = f"{directory}/{unique}" if directory else unique
        with self._names_lock:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            try:
                changed = self._directory.make_parents(key)
                fd = os.open(temporary, flags, 0o600, dir_fd=self._directory.fd)
            except OSError:
                self._directory.prune(key)
                raise
            if self.fsync != "never":
                self._ledger.directories.update(changed)
            self._temporaries.add(temporary)
        return temporary, fd

    def _fill(self, fd: int, views: Sequence[memoryview], total: int, *, fsync: bool) -> float:
        """Write and close the file. Returns its modification time, unix seconds."""
        try:
            write_all(fd, views)
            status = os.fstat(fd)
            if status.st_size != total:
                raise StoreUnavailable(
                    f"{self.root}: a file has {status.st_size} bytes, {total} were written"
                )
            if fsync:
                os.fsync(fd)
        finally:
            os.close(fd)  # may itself tell of a full disk, on a network file system
        return status.st_mtime

    def _remove(self, temporary: str) -> None:
        with self._names_lock, suppress(OSError):  # the first error is the one to tell; a sweep does the rest
            self._temporaries.discard(temporary)
            self._directory.remove_temporaries([temporary])

    def _sync_written(self, directory: str) -> None:
        """fsync the files written below `directory` since last time, then the directories that name them."""
        with self._names_lock:
            files, directories = self._ledger.take(directory)
        try:
            for name in (*files, *reversed(directories)):
                self._directory.sync(name)
        except BaseException:
            with self._names_lock:
                self._ledger.put_back(files, directories)
            raise


def _tidied(directory: RootDirectory) -> list[Entry]:
    """The objects of a directory nobody uses yet; what killed servers left half written is removed."""
    found = directory.walk()
    directory.remove_temporaries(found.temporaries)
    return found.objects

"""The directory a tier lives in: its lock, its names, and what of it still needs an fsync."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sgl_krul.errors import StoreError, StoreFull, StoreUnavailable
from sgl_krul.store.tier import Entry, is_key

__all__ = ["TEMPORARY", "Found", "FsyncLedger", "RootDirectory", "as_store_error"]

TEMPORARY = ".tmp-"
_LOCK = ".lock"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_LOCK_POLL_S = 0.05
_MAX_NOTE_BYTES = 4096


def as_store_error(error: OSError, path: Path) -> StoreError:
    """The StoreError for what the system said: StoreFull for ENOSPC and EDQUOT, else StoreUnavailable."""
    code = errno.errorcode.get(error.errno or 0, str(error.errno))
    text = f"{path}: {error.strerror or error} ({code})"
    if error.errno in _NO_ROOM:
        return StoreFull(f"{text}; free some space or delete sessions")
    return StoreUnavailable(text)


class Found(NamedTuple):
    """What a walk found: the objects, and the paths of temporaries, relative to the root."""

    objects: list[Entry]
    temporaries: list[str]


class RootDirectory:
    """A directory with its lock taken. Methods raise OSError; the constructor StoreUnavailable.

    Names are relative to its descriptor: what is mounted later under the same path is not written by mistake.
    """

    def __init__(self, path: Path, lock_wait_s: float) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise StoreUnavailable(str(as_store_error(error, path))) from error
        try:
            self.lock_fd = os.open(_LOCK, os.O_RDWR | os.O_CREAT, 0o600, dir_fd=self.fd)
        except OSError as error:
            os.close(self.fd)
            raise StoreUnavailable(str(as_store_error(error, path / _LOCK))) from error
        try:
            self._take_lock(lock_wait_s)
        except BaseException:
            self.close()
            raise

    def _take_lock(self, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(_LOCK_POLL_S)
                    continue
                owner = os.pread(self.lock_fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                raise StoreUnavailable(
                    f"{self.path}: in use by another server (pid {owner}); "
                    "stop it, or give this one another ssd.path"
                ) from None
        try:
            os.ftruncate(self.lock_fd, 0)
            os.pwrite(self.lock_fd, f"{os.getpid()}\n".encode("ascii"), 0)
        except OSError as error:
            if error.errno not in _NO_ROOM:  # a full disk can still be read from; only the pid is not told
                raise StoreUnavailable(str(as_store_error(error, self.path / _LOCK))) from error

    def gone(self) -> bool:
        """Whether the path does not lead to the open directory any more.

        Ask only after something failed: one that was moved, or mounted over, goes on working.
        """
        try:
            return not os.path.samestat(os.fstat(self.fd), os.stat(self.path))
        except OSError as error:
            return error.errno in _GONE

    def take_over(self, fresh: RootDirectory) -> None:
        """Become `fresh`, which is closed.

        The descriptors keep their numbers: calls under way may be using them.
        """
        os.dup2(fresh.fd, self.fd, inheritable=False)
        os.dup2(fresh.lock_fd, self.lock_fd, inheritable=False)
        fresh.close()

    def close(self) -> None:
        """Let the lock and the directory go."""
        os.close(self.lock_fd)
        os.close(self.fd)

    def make_parents(self, name: str) -> list[str]:
        """Make the directories above `name`. Returns those that have a new entry."""
        changed = []
        parts = name.split("/")[:-1]
        for depth in range(len(parts)):
            try:
                os.mkdir("/".join(parts[: depth + 1]), mode=0o700, dir_fd=self.fd)
            except FileExistsError:
                continue
            changed.append("/".join(parts[:depth]))
        return changed

    def prune(self, name: str) -> str:
        """Remove the directories above `name` that are empty. Returns the first that stays ("": the root)."""
        directory = os.path.dirname(name)
        while directory:
            try:
                os.rmdir(directory, dir_fd=self.fd)
            except FileNotFoundError:
                pass
            except OSError:
                return directory  # not empty; and if it is for another reason, an empty one does no harm
            directory = os.path.dirname(directory)
        return ""

    def open(self, name: str) -> int | None:
        """A descriptor to read the file, or None when there is none."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self.fd)
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.close(fd)
            return None
        return fd

    def sync(self, name: str) -> None:
        """fsync a file or directory ("": the root); one that has gone needs none."""
        try:
            fd = os.open(name or ".", os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self.fd)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def read_note(self, name: str) -> bytes | None:
        """The first 4 KiB of a small file of the tier's own, or None when there is none."""
        fd = self.open(name)
        if fd is None:
            return None
        try:
            return os.pread(fd, _MAX_NOTE_BYTES, 0)
        finally:
            os.close(fd)

    def write_note(self, name: str, text: bytes) -> None:
        """Replace such a file as a whole, without an fsync. One at a time."""
        beside = f"{name}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        fd = os.open(beside, flags, 0o600, dir_fd=self.fd)
        try:
            os.write(fd, text)
        finally:
            os.close(fd)
        os.replace(beside, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def walk(self) -> Found:
        """Every file whose path is a key, and every temporary. Other files are not ours, nor are directories
        with a lock of their own: a rank of a tensor parallel server lives there.
        """
        found = Found([], [])
        for directory, below, files, fd in os.fwalk(".", dir_fd=self.fd, onerror=_raise):
            if directory != "." and _LOCK in files:
                below.clear()
                continue
            for file in files:
                name = f"{directory}/{file}"[2:]
                if file.startswith(TEMPORARY):
                    found.temporaries.append(name)
                elif is_key(name):
                    status = os.stat(file, dir_fd=fd, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        found.objects.append(Entry(name, status.st_size, status.st_mtime))
        return found

    def remove_temporaries(self, names: Sequence[str]) -> None:
        """Remove the files and the directories that are empty then."""
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)
            self.prune(name)


def _raise(error: OSError) -> None:
    raise error


class FsyncLedger:
    """Files and directories written since their last fsync. The caller locks."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.directories: set[str] = set()

    def take(self, directory: str) -> tuple[list[str], list[str]]:
        """Take out all files below `directory`, and all directories below and above it, itself included."""
        below = f"{directory}/" if directory else ""
        files = sorted(name for name in self.files if name.startswith(below))
        self.files.difference_update(files)
        directories = sorted(
            name
            for name in self.directories
            if name == directory or name.startswith(below) or not name or directory.startswith(f"{name}/")
        )
        self.directories.difference_update(directories)
        return files, directories

    def clear(self) -> None:
        """Forget all of them: the directory has gone."""
        self.files.clear()
        self.directories.clear()

    def put_back(self, files: Sequence[str], directories: Sequence[str]) -> None:
        """Undo `take` after a failed fsync."""
        self.files.update(files)
        self.directories.update(directories)

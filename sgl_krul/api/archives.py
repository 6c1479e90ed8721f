"""Exported sessions on their way through the HTTP server: a directory of its own for each."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from sgl_krul.config import cache_home

__all__ = ["read_pieces", "save_body", "workplace"]

_PIECE_BYTES = 1 << 20
_LEFT_OVER_S = 86400.0
_FREE_FLOOR_BYTES = 256 << 20  # an upload has no length that could be trusted


@contextmanager
def workplace() -> Iterator[Path]:
    """A new directory, for its owner only, that goes with all that is in it when the `with` ends.

    Beside the stores, not in /tmp: sessions may be gigabytes.

    Raises:
        OSError: it can't be made.
    """
    parent = cache_home(os.environ) / "transfers"
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in parent.iterdir():  # by a server that was killed
        with suppress(FileNotFoundError):  # others make and remove theirs meanwhile
            if left.stat().st_mtime < time.time() - _LEFT_OVER_S:
                shutil.rmtree(left, ignore_errors=True)
    place = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


async def read_pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    """The bytes of an open file, which is closed at the end. The event loop never waits for the disk."""
    with file:
        while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
            yield piece


async def save_body(
    stream: AsyncIterator[bytes], path: Path, free_floor_bytes: int = _FREE_FLOOR_BYTES
) -> None:
    """Write a request's body to a file. The event loop never waits for the disk.

    Raises:
        starlette.requests.ClientDisconnect: whoever sends it goes away.
        OSError: it would leave less than `free_floor_bytes` of the disk free.
    """
    with path.open("wb") as file:
        async for piece in stream:
            status = os.fstatvfs(file.fileno())
            if status.f_bavail * status.f_frsize - len(piece) < free_floor_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            await asyncio.to_thread(file.write, piece)

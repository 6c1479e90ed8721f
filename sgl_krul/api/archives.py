"""Exported sessions on their way through the HTTP server: a directory of its own for each."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from sgl_krul.config import cache_home

__all__ = ["make_workplace", "remove_workplace", "save_body"]

_LEFT_OVER_S = 86400.0


def make_workplace() -> Path:
    """A new directory, for its owner only. Beside the stores, not in /tmp: sessions may be gigabytes."""
    parent = cache_home(os.environ) / "transfers"
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in parent.iterdir():  # by a server that was killed
        if left.stat().st_mtime < time.time() - _LEFT_OVER_S:
            remove_workplace(left)
    return Path(tempfile.mkdtemp(dir=parent))


def remove_workplace(place: Path) -> None:
    """Remove it with what is in it; what can't be removed stays."""
    shutil.rmtree(place, ignore_errors=True)


async def save_body(stream: AsyncIterator[bytes], path: Path) -> None:
    """Write a request's body to a file. The event loop never waits for the disk.

    Raises:
        OSError: no room.
    """
    with path.open("wb") as file:
        async for piece in stream:
            await asyncio.to_thread(file.write, piece)

"""Who may touch a session now: its requests share it, a pause, resume or delete has it alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sgl_krul.errors import SessionBusy

__all__ = ["SessionGate"]


@dataclass
class _Entry:
    running: int = 0
    exclusive: bool = False
    users: int = 0
    waiters: list[asyncio.Future[None]] = field(default_factory=list)


class SessionGate:
    """Readers and one writer for each session, with deadlines. For one event loop."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def running(self, digest: str) -> int:
        """Requests of the session that are under way."""
        entry = self._entries.get(digest)
        return entry.running if entry is not None else 0

    @asynccontextmanager
    async def request(self, digest: str, deadline_s: float) -> AsyncIterator[bool]:
        """Run a request of the session; waits while somebody has it alone.

        Yields False when `deadline_s` passed first: the request then goes on beside it, which is safe (the
        tree's locks protect it) and only slower.
        """
        entry = self._enter(digest)
        try:
            free = await self._wait(entry, lambda: not entry.exclusive, deadline_s)
            entry.running += 1
            try:
                yield free
            finally:
                entry.running -= 1
                self._notify(entry)
        finally:
            self._leave(digest, entry)

    @asynccontextmanager
    async def alone(self, digest: str, session_id: str, timeout_s: float) -> AsyncIterator[None]:
        """Have the session alone: no request runs and none begins.

        Raises:
            SessionBusy: after `timeout_s`, naming what is under way.
        """
        entry = self._enter(digest)
        try:
            if not await self._wait(entry, lambda: not entry.exclusive and entry.running == 0, timeout_s):
                what = "another pause, resume or delete" if entry.exclusive else f"{entry.running} request(s)"
                raise SessionBusy(
                    f"session {session_id!r} is busy: {what} still under way after {timeout_s:g} s. "
                    f"Try again, or wait longer with timeout_s."
                )
            entry.exclusive = True
            try:
                yield
            finally:
                entry.exclusive = False
                self._notify(entry)
        finally:
            self._leave(digest, entry)

    def check(self) -> list[str]:
        """Problems found: empty when sound."""
        return [f"an entry of {d[:12]} is left over" for d, e in self._entries.items() if e.users == 0]

    def _enter(self, digest: str) -> _Entry:
        entry = self._entries.setdefault(digest, _Entry())
        entry.users += 1
        return entry

    def _leave(self, digest: str, entry: _Entry) -> None:
        entry.users -= 1
        if entry.users == 0:
            del self._entries[digest]

    @staticmethod
    async def _wait(entry: _Entry, ready: Callable[[], bool], timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not ready():  # asked again after every wake-up: somebody else may have been faster
            left_s = deadline - loop.time()
            if left_s <= 0:
                return False
            waiter = loop.create_future()
            entry.waiters.append(waiter)
            await asyncio.wait([waiter], timeout=left_s)
        return True

    @staticmethod
    def _notify(entry: _Entry) -> None:
        waiters, entry.waiters = entry.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

"""Who may change a session's stored copy: one worker at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition

__all__ = ["Exclusive"]


class Exclusive:
    """A lock for each name, made when it is asked for and gone when nobody wants it."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._held: set[str] = set()
        self._waiting: dict[str, int] = {}

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Wait until nobody else holds `name`, then hold it while the `with` lasts."""
        with self._changed:
            self._waiting[name] = self._waiting.get(name, 0) + 1
            self._changed.wait_for(lambda: name not in self._held)
            self._leave_queue(name)
            self._held.add(name)
        try:
            yield
        finally:
            with self._changed:
                self._held.discard(name)
                self._changed.notify_all()

    def wanted(self, name: str) -> bool:
        """True while somebody waits for `name`: background work should stop and let them."""
        with self._changed:
            return name in self._waiting

    def check(self) -> list[str]:
        """Problems found: empty when sound, and nothing runs."""
        with self._changed:
            return [f"{name} is still held" for name in sorted(self._held)]

    def _leave_queue(self, name: str) -> None:
        self._waiting[name] -= 1
        if not self._waiting[name]:
            del self._waiting[name]

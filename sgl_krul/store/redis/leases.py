"""Leases of directories: at most one server writes below one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sgl_krul.errors import LeaseHeld, StoreError, StoreUnavailable
from sgl_krul.store.redis.scripts import Keys
from sgl_krul.store.redis.wire import Wire
from sgl_krul.store.tier import is_key

__all__ = ["Leases"]

_MAX_OWNER_SHOWN = 200
_MAX_LEFT = 4096


class Leases:
    """Those this server has now. A lease ends when nothing was written below it for its life time."""

    def __init__(self, wire: Wire, keys: Keys, owner: str, random_hex: Callable[[], str]) -> None:
        self._wire = wire
        self._keys = keys
        self._owner = owner
        self._random_hex = random_hex
        self._lock = threading.Lock()
        self._held: dict[str, str] = {}
        self._left: dict[str, str] = {}  # not given back, as nobody answered: ours to take over

    def token(self, tag: str) -> str:
        """What the lease of a directory holds if it is ours; empty when we have none."""
        with self._lock:
            return self._held.get(tag, "")

    @contextmanager
    def lease(self, prefix: str) -> Iterator[None]:
        """See SharedTier.lease."""
        tag = prefix[:-1]
        if not prefix.endswith("/") or not is_key(tag):
            raise ValueError(f"prefix {prefix[:80]!r}: expected the key of a directory and a slash")
        token = f"{self._owner}/{self._random_hex()}"
        with self._lock:
            if tag in self._held:
                raise LeaseHeld(
                    f"{prefix}: this server ({self._owner}) is writing it already; try again later"
                )
            self._held[tag] = token
            left = self._left.pop(tag, "")
        try:
            try:
                self.check(tag, self._wire.call(self._keys.take_lease(tag, token, left)))
            except StoreUnavailable:
                self._leave(tag, left or token)
                raise
            try:
                yield
            finally:
                [reply] = self._wire.run([self._keys.release_lease(tag, token)])
                if isinstance(reply, StoreError):  # it ends by itself
                    self._leave(tag, token)
        finally:
            with self._lock:
                del self._held[tag]

    def _leave(self, tag: str, token: str) -> None:
        with self._lock:
            self._left[tag] = token
            if len(self._left) > _MAX_LEFT:
                del self._left[next(iter(self._left))]

    def renew(self, tag: str) -> None:
        """Keep the lease of a directory, if we have one, while something long is written.

        Raises:
            LeaseHeld, StoreUnavailable: it was lost.
        """
        token = self.token(tag)
        if token:
            self.check(tag, self._wire.call(self._keys.renew_lease(tag, token)))

    def check(self, tag: str, answer: object) -> list[object]:
        """The answer of a script, or raise what it says of the lease."""
        if not isinstance(answer, list) or not answer:
            raise StoreUnavailable(f"{self._wire.place}: a script answered {str(answer)[:80]!r}")
        if answer[0] == b"lost" and not answer[1]:
            raise StoreUnavailable(
                f"{self._wire.place}: the lease of {tag} has run out, nothing was changed; try again"
            )
        if answer[0] in (b"held", b"lost") and len(answer) == 3:
            raise self._taken(tag, answer[1], answer[2])
        return answer

    def _taken(self, tag: str, holder: object, left_ms: object) -> LeaseHeld:
        text = holder.decode("utf-8", "replace") if isinstance(holder, bytes) else str(holder)
        owner = ascii((text.rpartition("/")[0] or text)[:_MAX_OWNER_SHOWN])  # no slash: a stranger's
        left_s = left_ms / 1000 if isinstance(left_ms, int) else 0.0
        return LeaseHeld(
            f"{self._wire.place}: {tag} is being written by {owner} (its lease has {left_s:.1f} s left); "
            "wait for that one, nothing was changed"
        )

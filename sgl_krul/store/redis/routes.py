"""Which server has the keys of a directory: the only one, the sentinels' master, or a node of a cluster."""

from __future__ import annotations

import binascii
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from sgl_krul.errors import StoreUnavailable
from sgl_krul.store.redis.address import Endpoint
from sgl_krul.store.redis.scripts import Command

__all__ = ["Ask", "ClusterRoutes", "FixedRoutes", "Routes", "SentinelRoutes", "slot_of"]

Ask: TypeAlias = Callable[[Endpoint, Command], object]
"""One command to one server; StoreUnavailable when it cannot answer."""

_SLOTS = 16384
_LEARN_EVERY_S = 1.0


def slot_of(tag: str) -> int:
    """The slot of Redis Cluster of all keys with this hash tag."""
    return binascii.crc_hqx(tag.encode("ascii"), 0) % _SLOTS


class Routes(Protocol):
    """Where things are. Thread safe."""

    def endpoint_of(self, tag: str) -> Endpoint:
        """The server of a hash tag. May ask for it.

        Raises:
            StoreUnavailable: nobody knows.
        """
        ...

    def forget(self, *, at_once: bool) -> bool:
        """What is known led nowhere: ask before the next answer. False when asking helps nothing.

        With `at_once` (a server said so) even if it was asked a moment ago, else once a second at most.
        """
        ...


class FixedRoutes:
    """Everything in one place."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def endpoint_of(self, tag: str) -> Endpoint:
        """See Routes."""
        return self._endpoint

    def forget(self, *, at_once: bool) -> bool:
        """See Routes."""
        return False


class _Learned:
    """What is asked for at first use and after `forget`, by one thread at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known = False
        self._asked_at = -_LEARN_EVERY_S
        self._failure = ""

    def forget(self, *, at_once: bool) -> bool:
        """See Routes."""
        if at_once:
            self._asked_at = self._clock() - _LEARN_EVERY_S
        self._known = False
        return True

    def _refresh(self) -> None:
        if self._known:
            return
        with self._lock:
            if self._known:
                return
            if self._clock() - self._asked_at < _LEARN_EVERY_S:
                if self._failure:
                    raise StoreUnavailable(self._failure)
                return  # what was said a moment ago has to do
            self._asked_at = self._clock()
            try:
                self._learn()
            except StoreUnavailable as error:
                self._failure = str(error)
                raise
            self._failure = ""
            self._known = True

    def _learn(self) -> None:
        raise NotImplementedError


class SentinelRoutes(_Learned):
    """The master the sentinels name."""

    def __init__(
        self, sentinels: Sequence[Endpoint], service: str, ask: Ask, clock: Callable[[], float]
    ) -> None:
        super().__init__(clock)
        self._sentinels = sentinels
        self._service = service
        self._ask = ask
        self._master: Endpoint | None = None

    def endpoint_of(self, tag: str) -> Endpoint:
        """See Routes."""
        self._refresh()
        master = self._master
        if master is None:
            raise StoreUnavailable(f"redis {self._service}: no master known")
        return master

    def _learn(self) -> None:
        problems = []
        for sentinel in self._sentinels:
            try:
                reply = self._ask(sentinel, ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service))
            except StoreUnavailable as error:
                problems.append(str(error))
                continue
            if isinstance(reply, list) and len(reply) == 2:
                endpoint = _endpoint(reply[0], reply[1])
                if endpoint is not None:
                    self._master = endpoint
                    return
            problems.append(f"sentinel {sentinel} knows no master {self._service!r}")
        raise StoreUnavailable(f"redis {self._service}: no master found; {'; '.join(problems)}")


class ClusterRoutes(_Learned):
    """The slot table of a cluster, from CLUSTER SLOTS of any node."""

    def __init__(self, seeds: Sequence[Endpoint], ask: Ask, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._seeds = seeds
        self._ask = ask
        self._ranges: list[tuple[int, int, Endpoint]] = []

    def endpoint_of(self, tag: str) -> Endpoint:
        """See Routes."""
        self._refresh()
        ranges = self._ranges
        slot = slot_of(tag)
        position = bisect_right(ranges, slot, key=lambda item: item[0]) - 1
        if position < 0 or ranges[position][1] < slot:
            raise StoreUnavailable(f"redis cluster: no node has slot {slot}; repair the cluster")
        return ranges[position][2]

    def _learn(self) -> None:
        problems = []
        for node in dict.fromkeys([*self._seeds, *(endpoint for _, _, endpoint in self._ranges)]):
            try:
                reply = self._ask(node, ("CLUSTER", "SLOTS"))
            except StoreUnavailable as error:
                problems.append(str(error))
                continue
            ranges = _slot_ranges(node, reply)
            if ranges:
                self._ranges = ranges
                return
            problems.append(f"{node} has no slots to name")
        raise StoreUnavailable(f"redis cluster: no node tells where the slots are; {'; '.join(problems)}")


def _slot_ranges(asked: Endpoint, reply: object) -> list[tuple[int, int, Endpoint]]:
    """First slot, last slot and master of each range; what makes no sense is left out."""
    ranges = []
    for row in reply if isinstance(reply, list) else ():
        if not isinstance(row, list) or len(row) < 3 or not isinstance(row[2], list) or len(row[2]) < 2:
            continue
        first, last, (host, port, *_) = row[0], row[1], row[2]
        endpoint = _endpoint(host or asked.host.encode("ascii"), port)  # no host: the one that was asked
        if endpoint is not None and isinstance(first, int) and isinstance(last, int):
            ranges.append((first, last, endpoint))
    return sorted(ranges, key=lambda item: item[0])


def _endpoint(host: object, port: object) -> Endpoint | None:
    if not isinstance(host, bytes) or not host.isascii() or not 0 < len(host) < 256:
        return None
    number = int(port) if isinstance(port, int) or (isinstance(port, bytes) and port.isdigit()) else 0
    return Endpoint(host.decode("ascii"), number) if 1 <= number <= 65535 else None

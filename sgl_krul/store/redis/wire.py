"""Sends commands to the servers that own their keys: retries, breakers, redirections. No Redis client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from sgl_krul.errors import Corrupt, StoreError, StoreUnavailable
from sgl_krul.store.redis.address import Endpoint
from sgl_krul.store.redis.breaker import Breaker, BreakerState
from sgl_krul.store.redis.routes import Routes
from sgl_krul.store.redis.scripts import Command, Request, keys_of, type_of

__all__ = [
    "Elsewhere",
    "Node",
    "NodeFailure",
    "Nodes",
    "Take",
    "Timing",
    "Wire",
    "WrongType",
    "pack",
    "read_reply",
    "value_of",
]

Take: TypeAlias = Callable[[int, object], object]
"""Given the number of a request and its reply as it comes in; what it returns stands for the reply. When an
exchange is repeated it is called again."""

_ATTEMPTS = 3
_FIRST_PAUSE_S = 0.02
_APART_BYTES = 16 << 10  # larger arguments are sent as they are, smaller ones are put together


class NodeFailure(Exception):
    """A server could not be asked. `again`: a repeat may help; `counts`: the breaker should know."""

    def __init__(self, reason: str, *, again: bool, counts: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.again = again
        self.counts = counts


class WrongType(StoreUnavailable):
    """A key holds what is none of ours: something else wrote it. Who reads an object says Corrupt."""


class Elsewhere(NamedTuple):
    """A reply: not here, not now; what to raise if it stays so."""

    error: StoreUnavailable


class Node(Protocol):
    """One server."""

    @property
    def place(self) -> str:
        """For messages."""
        ...

    @property
    def breaker(self) -> Breaker:
        """Whether it can be reached."""
        ...

    @property
    def slots(self) -> threading.Semaphore:
        """As many as there may be connections."""
        ...

    def exchange(
        self, packed: Sequence[bytes | memoryview], take: Sequence[Callable[[object], object]]
    ) -> list[object]:
        """Send packed commands and read one reply for each of `take`. StoreErrors are not given to it.

        Raises:
            NodeFailure
        """
        ...

    def close(self) -> None:
        """Close the connections that are not in use."""
        ...


class Timing(NamedTuple):
    """How long things may take, and where time and chance come from."""

    timeout_s: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    jitter: Callable[[], float]


class Nodes:
    """The servers met so far, by endpoint."""

    def __init__(self, make: Callable[[Endpoint], Node]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._nodes: dict[Endpoint, Node] = {}
        self._closed = False

    def get(self, endpoint: Endpoint) -> Node:
        """The server at an endpoint; StoreUnavailable after `close`."""
        with self._lock:
            if self._closed:
                raise StoreUnavailable(f"redis {endpoint}: this tier is closed; make a new one")
            node = self._nodes.get(endpoint)
            if node is None:
                node = self._nodes[endpoint] = self._make(endpoint)
            return node

    def breakers(self) -> list[Breaker]:
        """Those of all servers met."""
        with self._lock:
            return [node.breaker for node in self._nodes.values()]

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            nodes, self._nodes, self._closed = list(self._nodes.values()), {}, True
        for node in nodes:
            node.close()


class Wire:
    """Runs commands wherever their keys are. Thread safe.

    A round trip fails when nothing arrives for `timeout_s`. It is repeated, after a pause, if it failed
    within half of that: so a call ends after about one and a half `timeout_s` and the time to connect.
    """

    def __init__(self, place: str, routes: Routes, nodes: Nodes, timing: Timing) -> None:
        self.place = place
        self.timeout_s = timing.timeout_s
        self._routes = routes
        self._nodes = nodes
        self._timing = timing

    def run(self, requests: Sequence[Request], take: Take | None = None) -> list[object]:
        """One round trip to each server concerned. The replies in order; StoreErrors stand in place of some.

        Commands may be sent twice: all of them must bear it.
        """
        replies: list[object] = [None] * len(requests)
        waiting: Sequence[int] = range(len(requests))
        for attempt in range(_ATTEMPTS):
            again = []
            for node, numbers in self._by_node(requests, waiting, replies):
                commands = [requests[number].command for number in numbers]
                for number, reply in zip(numbers, self._exchange(node, commands, numbers, take), strict=True):
                    replies[number] = reply
                if any(isinstance(replies[number], Elsewhere) for number in numbers):
                    again += numbers  # all of it: there may be a transaction among them
            if not again or not self._routes.forget(at_once=True):
                break
            waiting = again
            if attempt < _ATTEMPTS - 1:
                self._pause(attempt)
        return [self._final(request, reply) for request, reply in zip(requests, replies, strict=True)]

    def _final(self, request: Request, reply: object) -> object:
        """The reply; an error that no repeat helps in place of Elsewhere, and WrongType names the key."""
        if isinstance(reply, Elsewhere):
            return reply.error
        keys = keys_of(request.command)
        if not isinstance(reply, WrongType) or not keys:
            return reply
        if len(keys) > 1:  # the server does not say which one; who may not ask for types gets all
            found = self.run([Request(request.tag, ("TYPE", key)) for key in keys])
            pairs = zip(keys, found, strict=True)
            keys = [key for key, kind in pairs if kind not in (b"none", type_of(key))] or keys
        return WrongType(f"{reply}: {' or '.join(keys)}")

    def call(self, request: Request) -> object:
        """One command; its reply. Raises StoreErrors."""
        return value_of(self.run([request])[0])

    def ask(self, endpoint: Endpoint, command: Command) -> object:
        """One command to one server, wherever keys are. Raises StoreErrors."""
        [reply] = self._exchange(self._nodes.get(endpoint), [command], [0], None)
        return value_of(reply.error if isinstance(reply, Elsewhere) else reply)

    def _by_node(
        self, requests: Sequence[Request], waiting: Sequence[int], replies: list[object]
    ) -> list[tuple[Node, list[int]]]:
        """The waiting requests, sorted by server; the error in place of the reply where there is none."""
        by_tag: dict[str, Node | StoreUnavailable] = {}
        groups: dict[int, tuple[Node, list[int]]] = {}
        for number in waiting:
            tag = requests[number].tag
            if tag not in by_tag:
                try:
                    by_tag[tag] = self._nodes.get(self._routes.endpoint_of(tag))
                except StoreUnavailable as error:
                    by_tag[tag] = error
            node = by_tag[tag]
            if isinstance(node, StoreUnavailable):
                replies[number] = node
            else:
                groups.setdefault(id(node), (node, []))[1].append(number)
        return list(groups.values())

    def _exchange(
        self, node: Node, commands: list[Command], numbers: Sequence[int], take: Take | None
    ) -> Sequence[object]:
        """All replies of one server, or the same StoreUnavailable for each."""
        packed = pack(commands)
        takes = [_taking(take, number) for number in numbers]
        started = self._timing.clock()
        attempt = 0
        while True:
            try:
                return self._try(node, packed, takes)
            except NodeFailure as failure:
                self._routes.forget(at_once=False)
                late = self._timing.clock() - started >= self.timeout_s / 2
                if late or not failure.again or attempt == _ATTEMPTS - 1 or not node.breaker.available:
                    return [StoreUnavailable(f"{node.place}: {failure.reason}")] * len(commands)
            self._pause(attempt)
            attempt += 1

    def _try(
        self, node: Node, packed: Sequence[bytes | memoryview], takes: Sequence[Callable[[object], object]]
    ) -> list[object]:
        if not node.breaker.available:  # not worth waiting for a connection
            raise NodeFailure(node.breaker.refusal(), again=False)
        if not node.slots.acquire(timeout=self.timeout_s):
            reason = f"all connections in use for {self.timeout_s:g} s; raise redis.connections"
            raise NodeFailure(reason, again=False)
        try:
            ticket = node.breaker.admit()
            if ticket is None:
                raise NodeFailure(node.breaker.refusal(), again=False)
            verdict = False
            try:
                replies = node.exchange(packed, takes)
                node.breaker.succeeded()
                verdict = True
                return replies
            except NodeFailure as failure:
                if failure.counts:
                    node.breaker.failed(ticket, failure.reason)
                    verdict = True
                raise
            finally:
                if not verdict:
                    node.breaker.abandoned(ticket)
        finally:
            node.slots.release()

    def _pause(self, attempt: int) -> None:
        self._timing.sleep(_FIRST_PAUSE_S * 3**attempt * (0.5 + 0.5 * self._timing.jitter()))

    @property
    def available(self) -> bool:
        """False while every server met is known to be out of reach."""
        breakers = self._nodes.breakers()
        return not breakers or any(breaker.available for breaker in breakers)

    @property
    def breaker_state(self) -> BreakerState:
        """The worst state of any server."""
        states = {breaker.state for breaker in self._nodes.breakers()}
        return "open" if "open" in states else "half-open" if "half-open" in states else "closed"

    def close(self) -> None:
        """Close all connections; later calls raise StoreUnavailable."""
        self._nodes.close()


def value_of(reply: object) -> object:
    """The reply, or raise it if it is an error."""
    if isinstance(reply, StoreError):
        raise reply
    return reply


def read_reply(reply: object) -> object:
    """The reply to who reads an object: Corrupt in place of WrongType."""
    return Corrupt("version", str(reply)) if isinstance(reply, WrongType) else reply


def pack(commands: Sequence[Command]) -> list[bytes | memoryview]:
    """The commands as bytes to send. Large arguments are not copied."""
    packed: list[bytes | memoryview] = []
    small = bytearray()
    for command in commands:
        small += b"*%d\r\n" % len(command)
        for argument in command:
            data = argument if isinstance(argument, (bytes, memoryview)) else str(argument).encode("utf-8")
            small += b"$%d\r\n" % len(data)
            if len(data) > _APART_BYTES:
                packed += [bytes(small), data]
                small.clear()
            else:
                small += data
            small += b"\r\n"
    packed.append(bytes(small))
    return packed


def _taking(take: Take | None, number: int) -> Callable[[object], object]:
    return (lambda reply: reply) if take is None else (lambda reply: take(number, reply))

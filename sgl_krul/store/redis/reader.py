"""Reads objects from Redis: many in one round trip, piece by piece into the buffers they are for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

from sgl_krul.errors import Corrupt, Missing, StoreError, StoreUnavailable
from sgl_krul.store.redis.in_flight import InFlight
from sgl_krul.store.redis.pieces import (
    MAX_PIECE_BYTES,
    Part,
    Shape,
    check_stored_header,
    copy_parts,
    decode_shape,
    plan_read,
)
from sgl_krul.store.redis.scripts import Keys, Request, split_key
from sgl_krul.store.redis.wire import Wire, read_reply

__all__ = ["Read", "Reader", "Shapes"]

FETCH_BYTES = 2 << 20  # fetched by one command
ROUND_BYTES = 32 << 20  # fetched in one round trip
_TRIES = 20  # of an object that is replaced again and again
_MAX_SHAPES = 4096
_MAX_SHAPE_PIECES = 1 << 18


class Read(NamedTuple):
    """Fill the buffers from body byte `offset` of `key` on."""

    key: str
    offset: int
    views: Sequence[memoryview]


class Shapes:
    """Shapes seen a short while ago. A hint: each read fetches the shape again, with the pieces."""

    def __init__(self, keep_s: float, clock: Callable[[], float]) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._lock = threading.Lock()
        self._shapes: OrderedDict[str, tuple[Shape, float]] = OrderedDict()
        self._pieces = 0

    def __len__(self) -> int:
        return len(self._shapes)

    def get(self, key: str) -> Shape | None:
        """The shape, if it is not older than `keep_s`."""
        with self._lock:
            shape, seen = self._shapes.get(key, (None, 0.0))
            return shape if shape is not None and self._clock() - seen < self._keep_s else None

    def set(self, key: str, shape: Shape) -> None:
        """Remember a shape; the oldest go when there are too many."""
        with self._lock:
            self._drop(key)
            self._shapes[key] = shape, self._clock()
            self._pieces += len(shape.starts)
            while len(self._shapes) > _MAX_SHAPES or self._pieces > _MAX_SHAPE_PIECES:
                self._drop(next(iter(self._shapes)))

    def drop(self, key: str) -> None:
        """Forget a shape."""
        with self._lock:
            self._drop(key)

    def _drop(self, key: str) -> None:
        found = self._shapes.pop(key, None)
        if found is not None:
            self._pieces -= len(found[0].starts)


class _Fetch(NamedTuple):
    """One command: some neighbouring pieces of one object."""

    number: int
    shape: Shape
    parts: Sequence[Part]
    size: int


class _Replaced(NamedTuple):
    """The outcome of a fetch whose object is not the one it was planned for; the shape it has now, if any."""

    raw: object


class Reader:
    """What only looks at objects, and starts their life time anew when it does."""

    def __init__(self, wire: Wire, keys: Keys, in_flight: InFlight, shapes: Shapes) -> None:
        self._wire = wire
        self._keys = keys
        self._in_flight = in_flight
        self.shapes = shapes

    def read_header(self, key: str) -> bytes | None:
        """See Tier.read_header."""
        tag, name = split_key(key)
        look = Request(tag, ("HMGET", self._keys.object(tag, name), "m", "h"))
        fields, exists, *_ = self._wire.run([look, *self._look_again(tag, name)])
        values = _fields(key, fields, exists, 2)
        if values is None:
            self.shapes.drop(key)
            return None
        shape = decode_shape(key, values[0])
        header = check_stored_header(key, shape, values[1])
        self.shapes.set(key, shape)
        return header

    def read_batch(self, reads: Sequence[Read]) -> list[StoreError | None]:
        """Fill the buffers of every read. What went wrong with each, None: nothing."""
        results: list[StoreError | None] = [None] * len(reads)
        waiting: Sequence[int] = range(len(reads))
        for _ in range(_TRIES):
            waiting = self._try(reads, waiting, results)
            if not waiting:
                return results
        for number in waiting:
            results[number] = StoreUnavailable(
                f"{self._wire.place}: {reads[number].key} was replaced {_TRIES} times while read; try again"
            )
        return results

    def _try(
        self, reads: Sequence[Read], waiting: Sequence[int], results: list[StoreError | None]
    ) -> list[int]:
        """Read what waits. Returns those whose object was replaced in the middle."""
        hints = {number: self.shapes.get(reads[number].key) for number in waiting}
        shapes = self._find_shapes(reads, hints, results)
        fetches: list[_Fetch] = []
        replaced = set()
        for number, shape in shapes.items():
            key, offset, views = reads[number]
            end = offset + sum(view.nbytes for view in views)
            if end <= shape.body_bytes:
                fetches += _fetches(number, shape, plan_read(shape, offset, views))
            elif hints[number] is not None:
                self.shapes.drop(key)
                replaced.add(number)  # perhaps: look again
            else:
                text = f"{key}: byte {end} asked for, the body has {shape.body_bytes}"
                results[number] = Corrupt("length", text)
        for group in _grouped(fetches):
            for fetch, outcome in zip(group, self._fetch(reads, group), strict=True):
                if isinstance(outcome, StoreError):
                    results[fetch.number] = outcome
                elif isinstance(outcome, _Replaced):
                    self._learn(reads[fetch.number].key, outcome.raw)
                    replaced.add(fetch.number)
        return sorted(number for number in replaced if results[number] is None)

    def _learn(self, key: str, raw: object) -> None:
        """Plan with the shape an object has now; if it has none, or a bad one, the next look says so."""
        self.shapes.drop(key)
        if isinstance(raw, bytes):
            with suppress(Corrupt):
                self.shapes.set(key, decode_shape(key, raw))

    def _find_shapes(
        self, reads: Sequence[Read], hints: dict[int, Shape | None], results: list[StoreError | None]
    ) -> dict[int, Shape]:
        """The shapes: those of the hints, and the others asked for; what has none has its error."""
        found = {number: shape for number, shape in hints.items() if shape is not None}
        asked = [number for number, shape in hints.items() if shape is None]
        looks = []
        for number in asked:
            tag, name = split_key(reads[number].key)
            look = Request(tag, ("HMGET", self._keys.object(tag, name), "m"))
            looks.append([look, *self._look_again(tag, name)])
        replies = iter(self._wire.run(list(chain.from_iterable(looks)))) if looks else iter(())
        for number, look_requests in zip(asked, looks, strict=True):
            fields, exists, *_ = [next(replies) for _ in look_requests]
            key = reads[number].key
            try:
                values = _fields(key, fields, exists, 1)
                if values is None:
                    raise Missing(f"{self._wire.place}: {key} has gone")
                found[number] = decode_shape(key, values[0])
                self.shapes.set(key, found[number])
            except StoreError as error:
                results[number] = error
        return found

    def _look_again(self, tag: str, name: str) -> list[Request]:
        """Whether it is there at all; and a new life, whose failure (on a replica) is nobody's concern."""
        key = self._keys.object(tag, name)
        return [
            Request(tag, ("EXISTS", key)),
            self._keys.extend(tag, key),
            self._keys.extend(tag, self._keys.index(tag)),
        ]

    def _fetch(self, reads: Sequence[Read], group: Sequence[_Fetch]) -> list[object]:
        """One round trip: each reply is copied into its buffers while the next one comes in."""

        def take(index: int, reply: object) -> object:
            fetch = group[index]
            if not isinstance(reply, list) or len(reply) != 1 + len(fetch.parts):
                return Corrupt("length", f"{reads[fetch.number].key}: {len(fetch.parts)} pieces asked for")
            if reply[0] != fetch.shape.raw:
                return _Replaced(reply[0])
            try:
                copy_parts(reads[fetch.number].key, fetch.shape, fetch.parts, reply[1:])
            except Corrupt as error:
                return error
            return None

        requests = []
        for fetch in group:
            tag, name = split_key(reads[fetch.number].key)
            pieces = [str(part.piece) for part in fetch.parts]
            requests.append(Request(tag, ("HMGET", self._keys.object(tag, name), "m", *pieces)))
        try:
            with self._in_flight.taken(sum(fetch.size for fetch in group), self._wire.timeout_s):
                return [read_reply(reply) for reply in self._wire.run(requests, take)]
        except StoreUnavailable as error:  # no room for so many bytes on their way
            return [error] * len(group)


def _fields(key: str, fields: object, exists: object, count: int) -> list[bytes] | None:
    """The fields of an object; None when there is none."""
    fields = read_reply(fields)
    if isinstance(fields, StoreError):
        raise fields
    if isinstance(exists, StoreError):
        raise exists
    if (
        not isinstance(fields, list)
        or len(fields) != count
        or not all(isinstance(it, bytes) for it in fields)
    ):
        if exists == 0:
            return None
        raise Corrupt("length", f"{key}: the hash lacks its shape or its header")
    return fields


def _fetches(number: int, shape: Shape, parts: Iterator[Part]) -> Iterator[_Fetch]:
    """At least one, so that also a read of nothing looks whether the object is there."""
    group: list[Part] = []
    size = 0
    for part in parts:
        length = shape.piece_bytes(part.piece)
        if group and size + length > FETCH_BYTES:
            yield _Fetch(number, shape, group, size)
            group, size = [], 0
        group.append(part)
        size += length
    yield _Fetch(number, shape, group, size)


def _grouped(fetches: Sequence[_Fetch], limit: int = ROUND_BYTES) -> Iterator[list[_Fetch]]:
    group: list[_Fetch] = []
    size = 0
    for fetch in fetches:
        if group and size + fetch.size > limit:
            yield group
            group, size = [], 0
        group.append(fetch)
        size += fetch.size
    if group:
        yield group


assert FETCH_BYTES >= MAX_PIECE_BYTES

"""The indexes of a Redis tier: which directories there are, and which objects in each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

from sgl_krul.errors import Corrupt, StoreError, StoreUnavailable
from sgl_krul.store.redis.pieces import check_stored_header, decode_shape
from sgl_krul.store.redis.scripts import DIRECTORIES, Keys, Request, parse_entry, parse_tag, split_key
from sgl_krul.store.redis.wire import Wire, WrongType, read_reply, value_of
from sgl_krul.store.tier import Entry, is_key

__all__ = ["Directories"]

_DIRECTORIES_AT_ONCE = 200
_OBJECTS_AT_ONCE = 2000
_CHECKED_AT_ONCE = 16  # headers are fetched
_EMPTY_AGE_S = 3600.0  # a directory listed for so long, and nothing in it, is no put under way


class Directories:
    """Lists, and keeps the lists true: entries whose object has gone by itself are removed when met."""

    def __init__(self, wire: Wire, keys: Keys) -> None:
        self._wire = wire
        self._keys = keys

    def list_quietly(self, tag: str) -> None:
        """Add a directory to the lists. If it fails, a later put or touch does it."""
        self._wire.run([self._keys.list_directory(tag)])

    def forget_if_empty(self, tag: str) -> None:
        """Take a directory from the lists if nothing is in it. If it fails, a later scan does it.

        In this order: a put that comes between looks lists it anew afterwards, which changes its score.
        """
        [score] = self._wire.run([Request(DIRECTORIES, ("ZSCORE", self._keys.times, tag))])
        [entries] = self._wire.run([Request(tag, ("HLEN", self._keys.index(tag)))])
        if isinstance(score, bytes) and entries == 0:
            self._wire.run([self._keys.unlist_directory(tag, score=score)])

    def scan(self, prefix: str) -> list[Entry]:
        """See Tier.scan.

        While the server of the lists is out of reach, a prefix that ends with the slash of a directory that
        holds objects is answered from that directory's own index: those of directories below it are not seen.
        """
        if prefix and not is_key(prefix.removesuffix("/")):
            return []  # no key starts like this
        own, name = split_key(prefix)
        listed, own_index = self._wire.run([self._listed(prefix), self._index(own)])
        own_value = _index_of(own_index)
        entries = self._existing([(own, own_value)])
        if isinstance(listed, StoreUnavailable) and name == "" and entries:
            return sorted(entries)
        tags = self._tags(value_of(listed))
        rest = iter([tag for tag in tags if tag != own])
        while some := list(islice(rest, _DIRECTORIES_AT_ONCE)):
            replies = self._wire.run([self._index(tag) for tag in some])
            indexes = [(tag, _index_of(reply)) for tag, reply in zip(some, replies, strict=True)]
            self._unlist([tag for tag, index in indexes if index == []])
            entries += self._existing(indexes)
        return sorted(entry for entry in entries if entry.key.startswith(prefix))

    def check(self) -> list[str]:
        """Objects that are not whole, and entries that are none or whose object has gone."""
        problems: list[str] = []
        tags = self._tags(self._wire.call(self._listed("")))
        for tag in tags:
            [index] = self._wire.run([self._index(tag)])
            if isinstance(index, WrongType):
                problems.append(f"{tag}: {index}")
            index = _index_of(index)
            entries = [parse_entry(tag, name, value) for name, value in _pairs(index)]
            problems += [f"{tag}: an entry that is none" for entry in entries if entry is None]
            found = iter([entry for entry in entries if entry is not None])
            while some := list(islice(found, _CHECKED_AT_ONCE)):
                problems += self._problems(some)
        return problems

    def _problems(self, entries: Sequence[Entry]) -> list[str]:
        problems = []
        looks = []
        for entry in entries:
            tag, name = split_key(entry.key)
            looks.append(Request(tag, ("HMGET", self._keys.object(tag, name), "m", "h")))
        replies = map(read_reply, self._wire.run(looks))
        for entry, look, reply in zip(entries, looks, replies, strict=True):
            if isinstance(reply, StoreUnavailable):
                raise reply
            try:
                shape_raw, header = _two_fields(entry.key, reply)
                shape = decode_shape(entry.key, shape_raw)
                check_stored_header(entry.key, shape, header)
                self._check_pieces(entry, look.tag, len(shape.starts) - 1, shape.starts, shape_raw)
                size = len(shape_raw) + len(header) + shape.body_bytes
                if size != entry.bytes:
                    problems.append(f"{entry.key}: {size} bytes, {entry.bytes} recorded")
            except Corrupt as error:
                problems.append(str(error))
        return problems

    def _check_pieces(self, entry: Entry, tag: str, pieces: int, starts: Sequence[int], shape: bytes) -> None:
        """Corrupt unless there are just these pieces; an object replaced meanwhile is not looked at."""
        key = self._keys.object(*split_key(entry.key))
        lengths = [Request(tag, ("HSTRLEN", key, str(piece))) for piece in range(pieces)]
        replies = [
            value_of(read_reply(reply))
            for reply in self._wire.run(
                [*lengths, Request(tag, ("HLEN", key)), Request(tag, ("HGET", key, "m"))]
            )
        ]
        expected = [*(end - start for start, end in pairwise(starts)), pieces + 2]
        if replies[-1] == shape and replies[:-1] != expected:
            raise Corrupt("length", f"{entry.key}: the pieces are not as long as the shape says")

    def _listed(self, prefix: str) -> Request:
        low, high = (b"[" + prefix.encode(), b"(" + prefix.encode() + b"\xff") if prefix else (b"-", b"+")
        return Request(DIRECTORIES, ("ZRANGEBYLEX", self._keys.names, low, high))

    def _index(self, tag: str) -> Request:
        return Request(tag, ("HGETALL", self._keys.index(tag)))

    def _tags(self, reply: object) -> list[str]:
        tags = [parse_tag(raw) for raw in reply] if isinstance(reply, list) else []
        return [tag for tag in tags if tag is not None]

    def _existing(self, indexes: Sequence[tuple[str, object]]) -> list[Entry]:
        """The entries whose objects are there; the others are removed from their index."""
        found = [
            (tag, entry)
            for tag, index in indexes
            for name, value in _pairs(index)
            if (entry := parse_entry(tag, name, value)) is not None
        ]
        existing = []
        rest = iter(found)
        while some := list(islice(rest, _OBJECTS_AT_ONCE)):
            asked = [
                Request(tag, ("EXISTS", self._keys.object(*split_key(entry.key)))) for tag, entry in some
            ]
            gone: dict[str, list[str]] = {}
            for (tag, entry), reply in zip(some, self._wire.run(asked), strict=True):
                if value_of(reply):
                    existing.append(entry)
                else:
                    gone.setdefault(tag, []).append(split_key(entry.key)[1])
            if gone:  # a replica refuses; then somebody else will do it
                self._wire.run([self._keys.repair(tag, names) for tag, names in gone.items()])
        return existing

    def _unlist(self, tags: Sequence[str]) -> None:
        if tags:
            self._wire.run([self._keys.unlist_directory(tag, age_s=_EMPTY_AGE_S) for tag in tags])


def _index_of(reply: object) -> object:
    """The index of a directory; empty where something else wrote the key: that hides no other directory."""
    return [] if isinstance(reply, WrongType) else value_of(reply)


def _pairs(index: object) -> Iterator[tuple[object, object]]:
    """Names and values of an index as it came, one after another."""
    rows = index if isinstance(index, list) else []
    return zip(rows[::2], rows[1::2], strict=False)


def _two_fields(key: str, reply: object) -> tuple[bytes, bytes]:
    if isinstance(reply, StoreError):
        raise reply
    if isinstance(reply, list) and len(reply) == 2:
        shape, header = reply
        if isinstance(shape, bytes) and isinstance(header, bytes):
            return shape, header
    raise Corrupt("length", f"{key}: recorded, but the object has gone or lacks its shape or header")

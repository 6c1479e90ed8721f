"""Puts and deletes objects in Redis: written under a temporary key, moved into place by one script."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sgl_krul.errors import LeaseHeld, StoreFull, StoreUnavailable
from sgl_krul.store.redis.directories import Directories
from sgl_krul.store.redis.in_flight import InFlight, StoredCount
from sgl_krul.store.redis.leases import Leases
from sgl_krul.store.redis.pieces import cut, encode_shape
from sgl_krul.store.redis.scripts import Keys, Request, parse_entry, split_key
from sgl_krul.store.redis.wire import Wire, WrongType, value_of

__all__ = ["Writer"]

ROUND_BYTES = 12 << 20  # written in one round trip
COMMAND_BYTES = 1 << 20  # and by one command
TEMPORARY_TTL_MS = 60_000
_STRIPES = 64


class Writer:
    """What changes objects."""

    def __init__(
        self,
        wire: Wire,
        keys: Keys,
        leases: Leases,
        directories: Directories,
        in_flight: InFlight,
        stored: StoredCount,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._wire = wire
        self._keys = keys
        self._leases = leases
        self._directories = directories
        self._in_flight = in_flight
        self._stored = stored
        self._random_bytes = random_bytes
        # A change and its counting are one step for others of the same directory, or usage would be off.
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]

    def put(self, key: str, header: bytes, body: Sequence[memoryview]) -> int:
        """See Tier.put."""
        tag, name = split_key(key)
        token = self._random_bytes(16)
        pieces = cut(body)
        lengths = [sum(view.nbytes for view in piece) for piece in pieces]
        shape = encode_shape(key, token, lengths, header)
        size = len(shape) + len(header) + sum(lengths)
        with self._stored.claimed(size) as settle:
            try:
                self._write_temporary(tag, self._keys.temporary(tag, token), shape, header, pieces)
                request = self._keys.commit(
                    tag,
                    name,
                    token=token,
                    lease=self._leases.token(tag),
                    fields=len(pieces) + 2,
                    size=size,
                    shape=shape,
                )
                self._commit(tag, name, request, size, settle)
            except (StoreFull, LeaseHeld, WrongType, KeyboardInterrupt):
                # The server can still be asked: don't leave it there.
                self._wire.run([Request(tag, ("UNLINK", self._keys.temporary(tag, token)))])
                raise
        return size

    def delete(self, key: str) -> bool:
        """See Tier.delete."""
        tag, name = split_key(key)
        with self._stripe(tag):
            lease = self._leases.token(tag)
            answer = self._leases.check(tag, self._wire.call(self._keys.delete(tag, name, lease)))
            _, old, entries, existed = answer
            entry = parse_entry(tag, name.encode("ascii"), old)
            if entry is not None:
                self._stored.add(-entry.bytes, -1)
        if entries == 0 and (existed or entry is not None):
            self._directories.forget_if_empty(tag)
        return existed == 1

    def _write_temporary(
        self, tag: str, temporary: str, shape: bytes, header: bytes, pieces: Sequence[Sequence[memoryview]]
    ) -> None:
        """Write the fields round by round.

        The key has its life time from its first moment on, by a transaction; what follows is sent without, as
        the server then works on a value while the next one comes in. Each value is followed by the life time,
        should the key have been evicted and be new again.
        """
        expire = Request(tag, ("PEXPIRE", temporary, TEMPORARY_TTL_MS))
        begin = [
            Request(tag, ("MULTI",)),
            Request(tag, ("HSET", temporary, "m", shape, "h", header)),
            expire,
            Request(tag, ("EXEC",)),
        ]
        first = [self._keys.list_directory(tag)]  # before there is anything in it, or a crash would hide it
        for values, size in _rounds(pieces):
            requests = [*first, *begin]
            for fields in values:
                requests += [Request(tag, ("HSET", temporary, *fields)), expire]
            begin = []
            if not first:
                self._leases.renew(tag)
            with self._in_flight.taken(size, self._wire.timeout_s):
                replies = self._wire.run(requests)
            unlisted = first and isinstance(replies[0], StoreUnavailable)
            if unlisted and not isinstance(replies[0], WrongType):
                replies = replies[1:]  # of a cluster another node: it must not stop what it does not hold
            for reply in replies:
                value_of(reply)
            first = []

    def _commit(
        self, tag: str, name: str, request: Request, size: int, settle: Callable[[int, int], None]
    ) -> None:
        with self._stripe(tag):
            answer = self._leases.check(tag, self._wire.call(request))
            if answer[0] != b"ok" or len(answer) != 3:
                raise StoreUnavailable(
                    f"{self._wire.place}: what was written of {tag}/{name} vanished before it was complete "
                    "(evicted, or the server started anew); give the server more memory, or try again"
                )
            old = parse_entry(tag, name.encode("ascii"), answer[1])
            settle(size - (old.bytes if old else 0), 0 if old else 1)
        if answer[2] == 1:  # a delete of the last one may have unlisted the directory since we listed it
            self._directories.list_quietly(tag)

    @contextmanager
    def _stripe(self, tag: str) -> Iterator[None]:
        stripe = self._stripes[zlib.crc32(tag.encode("ascii")) % _STRIPES]
        if not stripe.acquire(timeout=3 * self._wire.timeout_s):
            raise StoreUnavailable(f"{self._wire.place}: changes of {tag} wait for one that does not end")
        try:
            yield
        finally:
            stripe.release()


def _rounds(
    pieces: Sequence[Sequence[memoryview]],
) -> Iterator[tuple[list[list[bytes | str | memoryview]], int]]:
    """Round trips: fields and values for one HSET after another, and their bytes. At least one."""
    commands: list[list[bytes | str | memoryview]] = []
    size = in_last = 0
    for number, piece in enumerate(pieces):
        value = piece[0] if len(piece) == 1 else b"".join(piece)
        if commands and size + len(value) > ROUND_BYTES:
            yield commands, size
            commands, size = [], 0
        if not commands or in_last + len(value) > COMMAND_BYTES:
            commands.append([])
            in_last = 0
        commands[-1] += [str(number), value]
        in_last += len(value)
        size += len(value)
    yield commands, size

"""The Redis tier against a bare hiredis loop over one socket, with the same values, on loopback.

Both store a session of 12 chunks as a hash a chunk with a value a layer (393,216 bytes). Getting: the tier as
a resume uses it, by one connection (header, then all segments, copied to where they belong); the bare loop
sends HMGETs and drops the values. Putting: the tier as a pause uses it (lease, chunks, manifest); the bare
loop sends HSETs and waits for the answers. The bare loop has 5 values in a command and all commands of a
chunk on their way at once, which is the quickest of what was tried. The server is empty before each put.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import hiredis

from benchmarks.compare import Comparison, compare
from benchmarks.redis_server import RedisServer
from benchmarks.sample import SEGMENT_BYTES, Names, Sample
from sgl_krul.store import RedisTier

__all__ = ["measure_redis", "open_tier"]

_READ_BYTES = 1 << 18  # from the socket at once, as the tier does
_APART_BYTES = 16 << 10
_VALUES = 5  # in one command of the bare loop


def open_tier(url: str) -> RedisTier:
    """A tier with the defaults of the configuration, as far as they matter here."""
    return RedisTier.open(
        url,
        key_prefix="krul",
        capacity_bytes=64 << 30,
        ttl_s=86400.0,
        timeout_s=30.0,
        connect_timeout_s=5.0,
        connections=8,
        max_in_flight_bytes=256 << 20,
        lease_s=30.0,
        owner="bench:1",
    )


def measure_redis(place: Path, sample: Sample, rounds: int) -> tuple[Comparison, Comparison]:
    """Of get and put."""
    with RedisServer(place) as server, open_tier(server.url) as tier, _Bare(server.port, sample) as bare:
        put = compare(
            sample.size_bytes,
            lambda number: _put(tier, sample),
            lambda number: bare.put(),
            rounds=rounds,
            before=lambda number: bare.empty_server(),
        )
        bare.empty_server()
        _put(tier, sample)
        bare.put()
        get = compare(
            sample.size_bytes, lambda number: _get(tier, sample), lambda number: bare.get(), rounds=rounds
        )
        sample.require_read()
    return get, put


def _put(tier: RedisTier, sample: Sample) -> None:
    names = Names(0, sample.chunks)
    with tier.lease(names.prefix):
        for index, segments in enumerate(sample.sources):
            tier.put(names.chunk_key(index), sample.headers[index], segments)
        tier.put(names.manifest_key, sample.manifest, [])


def _get(tier: RedisTier, sample: Sample) -> None:
    names = Names(0, sample.chunks)
    for index, into in enumerate(sample.targets):
        tier.read_header(names.chunk_key(index))
        tier.read_segments(names.chunk_key(index), 0, into)


class _Bare:
    """One socket and one parser, and nothing checked but the number of values."""

    def __init__(self, port: int, sample: Sample) -> None:
        self._sources = sample.sources
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()
        self._buffer = bytearray(_READ_BYTES)
        self._filled = memoryview(self._buffer)

    def __enter__(self) -> _Bare:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def empty_server(self) -> None:
        """Remove everything."""
        self._send([b"FLUSHALL", b"SYNC"])
        self._reply()

    def put(self) -> None:
        """All values of all chunks."""
        for index, values in enumerate(self._sources):
            groups = _groups(len(values))
            for group in groups:
                pairs = [part for layer in group for part in (b"%d" % layer, values[layer])]
                self._send([b"HSET", b"bare:%d" % index, *pairs])
            for group in groups:
                if self._reply() != len(group):
                    raise RuntimeError("HSET did not set new fields")

    def get(self) -> None:
        """All values of all chunks."""
        for index, values in enumerate(self._sources):
            groups = _groups(len(values))
            for group in groups:
                self._send([b"HMGET", b"bare:%d" % index, *(b"%d" % layer for layer in group)])
            for group in groups:
                found = self._reply()
                if len(found) != len(group) or any(len(value) != SEGMENT_BYTES for value in found):
                    raise RuntimeError("HMGET did not bring the values")

    def _send(self, arguments: Sequence[bytes | memoryview]) -> None:
        """Large arguments are not copied."""
        small = bytearray(b"*%d\r\n" % len(arguments))
        for argument in arguments:
            small += b"$%d\r\n" % len(argument)
            if len(argument) > _APART_BYTES:
                self._socket.sendall(small)
                self._socket.sendall(argument)
                small = bytearray()
            else:
                small += argument
            small += b"\r\n"
        self._socket.sendall(small)

    def _reply(self) -> object:
        while True:
            reply = self._reader.gets()
            if reply is not False:
                if isinstance(reply, hiredis.ReplyError):
                    raise reply
                return reply
            count = self._socket.recv_into(self._buffer)
            if count == 0:
                raise ConnectionError("the server closed the connection")
            self._reader.feed(self._filled, 0, count)


def _groups(count: int) -> list[range]:
    return [range(first, min(first + _VALUES, count)) for first in range(0, count, _VALUES)]

"""The Redis tier: objects in a Redis or Valkey (7.0 or later) that several servers share.

The only module that imports redis-py. It opens connections and says in our words what went wrong there;
`wire` sends commands to the right server; `writer`, `reader`, `directories` and
`leases` know what to send.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from redis import exceptions as said
from redis.backoff import NoBackoff
from redis.connection import (
    AbstractConnection,
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.retry import Retry

from sgl_krul.errors import StoreError, StoreFull, StoreUnavailable
from sgl_krul.store.redis.address import Endpoint, parse_redis_url
from sgl_krul.store.redis.breaker import Breaker, BreakerState
from sgl_krul.store.redis.directories import Directories
from sgl_krul.store.redis.in_flight import InFlight, StoredCount
from sgl_krul.store.redis.leases import Leases
from sgl_krul.store.redis.reader import Read, Reader, Shapes
from sgl_krul.store.redis.routes import ClusterRoutes, FixedRoutes, Routes, SentinelRoutes
from sgl_krul.store.redis.scripts import Keys, Request, split_key
from sgl_krul.store.redis.settings import RedisSettings
from sgl_krul.store.redis.wire import Elsewhere, NodeFailure, Nodes, Timing, Wire, WrongType
from sgl_krul.store.redis.writer import Writer
from sgl_krul.store.tier import Buffer, Entry, TierUsage, byte_view, check_header, check_key, writable_view

__all__ = ["RedisTier"]

_CLIENT_NAME = "sgl-krul"
_READ_BYTES = 1 << 18  # from a socket at once
_MAX_SHAPE_AGE_S = 60.0


class RedisTier:
    """A SharedTier of hashes in Redis; see `pieces` and `scripts` for how they look.

    An object lives for `ttl_s` from its last put, read of its header, or touch; of servers whose `ttl_s`
    differ, a read or touch by the one with the shorter shortens nothing. `usage` counts what this
    tier changed and what `refresh` found; it is the soft bound of `put`. A `lease` covers the objects right
    below its prefix, not those of directories below. When the confirmation of a put gets lost, and so do
    those of its repeats, it raises StoreUnavailable although the new object may be in place. A call of many
    round trips fails at the first without an answer for `timeout_s`. Of a cluster, what lies on nodes that
    are up goes on; while the node with the list of directories is down, a `scan` of more than one directory
    fails, and what is put meanwhile is listed from its next put or touch on.
    """

    name = "redis"

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self.place = str(settings.url)
        timing = Timing(settings.timeout_s, time.monotonic, time.sleep, random.random)
        nodes = Nodes(lambda endpoint: _Node(endpoint, settings, timing))
        self._wire = Wire(self.place, self._routes(nodes, timing), nodes, timing)
        self._keys = Keys(settings.key_prefix, round(settings.ttl_s * 1000), round(settings.lease_s * 1000))
        in_flight = InFlight(self.place, settings.max_in_flight_bytes)
        self._stored = StoredCount(self.place, settings.capacity_bytes)
        self._leases = Leases(self._wire, self._keys, settings.owner, lambda: secrets.token_hex(8))
        self._directories = Directories(self._wire, self._keys)
        self._reader = Reader(
            self._wire,
            self._keys,
            in_flight,
            Shapes(min(settings.ttl_s / 20, _MAX_SHAPE_AGE_S), time.monotonic),
        )
        self._writer = Writer(
            self._wire,
            self._keys,
            self._leases,
            self._directories,
            in_flight,
            self._stored,
            secrets.token_bytes,
        )

    @classmethod
    def open(
        cls,
        url: str,
        *,
        username: str | None = None,
        password: str | None = None,
        tls_ca_file: Path | None = None,
        key_prefix: str,
        capacity_bytes: int,
        ttl_s: float,
        timeout_s: float,
        connect_timeout_s: float,
        connections: int,
        max_in_flight_bytes: int,
        lease_s: float,
        owner: str,
    ) -> RedisTier:
        """A tier for a URL (see `address`). Connects at first use: a server that is down is no error.

        Each server gets at most `connections`; reads and puts have at most `max_in_flight_bytes` on their
        way. `owner` (host:pid) is who others are told holds a lease.

        Raises:
            ConfigError: a bad URL, or a setting out of range.
        """
        settings = RedisSettings(
            url=parse_redis_url(url, username=username, password=password),
            tls_ca_file=tls_ca_file,
            key_prefix=key_prefix,
            capacity_bytes=capacity_bytes,
            ttl_s=ttl_s,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            connections=connections,
            max_in_flight_bytes=max_in_flight_bytes,
            lease_s=lease_s,
            owner=owner,
        )
        return cls(settings)

    def __repr__(self) -> str:
        return f"<RedisTier {self.place}>"

    # -- Tier --

    def put(self, key: str, header: bytes, segments: Sequence[Buffer]) -> int:
        """See Tier. LeaseHeld when another server has the lease."""
        check_key(key)
        check_header(header)
        return self._writer.put(key, bytes(header), [byte_view(segment) for segment in segments])

    def read_header(self, key: str) -> bytes | None:
        """See Tier."""
        return self._reader.read_header(check_key(key))

    def read_segments(self, key: str, offset: int, into: Sequence[memoryview]) -> None:
        """See Tier. Corrupt "version" or "checksum" too, when the object is not as it was put."""
        [error] = self.read_batch([(key, offset, into)])
        if error is not None:
            raise error

    def read_batch(
        self, requests: Sequence[tuple[str, int, Sequence[memoryview]]]
    ) -> list[StoreError | None]:
        """Many `read_segments` at once: what each would have raised, or None. A round trip for every 32 MiB.

        Raises:
            ValueError: as `read_segments`, for any of them; nothing was read.
        """
        reads = []
        for key, offset, into in requests:
            check_key(key)
            if offset < 0:
                raise ValueError(f"offset {offset}: expected 0 or more")
            reads.append(Read(key, offset, [writable_view(buffer) for buffer in into]))
        return self._reader.read_batch(reads)

    def delete(self, key: str) -> bool:
        """See Tier. LeaseHeld when another server has the lease."""
        check_key(key)
        self._reader.shapes.drop(key)
        return self._writer.delete(key)

    def scan(self, prefix: str) -> Iterator[Entry]:
        """See Tier. Asks the server; an object whose index entry was evicted is not seen."""
        return iter(self._directories.scan(prefix))

    def usage(self) -> TierUsage:
        """See Tier."""
        return self._stored.usage()

    # -- SharedTier --

    @property
    def available(self) -> bool:
        """See SharedTier. Of a cluster: while any known node is."""
        return self._wire.available

    @property
    def breaker_state(self) -> BreakerState:
        """The worst state of any server: "closed", "half-open" or "open"."""
        return self._wire.breaker_state

    def lease(self, prefix: str) -> AbstractContextManager[None]:
        """See SharedTier. It runs out when nothing is put below `prefix` for `lease_s`. Not reentrant."""
        return self._leases.lease(prefix)

    def touch(self, keys: Sequence[str]) -> None:
        """See SharedTier."""
        tags = dict.fromkeys(split_key(check_key(key))[0] for key in keys)
        exist = [Request(tag, ("EXISTS", self._keys.index(tag))) for tag in tags]
        indexes = [self._keys.extend(tag, self._keys.index(tag)) for tag in tags]
        objects = [self._keys.extend(tag, self._keys.object(tag, name)) for tag, name in map(split_key, keys)]
        replies = self._wire.run([*exist, *indexes, *objects])
        found = [tag for tag, reply in zip(tags, replies, strict=False) if reply == 1]
        self._wire.run([self._keys.list_directory(tag) for tag in found])

    def refresh(self) -> None:
        """See SharedTier. What changes meanwhile may be counted twice or not at all, until next time."""
        entries = self._directories.scan("")
        self._stored.set(sum(entry.bytes for entry in entries), len(entries))

    def check(self) -> list[str]:
        """Problems found; empty when sound. Reads every header."""
        return self._directories.check()

    def close(self) -> None:
        """Close the connections; later calls raise StoreUnavailable. Once is enough."""
        self._wire.close()

    def __enter__(self) -> RedisTier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _routes(self, nodes: Nodes, timing: Timing) -> Routes:
        url = self._settings.url
        if url.kind == "single":
            return FixedRoutes(url.endpoints[0])
        if url.kind == "cluster":
            return ClusterRoutes(url.endpoints, lambda *asked: self._wire.ask(*asked), timing.clock)
        return SentinelRoutes(url.endpoints, url.service, lambda *asked: self._wire.ask(*asked), timing.clock)


class _Node:
    """The connections to one server; see Node."""

    def __init__(self, endpoint: Endpoint, settings: RedisSettings, timing: Timing) -> None:
        self.place = f"redis {endpoint}"
        self.breaker = Breaker(clock=timing.clock, jitter=timing.jitter)
        self.slots = threading.Semaphore(settings.connections)
        self._timeout_s = settings.timeout_s
        self._closed = False
        self._pool = ConnectionPool(
            _connection_class(endpoint, settings),
            max_connections=settings.connections,
            socket_timeout=settings.timeout_s,
            socket_read_size=_READ_BYTES,
            retry=Retry(NoBackoff(), 0),  # the wire does it
            client_name=_CLIENT_NAME,
            driver_info=None,
            protocol=2,
            **_connection_options(endpoint, settings),
        )

    def exchange(
        self, packed: Sequence[bytes | memoryview], take: Sequence[Callable[[object], object]]
    ) -> list[object]:
        """See Node."""
        try:
            connection = self._pool.get_connection()
        except (said.RedisError, OSError) as error:
            raise node_failure(error, self._timeout_s) from error
        replies: list[object] = []
        try:
            connection.send_packed_command(packed)  # type: ignore[no-untyped-call]
            for taker in take:
                reply = self._read(connection)
                replies.append(reply if isinstance(reply, (StoreError, Elsewhere)) else taker(reply))
        except (said.RedisError, OSError) as error:
            raise node_failure(error, self._timeout_s) from error
        finally:
            if len(replies) < len(take) or self._closed:
                connection.disconnect()  # type: ignore[no-untyped-call]
            self._pool.release(connection)
        return replies

    def _read(self, connection: Connection) -> object:
        try:
            reply = connection.read_response()
        except said.ResponseError as error:
            return reply_error(error, self.place)
        if isinstance(reply, list):  # of EXEC: errors of single commands
            for item in reply:
                if isinstance(item, said.RedisError):
                    return reply_error(item, self.place)
        return reply

    def close(self) -> None:
        """See Node."""
        self._closed = True
        self._pool.disconnect(inuse_connections=False)


def _connection_class(endpoint: Endpoint, settings: RedisSettings) -> type[AbstractConnection]:
    if endpoint.path:
        return UnixDomainSocketConnection
    return SSLConnection if settings.url.tls else Connection


def _connection_options(endpoint: Endpoint, settings: RedisSettings) -> dict[str, Any]:
    """What differs by server. Sentinels have no databases, and are asked without a password."""
    url = settings.url
    options: dict[str, Any] = {"path": endpoint.path}
    if not endpoint.path:
        options = {"host": endpoint.host, "port": endpoint.port}
        options["socket_connect_timeout"] = settings.connect_timeout_s
    if url.tls and settings.tls_ca_file is not None:
        options["ssl_ca_certs"] = str(settings.tls_ca_file)
    if url.kind != "sentinel" or endpoint not in url.endpoints:
        options |= {"db": url.database, "username": url.username, "password": url.password}
    return options


def node_failure(error: Exception, timeout_s: float) -> NodeFailure:
    """What a connection that failed means."""
    text = str(error)
    code = getattr(error, "status_code", "") or ""
    if isinstance(error, said.AuthenticationError):
        if code == "NOAUTH":
            return NodeFailure("asks for a password (NOAUTH); set redis.password", again=False)
        return NodeFailure(
            "does not accept this user and password (WRONGPASS); correct redis.username and redis.password",
            again=False,
        )
    if isinstance(error, said.BusyLoadingError):
        return NodeFailure("is still loading its data (LOADING); wait for it", again=True)
    if isinstance(error, (said.TimeoutError, TimeoutError)):
        return NodeFailure(
            f"did not answer for {timeout_s:g} s; see whether it runs and how busy it is", again=True
        )
    if isinstance(error, said.NoPermissionError):
        return NodeFailure(f"{text} (NOPERM); give this user the right", again=False)
    if isinstance(error, said.ResponseError):
        return NodeFailure(f"refuses the connection: {text}; see redis.url", again=False)
    return NodeFailure(f"{text.rstrip('.')}; see whether it runs and redis.url is right", again=True)


def reply_error(error: said.RedisError, place: str) -> StoreError | Elsewhere:
    """What an error in place of an answer means."""
    text = f"{place}: {error}"
    if isinstance(error, said.OutOfMemoryError):
        return StoreFull(f"{text} (OOM); delete sessions, or raise maxmemory there")
    if isinstance(error, said.ReadOnlyError):
        return Elsewhere(StoreUnavailable(f"{text} (READONLY); put the address of the master in redis.url"))
    if isinstance(error, said.MovedError | said.AskError | said.TryAgainError | said.ClusterDownError):
        what = type(error).__name__.removesuffix("Error")
        return Elsewhere(
            StoreUnavailable(
                f"{text} ({what}); the cluster is changing or incomplete: try again, or write redis+cluster://"
            )
        )
    if isinstance(error, said.NoPermissionError):
        return StoreUnavailable(f"{text} (NOPERM); give this user the right")
    if str(error).startswith("WRONGTYPE"):
        return WrongType(f"{place}: WRONGTYPE: something else wrote a key of ours; delete it there")
    return StoreUnavailable(text)

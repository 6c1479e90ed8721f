"""Memory a server keeps for each stored chunk, by tracemalloc: many sessions of 12 chunks, page size 16.

What is counted are the real objects after real pauses: the tier's index, and what the registry keeps of each
session (found by its manifest). The SSD tier's index is keyed by the object's key (namespace, SHA-256 of the
session, generation, chunk index). A chunk's identity, the chained hash of its last page, is in the manifest
and in the chunk's header and takes no memory of the server. The Redis tier keeps no index of chunks: what it
counts is one pair of numbers, and the list of sessions it saw. Apart from both: the shapes of chunks it read
lately, at most 4,096 of them.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.redis_server import RedisServer
from benchmarks.sample import LAYOUT, NAMESPACE, SEGMENT_BYTES, Names
from benchmarks.tier_redis import open_tier
from sgl_krul.session.catalog import find_sessions, find_shared
from sgl_krul.session.registry import Registry
from sgl_krul.store import SsdTier
from sgl_krul.store.redis.pieces import decode_shape, encode_shape
from sgl_krul.store.redis.reader import Shapes
from sgl_krul.store.tier import Tier

__all__ = ["IndexResult", "measure_index"]

_CHUNKS = 12
_BODY = [[memoryview(bytes(8))]] * LAYOUT.layers  # an index does not hold bodies: small ones will do


@dataclass(frozen=True)
class IndexResult:
    """Bytes for each stored chunk; `shapes`: for each chunk read lately."""

    ssd: float
    redis: float
    shapes: float


def measure_index(place: Path, sessions: int) -> IndexResult:
    """`sessions` in the SSD tier; a fourth of them in Redis, and as many shapes as in there are chunks."""
    tracemalloc.start()
    try:
        return IndexResult(
            _of_ssd(place / "tier", sessions), _of_redis(place / "redis", sessions // 4), _of_shapes(sessions)
        )
    finally:
        tracemalloc.stop()


def _of_ssd(root: Path, sessions: int) -> float:
    registry = Registry()
    # Without fsync: what is kept after the commit of a session is the same, and this is quicker.
    with SsdTier(root, capacity_bytes=1 << 50, free_space_floor_bytes=0, fsync="never") as tier:

        def step(first: int, count: int) -> None:
            _pause(tier, first, count)
            for session in find_sessions(tier, NAMESPACE, now=time.time(), stale_ttl_s=1e9).sessions:
                registry.add(session)

        return _growth(step, sessions)


def _of_redis(directory: Path, sessions: int) -> float:
    registry = Registry()
    seen: dict[str, float] = {}
    with RedisServer(directory) as server, open_tier(server.url) as tier:

        def step(first: int, count: int) -> None:
            nonlocal seen
            _pause(tier, first, count)
            catalog, seen = find_shared(tier, NAMESPACE, seen)
            for session in catalog.sessions:
                registry.add(session)

        return _growth(step, sessions)


def _of_shapes(sessions: int) -> float:
    shapes = Shapes(1e9, time.monotonic)

    def step(first: int, count: int) -> None:
        for number in range(first, first + count):
            names = Names(number, _CHUNKS)
            for index in range(_CHUNKS):
                key = names.chunk_key(index)
                raw = encode_shape(key, bytes(16), [SEGMENT_BYTES] * LAYOUT.layers, b"")
                shapes.set(key, decode_shape(key, raw))

    return _growth(step, min(sessions, 4000 // _CHUNKS))


def _pause(tier: Tier, first: int, count: int) -> None:
    for number in range(first, first + count):
        names = Names(number, _CHUNKS)
        for index in range(_CHUNKS):
            tier.put(names.chunk_key(index), names.header(index, _BODY), [views[0] for views in _BODY])
        tier.put(names.manifest_key, names.manifest(), [])


def _growth(step: Callable[[int, int], None], sessions: int) -> float:
    """Bytes a chunk that `step` leaves behind; a few sessions before it pay for what is there once."""
    step(0, 4)
    before = _traced()
    step(4, sessions)
    return (_traced() - before) / (sessions * _CHUNKS)


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]

"""What every tier promises, run over each of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sgl_krul.errors import Corrupt, Missing, StoreFull
from sgl_krul.store import LinkTier, MemoryTier, SsdTier, Tier
from sgl_krul.store.tier import MAX_HEADER_BYTES
from tests.faults import Backing, FakeSharedTier
from tests.redis_servers import ValkeyServer, open_tier

LAYERS = 4
SEGMENT = 600
BODY = LAYERS * SEGMENT


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(params=["memory", "ssd", "redis", "fake", "link"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    """An empty tier with room for 64 objects of BODY bytes."""
    if request.param == "memory":
        memory = MemoryTier(LAYERS, SEGMENT, 64 * BODY)
        yield memory
        assert memory.check() == []
    elif request.param == "fake":
        yield FakeSharedTier(Backing(), capacity_bytes=64 * (BODY + 1))
    elif request.param == "redis":
        server: ValkeyServer = request.getfixturevalue("redis_server")
        server.client().flushall()
        with open_tier(server.url, capacity_bytes=64 * (BODY + 64)) as redis:
            yield redis
            assert redis.check() == []
    else:
        with SsdTier(
            tmp_path / "root", capacity_bytes=64 * (BODY + 4096), free_space_floor_bytes=0, fsync="never"
        ) as ssd:
            yield LinkTier(ssd, bytes_per_s=1e9, jitter=0.5) if request.param == "link" else ssd
            assert ssd.check() == []


def body(seed: int) -> bytes:
    return random.Random(seed).randbytes(BODY)


def split(data: bytes) -> list[memoryview]:
    return [memoryview(data)[start : start + SEGMENT] for start in range(0, BODY, SEGMENT)]


def read(tier: Tier, key: str, offset: int = 0, sizes: tuple[int, ...] = (BODY,)) -> bytes:
    buffers = [bytearray(size) for size in sizes]
    tier.read_segments(key, offset, [memoryview(buffer) for buffer in buffers])
    return b"".join(buffers)


def test_put_then_read(tier: Tier) -> None:
    stored = tier.put("a/b.1/c_d-e", b"header", split(body(1)))
    assert tier.read_header("a/b.1/c_d-e") == b"header"
    assert read(tier, "a/b.1/c_d-e") == body(1)
    assert tier.usage().bytes == stored >= BODY
    assert tier.usage().objects == 1
    assert tier.usage().capacity_bytes > 0


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_segments_may_be_any_buffer(tier: Tier, kind: Callable[[memoryview], bytes]) -> None:
    tier.put("key", b"", [kind(segment) for segment in split(body(2))])
    assert read(tier, "key") == body(2)


def test_what_is_put_is_a_copy(tier: Tier) -> None:
    data = bytearray(body(3))
    tier.put("key", b"", split(data))  # type: ignore[arg-type]
    data[:] = bytes(BODY)
    assert read(tier, "key") == body(3)


@pytest.mark.parametrize("header", [b"", b"x", b"\0" * 4064, b"y" * 4065, b"z" * 100_000])
def test_headers_of_any_length(tier: Tier, header: bytes) -> None:
    tier.put("key", header, split(body(4)))
    assert tier.read_header("key") == header
    assert read(tier, "key") == body(4)


@pytest.mark.parametrize(
    ("offset", "sizes"),
    [
        (0, ()),
        (0, (1,)),
        (SEGMENT, (SEGMENT, SEGMENT)),
        (SEGMENT, (7, 0, SEGMENT, 1, 2 * SEGMENT - 8)),
        (3 * SEGMENT, (SEGMENT,)),
        (0, (1,) * BODY),
        (BODY, ()),
    ],
)
def test_a_range_is_read_into_any_buffers(tier: Tier, offset: int, sizes: tuple[int, ...]) -> None:
    tier.put("key", b"h", split(body(5)))
    assert read(tier, "key", offset, sizes) == body(5)[offset : offset + sum(sizes)]


def test_a_buffer_may_have_any_shape(tier: Tier) -> None:
    tier.put("key", b"h", split(body(5)))
    target = memoryview(bytearray(BODY)).cast("B", shape=[LAYERS, SEGMENT // 4, 4])
    tier.read_segments("key", 0, [target])
    assert target.tobytes() == body(5)


@pytest.mark.parametrize(("offset", "size"), [(0, BODY + 1), (3 * SEGMENT, SEGMENT + 1), (BODY + SEGMENT, 1)])
def test_a_range_past_the_end_is_corrupt(tier: Tier, offset: int, size: int) -> None:
    tier.put("key", b"h", split(body(6)))
    with pytest.raises(Corrupt) as caught:
        read(tier, "key", offset, (size,))
    assert caught.value.reason == "length"


def test_bad_buffers_are_refused(tier: Tier) -> None:
    tier.put("key", b"h", split(body(6)))
    with pytest.raises(ValueError, match="offset -600"):
        read(tier, "key", -SEGMENT, (1,))
    with pytest.raises(ValueError, match="read-only"):
        tier.read_segments("key", 0, [memoryview(bytes(4))])
    with pytest.raises(ValueError, match="C-contiguous"):
        tier.read_segments("key", 0, [memoryview(bytearray(8))[::2]])
    with pytest.raises(ValueError, match="C-contiguous"):
        tier.put("key", b"h", [memoryview(bytes(2 * SEGMENT))[::2]] * LAYERS)
    with pytest.raises(ValueError, match="header of"):
        tier.put("key", bytes(MAX_HEADER_BYTES + 1), split(body(6)))
    assert read(tier, "key") == body(6)


def test_put_replaces(tier: Tier) -> None:
    first = tier.put("key", b"old", split(body(7)))
    assert tier.put("key", b"new", split(body(8))) == first
    assert tier.read_header("key") == b"new"
    assert read(tier, "key") == body(8)
    assert tier.usage()[:2] == (first, 1)


def test_what_is_not_there_is_a_miss(tier: Tier) -> None:
    tier.put("there/below", b"h", split(body(9)))
    for key in ("nothing", "no/thing", "there", "there/below/more"):
        assert tier.read_header(key) is None
        assert tier.delete(key) is False
        with pytest.raises(Missing):
            read(tier, key, 0, (1,))
    assert tier.read_header("there/below") == b"h"


def test_delete(tier: Tier) -> None:
    tier.put("a/b/c", b"h", split(body(10)))
    stored = tier.put("a/d", b"h", split(body(11)))
    assert tier.delete("a/b/c") is True
    assert tier.delete("a/b/c") is False
    assert tier.read_header("a/b/c") is None
    assert read(tier, "a/d") == body(11)
    assert tier.usage()[:2] == (stored, 1)
    tier.put("a/b/c", b"again", split(body(10)))
    assert read(tier, "a/b/c") == body(10)


def test_scan_goes_by_prefix(tier: Tier) -> None:
    keys = ["a/1", "a/10", "a/2", "ab/1", "b"]
    stored = {key: tier.put(key, b"h", split(body(12))) for key in reversed(keys)}
    assert [entry.key for entry in tier.scan("")] == keys
    assert [entry.key for entry in tier.scan("a/")] == ["a/1", "a/10", "a/2"]
    assert [entry.key for entry in tier.scan("a/1")] == ["a/1", "a/10"]
    assert list(tier.scan("c")) == []
    for entry in tier.scan(""):
        assert entry.bytes == stored[entry.key]
        assert entry.modified > 1_500_000_000


def test_scan_shows_the_moment_of_the_call(tier: Tier) -> None:
    tier.put("a", b"h", split(body(13)))
    entries = tier.scan("")
    tier.delete("a")
    tier.put("b", b"h", split(body(13)))
    assert [entry.key for entry in entries] == ["a"]


BAD_KEYS = [
    "",
    "/a",
    "a/",
    "a//b",
    "..",
    "a/../b",
    "a/./b",
    ".tmp-1",
    "A",
    "a b",
    "a\n",
    "ä",
    "a\0",
    "-a",
    "a/.b",
    "a" * 201,
]


@pytest.mark.parametrize("key", [*BAD_KEYS, "a/" * 300 + "a"])
def test_bad_keys_are_refused(tier: Tier, key: str) -> None:
    for call in (
        lambda: tier.put(key, b"", split(body(0))),
        lambda: tier.read_header(key),
        lambda: tier.read_segments(key, 0, []),
        lambda: tier.delete(key),
    ):
        with pytest.raises(ValueError, match="expected"):
            call()
    assert tier.usage().objects == 0


def test_the_longest_key_works(tier: Tier) -> None:
    key = "/".join(["k" * 170] * 3)
    tier.put(key, b"h", split(body(14)))
    assert read(tier, key) == body(14)
    assert tier.delete(key) is True


def test_a_full_tier_keeps_its_bound(tier: Tier) -> None:
    refused = 0
    for index in range(100):
        try:
            tier.put(f"full/{index}", b"h", split(body(index)))
        except StoreFull:
            refused += 1
        assert tier.usage().bytes <= tier.usage().capacity_bytes
    assert tier.usage().objects == 64
    assert refused in (0, 36)  # memory evicts, SSD and Redis refuse
    for entry in tier.scan(""):
        assert read(tier, entry.key) == body(int(entry.key.removeprefix("full/")))


def test_threads_see_whole_objects_only(tier: Tier) -> None:
    """Writers, deleters and readers on few keys: every object read is one that was put, whole."""
    stop = threading.Event()
    bodies = [body(seed) for seed in range(8)]

    def write(seed: int) -> int:
        rng = random.Random(seed)
        for count in range(150):
            version = rng.randrange(8)
            tier.put(f"s{rng.randrange(3)}/key", bytes([version]), split(bodies[version]))
            if count % 10 == 0:
                tier.delete(f"s{rng.randrange(3)}/key")
        return 150

    def look(seed: int) -> int:
        rng = random.Random(seed)
        seen = 0
        while not stop.is_set():
            key = f"s{rng.randrange(3)}/key"
            try:
                found = read(tier, key)
            except Missing:
                continue
            assert found in bodies
            header = tier.read_header(key)
            assert header is None or len(header) == 1
            assert all(entry.key.endswith("/key") for entry in tier.scan(""))
            assert tier.usage().objects <= 3
            seen += 1
        return seen

    with ThreadPoolExecutor(6) as pool:
        readers = [pool.submit(look, seed) for seed in range(3)]
        writers = [pool.submit(write, seed) for seed in range(3)]
        try:
            assert [writer.result(20) for writer in writers] == [150] * 3
        finally:
            stop.set()
        assert sum(reader.result(20) for reader in readers) > 0

"""The Redis tier on real servers: what lies there, what happens when they die, stand still or fill up."""

from __future__ import annotations

import logging
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sgl_krul.errors import Corrupt, LeaseHeld, Missing, StoreFull, StoreUnavailable
from sgl_krul.store import RedisTier
from sgl_krul.store.redis.in_flight import InFlight
from sgl_krul.store.redis.pieces import MAX_PIECE_BYTES
from tests.redis_servers import (
    Proxy,
    ValkeyServer,
    certificates,
    cluster,
    open_tier,
    replica_of,
    sentinel,
    wait_until,
)

KIB, MIB = 1 << 10, 1 << 20
PROJECT = Path(__file__).parents[2]
SECRET = "s3cr3t-p4ss"


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server(shared_server: ValkeyServer) -> ValkeyServer:
    """An empty server that no test may hurt."""
    shared_server.client().flushall()
    return shared_server


@pytest.fixture
def tier(server: ValkeyServer) -> Iterator[RedisTier]:
    with open_tier(server.url) as tier:
        yield tier


@pytest.fixture
def own(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server that may be hurt."""
    with ValkeyServer(tmp_path / "own") as server:
        yield server


def body(seed: int, *sizes: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(size) for size in sizes]


def read(tier: RedisTier, key: str, size: int, offset: int = 0) -> bytes:
    buffer = bytearray(size)
    tier.read_segments(key, offset, [memoryview(buffer)])
    return bytes(buffer)


def unavailable(call: Callable[[], object]) -> str:
    with pytest.raises(StoreUnavailable) as caught:
        call()
    return str(caught.value)


def names(tier: RedisTier, prefix: str = "") -> list[str]:
    return [entry.key for entry in tier.scan(prefix)]


def temporaries(server: ValkeyServer) -> list[bytes]:
    return list(server.client().keys("*.tmp-*"))


# -- what lies there --


def test_the_hash_is_as_documented(server: ValkeyServer, tier: RedisTier) -> None:
    sizes = (393 * KIB, 100, 200, 0, 2 * MIB + 5, 300 * KIB)
    segments = body(1, *sizes)
    stored = tier.put("v1/s/c0", b"header", segments)
    client = server.client()
    fields = client.hgetall("krul:{v1/s}/c0")
    shape = fields.pop(b"m")
    assert fields == {
        b"h": b"header",
        b"0": segments[0],
        b"1": segments[1] + segments[2],
        b"2": segments[4][:MIB],
        b"3": segments[4][MIB : 2 * MIB],
        b"4": segments[4][2 * MIB :],
        b"5": segments[5],
    }
    assert stored == len(shape) + len(b"header") + sum(sizes)
    [(name, value)] = client.hgetall("krul:{v1/s}").items()
    assert (name, value.split()[0]) == (b"c0", str(stored).encode())
    assert set(client.keys("*")) == {
        b"krul:{v1/s}/c0",
        b"krul:{v1/s}",
        b"krul:{/directories}:names",
        b"krul:{/directories}:times",
    }
    assert client.zrange("krul:{/directories}:names", 0, -1) == [b"v1/s"]
    assert read(tier, "v1/s/c0", sum(sizes)) == b"".join(segments)


def test_parts_of_a_large_object(tier: RedisTier) -> None:
    """More than a round of writing, and of one command of reading; any part can be read."""
    segments = body(2, *[700 * KIB] * 9, *[100 * KIB] * 9, 3 * MIB)
    whole = b"".join(segments)
    tier.put("s/c", b"h", segments)
    rng = random.Random(3)
    for _ in range(30):
        start = rng.randrange(len(whole))
        size = rng.randrange(min(len(whole) - start, 3 * MIB) + 1)
        assert read(tier, "s/c", size, start) == whole[start : start + size]
    assert tier.check() == []


def test_a_layer_of_all_chunks_is_one_round_trip(server: ValkeyServer, tier: RedisTier) -> None:
    segments = body(4, *[300 * KIB] * 4)
    for number in range(5):
        tier.put(f"s/c{number}", b"h", segments)
        tier.read_header(f"s/c{number}")
    buffers = [bytearray(300 * KIB) for _ in range(5)]
    before = server.client().info("stats")["total_net_output_bytes"]
    calls = server.client().info("commandstats")["cmdstat_hmget"]["calls"]
    errors = tier.read_batch(
        [(f"s/c{number}", 300 * KIB, [memoryview(buffers[number])]) for number in range(5)]
    )
    assert errors == [None] * 5
    assert all(bytes(buffer) == segments[1] for buffer in buffers)
    assert server.client().info("commandstats")["cmdstat_hmget"]["calls"] == calls + 5
    sent = server.client().info("stats")["total_net_output_bytes"] - before
    assert sent < 5 * 300 * KIB + 50_000


def test_a_batch_tells_of_each(server: ValkeyServer, tier: RedisTier) -> None:
    segments = body(5, 1000)
    for key in ("s/good", "t/good", "s/bad", "s/short"):
        tier.put(key, b"h", segments)
    server.client().hset("krul:{s}/bad", "m", b"nonsense, and long enough")
    buffers = [memoryview(bytearray(1000)) for _ in range(5)]
    keys = ["s/good", "s/gone", "s/bad", "t/good", "s/short"]
    sizes = [0, 0, 0, 0, 1]
    requests = [(key, size, [buffer]) for key, size, buffer in zip(keys, sizes, buffers, strict=True)]
    good, gone, bad, other, short = tier.read_batch(requests)
    assert good is other is None
    assert bytes(buffers[0]) == bytes(buffers[3]) == segments[0]
    assert isinstance(gone, Missing)
    assert isinstance(bad, Corrupt)
    assert isinstance(short, Corrupt)
    with pytest.raises(ValueError, match="offset -1"):
        tier.read_batch([("s/good", 0, [buffers[0]]), ("s/good", -1, [])])


def test_every_key_has_a_life_time_that_use_renews(server: ValkeyServer, tier: RedisTier) -> None:
    client = server.client()
    tier.put("v1/s/a", b"h", body(6, 10))
    with tier.lease("v1/s/"):
        tier.put("v1/s/a", b"h", body(6, 10))
        for key in client.keys("*"):
            assert client.pttl(key) > 0, key
    uses: list[Callable[[], object]] = [
        lambda: tier.read_header("v1/s/a"),
        lambda: tier.put("v1/s/a", b"h", body(6, 10)),
        lambda: tier.touch(["v1/s/a"]),
    ]
    for use in uses:
        client.pexpire("krul:{v1/s}/a", 20_000)
        client.pexpire("krul:{v1/s}", 20_000)
        use()
        assert client.pttl("krul:{v1/s}/a") > 590_000
        assert client.pttl("krul:{v1/s}") > 590_000
    client.delete("krul:{/directories}:names", "krul:{/directories}:times")
    tier.touch(["v1/s/a"])
    assert client.pttl("krul:{/directories}:names") > 590_000
    assert names(tier) == ["v1/s/a"]


def test_a_shorter_ttl_shortens_nothing(server: ValkeyServer, tier: RedisTier) -> None:
    """It counts for what the server with it puts, and for nothing that others did."""
    client = server.client()
    tier.put("s/a", b"h", body(6, 10))
    with open_tier(server.url, ttl_s=20.0) as short:
        uses: list[Callable[[], object]] = [
            lambda: short.read_header("s/a"),
            lambda: short.touch(["s/a"]),
            lambda: short.put("s/b", b"h", body(6, 10)),
            lambda: short.scan(""),
        ]
        for use in uses:
            use()
            for key in ("krul:{s}/a", "krul:{s}", *client.keys("krul:{/directories}:*")):
                assert client.pttl(key) > 590_000, key
        assert client.pttl("krul:{s}/b") < 20_001
    with open_tier(server.url, ttl_s=20.0) as short:
        read(short, "s/a", 10)
    assert client.pttl("krul:{s}/a") > 590_000
    tier.read_header("s/b")
    assert client.pttl("krul:{s}/b") > 590_000


def test_touch_lists_a_directory_also_when_it_renews_nothing(server: ValkeyServer, tier: RedisTier) -> None:
    tier.put("s/a", b"h", body(6, 10))
    server.client().delete("krul:{/directories}:names", "krul:{/directories}:times")
    with open_tier(server.url, ttl_s=20.0) as short:
        short.touch(["s/a", "t/a"])
        assert names(short) == ["s/a"]
    assert server.client().zrange("krul:{/directories}:names", 0, -1) == [b"s"]


def test_a_put_ends_what_was_made_to_last(server: ValkeyServer, tier: RedisTier) -> None:
    client = server.client()
    tier.put("s/a", b"h", body(6, 10))
    for key in client.keys("*"):
        assert client.persist(key)
    tier.read_header("s/a")
    assert client.pttl("krul:{s}/a") == -1  # somebody wanted that
    tier.put("s/a", b"h", body(6, 10))
    assert all(client.pttl(key) > 590_000 for key in client.keys("*"))


def test_a_read_without_its_header_renews_too(server: ValkeyServer, tier: RedisTier) -> None:
    tier.put("s/a", b"h", body(6, 10))
    server.client().pexpire("krul:{s}/a", 20_000)
    read(tier, "s/a", 10)
    assert server.client().pttl("krul:{s}/a") > 590_000


def test_objects_end_with_their_life_time(server: ValkeyServer) -> None:
    with open_tier(server.url, ttl_s=1.0) as tier:
        tier.put("s/a", b"h", body(7, 10))
        assert names(tier) == ["s/a"]
        wait_until(lambda: names(tier) == [], 5)
        assert tier.read_header("s/a") is None
        with pytest.raises(Missing):
            read(tier, "s/a", 10)
        tier.refresh()
        assert tier.usage()[:2] == (0, 0)
        wait_until(lambda: server.client().dbsize() == 0, 5)


def test_entries_of_what_was_evicted_are_removed(server: ValkeyServer, tier: RedisTier) -> None:
    client = server.client()
    for name in "abc":
        tier.put(f"s/{name}", b"h", body(8, 10))
    client.delete("krul:{s}/b")
    assert len(tier.check()) == 1
    assert names(tier, "s/") == names(tier) == ["s/a", "s/c"]
    assert client.hkeys("krul:{s}") == [b"a", b"c"]
    assert tier.check() == []
    client.delete("krul:{s}")
    assert names(tier) == []
    assert tier.read_header("s/a") == b"h"
    tier.put("s/a", b"again", body(8, 10))
    assert names(tier) == ["s/a"]


def test_a_directory_with_nothing_in_it_is_unlisted_after_an_hour(
    server: ValkeyServer, tier: RedisTier
) -> None:
    client = server.client()
    now_us = int(time.time() * 1e6)
    client.zadd("krul:{/directories}:names", {"v1/new": 0, "v1/old": 0, "v1/unknown": 0})
    client.zadd("krul:{/directories}:times", {"v1/new": now_us, "v1/old": now_us - 3700 * 10**6})
    assert names(tier) == []
    assert client.zrange("krul:{/directories}:names", 0, -1) == [b"v1/new"]
    assert client.zrange("krul:{/directories}:times", 0, -1) == [b"v1/new"]


def test_foreign_entries_are_not_believed(server: ValkeyServer, tier: RedisTier) -> None:
    client = server.client()
    tier.put("s/a", b"h", body(9, 10))
    client.zadd("krul:{/directories}:names", {"../x": 0, "S": 0, "a{b}": 0, b"\xff": 0, "t": 0})
    client.hset("krul:{s}", mapping={"b": "1", "../c": "1 1.000000", "d": "x y", b"\xff": "1 1.000000"})
    client.hset("krul:{s}", "e", "9" * 30 + " 1.000000")
    client.set("krul:{t}", "no hash")
    assert len(tier.check()) == 6
    assert names(tier, "s/") == names(tier) == ["s/a"]
    assert names(tier, "t/") == []
    assert len(tier.check()) == 5  # the directory that is none is listed no more


def test_scan_finds_what_lies_deeper(tier: RedisTier) -> None:
    keys = ["a/1", "a/b/2", "a/b/c/3", "a/bc/4", "ab/5", "top"]
    for key in keys:
        tier.put(key, b"h", [])
    for prefix in (
        "",
        "a",
        "a/",
        "a/b",
        "a/b/",
        "a/b/c",
        "a/b/c/",
        "a/b/c/3",
        "ab/",
        "t",
        "top",
        "topper",
        "x/",
    ):
        assert names(tier, prefix) == [key for key in keys if key.startswith(prefix)], prefix
    for prefix in ("A", "/", "a//", "{a}/", "..", "a/.tmp"):
        assert names(tier, prefix) == []


def test_many_directories(server: ValkeyServer, tier: RedisTier) -> None:
    keys = sorted(f"v1/n/{number:04}/{name}" for number in range(450) for name in ("c", "manifest"))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda key: tier.put(key, b"h", []), keys))
    assert names(tier) == names(tier, "v1/n/") == keys
    assert names(tier, "v1/n/0017/") == keys[34:36]


def test_two_thousand_sessions_leave_nothing_behind(server: ValkeyServer, tier: RedisTier) -> None:
    def remembered(thing: object, seen: set[int]) -> int:
        """Entries of all containers below an object of ours."""
        if id(thing) in seen or isinstance(thing, (str, bytes, int, float)):
            return 0
        seen.add(id(thing))
        if isinstance(thing, dict):
            return len(thing) + sum(remembered(value, seen) for value in thing.values())
        if isinstance(thing, (list, tuple, set)):
            return len(thing) + sum(remembered(value, seen) for value in thing)
        if type(thing).__module__.startswith("sgl_krul"):
            return remembered(vars(thing), seen) if hasattr(thing, "__dict__") else 0
        return 0

    def session(number: int) -> None:
        key = f"v1/n/{number}/manifest"
        with tier.lease(f"v1/n/{number}/"):
            tier.put(key, b"h", [b"x" * 100])
        tier.read_header(key)
        assert tier.delete(key) is True

    session(0)
    before = remembered(tier, set())
    assert before > 10
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(session, range(2000)))
    assert server.client().dbsize() == 0
    assert tier.usage()[:2] == (0, 0)
    assert remembered(tier, set()) == before


# -- keys that something else wrote --


def wrong(server: ValkeyServer, key: str, kind: str) -> None:
    client = server.client()
    client.delete(key)
    if kind == "string":
        client.set(key, "x")
    elif kind == "list":
        client.rpush(key, "x")
    else:
        client.hset(key, "x", "y")


def refused(call: Callable[[], object], key: str) -> None:
    """It raises StoreUnavailable, never Corrupt, and names this key alone."""
    text = unavailable(call)
    assert text.endswith(f"something else wrote a key of ours; delete it there: {key}"), text


@pytest.mark.parametrize("kind", ["string", "list", "hash"])
@pytest.mark.parametrize("which", ["names", "times"])
def test_lists_of_directories_of_another_type(
    which: str, kind: str, server: ValkeyServer, tier: RedisTier
) -> None:
    tier.put("s/a", b"h", body(10, 1000))
    key = f"krul:{{/directories}}:{which}"
    wrong(server, key, kind)
    refused(lambda: tier.put("s/b", b"h", body(10, 1000)), key)
    refused(lambda: tier.put("t/b", b"h", body(10, 1000)), key)
    assert temporaries(server) == []
    if which == "names":
        refused(lambda: tier.scan(""), key)
        refused(tier.refresh, key)
        refused(tier.check, key)
    assert names(tier, "s/") == ["s/a"]
    assert read(tier, "s/a", 1000) == body(10, 1000)[0]
    with tier.lease("s/"):
        tier.touch(["s/a"])
        assert tier.delete("s/a") is True
    server.client().delete(key)
    tier.put("t/b", b"h", body(10, 1000))
    assert names(tier) == ["t/b"]
    assert tier.breaker_state == "closed"


@pytest.mark.parametrize("kind", ["string", "list"])
def test_an_index_of_another_type(kind: str, server: ValkeyServer, tier: RedisTier) -> None:
    tier.put("s/a", b"h", body(10, 1000))
    tier.put("t/a", b"h", body(10, 1000))
    wrong(server, "krul:{s}", kind)
    refused(lambda: tier.put("s/a", b"new", []), "krul:{s}")
    refused(lambda: tier.delete("s/a"), "krul:{s}")
    assert temporaries(server) == []
    assert names(tier) == ["t/a"]
    assert names(tier, "s/") == []
    assert len(tier.check()) == 1
    tier.touch(["s/a"])
    assert tier.read_header("s/a") == b"h"
    server.client().delete("krul:{s}")
    tier.put("s/a", b"new", [])
    assert names(tier) == ["s/a", "t/a"]


@pytest.mark.parametrize("kind", ["list", "hash"])
def test_a_lease_of_another_type(kind: str, server: ValkeyServer, tier: RedisTier) -> None:
    tier.put("s/a", b"h", body(10, 1000))
    key = "krul:{s}/.lease"
    wrong(server, key, kind)
    refused(lambda: tier.put("s/a", b"new", []), key)
    refused(lambda: tier.delete("s/a"), key)
    refused(lambda: tier.lease("s/").__enter__(), key)
    assert temporaries(server) == []
    assert tier.read_header("s/a") == b"h"
    server.client().delete(key)
    with tier.lease("s/"):
        tier.put("s/a", b"new", [])
        wrong(server, key, kind)
        refused(lambda: tier.put("s/a", b"late", []), key)
    assert tier.read_header("s/a") == b"new"


@pytest.mark.parametrize("kind", ["string", "list"])
def test_an_object_of_another_type(kind: str, server: ValkeyServer, tier: RedisTier) -> None:
    """Who reads finds it corrupt; a put or delete does away with it."""
    tier.put("s/a", b"h", body(10, 1000))
    tier.read_header("s/a")
    for _ in range(2):  # with its shape remembered, and without
        wrong(server, "krul:{s}/a", kind)
        with pytest.raises(Corrupt, match=r"delete it there: krul:\{s\}/a") as caught:
            read(tier, "s/a", 1000)
        assert caught.value.reason == "version"
        with pytest.raises(Corrupt):
            tier.read_header("s/a")
        assert len(tier.check()) == 1
        assert names(tier) == ["s/a"]
        tier.put("s/a", b"h", body(10, 1000))
    wrong(server, "krul:{s}/a", kind)
    assert tier.delete("s/a") is True
    assert server.client().dbsize() == 0


def test_who_may_not_ask_for_types_is_told_all_keys(server: ValkeyServer) -> None:
    rights = ["~krul:*", "+@all", "-type"]
    server.client().execute_command("ACL", "SETUSER", "typeless", "on", f">{SECRET}", *rights)
    wrong(server, "krul:{/directories}:names", "string")
    with open_tier(server.url, username="typeless", password=SECRET) as tier:
        text = unavailable(lambda: tier.put("s/a", b"h", []))
        assert text.endswith("there: krul:{/directories}:names or krul:{/directories}:times")


@pytest.mark.parametrize("holder", [b"x", b"somebody:1/abc", b""])
def test_a_lease_that_would_not_end_is_held_for_one_life_more(holder: bytes, server: ValkeyServer) -> None:
    client = server.client()
    with open_tier(server.url, lease_s=0.5) as tier:
        calls: list[Callable[[], object]] = [
            lambda: tier.put("s/a", b"h", []),
            lambda: tier.delete("s/a"),
            lambda: tier.lease("s/").__enter__(),
        ]
        owner = ascii(holder.decode().partition("/")[0])
        for call in calls:
            client.set("krul:{s}/.lease", holder)
            with pytest.raises(LeaseHeld, match=rf"written by {owner} \(its lease has 0\.5 s left\)"):
                call()
            assert 0 < client.pttl("krul:{s}/.lease") <= 500
        wait_until(lambda: not client.exists("krul:{s}/.lease"), 5)
        with tier.lease("s/"):
            tier.put("s/a", b"h", [])
            client.persist("krul:{s}/.lease")
            tier.put("s/a", b"again", [])
            assert 0 < client.pttl("krul:{s}/.lease") <= 500


# -- damage --


def test_damage_is_found(server: ValkeyServer, tier: RedisTier) -> None:
    client = server.client()
    damages: list[tuple[str, Callable[[str], object], str]] = [
        ("header", lambda key: client.hset(key, "h", b"heaeer"), "checksum"),
        ("no header", lambda key: client.hdel(key, "h"), "length"),
        ("shape", lambda key: client.hset(key, "m", client.hget(key, "m")[:-1] + b"x"), "checksum"),
        ("no shape", lambda key: client.hdel(key, "m"), "length"),
        ("short shape", lambda key: client.hset(key, "m", b"1"), "length"),
        ("other type", lambda key: (client.delete(key), client.set(key, "x")), "version"),
    ]
    for what, damage, reason in damages:
        tier.put("s/a", b"header", body(10, 1000))
        damage("krul:{s}/a")
        assert len(tier.check()) == 1, what
        with pytest.raises(Corrupt) as caught:
            tier.read_header("s/a")
        assert caught.value.reason == reason, what
        assert tier.delete("s/a") is True, what
    tier.put("s/a", b"header", body(10, 1000))
    assert tier.check() == []


def test_damaged_pieces_are_found(server: ValkeyServer, tier: RedisTier) -> None:
    client = server.client()
    key = "krul:{s}/a"
    damages: list[Callable[[], object]] = [
        lambda: client.hdel(key, "1"),
        lambda: client.hset(key, "1", b"short"),
        lambda: client.hset(key, "1", client.hget(key, "1") + b"x"),
    ]
    for damage in damages:
        tier.put("s/a", b"h", body(11, 300 * KIB, 300 * KIB))
        damage()
        assert len(tier.check()) == 1
        with pytest.raises(Corrupt, match="piece 1") as caught:
            read(tier, "s/a", 600 * KIB)
        assert caught.value.reason == "length"
        assert read(tier, "s/a", 300 * KIB) == body(11, 300 * KIB)[0]


def test_another_objects_hash_in_its_place_is_found(server: ValkeyServer, tier: RedisTier) -> None:
    tier.put("s/a", b"h", body(12, 1000))
    tier.put("s/b", b"h", body(13, 1000))
    server.client().rename("krul:{s}/b", "krul:{s}/a")
    with pytest.raises(Corrupt, match="another object's"):
        tier.read_header("s/a")
    with open_tier(server.url) as other, pytest.raises(Corrupt):
        read(other, "s/a", 1000)


def test_a_remembered_shape_never_outlives_its_object(server: ValkeyServer, tier: RedisTier) -> None:
    tier.put("s/a", b"h", body(14, 1000, 1000))
    tier.read_header("s/a")
    with open_tier(server.url) as other:
        other.put("s/a", b"h", body(15, 500 * KIB, 500 * KIB))
    assert read(tier, "s/a", 1000 * KIB) == b"".join(body(15, 500 * KIB, 500 * KIB))
    server.client().delete("krul:{s}/a")
    with pytest.raises(Missing):
        read(tier, "s/a", 1000)


def test_a_read_of_several_round_trips_is_of_one_object(server: ValkeyServer, tier: RedisTier) -> None:
    """The object is replaced in the middle by one of the same lengths: never a mixture."""
    count = 36  # MiB; a round trip brings 32
    tier.put("s/a", b"h", [b"0" * MIB] * count)
    with (
        Proxy(server.port) as proxy,
        open_tier(f"redis://127.0.0.1:{proxy.port}") as slow,
        ThreadPoolExecutor(1) as pool,
    ):
        slow.read_header("s/a")
        proxy.delay_s = 0.005
        found = pool.submit(read, slow, "s/a", count * MIB)
        for number in range(1, 5):
            time.sleep(0.05)
            tier.put("s/a", b"h", [str(number).encode() * MIB] * count)
        data = found.result(30)
    assert data.count(data[:1]) == count * MIB
    assert data[:1] in b"01234"


# -- servers that die, and lines that break --


def test_a_put_cut_off_is_never_seen_and_ends_by_itself(server: ValkeyServer) -> None:
    with Proxy(server.port) as proxy, open_tier(f"redis://127.0.0.1:{proxy.port}") as tier:
        tier.put("s/a", b"old", body(16, 1000))
        proxy.cut_after = 9 * MIB  # in the second round
        unavailable(lambda: tier.put("s/a", b"new", body(17, *[MIB] * 12)))
        [left] = temporaries(server)
        assert 0 < server.client().pttl(left) <= 60_000
        proxy.cut_after = None
        wait_until(lambda: tier.available, 5)
        assert names(tier) == ["s/a"]
        assert tier.read_header("s/a") == b"old"
        assert read(tier, "s/a", 1000) == body(16, 1000)[0]
        assert tier.check() == []


def test_an_answer_that_got_lost_is_asked_for_again(server: ValkeyServer) -> None:
    with Proxy(server.port) as proxy, open_tier(f"redis://127.0.0.1:{proxy.port}") as tier:
        for swallowed in (b"$2\r\nok\r\n$0\r\n", b"*2\r\n:"):  # of the commit; of the first transaction
            proxy.swallow = swallowed
            stored = tier.put("s/a", b"h", body(18, 1000))
            assert proxy.swallow is None
            assert read(tier, "s/a", 1000) == body(18, 1000)[0]
        proxy.swallow = b"ok"
        with tier.lease("s/"):
            assert proxy.swallow is None
        tier.refresh()
        assert tier.usage()[:2] == (stored, 1)
        proxy.swallow = body(18, 1000)[0][500:540]
        assert read(tier, "s/a", 1000) == body(18, 1000)[0]
        assert proxy.swallow is None
        assert temporaries(server) == []


def test_kill_in_the_middle_of_a_put(own: ValkeyServer) -> None:
    with (
        Proxy(own.port) as proxy,
        open_tier(f"redis://127.0.0.1:{proxy.port}", timeout_s=2.0) as tier,
        ThreadPoolExecutor(1) as pool,
    ):
        proxy.delay_s = 0.05
        put = pool.submit(tier.put, "s/a", b"h", body(19, *[MIB] * 40))
        wait_until(lambda: temporaries(own))
        own.kill()
        assert isinstance(put.exception(10), StoreUnavailable)
        assert "127.0.0.1" in unavailable(lambda: tier.read_header("s/a"))
        own.start()
        proxy.delay_s = 0.0
        wait_until(lambda: tier.available, 20)
        assert tier.read_header("s/a") is None
        tier.put("s/a", b"h", body(19, MIB))
        assert read(tier, "s/a", MIB) == body(19, MIB)[0]


def test_restart_in_the_middle_of_a_put(own: ValkeyServer) -> None:
    """The new server has not what the old one got: the commit finds that out."""
    with (
        Proxy(own.port) as proxy,
        open_tier(f"redis://127.0.0.1:{proxy.port}") as tier,
        ThreadPoolExecutor(1) as pool,
    ):
        proxy.delay_s = 0.1
        put = pool.submit(tier.put, "s/a", b"h", body(20, *[MIB] * 14))
        wait_until(lambda: temporaries(own))
        own.client().flushall()
        error = put.exception(20)
        assert isinstance(error, StoreUnavailable)
        assert "vanished before it was complete" in str(error)
        assert tier.read_header("s/a") is None


def test_kill_in_the_middle_of_a_read(own: ValkeyServer) -> None:
    segments = body(21, *[MIB] * 30)
    with (
        Proxy(own.port) as proxy,
        open_tier(f"redis://127.0.0.1:{proxy.port}", timeout_s=2.0) as tier,
        ThreadPoolExecutor(1) as pool,
    ):
        tier.put("s/a", b"h", segments)
        proxy.delay_s = 0.02
        future = pool.submit(read, tier, "s/a", 30 * MIB)
        time.sleep(0.2)  # somewhere in the middle, or before or after it
        own.kill()
        assert isinstance(future.exception(10), StoreUnavailable)
        own.start()
        proxy.delay_s = 0.0
        wait_until(lambda: tier.available, 20)
        assert tier.read_header("s/a") is None
        with pytest.raises(Missing):
            read(tier, "s/a", 1)
        tier.put("s/a", b"h", segments)
        assert read(tier, "s/a", 30 * MIB) == b"".join(segments)


def test_a_restart_between_calls_is_not_noticed(own: ValkeyServer) -> None:
    with open_tier(own.url) as tier:
        for number in range(3):
            tier.put(f"s/{number}", b"h", body(22, 10))
        own.kill()
        own.start()
        tier.put("s/a", b"h", body(22, 10))
        assert names(tier) == ["s/a"]
        assert tier.breaker_state == "closed"


def test_a_dead_server_is_asked_now_and_then(own: ValkeyServer) -> None:
    with open_tier(own.url) as tier:
        tier.put("s/a", b"h", body(23, 10))
        own.kill()
        assert "refused" in unavailable(lambda: tier.read_header("s/a"))
        assert tier.breaker_state == "open"
        assert not tier.available
        text = unavailable(lambda: tier.read_header("s/a"))
        assert "refused" in text
        assert "trying again in" in text
        wait_until(lambda: tier.available, 5)
        unavailable(lambda: tier.read_header("s/a"))
        own.start()
        wait_until(lambda: tier.available, 5)
        assert tier.read_header("s/a") is None
        assert tier.breaker_state == "closed"


def test_a_server_that_stands_still(own: ValkeyServer) -> None:
    with open_tier(own.url, timeout_s=0.3, connect_timeout_s=0.3) as tier:
        tier.put("s/a", b"h", body(24, 1000))
        with own.stopped():
            calls: list[Callable[[], object]] = [
                lambda: tier.read_header("s/a"),
                lambda: read(tier, "s/a", 1000),
                lambda: tier.put("s/b", b"h", body(24, *[MIB] * 9)),
            ]
            for call in calls:
                started = time.monotonic()
                assert "did not answer for 0.3 s" in unavailable(call)
                assert time.monotonic() - started < 3  # 0.3 s, on a busy machine
            assert tier.breaker_state == "open"
            assert not tier.available
            started = time.monotonic()
            for _ in range(50):
                if tier.available:
                    break
                unavailable(lambda: tier.read_header("s/a"))
            time.sleep(1.0)
            unavailable(lambda: tier.read_header("s/a"))
        wait_until(lambda: tier.available, 20)
        assert tier.read_header("s/a") == b"h"
        assert tier.breaker_state == "closed"
        assert read(tier, "s/a", 1000) == body(24, 1000)[0]


def test_a_line_as_long_as_the_deadline(server: ValkeyServer) -> None:
    """200 ms each way back are waited for; threads do not wait for each other."""
    with Proxy(server.port) as proxy, open_tier(f"redis://127.0.0.1:{proxy.port}", timeout_s=2.0) as tier:
        tier.put("s/a", b"h", body(25, 1000))
        proxy.delay_s = 0.2
        with ThreadPoolExecutor(6) as pool:
            headers = [pool.submit(tier.read_header, "s/a") for _ in range(12)]
            assert [header.result(20) for header in headers] == [b"h"] * 12


# -- who may --


def leaks(error: BaseException, records: list[logging.LogRecord]) -> bool:
    text = "".join(traceback.format_exception(error)) + repr(error)
    return SECRET in text or any(SECRET in record.getMessage() + str(record.args) for record in records)


@pytest.mark.parametrize(
    ("url", "given", "told"),
    [
        ("redis://{}", {}, "set redis.password"),
        ("redis://{}", {"password": "no"}, "correct redis.username and redis.password"),
        ("redis://:wrong-{secret}@{}", {}, "correct redis.username and redis.password"),
        ("redis://{}", {"username": "nobody", "password": SECRET}, "correct redis.username"),
    ],
)
def test_wrong_passwords(
    url: str, given: dict[str, str], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with (
        ValkeyServer(tmp_path / "server", password=SECRET) as server,
        open_tier(url.format(server.address, secret=SECRET), **given) as tier,
    ):
        for call in (lambda: tier.put("s/a", b"h", [b"x"]), lambda: tier.read_header("s/a")):
            with pytest.raises(StoreUnavailable, match=told) as caught:
                call()
            assert not leaks(caught.value, caplog.records)
        unavailable(lambda: tier.scan(""))
        assert tier.breaker_state == "open"
        assert told in unavailable(lambda: tier.read_header("s/a"))
        assert SECRET not in repr(tier)
        assert SECRET not in repr(vars(tier))


def test_the_right_password(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with ValkeyServer(tmp_path / "server", password=SECRET) as server:
        for url, given in ((f"redis://:{SECRET}@{server.address}", {}), (server.url, {"password": SECRET})):
            with open_tier(url, **given) as tier:
                tier.put("s/a", b"h", [b"x"])
                assert names(tier) == ["s/a"]
                server.kill()
                with pytest.raises(StoreUnavailable) as caught:
                    tier.read_header("s/a")
                assert not leaks(caught.value, caplog.records)
                server.start()


def test_a_user_with_few_rights(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path / "server") as server:
        rights = "~krul:* +@hash +@scripting +@transaction +@connection +pexpire +exists +unlink +del +rename"
        rights += " +get +set +pttl +time +zadd +zrem +zscore +zrangebylex"
        server.client().execute_command("ACL", "SETUSER", "krul", "on", f">{SECRET}", *rights.split())
        server.client().execute_command(
            "ACL", "SETUSER", "weak", "on", f">{SECRET}", "~krul:*", "+@connection", "+exists"
        )
        with open_tier(server.url, username="krul", password=SECRET) as tier:
            with tier.lease("s/"):
                tier.put("s/a", b"h", [b"x"])
            assert read(tier, "s/a", 1) == b"x"
            assert names(tier) == ["s/a"]
            assert tier.check() == []
            tier.touch(["s/a"])
            assert tier.delete("s/a") is True
            assert server.client().dbsize() == 0
        with open_tier(server.url, username="weak", password=SECRET) as tier:
            assert "NOPERM" in unavailable(lambda: tier.put("s/a", b"h", [b"x"]))
            assert "NOPERM" in unavailable(lambda: tier.read_header("s/a"))
            assert tier.breaker_state == "closed"
        with open_tier(server.url, username="krul", password=SECRET, key_prefix="other") as tier:
            assert "NOPERM" in unavailable(lambda: tier.put("s/a", b"h", [b"x"]))


def test_a_read_only_replica_can_be_read(tmp_path: Path) -> None:
    with (
        ValkeyServer(tmp_path / "master") as master,
        open_tier(master.url) as writer,
        replica_of(master, tmp_path / "replica") as replica,
        open_tier(replica.url) as tier,
    ):
        writer.put("s/a", b"h", body(26, 1000))
        writer.put("s/b", b"h", body(26, 1000))
        wait_until(lambda: tier.read_header("s/b") == b"h")
        assert read(tier, "s/a", 1000) == body(26, 1000)[0]
        assert names(tier) == ["s/a", "s/b"]
        master.client().delete("krul:{s}/b")
        wait_until(lambda: names(tier) == ["s/a"])
        tier.touch(["s/a"])
        tier.refresh()
        assert tier.usage().objects == 1
        for call in (
            lambda: tier.put("s/a", b"new", [b"x"]),
            lambda: tier.delete("s/a"),
            lambda: tier.lease("s/").__enter__(),
        ):
            assert "master" in unavailable(call)
        assert tier.read_header("s/a") == b"h"
        assert tier.breaker_state == "closed"


def test_tls(own: ValkeyServer, tmp_path: Path) -> None:
    ca_file, context = certificates(tmp_path)
    with Proxy(own.port, context=context) as proxy:
        with open_tier(f"rediss://127.0.0.1:{proxy.port}", tls_ca_file=ca_file) as tier:
            tier.put("s/a", b"h", body(27, *[MIB] * 3))
            assert read(tier, "s/a", 3 * MIB) == b"".join(body(27, *[MIB] * 3))
        with open_tier(f"rediss://127.0.0.1:{proxy.port}") as tier:
            assert "certificate verify failed" in unavailable(lambda: tier.read_header("s/a"))
        with open_tier(f"rediss://localhost:{proxy.port}", tls_ca_file=ca_file) as tier:
            assert "certificate is not valid for 'localhost'" in unavailable(lambda: tier.read_header("s/a"))
        with open_tier(f"redis://127.0.0.1:{proxy.port}", timeout_s=1.0) as tier:
            unavailable(lambda: tier.read_header("s/a"))
    with open_tier(f"rediss://{own.address}", tls_ca_file=ca_file, timeout_s=0.5) as tier:
        unavailable(lambda: tier.read_header("s/a"))


def test_a_unix_socket_and_a_database(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with ValkeyServer(tmp_path / "server", ["--unixsocket", str(path)]) as server:
        with open_tier(f"unix://{path}?db=3") as tier, open_tier(f"{server.url}/3") as same:
            tier.put("s/a", b"h", [b"x"])
            assert same.read_header("s/a") == b"h"
        with open_tier(server.url) as other:
            assert other.read_header("s/a") is None
        with open_tier(f"{server.url}/99") as tier:
            assert "DB index is out of range" in unavailable(lambda: tier.read_header("s/a"))
    with open_tier(f"unix://{tmp_path}/none") as tier:
        assert f"{tmp_path}/none" in unavailable(lambda: tier.read_header("s/a"))


# -- full servers --


def test_a_full_server_refuses_and_keeps_what_it_has(tmp_path: Path) -> None:
    options = ["--maxmemory", "24mb", "--maxmemory-policy", "noeviction"]
    with ValkeyServer(tmp_path / "server", options) as server, open_tier(server.url) as tier:
        stored: list[str] = []

        def fill() -> None:
            for number in range(60):
                tier.put(f"s/{number}", b"h", body(number, *[MIB] * 3))
                stored.append(f"s/{number}")

        with pytest.raises(StoreFull, match="raise maxmemory there"):
            fill()
        assert 2 <= len(stored) < 10
        assert temporaries(server) == []
        with pytest.raises(StoreFull):
            tier.put(stored[0], b"new", body(99, *[MIB] * 20))
        assert names(tier) == sorted(stored)
        for key in stored:
            assert read(tier, key, 3 * MIB) == b"".join(body(int(key[2:]), *[MIB] * 3))
        assert tier.check() == []
        assert tier.breaker_state == "closed"
        server.client().config_set("maxmemory", "2mb")  # far over it: nothing at all may be written
        with pytest.raises(StoreFull):
            tier.put("s/tiny", b"h", [b"x"])
        with tier.lease("s/"):
            for key in stored:
                assert tier.delete(key) is True
        server.client().config_set("maxmemory", "24mb")
        tier.put("s/a", b"h", body(1, MIB))
        assert names(tier) == ["s/a"]


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
def test_an_evicting_server_loses_objects_and_nothing_else(policy: str, tmp_path: Path) -> None:
    options = ["--maxmemory", "32mb", "--maxmemory-policy", policy]
    with ValkeyServer(tmp_path / "server", options) as server, open_tier(server.url) as tier:
        keys = []
        refusals = []
        for number in range(30):
            key = f"s{number % 5}/{number}"
            try:
                tier.put(key, str(number).encode(), body(number, *[MIB] * 2, 500 * KIB))
                keys.append(key)
            except StoreUnavailable as error:
                refusals.append(str(error))
        assert all("vanished before it was complete" in refusal for refusal in refusals)
        size = 2 * MIB + 500 * KIB
        found = 0
        for key in keys:
            number = int(key.partition("/")[2])
            header = tier.read_header(key)
            assert header in (None, str(number).encode())
            try:
                assert read(tier, key, size) == b"".join(body(number, *[MIB] * 2, 500 * KIB))
                found += 1
            except Missing:
                pass
        assert 0 < found < len(keys)
        assert server.client().info("stats")["evicted_keys"] > 0
        present = {key for key in keys if tier.read_header(key) is not None}
        assert set(names(tier)) <= present


def test_the_cap_counts_what_is_on_its_way(server: ValkeyServer) -> None:
    with open_tier(server.url, capacity_bytes=10_000) as tier:
        tier.put("s/a", b"h", [b"x" * 4000])
        tier.put("s/a", b"h", [b"x" * 4000])
        with pytest.raises(
            StoreFull, match=r"pass the cap of 10000; delete sessions or raise redis\.capacity"
        ):
            tier.put("s/b", b"h", [b"x" * 6000])
        assert names(tier) == ["s/a"]
        assert temporaries(server) == []
        tier.delete("s/a")
        tier.put("s/b", b"h", [b"x" * 6000])


# -- bounds --


def test_connections_are_bounded_and_named(server: ValkeyServer) -> None:
    with open_tier(server.url, connections=3) as tier, ThreadPoolExecutor(12) as pool:
        tier.put("s/a", b"h", body(28, MIB))
        reads = [pool.submit(read, tier, "s/a", MIB) for _ in range(60)]
        most = 0
        while not all(future.done() for future in reads):
            clients = server.client().client_list()
            most = max(most, sum(client["name"] == "sgl-krul" for client in clients))
        assert all(future.result() == body(28, MIB)[0] for future in reads)
        assert 1 <= most <= 3
    wait_until(lambda: not [c for c in server.client().client_list() if c["name"] == "sgl-krul"])


def test_no_connection_is_left(own: ValkeyServer) -> None:
    with open_tier(own.url, connections=1, timeout_s=0.4) as tier, ThreadPoolExecutor(2) as pool:
        tier.put("s/a", b"h", [b"x"])
        with own.stopped():
            errors = [
                future.exception(10) for future in [pool.submit(tier.read_header, "s/a") for _ in range(2)]
            ]
        assert sorted(
            "raise redis.connections" in str(error) or "did not answer" in str(error) for error in errors
        )
        assert all(isinstance(error, StoreUnavailable) for error in errors)


def test_bytes_on_their_way_are_bounded() -> None:
    in_flight = InFlight("redis here", 100)
    inside = threading.Event()
    leave = threading.Event()

    def hold(size: int) -> None:
        with in_flight.taken(size, 10):
            inside.set()
            assert leave.wait(10)

    with ThreadPoolExecutor(1) as pool:
        holder = pool.submit(hold, 60)
        assert inside.wait(10)
        with in_flight.taken(40, 0.01):
            pass
        for size in (41, 1000):
            with pytest.raises(StoreUnavailable, match=r"no room for .*; raise redis\.max_in_flight_bytes"):
                with in_flight.taken(size, 0.01):
                    pass
        leave.set()
        holder.result(10)
    with in_flight.taken(1000, 0.01), pytest.raises(StoreUnavailable), in_flight.taken(1, 0.01):
        pass
    with in_flight.taken(100, 0.01):
        pass


def test_large_ones_are_not_starved_by_small_ones() -> None:
    in_flight = InFlight("redis here", 100)
    order: list[int] = []
    threads = []

    def enter(size: int) -> None:
        with in_flight.taken(size, 10):
            order.append(size)

    with in_flight.taken(60, 1):
        for size in (100, 10):
            threads.append(threading.Thread(target=enter, args=(size,)))
            threads[-1].start()
            time.sleep(0.05)
        assert order == []
    for thread in threads:
        thread.join(10)
    assert order == [100, 10]


def test_a_small_bound_on_bytes_only_slows(server: ValkeyServer) -> None:
    segments = body(29, *[400 * KIB] * 8)
    with open_tier(server.url, max_in_flight_bytes=MAX_PIECE_BYTES) as tier, ThreadPoolExecutor(6) as pool:
        tier.put("s/a", b"h", segments)
        futures = [pool.submit(read, tier, "s/a", 8 * 400 * KIB) for _ in range(12)]
        assert all(future.result(30) == b"".join(segments) for future in futures)
        tier.put("s/b", b"h", [b"x"])


def test_no_room_on_the_way_is_told_of_each_read(server: ValkeyServer) -> None:
    with (
        Proxy(server.port) as proxy,
        open_tier(server.url) as writer,
        open_tier(
            f"redis://127.0.0.1:{proxy.port}", max_in_flight_bytes=MAX_PIECE_BYTES, timeout_s=0.5
        ) as tier,
        ThreadPoolExecutor(4) as pool,
    ):
        writer.put("s/a", b"h", body(34, MIB))
        proxy.delay_s = 0.2  # the shape 0.2 s, the piece a few times that
        requests = [("s/a", 0, [memoryview(bytearray(MIB))])]
        results = [pool.submit(tier.read_batch, requests) for _ in range(4)]
        errors = [error for result in results for error in result.result(30)]
        assert None in errors
        assert all(error is None or isinstance(error, StoreUnavailable) for error in errors)
        assert any("raise redis.max_in_flight_bytes" in str(error) for error in errors)


# -- several servers --


def test_a_cluster_with_a_dead_node(tmp_path: Path) -> None:
    with cluster(tmp_path) as nodes:
        seeds = ",".join(node.address for node in nodes)
        with open_tier(f"redis+cluster://{seeds}", timeout_s=1.0, connect_timeout_s=0.5) as tier:
            sessions = [f"v1/n/{number}" for number in range(12)]
            for session in sessions:
                with tier.lease(f"{session}/"):
                    tier.put(f"{session}/c0", b"chunk", body(30, 300 * KIB, MIB))
                    tier.put(f"{session}/manifest", b"manifest", [])
            assert names(tier) == sorted(
                f"{session}/{name}" for session in sessions for name in ("c0", "manifest")
            )
            assert tier.check() == []
            homes = {}
            for session in sessions:
                holders = [node for node in nodes if node.holds(f"krul:{{{session}}}")]
                assert len(holders) == 1
                for name in ("/c0", "/manifest"):
                    assert holders[0].holds(f"krul:{{{session}}}{name}")
                homes[session] = holders[0]
            assert set(homes.values()) == set(nodes)
            dead = next(node for node in nodes if node.holds("krul:{/directories}:names"))
            dead.kill()
            for session in sessions * 2:
                if homes[session] is dead:
                    unavailable(lambda session=session: tier.read_header(f"{session}/c0"))
                    unavailable(lambda session=session: tier.put(f"{session}/c0", b"h", []))
                else:
                    assert read(tier, f"{session}/c0", 300 * KIB) == body(30, 300 * KIB)[0]
                    tier.put(f"{session}/c1", b"new", [])
                    assert [key[len(session) :] for key in names(tier, f"{session}/")][1:] == [
                        "/c1",
                        "/manifest",
                    ]
                    assert tier.delete(f"{session}/c1") is True
            errors = tier.read_batch(
                [(f"{session}/c0", 0, [memoryview(bytearray(9))]) for session in sessions]
            )
            assert [isinstance(error, StoreUnavailable) for error in errors] == [
                homes[session] is dead for session in sessions
            ]
            assert tier.available
            assert tier.breaker_state == "open"
            unavailable(lambda: tier.scan(""))
            unavailable(tier.refresh)
        with open_tier(f"redis+cluster://{seeds}") as late:
            alive = next(session for session in sessions if homes[session] is not dead)
            assert late.read_header(f"{alive}/manifest") == b"manifest"


def test_a_slot_that_moved_is_followed(tmp_path: Path) -> None:
    with cluster(tmp_path) as nodes:
        with open_tier(f"redis+cluster://{nodes[0].address}") as tier:
            tier.put("s0/a", b"h", [b"x"])  # tables are learned now
            home = next(node for node in nodes if node.holds("krul:{s0}"))
            new = next(node for node in nodes if node is not home)
            tier.delete("s0/a")
            slot = home.client().execute_command("CLUSTER", "KEYSLOT", "krul:{s0}")
            new_id = new.client().execute_command("CLUSTER", "MYID")
            for node in (new, home, *nodes):
                node.client().execute_command("CLUSTER", "SETSLOT", slot, "NODE", new_id)
            tier.put("s0/a", b"moved", [b"x" * MIB, b"y"])
            assert new.holds("krul:{s0}/a")
            assert read(tier, "s0/a", 1, MIB) == b"y"
        with open_tier(home.url) as single:
            assert "write redis+cluster://" in unavailable(lambda: single.read_header("s0/a"))
            assert single.breaker_state == "closed"


def test_seeds_that_are_no_cluster(server: ValkeyServer) -> None:
    with open_tier(f"redis+cluster://{server.address}") as tier:
        assert "cluster support disabled" in unavailable(lambda: tier.read_header("s/a"))
    with open_tier(f"redis+sentinel://{server.address}/main") as tier:
        assert "no master found" in unavailable(lambda: tier.read_header("s/a"))


def test_sentinel_and_its_failover(tmp_path: Path) -> None:
    with (
        ValkeyServer(tmp_path / "master", password=SECRET) as master,
        replica_of(master, tmp_path / "replica") as replica,
        sentinel(master, tmp_path / "sentinel", "main") as guard,
    ):
        wait_until(lambda: guard.client().execute_command("SENTINEL", "REPLICAS", "main"))
        url = f"redis+sentinel://:{SECRET}@127.0.0.1:1,{guard.address}/main"
        with open_tier(url, timeout_s=1.0, connect_timeout_s=0.5) as tier:
            tier.put("s/a", b"h", body(31, 1000))
            assert master.holds("krul:{s}/a")
            wait_until(lambda: replica.holds("krul:{s}/a"))
            master.kill()
            assert SECRET not in unavailable(lambda: tier.read_header("s/a"))

            def moved() -> bool:
                try:
                    return tier.put("s/b", b"h", [b"x"]) > 0
                except StoreUnavailable:
                    return False

            wait_until(moved, 30)
            assert replica.holds("krul:{s}/b")
            assert read(tier, "s/a", 1000) == body(31, 1000)[0]
        with open_tier(f"redis+sentinel://{guard.address}/other") as tier:
            assert "knows no master 'other'" in unavailable(lambda: tier.read_header("s/a"))


HOLDER = """
import sys, time
from tests.redis_servers import open_tier
tier = open_tier(sys.argv[1], owner="holder:7", lease_s=1.5)
with tier.lease("s/"):
    print("have it", flush=True)
    time.sleep(60)
"""


def test_the_lease_of_a_killed_server_runs_out(server: ValkeyServer, tier: RedisTier) -> None:
    command = [sys.executable, "-c", HOLDER, server.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=PROJECT) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"have it\n"
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
    with pytest.raises(LeaseHeld, match=r"'holder:7' \(its lease has [01]\.\d s left\)"):
        tier.put("s/a", b"h", [b"x"])

    def free() -> bool:
        try:
            with tier.lease("s/"):
                return tier.put("s/a", b"h", [b"x"]) > 0
        except LeaseHeld:
            return False

    wait_until(free, 5)


def test_a_lease_lost_in_the_middle_of_a_put(server: ValkeyServer) -> None:
    """It is noticed at the next round, and what was written goes."""
    with Proxy(server.port) as proxy, ThreadPoolExecutor(1) as pool:
        with open_tier(f"redis://127.0.0.1:{proxy.port}") as tier, tier.lease("s/"):
            tier.put("s/a", b"old", [b"x"])
            proxy.delay_s = 0.1
            put = pool.submit(tier.put, "s/a", b"new", body(32, *[MIB] * 30))
            wait_until(lambda: temporaries(server))
            server.client().set("krul:{s}/.lease", "thief:1/abc", px=5000)
            error = put.exception(20)
            assert isinstance(error, LeaseHeld)
            assert "'thief:1'" in str(error)
            proxy.delay_s = 0
            assert temporaries(server) == []
            assert tier.read_header("s/a") == b"old"
            assert names(tier) == ["s/a"]
        assert server.client().get("krul:{s}/.lease") == b"thief:1/abc"


def test_long_puts_keep_their_lease(server: ValkeyServer) -> None:
    with Proxy(server.port) as proxy, open_tier(f"redis://127.0.0.1:{proxy.port}", lease_s=0.6) as tier:
        with tier.lease("s/"):
            proxy.delay_s = 0.15
            started = time.monotonic()
            tier.put("s/a", b"h", body(33, *[MIB] * 14))
            assert time.monotonic() - started > 0.6
        assert not server.holds("krul:{s}/.lease")


def test_a_holder_named_by_a_stranger_is_shown_safely(server: ValkeyServer, tier: RedisTier) -> None:
    client: Any = server.client()
    client.set("krul:{s}/.lease", b"\xff\n\x1b[31m" + b"a" * 5000 + b"/x")
    with pytest.raises(LeaseHeld) as caught:
        tier.put("s/a", b"h", [b"x"])
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 500

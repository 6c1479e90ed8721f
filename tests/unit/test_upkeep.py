"""What goes on in the background: by age, by room, by life time; and how it gives way."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sgl_krul.metrics import NoMetrics
from sgl_krul.session.catalog import read_manifest
from sgl_krul.session.record import SessionKey, manifest_key
from sgl_krul.session.registry import State
from tests.faults import Call, Kind, Script
from tests.sessions import LAYOUT, NAMESPACE, NOW, OTHER_NAMESPACE, chat, files, true_kv
from tests.two_servers import KEY, Server, World

SESSION_BYTES = 9 * LAYOUT.page_bytes + 3 * 4096  # chat(150) on disk
MANIFEST = manifest_key(NAMESPACE, KEY.digest)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.finish()


def tiers(server: Server, key: SessionKey = KEY) -> tuple[str, ...]:
    """Where the server has it."""
    session = server.session(key)
    assert session is not None
    assert session.paused is not None
    return session.paused.tiers


# -- demotion --


def test_old_sessions_move_to_the_slower_tier(world: World) -> None:
    a = world.server("a", demote_after_s=100.0)
    a.pause(chat(150))
    a.pause(chat(100, "young"))
    a.upkeep(99)
    assert tiers(a) == ("ssd",)
    world.time_s += 2
    a.pause(chat(110, "young"))
    a.upkeep(31)
    assert (tiers(a), tiers(a, SessionKey("young"))) == (("redis",), ("ssd",))
    assert a.service.counters.demotions == 1
    assert not [name for name in files(a.root) if KEY.digest in name]
    assert a.resume()["restored_from"] == "redis"


def test_a_full_disk_is_emptied_down_to_the_low_mark(world: World) -> None:
    a = world.server("a", ssd_bytes=10 * (SESSION_BYTES + 8192), high_watermark=0.65, low_watermark=0.35)
    for index in range(8):
        world.time_s += 1
        a.pause(chat(150, f"s{index}", first=1000 * index))
    a.upkeep()
    moved = [index for index in range(8) if tiers(a, SessionKey(f"s{index}")) == ("redis",)]
    assert moved == list(range(len(moved)))  # least recently used first
    assert 3 <= len(moved) <= 6
    usage = a.store.usage()["ssd"]
    assert usage.bytes <= 0.36 * usage.capacity_bytes
    assert a.service.counters.demotions == len(moved)
    before = a.redis.count("put")
    a.upkeep()
    assert a.redis.count("put") == before  # no more than that
    for index in range(8):
        assert a.resume(SessionKey(f"s{index}"))["restored_tokens"] == 144


def test_a_demotion_that_fails_is_tried_again(world: World) -> None:
    a = world.server("a", demote_after_s=10.0)
    a.pause(chat(150))
    a.redis.plan = Script({("put", ""): Kind.FULL})
    a.upkeep()
    assert tiers(a) == ("ssd",)
    assert (a.service.counters.demotions, a.service.counters.demotions_failed) == (0, 1)
    assert world.backing.objects == {}
    a.redis.plan = lambda call: None
    a.upkeep()
    assert tiers(a) == ("redis",)


def test_nothing_moves_to_a_tier_that_is_down(world: World) -> None:
    a = world.server("a", demote_after_s=10.0)
    a.pause(chat(150))
    a.view.known_down = True
    a.upkeep()
    assert tiers(a) == ("ssd",)
    assert a.service.counters.demotions_failed == 0


def test_a_demotion_gives_way_to_a_pause(world: World) -> None:
    """It stops at the next chunk; the pause does not wait for the rest, and what it wrote counts."""
    a = world.server("a", demote_after_s=10.0)
    a.pause(chat(500))
    copying, go = threading.Event(), threading.Event()

    def plan(call: Call) -> Kind | None:
        if call.operation == "put":
            copying.set()
            assert go.wait(20)
            threading.Event().wait(0.05)  # the pause is at the door by then
        return None

    a.redis.plan = plan
    world.time_s += 31
    a.service.poll()
    while not copying.is_set():
        a.service.poll()
    a.turn(chat(600))
    answers: list[Any] = []
    a.begin_pause(chat(600), answers.append, before=go.set)
    a.drive()
    assert answers[0]["state"] == "paused"
    assert (answers[0]["tiers"], tiers(a)) == (["ssd"], ("ssd",))
    assert a.redis.count("put", "manifest") == 0
    assert world.backing.objects == {}
    assert a.resume()["restored_tokens"] == 592


def test_a_hold_beside_a_demotion_gets_all(world: World) -> None:
    """The manifest has left the disk before the server entered where it went."""
    a = world.server("a", demote_after_s=10.0)
    a.pause(chat(150))
    deleted, go = threading.Event(), threading.Event()

    def plan(call: Call) -> Kind | None:
        if call.operation == "delete" and "-c" in call.key:
            deleted.set()
            assert go.wait(20)
        return None

    a.ssd.plan = plan
    world.time_s += 31
    while not deleted.is_set():
        a.service.poll()
    answers: list[Any] = []
    a.service.resume(KEY, hold=True, reply=answers.append)
    while not answers:
        a.service.poll()
    go.set()
    a.drive()
    assert (answers[0]["restored_tokens"], answers[0]["restored_from"]) == (144, "redis")
    assert tiers(a) == ("redis",)


# -- expiry --


def test_sessions_nobody_used_are_deleted(world: World) -> None:
    a = world.server("a", ttl_s=1000.0)
    a.pause(chat(150))
    a.pause(chat(100, "active"))
    a.upkeep(990)
    a.turn(chat(120, "active"))
    assert a.session() is not None
    a.upkeep(31)
    assert a.session() is None
    assert a.session(SessionKey("active")) is not None
    assert not [name for name in (*files(a.root), *world.backing.objects) if KEY.digest in name]
    assert a.service.counters.expired == 1
    assert not a.paused


def test_a_session_that_another_server_uses_does_not_expire(world: World) -> None:
    """It was paused anew there, and this server has not looked since."""
    a, b = world.server("a", ttl_s=1000.0), world.server("b", replicate="redis")
    b.pause(chat(100))
    a.list()
    world.time_s += 1010
    b.pause(chat(150))
    a.redis.plan = Script({("scan", f"v1/{NAMESPACE}/"): Kind.BEFORE})  # the list is not to be had
    a.upkeep(0)
    assert b.resume()["restored_tokens"] == 144
    assert read_manifest(b.view, NAMESPACE, KEY.digest) is not None
    assert a.service.counters.expired == 0
    a.redis.plan = lambda call: None
    a.upkeep()
    assert a.resume()["restored_tokens"] == 144


def test_what_lies_in_the_shared_tier_lives_as_long_as_that_says(world: World) -> None:
    a, b = world.server("a", ttl_s=1000.0, demote_after_s=500.0), world.server("b", replicate="redis")
    b.pause(chat(100))
    a.list()
    world.time_s += 1010
    b.pause(chat(150))
    a.list()
    a.upkeep(500)
    a.upkeep(500)
    assert b.resume()["restored_tokens"] == 144
    assert a.resume()["restored_tokens"] == 144
    a.upkeep(1010)
    assert a.resume()["restored_tokens"] == 144
    assert a.service.counters.expired == 0


def test_a_session_that_was_just_brought_here_does_not_expire(world: World) -> None:
    """It was unknown, and is as young as its pause."""
    a, b = world.server("a", ttl_s=1000.0, demote_after_s=500.0), world.server("b", replicate="redis")
    b.pause(chat(150))
    a.redis.plan = Script({("scan", f"v1/{NAMESPACE}/"): Kind.BEFORE})
    assert a.hold()["restored_tokens"] == 144
    a.upkeep()
    assert a.service.counters.expired == 0
    assert b.resume()["restored_tokens"] == 144


def test_an_expiry_that_fails_is_tried_again(world: World) -> None:
    a = world.server("a", ttl_s=10.0)
    a.pause(chat(150))
    a.ssd.plan = Script({("delete", ""): Kind.BEFORE})
    a.upkeep()
    assert a.paused
    assert a.service.counters.expired == 0
    a.ssd.plan = lambda call: None
    a.upkeep()
    assert a.session() is None
    assert a.service.counters.expired == 1


def test_a_pause_beside_an_expiry_stays(world: World) -> None:
    """The expiry was decided before the session was used again, and comes after its pause."""
    a = world.server("a", ttl_s=10.0)
    a.pause(chat(100))
    a.pause(chat(50, "first"))
    first = SessionKey("first").digest
    going, go = threading.Event(), threading.Event()

    def plan(call: Call) -> Kind | None:
        if call.operation == "delete" and first in call.key:
            going.set()
            assert go.wait(20)
        return None

    a.ssd.plan = plan
    session = a.session()
    assert session is not None
    session.last_used = NOW + 1  # the other one expires first
    world.time_s += 31
    while not going.is_set():
        a.service.poll()
    answers: list[Any] = []
    a.turn(chat(150))
    a.begin_pause(chat(150), answers.append)
    while not answers:
        a.service.poll()
    go.set()
    a.drive()
    assert a.paused
    assert a.resume()["restored_tokens"] == 144


# -- sessions that rest in memory --


def memory_server(world: World, name: str = "a", **settings: Any) -> Server:
    """Small sessions are paused to memory."""
    return world.server(name, memory_max_bytes=9 * LAYOUT.page_bytes, memory_age_s=100.0, **settings)


def test_small_sessions_rest_in_memory_and_are_written_out_later(world: World) -> None:
    a = memory_server(world)
    assert a.pause(chat(150))["tiers"] == ["memory"]
    assert a.pause(chat(160, "large"))["tiers"] == ["ssd"]
    assert not [name for name in files(a.root) if KEY.digest in name]
    a.upkeep(90)
    assert tiers(a) == ("memory",)
    a.upkeep(31)
    assert tiers(a) == ("ssd",)
    assert a.service.counters.demotions == 1
    a.memory.clear()
    answer = a.resume()
    assert (answer["restored_tokens"], answer["restored_from"]) == (144, "ssd")
    a.restart()
    assert a.resume()["restored_tokens"] == 144


def test_what_is_written_out_is_as_old_as_its_pause(world: World) -> None:
    """Another server may have paused the session since: then that one is the newer."""
    a, b = memory_server(world), world.server("b", replicate="redis")
    a.pause(chat(150))
    a.redis.plan = Script({("scan", f"v1/{NAMESPACE}/"): Kind.BEFORE})  # a does not learn of it
    world.time_s += 50
    b.pause(chat(300, first=5000))
    a.upkeep(101)
    assert b.resume()["restored_tokens"] == 288
    a.redis.plan = lambda call: None
    a.upkeep()
    session = a.session()
    assert session is not None
    assert session.paused is not None
    assert (session.paused.tokens, session.paused.tiers) == (300, ("redis",))


def test_memory_that_gets_tight_is_written_out_early(world: World) -> None:
    a = memory_server(world, high_watermark=0.5, low_watermark=0.5, memory_pages=40)
    for index in range(3):
        a.pause(chat(150, f"s{index}", first=1000 * index))
    a.upkeep()
    assert [tiers(a, SessionKey(f"s{index}")) for index in range(3)] == [("ssd",)] * 3


def test_what_was_evicted_meanwhile_is_not_written_out(world: World) -> None:
    """The leading part is, up to the first chunk that is not whole."""
    a = memory_server(world)
    a.pause(chat(150))
    a.memory.delete(chat(150).page_keys[5])
    a.upkeep(101)
    answer = a.show()
    assert (answer["stored_tokens"], answer["tokens"]) == (64, 150)
    a.memory.clear()
    answer = a.resume()
    assert (answer["restored_tokens"], answer["recompute_tokens"]) == (64, 86)


def test_what_was_evicted_from_the_start_leaves_a_record_without_chunks(world: World) -> None:
    a = memory_server(world)
    a.pause(chat(150))
    a.memory.clear()
    a.upkeep(101)
    answer = a.resume()
    assert (answer["restored_tokens"], answer["recompute_tokens"]) == (0, 150)
    assert a.forget()["deleted"]
    assert files(a.root) == {}


def test_a_session_that_woke_is_not_written_out(world: World) -> None:
    a = memory_server(world)
    a.pause(chat(150))
    a.turn(chat(160))
    a.upkeep(101)
    assert files(a.root) == {}


def test_a_write_out_that_fails_is_tried_again(world: World) -> None:
    a = memory_server(world)
    a.pause(chat(150))
    a.ssd.plan = a.redis.plan = Script({("put", ""): Kind.BEFORE})
    a.upkeep(101)
    assert tiers(a) == ("memory",)
    assert a.service.counters.demotions_failed == 1
    a.ssd.plan = lambda call: None
    a.upkeep(101)
    assert tiers(a) == ("ssd",)


def test_a_write_out_that_fails_beside_a_hold_is_tried_again(world: World) -> None:
    a = memory_server(world)
    a.pause(chat(150))
    going, go = threading.Event(), threading.Event()

    def plan(call: Call) -> Kind | None:
        if call.operation == "put":
            going.set()
            assert go.wait(20)
            return Kind.BEFORE
        return None

    a.ssd.plan = a.redis.plan = plan
    world.time_s += 101
    while not going.is_set():
        a.service.poll()
    session = a.session()
    assert session is not None
    session.state = State.RESUMING  # a hold is under way
    go.set()
    a.drive()
    session.state = State.PAUSED
    a.ssd.plan = lambda call: None
    a.upkeep(101)
    assert tiers(a) == ("ssd",)


@pytest.mark.parametrize("verb", ["forget", "pause"])
def test_a_write_out_that_comes_late_writes_nothing(world: World, verb: str) -> None:
    """It was begun, and had to wait; meanwhile the session was deleted, or went on."""
    a = memory_server(world)
    a.pause(chat(150))
    overtaken = threading.Event()
    hold = a.service._transfers.copies.exclusive.hold  # noqa: SLF001 - the one place to stand in its way
    with hold(KEY.digest):
        world.time_s += 101
        a.service.poll()
        while not a.service._transfers.copies.exclusive.wanted(KEY.digest):  # noqa: SLF001
            a.service.poll()
        if verb == "forget":
            answers: list[Any] = []
            a.service.forget(a.service.registry.get(KEY), settle=lambda: 0, reply=answers.append)
        else:
            a.turn(chat(300))
        overtaken.set()
    a.drive()
    if verb == "forget":
        assert answers[0]["deleted"]
        assert a.session() is None
    assert files(a.root) == {}
    assert world.backing.objects == {}
    assert a.ssd.count("put") == 0


def test_without_a_tier_nothing_is_written_out(world: World) -> None:
    a = world.server("a", disk=False, shared=False, memory_age_s=10.0)
    assert a.pause(chat(150))["tiers"] == ["memory"]
    a.upkeep(101)
    assert tiers(a) == ("memory",)
    assert a.service.counters.demotions_failed == 0


def test_pages_written_out_are_the_true_ones(world: World) -> None:
    a = memory_server(world)
    session = chat(150)
    a.pause(session)
    a.upkeep(101)
    assert a.disk is not None
    manifest = read_manifest(a.disk, NAMESPACE, KEY.digest)
    assert manifest is not None
    found = bytearray(4 * LAYOUT.page_segment_bytes)
    a.disk.read_segments(manifest.chunks[0].key, 0, [memoryview(found)])
    assert bytes(found) == b"".join(true_kv(page_hash, 0) for page_hash in session.hashes[:4])


# -- a change of weights --


def test_after_a_change_of_weights_nothing_planned_is_done(world: World) -> None:
    a = memory_server(world, demote_after_s=50.0, ttl_s=80.0)
    a.pause(chat(150))
    a.pause(chat(160, "stored"))
    a.service.change_namespace(OTHER_NAMESPACE)
    before = files(a.root)
    a.upkeep(1000)
    assert files(a.root) == before
    assert world.backing.objects == {}
    assert a.session() is None
    assert a.session(SessionKey("stored")) is not None


def test_a_look_from_before_a_change_of_weights_is_not_believed(world: World) -> None:
    a, b = world.server("a"), world.server("b", replicate="redis")
    b.pause(chat(150))
    listed, go = threading.Event(), threading.Event()

    def plan(call: Call) -> Kind | None:
        if call.operation == "read_header" and call.key == MANIFEST:
            listed.set()
            assert go.wait(20)
        return None

    a.redis.plan = plan
    a.service.poll()
    assert listed.wait(20)
    a.service.change_namespace(OTHER_NAMESPACE)
    go.set()
    a.drive()
    assert len(a.service.registry) == 0


# -- metrics --


class Seen(NoMetrics):
    """What was published last."""

    def __init__(self) -> None:
        self.tiers: dict[str, tuple[int, str | None]] = {}
        self.states: dict[str, int] = {}
        self.totals: dict[str, int] = {}
        self.threads: set[int] = set()

    def set_tier(
        self, tier: str, *, used_bytes: int, capacity_bytes: int, sessions: int, breaker: str | None
    ) -> None:
        self.threads.add(threading.get_ident())
        self.tiers[tier] = (sessions, breaker)

    def set_sessions(self, counts: Mapping[str, int]) -> None:
        self.states = dict(counts)

    def count(self, counters: Mapping[str, int]) -> None:
        self.totals = dict(counters)


def test_metrics_are_brought_up_to_date_on_a_worker(world: World) -> None:
    seen = Seen()
    a = world.server("a", replicate="both", metrics=seen)
    a.pause(chat(150))
    a.turn(chat(100, "active"))
    a.view.known_down = True
    a.upkeep(2)
    assert seen.tiers == {"memory": (0, None), "ssd": (1, None), "redis": (1, "open")}
    assert seen.states == {"paused": 1, "active": 1}
    assert seen.totals["pauses"] == 1
    assert threading.get_ident() not in seen.threads


def test_upkeep_waits_for_its_interval(world: World) -> None:
    a = world.server("a", interval_s=30.0)
    a.drive()
    looks = a.redis.count("refresh")
    assert looks == 1
    a.upkeep(29)
    assert a.redis.count("refresh") == looks
    a.upkeep(1)
    assert a.redis.count("refresh") == looks + 1


def test_a_shared_tier_that_cannot_be_listed_changes_nothing(world: World) -> None:
    a = world.server("a", replicate="redis")
    a.pause(chat(150))
    a.redis.plan = Script({("scan", ""): Kind.BEFORE, ("refresh", ""): Kind.BEFORE})
    a.upkeep()
    assert a.paused
    a.redis.plan = lambda call: None
    assert a.session() is not None
    assert replace(a.service.registry.get(KEY)).paused is not None

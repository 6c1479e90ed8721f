"""Promises once broken: two servers that go on with the same sessions, their clocks, and life times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sessions import NOW, Chat, chat
from tests.two_servers import Server, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.finish()


def on_disk(server: Server) -> set[str]:
    """Digests of the sessions that lie on the server's disk."""
    assert server.disk is not None
    return {entry.key.split("/")[2] for entry in server.disk.scan("") if entry.key.endswith("/manifest")}


def known_on_disk(server: Server) -> set[str]:
    """Digests of those that the server knows to be there."""
    sessions = server.service.registry
    return {each.digest for each in sessions if each.paused is not None and "ssd" in each.paused.tiers}


def numbered(number: int, count: int) -> Chat:
    """One of many sessions, of `count` tokens that no other has."""
    return chat(count, f"chat {number}", first=1000 * number)


def cold_hold(server: Server) -> int:
    """Tokens that a request finds with nothing left in memory."""
    server.memory.clear()
    restored: int = server.hold()["restored_tokens"]
    return restored


# -- who has the newest --


def test_a_late_pause_of_an_old_turn_does_not_replace_what_another_server_went_on_to(world: World) -> None:
    """As idle_pause_s pauses: the first turn ran at B, which never heard of the others."""
    a, b = world.server("a", replicate="redis"), world.server("b", replicate="redis")
    b.turn(chat(100))
    world.time_s += 10
    assert a.pause(chat(600))["stored_tokens"] == 592
    world.time_s += 50
    assert b.ask(lambda reply: b.begin_pause(chat(100), reply))["stored_tokens"] == 592
    assert cold_hold(a) == cold_hold(b) == 592


def test_deleting_what_went_on_at_two_servers_leaves_nothing_here_nor_in_the_shared_tier(
    world: World,
) -> None:
    a, b = world.server("a", replicate="both"), world.server("b", replicate="both")
    for turn in range(5):
        world.time_s += 1
        assert a.pause(chat(200 + 50 * turn))["state"] == "paused"
        world.time_s += 1
        b.hold()
        assert b.pause(chat(210 + 50 * turn))["state"] == "paused"
        world.time_s += 1
        assert a.hold()["restored_tokens"] == (210 + 50 * turn) // 16 * 16
    assert a.forget()["deleted"]
    assert a.disk is not None
    assert list(a.disk.scan("")) == []
    assert world.backing.objects == {}


def test_redis_that_comes_back_with_old_data_is_used_as_it_is(world: World) -> None:
    a, b = world.server("a", replicate="redis"), world.server("b", replicate="redis")
    a.pause(chat(100))
    old = world.backing.copy()
    world.time_s += 10
    a.pause(chat(300))
    b.list()
    world.time_s += 10
    world.backing.objects.clear()
    world.backing.objects.update(old.objects)
    world.backing.last = old.last
    assert cold_hold(b) == cold_hold(a) == 96
    a.upkeep()
    b.upkeep()
    assert a.pause(chat(400))["tiers"] == ["redis"]
    world.time_s += 1
    assert cold_hold(b) == 400


# -- clocks --


@pytest.fixture
def ahead(tmp_path: Path, world: World, skew_s: float) -> Iterator[World]:
    """Servers whose clock is `skew_s` ahead, over the same shared tier, whose clock is that of `world`."""
    ahead = World(tmp_path / "ahead", time_s=NOW + skew_s, backing=world.backing)
    world.backing.now = lambda: world.time_s
    yield ahead
    ahead.finish()


def let_pass(seconds: float, *worlds: World) -> None:
    """Time goes on, for all clocks alike."""
    for each in worlds:
        each.time_s += seconds


@pytest.mark.parametrize("skew_s", [0.0, 60.0])
def test_what_a_server_with_a_slow_clock_went_on_to_is_the_newest(world: World, ahead: World) -> None:
    a = ahead.server("a", replicate="both")
    b = world.server("b", replicate="redis", disk=False)
    a.pause(chat(100))
    let_pass(10, world, ahead)
    b.hold()
    b.pause(chat(600))
    let_pass(10, world, ahead)
    assert (cold_hold(a), cold_hold(b)) == (592, 592)


@pytest.mark.parametrize("skew_s", [0.0, 60.0])
def test_a_demotion_does_not_replace_it(world: World, ahead: World) -> None:
    a = ahead.server("a", replicate="both", demote_after_s=100.0)
    b = world.server("b", replicate="redis", disk=False)
    a.pause(chat(100))
    let_pass(10, world, ahead)
    b.hold()
    b.pause(chat(600))
    for seconds in (41, 200, 31):
        let_pass(seconds, world, ahead)
        a.upkeep(0.0)
    assert on_disk(a) == set()
    assert (cold_hold(a), cold_hold(b)) == (592, 592)


@pytest.mark.parametrize("skew_s", [0.0, 60.0])
def test_a_further_turn_at_the_server_ahead_is_the_newest_again(world: World, ahead: World) -> None:
    a = ahead.server("a", replicate="both")
    b = world.server("b", replicate="redis", disk=False)
    a.pause(chat(100))
    let_pass(10, world, ahead)
    b.hold()
    b.pause(chat(600))
    let_pass(10, world, ahead)
    a.hold()
    a.pause(chat(620))
    assert (cold_hold(a), cold_hold(b)) == (608, 608)


# -- copies that another server superseded --


def test_superseded_copies_leave_the_own_disk(world: World) -> None:
    a = world.server("a", replicate="both", high_watermark=0.5, low_watermark=0.3, ssd_bytes=1 << 20)
    b = world.server("b", replicate="both")
    for number in range(12):
        world.time_s += 1
        a.pause(numbered(number, 150))
    for number in range(12):
        world.time_s += 1
        b.hold(numbered(number, 170).key)
        b.pause(numbered(number, 170))
    for _ in range(3):
        a.upkeep()
    assert on_disk(a) == known_on_disk(a) == set()
    assert len(on_disk(b)) == 12


@pytest.mark.parametrize("superseded", [False, True])
def test_a_disk_of_superseded_copies_never_refuses_a_pause(world: World, superseded: bool) -> None:
    a = world.server("a", replicate="both", high_watermark=0.6, low_watermark=0.3, ssd_bytes=1_000_000)
    b = world.server("b", replicate="both")
    for number in range(40):
        world.time_s += 1
        assert a.pause(numbered(number, 150))["not_written"] == {}
        if superseded:
            world.time_s += 1
            b.hold(numbered(number, 170).key)
            b.pause(numbered(number, 170))
        a.upkeep()
        a.upkeep()


# -- life times --


def test_a_session_in_the_shared_tier_does_not_end_by_one_servers_ttl(world: World) -> None:
    """Its life time there counts, which every server's reading renews."""
    a, b = (world.server(name, replicate="redis", ttl_s=100.0) for name in "ab")
    a.pause(chat(300))
    b.list()
    world.time_s += 95
    assert b.resume()["restored_tokens"] == 288
    a.upkeep(10.0)
    a.upkeep(31.0)
    assert a.service.counters.expired == 0
    assert cold_hold(b) == 288


def test_a_resume_without_a_request_is_a_use(world: World) -> None:
    a = world.server("a", ttl_s=100.0)
    a.pause(chat(300))
    world.time_s += 95
    assert a.resume()["restored_tokens"] == 288
    a.upkeep()
    a.upkeep()
    assert a.service.counters.expired == 0
    a.memory.clear()
    assert a.resume()["restored_tokens"] == 288
    a.upkeep(101.0)
    assert a.service.counters.expired == 1

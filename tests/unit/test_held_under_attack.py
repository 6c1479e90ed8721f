"""Promises once broken: moves, exports, imports, deletes beside other work; memory before tiers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sgl_krul.config import TenantsConfig
from sgl_krul.errors import KrulError, Missing, QuotaExceeded, StoreUnavailable, UnknownTier
from sgl_krul.service.archive import export_session
from sgl_krul.service.jobs import Body
from sgl_krul.session.catalog import read_manifest
from sgl_krul.session.record import SessionKey
from sgl_krul.session.registry import PausedCopy, Session
from tests.faults import Call, FaultInjectingTier, Kind, Script, nothing
from tests.sessions import NAMESPACE, chat
from tests.two_servers import KEY, Server, World

EVERYTHING = 1 << 30  # memory_max_bytes: all sessions are paused to memory


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.finish()


def session(server: Server, key: SessionKey = KEY) -> Session:
    """The session, which the server must know."""
    found = server.session(key)
    assert found is not None
    return found


def stored(server: Server) -> PausedCopy:
    """What the server knows of the stored copy of KEY."""
    paused = session(server).paused
    assert paused is not None
    return paused


def on_disk(server: Server) -> list[str]:
    """Keys on the server's disk."""
    assert server.disk is not None
    return [entry.key for entry in server.disk.scan("")]


def export(server: Server, path: Path, key: SessionKey = KEY) -> Any:
    """The answer to an export."""
    return server.ask(lambda reply: server.service.exchange.export(session(server, key), path, reply))


def take_in(server: Server, path: Path) -> Any:
    """The answer to an import."""
    return server.ask(lambda reply: server.service.exchange.take_in(path, reply))


def stop_at(tier: FaultInjectingTier, operation: str, part: str) -> tuple[threading.Event, threading.Event]:
    """Calls on keys with that part wait: an event that the first is there, and one that lets all go on."""
    reached, go = threading.Event(), threading.Event()

    def plan(call: Call) -> None:
        if call.operation == operation and part in call.key:
            reached.set()
            assert go.wait(20), "nobody lets the call go on"

    tier.plan = plan
    return reached, go


def poll_until(server: Server, done: Callable[[], object]) -> None:
    """Poll, as the scheduler does, until `done()`."""
    deadline = time.monotonic() + 15
    while not done():
        assert time.monotonic() < deadline, "what is waited for does not come"
        server.service.poll()
        time.sleep(0.0005)


def look(server: Server) -> None:
    """List the sessions while other jobs are under way."""
    listed: list[Body | KrulError] = []
    server.service.exchange.refresh(listed.append, server.service.overview)
    poll_until(server, lambda: listed)


# -- moves --


def test_a_listing_while_the_old_copy_goes_does_not_lose_a_moved_session(world: World) -> None:
    a = world.server("a", replicate="redis")
    a.pause(chat(300))
    a.list()
    manifest_gone, go = stop_at(a.redis, "delete", "-c")
    answers: list[Body | KrulError] = []
    a.service.exchange.move(session(a), "ssd", answers.append)
    poll_until(a, manifest_gone.is_set)
    look(a)
    go.set()
    a.drive()
    assert [type(answer) for answer in answers] == [dict]
    assert on_disk(a)
    assert "chat" in a.listed()
    assert stored(a).tiers == ("ssd",)


def test_a_listing_that_finds_a_located_session_first_does_not_undo_its_move(world: World) -> None:
    a, b = world.server("a", replicate="redis"), world.server("b", replicate="redis")
    b.list()
    a.pause(chat(300))
    b.show()
    copied, go = stop_at(b.ssd, "put", "manifest")
    answers: list[Body | KrulError] = []
    b.service.exchange.move(session(b), "ssd", answers.append)
    poll_until(b, copied.is_set)
    look(b)
    go.set()
    b.drive()
    assert [type(answer) for answer in answers] == [dict]
    assert "chat" in b.listed()
    assert stored(b).tiers == ("ssd",)


@pytest.mark.parametrize("how", ["demotion", "move"])
def test_a_whole_copy_is_not_given_up_for_one_that_lacks_chunks(world: World, how: str) -> None:
    """Redis has the manifest still, and evicted the chunks."""
    a = world.server("a", replicate="both", demote_after_s=10.0)
    a.pause(chat(600))
    for key in world.backing.keys("-c00000"):
        del world.backing.objects[key]
    if how == "demotion":
        a.upkeep()
    else:
        a.move("redis")
    assert stored(a).tiers == ("redis",)
    a.memory.clear()
    assert a.hold()["restored_tokens"] == 592


def test_a_move_does_not_settle_for_an_older_copy_while_the_newest_is_out_of_reach(world: World) -> None:
    a = world.server("a", replicate="both")
    b = world.server("b", replicate="redis", disk=False)
    a.pause(chat(100))
    world.time_s += 10
    b.hold()
    b.pause(chat(600))
    world.time_s += 10
    a.list()
    assert stored(a).stored_tokens == 592
    a.view.down = True
    answer = a.move("ssd")
    a.view.down = False
    a.upkeep()
    assert isinstance(answer, StoreUnavailable)
    assert a.hold()["restored_tokens"] == 592


def test_a_demotion_that_comes_due_does_not_stop_the_users_move(world: World) -> None:
    a = world.server("a", demote_after_s=1.0, interval_s=1.0)
    a.pause(chat(600))
    copying, go = stop_at(a.redis, "put", "")
    answers: list[Body | KrulError] = []
    a.service.exchange.move(session(a), "redis", answers.append)
    poll_until(a, copying.is_set)
    for _ in range(2):  # a plan is made only when what the one before asked for has been begun
        a.redis.forget_calls()
        world.time_s += 3
        poll_until(a, lambda: a.redis.count("refresh"))
    go.set()
    a.drive()
    assert [type(answer) for answer in answers] == [dict]
    assert stored(a).tiers == ("redis",)


def test_a_move_to_a_tier_that_is_not_there_is_refused(world: World) -> None:
    a = world.server("a", shared=False)
    a.pause(chat(150))
    answer = a.move("redis")
    assert isinstance(answer, UnknownTier)
    assert stored(a).tiers == ("ssd",)


# -- exports and imports --


def test_an_export_that_would_be_cut_fails_and_leaves_no_file(world: World, tmp_path: Path) -> None:
    a = world.server("a", shared=False)
    a.pause(chat(600))
    assert a.disk is not None
    a.disk.delete(next(key for key in on_disk(a) if key.endswith("c000002")))
    path = tmp_path / "chat.krul"
    assert isinstance(export(a, path), Missing)
    assert not path.exists()


@pytest.mark.parametrize("how", ["out of reach", "full"])
def test_an_import_that_redis_does_not_take_goes_to_the_disk(world: World, tmp_path: Path, how: str) -> None:
    a = world.server("a", replicate="redis")
    a.pause(chat(100))
    path = tmp_path / "chat.krul"
    export(a, path)
    a.forget()
    if how == "full":
        a.redis.plan = Script({("put", ""): Kind.FULL})
    a.view.down = how == "out of reach"  # and nobody knows it yet
    answer = take_in(a, path)
    assert answer["tiers"] == ["ssd"]
    assert a.hold()["restored_tokens"] == 96


def test_a_file_that_understates_its_size_does_not_pass_the_quota(world: World, tmp_path: Path) -> None:
    a = world.server("a", tenants=TenantsConfig(quota_bytes=150_000))
    answers = []
    for number in range(3):
        forger = world.server(f"forger{number}", shared=False)
        forged = chat(300, f"t/{number}")
        forger.pause(forged)
        assert forger.disk is not None
        manifest = read_manifest(forger.disk, NAMESPACE, forged.digest)
        assert manifest is not None
        lie = msgspec.structs.replace(manifest, raw_bytes=0, stored_bytes=0)
        path = tmp_path / f"{number}.krul"
        export_session(lie, [forger.disk], path, key=b"key")
        answers.append(take_in(a, path))
    assert [type(answer) for answer in answers] == [dict, QuotaExceeded, QuotaExceeded]
    assert a.store.usage()["ssd"].bytes <= 150_000


def test_imports_at_the_same_time_do_not_pass_the_quota_together(world: World, tmp_path: Path) -> None:
    exporter = world.server("exporter", shared=False)
    paths = []
    for number in range(4):
        exported = chat(300, f"t/{number}", first=1000 * number)
        size = exporter.pause(exported)["bytes_stored"]
        paths.append(tmp_path / f"{number}.krul")
        export(exporter, paths[-1], exported.key)
    a = world.server("a", shared=False, tenants=TenantsConfig(quota_bytes=size + 10_000))
    _, go = stop_at(a.ssd, "put", "")
    answers: list[Body | KrulError] = []
    for path in paths:
        a.service.exchange.take_in(path, answers.append)
    poll_until(a, lambda: len(answers) == 3)  # one is being written all the while
    go.set()
    a.drive()
    assert [type(answer) for answer in answers] == [QuotaExceeded, QuotaExceeded, QuotaExceeded, dict]
    assert a.store.usage()["ssd"].bytes <= size + 10_000


# -- deletes --


def test_a_chat_that_was_never_paused_is_deleted_while_redis_is_out_of_reach(world: World) -> None:
    a = world.server("a", replicate="redis")
    a.turn(chat(100))
    a.view.known_down = a.view.down = True
    assert a.forget()["deleted"]
    assert a.session() is None


def test_a_session_that_redis_may_still_have_is_not_called_deleted(world: World) -> None:
    """Else it would be there again, an older turn of it, when Redis is."""
    a, b = world.server("a", replicate="redis"), world.server("b", replicate="redis")
    a.pause(chat(200))
    world.time_s += 1
    a.view.known_down = a.view.down = True
    assert a.pause(chat(300))["tiers"] == ["ssd"]
    world.time_s += 1
    assert isinstance(a.forget(), StoreUnavailable)
    a.view.known_down = a.view.down = False
    a.upkeep()
    assert a.hold()["restored_tokens"] == 288
    assert a.forget()["deleted"]
    a.upkeep()
    assert a.listed() == b.listed() == {}
    assert world.backing.objects == {}


# -- memory before tiers --


def test_what_was_safe_on_the_disk_survives_a_pause_to_memory_and_a_crash(world: World) -> None:
    a = world.server("a")
    a.pause(chat(150))
    a.settings.memory_max_bytes = EVERYTHING
    a.restart()
    assert a.hold()["restored_tokens"] == 144
    a.pause(chat(170))
    assert stored(a).tiers == ("memory",)
    a.restart()
    assert a.hold()["restored_tokens"] == 144


def test_what_was_safe_on_the_disk_survives_a_pause_to_memory_that_others_then_need(world: World) -> None:
    a = world.server("a", memory_pages=24)
    others = [chat(320, f"other {number}", first=10_000 * (number + 1)) for number in range(2)]
    for each in (chat(150), *others):
        a.pause(each)
    a.settings.memory_max_bytes = EVERYTHING
    a.restart()
    a.hold()
    a.pause(chat(170))
    assert stored(a).tiers == ("memory",)
    for other in others:
        assert a.resume(other.key)["restored_tokens"] == 320
    a.upkeep()
    assert a.hold()["restored_tokens"] >= 144


def test_a_pause_to_memory_leaves_the_shared_copy_to_the_other_servers(world: World) -> None:
    a = world.server("a", replicate="redis", memory_max_bytes=EVERYTHING)
    b = world.server("b", replicate="redis")
    b.pause(chat(300))
    a.hold()
    a.pause(chat(310))
    assert stored(a).tiers == ("memory",)
    b.memory.clear()
    assert b.hold()["restored_tokens"] == 288


@pytest.mark.parametrize("listing", ["fails", "comes late", "is in time"])
def test_a_write_out_does_not_replace_what_another_server_paused_since(world: World, listing: str) -> None:
    a = world.server("a", replicate="redis", memory_max_bytes=1 << 20, memory_age_s=5.0)
    b = world.server("b", replicate="redis")
    a.pause(chat(100))
    assert stored(a).tiers == ("memory",)
    world.time_s += 2
    b.pause(chat(600))
    if listing == "fails":
        a.redis.plan = Script({("scan", f"v1/{NAMESPACE}/"): Kind.BEFORE})
    if listing == "comes late":
        _, go = stop_at(a.redis, "scan", f"v1/{NAMESPACE}/")
        world.time_s += 31
        poll_until(a, lambda: a.service.counters.demotions)
        go.set()
    a.upkeep()
    a.redis.plan = nothing
    b.memory.clear()
    assert b.hold()["restored_tokens"] == 592

"""Sessions to and from several tiers, as a server and its neighbour see it."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sgl_krul.errors import (
    BadArchive,
    Corrupt,
    KrulError,
    LeaseHeld,
    SessionBusy,
    StoreFull,
    StoreUnavailable,
    UnknownSession,
)
from sgl_krul.session.catalog import read_manifest
from sgl_krul.session.record import (
    Manifest,
    SessionKey,
    decode_manifest,
    encode_manifest,
    manifest_key,
    pack_tokens,
    session_prefix,
)
from sgl_krul.session.registry import State
from sgl_krul.store.tier import Tier
from tests.faults import Call, Kind, Script
from tests.sessions import LAYOUT, NAMESPACE, NOW, OTHER_NAMESPACE, chat, files, tokens
from tests.two_servers import KEY, Server, World

MANIFEST = manifest_key(NAMESPACE, KEY.digest)
PREFIX = session_prefix(NAMESPACE, KEY.digest)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.finish()


def record(tier: Tier, namespace: str = NAMESPACE) -> Manifest:
    """The manifest of KEY in a tier."""
    manifest = read_manifest(tier, namespace, KEY.digest)
    assert manifest is not None
    return manifest


def on_disk(server: Server) -> bool:
    """Whether anything of KEY lies on the server's disk."""
    assert server.disk is not None
    return any(KEY.digest in entry.key for entry in server.disk.scan(""))


def chunk_of(tier: Tier, index: int) -> str:
    """Key of a chunk of KEY."""
    return record(tier).chunks[index].key


# -- a pause, and where it goes --


def test_both_tiers_get_a_copy(world: World) -> None:
    a = world.server("a", replicate="both")
    answer = a.pause(chat(150))
    assert (answer["tiers"], answer["not_written"]) == (["ssd", "redis"], {})
    assert a.disk is not None
    for tier in (a.disk, a.view):
        assert record(tier).stored_tokens == 144
    assert record(a.disk).paused_at == record(a.view).paused_at


@pytest.mark.parametrize("failing", ["ssd", "redis"])
@pytest.mark.parametrize("kind", [Kind.FULL, Kind.BEFORE])
def test_one_of_two_fails_and_the_session_is_paused_anyway(world: World, failing: str, kind: Kind) -> None:
    a = world.server("a", replicate="both")
    tier, other = (a.ssd, "redis") if failing == "ssd" else (a.redis, "ssd")
    tier.plan = Script({("put", ""): kind})
    answer = a.pause(chat(150))
    assert (answer["state"], answer["tiers"]) == ("paused", [other])
    assert list(answer["not_written"]) == [failing]
    assert "on purpose" in answer["not_written"][failing]
    assert answer["stored_tokens"] == 144
    tier.plan = lambda call: None
    assert a.resume()["restored_from"] == other


@pytest.mark.parametrize(("wanted", "other"), [("ssd", "redis"), ("redis", "ssd")])
@pytest.mark.parametrize("how", ["full", "unreachable", "known to be full", "known to be unreachable"])
def test_where_the_wanted_tier_fails_the_other_takes_it(
    world: World, wanted: Any, other: str, how: str
) -> None:
    if (wanted, how) == ("ssd", "known to be unreachable"):
        return  # nobody knows that of a disk
    sizes = {"ssd_bytes" if wanted == "ssd" else "redis_bytes": 5000} if how == "known to be full" else {}
    a = world.server("a", replicate=wanted, **sizes)
    if how in ("full", "unreachable"):
        tier = a.ssd if wanted == "ssd" else a.redis
        tier.plan = Script({("put", ""): Kind.FULL if how == "full" else Kind.BEFORE})
    a.view.known_down = how == "known to be unreachable"
    answer = a.pause(chat(150))
    assert (answer["state"], answer["tiers"]) == ("paused", [other])
    assert list(answer["not_written"]) == [wanted]
    assert a.resume()["restored_tokens"] == 144
    leftover = world.backing.objects if wanted == "redis" else files(a.root)
    assert not leftover


def test_where_all_fail_the_most_telling_error_is_answered(world: World) -> None:
    a = world.server("a")
    a.turn(chat(150))
    a.ssd.plan = Script({("put", ""): Kind.BEFORE})
    a.redis.plan = Script({("put", ""): Kind.FULL})
    assert isinstance(a.pause(chat(150)), StoreFull)
    a.redis.plan = Script({("put", ""): Kind.BEFORE})
    assert isinstance(a.pause(chat(150)), StoreUnavailable)
    session = a.session()
    assert session is not None
    assert (session.state, session.paused) == (State.ACTIVE, None)
    assert files(a.root) == {}
    assert world.backing.objects == {}


@pytest.mark.parametrize("replicate", ["redis", "ssd"])
def test_a_session_that_another_server_writes_is_answered_409(world: World, replicate: Any) -> None:
    """With redis for the wanted tier, or for the one to fall back on."""
    a, b = world.server("a", replicate=replicate), world.server("b", replicate="redis")
    b.pause(chat(100))
    before = dict(world.backing.objects)
    a.turn(chat(150))
    if replicate == "ssd":
        a.ssd.plan = Script({("put", ""): Kind.FULL})
    with b.view.lease(PREFIX):
        answer = a.pause(chat(150))
        assert isinstance(answer, LeaseHeld)
        assert answer.status == 409
        assert "'b:1'" in str(answer)
    assert world.backing.objects == before
    assert files(a.root) == {}
    session = a.session()
    assert session is not None
    assert (session.state, session.paused) == (State.ACTIVE, None)
    a.ssd.plan = lambda call: None
    assert a.pause(chat(150))["state"] == "paused"


def test_a_forget_of_what_another_server_writes_changes_nothing(world: World) -> None:
    a, b = world.server("a", replicate="both"), world.server("b", replicate="redis")
    a.pause(chat(150))
    before, disk = dict(world.backing.objects), files(a.root)
    with b.view.lease(PREFIX):
        assert isinstance(a.forget(), LeaseHeld)
        assert isinstance(a.move("ssd"), dict)  # its own disk has it: nothing to write elsewhere
    assert world.backing.objects == before
    assert files(a.root) == disk
    assert a.resume()["restored_tokens"] == 144
    assert a.forget()["deleted"]


def test_older_copies_elsewhere_go_after_a_pause(world: World) -> None:
    a = world.server("a", replicate="redis")
    a.pause(chat(150))
    assert not on_disk(a)
    a.redis.plan = Script({("put", ""): Kind.FULL})
    world.time_s += 1
    assert a.pause(chat(160))["tiers"] == ["ssd"]
    assert world.backing.objects == {}
    a.redis.plan = lambda call: None
    world.time_s += 1
    assert a.pause(chat(170))["tiers"] == ["redis"]
    assert not on_disk(a)
    assert a.resume()["restored_tokens"] == 160


def test_an_older_copy_that_cannot_be_deleted_is_no_reason_to_fail(world: World) -> None:
    a = world.server("a", replicate="redis")
    a.pause(chat(150))
    a.redis.plan = Script({("put", ""): Kind.FULL, ("delete", ""): Kind.BEFORE})
    world.time_s += 1
    assert a.pause(chat(160))["tiers"] == ["ssd"]
    a.redis.plan = lambda call: None
    a.restart()
    a.upkeep()
    assert a.resume()["restored_tokens"] == 160  # the newest counts


def test_a_pause_goes_through_when_the_tidying_after_it_fails(world: World) -> None:
    """The manifest is in place: that the shared tier can't be listed then is no failed pause."""
    a = world.server("a", replicate="redis")

    def plan(call: Call) -> Kind | None:
        put = call.operation == "scan" and MANIFEST in world.backing.objects
        return Kind.BEFORE if put else None

    a.redis.plan = plan
    answer = a.pause(chat(150))
    assert isinstance(answer, dict), answer
    assert (answer["state"], answer["tiers"]) == ("paused", ["redis"])


def test_a_newer_pause_of_another_server_is_not_deleted(world: World) -> None:
    """It came between the writing of this one and the tidying up."""
    a, b = world.server("a", replicate="ssd"), world.server("b", replicate="redis")

    def plan(call: Call) -> Kind | None:
        if call.operation == "put" and call.key == MANIFEST:
            world.time_s += 5
            b.pause(chat(300))
        return None

    a.ssd.plan = plan
    a.turn(chat(150))
    assert a.pause(chat(150))["state"] == "paused"
    assert b.resume()["restored_tokens"] == 288
    assert record(b.view).tokens == 300


# -- a restore --


@pytest.mark.parametrize("damage", ["missing", "short", "wrong", "before"])
@pytest.mark.parametrize("operation", ["read_header", "read_segments"])
def test_a_chunk_that_one_tier_lost_comes_from_the_other(world: World, damage: str, operation: str) -> None:
    a = world.server("a", replicate="both")
    a.pause(chat(150))
    key = chunk_of(a.view, 1)
    a.ssd.plan = Script({(operation, key): Kind(damage)})
    answer = a.resume()
    assert (answer["restored_tokens"], answer["reason"]) == (144, "")
    assert answer["restored_from"] == "redis"
    session = a.session()
    assert session is not None
    assert session.corrupt_chunks == int(damage in ("short", "wrong"))


def test_a_chunk_that_all_have_lost_cuts_the_restore(world: World) -> None:
    a = world.server("a", replicate="both")
    a.pause(chat(150))
    key = chunk_of(a.view, 1)
    a.ssd.plan = a.redis.plan = Script({("read_segments", key): Kind.WRONG})
    answer = a.resume()
    assert answer["restored_tokens"] == 64
    assert answer["reason"].startswith("corrupt chunk")


def test_a_tier_that_missed_a_pause_still_heals(world: World) -> None:
    """Its chunks have other names then: those of its own manifest."""
    a = world.server("a", replicate="both")
    a.redis.plan = Script({("put", ""): Kind.BEFORE})
    a.pause(chat(100))
    a.redis.plan = lambda call: None
    world.time_s += 1
    assert a.pause(chat(150))["tiers"] == ["ssd", "redis"]
    assert chunk_of(a.ssd, 0) != chunk_of(a.view, 0)
    a.ssd.plan = Script({("read_segments", chunk_of(a.ssd, 0)): Kind.WRONG})
    assert a.resume()["restored_tokens"] == 144


def test_the_newest_manifest_counts(world: World) -> None:
    a = world.server("a", replicate="both")
    a.pause(chat(150))
    world.time_s += 1
    a.redis.plan = Script({("put", ""): Kind.BEFORE, ("delete", ""): Kind.BEFORE})
    a.pause(chat(200))
    a.redis.plan = lambda call: None
    assert record(a.view).tokens == 150
    a.restart()
    a.upkeep()
    session = a.session()
    assert session is not None
    assert session.paused is not None
    assert session.paused.tiers == ("ssd",)
    answer = a.resume()
    assert (answer["restored_tokens"], answer["tokens"]) == (192, 200)
    # And the other way round: the shared tier has the newer one.
    world.time_s += 1
    b = world.server("b", replicate="redis")
    b.pause(chat(250))
    a.memory.clear()
    a.upkeep()
    answer = a.resume()
    assert (answer["restored_tokens"], answer["restored_from"], answer["tokens"]) == (240, "redis", 250)


def test_a_resume_does_not_forget_the_second_copy(world: World) -> None:
    a = world.server("a", replicate="both")
    a.pause(chat(150))
    for _ in range(2):
        assert a.resume()["tiers"] == ["memory", "ssd", "redis"]
    a.restart()
    a.upkeep()
    assert a.show()["tiers"] == ["ssd", "redis"]
    assert a.resume()["tiers"] == ["memory", "ssd", "redis"]


def test_a_copy_out_of_reach_for_a_moment_is_not_forgotten(world: World) -> None:
    a = world.server("a", replicate="both")
    a.pause(chat(150))
    a.redis.plan = lambda call: Kind.BEFORE
    assert a.resume()["restored_tokens"] == 144
    assert isinstance(a.forget(), StoreUnavailable)  # it has a copy that can't be deleted now
    a.redis.plan = lambda call: None
    assert a.forget()["deleted"]
    assert world.backing.objects == {}


def test_what_was_moved_meanwhile_is_found(world: World) -> None:
    """A restore that was asked for before a demotion, and runs after it."""
    a = world.server("a")
    a.pause(chat(150))
    assert a.move("redis")["tiers"] == ["redis"]
    session = a.session()
    assert session is not None
    assert session.paused is not None
    session.paused = replace(session.paused, tiers=("ssd",))  # as it was known when it was asked for
    answer = a.resume()
    assert (answer["restored_tokens"], answer["tiers"]) == (144, ["memory", "redis"])
    assert a.paused


def test_page_hashes_that_are_not_those_of_the_tokens_restore_nothing(world: World) -> None:
    a = world.server("a", replicate="redis")
    a.pause(chat(150))
    salted = chat(150)
    salted.key = SessionKey("chat", "salt")
    forged = msgspec.structs.replace(
        record(a.view), page_hashes=b"".join(bytes.fromhex(h) for h in salted.hashes), chunks=()
    )
    a.view.put(MANIFEST, encode_manifest(forged), [])
    answer = a.resume()
    assert (answer["restored_tokens"], answer["stored_tokens"]) == (0, 144)
    assert "page hashes are not those of its tokens" in answer["reason"]
    assert a.service.counters.corrupt_chunks == 1
    assert a.memory.usage().objects == 0


def test_one_salt_cannot_be_given_anothers_pages(world: World) -> None:
    """Somebody copied a whole session to another's place: all is sound, but it is not that session's."""
    a = world.server("a", replicate="redis")
    a.pause(chat(150))
    other = SessionKey("chat", "salt")
    manifest = record(a.view)
    place = session_prefix(NAMESPACE, other.digest)
    chunks = []
    for ref in manifest.chunks:
        key = ref.key.replace(PREFIX, place)
        world.backing.objects[key] = world.backing.objects[ref.key]
        chunks.append(msgspec.structs.replace(ref, key=key))
    forged = msgspec.structs.replace(manifest, digest=other.digest, salted=True, chunks=tuple(chunks))
    a.view.put(place + "manifest", encode_manifest(forged), [])
    answer = a.resume(other)
    assert answer["restored_tokens"] == 0
    assert answer["reason"].startswith("corrupt manifest (identity")
    assert a.memory.usage().objects == 0


@pytest.mark.parametrize("token", [-1, -(2**31)])
def test_a_manifest_with_a_negative_token_is_malformed(world: World, token: int) -> None:
    a = world.server("a", replicate="redis")
    a.pause(chat(150))
    token_ids = [*range(149), token]
    forged = msgspec.structs.replace(record(a.view), token_ids=pack_tokens(token_ids))
    with pytest.raises(Corrupt) as caught:
        decode_manifest(encode_manifest(forged), namespace=NAMESPACE, digest=KEY.digest)
    assert caught.value.reason == "length"
    a.view.put(MANIFEST, encode_manifest(forged), [])
    answer = a.resume()
    assert answer["restored_tokens"] == 0
    assert "corrupt manifest (length" in answer["reason"]
    assert a.paused


def test_objects_in_use_live_on(world: World) -> None:
    a = world.server("a", replicate="redis")
    a.pause(chat(150))
    a.resume()
    a.service.close()  # nobody waits for it
    assert set(world.backing.touched) == set(world.backing.objects)


# -- a session that another server paused --


def test_a_session_of_another_server_can_be_held_resumed_shown_and_forgotten(world: World) -> None:
    a = world.server("a", replicate="redis")
    a.pause(chat(150))
    for verb in ("hold", "resume", "show", "forget"):
        b = world.server(f"b-{verb}")
        answer = getattr(b, verb)()
        assert isinstance(answer, dict), answer
        if verb == "forget":
            assert answer["deleted"]
            assert world.backing.objects == {}
            assert b.session() is None
            continue
        assert (answer["tokens"], answer["stored_tokens"]) == (150, 144)
        session = b.session()
        assert session is not None
        assert (session.state, session.last_used) == (State.PAUSED, NOW)
        if verb != "show":
            assert answer["restored_tokens"] == 144
            assert b.show()["tiers"] == ["memory", "redis"]


def test_it_goes_on_there(world: World) -> None:
    a, b = world.server("a", replicate="redis"), world.server("b", replicate="redis")
    a.pause(chat(150))
    assert b.hold()["restored_tokens"] == 144
    world.time_s += 1
    answer = b.pause(chat(300))
    assert (answer["chunks_kept"], answer["state"]) == (2, "paused")
    assert a.listed()["chat"]["tokens"] == 300
    assert a.hold()["restored_tokens"] == 288
    answer = a.show()
    assert (answer["tokens"], answer["stored_tokens"]) == (300, 288)


@pytest.mark.parametrize("verb", ["resume", "show", "forget"])
@pytest.mark.parametrize("shared", [True, False])
def test_what_nobody_knows_is_unknown(world: World, verb: str, shared: bool) -> None:
    a = world.server("a", shared=shared)
    answer = getattr(a, verb)()
    assert isinstance(answer, UnknownSession)
    assert answer.status == 404
    assert len(a.service.registry) == 0


def test_a_new_chat_is_no_resume(world: World) -> None:
    a = world.server("a")
    answer = a.hold()
    assert (answer["restored_tokens"], answer["restored_from"]) == (0, "nowhere")
    assert a.service.counters.resumes == 0
    assert (a.service.counters.holes, a.service.counters.missing_chunks) == (0, 0)
    assert a.session() is None


@pytest.mark.parametrize("known", [True, False])
def test_a_hold_does_not_wait_for_a_shared_tier_that_is_down(world: World, known: bool) -> None:
    a = world.server("a", replicate="redis")
    a.pause(chat(150))
    b = world.server("b", replicate="redis")
    b.view.down, b.view.known_down = True, known
    answer = b.hold()
    assert isinstance(answer, dict)
    assert answer["restored_tokens"] == 0
    assert "store unavailable" in answer["reason"]
    assert isinstance(b.show(), UnknownSession)
    assert "out of reach" in str(b.show())
    # A session it knows is there is a miss now, and still known.
    b.view.down = b.view.known_down = False
    assert b.show()["state"] == "paused"
    b.view.down, b.view.known_down = True, known
    assert "store unavailable" in b.hold()["reason"]
    assert b.paused
    b.view.down = b.view.known_down = False
    assert b.hold()["restored_tokens"] == 144


def test_a_manifest_that_is_damaged_in_the_shared_tier_is_unknown_saying_so(world: World) -> None:
    a, b = world.server("a", replicate="redis"), world.server("b")
    a.pause(chat(150))
    a.view.put(MANIFEST, b"no manifest", [])
    answer = b.show()
    assert isinstance(answer, UnknownSession)
    assert "corrupt manifest" in str(answer)


# -- the list --


def test_the_list_knows_what_other_servers_do(world: World) -> None:
    a, b = world.server("a", replicate="redis"), world.server("b")
    for index in range(3):
        a.pause(chat(100 + index, f"s{index}"))
    assert sorted(b.listed()) == ["s0", "s1", "s2"]
    a.forget(SessionKey("s1"))
    assert sorted(b.listed()) == ["s0", "s2"]
    assert isinstance(b.show(SessionKey("s1")), UnknownSession)


def test_manifests_that_did_not_change_are_not_read_again(world: World) -> None:
    a, b = world.server("a", replicate="redis"), world.server("b")
    for index in range(3):
        a.pause(chat(100, f"s{index}"))
    b.list()
    read = b.redis.count("read_header")
    b.list()
    assert b.redis.count("read_header") == read
    world.time_s += 1
    a.pause(chat(150, "s1"))
    assert b.listed()["s1"]["tokens"] == 150
    assert b.redis.count("read_header") == read + 1


def test_a_list_answers_when_the_shared_tier_does_not(world: World) -> None:
    a = world.server("a")
    a.pause(chat(150))
    a.redis.plan = lambda call: Kind.BEFORE
    assert list(a.listed()) == ["chat"]
    a.view.known_down = True
    assert list(a.listed()) == ["chat"]


def test_a_pause_beside_a_look_is_not_taken_for_gone(world: World) -> None:
    """The look had listed the shared tier before the pause wrote there."""
    a, b = world.server("a", replicate="redis"), world.server("b", replicate="redis")
    b.pause(chat(100, "other"))
    listed, go = hold_look(a, SessionKey("other"))
    answers: list[Any] = []
    a.turn(chat(150))
    a.service.exchange.refresh(answers.append, a.service.overview)
    assert listed.wait(20)
    a.begin_pause(chat(150), answers.append)
    while not answers:
        a.service.poll()
    assert answers[0]["state"] == "paused"
    go.set()
    a.drive()
    assert sorted(row["session_id"] for row in answers[-1]["sessions"]) == ["chat", "other"]
    assert a.paused


def test_a_forget_beside_a_look_is_not_undone(world: World) -> None:
    """The look had listed the session before it was deleted."""
    a, b = world.server("a", replicate="redis"), world.server("b", replicate="redis")
    a.drive()  # its first look is over
    a.pause(chat(150))
    names = (f"other-{number}" for number in range(100))
    later = next(name for name in names if SessionKey(name).digest > KEY.digest)  # read after the first
    b.pause(chat(100, later))
    listed, go = hold_look(a, SessionKey(later))
    answers: list[Any] = []
    a.service.exchange.refresh(answers.append, a.service.overview)
    assert listed.wait(20)
    a.service.forget(a.service.registry.get(KEY), settle=lambda: 0, reply=answers.append)
    while not answers:
        a.service.poll()
    assert answers[0]["deleted"]
    go.set()
    a.drive()
    assert [row["session_id"] for row in answers[-1]["sessions"]] == [later]
    assert a.session() is None


def hold_look(server: Server, key: SessionKey) -> tuple[threading.Event, threading.Event]:
    """Stop the server's next look after its listing, while it reads this manifest; (it does, go on)."""
    listed, go = threading.Event(), threading.Event()

    def plan(call: Call) -> Kind | None:
        if call.operation == "read_header" and call.key == manifest_key(NAMESPACE, key.digest):
            listed.set()
            assert go.wait(20)
        return None

    server.redis.plan = plan
    return listed, go


# -- weights --


def test_copies_of_other_weights_in_the_shared_tier_are_nobodys_business(world: World) -> None:
    """They are of another model, or of this one before an update: other servers may have that still."""
    b = world.server("b", namespace=OTHER_NAMESPACE, replicate="redis")
    session = chat(150)
    session.namespace = OTHER_NAMESPACE
    b.pause(session)
    theirs = dict(world.backing.objects)
    a = world.server("a", replicate="redis")
    assert a.list()["sessions"] == []
    assert isinstance(a.show(), UnknownSession)
    world.time_s += 1
    assert a.pause(chat(100))["state"] == "paused"
    assert a.forget()["deleted"]
    assert world.backing.objects == theirs
    # The same after the weights changed here.
    b.service.change_namespace(NAMESPACE)
    stale = b.session()
    assert stale is not None
    assert stale.state is State.STALE
    b.turn(chat(170))
    assert b.pause(chat(170))["state"] == "paused"
    assert {key: world.backing.objects.get(key) for key in theirs} == theirs
    assert b.forget()["deleted"]
    assert world.backing.objects == theirs


def test_a_stale_session_says_so_with_a_shared_tier_too(world: World) -> None:
    a = world.server("a")
    a.pause(chat(150))
    a.service.change_namespace(OTHER_NAMESPACE)
    answer = a.resume()
    assert (answer["restored_tokens"], answer["state"]) == (0, "stale")
    assert "weight version" in answer["reason"]
    assert a.service.counters.missing_chunks == 0
    a.service.change_namespace(NAMESPACE)
    assert a.resume()["restored_tokens"] == 144


def test_a_stale_session_that_another_server_paused_anew_comes_back(world: World) -> None:
    a, b = world.server("a"), world.server("b", namespace=OTHER_NAMESPACE, replicate="redis")
    a.pause(chat(150))
    a.service.change_namespace(OTHER_NAMESPACE)
    world.time_s += 1
    session = chat(200)
    session.namespace = OTHER_NAMESPACE
    b.pause(session)
    answer = a.resume()
    assert (answer["restored_tokens"], answer["state"]) == (192, "paused")


# -- moves --


def test_a_session_is_moved_there_and_back(world: World) -> None:
    a = world.server("a")
    a.pause(chat(150))
    answer = a.move("redis")
    assert (answer["tiers"], answer["state"]) == (["redis"], "paused")
    assert not on_disk(a)
    assert a.resume()["restored_from"] == "redis"
    a.memory.clear()
    assert a.move("ssd")["tiers"] == ["memory", "ssd"]
    assert world.backing.objects == {}
    assert a.resume()["restored_from"] == "ssd"
    assert a.move("ssd")["tiers"] == ["memory", "ssd"]  # where it is already


def test_a_move_of_a_session_in_both_leaves_one(world: World) -> None:
    a = world.server("a", replicate="both")
    a.pause(chat(150))
    put = a.redis.count("put")
    assert a.move("redis")["tiers"] == ["redis"]
    assert a.redis.count("put") == put  # it was there
    assert not on_disk(a)


def test_moves_that_are_refused(world: World) -> None:
    a = world.server("a", memory_max_bytes=1 << 20)
    assert isinstance(a.move("redis"), UnknownSession)
    a.turn(chat(150))
    assert isinstance(a.move("redis"), SessionBusy)
    assert a.pause(chat(150))["tiers"] == ["memory"]
    answer = a.move("redis")
    assert isinstance(answer, SessionBusy)
    assert "not stored outside memory" in str(answer)
    b = world.server("b")
    b.pause(chat(150))
    for target in ("tape", "memory", ""):
        answer = b.move(target)
        assert isinstance(answer, KrulError)
        assert "expected one of ssd, redis" in str(answer)
    assert b.move("redis")["tiers"] == ["redis"]
    lonely = world.server("c", shared=False)
    lonely.pause(chat(150))
    assert "expected one of ssd" in str(lonely.move("redis"))


@pytest.mark.parametrize("kind", [Kind.FULL, Kind.BEFORE, Kind.AFTER])
def test_a_move_that_fails_leaves_the_session_where_it_was(world: World, kind: Kind) -> None:
    a = world.server("a")
    a.pause(chat(150))
    disk = files(a.root)
    a.redis.plan = Script({("put", ""): kind})
    assert isinstance(a.move("redis"), KrulError)
    assert files(a.root) == disk
    assert a.show()["tiers"] == ["ssd"]
    a.redis.plan = lambda call: None
    assert a.move("redis")["tiers"] == ["redis"]
    assert a.resume()["restored_tokens"] == 144


def test_a_move_spares_what_another_server_paused_meanwhile(world: World) -> None:
    a, b = world.server("a", replicate="redis"), world.server("b", replicate="redis")
    a.pause(chat(150))
    b.list()

    def plan(call: Call) -> Kind | None:
        if call.operation == "put" and call.key == MANIFEST:
            world.time_s += 5
            b.pause(chat(300))
        return None

    a.ssd.plan = plan
    a.move("ssd")
    assert b.resume()["restored_tokens"] == 288
    assert record(b.view).tokens == 300


# -- export and import --


def test_a_session_travels_in_a_file(world: World, tmp_path: Path) -> None:
    a, b = world.server("a"), world.server("b", shared=False)
    path = tmp_path / "chat.krul"
    a.turn(chat(150))
    export = lambda reply: a.service.exchange.export(a.service.registry.get(KEY), path, reply)  # noqa: E731
    assert isinstance(a.ask(export), SessionBusy)
    a.pause(chat(150))
    answer = a.ask(export)
    assert (answer["exported_tokens"], answer["session_id"]) == (144, "chat")
    answer = b.ask(lambda reply: b.service.exchange.take_in(path, reply))
    assert (answer["state"], answer["tiers"], answer["stored_tokens"]) == ("paused", ["ssd"], 144)
    assert b.resume()["restored_tokens"] == 144
    b.restart()
    assert b.resume()["restored_tokens"] == 144


def test_an_export_takes_each_chunk_from_where_it_is_sound(world: World, tmp_path: Path) -> None:
    a = world.server("a", replicate="both")
    a.pause(chat(150))
    a.ssd.plan = Script({("read_segments", chunk_of(a.ssd, 1)): Kind.WRONG})
    path = tmp_path / "chat.krul"
    answer = a.ask(lambda reply: a.service.exchange.export(a.service.registry.get(KEY), path, reply))
    assert answer["exported_tokens"] == 144


def test_imports_that_are_refused(world: World, tmp_path: Path) -> None:
    a = world.server("a")
    path = tmp_path / "chat.krul"
    take = lambda server: server.ask(lambda reply: server.service.exchange.take_in(path, reply))  # noqa: E731
    assert isinstance(take(a), StoreUnavailable)  # no such file
    path.write_bytes(b"no archive")
    assert isinstance(take(a), BadArchive)
    a.pause(chat(150))
    a.ask(lambda reply: a.service.exchange.export(a.service.registry.get(KEY), path, reply))
    other = world.server("b", namespace=OTHER_NAMESPACE)
    assert isinstance(take(other), BadArchive)
    bare = world.server("c", disk=False, shared=False)
    assert "configure ssd or redis" in str(take(bare))
    assert len(other.service.registry) == len(bare.service.registry) == 0


def test_an_import_in_place_of_a_known_session(world: World, tmp_path: Path) -> None:
    a = world.server("a")
    path = tmp_path / "chat.krul"
    a.pause(chat(250))
    a.ask(lambda reply: a.service.exchange.export(a.service.registry.get(KEY), path, reply))
    world.time_s += 1
    a.pause(chat(100))
    world.time_s += 1
    answer = a.ask(lambda reply: a.service.exchange.take_in(path, reply))
    assert (answer["tokens"], answer["stored_tokens"]) == (250, 240)
    answer = a.resume()
    assert (answer["restored_tokens"], answer["recompute_tokens"]) == (240, 10)


# -- many, and all at once --


def test_two_thousand_sessions_leave_nothing_behind(world: World) -> None:
    a = world.server("a", shared=True, memory_pages=16, memory_max_bytes=LAYOUT.page_bytes)

    def round_of(first: int, count: int) -> None:
        for index in range(first, first + count):
            session = chat(17 if index % 2 else 33, f"s{index}", first=index)
            answer = a.pause(session)
            assert answer["state"] == "paused", answer
            a.hold(session.key)
            a.turn(session)
            a.pause(session)
            assert a.forget(session.key)["deleted"]

    tracemalloc.start()
    try:
        round_of(0, 200)
        a.memory.clear()
        a.ssd.forget_calls()
        a.redis.forget_calls()
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        round_of(200, 1800)
        a.memory.clear()
        a.ssd.forget_calls()
        a.redis.forget_calls()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(a.service.registry) == 0
    assert a.service.check() == []
    assert files(a.root) == {}
    assert world.backing.objects == {}
    assert after - before < 1800 * 100, f"{(after - before) / 1800:.0f} bytes a session stay"


def test_no_tier_is_ever_called_from_the_calling_thread(world: World) -> None:
    """The scheduler's: with tiers that take their time, and fifty holds that wait for them."""
    a = world.server("a", replicate="both", memory_max_bytes=2 * LAYOUT.page_bytes, memory_pages=512)
    sessions = [chat(150, f"s{index}", first=1000 * index) for index in range(50)]
    for session in sessions:
        a.pause(session)
    here = threading.get_ident()
    gate = threading.Event()

    def wait(call: Call) -> Kind | None:
        assert gate.wait(30)
        return None

    for tier in (a.ssd, a.redis):
        tier.forget_calls()
        tier.plan = wait
    answers: list[Any] = []
    small, unknown = chat(20, "small"), SessionKey("unknown")
    a.turn(small)
    for session in sessions:
        a.service.resume(session.key, hold=True, reply=answers.append)
    a.begin_pause(small, answers.append)
    new = chat(150, "new")
    a.turn(new)
    a.begin_pause(new, answers.append)
    a.service.exchange.locate(unknown, lambda session: None, answers.append)
    a.service.exchange.refresh(answers.append, a.service.overview)
    for _ in range(20):
        world.time_s += 20.0  # upkeep falls due, holds end
        a.service.poll()
        a.service.overview()
        a.service.describe(a.service.registry.get(sessions[0].key))
        a.service.observe(small.key, tokens(40))
        a.service.registry.check()
    with pytest.raises(SessionBusy):
        a.service.resume(sessions[0].key, hold=True, reply=answers.append)
    assert not [answer for answer in answers if isinstance(answer, dict) and "restored_tokens" in answer]
    gate.set()
    a.drive()
    assert len(answers) == 54
    for tier in (a.ssd, a.redis):
        assert tier.calls
        assert here not in tier.threads()


def test_the_other_verbs_do_not_call_tiers_either(world: World, tmp_path: Path) -> None:
    a = world.server("a", replicate="both")
    a.pause(chat(150))
    for tier in (a.ssd, a.redis):
        tier.forget_calls()
    assert a.resume()["restored_tokens"] == 144
    assert a.ask(lambda reply: a.service.exchange.export(a.service.registry.get(KEY), tmp_path / "x", reply))
    assert a.ask(lambda reply: a.service.exchange.take_in(tmp_path / "x", reply))
    assert a.move("redis")
    assert a.show()
    assert a.list()
    a.service.change_namespace(OTHER_NAMESPACE)
    a.service.change_namespace(NAMESPACE)
    assert a.forget()
    assert isinstance(a.show(), UnknownSession)
    for tier in (a.ssd, a.redis):
        assert threading.get_ident() not in tier.threads()

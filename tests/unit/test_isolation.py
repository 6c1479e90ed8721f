"""Lossy KV is its own session's alone: whatever is resumed, paused and deleted in whatever order.

Every server checks at its end that each page in memory holds what its name says (`tests.lossy`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sgl_krul.errors import Corrupt, KrulError
from sgl_krul.pause.pipeline import plan_chunks
from sgl_krul.service.mover import copy_session
from sgl_krul.session.catalog import delete_session, read_manifest
from sgl_krul.session.record import (
    Manifest,
    SessionKey,
    decode_manifest,
    encode_manifest,
    is_exact_chunk,
    page_key,
)
from sgl_krul.session.registry import State
from sgl_krul.store.tier import Tier
from tests.lossy import in_memory, keep, pause_lossy, paused_lossily, write_lossy
from tests.sessions import (
    CHUNK_TOKENS,
    NAMESPACE,
    OTHER_NAMESPACE,
    PAGE,
    Chat,
    chat,
    tokens,
)
from tests.two_servers import KEY, Server, World

LOSSY, EXACT = chat(150), chat(150, "other")  # the same text
STORED = 144


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.finish()


def manifest_of(tier: Tier | None, session: Chat = LOSSY) -> Manifest:
    assert tier is not None
    manifest = read_manifest(tier, NAMESPACE, session.digest)
    assert manifest is not None
    return manifest


def lossy_server(world: World, session: Chat = LOSSY, **settings: Any) -> Server:
    """A server that finds a lossy session on its disk when it starts."""
    server = world.server("a", **settings)
    assert server.disk is not None
    write_lossy(session, server.disk, now=world.time_s)
    server.restart()
    return server


def pause_again(server: Server, session: Chat, **how: Any) -> Any:
    return server.ask(lambda reply: pause_lossy(server.service, session, reply, **how))


# -- a resume --


@pytest.mark.parametrize("hold", [True, False])
def test_a_lossy_session_comes_back_under_its_own_names(world: World, hold: bool) -> None:
    a = lossy_server(world)
    assert a.show()["exact"] is False
    assert a.show()["lossy_since"] is None  # nothing lossy has been used yet
    answer = a.hold() if hold else a.resume()
    assert answer["restored_tokens"] == STORED
    assert (answer["exact"], answer["lossy_since"]) == (False, 1)
    assert in_memory(a.memory, LOSSY) == (0, STORED)
    assert a.service.counters.lossy_resumes == 1
    assert a.service.counters.duplicated_tokens == 0


def test_again_it_comes_from_memory_under_the_same_names(world: World) -> None:
    a = lossy_server(world)
    a.resume()
    again = a.resume()
    assert (again["restored_tokens"], again["restored_from"]) == (STORED, "memory")
    assert in_memory(a.memory, LOSSY) == (0, STORED)


def test_a_lossy_copy_of_a_session_that_memory_has_exactly_is_not_used(world: World) -> None:
    a = world.server("a")
    paused_lossily(a, LOSSY)
    assert (a.show()["exact"], a.show()["lossy_since"]) == (False, None)
    keep(a.memory, LOSSY)
    answer = a.hold()
    assert (answer["restored_tokens"], answer["restored_from"]) == (STORED, "memory")
    assert answer["lossy_since"] is None
    assert in_memory(a.memory, LOSSY) == (STORED, 0)
    session = a.turn(LOSSY)
    assert session.exact
    assert a.show()["exact"] is True


def test_of_one_found_in_a_store_nobody_knows_how_it_ran(world: World) -> None:
    """It may have been lossy before, and stays that until it is deleted."""
    a = lossy_server(world)
    keep(a.memory, LOSSY)
    assert a.hold()["lossy_since"] == 1
    assert in_memory(a.memory, LOSSY) == (STORED, STORED)
    assert a.service.counters.duplicated_tokens == STORED


def test_what_memory_has_of_it_in_part_is_not_mixed_with_it(world: World) -> None:
    a = world.server("a")
    paused_lossily(a, LOSSY)
    keep(a.memory, LOSSY)
    last = page_key(NAMESPACE, LOSSY.hashes[-1])
    a.memory.delete(last)
    answer = a.hold()
    assert (answer["restored_tokens"], answer["lossy_since"]) == (STORED, 1)
    assert in_memory(a.memory, LOSSY) == (STORED - PAGE, STORED)
    assert a.service.counters.duplicated_tokens == 2 * CHUNK_TOKENS  # whole chunks


def test_nothing_that_came_makes_nothing_private(world: World) -> None:
    a = lossy_server(world)
    assert a.disk is not None
    for ref in manifest_of(a.disk).chunks:
        a.disk.delete(ref.key)
    answer = a.hold()
    assert (answer["restored_tokens"], answer["lossy_since"]) == (0, None)
    assert a.turn(LOSSY).exact  # it is computed anew, and that is exact


def test_a_part_of_it_is_enough(world: World) -> None:
    a = lossy_server(world)
    assert a.disk is not None
    a.disk.delete(manifest_of(a.disk).chunks[1].key)
    answer = a.hold()
    assert (answer["restored_tokens"], answer["lossy_since"]) == (CHUNK_TOKENS, 1)
    assert in_memory(a.memory, LOSSY) == (0, CHUNK_TOKENS)


def test_a_salted_session_keeps_its_salts(world: World) -> None:
    salted = Chat(SessionKey("chat", "salt", "theirs"), tokens(150))
    a = lossy_server(world, salted)
    answer = a.hold(salted.key)
    assert (answer["restored_tokens"], answer["lossy_since"], answer["salted"]) == (STORED, 1, True)
    assert in_memory(a.memory, salted) == (0, STORED)
    assert pause_again(a, salted)["state"] == "paused"
    assert a.hold(salted.key)["restored_tokens"] == STORED


# -- two sessions of the same text --

VERBS = ("resume lossy", "resume exact", "pause lossy", "pause exact", "delete lossy", "forget memory")


@pytest.mark.parametrize("order", [*permutations(VERBS, 3)], ids="-".join)
def test_two_sessions_of_one_text_in_all_orders(world: World, order: tuple[str, ...]) -> None:
    a = lossy_server(world)
    a.pause(EXACT)
    for verb in (*order, "resume exact", "resume lossy"):
        run(a, verb)
        # `finish` looks into every page at the end; these say whose is there after each step.
        theirs, private = in_memory(a.memory, LOSSY)
        session = a.session()
        assert private == 0 or session is None or session.private == 1
        assert manifest_of(a.disk, EXACT).exact
        assert theirs in (0, STORED)
    answer = a.resume(EXACT.key)
    assert (answer["restored_tokens"], answer["exact"], answer["lossy_since"]) == (STORED, True, None)


def clear(server: Server) -> None:
    """Memory is empty."""
    server.service.resumes.holds.close()
    server.memory.clear()


def run(server: Server, verb: str) -> None:
    """One step; what makes no sense now is left out."""
    session = server.session()
    match verb:
        case "resume lossy" if session is not None and session.state is State.PAUSED:
            answer = server.hold()
            assert answer["restored_tokens"] == STORED
        case "resume exact":
            assert server.resume(EXACT.key)["restored_tokens"] == STORED
        case "pause lossy" if session is not None and session.private is not None:
            assert pause_again(server, LOSSY)["exact"] is False
            assert not manifest_of(server.disk).exact
        case "pause exact":
            assert server.pause(EXACT)["exact"] is True
        case "delete lossy" if session is not None:
            server.forget()
        case "forget memory":
            clear(server)


# -- what is stored of it --


def test_its_pause_is_lossy_too_and_keeps_what_did_not_change(world: World) -> None:
    a = lossy_server(world)
    a.hold()
    answer = pause_again(a, LOSSY)
    assert (answer["exact"], answer["lossy_since"]) == (False, 1)
    assert (answer["chunks_written"], answer["chunks_kept"]) == (0, 3)
    longer = chat(200)
    answer = pause_again(a, longer)
    assert (answer["chunks_written"], answer["chunks_kept"]) == (1, 2)
    manifest = manifest_of(a.disk)
    assert not manifest.exact
    assert manifest.hashes == longer.hashes  # those of the caller's key
    a.restart()
    answer = a.hold()
    assert (answer["restored_tokens"], answer["lossy_since"]) == (192, manifest.generation)
    clear(a)  # its pages are those of number 1, and are called by another now


def test_an_exact_pause_writes_anew_what_a_lossy_one_has_stored(world: World) -> None:
    a = lossy_server(world)
    answer = a.pause(chat(200))  # its KV was computed: nothing lossy was ever resumed
    assert (answer["exact"], answer["chunks_written"], answer["chunks_kept"]) == (True, 3, 0)
    assert manifest_of(a.disk).exact
    a.memory.clear()
    assert a.resume()["restored_tokens"] == 192
    assert in_memory(a.memory, chat(200)) == (192, 0)


def test_chunks_are_kept_by_what_they_are(world: World) -> None:
    a = world.server("a")
    assert a.disk is not None
    exact = LOSSY.write(a.disk).manifest
    mixed = write_lossy(LOSSY, a.disk).manifest  # of an exact pause before, whose chunks stay
    b = world.server("b")
    assert b.disk is not None
    lossy = write_lossy(LOSSY, b.disk).manifest
    snapshot = LOSSY.snapshot()

    def kept(previous: Manifest | None, *, is_exact: bool) -> int:
        from dataclasses import replace

        plans = plan_chunks(replace(snapshot, exact=is_exact), previous, CHUNK_TOKENS // PAGE)
        return sum(plan.reuse is not None for plan in plans)

    assert kept(exact, is_exact=True) == 3
    assert kept(lossy, is_exact=True) == 0
    assert kept(mixed, is_exact=True) == 3
    assert kept(exact, is_exact=False) == 3
    assert kept(lossy, is_exact=False) == 3
    assert kept(None, is_exact=False) == 0


def test_one_that_rests_in_memory_does_so_under_its_own_names(world: World) -> None:
    a = lossy_server(world, memory_max_bytes=1 << 20)
    a.hold()
    longer = chat(200)
    answer = pause_again(a, longer)
    assert (answer["tiers"], answer["exact"]) == (["memory"], False)
    assert in_memory(a.memory, longer) == (0, 192)
    answer = a.hold()
    assert (answer["restored_tokens"], answer["restored_from"], answer["lossy_since"]) == (192, "memory", 1)
    assert pause_again(a, longer)["tiers"] == ["memory"]
    a.upkeep(700)  # written out to the disk
    assert a.show()["tiers"] == ["memory", "ssd"] or a.show()["tiers"] == ["ssd"]
    manifest = manifest_of(a.disk)
    assert (manifest.exact, manifest.stored_tokens, manifest.hashes) == (False, 192, longer.hashes)
    a.restart()
    assert a.hold()["restored_tokens"] == 192
    assert in_memory(a.memory, longer) == (0, 0)  # it has another number since
    clear(a)


def test_without_a_tier_too(world: World) -> None:
    a = world.server("a", disk=False, shared=False)
    a.service.observe(LOSSY.key, LOSSY.token_ids, private=1)  # as the engine tells of a private request
    answer = pause_again(a, LOSSY)
    assert (answer["tiers"], answer["exact"], answer["stored_tokens"]) == (["memory"], False, STORED)
    assert in_memory(a.memory, LOSSY) == (0, STORED)
    session = a.session()
    assert session is not None
    assert session.paused is not None
    assert not session.paused.exact
    assert a.hold()["restored_tokens"] == STORED
    assert a.service.counters.lossy_resumes == 1


# -- until it is deleted --


def test_it_never_becomes_exact_again(world: World) -> None:
    a = lossy_server(world)
    a.hold()
    session = a.session()
    assert session is not None
    a.turn(LOSSY)  # a late request that ran under the caller's key
    assert session.private == 1
    a.service.observe(LOSSY.key, LOSSY.token_ids, private=None, aborted=True)
    assert a.show()["exact"] is False
    pause_again(a, LOSSY)
    a.service.change_namespace(OTHER_NAMESPACE)
    assert (a.show()["state"], a.show()["exact"], a.show()["lossy_since"]) == ("stale", False, 1)
    a.service.change_namespace(NAMESPACE)
    assert a.hold()["lossy_since"] == 1


def test_exact_chunks_go_where_the_session_lives(world: World) -> None:
    """Another server lost the lossy copy, computed the session anew, and paused it exactly."""
    a = lossy_server(world)
    a.hold()
    clear(a)
    assert a.disk is not None
    delete_session(a.disk, NAMESPACE, LOSSY.digest)
    LOSSY.write(a.disk, now=world.time_s + 1)
    answer = a.hold()
    assert (answer["restored_tokens"], answer["lossy_since"], answer["exact"]) == (STORED, 1, False)
    assert in_memory(a.memory, LOSSY) == (0, STORED)
    clear(a)  # the right bytes under private names: what `finish` looks for is the other way round too


def test_deleted_it_begins_anew_and_its_old_pages_are_nobodys(world: World) -> None:
    a = lossy_server(world)
    a.hold()
    a.forget()  # and the engine's part of it, which drops pages from memory, is left out here
    assert in_memory(a.memory, LOSSY) == (0, STORED)
    assert a.pause(LOSSY)["exact"] is True
    a.memory.clear()
    assert a.hold()["exact"] is True
    a.forget()
    assert a.disk is not None
    write_lossy(LOSSY, a.disk, now=world.time_s)
    session = a.service.registry.open(KEY, world.time_s)
    assert a.service.registry.private_number(session) == 2


def test_a_request_of_a_private_namespace_tells_of_it(world: World) -> None:
    """The scheduler has forgotten the session, the front end has not."""
    a = world.server("a")
    a.service.observe(LOSSY.key, LOSSY.token_ids, private=5)
    assert a.show()["lossy_since"] == 5
    a.service.observe(LOSSY.key, LOSSY.token_ids, private=6)
    assert a.show()["lossy_since"] == 5


# -- elsewhere --


def test_it_stays_lossy_wherever_it_goes(world: World, tmp_path: Path) -> None:
    a = lossy_server(world)
    moved = a.move("redis")
    assert (moved["tiers"], moved["exact"]) == (["redis"], False)
    b = world.server("b")
    held = b.hold()
    assert (held["restored_tokens"], held["exact"], held["lossy_since"]) == (STORED, False, 1)
    assert in_memory(b.memory, LOSSY) == (0, STORED)
    path = tmp_path / "session.krul"
    a.ask(
        lambda reply: a.service.exchange.export(a.service.registry.get(KEY), path, reply),
    )
    a.forget()
    assert isinstance(a.show(), KrulError)
    taken = a.ask(lambda reply: a.service.exchange.take_in(path, reply))
    assert (taken["exact"], taken["stored_tokens"]) == (False, STORED)
    assert not any(is_exact_chunk(ref.key) for ref in manifest_of(a.disk).chunks)
    assert a.hold()["exact"] is False
    assert in_memory(a.memory, LOSSY) == (0, STORED)


def test_its_chunks_are_told_by_their_names(world: World) -> None:
    a = world.server("a")
    assert a.disk is not None
    lossy = write_lossy(LOSSY, a.disk).manifest
    assert not any(is_exact_chunk(ref.key) for ref in lossy.chunks)
    liar = msgspec.structs.replace(lossy, exact=True)
    with pytest.raises(Corrupt, match="not exact, and says it were"):
        decode_manifest(encode_manifest(liar), namespace=NAMESPACE, digest=LOSSY.digest)


def test_a_copy_that_needs_other_names_is_told_by_them_too(world: World) -> None:
    a = world.server("a")
    assert a.disk is not None
    lossy = write_lossy(LOSSY, a.disk).manifest
    write_lossy(chat(150, first=500), a.view)  # other tokens under the same names
    copied = copy_session(lossy, a.disk, a.view).manifest
    assert {ref.key for ref in copied.chunks}.isdisjoint(ref.key for ref in lossy.chunks)
    assert not any(is_exact_chunk(ref.key) for ref in copied.chunks)
    assert not copied.exact


@pytest.mark.parametrize("known", [True, False])
def test_a_lossy_chunk_never_stands_in_for_an_exact_one(world: World, known: bool) -> None:
    """The shared tier has an older, lossy copy of the same generation, by another server."""
    a = world.server("a", replicate="ssd")
    assert a.disk is not None
    write_lossy(LOSSY, a.view, now=world.time_s)
    LOSSY.write(a.disk, now=world.time_s + 1)
    a.disk.delete(manifest_of(a.disk).chunks[1].key)
    a.restart()
    if known:
        a.list()
    answer = a.resume()
    assert (answer["restored_tokens"], answer["exact"]) == (CHUNK_TOKENS, True)
    assert in_memory(a.memory, LOSSY) == (CHUNK_TOKENS, 0)


def test_not_even_where_both_copies_are_read(world: World) -> None:
    """A session at rest in memory, which has lost it: all tiers are asked for what there is."""
    a = world.server("a", replicate="ssd", memory_max_bytes=1 << 20)
    assert a.disk is not None
    assert a.pause(LOSSY)["tiers"] == ["memory"]
    write_lossy(LOSSY, a.view, now=world.time_s - 2)
    LOSSY.write(a.disk, now=world.time_s - 1)
    a.disk.delete(manifest_of(a.disk).chunks[1].key)
    clear(a)
    answer = a.hold()
    assert (answer["restored_tokens"], answer["exact"]) == (CHUNK_TOKENS, True)
    assert in_memory(a.memory, LOSSY) == (CHUNK_TOKENS, 0)


def test_of_two_copies_of_one_moment_the_exact_one_counts(world: World) -> None:
    a = world.server("a", replicate="both")
    assert a.disk is not None
    write_lossy(LOSSY, a.disk, now=world.time_s)
    LOSSY.write(a.view, now=world.time_s)
    a.restart()
    a.list()
    answer = a.resume()
    assert (answer["restored_tokens"], answer["restored_from"]) == (STORED, "redis")
    assert in_memory(a.memory, LOSSY) == (STORED, 0)


def test_a_session_that_only_the_shared_tier_knows(world: World) -> None:
    a = world.server("a")
    write_lossy(LOSSY, a.view, now=world.time_s)
    answer = a.hold()
    assert (answer["restored_tokens"], answer["lossy_since"]) == (STORED, 1)
    session = a.session()
    assert session is not None
    assert session.private == 1


def test_explaining_a_resume_changes_nothing(world: World) -> None:
    a = lossy_server(world)
    session = a.service.registry.get(KEY)
    a.ask(lambda reply: a.service.resumes.explain(session, KEY, reply))
    assert session.private is None
    a.hold()
    assert a.ask(lambda reply: a.service.resumes.explain(session, KEY, reply))["tiers"] == {"memory": STORED}

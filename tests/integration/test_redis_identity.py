"""Whatever is changed behind the tier's back: what can't be trusted is computed anew, and counted."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sgl_krul.config import Replicate
from sgl_krul.layout import KvLayout, namespace
from sgl_krul.session.catalog import read_manifest
from sgl_krul.session.record import Manifest, SessionKey, encode_manifest, manifest_key
from sgl_krul.session.registry import State
from tests.integration.redis_site import Site, chunk_names, open_site, raw_key, raw_keys, session_of
from tests.redis_servers import ValkeyServer
from tests.sessions import CHUNK_TOKENS, LAYOUT, NAMESPACE, PAGE, Chat, files

CHUNKS = 6
HIT = 3  # the chunk that is damaged
FLIPS = 12  # a field
FIELDS = ("m", "h", "0")


def flip(client: Any, key: str, field: str, rng: random.Random) -> None:
    """Change one bit of a field."""
    value = bytearray(client.hget(key, field))
    value[rng.randrange(len(value))] ^= 1 << rng.randrange(8)
    client.hset(key, field, bytes(value))


def current(site: Site, session: Chat) -> Manifest:
    """The manifest as it is in Redis."""
    manifest = read_manifest(site.redis, NAMESPACE, session.digest)
    assert manifest is not None
    return manifest


def chunk_of(site: Site, session: Chat, index: int) -> str:
    """The raw key of a chunk."""
    return raw_key(session, current(site, session).chunks[index].key.rpartition("/")[2])


def cut_and_healed(site: Site, session: Chat, reason: str = "corrupt chunk") -> None:
    """A resume ends before the damaged chunk and counts it; after the next pause all is well."""
    counted = site.service.counters.corrupt_chunks
    answer = site.resumes(session, tokens=HIT * CHUNK_TOKENS)
    assert answer["reason"].startswith(reason)
    assert site.service.counters.corrupt_chunks > counted
    heal(site, session)


def heal(site: Site, session: Chat) -> None:
    """Pause it anew and find it whole."""
    site.memory.clear()
    assert site.pause(session)["tiers"] == ["redis"]
    site.resumes(session, origin="redis")


# -- one bit --


@pytest.mark.parametrize("field", FIELDS)
def test_a_bit_of_a_chunk_is_flipped(redis: ValkeyServer, field: str) -> None:
    rng = random.Random(f"flip {field}")
    session = session_of(CHUNKS, "chat")
    with open_site(redis.url) as site:
        site.pause(session)
        for _ in range(FLIPS):
            flip(redis.client(), chunk_of(site, session, HIT), field, rng)
            cut_and_healed(site, session, reason="corrupt chunk (checksum")
        assert site.find(session).corrupt_chunks >= FLIPS
        assert site.redis.check() == []


@pytest.mark.parametrize("field", ["m", "h"])
def test_a_bit_of_the_manifest_is_flipped(redis: ValkeyServer, field: str) -> None:
    rng = random.Random(f"manifest {field}")
    session = session_of(CHUNKS, "chat")
    with open_site(redis.url) as site:
        site.pause(session)
        for number in range(1, FLIPS + 1):
            flip(redis.client(), raw_key(session, "manifest"), field, rng)
            answer = site.resumes(session, tokens=0)
            assert answer["reason"].startswith("corrupt manifest (checksum")
            assert site.service.counters.corrupt_chunks == number
            heal(site, session)


def test_bits_of_the_index_are_flipped(redis: ValkeyServer) -> None:
    """It says what there is, not what is in it: nothing is lost, whatever it says."""
    rng = random.Random("index")
    session = session_of(CHUNKS, "chat")
    client = redis.client()
    with open_site(redis.url) as site:
        site.pause(session)
        for _ in range(FLIPS):
            name = rng.choice(client.hkeys(raw_key(session, "")))
            flip(client, raw_key(session, ""), name, rng)
            site.look()
            site.resumes(session, origin="redis")
            heal(site, session)


def test_fields_vanish(redis: ValkeyServer) -> None:
    session = session_of(CHUNKS, "chat")
    with open_site(redis.url) as site:
        site.pause(session)
        for field in FIELDS:
            redis.client().hdel(chunk_of(site, session, HIT), field)
            cut_and_healed(site, session)


def test_values_of_another_type(redis: ValkeyServer) -> None:
    session = session_of(CHUNKS, "chat")
    client = redis.client()
    with open_site(redis.url) as site:
        site.pause(session)
        key = chunk_of(site, session, HIT)
        client.delete(key)
        client.set(key, b"a text")
        answer = site.resumes(session, tokens=HIT * CHUNK_TOKENS)
        assert answer["reason"] != ""
        client.delete(key)
        heal(site, session)
        client.delete(raw_key(session, "manifest"))
        client.lpush(raw_key(session, "manifest"), "a list")
        assert site.resumes(session, tokens=0)["reason"] != ""
        client.delete(raw_key(session, "manifest"))
        heal(site, session)


# -- swapped --

SUBSETS = [fields for count in (1, 2, 3) for fields in combinations(FIELDS, count)]


@pytest.mark.parametrize("where", ["of another session", "of the same session", "of an edited session"])
def test_values_are_swapped(redis: ValkeyServer, where: str) -> None:
    """Every choice of the fields of a chunk is replaced by those of another one, of the same lengths."""
    session, other = session_of(CHUNKS, "chat"), session_of(CHUNKS, "other", 5000)
    if where == "of an edited session":  # the same text but for the last page before the end of the chunk
        other.token_ids = session.token_ids[:]
        other.token_ids[(HIT + 1) * CHUNK_TOKENS - 1] += 1
    client = redis.client()
    with open_site(redis.url) as site:
        site.pause(session)
        site.pause(other)
        for fields in SUBSETS:
            source = chunk_of(site, *((session, HIT - 1) if where == "of the same session" else (other, HIT)))
            target = chunk_of(site, session, HIT)
            client.hset(target, mapping={field: client.hget(source, field) for field in fields})
            cut_and_healed(site, session)
        client.copy(chunk_of(site, other, HIT), chunk_of(site, session, HIT), replace=True)
        cut_and_healed(site, session)
        client.rename(chunk_of(site, other, HIT), chunk_of(site, session, HIT))
        cut_and_healed(site, session)
        assert site.resumes(other, tokens=HIT * CHUNK_TOKENS)["reason"] == "missing chunk"


def test_a_manifest_is_replaced_by_another_sessions(redis: ValkeyServer) -> None:
    session, other = session_of(CHUNKS, "chat"), session_of(CHUNKS, "other", 5000)
    client = redis.client()
    with open_site(redis.url) as site:
        site.pause(session)
        site.pause(other)
        client.copy(raw_key(other, "manifest"), raw_key(session, "manifest"), replace=True)
        assert site.resumes(session, tokens=0)["reason"].startswith("corrupt manifest (checksum")
        assert site.memory.leading(other.page_keys) == 0
        heal(site, session)
        client.hset(raw_key(session, "manifest"), "h", client.hget(raw_key(other, "manifest"), "h"))
        assert site.resumes(session, tokens=0)["reason"].startswith("corrupt manifest (checksum")
        heal(site, session)


def test_what_is_put_with_right_checksums_in_a_wrong_place(redis: ValkeyServer) -> None:
    """As a broken writer would: each object is sound in itself."""
    session, other = session_of(CHUNKS, "chat"), session_of(CHUNKS, "other", 5000)
    with open_site(redis.url) as site:
        site.pause(session)
        site.pause(other)
        tier = site.redis

        def read(of: Chat) -> tuple[bytes, bytes]:
            key = current(site, of).chunks[HIT].key
            header = tier.read_header(key)
            body = bytearray(CHUNK_TOKENS * LAYOUT.token_bytes)
            tier.read_segments(key, 0, [memoryview(body)])
            assert header is not None
            return header, bytes(body)

        (mine, my_body), (theirs, their_body) = read(session), read(other)
        for header, body in (
            (theirs, their_body),
            (mine, their_body),
            (theirs, my_body),
            (mine, my_body[:-1]),
        ):
            tier.put(current(site, session).chunks[HIT].key, header, [body])
            cut_and_healed(site, session)
        manifest, foreign = current(site, session), current(site, other)
        for forged in (
            foreign,
            msgspec.structs.replace(foreign, digest=session.digest),
            msgspec.structs.replace(manifest, token_ids=foreign.token_ids),
            msgspec.structs.replace(manifest, page_hashes=foreign.page_hashes),
            msgspec.structs.replace(manifest, namespace="0" * 32),
            msgspec.structs.replace(manifest, chunks=manifest.chunks[1:]),
        ):
            tier.put(manifest_key(NAMESPACE, session.digest), encode_manifest(forged), [])
            assert site.resumes(session, tokens=0)["reason"].startswith("corrupt manifest")
            assert site.memory.leading(other.page_keys) == 0
            heal(site, session)


# -- salts --


@pytest.mark.parametrize("where", ["memory", "ssd", "redis"])
def test_the_same_text_under_two_salts(redis: ValkeyServer, tmp_path: Path, where: str) -> None:
    text = session_of(CHUNKS, "").token_ids
    red, blue, plain = (Chat(SessionKey("chat", salt), text[:]) for salt in ("red", "blue", None))
    replicate: Replicate = "ssd" if where == "ssd" else "redis"
    placement = {"memory_max_bytes": 1 << 30 if where == "memory" else 0}
    pages = len(text) // PAGE
    with open_site(redis.url, ssd=tmp_path, replicate=replicate, placement=placement) as site:
        assert site.pause(red)["tiers"] == [where]
        for other in (blue, plain):
            assert not site.knows(other)
            assert site.resume(other)["restored_tokens"] == 0
            assert site.memory.leading(other.page_keys) == 0
        if where != "memory":
            site.resumes(red, origin=where)
        assert site.memory.leading(red.page_keys) == pages
        twin = Chat(SessionKey("twin", "red"), text[:])
        assert site.memory.leading(twin.page_keys) == pages  # the same salt: the same pages
        for other in (blue, plain):
            assert site.memory.leading(other.page_keys) == 0
            assert site.pause(other)["tiers"] == [where]
        if where != "memory":
            for one, *rest in ((red, blue, plain), (blue, plain, red), (plain, red, blue)):
                site.resumes(one, origin=where)
                assert [site.memory.leading(other.page_keys) for other in rest] == [0, 0]
            site.forget(blue)
            site.resumes(red, origin=where)
    if where == "redis":  # another server, which knows none of them
        with open_site(redis.url) as site:
            site.resumes(red, origin="redis")
            assert site.resume(blue)["restored_tokens"] == 0
            forged = msgspec.structs.replace(current(site, red), digest=blue.digest, chunks=())
            site.redis.put(manifest_key(NAMESPACE, blue.digest), encode_manifest(forged), [])
            answer = site.resume(blue)
            assert answer["restored_tokens"] == 0
            assert answer["reason"].startswith("corrupt manifest (identity: its page hashes")


# -- other namespaces --

OTHERS = {
    "weights": namespace(LAYOUT, "other weights", "", 0, 1),
    "weight version": namespace(LAYOUT, "weights", "2", 0, 1),
    "rank": namespace(LAYOUT, "weights", "", 1, 2),
    "dtype": namespace(replace(LAYOUT, dtype="bfloat16"), "weights", "", 0, 1),
    "page size": namespace(replace(LAYOUT, page_size=32), "weights", "", 0, 1),
    "rope": namespace(replace(LAYOUT, rope="scaled by two"), "weights", "", 0, 1),
    "heads": namespace(replace(LAYOUT, kv_heads=1, head_dim=16), "weights", "", 0, 1),
}


def dump(client: Any) -> dict[bytes, bytes]:
    """Everything there is, but for the lists of directories."""
    return {key: client.dump(key) for key in client.keys("*") if b"/directories" not in key}


@pytest.mark.parametrize("what", OTHERS)
def test_another_namespace_hits_nothing_and_touches_nothing(
    redis: ValkeyServer, tmp_path: Path, what: str
) -> None:
    sessions = [session_of(CHUNKS, f"s{number}", 1000 * number) for number in range(3)]
    client = redis.client()
    assert OTHERS[what] != NAMESPACE
    assert isinstance(LAYOUT, KvLayout)
    with open_site(redis.url, ssd=tmp_path, replicate="both") as site:
        for session in sessions:
            assert site.pause(session)["tiers"] == ["ssd", "redis"]
    stored = dump(client)
    assert len(stored) == 3 * (2 + CHUNKS)
    with open_site(redis.url, ssd=tmp_path, replicate="both", namespace=OTHERS[what]) as site:
        site.look()
        assert {s.state for s in site.service.registry} == {State.STALE}  # those of the disk
        for session in sessions:
            session.namespace = OTHERS[what]
            answer = site.resumes(session, tokens=0)
            assert (answer["restored_from"], answer["bytes_read"]) == ("nowhere", 0)
        site.forget(sessions[0])
        assert site.pause(sessions[1])["chunks_kept"] == 0
        site.resumes(sessions[1])
        site.forget(sessions[1])
        assert {name.split("/")[1] for name in files(tmp_path)} == {NAMESPACE}  # the third one's
        site.look()
        assert not site.knows(sessions[1])
    assert dump(client) == stored
    with open_site(redis.url) as site:
        site.look()
        assert len(site.service.registry) == 3
        for session in sessions:
            session.namespace = NAMESPACE
            site.resumes(session, origin="redis")
            assert raw_keys(client, session) == [*chunk_names(CHUNKS), "manifest"]
        assert site.redis.check() == []


def test_weights_change_while_the_server_runs(redis: ValkeyServer) -> None:
    session = session_of(CHUNKS, "chat")
    with open_site(redis.url) as site:
        site.pause(session)
        site.resumes(session)
        site.service.change_namespace(OTHERS["weight version"])
        assert site.memory.leading(session.page_keys) == 0
        assert site.resume(session)["restored_tokens"] == 0
        site.look()
        assert site.find(session).state is State.STALE
        site.service.change_namespace(NAMESPACE)
        site.resumes(session, origin="redis")

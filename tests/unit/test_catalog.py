"""Finding the sessions of earlier runs, and sweeping what belongs to none."""

from __future__ import annotations

import os
from pathlib import Path

import msgpack
import pytest

from sgl_krul.errors import Corrupt, StoreUnavailable
from sgl_krul.session.catalog import (
    Catalog,
    delete_everywhere,
    delete_quietly,
    delete_session,
    find_sessions,
    read_manifest,
    sweep_session,
)
from sgl_krul.session.record import chunk_key, manifest_key
from sgl_krul.session.registry import State
from sgl_krul.store.ssd import SsdTier
from sgl_krul.store.tier import Tier
from tests.sessions import NAMESPACE, NOW, OTHER_NAMESPACE, FaultyTier, chat, files

TTL_S = 1000.0


def find(tier: Tier, now: float = NOW) -> Catalog:
    return find_sessions(tier, NAMESPACE, now=now, stale_ttl_s=TTL_S)


def test_an_empty_store_has_no_sessions(ssd: SsdTier) -> None:
    assert find(ssd) == Catalog()


def test_paused_sessions_are_found(ssd: SsdTier) -> None:
    for index in range(3):
        chat(100 + index, f"s{index}", first=1000 * index).write(ssd, now=NOW + index)
    catalog = find(ssd)
    found = sorted(catalog.sessions, key=lambda session: session.session_id)
    assert [session.session_id for session in found] == ["s0", "s1", "s2"]
    assert (catalog.corrupt, catalog.expired, catalog.orphans) == (0, 0, 0)
    first = found[0]
    assert first.state is State.PAUSED
    assert first.digest == chat(0, "s0").digest
    assert first.last_used == NOW
    assert first.paused is not None
    assert (first.paused.tiers, first.paused.tokens, first.paused.stored_tokens) == (("ssd",), 100, 96)


def test_other_objects_of_the_store_are_left_alone(ssd: SsdTier, store: Path) -> None:
    ssd.put("v2/of/the/future", b"h", [b"body"])
    ssd.put(f"v1/{NAMESPACE}/odd", b"h", [b"body"])
    ssd.put(f"v1/{NAMESPACE}/much/deeper/manifest", b"h", [b"body"])
    before = files(store)
    assert find(ssd) == Catalog()
    assert files(store) == before


def test_chunks_that_no_manifest_names_are_swept(ssd: SsdTier, store: Path) -> None:
    session, crashed, elsewhere = chat(100), chat(50, "crashed"), chat(50, "elsewhere")
    session.write(ssd)
    before = files(store)
    ssd.put(chunk_key(NAMESPACE, session.digest, 2, 0), b"h", [b"half a pause"])
    ssd.put(chunk_key(NAMESPACE, crashed.digest, 1, 0), b"h", [b"first pause"])
    ssd.put(chunk_key(NAMESPACE, crashed.digest, 1, 1), b"h", [b"first pause"])
    ssd.put(chunk_key(OTHER_NAMESPACE, elsewhere.digest, 1, 0), b"h", [b"first pause"])
    catalog = find(ssd)
    assert catalog.orphans == 4
    assert files(store) == before
    assert find(ssd).orphans == 0


def test_stale_sessions_are_listed_then_expire(ssd: SsdTier, store: Path) -> None:
    stale = chat(100)
    stale.namespace = OTHER_NAMESPACE
    stale.write(ssd)
    (session,) = find(ssd, NOW + TTL_S).sessions
    assert session.state is State.STALE
    assert session.paused is not None
    assert session.paused.namespace == OTHER_NAMESPACE
    catalog = find(ssd, NOW + TTL_S + 1)
    assert (catalog.sessions, catalog.expired) == ([], 1)
    assert files(store) == {}


def test_own_sessions_never_expire(ssd: SsdTier) -> None:
    chat(100).write(ssd)
    assert len(find(ssd, NOW + 1e9).sessions) == 1


def test_the_own_copy_of_a_session_comes_before_stale_ones(ssd: SsdTier) -> None:
    for namespace in (OTHER_NAMESPACE, NAMESPACE, "0" * 32):
        session = chat(100)
        session.namespace = namespace
        session.write(ssd)
    states = [session.state for session in find(ssd).sessions]
    assert states == [State.PAUSED, State.STALE, State.STALE]


@pytest.mark.parametrize("length", [0, 4, 20, 100, 4095, 4200])
def test_a_manifest_cut_off_is_deleted_with_its_chunks(ssd: SsdTier, store: Path, length: int) -> None:
    session = chat(3000)
    session.write(ssd)
    os.truncate(store / manifest_key(NAMESPACE, session.digest), length)
    catalog = find(ssd)
    assert (catalog.sessions, catalog.corrupt) == ([], 1)
    assert files(store) == {}


def test_a_manifest_with_a_flipped_bit_is_deleted_with_its_chunks(ssd: SsdTier, store: Path) -> None:
    session, other = chat(100), chat(100, "other")
    session.write(ssd)
    other.write(ssd)
    path = store / manifest_key(NAMESPACE, session.digest)
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    catalog = find(ssd)
    assert [found.session_id for found in catalog.sessions] == ["other"]
    assert catalog.corrupt == 1
    assert {name.split("/")[2] for name in files(store)} == {other.digest}


def test_a_manifest_that_never_was_one_is_deleted(ssd: SsdTier, store: Path) -> None:
    ssd.put(manifest_key(NAMESPACE, chat(0).digest), b"well sealed nonsense", [])
    assert find(ssd).corrupt == 1
    ssd.put(manifest_key(NAMESPACE, chat(0).digest), msgpack.packb({"version": 1}), [])
    assert find(ssd).corrupt == 1
    assert files(store) == {}


def rewrite_manifest(tier: Tier, key: str, **changes: object) -> None:
    header = tier.read_header(key)
    assert header is not None
    tier.put(key, msgpack.packb({**msgpack.unpackb(header), **changes}), [])


@pytest.mark.parametrize("namespace", [NAMESPACE, OTHER_NAMESPACE])
def test_a_newer_versions_session_is_left_alone(ssd: SsdTier, store: Path, namespace: str) -> None:
    session = chat(100)
    session.namespace = namespace
    session.write(ssd)
    rewrite_manifest(ssd, manifest_key(namespace, session.digest), version=2, new_field=1)
    before = files(store)
    catalog = find(ssd, NOW + 1e9)
    assert (catalog.sessions, catalog.corrupt, catalog.orphans) == ([], 1, 0)
    assert files(store) == before


def test_a_newer_object_file_is_left_alone(ssd: SsdTier, store: Path) -> None:
    session = chat(100)
    session.write(ssd)
    path = store / manifest_key(NAMESPACE, session.digest)
    good = path.read_bytes()
    path.write_bytes(good[:8] + b"\2" + good[9:])
    before = files(store)
    assert find(ssd).corrupt == 1
    assert files(store) == before
    assert session.write(ssd).chunks_kept == 0  # the chat goes on here: its newest state is this one


def test_a_manifest_of_another_session_is_left_alone_and_not_listed(ssd: SsdTier, store: Path) -> None:
    session, other = chat(100), chat(100, "other")
    session.write(ssd)
    other.write(ssd)
    header = ssd.read_header(manifest_key(NAMESPACE, other.digest))
    assert header is not None
    ssd.put(manifest_key(NAMESPACE, session.digest), header, [])
    before = files(store)
    catalog = find(ssd)
    assert [found.session_id for found in catalog.sessions] == ["other"]
    assert catalog.corrupt == 1
    assert files(store) == before
    with pytest.raises(Corrupt, match="identity: manifest belongs to"):
        read_manifest(ssd, NAMESPACE, session.digest)


def test_a_store_that_can_not_be_read_or_deleted_in_hides_sessions_but_does_not_fail(
    ssd: SsdTier, store: Path
) -> None:
    chat(100).write(ssd)
    ssd.put(chunk_key(NAMESPACE, chat(0, "crashed").digest, 1, 0), b"h", [b"first pause"])
    stale = chat(100, "stale")
    stale.namespace = OTHER_NAMESPACE
    stale.write(ssd)
    before = files(store)

    def fault(when: str, operation: str, key: str) -> None:
        if when == "before" and operation in refused:
            raise StoreUnavailable(f"{key}: Input/output error (EIO)")

    refused = {"delete"}
    catalog = find(FaultyTier(ssd, fault), NOW + 1e9)
    assert [session.session_id for session in catalog.sessions] == ["chat"]
    refused = {"read_header", "delete"}
    catalog = find(FaultyTier(ssd, fault))
    assert (catalog.sessions, catalog.corrupt) == ([], 2)
    assert files(store) == before
    with pytest.raises(StoreUnavailable):
        delete_session(FaultyTier(ssd, fault), NAMESPACE, chat(0).digest)


def test_sweep_keeps_what_the_manifest_names(ssd: SsdTier, store: Path) -> None:
    session = chat(200)
    report = session.write(ssd)
    before = files(store)
    assert sweep_session(ssd, report.manifest) == 0
    ssd.put(chunk_key(NAMESPACE, session.digest, 7, 0), b"h", [b"orphan"])
    assert sweep_session(ssd, report.manifest) == 1
    assert files(store) == before


def test_delete_removes_one_session_and_says_how_much(ssd: SsdTier, store: Path) -> None:
    session, other = chat(200), chat(100, "other")
    other.write(ssd)
    before, used = files(store), ssd.usage()
    session.write(ssd)
    more = ssd.usage()
    assert delete_session(ssd, NAMESPACE, session.digest) == (
        more.objects - used.objects,
        more.bytes - used.bytes,
    )
    assert files(store) == before
    assert delete_session(ssd, NAMESPACE, session.digest) == (0, 0)


def test_delete_takes_the_manifest_first(ssd: SsdTier) -> None:
    session = chat(200)
    session.write(ssd)
    deleted: list[str] = []

    def fault(when: str, operation: str, key: str) -> None:
        if (when, operation) == ("before", "delete"):
            deleted.append(key)

    delete_session(FaultyTier(ssd, fault), NAMESPACE, session.digest)
    assert deleted[0] == manifest_key(NAMESPACE, session.digest)


def test_delete_everywhere_finds_every_namespace(ssd: SsdTier, store: Path) -> None:
    other = chat(100, "other")
    other.write(ssd)
    before = files(store)
    for namespace in (NAMESPACE, OTHER_NAMESPACE):
        session = chat(100)
        session.namespace = namespace
        session.write(ssd)
    ssd.put(chunk_key("0" * 32, session.digest, 1, 0), b"h", [b"orphan"])
    assert delete_everywhere(ssd, session.digest)[0] == 2 * 3 + 1
    assert files(store) == before
    assert delete_everywhere(ssd, session.digest) == (0, 0)


def test_delete_quietly(ssd: SsdTier) -> None:
    def fault(when: str, operation: str, key: str) -> None:
        raise StoreUnavailable("no disk")

    ssd.put("a/b", b"h", [])
    assert delete_quietly(FaultyTier(ssd, fault), "a/b") is False
    assert delete_quietly(ssd, "a/b") is True
    assert delete_quietly(ssd, "a/b") is False

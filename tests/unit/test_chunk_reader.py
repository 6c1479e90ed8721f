"""Copies of a chunk: the first intact one is read, bad ones are dropped, a dead tier is left alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from sgl_krul.codec.base import Mode
from sgl_krul.codec.frame import ChunkHeader, build_segments, decode_header, encode_header
from sgl_krul.errors import Corrupt, Missing, StoreUnavailable
from sgl_krul.restore.chunk_reader import (
    ChunkCopies,
    ChunkReader,
    Reach,
    keys_of,
    names_in,
    read_chunk_header,
    why_lost,
)
from sgl_krul.session.record import ChunkRef, Manifest
from sgl_krul.store.ssd import SsdTier
from sgl_krul.store.tier import Tier
from tests.faults import Backing, Call, FakeSharedTier, FaultInjectingTier, Kind, Script
from tests.sessions import LAYOUT, NAMESPACE, OTHER_NAMESPACE, chat, true_kv

COUNT = 150  # chunks of 4, 4 and 1 pages


class Clock:
    """Seconds, as a test sets them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def shared() -> Iterator[FakeSharedTier]:
    """A second tier with the same session."""
    tier = FakeSharedTier(Backing())
    yield tier
    assert tier.check() == []


@pytest.fixture
def manifest(ssd: SsdTier, shared: FakeSharedTier) -> Manifest:
    """A session in both tiers."""
    session = chat(COUNT)
    session.write(shared)
    return session.write(ssd).manifest


def copies_of(ref: ChunkRef, *tiers: Tier, reach: Reach | None = None) -> ChunkCopies:
    return ChunkReader(tiers, LAYOUT, NAMESPACE, reach=reach).copies(ref, {})


def test_the_first_tier_serves(ssd: SsdTier, shared: FakeSharedTier, manifest: Manifest) -> None:
    copies = copies_of(manifest.chunks[1], ssd, shared)
    copy = copies.open()
    assert copy is not None
    assert copy is copies.open()
    assert (copy.tier, copy.ref.key, copy.header.tokens) == (ssd, manifest.chunks[1].key, 64)
    assert copies.damaged == 0


def test_then_the_next_and_then_none(ssd: SsdTier, shared: FakeSharedTier, manifest: Manifest) -> None:
    ref = manifest.chunks[0]
    ssd.delete(ref.key)
    copies = copies_of(ref, ssd, shared)
    copy = copies.open()
    assert copy is not None
    assert copy.tier is shared
    copies.failed(copy, Corrupt("checksum", "a segment"))
    assert copies.open() is None
    assert shared.read_header(ref.key) is None  # it could never be read again
    assert str(copies.error) == "checksum: a segment"
    assert copies.damaged == 1
    assert why_lost(copies.error) == ("corrupt", "corrupt chunk (checksum: a segment)")


@pytest.mark.parametrize("reason", ["version", "identity"])
def test_what_may_be_somebodys_stays(ssd: SsdTier, manifest: Manifest, reason: str) -> None:
    copies = copies_of(manifest.chunks[0], ssd)
    copy = copies.open()
    assert copy is not None
    copies.failed(copy, Corrupt(reason))  # type: ignore[arg-type]
    assert copies.open() is None
    assert ssd.read_header(manifest.chunks[0].key) is not None


def test_a_copy_fails_once(ssd: SsdTier, shared: FakeSharedTier, manifest: Manifest) -> None:
    """Loaders that read the same copy find out one after another: the next tier's stays."""
    copies = copies_of(manifest.chunks[0], ssd, shared)
    old = copies.open()
    assert old is not None
    copies.failed(old, Missing("gone"))
    new = copies.open()
    copies.failed(old, Missing("gone"))
    assert copies.open() is new is not None


def test_keys_differ_from_tier_to_tier(ssd: SsdTier, shared: FakeSharedTier) -> None:
    session = chat(COUNT)
    here = session.write(ssd).manifest
    there = session.write(shared).manifest
    moved = there.chunks[0].key.replace("g00000001", "g00000007")
    header, body = shared.read_header(there.chunks[0].key), bytearray(4 * LAYOUT.page_bytes)
    shared.read_segments(there.chunks[0].key, 0, [memoryview(body)])
    shared.put(moved, header or b"", [body])
    shared.delete(there.chunks[0].key)
    ref = msgspec.structs.replace(there.chunks[0], key=moved)
    names = names_in({"redis": msgspec.structs.replace(there, chunks=(ref, *there.chunks[1:])), "ssd": here})
    assert keys_of(here.chunks[0], names) == {"redis": moved, "ssd": here.chunks[0].key}
    assert keys_of(msgspec.structs.replace(here.chunks[0], pages=3), names) == {}
    ssd.delete(here.chunks[0].key)
    copies = ChunkReader([ssd, shared], LAYOUT, NAMESPACE).copies(here.chunks[0], keys_of(ref, names))
    copy = copies.open()
    assert copy is not None
    assert copy.ref.key == moved


def test_what_is_said_of_a_lost_chunk(ssd: SsdTier, shared: FakeSharedTier, manifest: Manifest) -> None:
    ref = manifest.chunks[0]
    ssd.delete(ref.key)
    shared.down = True
    copies = copies_of(ref, ssd, shared)
    assert copies.open() is None
    assert why_lost(copies.error) == ("unavailable", "store unavailable (redis: out of reach)")
    copies = copies_of(ref, ssd)
    assert copies.open() is None
    assert why_lost(copies.error) == ("missing", "missing chunk")
    assert why_lost(copies_of(ref).error)[0] == "missing"


def test_the_header_is_read_once(ssd: SsdTier, manifest: Manifest) -> None:
    go = threading.Event()
    tier = FaultInjectingTier(ssd, lambda call: Kind.DELAY, sleep=lambda _: go.wait(5) and None)  # type: ignore[func-returns-value]
    copies = copies_of(manifest.chunks[0], tier)
    with ThreadPoolExecutor(6) as pool:
        opened = [pool.submit(copies.open) for _ in range(6)]
        go.set()
        assert len({id(one.result(5)) for one in opened}) == 1
    assert tier.count("read_header") == 1


# -- headers --


def stored_without(tier: Tier, ref: ChunkRef, depth: int, hashes: tuple[str, ...]) -> None:
    """The chunk again, without its first layers."""
    body = [[true_kv(h, layer) for h in hashes] for layer in range(LAYOUT.layers)]
    old = decode_header(tier.read_header(ref.key) or b"")
    segments = build_segments(body, Mode.raw, depth=depth)
    header = ChunkHeader(NAMESPACE, old.last_page_hash, old.token_digest, old.tokens, "paper", segments)
    tier.put(ref.key, encode_header(header), [page for layer in body[depth:] for page in layer])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_layers_that_are_not_stored(ssd: SsdTier, manifest: Manifest, depth: int) -> None:
    ref = manifest.chunks[0]
    stored_without(ssd, ref, depth, chat(COUNT).hashes[:4])
    both = frozenset({Mode.raw, Mode.recompute})
    with pytest.raises(Corrupt, match=f"identity: {depth} layers are not stored, expected 0"):
        read_chunk_header(ssd, ref, LAYOUT, NAMESPACE, both)
    for promised in range(depth, LAYOUT.layers + 1):
        ref = msgspec.structs.replace(ref, depth=promised)
        assert read_chunk_header(ssd, ref, LAYOUT, NAMESPACE, both).depth == depth
    with pytest.raises(Corrupt, match="segment of 0 bytes in mode recompute"):
        read_chunk_header(ssd, ref, LAYOUT, NAMESPACE, frozenset({Mode.raw}))


@pytest.mark.parametrize(
    "change", [{"last_page_hash": "0" * 64}, {"token_digest": "0" * 64}, {"tokens": 48}, {"pages": 3}]
)
def test_a_header_that_was_not_promised(ssd: SsdTier, manifest: Manifest, change: dict[str, object]) -> None:
    ref = msgspec.structs.replace(manifest.chunks[0], **change)
    with pytest.raises(Corrupt, match="identity"):
        read_chunk_header(ssd, ref, LAYOUT, NAMESPACE, frozenset({Mode.raw}))
    with pytest.raises(Corrupt, match="identity: namespace"):
        read_chunk_header(ssd, manifest.chunks[0], LAYOUT, OTHER_NAMESPACE, frozenset({Mode.raw}))


def test_a_damaged_file(ssd: SsdTier, store: Path, manifest: Manifest) -> None:
    path = store / manifest.chunks[0].key
    path.write_bytes(path.read_bytes()[:-1])
    copies = copies_of(manifest.chunks[0], ssd)
    assert copies.open() is None
    assert not path.exists()


# -- tiers that are out of reach --


def test_a_dead_tier_is_asked_three_times(ssd: SsdTier, manifest: Manifest) -> None:
    dead = FaultInjectingTier(ssd, lambda call: Kind.BEFORE)
    reader = ChunkReader([dead], LAYOUT, NAMESPACE, reach=Reach(), clock=Clock())
    errors = []
    for _ in range(5):
        copies = reader.copies(manifest.chunks[0], {})
        assert copies.open() is None
        errors.append(copies.error)
    assert dead.count("read_header") == 3
    assert all(isinstance(error, StoreUnavailable) for error in errors)
    assert "not asked again" in str(errors[-1])


def test_a_time_out_is_waited_for_once(ssd: SsdTier, shared: FakeSharedTier, manifest: Manifest) -> None:
    clock = Clock()

    def slow(call: Call) -> Kind:
        clock.now += 1.0
        return Kind.BEFORE

    dead = FaultInjectingTier(ssd, slow)
    reader = ChunkReader([dead, shared], LAYOUT, NAMESPACE, reach=Reach(), clock=clock)
    for ref in manifest.chunks:
        copy = reader.copies(ref, {}).open()
        assert copy is not None
        assert copy.tier is shared
    assert dead.count("read_header") == 1


def test_one_bad_sector_is_no_dead_disk(ssd: SsdTier, manifest: Manifest) -> None:
    suffixes = [ref.key.split("/")[-1] for ref in manifest.chunks]
    bad = FaultInjectingTier(ssd, Script({("read_header", suffixes[0]): Kind.BEFORE}))
    reader = ChunkReader([bad], LAYOUT, NAMESPACE, reach=Reach(), clock=Clock())
    for _ in range(4):
        assert reader.copies(manifest.chunks[0], {}).open() is None
        assert reader.copies(manifest.chunks[1], {}).open() is not None
    assert bad.count("read_header", suffixes[0]) == 4


def test_a_tier_that_was_given_up_stays_so() -> None:
    reach = Reach()
    reach.failed("ssd", 0.1)
    reach.answered("ssd")
    reach.failed("ssd", 0.1)
    assert not reach.lost("ssd")
    reach.failed("ssd", 0.1)
    assert reach.lost("ssd")
    reach.answered("ssd")
    assert reach.lost("ssd")
    assert not reach.lost("redis")


def test_a_bug_is_not_a_bad_copy(ssd: SsdTier, manifest: Manifest) -> None:
    def bug(call: Call) -> Kind:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        copies_of(manifest.chunks[0], FaultInjectingTier(ssd, bug)).open()

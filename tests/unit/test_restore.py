"""Bringing a session to memory: all of it, or, of a damaged one, what comes before the damage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import msgspec
import pytest

from sgl_krul.codec.base import Mode
from sgl_krul.codec.frame import ChunkHeader, build_segments, decode_header, encode_header
from sgl_krul.errors import StoreUnavailable
from sgl_krul.restore.pipeline import Restorer, RestoreReport
from sgl_krul.session.catalog import delete_session
from sgl_krul.session.record import Manifest
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.ssd import SsdTier
from sgl_krul.store.tier import Tier
from sgl_krul.store.workers import Workers
from tests.sessions import (
    CHUNK_TOKENS,
    LAYOUT,
    NAMESPACE,
    OTHER_NAMESPACE,
    PAGE,
    Chat,
    FaultyTier,
    chat,
    files,
    true_kv,
    wrong_pages,
)

COUNT = 150  # 9 full pages: chunks of 4, 4 and 1
BODY = 4096  # where the body of a chunk's file begins
CHUNK_BYTES = 4 * LAYOUT.page_bytes


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Two loaders."""
    workers = Workers("test", 2)
    yield workers
    workers.close()
    assert workers.pending == 0


@dataclass
class Bench:
    """A stored session and what it takes to restore it."""

    tier: SsdTier
    root: Path
    memory: MemoryTier
    workers: Workers
    session: Chat
    manifest: Manifest

    def path(self, chunk: int) -> Path:
        """The file of a chunk."""
        return self.root / self.manifest.chunks[chunk].key

    def edit(self, chunk: int, position: int, value: int | None = None) -> None:
        """Flip all bits of one byte of a chunk's file, or set it."""
        data = bytearray(self.path(chunk).read_bytes())
        data[position] = data[position] ^ 0xFF if value is None else value
        self.path(chunk).write_bytes(data)

    def restore(
        self,
        tier: Tier | None = None,
        memory: MemoryTier | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        cancelled: Event | None = None,
        ahead: int = 2,
    ) -> RestoreReport:
        """Restore the session with a deadline of 10 s."""
        restorer = Restorer(
            [self.tier if tier is None else tier],
            self.memory if memory is None else memory,
            LAYOUT,
            self.workers,
            ahead=ahead,
        )
        return restorer.run(self.manifest, deadline=10.0, clock=clock, cancelled=cancelled or Event())

    def expect(self, report: RestoreReport, tokens: int, cut: str = "") -> None:
        """Exactly the first `tokens` are there and true, and nothing stays pinned."""
        assert report.tokens == tokens
        assert cut in report.cut
        assert bool(cut) == bool(report.cut)
        assert sum(len(pinned.keys) for pinned in report.pins) == tokens // PAGE
        assert self.memory.leading(self.session.page_keys) == tokens // PAGE
        report.release()
        assert wrong_pages(self.memory) == []


@pytest.fixture
def bench(ssd: SsdTier, store: Path, memory: MemoryTier, workers: Workers) -> Iterator[Bench]:
    session = chat(COUNT)
    bench = Bench(ssd, store, memory, workers, session, session.write(ssd).manifest)
    yield bench
    delete_session(ssd, NAMESPACE, session.digest)  # what a test damaged by hand


# -- sound sessions --


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_a_session_comes_back(bench: Bench, ahead: int) -> None:
    report = bench.restore(ahead=ahead)
    assert report.bytes_read == 9 * LAYOUT.page_bytes
    assert report.from_memory_tokens == report.corrupt_chunks == report.missing_chunks == 0
    for pinned in report.pins:
        for key, slot in zip(pinned.keys, pinned.slots, strict=True):
            for layer in range(LAYOUT.layers):
                assert bench.memory.layer(layer)[slot].tobytes() == true_kv(key.split("/")[1], layer)
    bench.expect(report, 144)


def test_a_second_restore_reads_nothing(bench: Bench) -> None:
    bench.restore().release()
    report = bench.restore()
    assert (report.bytes_read, report.from_memory_tokens) == (0, 144)
    bench.expect(report, 144)


@pytest.mark.parametrize("present", [[0], [3], [1, 2], [0, 2], [0, 1, 2], [5], [0, 4, 8], [8], range(9)])
def test_pages_that_are_there_are_kept(bench: Bench, present: list[int]) -> None:
    for index in present:
        page_hash = bench.session.hashes[index]
        bench.memory.put(
            bench.session.page_keys[index],
            b"",
            [true_kv(page_hash, layer) for layer in range(LAYOUT.layers)],
        )
    pinned = bench.memory.pin([bench.session.page_keys[index] for index in present])
    assert pinned is not None
    report = bench.restore()
    with pinned:
        slots = bench.memory.pin(pinned.keys)
        assert slots is not None
        assert slots.slots.tolist() == pinned.slots.tolist()
        slots.release()
    whole = [chunk for chunk in range(3) if set(range(9)[4 * chunk : 4 * chunk + 4]) <= set(present)]
    assert report.from_memory_tokens == sum(bench.manifest.chunks[chunk].tokens for chunk in whole)
    bench.expect(report, 144)


def test_the_last_pages_are_evicted_first(bench: Bench) -> None:
    bench.restore().release()
    for index in range(bench.memory.slots - 9 + 2):
        bench.memory.put(f"new/{index}", b"", [bytes(LAYOUT.page_segment_bytes)] * LAYOUT.layers)
    assert bench.memory.leading(bench.session.page_keys) == 7
    bench.memory.clear()


def test_an_empty_session_restores_nothing(bench: Bench) -> None:
    bench.manifest = chat(3, "short").write(bench.tier).manifest
    report = bench.restore()
    assert (report.tokens, report.cut, report.pins) == (0, "", [])


def test_restored_pages_stay_while_they_are_held(bench: Bench) -> None:
    report = bench.restore()
    for index in range(2 * bench.memory.slots):
        bench.memory.put(f"new/{index}", b"", [bytes(LAYOUT.page_segment_bytes)] * LAYOUT.layers)
    assert bench.memory.leading(bench.session.page_keys) == 9
    bench.memory.clear()
    report.release()
    report.release()


# -- damage --


@pytest.mark.parametrize("chunk", [0, 1, 2])
@pytest.mark.parametrize("length", [0, 1, 31, 4095, 4096, BODY + 100, -1, "longer"])
def test_a_chunk_of_another_length(bench: Bench, chunk: int, length: int | str) -> None:
    data = bench.path(chunk).read_bytes()
    bench.path(chunk).write_bytes(data + b"\0" if isinstance(length, str) else data[:length])
    report = bench.restore()
    assert (report.corrupt_chunks, report.missing_chunks) == (1, 0)
    bench.expect(report, chunk * CHUNK_TOKENS, "corrupt chunk (length")
    assert not bench.path(chunk).exists()  # it can never be read again
    report = bench.restore()
    assert (report.corrupt_chunks, report.missing_chunks) == (0, 1)
    bench.expect(report, chunk * CHUNK_TOKENS, "missing chunk")


def positions() -> list[int]:
    """One byte of every kind: the head's fields, the header, each segment's start, middle and end."""
    segment = CHUNK_BYTES // LAYOUT.layers
    head = [0, 7, 8, 12, 15, 16, 23, 24, 31, 32, 33, 40, 60, 100, 150]
    body = [BODY + layer * segment + n for layer in range(3) for n in (0, 1, segment // 2, segment - 1)]
    return head + body


@pytest.mark.parametrize("position", positions())
@pytest.mark.parametrize("chunk", [0, 1])
def test_one_changed_byte(bench: Bench, chunk: int, position: int) -> None:
    bench.edit(chunk, position)
    report = bench.restore()
    assert (report.corrupt_chunks, report.missing_chunks) == (1, 0)
    bench.expect(report, chunk * CHUNK_TOKENS, "corrupt chunk")
    assert bench.path(chunk).exists() == ("version" in report.cut)


def test_one_changed_bit_anywhere_in_the_body(bench: Bench) -> None:
    good = bench.path(1).read_bytes()
    for position in range(BODY, len(good), 997):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        bench.path(1).write_bytes(bad)
        report = bench.restore()
        bench.expect(report, CHUNK_TOKENS, "corrupt chunk (checksum")
        assert report.corrupt_chunks == 1


def test_a_byte_of_the_padding_does_not_matter(bench: Bench) -> None:
    bench.edit(1, BODY - 1)
    bench.expect(bench.restore(), 144)


@pytest.mark.parametrize(("a", "b"), [(0, 1), (1, 2), (0, 2)])
def test_two_chunks_swapped(bench: Bench, a: int, b: int) -> None:
    data = [bench.path(chunk).read_bytes() for chunk in (a, b)]
    bench.path(b).write_bytes(data[0])
    bench.path(a).write_bytes(data[1])
    report = bench.restore()
    assert report.corrupt_chunks >= 1
    bench.expect(report, a * CHUNK_TOKENS, "corrupt chunk (identity")
    assert bench.path(a).exists()  # it may be somebody's


def test_a_missing_chunk(bench: Bench) -> None:
    bench.path(1).unlink()
    report = bench.restore()
    assert (report.corrupt_chunks, report.missing_chunks) == (0, 1)
    bench.expect(report, 64, "missing chunk")


def test_pages_after_a_hole_are_no_prefix_until_it_is_filled(bench: Bench) -> None:
    bench.edit(0, BODY)
    bench.expect(bench.restore(ahead=5), 0, "corrupt chunk (checksum")
    for index in range(4):
        bench.memory.put(
            bench.session.page_keys[index],
            b"",
            [true_kv(bench.session.hashes[index], layer) for layer in range(LAYOUT.layers)],
        )
    assert bench.memory.leading(bench.session.page_keys) in (4, 8, 9)
    assert wrong_pages(bench.memory) == []


def test_another_chats_chunk_is_not_ours(bench: Bench) -> None:
    other = chat(COUNT, "other", first=1).write(bench.tier).manifest
    bench.path(1).write_bytes((bench.root / other.chunks[1].key).read_bytes())
    bench.expect(bench.restore(), 64, "identity: last_page_hash")


def test_another_namespaces_chunk_is_not_ours(bench: Bench) -> None:
    other = chat(COUNT)
    other.namespace = OTHER_NAMESPACE
    record = other.write(bench.tier).manifest
    bench.path(0).write_bytes((bench.root / record.chunks[0].key).read_bytes())
    bench.expect(bench.restore(), 0, "identity: namespace")


def rewrite(bench: Bench, chunk: int, change: Callable[[ChunkHeader, list[bytes]], ChunkHeader]) -> None:
    """Store a chunk anew, well sealed, with another header or body."""
    ref = bench.manifest.chunks[chunk]
    size = ref.pages * LAYOUT.page_segment_bytes
    layers = [bytearray(size) for _ in range(LAYOUT.layers)]
    bench.tier.read_segments(ref.key, 0, [memoryview(layer) for layer in layers])
    body = [bytes(layer) for layer in layers]
    header = change(decode_header(bench.tier.read_header(ref.key) or b""), body)
    bench.tier.put(ref.key, encode_header(header), body)


def with_segments(header: ChunkHeader, body: list[bytes], mode: Mode = Mode.raw) -> ChunkHeader:
    segments = build_segments([[segment] for segment in body], mode)
    return ChunkHeader(
        header.namespace, header.last_page_hash, header.token_digest, header.tokens, header.plan_id, segments
    )


def test_a_chunk_of_another_shape_is_not_ours(bench: Bench) -> None:
    def fewer_layers(header: ChunkHeader, body: list[bytes]) -> ChunkHeader:
        del body[-1]
        return with_segments(header, body)

    def longer_layer(header: ChunkHeader, body: list[bytes]) -> ChunkHeader:
        body[1] += b"\0"
        return with_segments(header, body)

    def other_mode(header: ChunkHeader, body: list[bytes]) -> ChunkHeader:
        return with_segments(header, body, Mode.quantized)

    for change, said in (
        (fewer_layers, "2 segments"),
        (longer_layer, "bytes in mode raw"),
        (other_mode, "mode quantized"),
    ):
        bench.manifest = bench.session.write(bench.tier).manifest
        rewrite(bench, 1, change)
        bench.expect(bench.restore(), 64, said)
        bench.memory.clear()
        bench.path(1).unlink()


def test_a_chunk_of_the_future_is_left_where_it_is(bench: Bench) -> None:
    bench.edit(1, 8, 2)  # the object's version
    report = bench.restore()
    assert report.corrupt_chunks == 1
    bench.expect(report, 64, "corrupt chunk (version")
    assert bench.path(1).exists()


# -- limits --


def test_a_memory_too_small_gets_the_first_chunks(bench: Bench) -> None:
    bench.memory = MemoryTier(LAYOUT.layers, LAYOUT.page_segment_bytes, 6 * LAYOUT.page_bytes)
    bench.expect(bench.restore(ahead=1), 64, "memory tier full")


def test_a_memory_in_use_gets_nothing(bench: Bench) -> None:
    bench.memory = MemoryTier(LAYOUT.layers, LAYOUT.page_segment_bytes, 6 * LAYOUT.page_bytes)
    held = bench.memory.reserve([f"held/{index}" for index in range(3)])
    assert held is not None
    bench.expect(bench.restore(), 0, "memory tier full")
    bench.memory.abandon(held)
    bench.expect(bench.restore(ahead=1), 64, "memory tier full")


def test_after_the_deadline_nothing_is_begun(bench: Bench) -> None:
    bench.expect(bench.restore(clock=lambda: 10.1), 0, "deadline")
    times = iter([0.0, 9.0, 11.0])
    bench.expect(bench.restore(clock=lambda: next(times), ahead=1), 128, "deadline")


def test_a_cancelled_restore_keeps_what_it_has(bench: Bench) -> None:
    cancelled = Event()
    cancelled.set()
    bench.expect(bench.restore(cancelled=cancelled), 0, "cancelled")
    cancelled.clear()

    def cancel(when: str, operation: str, key: str) -> None:
        if (when, operation) == ("after", "read_segments"):
            cancelled.set()

    report = bench.restore(FaultyTier(bench.tier, cancel), cancelled=cancelled, ahead=1)
    bench.expect(report, 64, "cancelled")


# -- a store that fails --


def failing(bench: Bench, operation: str, chunk: int, error: Exception) -> FaultyTier:
    def fault(when: str, done: str, key: str) -> None:
        if (when, done, key) == ("before", operation, bench.manifest.chunks[chunk].key):
            raise error

    return FaultyTier(bench.tier, fault)


@pytest.mark.parametrize("operation", ["read_header", "read_segments"])
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_store_that_cannot_be_read(bench: Bench, operation: str, chunk: int) -> None:
    before = files(bench.root)
    report = bench.restore(failing(bench, operation, chunk, StoreUnavailable("EIO")))
    assert (report.corrupt_chunks, report.missing_chunks) == (0, 0)
    bench.expect(report, 64 * chunk, "store unavailable (EIO)")
    assert files(bench.root) == before


def test_a_damaged_chunk_that_cannot_be_deleted_stays_a_miss(bench: Bench) -> None:
    bench.edit(1, BODY)
    for _ in range(2):
        report = bench.restore(failing(bench, "delete", 1, StoreUnavailable("EROFS")))
        assert report.corrupt_chunks == 1
        bench.expect(report, 64, "checksum")


@pytest.mark.parametrize("chunk", [0, 1, 2])
@pytest.mark.parametrize("ahead", [1, 3])
def test_a_bug_leaves_nothing_pinned(bench: Bench, chunk: int, ahead: int) -> None:
    """It is raised; what was restored before and beside it is let go (the memory fixture looks)."""
    with pytest.raises(RuntimeError, match="a bug"):
        bench.restore(failing(bench, "read_segments", chunk, RuntimeError("a bug")), ahead=ahead)
    assert wrong_pages(bench.memory) == []


def test_a_flush_of_memory_in_the_middle_is_a_miss(bench: Bench) -> None:
    """Pages published after a clear() would be of the time before it."""

    def clear(when: str, operation: str, key: str) -> None:
        if (when, operation, key) == ("after", "read_segments", bench.manifest.chunks[1].key):
            bench.memory.clear()

    report = bench.restore(FaultyTier(bench.tier, clear), ahead=1)
    assert report.tokens == 64
    report.release()
    assert wrong_pages(bench.memory) == []


def test_a_manifest_that_lies_about_tokens_is_found_out(bench: Bench) -> None:
    """Same page hash, other token ids: the digest of its own tokens disagrees."""

    ref = msgspec.structs.replace(bench.manifest.chunks[1], token_digest="0" * 64)
    chunks = (bench.manifest.chunks[0], ref, bench.manifest.chunks[2])
    bench.manifest = msgspec.structs.replace(bench.manifest, chunks=chunks)
    bench.expect(bench.restore(), 64, "identity: token_digest")

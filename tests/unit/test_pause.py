"""Writing a session: what is planned, what is kept of the last pause, and what a failure leaves behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sgl_krul.codec.base import Mode
from sgl_krul.codec.frame import decode_header, token_digest
from sgl_krul.errors import Missing, StoreError, StoreFull, StoreUnavailable
from sgl_krul.pause.memory_only import keep_in_memory
from sgl_krul.pause.pipeline import plan_chunks, write_session
from sgl_krul.session.catalog import read_manifest
from sgl_krul.session.record import Manifest, chunk_key, manifest_key
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.ssd import SsdTier
from tests.sessions import (
    CHUNK_TOKENS,
    LAYOUT,
    NAMESPACE,
    NOW,
    OTHER_NAMESPACE,
    PAGE,
    Chat,
    FaultyTier,
    TruePages,
    chat,
    files,
    open_ssd,
    tokens,
    true_kv,
    wrong_pages,
)


def stored_kv(tier: SsdTier, record: Manifest) -> list[bytes]:
    """Every stored page, all layers, read back without the restore pipeline."""
    found = []
    for chunk in record.chunks:
        size = chunk.pages * LAYOUT.page_segment_bytes
        layers = [bytearray(size) for _ in range(LAYOUT.layers)]
        tier.read_segments(chunk.key, 0, [memoryview(layer) for layer in layers])
        for start in range(0, size, LAYOUT.page_segment_bytes):
            found.append(b"".join(layer[start : start + LAYOUT.page_segment_bytes] for layer in layers))
    return found


def true_pages(session: Chat) -> list[bytes]:
    return [b"".join(true_kv(h, layer) for layer in range(LAYOUT.layers)) for h in session.hashes]


# -- planning --


@pytest.mark.parametrize(
    ("count", "pages"),
    [(0, []), (15, []), (16, [1]), (17, [1]), (63, [3]), (64, [4]), (65, [4]), (150, [4, 4, 1])],
)
def test_full_pages_are_cut_into_chunks(count: int, pages: list[int]) -> None:
    plans = plan_chunks(chat(count).snapshot(), None, 4)
    assert [plan.pages for plan in plans] == pages
    assert [plan.first_page for plan in plans] == [4 * index for index in range(len(pages))]
    assert [plan.tokens for plan in plans] == [PAGE * n for n in pages]
    assert [plan.index for plan in plans] == list(range(len(pages)))
    assert all(plan.reuse is None for plan in plans)


def test_a_plan_depends_on_its_arguments_only(ssd: SsdTier) -> None:
    session = chat(150)
    previous = session.write(ssd).manifest
    plans = [plan_chunks(session.snapshot(), previous, 4) for _ in range(2)]
    assert plans[0] == plans[1]
    assert [plan.reuse for plan in plans[0]] == list(previous.chunks)


def test_a_longer_session_rewrites_the_short_last_chunk_only(ssd: SsdTier) -> None:
    previous = chat(150).write(ssd).manifest
    plans = plan_chunks(chat(300).snapshot(), previous, 4)
    assert [plan.reuse is not None for plan in plans] == [True, True, False, False, False]


def test_other_chunk_sizes_and_other_salts_reuse_nothing(ssd: SsdTier) -> None:
    session = chat(150)
    previous = session.write(ssd).manifest
    assert not any(plan.reuse for plan in plan_chunks(session.snapshot(), previous, 5))
    salted = Chat(session.key._replace(cache_salt="salt"), session.token_ids)
    assert not any(plan.reuse for plan in plan_chunks(salted.snapshot(), previous, 4))


# -- writing --


@pytest.mark.parametrize("count", [0, 1, 15, 16, 64, 100, 128, 1000])
def test_what_is_written_is_the_sessions_kv(ssd: SsdTier, count: int) -> None:
    session = chat(count)
    report = session.write(ssd)
    record = read_manifest(ssd, NAMESPACE, session.digest)
    assert record == report.manifest
    assert record is not None
    assert (record.tokens, record.stored_tokens) == (count, count // PAGE * PAGE)
    assert record.raw_bytes == count // PAGE * LAYOUT.page_bytes
    assert (record.generation, record.paused_at, record.exact) == (1, NOW, True)
    assert stored_kv(ssd, record) == true_pages(session)
    assert report.chunks_written == len(record.chunks)
    assert report.bytes_written == ssd.usage().bytes


def test_a_chunks_header_says_what_it_is(ssd: SsdTier) -> None:
    session = chat(100)
    record = session.write(ssd).manifest
    chunk = record.chunks[1]
    header = decode_header(ssd.read_header(chunk.key) or b"")
    assert header.namespace == NAMESPACE
    assert header.last_page_hash == chunk.last_page_hash == session.hashes[5]
    assert header.token_digest == chunk.token_digest == token_digest(tokens(32, first=64))
    assert (header.tokens, header.plan_id) == (32, "raw")
    assert [(entry.mode, entry.length) for entry in header.segments] == [
        (Mode.raw, 2 * LAYOUT.page_segment_bytes)
    ] * LAYOUT.layers


def test_a_second_pause_writes_what_is_new(ssd: SsdTier, store: Path) -> None:
    first = chat(150).write(ssd)
    session = chat(300)
    source = TruePages(session.hashes)
    second = session.write(ssd, source)
    assert (second.chunks_kept, second.chunks_written) == (2, 3)
    assert source.asked == [(8, 4), (12, 4), (16, 2)]
    assert second.manifest.chunks[:2] == first.manifest.chunks[:2]
    assert second.manifest.generation == 2
    assert stored_kv(ssd, second.manifest) == true_pages(session)
    assert chunk_key(NAMESPACE, session.digest, 1, 2) not in files(store)  # the old last chunk
    assert len(files(store)) == 6


def test_a_pause_of_the_same_state_writes_the_manifest_only(ssd: SsdTier) -> None:
    chat(150).write(ssd)
    source = TruePages(())
    report = chat(150).write(ssd, source, now=NOW + 5)
    assert (report.chunks_kept, report.chunks_written, source.asked) == (3, 0, [])
    assert report.manifest.paused_at == NOW + 5


def test_statistics_go_into_the_manifest_and_stay_there(ssd: SsdTier) -> None:
    """A server that estimates nothing does not lose what another one found."""
    session = chat(150)

    def pause(statistics: bytes) -> bytes:
        written = write_session(
            replace(session.snapshot(), statistics=statistics),
            TruePages(session.hashes),
            ssd,
            chunk_tokens=CHUNK_TOKENS,
            now=lambda: NOW,
        ).manifest
        assert read_manifest(ssd, NAMESPACE, session.digest) == written
        return written.statistics

    assert [pause(given) for given in (b"", b"first", b"", b"second", b"")] == [
        b"",
        b"first",
        b"first",
        b"second",
        b"second",
    ]


def test_a_diverged_session_is_rewritten_from_there(ssd: SsdTier, store: Path) -> None:
    chat(256).write(ssd)
    edited = Chat(chat(0).key, tokens(100) + tokens(150, first=5000))
    report = edited.write(ssd)
    assert (report.chunks_kept, report.chunks_written) == (1, 3)
    assert stored_kv(ssd, report.manifest) == true_pages(edited)
    assert len(files(store)) == 5


def test_a_shortened_session_drops_its_tail(ssd: SsdTier, store: Path) -> None:
    chat(256).write(ssd)
    report = chat(130).write(ssd)
    assert (report.chunks_kept, report.chunks_written) == (2, 0)
    assert len(files(store)) == 3


@pytest.mark.parametrize(("available", "stored"), [(0, 0), (3, 0), (4, 64), (7, 64), (8, 128), (9, 144)])
def test_pages_are_stored_up_to_the_first_that_is_gone(ssd: SsdTier, available: int, stored: int) -> None:
    session = chat(150)
    report = session.write(ssd, TruePages(session.hashes, available))
    assert (report.manifest.tokens, report.manifest.stored_tokens) == (150, stored)
    assert stored_kv(ssd, report.manifest) == true_pages(session)[: stored // PAGE]
    assert len(report.manifest.hashes) == 9


def test_chunks_kept_need_no_pages(ssd: SsdTier) -> None:
    chat(128).write(ssd)
    session = chat(300)
    report = session.write(ssd, TruePages(session.hashes, 0))
    assert report.manifest.stored_tokens == 128


def test_a_very_long_session_has_a_manifest_all_the_same(ssd: SsdTier) -> None:
    """Six bytes a token: past the megabyte that chunk headers would do with."""
    session = chat(200_000)
    session.write(ssd, TruePages(session.hashes, 0))
    record = read_manifest(ssd, NAMESPACE, session.digest)
    assert record is not None
    assert (record.tokens, record.stored_tokens, len(record.hashes)) == (200_000, 0, 12_500)


# -- chunks that are not what they were --


@pytest.mark.parametrize("damage", ["gone", "short", "another's"])
def test_a_damaged_chunk_is_not_kept(ssd: SsdTier, store: Path, damage: str) -> None:
    session = chat(150)
    record = session.write(ssd).manifest
    path = store / record.chunks[1].key
    if damage == "gone":
        path.unlink()
    elif damage == "short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.write_bytes((store / record.chunks[0].key).read_bytes())
    report = session.write(ssd)
    assert (report.chunks_kept, report.chunks_written) == (2, 1)
    assert stored_kv(ssd, report.manifest) == true_pages(session)


def test_after_a_damaged_manifest_everything_is_written_anew(ssd: SsdTier, store: Path) -> None:
    session = chat(150)
    session.write(ssd)
    path = store / manifest_key(NAMESPACE, session.digest)
    path.write_bytes(path.read_bytes()[:-1])
    report = session.write(ssd)
    assert (report.chunks_kept, report.chunks_written, report.manifest.generation) == (0, 3, 1)
    assert stored_kv(ssd, report.manifest) == true_pages(session)


# -- failures --


@pytest.mark.parametrize("error", [StoreFull("no room"), StoreUnavailable("no disk"), RuntimeError("a bug")])
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_put_that_fails_leaves_the_old_session(
    ssd: SsdTier, store: Path, error: Exception, nth: int
) -> None:
    """The old one is there, byte for byte, and no file more."""
    old, new = chat(150), Chat(chat(0).key, tokens(70) + tokens(150, first=9000))
    old.write(ssd)
    before = files(store)
    puts = 0

    def fault(when: str, operation: str, key: str) -> None:
        nonlocal puts
        if (when, operation) == ("before", "put"):
            puts += 1
            if puts == nth:
                raise error

    with pytest.raises(type(error)):
        new.write(FaultyTier(ssd, fault))
    assert files(store) == before
    record = read_manifest(ssd, NAMESPACE, old.digest)
    assert record is not None
    assert stored_kv(ssd, record) == true_pages(old)


def test_a_source_that_fails_leaves_the_old_session(ssd: SsdTier, store: Path) -> None:
    chat(64).write(ssd)
    before = files(store)
    session = chat(300)

    def fail(first_page: int) -> None:
        if first_page == 8:
            raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="the device is gone"):
        session.write(ssd, TruePages(session.hashes, on_read=fail))
    assert files(store) == before


def test_a_full_store_leaves_the_old_session(tmp_path: Path) -> None:
    with open_ssd(tmp_path, capacity_bytes=100_000) as tier:
        chat(128).write(tier)
        before = files(tmp_path)
        with pytest.raises(StoreFull, match="cap of 100000"):
            chat(1000).write(tier)
        assert files(tmp_path) == before
        assert tier.check() == []


def test_a_commit_that_is_in_place_is_not_taken_back(ssd: SsdTier) -> None:
    """The tier may raise after its rename, when the directory's fsync fails: the new session is the one."""
    chat(64).write(ssd)
    session = chat(300)

    def fault(when: str, operation: str, key: str) -> None:
        if (when, operation) == ("after", "put") and key.endswith("/manifest"):
            raise StoreUnavailable("fsync of the directory: EIO")

    with pytest.raises(StoreUnavailable):
        session.write(FaultyTier(ssd, fault))
    record = read_manifest(ssd, NAMESPACE, session.digest)
    assert record is not None
    assert record.generation == 2
    assert stored_kv(ssd, record) == true_pages(session)


def test_what_cannot_be_taken_back_is_swept_by_the_next_pause(ssd: SsdTier, store: Path) -> None:
    chat(64).write(ssd)
    session = chat(300)

    def fault(when: str, operation: str, key: str) -> None:
        if operation in ("delete", "read_header") and broken:
            raise StoreUnavailable("no disk")
        if when == "before" and operation == "put" and key.endswith("c000003"):
            broken.append(key)
            raise StoreFull("no room")

    broken: list[str] = []
    with pytest.raises(StoreFull):
        session.write(FaultyTier(ssd, fault))
    assert len(files(store)) == 4
    report = session.write(ssd)
    assert stored_kv(ssd, report.manifest) == true_pages(session)
    assert len(files(store)) == 1 + len(report.manifest.chunks)


def test_an_old_chunk_that_cannot_be_deleted_does_not_fail_the_pause(ssd: SsdTier, store: Path) -> None:
    chat(100).write(ssd)

    def fault(when: str, operation: str, key: str) -> None:
        if operation == "delete":
            raise StoreUnavailable("read-only")

    report = chat(120).write(FaultyTier(ssd, fault))
    assert report.manifest.stored_tokens == 112
    assert len(files(store)) == 4


@pytest.mark.parametrize("error", [StoreUnavailable("no disk"), Missing("gone")])
def test_a_store_that_cannot_be_read_fails_the_pause_before_it_writes(
    ssd: SsdTier, store: Path, error: StoreError
) -> None:
    chat(100).write(ssd)
    before = files(store)

    def fault(when: str, operation: str, key: str) -> None:
        if operation == "read_header":
            raise error

    with pytest.raises(type(error)):
        chat(200).write(FaultyTier(ssd, fault))
    assert files(store) == before


def test_the_manifest_is_written_last(ssd: SsdTier) -> None:
    steps: list[str] = []

    def note(when: str, operation: str, key: str) -> None:
        if when == "before" and operation in ("put", "delete"):
            steps.append(f"{operation} {key.rpartition('/')[2]}")

    chat(100).write(ssd)
    chat(150).write(FaultyTier(ssd, note))
    assert steps == [
        "put g00000002-c000001",
        "put g00000002-c000002",
        "put manifest",
        "delete g00000001-c000001",
    ]


def test_sessions_do_not_touch_each_other(ssd: SsdTier) -> None:
    """Same tokens, another id or namespace: no object is shared on disk."""
    one, two, three = chat(100), chat(100, "two"), chat(100)
    three.namespace = OTHER_NAMESPACE
    records = [session.write(ssd).manifest for session in (one, two, three)]
    keys = {chunk.key for record in records for chunk in record.chunks}
    assert len(keys) == 6
    one.token_ids = tokens(40)
    one.write(ssd)
    assert stored_kv(ssd, records[1]) == true_pages(two)


# -- without a slower tier --


def test_keep_in_memory_copies_what_is_not_there(memory: MemoryTier) -> None:
    session = chat(300)
    source = TruePages(session.hashes)
    assert keep_in_memory(session.snapshot(), source, memory, CHUNK_TOKENS) == 288
    assert memory.leading(session.page_keys) == 18
    assert wrong_pages(memory) == []
    again = TruePages(session.hashes, 0)
    assert keep_in_memory(session.snapshot(), again, memory, CHUNK_TOKENS) == 288
    assert again.asked == []


def test_keep_in_memory_fills_holes(memory: MemoryTier) -> None:
    session = chat(200)
    keep_in_memory(session.snapshot(), TruePages(session.hashes), memory, CHUNK_TOKENS)
    for index in (1, 2, 7, 11):
        memory.delete(session.page_keys[index])
    assert keep_in_memory(session.snapshot(), TruePages(session.hashes), memory, CHUNK_TOKENS) == 192
    assert wrong_pages(memory) == []


def test_keep_in_memory_stops_where_pages_are_gone(memory: MemoryTier) -> None:
    session = chat(300)
    source = TruePages(session.hashes, 9)
    assert keep_in_memory(session.snapshot(), source, memory, CHUNK_TOKENS) == 8 * PAGE
    assert keep_in_memory(chat(7).snapshot(), TruePages(()), memory, CHUNK_TOKENS) == 0
    assert keep_in_memory(chat(70, first=9000).snapshot(), TruePages(()), memory, CHUNK_TOKENS) == 0


@pytest.mark.parametrize("capacity", [1, 3, 4, 6, 17])
def test_a_memory_smaller_than_the_session_keeps_its_first_pages(capacity: int) -> None:
    small = MemoryTier(LAYOUT.layers, LAYOUT.page_segment_bytes, capacity * LAYOUT.page_bytes)
    keep_in_memory(chat(64, first=7000).snapshot(), TruePages(chat(64, first=7000).hashes), small, 16)
    session = chat(300)
    kept = keep_in_memory(session.snapshot(), TruePages(session.hashes), small, CHUNK_TOKENS)
    assert kept == capacity * PAGE
    assert small.leading(session.page_keys) == capacity
    assert small.reserve(["new"]) is not None  # nothing stays pinned, and the last page goes first
    assert small.leading(session.page_keys) == capacity - 1
    assert wrong_pages(small) == []


def test_no_room_at_all_is_told() -> None:
    small = MemoryTier(LAYOUT.layers, LAYOUT.page_segment_bytes, 2 * LAYOUT.page_bytes)
    assert small.reserve(["a", "b"]) is not None
    session = chat(300)
    with pytest.raises(StoreFull, match="no slot for the session's first page"):
        keep_in_memory(session.snapshot(), TruePages(session.hashes), small, CHUNK_TOKENS)
    assert small.check() == []


def test_a_source_that_fails_leaves_nothing_reserved(memory: MemoryTier) -> None:
    session = chat(300)

    def fail(first_page: int) -> None:
        if first_page == 8:
            raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError):
        keep_in_memory(session.snapshot(), TruePages(session.hashes, on_read=fail), memory, CHUNK_TOKENS)
    assert memory.leading(session.page_keys) == 8
    assert wrong_pages(memory) == []

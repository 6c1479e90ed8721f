"""Copying a session between tiers: byte for byte, cut where the source is damaged, and all or nothing."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sgl_krul.codec.frame import decode_header, encode_header
from sgl_krul.errors import Corrupt, LeaseHeld, Missing, StoreError, StoreFull, StoreUnavailable
from sgl_krul.pause.pipeline import write_session
from sgl_krul.service.mover import MoveReport, Stopped, copy_session
from sgl_krul.session.catalog import delete_session, read_manifest
from sgl_krul.session.record import Manifest, manifest_key
from sgl_krul.store.ssd import SsdTier
from sgl_krul.store.tier import Buffer, Entry, Tier
from tests.sessions import (
    LAYOUT,
    NAMESPACE,
    NOW,
    PAGE,
    Chat,
    FaultyTier,
    TruePages,
    chat,
    files,
    open_ssd,
    tokens,
    true_kv,
)


@pytest.fixture
def near(store: Path) -> Iterator[SsdTier]:
    """The tier copied from, for tests that damage it."""
    with open_ssd(store) as tier:
        yield tier


@pytest.fixture
def far(tmp_path: Path) -> Iterator[SsdTier]:
    """The tier copied to."""
    with open_ssd(tmp_path / "far") as tier:
        yield tier
        assert tier.check() == []


def exact_tokens(tier: Tier, session: Chat) -> int:
    """Stored tokens of the session in `tier`; fails unless their KV is the true one."""
    record = read_manifest(tier, NAMESPACE, session.digest)
    if record is None:
        return 0
    assert record.token_ids == b"".join(int(t).to_bytes(4, "little") for t in session.token_ids)
    assert record.stored_bytes == sum(chunk.bytes for chunk in record.chunks)
    assert record.raw_bytes == record.stored_tokens * LAYOUT.token_bytes
    hashes = list(session.hashes)
    for chunk in record.chunks:
        pages, hashes = hashes[: chunk.pages], hashes[chunk.pages :]
        found = [bytearray(chunk.pages * LAYOUT.page_segment_bytes) for _ in range(LAYOUT.layers)]
        tier.read_segments(chunk.key, 0, [memoryview(layer) for layer in found])
        for layer in range(LAYOUT.layers):
            assert found[layer] == b"".join(true_kv(page, layer) for page in pages)
    return record.stored_tokens


def damage(root: Path, key: str, at: int = -1) -> None:
    """Flip a bit of an object's file; the last byte is one of the body."""
    data = bytearray((root / key).read_bytes())
    data[at] ^= 1
    (root / key).write_bytes(data)


# -- whole copies --


@pytest.mark.parametrize("count", [0, 15, 16, 64, 100, 300])
def test_a_copy_is_the_same_bytes(ssd: SsdTier, store: Path, far: SsdTier, count: int) -> None:
    session = chat(count)
    record = session.write(ssd).manifest
    before = files(store)
    report = copy_session(record, ssd, far)
    assert report == MoveReport(record, len(record.chunks), 0, far.usage().bytes, "")
    assert files(far.root) == files(store) == before
    assert exact_tokens(far, session) == count // PAGE * PAGE


def test_there_and_back_again(ssd: SsdTier, store: Path, far: SsdTier) -> None:
    session = chat(300)
    record = session.write(ssd).manifest
    before = files(store)
    for source, target in ((ssd, far), (far, ssd)) * 2:
        record = copy_session(record, source, target).manifest
        delete_session(source, NAMESPACE, session.digest)
        assert source.usage().objects == 0
        assert files(target.root) == before


def test_each_segment_is_a_buffer_of_its_own(ssd: SsdTier, far: SsdTier) -> None:
    """A tier that keeps a field a segment can keep them apart."""
    puts: list[list[int]] = []

    class Recorder(FaultyTier):
        def put(self, key: str, header: bytes, segments: Sequence[Buffer]) -> int:
            puts.append([memoryview(segment).nbytes for segment in segments])
            return super().put(key, header, segments)

    record = chat(100).write(ssd).manifest
    copy_session(record, ssd, Recorder(far, lambda when, operation, key: None))
    segment = LAYOUT.page_segment_bytes
    assert puts == [[4 * segment] * LAYOUT.layers, [2 * segment] * LAYOUT.layers, []]


def test_bytes_are_what_the_target_says_they_take(ssd: SsdTier, far: SsdTier) -> None:
    class Dear(FaultyTier):
        def put(self, key: str, header: bytes, segments: Sequence[Buffer]) -> int:
            return 10 * super().put(key, header, segments)

    session = chat(300)
    record = session.write(ssd).manifest
    dear = Dear(far, lambda when, operation, key: None)
    report = copy_session(record, ssd, dear)
    assert [chunk.bytes for chunk in report.manifest.chunks] == [10 * chunk.bytes for chunk in record.chunks]
    assert report.manifest.stored_bytes == 10 * record.stored_bytes
    again = copy_session(record, ssd, dear)
    assert (again.manifest, again.chunks_kept) == (report.manifest, 5)


def test_one_chunk_at_a_time_is_in_memory(ssd: SsdTier, far: SsdTier) -> None:
    session = chat(1024 * PAGE)
    record = write_session(
        session.snapshot(), TruePages(session.hashes), ssd, chunk_tokens=256 * PAGE, now=lambda: NOW
    ).manifest
    assert len(record.chunks) == 4
    tracemalloc.start()
    try:
        copy_session(record, ssd, far)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * 256 * LAYOUT.page_bytes


# -- over what the target has --


def test_an_older_generation_is_replaced_and_swept(ssd: SsdTier, store: Path, far: SsdTier) -> None:
    copy_session(chat(150).write(ssd).manifest, ssd, far)
    session = chat(300)
    report = copy_session(session.write(ssd).manifest, ssd, far)
    assert (report.chunks_kept, report.chunks_copied) == (2, 3)
    assert files(far.root) == files(store)
    assert exact_tokens(far, session) == 288


def test_a_copy_of_what_is_there_writes_the_manifest_only(ssd: SsdTier, far: SsdTier) -> None:
    record = chat(300).write(ssd).manifest
    copy_session(record, ssd, far)
    before = files(far.root)
    puts: list[str] = []

    def note(when: str, operation: str, key: str) -> None:
        if (when, operation) == ("after", "put"):
            puts.append(key)

    report = copy_session(record, ssd, FaultyTier(far, note))
    assert (report.chunks_kept, report.chunks_copied, report.manifest) == (5, 0, record)
    assert puts == [manifest_key(NAMESPACE, record.digest)]
    assert report.bytes_written == far.usage().bytes - record.stored_bytes
    assert files(far.root) == before


def test_chunks_of_a_copy_that_was_killed_are_kept(ssd: SsdTier, far: SsdTier) -> None:
    record = chat(300).write(ssd).manifest
    copy_session(record, ssd, far)
    far.delete(manifest_key(NAMESPACE, record.digest))
    report = copy_session(record, ssd, far)
    assert (report.chunks_kept, report.manifest) == (5, record)


def test_chunks_left_by_another_history_are_not_taken_for_ours(ssd: SsdTier, far: SsdTier) -> None:
    Chat(chat(0).key, tokens(70) + tokens(230, first=5000)).write(far)
    session = chat(300)
    record = session.write(ssd).manifest
    far.delete(manifest_key(NAMESPACE, record.digest))
    report = copy_session(record, ssd, far)
    assert (report.chunks_kept, report.chunks_copied, report.manifest) == (1, 4, record)
    assert exact_tokens(far, session) == 288


def test_a_chunk_that_the_target_has_damaged_is_copied_anew(ssd: SsdTier, far: SsdTier) -> None:
    session = chat(300)
    record = session.write(ssd).manifest
    copy_session(record, ssd, far)
    damage(far.root, record.chunks[1].key, at=40)  # its header
    far.delete(record.chunks[3].key)
    report = copy_session(record, ssd, far)
    assert (report.chunks_kept, report.chunks_copied) == (3, 2)
    assert exact_tokens(far, session) == 288


def test_a_damaged_manifest_in_the_target_does_not_hinder(ssd: SsdTier, far: SsdTier) -> None:
    session = chat(300)
    record = session.write(ssd).manifest
    copy_session(record, ssd, far)
    damage(far.root, manifest_key(NAMESPACE, record.digest), at=40)
    copy_session(record, ssd, far)
    assert exact_tokens(far, session) == 288


def test_two_servers_that_paused_it_each_for_itself(ssd: SsdTier, far: SsdTier) -> None:
    """Chunks of one name and other content: the old ones stay until the new manifest is in place."""
    old = Chat(chat(0).key, tokens(70) + tokens(100, first=5000))
    old.write(far)
    new = chat(300)
    record = new.write(ssd).manifest
    faults: list[str] = []

    def fail(when: str, operation: str, key: str) -> None:
        if (when, operation) == ("before", "put") and key.endswith("manifest"):
            faults.append(key)
            raise StoreUnavailable("no disk")

    before = files(far.root)
    with pytest.raises(StoreUnavailable):
        copy_session(record, ssd, FaultyTier(far, fail))
    assert files(far.root) == before
    assert exact_tokens(far, old) == 160
    report = copy_session(record, ssd, far)
    assert (report.manifest.generation, report.chunks_kept, report.chunks_copied) == (2, 1, 4)
    names = [chunk.key.rpartition("/")[2] for chunk in report.manifest.chunks]
    assert names == [
        "g00000001-c000000",
        "g00000002-c000001",
        "g00000002-c000002",
        "g00000001-c000003",
        "g00000001-c000004",
    ]
    assert exact_tokens(far, new) == 288
    assert far.usage().objects == 6
    assert new.write(far).manifest.generation == 3  # and pauses go on from there
    assert exact_tokens(far, new) == 288


# -- a source that is not whole --


@pytest.mark.parametrize("index", [1, 4])
@pytest.mark.parametrize("how", ["gone", "header", "body", "short", "other chunk"])
def test_a_copy_ends_where_the_source_is_damaged(
    near: SsdTier, store: Path, far: SsdTier, index: int, how: str
) -> None:
    session = chat(300)
    record = session.write(near).manifest
    lose(near, record, index, how)
    before = files(store)
    report = copy_session(record, near, far)
    assert report.cut.startswith("missing chunk" if how == "gone" else "corrupt chunk")
    assert (report.chunks_copied, report.chunks_kept) == (index, 0)
    assert read_manifest(far, NAMESPACE, session.digest) == report.manifest
    assert report.manifest.chunks == record.chunks[:index]
    assert exact_tokens(far, session) == 64 * index
    assert far.usage().objects == index + 1
    assert files(store) == before


@pytest.mark.parametrize(
    ("how", "error"),
    [("gone", Missing), ("header", Corrupt), ("body", Corrupt), ("short", Corrupt), ("other chunk", Corrupt)],
)
def test_nothing_left_is_an_error_and_writes_nothing(
    near: SsdTier, far: SsdTier, how: str, error: type[StoreError]
) -> None:
    old = chat(150)
    copy_session(old.write(near).manifest, near, far)
    before = files(far.root)
    delete_session(near, NAMESPACE, old.digest)
    record = chat(300, first=7).write(near).manifest
    lose(near, record, 0, how)
    with pytest.raises(error):
        copy_session(record, near, far)
    assert files(far.root) == before


def lose(tier: SsdTier, record: Manifest, index: int, how: str) -> None:
    """Damage chunk `index` in one way or another."""
    key = record.chunks[index].key
    path = tier.root / key
    if how == "gone":
        tier.delete(key)
    elif how == "header":
        damage(tier.root, key, at=40)
    elif how == "body":
        damage(tier.root, key)
    elif how == "short":
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size - 1)
    else:
        path.write_bytes((tier.root / record.chunks[2].key).read_bytes())


def test_a_chunk_is_not_cut_by_damage_the_target_does_not_share(near: SsdTier, far: SsdTier) -> None:
    """The header says that the target's body is the one wanted; the source's is not needed then."""
    session = chat(300)
    record = session.write(near).manifest
    copy_session(record, near, far)
    damage(near.root, record.chunks[1].key)
    assert copy_session(record, near, far).cut == ""
    assert exact_tokens(far, session) == 288


def test_a_header_that_asks_for_too_much_memory_is_corrupt(ssd: SsdTier, far: SsdTier) -> None:
    record = chat(300).write(ssd).manifest
    chunk = record.chunks[1]
    header = decode_header(ssd.read_header(chunk.key) or b"")
    *others, last = header.segments
    segments = (*others, replace(last, length=1 << 38))
    ssd.put(chunk.key, encode_header(replace(header, segments=segments)), [])
    report = copy_session(record, ssd, far)
    assert "body of 2748779" in report.cut
    assert len(report.manifest.chunks) == 1


def test_a_source_out_of_reach_is_no_damage(ssd: SsdTier, far: SsdTier) -> None:
    record = chat(300).write(ssd).manifest

    def fail(when: str, operation: str, key: str) -> None:
        if operation == "read_segments" and key.endswith("c000003"):
            raise StoreUnavailable("no network")

    with pytest.raises(StoreUnavailable, match="no network"):
        copy_session(record, FaultyTier(ssd, fail), far)
    assert files(far.root) == {}


# -- a target that fails, and a copy that is stopped --


@pytest.mark.parametrize("error", [StoreFull("no room"), StoreUnavailable("no disk"), RuntimeError("a bug")])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("where", ["g00000002-c000002", "g00000002-c000004"])
def test_a_failed_put_leaves_the_target_as_it_was(
    ssd: SsdTier, far: SsdTier, error: Exception, when: str, where: str
) -> None:
    old = chat(150)
    copy_session(old.write(ssd).manifest, ssd, far)
    before = files(far.root)
    record = chat(300).write(ssd).manifest

    def fail(moment: str, operation: str, key: str) -> None:
        if (moment, operation) == (when, "put") and key.endswith(where):
            raise error

    with pytest.raises(type(error)):
        copy_session(record, ssd, FaultyTier(far, fail))
    assert files(far.root) == before
    assert exact_tokens(far, old) == 144


def test_a_full_target_leaves_the_old_session(ssd: SsdTier, tmp_path: Path) -> None:
    with open_ssd(tmp_path / "small", capacity_bytes=120_000) as small:
        copy_session(chat(150).write(ssd).manifest, ssd, small)
        before = files(small.root)
        with pytest.raises(StoreFull, match="cap of 120000"):
            copy_session(chat(1000).write(ssd).manifest, ssd, small)
        assert files(small.root) == before
        assert small.check() == []


def test_a_target_out_of_reach_is_told_before_anything_is_written(ssd: SsdTier, far: SsdTier) -> None:
    record = chat(100).write(ssd).manifest

    def fail(when: str, operation: str, key: str) -> None:
        if operation == "read_header":
            raise StoreUnavailable("no network")
        assert operation != "put"

    with pytest.raises(StoreUnavailable):
        copy_session(record, ssd, FaultyTier(far, fail))


def test_a_commit_that_is_in_place_is_not_taken_back(ssd: SsdTier, far: SsdTier) -> None:
    copy_session(chat(150).write(ssd).manifest, ssd, far)
    session = chat(300)

    def fail(when: str, operation: str, key: str) -> None:
        if (when, operation) == ("after", "put") and key.endswith("/manifest"):
            raise StoreUnavailable("fsync of the directory: EIO")

    with pytest.raises(StoreUnavailable):
        copy_session(session.write(ssd).manifest, ssd, FaultyTier(far, fail))
    assert exact_tokens(far, session) == 288


def test_a_repaired_chunk_of_the_session_in_place_stays_after_a_failure(ssd: SsdTier, far: SsdTier) -> None:
    """The old manifest names it still: taking it back would cut the old session."""
    session = chat(300)
    record = session.write(ssd).manifest
    copy_session(record, ssd, far)
    far.delete(record.chunks[0].key)

    def fail(when: str, operation: str, key: str) -> None:
        if (when, operation) == ("before", "put") and key.endswith("/manifest"):
            raise StoreFull("no room")

    with pytest.raises(StoreFull):
        copy_session(record, ssd, FaultyTier(far, fail))
    assert exact_tokens(far, session) == 288


def test_a_lost_lease_leaves_everything_to_the_other_server(ssd: SsdTier, far: SsdTier) -> None:
    record = chat(300).write(ssd).manifest

    def fail(when: str, operation: str, key: str) -> None:
        assert operation != "delete"
        if (when, operation) == ("before", "put") and key.endswith("c000003"):
            raise LeaseHeld("server B writes this session")

    with pytest.raises(LeaseHeld):
        copy_session(record, ssd, FaultyTier(far, fail))


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_stopped_copy_takes_back_what_it_wrote(ssd: SsdTier, far: SsdTier, after: int) -> None:
    copy_session(chat(150).write(ssd).manifest, ssd, far)
    before = files(far.root)
    record = chat(300, first=3).write(ssd).manifest
    asked: list[int] = []

    def stopped() -> bool:
        asked.append(far.usage().objects)
        return len(asked) > after

    with pytest.raises(Stopped, match=f"'chat' to ssd was stopped after {after} of 5 chunks") as stop:
        copy_session(record, ssd, far, stopped=stopped)
    assert stop.value.status == 503
    assert files(far.root) == before
    assert asked == [4 + n for n in range(after + 1)]


def test_orphans_that_cannot_be_removed_do_not_fail_the_copy(ssd: SsdTier, far: SsdTier) -> None:
    copy_session(chat(150).write(ssd).manifest, ssd, far)
    session = chat(300)
    session.write(ssd)

    class Unswept(FaultyTier):
        def scan(self, prefix: str) -> Iterator[Entry]:
            raise StoreUnavailable("no network")

    record = read_manifest(ssd, NAMESPACE, session.digest)
    assert record is not None
    report = copy_session(record, ssd, Unswept(far, lambda when, operation, key: None))
    assert report.cut == ""
    assert exact_tokens(far, session) == 288
    assert far.usage().objects == 7


class Killed(Exception):
    """The process is dead from here on."""


def test_killed_at_any_moment_the_target_has_the_old_session_or_the_new(ssd: SsdTier, tmp_path: Path) -> None:
    old, new = Chat(chat(0).key, tokens(70) + tokens(100, first=5000)), chat(300)
    record = new.write(ssd).manifest
    outcomes = []
    for kill_at in range(1000):
        moments = 0

        def kill(when: str, operation: str, key: str, limit: int = kill_at) -> None:
            nonlocal moments
            moments += 1
            if moments > limit:
                raise Killed

        with open_ssd(tmp_path / f"far{kill_at}") as far:
            old.write(far)
            try:
                copy_session(record, ssd, FaultyTier(far, kill))
            except Killed:
                found = read_manifest(far, NAMESPACE, new.digest)
                outcomes.append("old" if found is not None and found.tokens == 170 else "new")
                assert exact_tokens(far, old if outcomes[-1] == "old" else new) > 0
                continue
            assert exact_tokens(far, new) == 288
        break
    assert outcomes == sorted(outcomes, key=["old", "new"].index)
    assert set(outcomes) == {"old", "new"}
    assert len(outcomes) > 20

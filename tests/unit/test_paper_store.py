"""Paper mode, the storing side: which layers a pause leaves out, and everything that handles such chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event

import msgspec
import pytest

from sgl_krul.codec.base import Mode
from sgl_krul.codec.frame import build_segments, decode_header, encode_header
from sgl_krul.errors import BadArchive, StoreUnavailable
from sgl_krul.pause.paper import paper_depths, settle_depths
from sgl_krul.pause.pipeline import Depths, PauseReport, kept_depths, plan_chunks, still_there, write_session
from sgl_krul.restore.pipeline import Restorer
from sgl_krul.service.archive import export_session, import_session
from sgl_krul.service.archive_file import ArchiveWriter, Kind
from sgl_krul.service.mover import copy_session, read_chunk
from sgl_krul.session.catalog import find_sessions, read_manifest
from sgl_krul.session.record import ChunkRef, encode_manifest, manifest_key
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.ssd import SsdTier
from sgl_krul.store.tier import Tier
from sgl_krul.store.workers import Workers
from tests.sessions import (
    CHUNK_TOKENS,
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
    wrong_pages,
)

KEY = b"the servers' own"
LAYERS = LAYOUT.layers  # 3
CHUNK_PAGES = CHUNK_TOKENS // PAGE


@pytest.fixture
def far(tmp_path: Path) -> Iterator[SsdTier]:
    """Another tier."""
    with open_ssd(tmp_path / "far") as tier:
        yield tier
        assert tier.check() == []


def fixed(*depths: int) -> Depths:
    """These depths, the last one for all further chunks."""
    return lambda chunk_tokens: [depths[min(n, len(depths) - 1)] for n in range(len(chunk_tokens))]


def pause(session: Chat, tier: Tier, depths: Depths | None, source: TruePages | None = None) -> PauseReport:
    """Pause the session; `depths` None: as a raw server does."""
    return write_session(
        session.snapshot(),
        TruePages(session.hashes) if source is None else source,
        tier,
        chunk_tokens=CHUNK_TOKENS,
        now=lambda: NOW,
        depths=depths,
    )


def stored_depths(tier: Tier, session: Chat) -> list[int]:
    """The depths of the session's chunks; fails unless what is stored is its true KV, and nothing more."""
    record = read_manifest(tier, NAMESPACE, session.digest)
    assert record is not None
    assert record.stored_bytes == sum(ref.bytes for ref in record.chunks)
    assert record.raw_bytes == record.stored_tokens * LAYOUT.token_bytes
    hashes = list(session.hashes)
    depths = []
    for ref in record.chunks:
        pages, hashes = hashes[: ref.pages], hashes[ref.pages :]
        data, segments = read_chunk(tier, NAMESPACE, ref)
        header, depth = decode_header(data), ref.depth
        assert header.depth == depth
        assert header.plan_id == ("paper" if depth else "raw")
        assert [entry.mode for entry in header.segments] == [Mode.recompute] * depth + [Mode.raw] * (
            LAYERS - depth
        )
        for layer, segment in enumerate(segments):
            true = b"".join(true_kv(page, layer) for page in pages)
            assert segment == (b"" if layer < depth else true)
        depths.append(depth)
    assert depths == sorted(depths, reverse=True)
    assert {entry.key for entry in tier.scan("")} == {
        manifest_key(NAMESPACE, session.digest),
        *(ref.key for ref in record.chunks),
    }
    return depths


# -- depths --


@pytest.mark.parametrize(
    ("chunk_tokens", "staircase", "depths"),
    [
        ([], [0], []),
        ([64], [64], [1]),
        ([64], [0, 0, 0], [1]),  # layer 0 always
        ([64, 64, 32], [160, 128, 64, 63], [3, 2, 1]),
        ([64, 64, 32], [160, 160, 160, 160], [4, 4, 4]),
        ([64, 64, 32], [160, 159, 127, 0], [3, 2, 1]),
        ([64, 64, 32], [0, 0, 0, 0], [1, 1, 1]),
        ([16] * 4, [1000, 33, 32, 16], [4, 3, 1, 1]),
    ],
)
def test_depths_of_a_staircase(chunk_tokens: list[int], staircase: list[int], depths: list[int]) -> None:
    assert paper_depths(chunk_tokens, staircase) == tuple(depths)


@pytest.mark.parametrize(
    ("chunk_tokens", "staircase", "named"),
    [
        ([64], [], "staircase"),
        ([64], [64, 65], "staircase"),
        ([64], [64, -1], "staircase"),
        ([64, 0], [64], "chunk_tokens"),
    ],
)
def test_what_is_no_staircase(chunk_tokens: list[int], staircase: list[int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        paper_depths(chunk_tokens, staircase)


@pytest.mark.parametrize(
    ("wanted", "kept", "settled"),
    [
        ([3, 2, 1], [None, None, None], [3, 2, 1]),
        ([3, 3, 3, 2, 1], [2, 1, None, None, None], [2, 1, 1, 1, 1]),
        ([3, 3, 2], [0, None, None], [0, 0, 0]),
        ([1, 1, 1], [None, 2, None], [2, 2, 1]),
        ([3, 1, 1, 1], [3, None, 2, 1], [3, 2, 2, 1]),
        ([], [], []),
    ],
)
def test_what_is_kept_sets_bounds(wanted: list[int], kept: list[int | None], settled: list[int]) -> None:
    assert settle_depths(wanted, kept) == tuple(settled)


# -- writing --


@pytest.mark.parametrize("count", [0, 15, 16, 64, 100, 300])
@pytest.mark.parametrize("depths", [(0,), (1,), (2, 1), (3, 2, 1, 0), (3,)])
def test_the_first_layers_are_left_out(ssd: SsdTier, count: int, depths: tuple[int, ...]) -> None:
    session = chat(count)
    report = pause(session, ssd, fixed(*depths))
    chunks = -(-(count // PAGE) // CHUNK_PAGES)
    assert stored_depths(ssd, session) == list(fixed(*depths)([1] * chunks))
    assert report.manifest.stored_tokens == count // PAGE * PAGE
    assert report.bytes_written == ssd.usage().bytes


def test_the_bytes_stored_are_fewer_by_what_is_left_out(ssd: SsdTier, far: SsdTier) -> None:
    session = chat(256)
    raw = pause(session, ssd, None).manifest
    paper = pause(session, far, fixed(3, 2, 1)).manifest
    segment = CHUNK_PAGES * LAYOUT.page_segment_bytes
    assert raw.raw_bytes == paper.raw_bytes == 4 * LAYERS * segment
    assert raw.stored_bytes - paper.stored_bytes == (3 + 2 + 1 + 1) * segment


def test_depths_are_asked_for_all_chunks_at_once(ssd: SsdTier) -> None:
    asked: list[Sequence[int]] = []

    def depths(chunk_tokens: Sequence[int]) -> Sequence[int]:
        asked.append(chunk_tokens)
        return paper_depths(chunk_tokens, (160, 128, 0))

    pause(chat(170), ssd, depths)
    assert asked == [[64, 64, 32]]
    assert stored_depths(ssd, chat(170)) == [2, 2, 1]


def test_a_chunk_that_is_all_recomputed_needs_no_pages(ssd: SsdTier) -> None:
    session = chat(300)
    source = TruePages(session.hashes, 0)
    report = pause(session, ssd, fixed(3, 3, 2), source)
    assert source.asked == [(8, 4)]
    assert report.manifest.stored_tokens == 128
    assert stored_depths(ssd, session) == [3, 3]


@pytest.mark.parametrize("depths", [[1], [1] * 6, [1, 2, 2, 2, 2], [4, 1, 1, 1, 1], [1, 1, 1, 1, -1]])
def test_depths_that_cannot_be(ssd: SsdTier, store: Path, depths: list[int]) -> None:
    pause(chat(100), ssd, fixed(1))
    before = files(store)
    with pytest.raises(ValueError, match=r"depths .*expected 5 of 0 to 3"):
        pause(chat(300), ssd, lambda chunk_tokens: depths)
    assert files(store) == before


def test_a_put_that_fails_leaves_the_old_session(ssd: SsdTier, store: Path) -> None:
    pause(chat(150), ssd, fixed(3, 1))
    before = files(store)

    def fail(when: str, operation: str, key: str) -> None:
        if (when, operation) == ("before", "put") and key.endswith("manifest"):
            raise StoreUnavailable("no disk")

    with pytest.raises(StoreUnavailable):
        pause(chat(300), FaultyTier(ssd, fail), fixed(3, 2, 1))
    assert files(store) == before


# -- a second pause --


def test_kept_chunks_keep_their_depths(ssd: SsdTier) -> None:
    first = pause(chat(150), ssd, fixed(3, 2, 1))
    session = chat(300)
    source = TruePages(session.hashes)
    second = pause(session, ssd, fixed(3), source)
    assert (second.chunks_kept, second.chunks_written) == (2, 3)
    assert second.manifest.chunks[:2] == first.manifest.chunks[:2]
    assert source.asked == [(8, 4), (12, 4), (16, 2)]
    assert stored_depths(ssd, session) == [3, 2, 2, 2, 2]


def test_a_pause_of_the_same_state_writes_the_manifest_only(ssd: SsdTier) -> None:
    session = chat(150)
    pause(session, ssd, fixed(3, 2, 1))
    source = TruePages(())
    report = pause(session, ssd, fixed(1), source)
    assert (report.chunks_kept, report.chunks_written, source.asked) == (3, 0, [])
    assert stored_depths(ssd, session) == [3, 2, 1]


def test_a_chunk_lost_before_a_deeper_one_is_written_as_deep(ssd: SsdTier) -> None:
    session = chat(256)
    record = pause(session, ssd, fixed(3, 3, 2, 1)).manifest
    ssd.delete(record.chunks[1].key)
    source = TruePages(session.hashes)
    report = pause(session, ssd, fixed(1), source)
    assert (report.chunks_kept, report.chunks_written, source.asked) == (3, 1, [(4, 4)])
    assert stored_depths(ssd, session) == [3, 2, 2, 1]


def test_a_raw_server_writes_chunks_with_holes_anew(ssd: SsdTier) -> None:
    session = chat(300)
    pause(session, ssd, fixed(2, 1, 0))
    source = TruePages(session.hashes)
    report = pause(session, ssd, None, source)
    assert (report.chunks_kept, report.chunks_written, source.asked) == (3, 2, [(0, 4), (4, 4)])
    assert stored_depths(ssd, session) == [0] * 5


@pytest.mark.parametrize(("available", "stored"), [(0, 0), (4, 64), (8, 288)])
def test_a_raw_server_without_the_pages_keeps_no_hole(ssd: SsdTier, available: int, stored: int) -> None:
    session = chat(300)
    pause(session, ssd, fixed(2, 1, 0))
    report = pause(session, ssd, None, TruePages(session.hashes, available))
    assert report.manifest.stored_tokens == stored
    assert stored_depths(ssd, session) == [0] * (-(-stored // CHUNK_TOKENS))


def test_a_paper_server_keeps_whole_chunks(ssd: SsdTier) -> None:
    pause(chat(150), ssd, None)
    session = chat(300)
    report = pause(session, ssd, fixed(3, 2, 1))
    assert report.chunks_kept == 2
    assert stored_depths(ssd, session) == [0] * 5  # depths never rise


def test_a_diverged_session_is_stored_anew_from_there(ssd: SsdTier) -> None:
    pause(chat(256), ssd, fixed(2))
    edited = Chat(chat(0).key, tokens(100) + tokens(150, first=5000))
    report = pause(edited, ssd, fixed(3, 1))
    assert (report.chunks_kept, report.chunks_written) == (1, 3)
    assert stored_depths(ssd, edited) == [2, 1, 1, 1]


def test_a_chunk_without_other_layers_than_promised_is_not_kept(ssd: SsdTier) -> None:
    session = chat(300)
    record = pause(session, ssd, fixed(1)).manifest
    hollow(ssd, record.chunks[2], 3)
    report = pause(session, ssd, fixed(1))
    assert (report.chunks_kept, report.chunks_written) == (4, 1)
    assert stored_depths(ssd, session) == [1] * 5


def test_a_manifest_whose_depths_rise_is_not_gone_on_with(ssd: SsdTier) -> None:
    session = chat(300)
    record = pause(session, ssd, fixed(1)).manifest
    deep = msgspec.structs.replace(record.chunks[2], depth=3)
    hollow(ssd, record.chunks[2], 3)
    plans = plan_chunks(session.snapshot(), record, CHUNK_PAGES)
    plans[2] = replace(plans[2], reuse=deep)
    assert kept_depths(plans, ssd, NAMESPACE, deepest=3) == [1, 1, None, 1, 1]
    assert kept_depths(plans, ssd, NAMESPACE, deepest=0) == [None] * 5


def hollow(tier: Tier, ref: ChunkRef, depth: int) -> tuple[bytes, list[memoryview]]:
    """Store a chunk anew, well sealed, without its first `depth` layers; its header and body."""
    data, segments = read_chunk(tier, NAMESPACE, ref)
    entries = build_segments([[segment] for segment in segments], Mode.raw, depth=depth)
    header = encode_header(replace(decode_header(data), plan_id="paper", segments=entries))
    tier.put(ref.key, header, segments[depth:])
    return header, segments[depth:]


# -- elsewhere --


@pytest.mark.parametrize("depths", [(1,), (3, 2, 1), (3,)])
def test_a_copy_is_the_same_bytes(ssd: SsdTier, store: Path, far: SsdTier, depths: tuple[int, ...]) -> None:
    session = chat(300)
    record = pause(session, ssd, fixed(*depths)).manifest
    report = copy_session(record, ssd, far)
    assert (report.manifest, report.cut, report.chunks_copied) == (record, "", 5)
    assert files(far.root) == files(store)
    again = copy_session(record, ssd, far)
    assert (again.chunks_kept, again.chunks_copied) == (5, 0)
    assert stored_depths(far, session) == stored_depths(ssd, session)


@pytest.mark.parametrize(
    ("here", "there"), [(fixed(3, 2, 1), None), (None, fixed(1)), (fixed(2), fixed(3, 1))]
)
def test_the_same_tokens_stored_otherwise_stay_until_the_manifest(
    ssd: SsdTier, far: SsdTier, here: Depths | None, there: Depths | None
) -> None:
    """A raw and a paper server paused it each for itself: the same keys, other layers."""
    session = chat(300)
    record = pause(session, ssd, here).manifest
    pause(session, far, there)
    before, depths = files(far.root), stored_depths(far, session)

    def fail(when: str, operation: str, key: str) -> None:
        if (when, operation) == ("before", "put") and key.endswith("manifest"):
            raise StoreUnavailable("no disk")

    with pytest.raises(StoreUnavailable):
        copy_session(record, ssd, FaultyTier(far, fail))
    assert files(far.root) == before
    assert stored_depths(far, session) == depths
    report = copy_session(record, ssd, far)
    assert report.manifest.generation == 2
    assert stored_depths(far, session) == stored_depths(ssd, session)


def test_a_copy_ends_where_other_layers_are_missing(ssd: SsdTier, far: SsdTier) -> None:
    session = chat(300)
    record = pause(session, ssd, fixed(2, 1)).manifest
    hollow(ssd, record.chunks[2], 2)
    report = copy_session(record, ssd, far)
    assert report.cut == "corrupt chunk (identity: 2 layers are not stored, expected 1)"
    assert stored_depths(far, session) == [2, 1]


@pytest.mark.parametrize("depths", [(1,), (3, 2, 1), (3,)])
def test_an_export_comes_back(ssd: SsdTier, far: SsdTier, tmp_path: Path, depths: tuple[int, ...]) -> None:
    session = chat(300)
    record = pause(session, ssd, fixed(*depths)).manifest
    path = tmp_path / "session.krul"
    report = export_session(record, [ssd], path, key=KEY)
    assert (report.chunks, report.cut) == (5, "")
    imported = import_session(path, far, key=KEY, namespace=NAMESPACE, now=lambda: NOW)
    assert imported == record
    assert stored_depths(far, session) == stored_depths(ssd, session)


def test_an_export_takes_no_other_layers_from_elsewhere(ssd: SsdTier, far: SsdTier, tmp_path: Path) -> None:
    session = chat(300)
    record = pause(session, ssd, fixed(1)).manifest
    pause(session, far, fixed(2))
    ssd.delete(record.chunks[3].key)
    report = export_session(record, [ssd, far], tmp_path / "session.krul", key=KEY)
    assert report.chunks == 3
    assert "2 layers are not stored, expected 1" in report.cut


def test_a_file_with_other_layers_than_its_manifest_is_refused(
    ssd: SsdTier, far: SsdTier, tmp_path: Path
) -> None:
    record = pause(chat(300), ssd, fixed(1)).manifest
    path = tmp_path / "session.krul"
    with open(path, "wb") as file:
        out = ArchiveWriter(file.fileno(), KEY)
        out.frame(Kind.manifest, encode_manifest(record))
        for depth, ref in zip((1, 1, 2, 1, 1), record.chunks, strict=True):
            header, segments = hollow(ssd, ref, depth)
            out.frame(Kind.chunk, header)
            out.body(segments)
        out.end(len(record.chunks))
    with pytest.raises(BadArchive, match="2 layers are not stored, expected 1"):
        import_session(path, far, key=KEY, namespace=NAMESPACE, now=lambda: NOW)
    assert files(far.root) == {}


@pytest.mark.parametrize(
    ("depths", "in_memory", "restored"), [((2, 1), 0, 0), ((2, 1), 8, 128), ((0,), 0, 288)]
)
def test_a_restore_to_memory_ends_where_layers_are_missing(
    ssd: SsdTier, store: Path, memory: MemoryTier, depths: tuple[int, ...], in_memory: int, restored: int
) -> None:
    """It takes no half pages, and leaves the chunks for a restore to the device."""
    session = chat(300)
    record = pause(session, ssd, fixed(*depths)).manifest
    for page, name in list(zip(session.page_keys, session.hashes, strict=True))[:in_memory]:
        memory.put(page, b"", [true_kv(name, layer) for layer in range(LAYERS)])
    before = files(store)
    workers = Workers("load", 2)
    try:
        report = Restorer([ssd], memory, LAYOUT, workers, ahead=2).run(
            record, deadline=1e9, clock=lambda: 0.0, cancelled=Event()
        )
    finally:
        workers.close()
    assert (report.tokens, report.miss) == (restored, "partial" if restored < 288 else "")
    assert memory.leading(session.page_keys) * PAGE == restored
    assert wrong_pages(memory) == []
    assert files(store) == before
    report.release()


def test_sessions_are_found_and_swept_at_start(ssd: SsdTier, store: Path) -> None:
    session = chat(300)
    record = pause(session, ssd, fixed(3, 3, 1)).manifest
    orphan = record.chunks[0].key.replace("g00000001", "g00000009")
    ssd.put(orphan, ssd.read_header(record.chunks[0].key) or b"", [])
    catalog = find_sessions(ssd, NAMESPACE, now=NOW, stale_ttl_s=1.0)
    assert (len(catalog.sessions), catalog.corrupt, catalog.orphans) == (1, 0, 1)
    (found,) = catalog.sessions
    assert found.paused is not None
    assert (found.paused.stored_bytes, found.paused.stored_tokens) == (record.stored_bytes, 288)
    with_empty = [ref for ref in record.chunks if (store / ref.key).stat().st_size == 4096]
    assert with_empty == list(record.chunks[:2])
    assert ssd.check() == []


@pytest.mark.parametrize("how", ["gone", "flip", "longer"])
def test_damage_to_a_chunk_without_a_body_is_found(ssd: SsdTier, store: Path, how: str) -> None:
    session = chat(128)
    record = pause(session, ssd, fixed(3)).manifest
    ref = record.chunks[1]
    path = store / ref.key
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data + b"x" if how == "longer" else data[:60] + bytes([data[60] ^ 1]) + data[61:])
    assert not still_there(ssd, ref, NAMESPACE)
    report = pause(session, ssd, fixed(3))
    assert (report.chunks_kept, report.chunks_written) == (1, 1)
    assert stored_depths(ssd, session) == [3, 3]

"""A session in a file: there and back the same bytes; of a bad file nothing is imported, and it says why."""

from __future__ import annotations

import hmac
import os
import stat
import struct
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from sgl_krul.codec.frame import decode_header, encode_header
from sgl_krul.config import Config, SessionConfig
from sgl_krul.errors import (
    BadArchive,
    Corrupt,
    KrulError,
    LeaseHeld,
    Missing,
    StoreFull,
    StoreUnavailable,
)
from sgl_krul.pause.pipeline import write_session
from sgl_krul.service import archive as service_archive
from sgl_krul.service.mover import Stopped
from sgl_krul.service.places import read_archive_key
from sgl_krul.session.catalog import read_manifest
from sgl_krul.session.record import Manifest, SessionKey, chunk_key, encode_manifest
from sgl_krul.store.ssd import SsdTier
from sgl_krul.store.tier import Tier
from tests.sessions import (
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
)

ARCHIVE_KEY = b"the servers' own"
export_session = partial(service_archive.export_session, key=ARCHIVE_KEY)
import_session = partial(service_archive.import_session, key=ARCHIVE_KEY)
read_archive_manifest = partial(service_archive.read_archive_manifest, key=ARCHIVE_KEY)

LATER = NOW + 100


@pytest.fixture
def far(tmp_path: Path) -> Iterator[SsdTier]:
    """The tier imported to."""
    with open_ssd(tmp_path / "far") as tier:
        yield tier
        assert tier.check() == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the file goes: alone in its directory."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "chat.krul"


def take(path: Path, target: Tier, **options: Any) -> Manifest:
    return import_session(path, target, **({"namespace": NAMESPACE, "now": lambda: LATER} | options))


def stored_kv(tier: Tier, record: Manifest) -> list[list[bytes]]:
    """Per chunk the bytes of each layer."""
    found = []
    for chunk in record.chunks:
        layers = [bytearray(chunk.pages * LAYOUT.page_segment_bytes) for _ in range(LAYOUT.layers)]
        tier.read_segments(chunk.key, 0, [memoryview(layer) for layer in layers])
        found.append([bytes(layer) for layer in layers])
    return found


def true_chunks(session: Chat, record: Manifest) -> list[list[bytes]]:
    """The same as it must be."""
    found, hashes = [], list(session.hashes)
    for chunk in record.chunks:
        pages, hashes = hashes[: chunk.pages], hashes[chunk.pages :]
        found.append([b"".join(true_kv(page, layer) for page in pages) for layer in range(LAYOUT.layers)])
    return found


# -- the format, written a second time --


def frame(kind: bytes, payload: bytes) -> bytes:
    head = struct.pack("<4sQ", kind, len(payload))
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + payload)) + payload


def seal(start: bytes, count: int) -> bytes:
    """A file that begins so, with its end."""
    return start + frame(b"END ", struct.pack("<Q32s", count, hmac.digest(ARCHIVE_KEY, start, "sha256")))


def archive(tier: Tier, record: Manifest, manifest: bytes | None = None) -> bytes:
    """The file of a session, from the parts that `tier` has. `manifest`: put this in the place of its own."""
    data = b"KRULSESS" + struct.pack("<I", 1)
    data += frame(b"MANI", encode_manifest(record) if manifest is None else manifest)
    for chunk, layers in zip(record.chunks, stored_kv(tier, record), strict=True):
        data += frame(b"CHNK", tier.read_header(chunk.key) or b"") + b"".join(layers)
    return seal(data, len(record.chunks))


# -- there and back --


@pytest.mark.parametrize("count", [0, 15, 16, 64, 100, 300])
def test_round_trip(ssd: SsdTier, far: SsdTier, path: Path, count: int) -> None:
    session = chat(count)
    record = session.write(ssd).manifest
    report = export_session(record, [ssd], path)
    assert path.read_bytes() == archive(ssd, record)
    assert (report.path, report.manifest, report.chunks, report.cut) == (path, record, len(record.chunks), "")
    assert report.bytes_written == path.stat().st_size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]
    assert read_archive_manifest(path) == record

    imported = take(path, far)
    assert imported == msgspec.structs.replace(record, paused_at=LATER)
    assert read_manifest(far, NAMESPACE, session.digest) == imported
    assert stored_kv(far, imported) == true_chunks(session, imported)
    assert far.usage() == ssd.usage()
    again = path.with_name("again.krul")
    export_session(record, [far], again)
    assert again.read_bytes() == path.read_bytes()


def test_a_salted_session_comes_back(ssd: SsdTier, far: SsdTier, path: Path) -> None:
    session = Chat(SessionKey("chät/../1", "salt", "key"), tokens(100))
    export_session(session.write(ssd).manifest, [ssd], path)
    assert take(path, far).digest == session.digest


def test_an_import_replaces_as_a_pause_does(ssd: SsdTier, far: SsdTier, path: Path) -> None:
    session = chat(300)
    export_session(session.write(ssd).manifest, [ssd], path)
    for count in (150, 400, 500):
        chat(count).write(far)
    imported = take(path, far)
    assert (imported.generation, imported.tokens, imported.paused_at) == (4, 300, LATER)
    assert [chunk.key for chunk in imported.chunks] == [
        chunk_key(NAMESPACE, session.digest, 4, index) for index in range(5)
    ]
    assert stored_kv(far, imported) == true_chunks(session, imported)
    assert far.usage().objects == 6
    assert take(path, far).generation == 5
    assert far.usage().objects == 6
    assert chat(320).write(far).chunks_kept == 4


def test_an_export_replaces_the_file(ssd: SsdTier, path: Path) -> None:
    path.write_text("something else")
    record = chat(100).write(ssd).manifest
    export_session(record, [ssd], path)
    assert path.read_bytes() == archive(ssd, record)


def test_one_chunk_at_a_time_is_in_memory(ssd: SsdTier, far: SsdTier, path: Path) -> None:
    session = chat(1024 * PAGE)
    record = write_session(
        session.snapshot(), TruePages(session.hashes), ssd, chunk_tokens=256 * PAGE, now=lambda: NOW
    ).manifest
    assert len(record.chunks) == 4
    tracemalloc.start()
    try:
        export_session(record, [ssd], path)
        take(path, far)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * 256 * LAYOUT.page_bytes


# -- exports that find damage --


def spoil(tier: SsdTier, record: Manifest, index: int) -> None:
    """Flip the last bit of a chunk's body."""
    file = tier.root / record.chunks[index].key
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("index", [1, 4])
@pytest.mark.parametrize("gone", [True, False])
def test_an_export_ends_at_a_chunk_that_is_lost(
    tmp_path: Path, far: SsdTier, path: Path, index: int, gone: bool
) -> None:
    session = chat(300)
    with open_ssd(tmp_path / "near") as near:
        record = session.write(near).manifest
        if gone:
            near.delete(record.chunks[index].key)
        else:
            spoil(near, record, index)
        report = export_session(record, [near], path)
    assert report.cut.startswith("missing chunk" if gone else "corrupt chunk (checksum")
    assert (report.chunks, report.manifest.chunks) == (index, record.chunks[:index])
    assert report.manifest.raw_bytes == report.manifest.stored_tokens * LAYOUT.token_bytes
    assert read_archive_manifest(path) == report.manifest
    imported = take(path, far)
    assert (imported.tokens, imported.stored_tokens) == (300, 64 * index)
    assert stored_kv(far, imported) == true_chunks(session, imported)


def test_each_chunk_comes_from_the_first_source_that_has_it(tmp_path: Path, far: SsdTier, path: Path) -> None:
    session = chat(300)
    with open_ssd(tmp_path / "one") as one, open_ssd(tmp_path / "two") as two:
        record = session.write(one).manifest
        session.write(two)
        spoil(one, record, 0)
        one.delete(record.chunks[1].key)
        two.delete(record.chunks[2].key)
        spoil(two, record, 3)
        assert export_session(record, [one, two], path).cut == ""
        assert stored_kv(far, take(path, far)) == true_chunks(session, record)
        two.delete(record.chunks[0].key)
        with pytest.raises(Corrupt, match="checksum"):  # says more than that the other has none
            export_session(record, [two, one], path.with_name("none"))
    assert os.listdir(path.parent) == [path.name]


def test_nothing_left_is_an_error_and_leaves_no_file(ssd: SsdTier, path: Path) -> None:
    record = chat(300).write(ssd).manifest
    ssd.delete(record.chunks[0].key)
    with pytest.raises(Missing, match="has gone from ssd"):
        export_session(record, [ssd], path)
    assert os.listdir(path.parent) == []
    with pytest.raises(ValueError, match="at least one tier"):
        export_session(record, [], path)


def test_a_source_out_of_reach_may_have_the_chunk(ssd: SsdTier, far: SsdTier, path: Path) -> None:
    """The file would be cut for want of a retry."""
    record = chat(300).write(ssd).manifest

    def fail(when: str, operation: str, key: str) -> None:
        if key.endswith("c000003"):
            raise StoreUnavailable("no network")

    path.write_text("the old file")
    with pytest.raises(StoreUnavailable, match="no network"):
        export_session(record, [FaultyTier(ssd, fail), far], path)
    assert path.read_text() == "the old file"
    assert os.listdir(path.parent) == [path.name]
    assert export_session(record, [FaultyTier(ssd, fail), ssd], path).cut == ""


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_stopped_export_leaves_no_file(ssd: SsdTier, path: Path, after: int) -> None:
    record = chat(300).write(ssd).manifest
    answers = iter([False] * after + [True])
    with pytest.raises(Stopped, match=f"'chat' was stopped after {after} of 5 chunks"):
        export_session(record, [ssd], path, stopped=lambda: next(answers))
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere/chat.krul", "nowhere/chat.krul: No such file or directory"),
        ("file/chat.krul", "file/chat.krul: Not a directory"),
        ("directory", "directory: Is a directory"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_place_that_cannot_be_written_is_named(ssd: SsdTier, path: Path, name: str, says: str) -> None:
    record = chat(100).write(ssd).manifest
    (path.parent / "directory").mkdir()
    (path.parent / "file").touch()

    def asked(when: str, operation: str, key: str) -> None:
        pytest.fail(f"{operation} {key}: all that work for nothing")

    with pytest.raises(StoreUnavailable, match=says):
        export_session(record, [FaultyTier(ssd, asked)], path.parent / name)
    assert sorted(os.listdir(path.parent)) == ["directory", "file"]


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_what_cannot_be_a_file_name_is_refused(ssd: SsdTier, path: Path, name: str) -> None:
    record = chat(100).write(ssd).manifest
    with pytest.raises(BadArchive, match="cannot be the name of a file"):
        export_session(record, [ssd], path.parent / name)
    with pytest.raises(BadArchive, match="cannot be the name of a file"):
        take(path.parent / name, ssd)


def test_no_room_for_the_file(ssd: SsdTier, tmp_path: Path) -> None:
    record = chat(100).write(ssd).manifest
    with pytest.raises(KrulError, match="/dev/full"):  # a device is not replaced by a file
        export_session(record, [ssd], Path("/dev/full/x"))


# -- imports that must not be --


def refused(path: Path, tier: SsdTier, says: str) -> None:
    """The import of `path` is refused for that reason; `tier` is as before, and was not even asked."""
    before = files(tier.root)

    def asked(when: str, operation: str, key: str) -> None:
        pytest.fail(f"{operation} {key}")

    with pytest.raises(BadArchive) as info:
        take(path, FaultyTier(tier, asked))
    assert says in str(info.value)
    assert str(path) in str(info.value)
    assert info.value.status == 400
    assert files(tier.root) == before


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "begins with b'', an export of a session with b'KRULSESS'"),
        (b"KRUL", "begins with b'KRUL'"),
        (b"\x7fELF" + bytes(5000), "name a file that `krul sessions export` wrote"),
        (b"KRULSESS", "can't be trusted (length: 4 bytes expected at byte 8, 0 are left)"),
        (b"KRULSESS\x02\0\0\0" + bytes(100), "is an export of version 2, this server reads version 1"),
        (b"KRULSESS\x01\0\0\0", "12 bytes expected"),
        (b"KRULSESS\x01\0\0\0" + struct.pack("<4sQQ", b"MANI", 1 << 63, 0), "frame of 9223372036854775808"),
        (b"KRULSESS\x01\0\0\0" + struct.pack("<4sQQ", b"MANI", 1 << 20, 0), "1048576 bytes expected at"),
        (seal(b"KRULSESS\x01\0\0\0", 0), "frame b'END ' where the manifest is expected"),
        (seal(b"KRULSESS\x01\0\0\0" + frame(b"MANI", b"\xc1"), 0), "no msgpack"),
        (seal(b"KRULSESS\x01\0\0\0" + frame(b"MANI", b"\x90"), 0), "version None"),
    ],
)
def test_no_archive(ssd: SsdTier, path: Path, data: bytes, says: str) -> None:
    chat(100).write(ssd)
    path.write_bytes(data)
    refused(path, ssd, says)


def test_what_is_no_regular_file(ssd: SsdTier, path: Path) -> None:
    refused(path.parent, ssd, "is not a regular file")
    os.mkfifo(path)
    refused(path, ssd, "is not a regular file")


@pytest.mark.parametrize("name", ["missing", "file/below", "x" * 300])
def test_a_file_that_cannot_be_read_is_named(ssd: SsdTier, path: Path, name: str) -> None:
    (path.parent / "file").touch()
    with pytest.raises(StoreUnavailable, match=name):
        take(path.parent / name, ssd)
    with pytest.raises(StoreUnavailable, match=name):
        read_archive_manifest(path.parent / name)


def test_another_namespace_is_told_in_words(ssd: SsdTier, far: SsdTier, path: Path) -> None:
    session = chat(100)
    session.namespace = OTHER_NAMESPACE
    record = session.write(ssd).manifest
    export_session(record, [ssd], path)
    refused(path, far, f"made under namespace {OTHER_NAMESPACE}, this server has {NAMESPACE}: other weights")
    assert read_archive_manifest(path) == record


def test_a_manifest_of_another_version(ssd: SsdTier, far: SsdTier, path: Path) -> None:
    record = chat(100).write(ssd).manifest
    newer = msgspec.msgpack.encode(msgspec.structs.asdict(record) | {"version": 2, "more": [1]})
    path.write_bytes(archive(ssd, record, newer))
    refused(path, far, "version: manifest has version 2, this is version 1")


def test_what_follows_the_end(ssd: SsdTier, far: SsdTier, path: Path) -> None:
    data = archive(ssd, chat(100).write(ssd).manifest)
    for rest, count in ((b"\0", 1), (data, len(data))):
        path.write_bytes(data + rest)
        refused(path, far, f"{count} bytes after its end")


def test_frames_out_of_place(ssd: SsdTier, far: SsdTier, path: Path) -> None:
    """Each of them sealed as if it were right."""
    record = chat(100).write(ssd).manifest
    data = archive(ssd, record)[: -struct.calcsize("<4sQQQ32s")]
    start = 12 + 20 + len(encode_manifest(record))
    first = 20 + len(ssd.read_header(record.chunks[0].key) or b"") + 4 * LAYOUT.page_bytes
    head, one, two = data[:start], data[start : start + first], data[start + first :]
    for body, count, says in (
        (one + two, 1, "2 chunks, 1 expected"),
        (one, 2, "1 chunks, 2 expected"),
        (b"", 0, "none of the 2 chunks that the manifest names"),
        (two + one, 2, "identity: last_page_hash"),
        (one + one, 2, "identity: last_page_hash"),
        (one + two + two, 3, "more than the 2 chunks that the manifest names"),
        (one + frame(b"MANI", b"") + two, 2, "frame b'MANI' where a chunk or the end is expected"),
        (one + frame(b"END ", b"\0"), 1, "frame b'END ' where a chunk or the end is expected"),
    ):
        path.write_bytes(seal(head + body, count))
        refused(path, far, says)
    path.write_bytes(head + one + two + seal(head, 2)[len(head) :])
    refused(path, far, "its seal does not fit")
    path.write_bytes(seal(head + one, 1))
    assert take(path, far).stored_tokens == 64


def test_a_manifest_that_lies(ssd: SsdTier, far: SsdTier, path: Path) -> None:
    """All its checksums are right; it is another session's name, or other tokens, or nonsense."""
    record = chat(100).write(ssd).manifest
    other = SessionKey("other").digest
    chunks = [list(msgspec.structs.astuple(chunk)) for chunk in record.chunks]
    there = f"v1/{NAMESPACE}/{other}/"
    moved = [[there + chunk[0].rpartition("/")[2], *chunk[1:]] for chunk in chunks]
    for changes, says in (
        ({"session_id": "other"}, "is not that of session 'other'"),
        ({"session_id": "a\nb"}, "has the character"),
        ({"session_id": "x" * 300}, "has 300 characters"),
        ({"digest": "../../etc", "salted": True, "chunks": []}, "expected 64 hex characters"),
        ({"digest": other, "chunks": moved}, f"digest {other} is not that of session 'chat'"),
        ({"token_ids": bytes(400)}, "chunk 0 is not of the session's tokens"),
        ({"token_ids": b"\xff" * 400}, "manifest"),
        ({"raw_bytes": -1}, "raw_bytes -1"),
        ({"generation": 0}, "generation 0"),
        ({"more": 1}, "malformed"),
        ({"namespace": 5}, "malformed"),
        ({"chunks": [[*chunks[0][:5], 100], chunks[1]]}, "body of 24576 bytes, the manifest has 100"),
    ):
        lie = msgspec.structs.asdict(record) | {"chunks": chunks} | changes
        path.write_bytes(archive(ssd, record, msgspec.msgpack.encode(lie)))
        refused(path, far, says)


def test_a_body_that_the_file_has_no_room_for(ssd: SsdTier, far: SsdTier, path: Path) -> None:
    record = chat(64).write(ssd).manifest
    header = decode_header(ssd.read_header(record.chunks[0].key) or b"")
    *others, last = header.segments
    huge = encode_header(replace(header, segments=(*others, replace(last, length=1 << 38))))
    chunks = (msgspec.structs.replace(record.chunks[0], bytes=1 << 39),)
    data = archive(ssd, msgspec.structs.replace(record, chunks=()))[: -struct.calcsize("<4sQQQ32s")]
    data = data[:12] + frame(b"MANI", encode_manifest(msgspec.structs.replace(record, chunks=chunks)))
    path.write_bytes(seal(data + frame(b"CHNK", huge), 1))
    refused(path, far, f"{(1 << 38) + 2 * 4 * LAYOUT.page_segment_bytes} bytes expected")


def test_damage_at_the_very_end_is_found_before_anything_is_written(
    ssd: SsdTier, far: SsdTier, path: Path
) -> None:
    data = bytearray(archive(ssd, chat(300).write(ssd).manifest))
    data[-70] ^= 1  # in the last body
    path.write_bytes(data)
    refused(path, far, "checksum: segment has")


# -- a target that fails --


@pytest.mark.parametrize("error", [StoreFull("no room"), StoreUnavailable("no disk"), RuntimeError("a bug")])
@pytest.mark.parametrize(
    ("when", "where"), [("before", "c000003"), ("after", "c000003"), ("before", "manifest")]
)
def test_a_failed_put_leaves_the_old_session(
    ssd: SsdTier, far: SsdTier, path: Path, error: Exception, when: str, where: str
) -> None:
    chat(150, first=9).write(far)
    export_session(chat(300).write(ssd).manifest, [ssd], path)
    before = files(far.root)

    def fail(moment: str, operation: str, key: str) -> None:
        if (moment, operation) == (when, "put") and key.endswith(where):
            raise error

    with pytest.raises(type(error)):
        take(path, FaultyTier(far, fail))
    assert files(far.root) == before


def test_a_commit_that_is_in_place_is_not_taken_back(ssd: SsdTier, far: SsdTier, path: Path) -> None:
    chat(150, first=9).write(far)
    session = chat(300)
    export_session(session.write(ssd).manifest, [ssd], path)

    def fail(when: str, operation: str, key: str) -> None:
        if (when, operation) == ("after", "put") and key.endswith("manifest"):
            raise StoreUnavailable("fsync of the directory: EIO")

    with pytest.raises(StoreUnavailable):
        take(path, FaultyTier(far, fail))
    record = read_manifest(far, NAMESPACE, session.digest)
    assert record is not None
    assert record.generation == 2
    assert stored_kv(far, record) == true_chunks(session, record)


def test_a_full_target_leaves_the_old_session(ssd: SsdTier, tmp_path: Path, path: Path) -> None:
    export_session(chat(1000).write(ssd).manifest, [ssd], path)
    with open_ssd(tmp_path / "small", capacity_bytes=120_000) as small:
        chat(150).write(small)
        before = files(small.root)
        with pytest.raises(StoreFull, match="cap of 120000"):
            take(path, small)
        assert files(small.root) == before
        assert small.check() == []


@pytest.mark.parametrize("after", [0, 3, 5, 9])
def test_a_stopped_import_leaves_the_old_session(ssd: SsdTier, far: SsdTier, path: Path, after: int) -> None:
    chat(150, first=9).write(far)
    export_session(chat(300).write(ssd).manifest, [ssd], path)
    before = files(far.root)
    answers = iter([False] * after + [True])
    with pytest.raises(Stopped, match=f"importing {path} was stopped: nothing changed in ssd"):
        take(path, far, stopped=lambda: next(answers))
    assert files(far.root) == before


def test_a_damaged_manifest_in_the_target_does_not_hinder(ssd: SsdTier, far: SsdTier, path: Path) -> None:
    session = chat(300)
    record = session.write(ssd).manifest
    export_session(record, [ssd], path)
    far.put(f"v1/{NAMESPACE}/{record.digest}/manifest", b"nonsense", [])
    assert stored_kv(far, take(path, far)) == true_chunks(session, record)


def test_a_file_that_changes_while_it_is_imported(ssd: SsdTier, far: SsdTier, path: Path) -> None:
    chat(150, first=9).write(far)
    export_session(chat(300).write(ssd).manifest, [ssd], path)
    before = files(far.root)

    def change(when: str, operation: str, key: str) -> None:
        if (when, operation) == ("after", "put") and key.endswith("c000002"):
            with open(path, "r+b") as file:
                file.seek(-1000, os.SEEK_END)
                file.write(b"!")

    with pytest.raises(BadArchive, match="can't be trusted"):
        take(path, FaultyTier(far, change))
    assert files(far.root) == before


def test_the_target_is_held_while_it_is_written(ssd: SsdTier, far: SsdTier, path: Path) -> None:
    session = chat(100)
    export_session(session.write(ssd).manifest, [ssd], path)
    steps: list[str] = []

    def note(when: str, operation: str, key: str) -> None:
        if when == "before":
            steps.append(operation)

    @contextmanager
    def hold(digest: str) -> Iterator[None]:
        steps.append(f"hold {digest}")
        yield
        steps.append("let go")

    take(path, FaultyTier(far, note), hold=hold)
    assert steps == [f"hold {session.digest}", "read_header", "put", "put", "put", "let go"]

    @contextmanager
    def held(digest: str) -> Iterator[None]:
        raise LeaseHeld(f"{digest} is written by server B")
        yield

    before = files(far.root)
    with pytest.raises(LeaseHeld):
        take(path, far, hold=held)
    assert files(far.root) == before


class Killed(Exception):
    """The process is dead from here on."""


def test_killed_at_any_moment_the_target_has_the_old_session_or_the_new(
    ssd: SsdTier, tmp_path: Path, path: Path
) -> None:
    old, new = chat(170, first=9), chat(300)
    export_session(new.write(ssd).manifest, [ssd], path)
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
                take(path, FaultyTier(far, kill))
            except Killed:
                record = read_manifest(far, NAMESPACE, new.digest)
                assert record is not None
                outcomes.append("old" if record.tokens == 170 else "new")
                session = old if record.tokens == 170 else new
                assert stored_kv(far, record) == true_chunks(session, record)
                continue
            assert take(path, far).generation == 3
        break
    assert outcomes == sorted(outcomes, key=["old", "new"].index)
    assert set(outcomes) == {"old", "new"}
    assert len(outcomes) > 15


def test_a_file_of_another_key_is_refused(ssd: SsdTier, path: Path, tmp_path: Path) -> None:
    """Who may import could otherwise bring KV of his making, and exact pages are shared with others."""
    service_archive.export_session(chat(300).write(ssd).manifest, [ssd], path, key=b"somebody else's")
    with open_ssd(tmp_path / "target") as target:
        with pytest.raises(BadArchive, match=r"session\.archive_key \(set the same at both\)"):
            import_session(path, target, namespace=NAMESPACE, now=lambda: LATER)
        assert list(target.scan("")) == []


def test_the_key_is_made_once_and_kept(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: read_archive_key(Config(), home), range(32)))
    assert len(keys) == 1
    assert len(keys.pop()) == 32
    assert (home / "archive.key").stat().st_mode & 0o777 == 0o600
    assert [file.name for file in home.iterdir()] == ["archive.key"]
    named = replace(Config(), session=replace(SessionConfig(), archive_key="ours"))
    assert read_archive_key(named, home) == b"ours"


def test_a_key_that_cannot_be_kept_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable, match=r"archive\.key: .*set session\.archive_key"):
        read_archive_key(Config(), tmp_path / "file")

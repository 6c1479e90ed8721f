"""Damaged and forged archives: nothing but BadArchive comes out, and the target stays as it was."""

from __future__ import annotations

import hashlib
import struct
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_krul.errors import BadArchive
from sgl_krul.service import archive
from sgl_krul.session.catalog import read_manifest
from sgl_krul.session.record import Manifest, encode_manifest
from sgl_krul.store.ssd import SsdTier
from tests.sessions import LAYOUT, NAMESPACE, NOW, chat, files, open_ssd

ARCHIVE_KEY = b"the servers' own"
export_session = partial(archive.export_session, key=ARCHIVE_KEY)
import_session = partial(archive.import_session, key=ARCHIVE_KEY)
read_archive_manifest = partial(archive.read_archive_manifest, key=ARCHIVE_KEY)

TOKENS = 100  # two chunks


class World(NamedTuple):
    """A good archive, and a tier that has an older state of the session."""

    good: bytes
    record: Manifest
    headers: tuple[bytes, ...]
    path: Path
    tier: SsdTier
    before: dict[str, bytes]

    def refuses(self, data: bytes) -> bool:
        """Whether a file of these bytes is refused. The tier must be as before then."""
        self.path.write_bytes(data)
        try:
            import_session(self.path, self.tier, namespace=NAMESPACE, now=lambda: NOW)
        except BadArchive as error:
            message = str(error)
        else:
            return False
        assert str(self.path) in message
        assert files(self.tier.root) == self.before
        return True


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One for all examples: every one of them must leave it as it was."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        with open_ssd(root / "source") as source, open_ssd(root / "target") as target:
            record = chat(TOKENS).write(source).manifest
            export_session(record, [source], root / "good")
            headers = tuple(source.read_header(chunk.key) or b"" for chunk in record.chunks)
            chat(40, first=9).write(target)
            good = (root / "good").read_bytes()
            yield World(good, record, headers, root / "file", target, files(target.root))


def frame(kind: bytes, payload: bytes) -> bytes:
    head = struct.pack("<4sQ", kind, len(payload))
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + payload)) + payload


def sealed(manifest: bytes, rest: bytes, count: int) -> bytes:
    start = b"KRULSESS" + struct.pack("<I", 1) + frame(b"MANI", manifest) + rest
    return start + frame(b"END ", struct.pack("<Q32s", count, hashlib.sha256(start).digest()))


def test_every_flip_in_what_is_not_a_body_is_found(world: World) -> None:
    """Every byte of the start, of each frame, and of the end; and the bytes of bodies at their edges."""
    manifest = 12 + 20 + len(encode_manifest(world.record))
    first = manifest + 20 + len(world.headers[0])
    second = first + 4 * LAYOUT.page_bytes
    third = second + 20 + len(world.headers[1])
    end = third + 2 * LAYOUT.page_bytes
    assert end + 60 == len(world.good)
    spans = [(0, first + 2), (second - 2, third + 2), (end - 2, len(world.good))]
    for offset in (offset for low, high in spans for offset in range(low, high)):
        bad = bytearray(world.good)
        bad[offset] ^= 1 << offset % 8
        assert world.refuses(bytes(bad)), f"byte {offset}"


@given(st.data())
@settings(max_examples=300)
def test_any_other_byte_anywhere_is_found(world: World, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, len(world.good) - 1))
    mask = data.draw(st.integers(1, 255))
    bad = bytearray(world.good)
    bad[offset] ^= mask
    assert world.refuses(bytes(bad))


@given(st.data())
@settings(max_examples=300)
def test_any_truncation_is_found(world: World, data: st.DataObject) -> None:
    assert world.refuses(world.good[: data.draw(st.integers(0, len(world.good) - 1))])


def test_truncations_near_every_border_are_found(world: World) -> None:
    lengths = {*range(0, 60), *range(len(world.good) - 130, len(world.good)), *range(60, len(world.good), 97)}
    for length in sorted(lengths):
        assert world.refuses(world.good[:length]), f"{length} bytes"


@given(st.data())
@settings(max_examples=150)
def test_bytes_put_in_or_taken_out_are_found(world: World, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(world.good)))
    new = data.draw(st.binary(max_size=40))
    gone = data.draw(st.integers(0, 40))
    bad = world.good[:at] + new + world.good[at + gone :]
    assert bad == world.good or world.refuses(bad)


@given(st.binary(max_size=300))
@settings(max_examples=200)
def test_any_bytes_behind_a_good_start_are_refused(world: World, data: bytes) -> None:
    assert world.refuses(data)
    assert world.refuses(world.good[:12] + data)
    assert world.refuses(sealed(data, b"", 0))
    assert world.refuses(sealed(encode_manifest(world.record), data, 0))
    assert world.refuses(sealed(encode_manifest(world.record), frame(b"CHNK", data), 1))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
HARMLESS = ("exact", "generation", "paused_at", "raw_bytes", "salted", "stored_bytes")


@given(VALUES, st.data())
@settings(max_examples=300)
def test_a_well_sealed_manifest_of_nonsense_is_refused(
    world: World, value: object, data: st.DataObject
) -> None:
    """Every checksum is right. What is taken all the same (another time, say) is the session, whole."""
    fields = msgspec.structs.asdict(world.record)
    name = data.draw(st.sampled_from(sorted(fields)))
    body = world.good[12 + 20 + len(encode_manifest(world.record)) : -60]
    for nonsense in (value, {key: fields[key] for key in fields if key != name}):
        assert world.refuses(sealed(msgspec.msgpack.encode(nonsense), body, 2))
    forged = sealed(msgspec.msgpack.encode(fields | {name: value}), body, 2)
    world.path.write_bytes(forged)
    try:
        found = read_archive_manifest(world.path)
    except BadArchive:
        assert world.refuses(forged)
        return
    assert found == world.record or name in HARMLESS
    with tempfile.TemporaryDirectory() as directory, open_ssd(Path(directory) / "store") as tier:
        chat(40, first=9).write(tier)
        record = import_session(world.path, tier, namespace=NAMESPACE, now=lambda: NOW)
        assert read_manifest(tier, NAMESPACE, chat(0).digest) == record
        assert (record.generation, record.token_ids) == (2, world.record.token_ids)
        export_session(record, [tier], Path(directory) / "file")
        assert (Path(directory) / "file").read_bytes()[-60 - len(body) : -60] == body


@given(st.integers(0, TOKENS), st.integers(0, 7))
@settings(max_examples=20)
def test_what_is_exported_is_what_is_read(count: int, first: int) -> None:
    with tempfile.TemporaryDirectory() as directory, open_ssd(Path(directory) / "store") as tier:
        record = chat(count, first=first).write(tier).manifest
        path = Path(directory) / "file"
        export_session(record, [tier], path)
        assert read_archive_manifest(path) == record
        assert import_session(path, tier, namespace=NAMESPACE, now=lambda: NOW).generation == 2

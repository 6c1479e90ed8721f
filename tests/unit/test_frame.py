"""The chunk header, segment checks and the raw codec."""

from __future__ import annotations

import array
import hashlib
import struct
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
import xxhash

from sgl_krul.codec import (
    ChunkHeader,
    Mode,
    RawCodec,
    SegmentCodec,
    SegmentEntry,
    build_segments,
    decode_header,
    encode_header,
    expect,
    page_rows,
    token_digest,
    verify_segment,
)
from sgl_krul.errors import Corrupt
from sgl_krul.store import MemoryTier, SsdTier
from sgl_krul.store.tier import MAX_HEADER_BYTES

BODY = [[b"layer 0"], [b"lay", b"", b"er 1"], []]
HEADER = ChunkHeader(
    namespace="0123456789abcdef" * 2,
    last_page_hash="ab" * 32,
    token_digest=token_digest([1, 2, 3]),
    tokens=3,
    plan_id="raw",
    segments=build_segments([*BODY[:2], [b"layer 2"]], Mode.raw),
)
NOTHING = xxhash.xxh3_64_intdigest(b"")


def fields() -> dict[str, object]:
    """The payload of HEADER, to be changed."""
    payload = msgpack.unpackb(msgpack.unpackb(encode_header(HEADER))[2])
    assert isinstance(payload, dict)
    return payload


def seal(payload: object, version: object = 1) -> bytes:
    packed = msgpack.packb(payload)
    sealed = msgpack.packb([version, xxhash.xxh3_64_intdigest(packed), packed])
    assert isinstance(sealed, bytes)
    return sealed


def reason(data: bytes) -> str:
    with pytest.raises(Corrupt) as caught:
        decode_header(data)
    return caught.value.reason


def test_round_trip() -> None:
    assert decode_header(encode_header(HEADER)) == HEADER
    assert seal(fields()) == encode_header(HEADER)


def test_the_modes() -> None:
    assert [str(mode) for mode in Mode] == "recompute raw quantized shared lowrank patch predicted".split()
    assert Mode("raw") is Mode.raw
    assert decode_header(encode_header(HEADER)).segments[0].mode is Mode.raw


@pytest.mark.parametrize("version", [0, 2, -1, 1 << 40])
def test_another_version(version: int) -> None:
    assert reason(seal(fields(), version)) == "version"
    assert reason(msgpack.packb([version])) == "version"


@pytest.mark.parametrize("version", [True, 1.0, "1", None, [1]])
def test_a_version_that_is_no_integer(version: object) -> None:
    assert reason(seal(fields(), version)) == "length"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x93" * 2000,
        b"\xc7\x0c\xff" + b"\0" * 12,
        b"\xd6\xff\0\0\0\0",
        b"\x82\xc4\x01a\x01\xc4\x01a\x02",
        b"\x81\x90\x01",
        b"\xa1\xff",
        msgpack.packb({}),
        msgpack.packb([1]),
        msgpack.packb([1, 2, 3]),
        msgpack.packb([1, 2, b"", 4]),
        encode_header(HEADER) + b"\0",
    ],
)
def test_bytes_that_are_no_header(data: bytes) -> None:
    assert reason(data) in {"length", "checksum"}


def test_more_bytes_than_a_header_may_have_are_not_looked_at() -> None:
    with pytest.raises(Corrupt, match=f"at most {MAX_HEADER_BYTES} expected"):
        decode_header(bytes(MAX_HEADER_BYTES + 1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("namespace", ""),
        ("namespace", "a b"),
        ("namespace", "a\n"),
        ("namespace", "x" * 129),
        ("namespace", b"bytes"),
        ("last_page_hash", None),
        ("last_page_hash", "ä"),
        ("token_digest", "ab"),
        ("token_digest", "G" * 64),
        ("token_digest", 5),
        ("tokens", 0),
        ("tokens", (1 << 20) + 1),
        ("tokens", True),
        ("tokens", 3.0),
        ("plan_id", ["raw"]),
        ("segments", []),
        ("segments", {}),
        ("segments", None),
        ("segments", [["raw", 0, 0, 0]] * 4097),
        ("segments", ["raw"]),
        ("segments", [["raw", 0, 1]]),
        ("segments", [["raw", 0, 1, 2, 3]]),
        ("segments", [["zip", 0, 1, 2]]),
        ("segments", [[[], 0, 1, 2]]),
        ("segments", [["raw", 1, 1, 2]]),
        ("segments", [["raw", False, 1, 2]]),
        ("segments", [["raw", 0, -1, 2]]),
        ("segments", [["raw", 0, (1 << 40) + 1, 2]]),
        ("segments", [["raw", 0, 1 << 40, 2], ["raw", 1 << 40, 1, 2]]),
        ("segments", [["raw", 0, 1, -2]]),
        ("segments", [["raw", 0, 1, 2.0]]),
        ("segments", [["raw", 0, 2, 2], ["raw", 1, 2, 2]]),
        ("segments", [["raw", 0, 2, 2], ["raw", 3, 2, 2]]),
        ("segments", [["raw", 0, 0, NOTHING]]),
        ("segments", [["raw", 0, 2, 2], ["raw", 2, 0, NOTHING]]),
        ("segments", [["recompute", 0, 0, NOTHING], ["raw", 0, 2, 2]]),  # the plan says raw
    ],
)
def test_every_field_is_checked(field: str, value: object) -> None:
    assert reason(seal({**fields(), field: value})) == "length"


def test_fields_unknown_missing_or_in_another_order() -> None:
    assert reason(seal({**fields(), "more": 1})) == "length"
    for field in fields():
        rest = fields()
        value = rest.pop(field)
        assert reason(seal(rest)) == "length"
        if field != "segments":
            assert reason(seal({**rest, field: value})) == "length"
    assert reason(seal(list(fields()))) == "length"


def test_another_form_of_the_same_values() -> None:
    payload = msgpack.packb(fields())
    wide = payload.replace(b"\xa6tokens\x03", b"\xa6tokens\xcd\x00\x03")
    assert wide != payload
    assert reason(msgpack.packb([1, xxhash.xxh3_64_intdigest(wide), wide])) == "length"
    sealed = encode_header(HEADER)
    assert reason(b"\xdc\x00\x03" + sealed[1:]) == "length"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": 0}, "tokens 0"),
        ({"namespace": ""}, "namespace ''"),
        ({"token_digest": "xyz"}, "token_digest 'xyz'"),
        ({"segments": ()}, "segments"),
        ({"segments": (SegmentEntry(Mode.raw, 5, 1, 0),)}, "segment 0: offset 5, expected 0"),
    ],
)
def test_what_would_not_be_read_is_not_written(change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        encode_header(replace(HEADER, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_layers_that_are_recomputed_are_not_stored(depth: int) -> None:
    entries = build_segments([[b"a"], [b"bc"], [b"def"]], Mode.raw, depth=depth)
    assert [entry.mode for entry in entries] == [Mode.recompute] * depth + [Mode.raw] * (3 - depth)
    assert [entry.length for entry in entries] == [0] * depth + [1, 2, 3][depth:]
    lengths = [entry.length for entry in entries]
    assert [entry.offset for entry in entries] == [sum(lengths[:layer]) for layer in range(3)]
    header = replace(HEADER, plan_id="paper", segments=entries)
    assert decode_header(encode_header(header)) == header
    assert header.depth == depth
    for entry in entries[:depth]:
        verify_segment(entry, [])
        with pytest.raises(Corrupt, match="length"):
            verify_segment(entry, [b"x"])


@pytest.mark.parametrize(
    ("segments", "said"),
    [
        ([["recompute", 0, 1, NOTHING]], "mode recompute with 1 bytes"),
        ([["recompute", 0, 0, 0]], "mode recompute with 0 bytes and checksum 0000000000000000"),
        ([["recompute", 0, 0, NOTHING], ["raw", 0, 0, NOTHING]], "segment 1: mode raw without bytes"),
        ([["raw", 0, 1, 2], ["recompute", 1, 0, NOTHING]], "segment 1: mode recompute after a layer"),
        (
            [["recompute", 0, 0, NOTHING], ["quantized", 0, 1, 2], ["recompute", 1, 0, NOTHING]],
            "segment 2: mode recompute after a layer",
        ),
    ],
)
def test_what_is_not_stored_has_no_bytes_and_comes_first(segments: list[list[object]], said: str) -> None:
    with pytest.raises(Corrupt, match=said) as caught:
        decode_header(seal({**fields(), "plan_id": "paper", "segments": segments}))
    assert caught.value.reason == "length"


def test_layers_of_different_modes() -> None:
    modes = [Mode.raw, Mode.quantized, Mode.shared]
    entries = build_segments([[b"a"], [b"b", b"c"], [b"def"]], modes)
    assert [(entry.mode, entry.offset, entry.length) for entry in entries] == [
        (Mode.raw, 0, 1),
        (Mode.quantized, 1, 2),
        (Mode.shared, 3, 3),
    ]
    header = replace(HEADER, plan_id="k1-0123", segments=entries)
    assert decode_header(encode_header(header)) == header
    deeper = build_segments([[b"a"], [b"bc"], [b"def"]], modes, depth=2)
    assert [entry.mode for entry in deeper] == [Mode.recompute, Mode.recompute, Mode.shared]
    for wrong in ([], [Mode.raw], [*modes, Mode.raw]):
        with pytest.raises(ValueError, match=f"{len(wrong)} modes: expected 3"):
            build_segments([[b"a"], [b"bc"], [b"def"]], wrong)


@pytest.mark.parametrize(
    ("segments", "said"),
    [
        ([["lowrank", 0, 1, 2]], "segment 0: mode lowrank under a coded plan"),
        ([["raw", 0, 1, 2], ["patch", 1, 1, 2]], "segment 1: mode patch under a coded plan"),
        ([["predicted", 0, 1, 2]], "segment 0: mode predicted under a coded plan"),
        ([["quantized", 0, 0, NOTHING]], "segment 0: mode quantized without bytes"),
        ([["raw", 0, 1, 2], ["shared", 1, 0, NOTHING]], "segment 1: mode shared without bytes"),
        ([["shared", 0, 1, 2]], "segment 0: mode shared, and no other layer is stored"),
        (
            [["recompute", 0, 0, NOTHING], ["shared", 0, 1, 2]],
            "segment 1: mode shared, and no other layer is stored",
        ),
    ],
)
def test_what_no_coded_plan_stores(segments: list[list[object]], said: str) -> None:
    with pytest.raises(Corrupt, match=said) as caught:
        decode_header(seal({**fields(), "plan_id": "k1-0123", "segments": segments}))
    assert caught.value.reason == "length"


def test_a_header_of_the_greatest_size() -> None:
    entries = tuple(
        SegmentEntry(Mode.quantized, index << 20, 1 << 20, (1 << 64) - 1) for index in range(4096)
    )
    header = replace(HEADER, segments=entries, tokens=1 << 20, namespace="n" * 128, plan_id="p" * 128)
    assert decode_header(encode_header(header)) == header


def test_segments_follow_each_other() -> None:
    entries = build_segments(BODY, Mode.raw)
    assert [(entry.offset, entry.length) for entry in entries] == [(0, 7), (7, 7), (14, 0)]
    assert [entry.checksum for entry in entries] == [
        xxhash.xxh3_64_intdigest(data) for data in (b"layer 0", b"layer 1", b"")
    ]


def test_verify_takes_any_split() -> None:
    entry = build_segments(BODY, Mode.raw)[1]
    verify_segment(entry, [b"layer 1"])
    verify_segment(entry, [bytearray(b"l"), memoryview(b"ayer 1")])
    for buffers, why in (([b"layer 0"], "checksum"), ([b"layer 1", b"x"], "length"), ([], "length")):
        with pytest.raises(Corrupt) as caught:
            verify_segment(entry, buffers)
        assert caught.value.reason == why


@pytest.mark.parametrize("field", ["namespace", "last_page_hash", "token_digest", "tokens"])
def test_expect_names_the_field(field: str) -> None:
    wanted = {
        name: getattr(HEADER, name) for name in ("namespace", "last_page_hash", "token_digest", "tokens")
    }
    expect(HEADER, **wanted)
    with pytest.raises(Corrupt, match=field) as caught:
        expect(HEADER, **{**wanted, field: 4 if field == "tokens" else "other"})
    assert caught.value.reason == "identity"


def test_token_digest_is_of_little_endian_int32() -> None:
    ids = [0, 1, 65536, 2**31 - 1]
    expected = hashlib.sha256(struct.pack("<4i", *ids)).hexdigest()
    for form in (ids, tuple(ids), array.array("q", ids), np.array(ids, dtype=np.uint32), np.array(ids)[::1]):
        assert token_digest(form) == expected
    assert token_digest([]) == hashlib.sha256(b"").hexdigest()


@pytest.mark.parametrize("ids", [[-1], [2**31], [2**70], [1.5], ["1"], [[1]], [True, False]])
def test_what_is_no_token_id(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        token_digest(ids)


# -- raw --


def test_page_rows_joins_neighbours() -> None:
    layer = np.arange(40, dtype=np.uint8).reshape(10, 4)
    rows = page_rows(layer, np.array([2, 3, 4, 8, 7], dtype=np.int64))
    assert [row.nbytes for row in rows] == [12, 4, 4]
    assert b"".join(rows) == layer[[2, 3, 4, 8, 7]].tobytes()
    rows[0][0] = 99
    assert layer[2, 0] == 99
    assert page_rows(layer, np.array([], dtype=np.int64)) == []
    with pytest.raises(ValueError, match="C-contiguous"):
        page_rows(layer[:, :2], np.array([1], dtype=np.int64))


def test_raw_copies_nothing() -> None:
    codec: SegmentCodec = RawCodec(4)
    pages = [memoryview(bytearray(b"page")), memoryview(bytearray(b"two page"))]
    encoded = codec.encode(pages)
    assert b"".join(encoded) == b"pagetwo page"
    landed = codec.landing(pages, 12)
    landed[1][:3] = b"TWO"
    codec.decode(landed, pages)
    assert bytes(pages[1]) == b"TWO page"
    assert codec.mode is Mode.raw


def test_raw_refuses_what_is_not_whole_pages() -> None:
    codec = RawCodec(4)
    with pytest.raises(ValueError, match="5 bytes: expected a multiple of 4"):
        codec.encode([b"pages"])
    with pytest.raises(ValueError, match="multiple of 4"):
        codec.landing([memoryview(bytearray(3))], 3)
    with pytest.raises(ValueError, match="read-only"):
        codec.landing([memoryview(b"page")], 4)
    with pytest.raises(Corrupt, match="length: raw segment of 8 bytes"):
        codec.landing([memoryview(bytearray(4))], 8)
    with pytest.raises(ValueError, match="at least 1"):
        RawCodec(0)


def test_a_chunk_goes_to_ssd_and_comes_back(tmp_path: Path) -> None:
    """From the slots of one arena, through a file, into other slots of another, layer by layer."""
    layers, page, count = 5, 64, 16
    source, target = (
        MemoryTier(layers, page, 40 * layers * page),
        MemoryTier(layers, page, 40 * layers * page),
    )
    codec = RawCodec(page)
    rng = np.random.default_rng(1)
    slots = rng.permutation(40)[:count]
    for layer in range(layers):
        source.layer(layer)[slots] = rng.integers(256, size=(count, page), dtype=np.uint8)
    body = [codec.encode(page_rows(source.layer(layer), slots)) for layer in range(layers)]
    header = replace(HEADER, segments=build_segments(body, codec.mode))
    with SsdTier(tmp_path, capacity_bytes=1 << 20, free_space_floor_bytes=0, fsync="never") as tier:
        tier.put("chunk", encode_header(header), [buffer for segment in body for buffer in segment])
        stored = tier.read_header("chunk")
        assert stored is not None
        read = decode_header(stored)
        landing_slots = rng.permutation(40)[:count]
        for layer, entry in enumerate(read.segments):
            pages = page_rows(target.layer(layer), landing_slots)
            landed = codec.landing(pages, entry.length)
            tier.read_segments("chunk", entry.offset, landed)
            verify_segment(entry, landed)
            codec.decode(landed, pages)
            assert (target.layer(layer)[landing_slots] == source.layer(layer)[slots]).all()

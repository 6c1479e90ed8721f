"""Chunk headers and segments under damage: nothing changed is taken, nothing but Corrupt comes out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgpack
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_krul.codec import (
    ChunkHeader,
    Mode,
    SegmentEntry,
    build_segments,
    decode_header,
    encode_header,
    verify_segment,
)
from sgl_krul.codec.frame import CODED_PLANS, RAW_PLAN
from sgl_krul.errors import Corrupt

NOTHING = xxhash.xxh3_64_intdigest(b"")
TEXT = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=40)
BUFFERS = st.lists(st.binary(max_size=40), max_size=4)


def fits(plan: str, depth: int) -> bool:
    """Whether a plan id that is no coded plan's goes with so many layers that are not stored."""
    return not plan.startswith(CODED_PLANS) and (plan != RAW_PLAN or not depth)


@st.composite
def headers(draw: st.DrawFn) -> ChunkHeader:
    depth = draw(st.integers(0, 4))
    coded = draw(st.booleans())
    kinds = [Mode.raw, Mode.quantized, Mode.shared] if coded else [*Mode][1:]
    stored = st.sampled_from(kinds)
    parts = draw(
        st.lists(
            st.tuples(stored, st.integers(0, 1 << 30), st.integers(0, (1 << 64) - 1)),
            min_size=0 if depth else 1,
            max_size=8 - depth,
        )
    )
    entries = [SegmentEntry(Mode.recompute, 0, 0, NOTHING)] * depth
    offset = 0
    if coded and [mode for mode, *_ in parts] == [Mode.shared]:
        parts = [(Mode.quantized, *parts[0][1:])]  # a shared layer is never the only one
    for mode, length, checksum in parts:
        length = max(length, int(coded or mode is Mode.raw))
        entries.append(SegmentEntry(mode, offset, length, checksum))
        offset += length
    return ChunkHeader(
        namespace=draw(TEXT),
        last_page_hash=draw(TEXT),
        token_digest=draw(st.binary(min_size=32, max_size=32)).hex(),
        tokens=draw(st.integers(1, 1 << 20)),
        plan_id=CODED_PLANS + draw(TEXT) if coded else draw(TEXT.filter(lambda plan: fits(plan, depth))),
        segments=tuple(entries),
    )


def refused(data: bytes) -> bool:
    try:
        decode_header(data)
    except Corrupt:
        return True
    return False


@given(headers())
def test_round_trip(header: ChunkHeader) -> None:
    assert decode_header(encode_header(header)) == header


@given(headers(), st.data())
def test_modes_bytes_and_order_must_agree(header: ChunkHeader, data: st.DataObject) -> None:
    """A segment more: one without bytes where some are needed, with some where none may be, or too late."""
    end = sum(entry.length for entry in header.segments)
    leads = header.depth == len(header.segments)
    extra = data.draw(
        st.sampled_from(
            [
                SegmentEntry(Mode.raw, end, 0, NOTHING),
                SegmentEntry(Mode.recompute, end, 1, NOTHING),
                SegmentEntry(Mode.recompute, end, 0, NOTHING ^ 1),
                *([] if leads else [SegmentEntry(Mode.recompute, end, 0, NOTHING)]),
            ]
        )
    )
    payload = msgpack.unpackb(msgpack.unpackb(encode_header(header))[2])
    payload["segments"].append([extra.mode.value, extra.offset, extra.length, extra.checksum])
    packed = msgpack.packb(payload)
    sealed = msgpack.packb([1, xxhash.xxh3_64_intdigest(packed), packed])
    with pytest.raises(Corrupt, match="length"):
        decode_header(sealed)
    with pytest.raises(ValueError, match="mode"):
        encode_header(replace(header, segments=(*header.segments, extra)))


@given(headers())
@settings(max_examples=25, deadline=None)
def test_every_truncation_of_a_header_is_found(header: ChunkHeader) -> None:
    data = encode_header(header)
    assert all(refused(data[:length]) for length in range(len(data)))


@given(headers())
@settings(max_examples=15, deadline=None)
def test_every_flipped_bit_of_a_header_is_found(header: ChunkHeader) -> None:
    data = encode_header(header)
    for bit in range(8 * len(data)):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        assert refused(bytes(bad)), f"bit {bit}"


@given(BUFFERS)
@settings(max_examples=50, deadline=None)
def test_every_flipped_bit_and_truncation_of_a_body_is_found(buffers: list[bytes]) -> None:
    (entry,) = build_segments([buffers], Mode.raw)
    body = b"".join(buffers)
    verify_segment(entry, [body])
    for bit in range(8 * len(body)):
        bad = bytearray(body)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt, match="checksum"):
            verify_segment(entry, [bad])
    for length in range(len(body)):
        with pytest.raises(Corrupt, match="length"):
            verify_segment(entry, [body[:length]])


@given(BUFFERS, st.lists(st.integers(0, 160), max_size=5))
def test_the_split_into_buffers_does_not_matter(buffers: list[bytes], cuts: list[int]) -> None:
    body = b"".join(buffers)
    bounds = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    parts = [body[low:high] for low, high in pairwise(bounds)]
    assert build_segments([parts], Mode.raw) == build_segments([buffers], Mode.raw)


@given(st.binary(max_size=300))
@settings(max_examples=500)
def test_random_bytes_are_corrupt(data: bytes) -> None:
    assert refused(data)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.binary(), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(VALUES, headers(), st.data())
@settings(max_examples=300)
def test_well_sealed_nonsense_is_corrupt(value: object, header: ChunkHeader, data: st.DataObject) -> None:
    """A good checksum does not make a payload good: any value, alone or in the place of a field."""
    payload = msgpack.unpackb(msgpack.unpackb(encode_header(header))[2])
    field = data.draw(st.sampled_from(sorted(payload)))
    for nonsense in (value, {**payload, field: value}):
        packed = msgpack.packb(nonsense)
        sealed = msgpack.packb([1, xxhash.xxh3_64_intdigest(packed), packed])
        try:
            decoded = decode_header(sealed)
        except Corrupt:
            continue
        assert encode_header(decoded) == sealed  # the value happened to be a good one

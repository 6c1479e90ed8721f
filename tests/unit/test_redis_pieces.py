"""How bodies are cut into pieces, and how damaged shapes are met; no server."""

from __future__ import annotations

import random

import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from sgl_krul.errors import Corrupt
from sgl_krul.store.redis.pieces import (
    MAX_PIECE_BYTES,
    MAX_PIECES,
    Shape,
    check_stored_header,
    copy_parts,
    cut,
    decode_shape,
    encode_shape,
    plan_read,
)
from sgl_krul.store.redis.routes import slot_of

KIB, MIB = 1 << 10, 1 << 20
TOKEN = bytes(range(16))


def lengths_of(*segments: int) -> list[list[int]]:
    return [[view.nbytes for view in piece] for piece in cut([memoryview(bytes(size)) for size in segments])]


def shape_of(lengths: list[int], key: str = "a/b", header: bytes = b"h") -> Shape:
    return decode_shape(key, encode_shape(key, TOKEN, lengths, header))


@pytest.mark.parametrize(
    ("segments", "pieces"),
    [
        ((), []),
        ((0, 0), []),
        ((5,), [[5]]),
        ((100 * KIB, 100 * KIB, 56 * KIB), [[100 * KIB, 100 * KIB, 56 * KIB]]),
        ((100 * KIB, 100 * KIB, 56 * KIB + 1), [[100 * KIB, 100 * KIB], [56 * KIB + 1]]),
        ((393 * KIB, 393 * KIB), [[393 * KIB], [393 * KIB]]),
        ((393 * KIB, 10, 0, 10, 393 * KIB), [[393 * KIB], [10, 10], [393 * KIB]]),
        ((MIB, MIB + 1, 7), [[MIB], [MIB], [1], [7]]),
        ((3 * MIB,), [[MIB], [MIB], [MIB]]),
        ((256 * KIB, 1), [[256 * KIB], [1]]),
    ],
)
def test_a_piece_is_a_segment_or_a_part_or_small_neighbours(
    segments: tuple[int, ...], pieces: list[list[int]]
) -> None:
    assert lengths_of(*segments) == pieces


def test_too_many_pieces_are_refused() -> None:
    big = memoryview(bytes(200 * KIB))
    assert len(cut([big] * MAX_PIECES)) == MAX_PIECES
    with pytest.raises(ValueError, match="65537 pieces: expected at most 65536"):
        cut([big] * (MAX_PIECES + 1))


def test_nothing_is_copied() -> None:
    data = bytearray(2 * MIB)
    pieces = cut([memoryview(data)])
    data[MIB] = 7
    assert pieces[1][0][0] == 7


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    start=st.integers(0, 200),
)
def test_any_range_is_put_together_from_pieces(lengths: list[int], cuts: list[int], start: int) -> None:
    body = random.Random(1).randbytes(sum(lengths))
    shape = shape_of(lengths)
    offset = min(start, len(body))
    sizes = []
    room = len(body) - offset
    for size in cuts:
        sizes.append(min(size, room))
        room -= sizes[-1]
    buffers = [bytearray(size) for size in sizes]
    parts = list(plan_read(shape, offset, [memoryview(buffer) for buffer in buffers]))
    pieces = [body[shape.starts[part.piece] : shape.starts[part.piece + 1]] for part in parts]
    copy_parts("a/b", shape, parts, pieces)
    assert b"".join(buffers) == body[offset : offset + sum(sizes)]
    assert [part.piece for part in parts] == sorted({part.piece for part in parts})


@pytest.mark.parametrize("value", [None, b"", b"1234", b"123456", "12345", 5])
def test_a_piece_of_another_length_is_corrupt(value: object) -> None:
    shape = shape_of([5])
    parts = list(plan_read(shape, 0, [memoryview(bytearray(2))]))
    with pytest.raises(Corrupt) as caught:
        copy_parts("a/b", shape, parts, [value])
    assert caught.value.reason == "length"


def test_every_flipped_bit_of_a_shape_is_found() -> None:
    raw = encode_shape("a/b", TOKEN, [5, 300, MAX_PIECE_BYTES], b"h")
    assert decode_shape("a/b", raw).starts == (0, 5, 305, 305 + MAX_PIECE_BYTES)
    for bit in range(8 * len(raw)):
        bad = bytearray(raw)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt) as caught:
            decode_shape("a/b", bytes(bad))
        assert caught.value.reason == "checksum"
    for length in range(len(raw)):
        with pytest.raises(Corrupt):
            decode_shape("a/b", raw[:length])


def test_a_shape_of_another_key_is_found() -> None:
    with pytest.raises(Corrupt, match="checksum"):
        decode_shape("a/c", encode_shape("a/b", TOKEN, [5], b"h"))


def test_another_header_is_found() -> None:
    shape = shape_of([5], header=b"header")
    assert check_stored_header("a/b", shape, b"header") == b"header"
    for header in (b"", b"heades", b"header\0"):
        with pytest.raises(Corrupt, match="checksum"):
            check_stored_header("a/b", shape, header)
    with pytest.raises(Corrupt, match="length"):
        check_stored_header("a/b", shape, bytes((16 << 20) + 1))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (None, "version"),
        ([], "version"),
        ({"a": 1}, "version"),
        ([2, TOKEN, b"d" * 8, [5]], "version"),
        ([1], "length"),
        ([1, TOKEN, b"d" * 8], "length"),
        ([1, b"short", b"d" * 8, [5]], "length"),
        ([1, TOKEN, 8, [5]], "length"),
        ([1, TOKEN, b"d" * 8, 5], "length"),
        ([1, TOKEN, b"d" * 8, [0]], "length"),
        ([1, TOKEN, b"d" * 8, [-1]], "length"),
        ([1, TOKEN, b"d" * 8, [True]], "length"),
        ([1, TOKEN, b"d" * 8, ["5"]], "length"),
        ([1, TOKEN, b"d" * 8, [MAX_PIECE_BYTES + 1]], "length"),
        ([1, TOKEN, b"d" * 8, [1] * (MAX_PIECES + 1)], "length"),
    ],
)
def test_a_forged_shape_is_not_believed(fields: object, reason: str) -> None:
    packed = msgpack.packb(fields)
    with pytest.raises(Corrupt) as caught:
        decode_shape("a/b", packed + xxhash.xxh3_64_digest(b"a/b\0" + packed))
    assert caught.value.reason == reason


def test_bytes_that_are_no_msgpack() -> None:
    with pytest.raises(Corrupt, match="not msgpack"):
        decode_shape("a/b", b"\xc1" + xxhash.xxh3_64_digest(b"a/b\0\xc1"))
    with pytest.raises(Corrupt, match="length"):
        decode_shape("a/b", bytes(1 << 20))


def test_slots_are_those_of_redis_cluster() -> None:
    for tag in ("/", "/directories", "v1/a/b", "s0", "s1"):
        assert slot_of(tag) == key_slot(f"krul:{{{tag}}}/name".encode())

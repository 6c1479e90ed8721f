"""8 and 4 bits in groups: the bound on the error, the bytes as documented, what is refused."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pytest

from sgl_krul.codec.block import KvBlock
from sgl_krul.codec.quantized import GROUP, LARGEST, CastCodec, GroupCodec
from sgl_krul.errors import Corrupt
from sgl_krul.layout import KvLayout
from tests.blocks import DTYPES, block_of, layout_of, same

SHAPES = [(2, 8, 8), (3, 10, 7), (2, 48, 40), (3, 64, 64)]  # heads, numbers of K, of V
TOKENS = [1, 31, 32, 41, 123]


def group_slices(layout: KvLayout, tokens: int) -> Iterator[tuple[str, tuple[slice | int, slice | int]]]:
    """Where the groups lie in K and V of [tokens, channels], in the order documented: K's by tokens, then by
    channel, V's whole ones by token, then V's shorter ones."""
    k, v = layout.kv_heads * layout.head_dim, layout.kv_heads * layout.v_head_dim
    for first in range(0, tokens, GROUP):
        for channel in range(k):
            yield "k", (slice(first, min(first + GROUP, tokens)), channel)
    whole = v // GROUP * GROUP
    for token in range(tokens):
        for first in range(0, whole, GROUP):
            yield "v", (token, slice(first, first + GROUP))
    if whole < v:
        for token in range(tokens):
            yield "v", (token, slice(whole, v))


def flat(block: KvBlock) -> dict[str, np.ndarray[tuple[int, int], np.dtype[np.float32]]]:
    return {"k": block.k.reshape(block.tokens, -1), "v": block.v.reshape(block.tokens, -1)}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("heads", "k", "v"), SHAPES)
def test_no_number_is_off_by_more_than_half_a_step(
    bits: int, tokens: int, heads: int, k: int, v: int
) -> None:
    layout = layout_of(heads=heads, k=k, v=v)
    codec = GroupCodec(layout, bits)
    block = block_of(layout, tokens)
    data = codec.encode(block, None)
    assert len(data) == codec.length(tokens)
    exact, coded = flat(block), flat(codec.decode(memoryview(data), tokens, None))
    groups = 0
    for name, where in group_slices(layout, tokens):
        numbers = exact[name][where].astype(np.float64)
        low, high = numbers.min(), numbers.max()
        ulp = float(np.spacing(np.float16(abs(low))))
        step = (1 + 2**-10) * (high - low + ulp) / ((1 << bits) - 1) + 2**-24
        error = np.abs(coded[name][where] - numbers).max()
        assert error <= step / 2 + 1e-6 * (abs(low) + high - low)
        groups += 1
    assert len(data) == 4 * groups + -(-tokens * heads * (k + v) * bits // 8)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("heads", "k", "v", "tokens"), [(1, 3, 5, 41), (2, 24, 20, 70), (1, 1, 1, 1), (1, 3, 2, 3)]
)
def test_the_bytes_are_those_documented(bits: int, heads: int, k: int, v: int, tokens: int) -> None:
    """A second decoder, number by number, from the text at the head of the module."""
    layout = layout_of(heads=heads, k=k, v=v)
    codec = GroupCodec(layout, bits)
    data = codec.encode(block_of(layout, tokens), None)
    slices = list(group_slices(layout, tokens))
    groups, numbers = len(slices), tokens * heads * (k + v)
    zeros = struct.unpack_from(f"<{groups}e", data, 0)
    scales = struct.unpack_from(f"<{groups}e", data, 2 * groups)
    stored = data[4 * groups :]
    half = len(stored)
    codes = list(stored) if bits == 8 else [byte & 15 for byte in stored] + [byte >> 4 for byte in stored]
    assert half == (numbers if bits == 8 else (numbers + 1) // 2)
    assert not any(codes[numbers:])
    found = flat(codec.decode(memoryview(data), tokens, None))
    position = 0
    for together in runs_of_equal_groups(layout, tokens):
        members = [slices[index] for index in together]
        length = found[members[0][0]][members[0][1]].size
        for place in range(length):
            for index, (name, where) in zip(together, members, strict=True):
                expected = zeros[index] + scales[index] * codes[position]
                assert found[name][where][place] == pytest.approx(expected, rel=1e-6, abs=1e-6)
                position += 1
    assert position == numbers


def runs_of_equal_groups(layout: KvLayout, tokens: int) -> Iterator[range]:
    """Groups that are stored side by side: each 32 tokens of K, what is left of K, V's whole groups, V's
    shorter ones."""
    k, v = layout.kv_heads * layout.head_dim, layout.kv_heads * layout.v_head_dim
    first = 0
    counts = [k] * -(-tokens // GROUP) + [tokens * (v // GROUP), tokens if v % GROUP else 0]
    for count in counts:
        if count:
            yield range(first, first + count)
        first += count


@pytest.mark.parametrize(("bits", "per_number"), [(4, 5), (8, 9)])
def test_bits_a_number(bits: int, per_number: int) -> None:
    layout = layout_of(heads=3, k=64, v=64)
    assert GroupCodec(layout, bits).length(256) * 8 == per_number * 256 * 3 * 128
    assert CastCodec(layout).length(256) * 8 == 16 * 256 * 3 * 128


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, -3.5, 2**-24, -(2**-14), 59_968.0, -59_968.0])
def test_constant_groups_come_back_exactly(bits: int, number: float) -> None:
    layout = layout_of()
    block = KvBlock(np.full((41, 2, 8), number, np.float32), np.full((41, 2, 8), number, np.float32))
    codec = GroupCodec(layout, bits)
    assert same(codec.decode(memoryview(codec.encode(block, None)), 41, None), block)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("number", [1.0003, -1.0003, 1e-9, -1e-9, 1e-30, 12_345.678, -0.1])
def test_constant_groups_of_other_numbers(bits: int, number: float) -> None:
    """The step of float16 there is all that is left to divide."""
    layout = layout_of()
    block = KvBlock(np.full((3, 2, 8), number, np.float32), np.full((3, 2, 8), number, np.float32))
    codec = GroupCodec(layout, bits)
    read = codec.decode(memoryview(codec.encode(block, None)), 3, None)
    ulp = float(np.spacing(np.float16(abs(number))))
    assert np.abs(read.k - block.k).max() <= ulp / ((1 << bits) - 1) + 2**-25


@pytest.mark.parametrize("bits", [4, 8])
def test_a_level_far_from_zero_is_not_clipped(bits: int) -> None:
    """Keys with a bias: float16 has steps of .125 there, the numbers lie within 1."""
    layout = layout_of(heads=1, k=4, v=4)
    rng = np.random.default_rng(1)
    numbers = (200 + rng.random((64, 1, 4))).astype(np.float32)
    codec = GroupCodec(layout, bits)
    read = codec.decode(memoryview(codec.encode(KvBlock(numbers, -numbers), None)), 64, None)
    step = (1 + 0.125) * (1 + 2**-10) / ((1 << bits) - 1)
    for found, exact in ((read.k, numbers), (read.v, -numbers)):
        assert np.abs(found - exact).max() <= step / 2 + 1e-4


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan, 60_001.0, -65_504.0, 1e30])
@pytest.mark.parametrize("where", ["k", "v"])
def test_numbers_that_are_refused(bits: int, number: float, where: str) -> None:
    layout = layout_of()
    block = block_of(layout, 41)
    getattr(block, where)[40, 1, 7] = number
    with pytest.raises(ValueError, match="expected finite ones within 60,000"):
        GroupCodec(layout, bits).encode(block, None)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_numbers_stay_within_float16(bits: int) -> None:
    layout = layout_of("float16")
    rng = np.random.default_rng(2)
    numbers = rng.uniform(-LARGEST, LARGEST, (41, 2, 8)).astype(np.float32)
    numbers[::3], numbers[1::3] = LARGEST, -LARGEST
    codec = GroupCodec(layout, bits)
    read = codec.decode(memoryview(codec.encode(KvBlock(numbers, numbers), None)), 41, None)
    for array in (read.k, read.v):
        assert np.isfinite(array.astype(np.float16)).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_and_zeros_that_no_encoder_writes(bits: int) -> None:
    layout = layout_of()
    codec = GroupCodec(layout, bits)
    good = codec.encode(block_of(layout, 3), None)
    groups = 16 + 3
    for at, number in (
        (0, np.nan),
        (0, np.inf),
        (2 * groups, np.nan),
        (2 * groups, -1.0),
        (2 * groups, -np.inf),
    ):
        bad = bytearray(good)
        struct.pack_into("<e", bad, at, number)
        with pytest.raises(Corrupt, match="length: a zero or scale"):
            codec.decode(memoryview(bad), 3, None)


def test_a_half_byte_left_over_is_zero() -> None:
    layout = layout_of(heads=1, k=1, v=2)
    codec = GroupCodec(layout, 4)
    data = bytearray(codec.encode(block_of(layout, 3), None))
    assert data[-1] < 16
    data[-1] |= 0x10
    with pytest.raises(Corrupt, match="bits after the last number"):
        codec.decode(memoryview(data), 3, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sixteen_bits_hold_every_number(dtype: str) -> None:
    layout = layout_of(dtype)
    block = block_of(layout, 5)
    block.k[0, 0, :3] = np.inf, -np.inf, np.nan
    codec = CastCodec(layout)
    data = codec.encode(block, None)
    read = codec.decode(memoryview(data), 5, None)
    assert len(data) == codec.length(5) == 2 * 5 * 32
    assert np.array_equal(read.k[0, 0, :3], block.k[0, 0, :3], equal_nan=True)
    rest = np.isfinite(block.k)
    bound = 2.0**-11 if dtype == "float16" else 2.0**-8
    assert (np.abs(read.k[rest] - block.k[rest]) <= bound * np.abs(block.k[rest])).all()


def test_other_bits_bases_and_shapes_are_refused() -> None:
    layout = layout_of()
    block = block_of(layout, 3)
    with pytest.raises(ValueError, match="bits 5: expected 4 or 8"):
        GroupCodec(layout, 5)
    for codec in (CastCodec(layout), GroupCodec(layout, 4)):
        with pytest.raises(ValueError, match="expected none"):
            codec.encode(block, block)
        with pytest.raises(ValueError, match="heads and dimensions"):
            codec.encode(block_of(layout_of(k=4), 3), None)

"""Pages to fp32 blocks and back, 16 bits a number, and the first tokens of a session."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from sgl_krul.codec.block import (
    KvBlock,
    from_bits16,
    from_pages,
    join_blocks,
    pack16,
    to_bits16,
    to_pages,
    unpack16,
)
from sgl_krul.codec.sinks import decode_sinks, encode_sinks, sink_bytes, sink_tokens, split_sinks
from sgl_krul.errors import Corrupt
from tests.blocks import DTYPES, block_of, layout_of, pages_of_block, same

TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def torch_page(block: KvBlock, first: int, size: int, dtype: str) -> bytes:
    """A page segment made with torch alone: K of its tokens, then V."""
    parts = [torch.from_numpy(array[first : first + size]).to(TORCH[dtype]) for array in (block.k, block.v)]
    return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "k", "v", "page", "pages"), [(2, 8, 8, 16, 3), (3, 10, 7, 1, 41), (1, 5, 3, 4, 1)]
)
def test_pages_are_those_of_torch(dtype: str, heads: int, k: int, v: int, page: int, pages: int) -> None:
    layout = layout_of(dtype, heads=heads, k=k, v=v, page=page)
    block = block_of(layout, page * pages)
    expected = [torch_page(block, first, page, dtype) for first in range(0, page * pages, page)]
    assert pages_of_block(block, layout) == b"".join(expected)
    read = from_pages(expected, layout)
    assert read.k.shape == (page * pages, heads, k)
    assert read.v.shape == (page * pages, heads, v)
    rounded = [torch.from_numpy(array).to(TORCH[dtype]).float().numpy() for array in (block.k, block.v)]
    assert same(read, KvBlock(*rounded))


def test_buffers_may_hold_any_number_of_pages() -> None:
    layout = layout_of("bfloat16", page=4)
    block = block_of(layout, 24)
    whole = pages_of_block(block, layout)
    size = layout.page_segment_bytes
    cuts = [0, 2, 2, 5, 6]
    parts = [bytes(whole[a * size : b * size]) for a, b in pairwise(cuts)]
    assert same(from_pages(parts, layout), from_pages([whole], layout))
    out = [bytearray(len(part)) for part in parts]
    to_pages(block, layout, [memoryview(part) for part in out])
    assert out == parts
    assert from_pages([], layout).tokens == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_come_back_bit_for_bit(dtype: str) -> None:
    """Every number the pool can hold: infinities, signed zeros, subnormals, NaN with their payloads."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    if dtype == "float32":
        bits = (bits.astype(np.uint32) << 16 | 0x1234).view(np.uint16)
    layout = layout_of(dtype, heads=4, k=32, v=32, page=16)
    pages = bits.tobytes()
    out = bytearray(len(pages))
    to_pages(from_pages([pages], layout), layout, [memoryview(out)])
    if dtype == "float16":  # the processor makes signalling NaN quiet ones
        made, found = np.frombuffer(out, np.float16), np.frombuffer(pages, np.float16)
        nan = np.isnan(found)
        assert np.isnan(made[nan]).all()
        assert (made.view(np.uint16)[~nan] == bits[~nan]).all()
    else:
        assert out == pages


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    ties = bits[:50_000] & 0xFFFF0000 | 0x8000
    edges = np.array([0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0x7F7F7FFF, 0x00000001, 0x00008000], np.uint32)
    numbers = np.concatenate([bits, ties, edges]).view(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    made = from_bits16(to_bits16(numbers, layout_of("bfloat16")), layout_of("bfloat16"))
    assert np.array_equal(made, torch.from_numpy(numbers).to(torch.bfloat16).float().numpy())


def test_nan_stays_nan() -> None:
    patterns = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF80FFFF, 0x7FC00000, 0xFFFF8000], np.uint32)
    for dtype in DTYPES:
        made = from_bits16(to_bits16(patterns.view(np.float32), layout_of(dtype)), layout_of(dtype))
        assert np.isnan(made).all()
        assert (np.signbit(made) == (patterns >> 31).astype(bool)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sixteen_bits(dtype: str) -> None:
    """float16 in a float16 pool, bfloat16 else; exact but in a float32 pool."""
    layout = layout_of(dtype, heads=3, k=5, v=7)
    block = from_pages([pages_of_block(block_of(layout, 11), layout)], layout)
    data = pack16(block, layout)
    assert len(data) == 2 * 11 * 3 * 12
    read = unpack16(memoryview(data), 11, layout)
    kind = torch.float16 if dtype == "float16" else torch.bfloat16
    assert same(read, KvBlock(*(torch.from_numpy(a).to(kind).float().numpy() for a in (block.k, block.v))))
    assert same(read, block) == (dtype != "float32")
    with pytest.raises(ValueError, match="expected 792 for 11 tokens"):
        unpack16(memoryview(data)[1:], 11, layout)


def test_numbers_beyond_float16_become_infinities() -> None:
    layout = layout_of("float16")
    block = KvBlock(np.full((1, 2, 8), 7e4, np.float32), np.full((1, 2, 8), -1e30, np.float32))
    read = from_pages([pages_of_block(block, layout)], layout)
    assert np.isposinf(read.k).all()
    assert np.isneginf(read.v).all()


def test_what_is_no_block() -> None:
    good = np.zeros((3, 2, 8), np.float32)
    for k, v in ((good.astype(np.float64), good), (good, good[0]), (good, good[:2]), (good, good[:, :1])):
        with pytest.raises(ValueError, match="expected"):
            KvBlock(k, v)


def test_what_are_no_pages_of_a_block() -> None:
    layout = layout_of("float16", page=4)
    block = block_of(layout, 8)
    size = layout.page_segment_bytes
    with pytest.raises(ValueError, match="multiple of"):
        from_pages([bytes(size + 1)], layout)
    with pytest.raises(ValueError, match="multiple of"):
        to_pages(block, layout, [memoryview(bytearray(size - 1))])
    with pytest.raises(ValueError, match="read-only"):
        to_pages(block, layout, [memoryview(bytes(2 * size))])
    with pytest.raises(ValueError, match="pages for 4 tokens: expected room for 8"):
        to_pages(block, layout, [memoryview(bytearray(size))])
    with pytest.raises(ValueError, match="heads and dimensions"):
        to_pages(block, layout_of("float16", page=4, k=4, v=12), [memoryview(bytearray(2 * size))])


# -- first tokens --


@pytest.mark.parametrize(
    ("tokens", "first_token", "kept"), [(1, 0, 1), (3, 0, 3), (4, 0, 4), (41, 0, 4), (41, 1, 0), (1, 256, 0)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_four_tokens_are_kept_apart(dtype: str, tokens: int, first_token: int, kept: int) -> None:
    layout = layout_of(dtype, k=5, v=3)
    block = from_pages([pages_of_block(block_of(layout, tokens), layout)], layout)
    sinks, rest = split_sinks(block, first_token)
    assert (sinks.tokens, rest.tokens) == (kept, tokens - kept)
    assert sink_tokens(tokens, first_token) == kept
    assert same(join_blocks([sinks, rest]), block)
    data = encode_sinks(sinks, layout)
    assert len(data) == sink_bytes(tokens, first_token, layout) == kept * 2 * 16
    read, left = decode_sinks(memoryview(data + b"more"), tokens, first_token, layout)
    assert bytes(left) == b"more"
    if dtype != "float32":
        assert same(read, sinks)
    assert np.allclose(read.k, sinks.k, rtol=2**-8, atol=0)


def test_first_tokens_cut_short() -> None:
    layout = layout_of()
    data = encode_sinks(block_of(layout, 4), layout)
    with pytest.raises(Corrupt, match="length: 255 bytes, the first tokens alone take 256"):
        decode_sinks(memoryview(data)[:-1], 9, 0, layout)

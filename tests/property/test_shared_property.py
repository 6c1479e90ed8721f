"""MiniCache's merge over any numbers and any bytes."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from sgl_krul.codec.block import KvBlock
from sgl_krul.codec.shared import MergedPair
from sgl_krul.errors import Corrupt
from sgl_krul.layout import KvLayout

NUMBERS = st.one_of(
    st.floats(-4, 4, width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-38, 1e-30, 1e30, -1e30]),
)
DTYPES = st.sampled_from(["float32", "bfloat16"])


@st.composite
def layouts(draw: st.DrawFn, dtypes: st.SearchStrategy[str] = DTYPES) -> KvLayout:
    heads, dim, v_dim = (draw(st.integers(1, 3)) for _ in range(3))
    return KvLayout(2, heads, dim, v_dim, draw(dtypes), 1, "none")


@st.composite
def blocks(draw: st.DrawFn, layout: KvLayout, tokens: int) -> KvBlock:
    shapes = [(tokens, layout.kv_heads, width) for width in (layout.head_dim, layout.v_head_dim)]
    return KvBlock(*(draw(arrays.arrays(np.float32, shape, elements=NUMBERS)) for shape in shapes))


def lengths(array: NDArray[np.float32]) -> NDArray[np.float64]:
    return np.linalg.norm(array.reshape(array.shape[0], -1).astype(np.float64), axis=1)


def angles(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float64]:
    """Between the vectors of each token, 0 where one of them is zero."""
    units = []
    for array in (a, b):
        rows = array.reshape(array.shape[0], -1).astype(np.float64)
        size = np.linalg.norm(rows, axis=1, keepdims=True)
        units.append(np.divide(rows, size, out=np.zeros_like(rows), where=size > 0))
    u, v = units
    both = u.any(axis=1) & v.any(axis=1)
    angle = 2 * np.arctan2(np.linalg.norm(u - v, axis=1), np.linalg.norm(u + v, axis=1))
    return np.where(both, angle, 0.0)


@given(st.data())
@settings(max_examples=300)
def test_no_vector_turns_further_than_its_part_of_the_angle(data: st.DataObject) -> None:
    """And each keeps its length, whatever the numbers: zero, opposite, subnormal or 1e30."""
    layout = data.draw(layouts())
    tokens = data.draw(st.integers(1, 9))
    owner, partner = (data.draw(blocks(layout, tokens)) for _ in range(2))
    share = data.draw(st.sampled_from([0.0, 0.5, 0.6, 1.0]))
    pair = MergedPair(layout, share=share, gamma=data.draw(st.sampled_from([0.0, 0.05, 1.0])))
    own, other = pair.encode(owner, partner)
    low = pair.decode_owner(memoryview(own), tokens)
    high = pair.decode_partner(memoryview(other), memoryview(own), tokens)
    for found, exact, part in ((low, owner, share), (high, partner, 1 - share)):
        for name in ("k", "v"):
            x, y = getattr(owner, name), getattr(partner, name)
            turn = part * angles(x, y)
            bound = (2 * np.sin(turn / 2) + 2**-7) * lengths(getattr(exact, name)) + 1e-39
            assert (lengths(getattr(found, name) - getattr(exact, name)) <= bound).all()
            # A kept row is rounded number by number, hence 2^-8; numbers below 1e-38 have fewer bits.
            np.testing.assert_allclose(
                lengths(getattr(found, name)), lengths(getattr(exact, name)), rtol=2**-8, atol=1e-39
            )


@given(st.data())
@settings(max_examples=300)
def test_any_bytes_are_corrupt_or_a_block(data: st.DataObject) -> None:
    layout = data.draw(layouts(st.sampled_from(["float32", "bfloat16", "float16"])))
    tokens = data.draw(st.integers(1, 9))
    pair = MergedPair(layout)
    size = pair.owner_bytes(tokens)
    own = data.draw(st.binary(max_size=size + 4) | st.binary(min_size=size, max_size=size))
    other = data.draw(st.binary(max_size=200))
    for decoded in (_owner(pair, own, tokens), _partner(pair, own, other, tokens)):
        assert decoded is None or _is_block(decoded, layout, tokens)


@given(st.data())
@settings(max_examples=300)
def test_changed_bytes_are_corrupt_or_a_block(data: st.DataObject) -> None:
    layout = data.draw(layouts(st.sampled_from(["float32", "bfloat16", "float16"])))
    tokens = data.draw(st.integers(1, 9))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    shapes = [(tokens, layout.kv_heads, width) for width in (layout.head_dim, layout.v_head_dim)]
    layers = [KvBlock(*(rng.normal(size=s).astype(np.float32) for s in shapes)) for _ in range(2)]
    pair = MergedPair(layout)
    segments = [bytearray(part) for part in pair.encode(*layers)]
    target = segments[data.draw(st.integers(0, 1))]
    target[data.draw(st.integers(0, len(target) - 1))] ^= data.draw(st.integers(1, 255))
    own, other = map(bytes, segments)
    for decoded in (_owner(pair, own, tokens), _partner(pair, own, other, tokens)):
        assert decoded is None or _is_block(decoded, layout, tokens)


@given(st.data())
@settings(max_examples=100)
def test_truncated_bytes_are_corrupt(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    tokens = data.draw(st.integers(1, 9))
    pair = MergedPair(layout)
    own, other = pair.encode(*(data.draw(blocks(layout, tokens)) for _ in range(2)))
    cut = data.draw(st.integers(0, len(own) - 1))
    assert _owner(pair, own[:cut], tokens) is None
    assert _partner(pair, own[:cut], other, tokens) is None
    assert _partner(pair, own, other[: data.draw(st.integers(0, len(other) - 1))], tokens) is None


def _owner(pair: MergedPair, own: bytes, tokens: int) -> KvBlock | None:
    try:
        return pair.decode_owner(memoryview(own), tokens)
    except Corrupt:
        return None


def _partner(pair: MergedPair, own: bytes, other: bytes, tokens: int) -> KvBlock | None:
    try:
        return pair.decode_partner(memoryview(other), memoryview(own), tokens)
    except Corrupt:
        return None


def _is_block(found: KvBlock, layout: KvLayout, tokens: int) -> bool:
    assert found.k.shape == (tokens, layout.kv_heads, layout.head_dim)
    assert found.v.shape == (tokens, layout.kv_heads, layout.v_head_dim)
    return all(math.isfinite(float(np.abs(array).max())) for array in (found.k, found.v))

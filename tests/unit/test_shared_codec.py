"""Raw sharing and MiniCache's merge: against the formula, at its singular points, and under wrong bytes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from sgl_krul.codec.base import Mode
from sgl_krul.codec.block import KvBlock, from_bits16, to_bits16
from sgl_krul.codec.layer_codec import LayerCodec, PairCodec
from sgl_krul.codec.shared import MergedPair, RawSharing, retained_tokens, slerp_weights
from sgl_krul.errors import Corrupt
from sgl_krul.layout import KvLayout

Array = NDArray[np.float32]


def layout(dtype: str = "bfloat16", heads: int = 3, dim: int = 8, v_dim: int = 4) -> KvLayout:
    return KvLayout(4, heads, dim, v_dim, dtype, 16, "none")


LAYOUT = layout()


def block(tokens: int, seed: int, shape: KvLayout = LAYOUT, scale: float = 1.0) -> KvBlock:
    rng = np.random.default_rng(seed)
    k = rng.normal(size=(tokens, shape.kv_heads, shape.head_dim)) * scale
    v = rng.normal(size=(tokens, shape.kv_heads, shape.v_head_dim)) * scale
    return KvBlock(k.astype(np.float32), v.astype(np.float32))


def near(base: KvBlock, seed: int, distance: float = 0.3) -> KvBlock:
    """Another layer, about `distance` away from the directions of `base`."""
    rng = np.random.default_rng(seed)
    arrays = [x + distance * rng.normal(size=x.shape).astype(np.float32) for x in (base.k, base.v)]
    return KvBlock(*arrays)


def round_trip(
    pair: MergedPair, owner: KvBlock, partner: KvBlock
) -> tuple[tuple[KvBlock, KvBlock], tuple[bytes, bytes]]:
    own, other = pair.encode(owner, partner)
    decoded = pair.decode_owner(memoryview(own), owner.tokens)
    second = pair.decode_partner(memoryview(other), memoryview(own), owner.tokens)
    return (decoded, second), (own, other)


def vectors(array: Array) -> NDArray[np.float64]:
    return array.reshape(array.shape[0], -1).astype(np.float64)


def merged_by_formula(x: Array, y: Array, share: float, gamma: float) -> list[NDArray[np.float64]]:
    """MiniCache token by token, in plain Python floats: the two layers [n, w]. Kept tokens as they are."""
    rows = list(zip(vectors(x).tolist(), vectors(y).tolist(), strict=True))
    angles = []
    for a, b in rows:
        dot = sum(p * q for p, q in zip(a, b, strict=True))
        angles.append(math.acos(max(-1.0, min(1.0, dot / (math.hypot(*a) * math.hypot(*b))))))
    limit = max(angles) - gamma * (max(angles) - min(angles))
    layers: list[list[list[float]]] = [[], []]
    for (a, b), angle in zip(rows, angles, strict=True):
        if angle > limit:
            merged = [a, b]
        else:
            left = math.sin((1 - share) * angle) / math.sin(angle) / math.hypot(*a)
            right = math.sin(share * angle) / math.sin(angle) / math.hypot(*b)
            e = [left * p + right * q for p, q in zip(a, b, strict=True)]
            merged = [[math.hypot(*own) * p / math.hypot(*e) for p in e] for own in (a, b)]
        for layer, row in zip(layers, merged, strict=True):
            layer.append(row)
    return [np.array(layer) for layer in layers]


def worst(found: Array, expected: NDArray[np.float64]) -> float:
    """The largest error of a token's vector, relative to its length."""
    error = np.linalg.norm(vectors(found) - expected, axis=1)
    return float((error / np.linalg.norm(expected, axis=1)).max())


@pytest.mark.parametrize("tokens", [2, 41, 123, 256])
@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 2**-8), ("float32", 2**-8), ("float16", 2**-11)])
def test_the_merge_is_the_formula(tokens: int, dtype: str, bound: float) -> None:
    shape = layout(dtype)
    owner = block(tokens, 1, shape)
    partner = near(owner, 2, 0.8)
    (low, high), _ = round_trip(MergedPair(shape), owner, partner)
    for name in ("k", "v"):
        expected = merged_by_formula(getattr(owner, name), getattr(partner, name), 0.6, 0.05)
        assert worst(getattr(low, name), expected[0]) < bound
        assert worst(getattr(high, name), expected[1]) < bound


@pytest.mark.parametrize(("share", "same"), [(0.0, "owner"), (1.0, "partner")])
def test_the_ends_of_the_arc(share: float, same: str) -> None:
    layers = {"owner": block(50, 1), "partner": block(50, 2)}
    (low, high), _ = round_trip(
        MergedPair(LAYOUT, share=share, gamma=0.0), layers["owner"], layers["partner"]
    )
    decoded = {"owner": low, "partner": high}
    assert worst(decoded[same].k, vectors(layers[same].k)) < 2**-8
    other = "partner" if same == "owner" else "owner"
    assert worst(decoded[other].k, vectors(layers[other].k)) > 0.5


def test_lengths_are_kept() -> None:
    """To float32's rounding, though bfloat16 directions alone would miss them by up to 1e-3 each."""
    owner = block(200, 1)
    (low, high), _ = round_trip(MergedPair(LAYOUT, gamma=0.0), owner, block(200, 2))
    for found, exact in ((low, owner), (high, block(200, 2))):
        for name in ("k", "v"):
            lengths = [np.linalg.norm(vectors(getattr(part, name)), axis=1) for part in (found, exact)]
            np.testing.assert_allclose(*lengths, rtol=1e-6)


def test_equal_layers_cost_their_rounding_only() -> None:
    owner = block(100, 1)
    (low, high), (_, other) = round_trip(MergedPair(LAYOUT, gamma=0.0), owner, owner)
    for found in (low, high):
        assert worst(found.k, vectors(owner.k)) < 2**-8
        assert worst(found.v, vectors(owner.v)) < 2**-8
    assert len(other) == 100 * 8


def _bitmaps(own: bytes, tokens: int) -> tuple[bytes, bytes]:
    size = (tokens + 7) // 8
    return own[:size], own[size : 2 * size]


def turned(tokens: int, angles: list[float]) -> tuple[KvBlock, KvBlock]:
    """Two layers whose vectors are `angles` (radians) apart, K and V alike."""
    arrays: list[list[Array]] = [[], []]
    for width in (LAYOUT.head_dim, LAYOUT.v_head_dim):
        x = np.zeros((tokens, LAYOUT.kv_heads, width), np.float32)
        y = np.zeros_like(x)
        x[:, 0, 0] = 3.0
        y[:, 0, 0], y[:, 1, 1] = 5.0 * np.cos(angles), 5.0 * np.sin(angles)
        arrays[0].append(x)
        arrays[1].append(y)
    return KvBlock(*arrays[0]), KvBlock(*arrays[1])


def test_the_tokens_least_alike_are_kept() -> None:
    angles = [0.2, 1.17, 0.4, 1.14, 1.2, 0.21]  # the top 5% of 0.2 to 1.2 begin at 1.15
    owner, partner = turned(6, angles)
    (low, high), _ = round_trip(MergedPair(LAYOUT), owner, partner)
    kept = [1, 4]
    merged = [0, 2, 3, 5]
    rounded = from_bits16(to_bits16(partner.k, LAYOUT), LAYOUT)
    np.testing.assert_array_equal(low.k[kept], owner.k[kept])
    np.testing.assert_array_equal(high.k[kept], rounded[kept])
    turn = np.arccos(np.clip(np.einsum("nw,nw->n", vectors(low.k), vectors(owner.k)) / 9.0, -1, 1))
    np.testing.assert_allclose(turn[merged], 0.6 * np.array(angles)[merged], atol=0.01)


def test_retained_tokens() -> None:
    assert retained_tokens(np.array([1.0]), 0.05).tolist() == [False]
    assert retained_tokens(np.array([0.5, 0.5]), 0.05).tolist() == [False, False]
    assert retained_tokens(np.array([0.5, 0.6, 1.0]), 0.0).tolist() == [False, False, False]
    assert retained_tokens(np.array([0.5, 0.6, 1.0]), 1.0).tolist() == [False, True, True]
    assert retained_tokens(np.array([math.pi, math.pi, 1.0]), 0.0).tolist() == [True, True, False]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_slerp_weights_are_finite_and_meet_their_limits(share: float) -> None:
    angle = np.array([0.0, 1e-12, 1e-3, 1.0, 3.0, math.pi - 1e-5, math.pi])
    first, second = slerp_weights(angle, share)
    assert np.isfinite(first).all()
    assert np.isfinite(second).all()
    np.testing.assert_allclose(first[:2], 1 - share)
    np.testing.assert_allclose(second[:2], share)
    # The merged vector has length 1: |a u + b v|^2 with u.v = cos(angle).
    squares = (first**2 + second**2 + 2 * first * second * np.cos(angle))[:5]
    np.testing.assert_allclose(squares, 1.0)


@pytest.mark.parametrize("tokens", [1, 7])
def test_opposite_vectors_are_kept(tokens: int) -> None:
    owner = KvBlock(*(np.round(array * 16) for array in (block(tokens, 1).k, block(tokens, 1).v)))
    partner = KvBlock(-2 * owner.k, -0.5 * owner.v)
    (low, high), _ = round_trip(MergedPair(LAYOUT), owner, partner)
    for found, exact in ((low, owner), (high, partner)):
        np.testing.assert_array_equal(found.k, exact.k)
        np.testing.assert_array_equal(found.v, exact.v)


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_a_zero_vector_comes_back_and_costs_the_other_layer_nothing(share: float) -> None:
    owner, partner = block(8, 1), near(block(8, 1), 2)
    owner.k[2] = 0
    partner.k[5] = 0
    owner.v[3] = 0
    partner.v[3] = 0
    (low, high), _ = round_trip(MergedPair(LAYOUT, share=share), owner, partner)
    assert not low.k[2].any()
    assert not high.k[5].any()
    assert not low.v[3].any()
    assert not high.v[3].any()
    assert worst(high.k[2:3], vectors(partner.k[2:3])) < 2**-8
    assert worst(low.k[5:6], vectors(owner.k[5:6])) < 2**-8


def test_a_zero_vector_is_not_kept() -> None:
    """It merges with anything, so others are the least alike."""
    owner, partner = turned(8, [0.5] * 7 + [0.4])
    owner.k[2] = 0
    partner.v[3] = 0
    own, _ = MergedPair(LAYOUT).encode(owner, partner)
    assert [bits[0] for bits in _bitmaps(own, 8)] == [0b11011110, 0b11101110]


@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1e-4, 1e30])
def test_vectors_of_any_size(scale: float) -> None:
    shape = layout("bfloat16")
    owner = block(40, 1, shape, scale)
    (low, high), _ = round_trip(MergedPair(shape, gamma=0.0), owner, owner)
    assert worst(low.k, vectors(owner.k)) < 2**-8
    assert worst(high.v, vectors(owner.v)) < 2**-8


def test_the_smallest_numbers() -> None:
    tiny = np.float32(1e-45)
    owner, partner = block(3, 1), block(3, 2)
    owner.k[:] = tiny
    partner.v[:] = -tiny
    (low, high), _ = round_trip(MergedPair(LAYOUT), owner, partner)
    assert np.abs(low.k).max() < 1e-43
    assert np.abs(high.v).max() < 1e-43


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, 3e38])
@pytest.mark.parametrize("where", ["owner", "partner"])
def test_numbers_that_cannot_be_merged(number: float, where: str) -> None:
    layers = {"owner": block(5, 1), "partner": block(5, 2)}
    layers[where].v[3, 1, 2] = number
    with pytest.raises(ValueError, match="can't be merged"):
        MergedPair(LAYOUT).encode(layers["owner"], layers["partner"])


def test_a_float16_pool_gets_nothing_beyond_its_range() -> None:
    shape = layout("float16")
    owner, partner = block(5, 1, shape), block(5, 2, shape)
    owner.k[2] = 60_000  # each number fits, the length of the vector does not
    with pytest.raises(ValueError, match="can't be merged"):
        MergedPair(shape).encode(owner, partner)


@pytest.mark.parametrize("tokens", [1, 2, 41, 123, 256])
def test_bytes(tokens: int) -> None:
    pair = MergedPair(LAYOUT)
    owner = block(tokens, 1)
    own, other = pair.encode(owner, near(owner, 2))
    assert len(own) == pair.owner_bytes(tokens) == 2 * ((tokens + 7) // 8) + tokens * (8 + 2 * 3 * 12)
    kept = [int(np.unpackbits(np.frombuffer(part, np.uint8)).sum()) for part in _bitmaps(own, tokens)]
    assert (tokens == 1) == (kept == [0, 0])
    assert len(other) == sum(4 * (tokens - r) + 2 * r * w for r, w in zip(kept, (24, 12), strict=True))
    assert pair.encode(owner, near(owner, 2)) == (own, other)


def reason(pair: MergedPair, own: bytes, other: bytes, tokens: int) -> str:
    """Why the partner is refused."""
    with pytest.raises(Corrupt) as caught:
        pair.decode_partner(memoryview(other), memoryview(own), tokens)
    return caught.value.reason


def test_wrong_lengths_are_corrupt() -> None:
    pair = MergedPair(LAYOUT)
    owner = block(41, 1)
    own, other = pair.encode(owner, near(owner, 2))
    for wrong in (b"", own[:-1], own + b"\0", own[: len(own) // 2]):
        with pytest.raises(Corrupt) as caught:
            pair.decode_owner(memoryview(wrong), 41)
        assert caught.value.reason == "length"
        assert reason(pair, wrong, other, 41) == "length"
    for wrong in (b"", other[:-1], other + b"\0"):
        assert reason(pair, own, wrong, 41) == "length"
    with pytest.raises(Corrupt):
        pair.decode_owner(memoryview(own), 40)


def test_wrong_marks_and_numbers_are_corrupt() -> None:
    pair = MergedPair(LAYOUT)
    owner = block(41, 1)
    own, other = pair.encode(owner, near(owner, 2))
    marked = bytearray(own)
    marked[5] |= 1  # token 47 of 41
    assert reason(pair, bytes(marked), other, 41) == "length"
    more = bytearray(own)
    more[0] ^= 128  # token 0 counts as kept, or no longer
    assert reason(pair, bytes(more), other, 41) == "length"
    factor = bytearray(own)
    factor[12:16] = np.float32(math.nan).tobytes()
    assert reason(pair, own, np.float32(math.inf).tobytes() + other[4:], 41) == "length"
    with pytest.raises(Corrupt, match="inf or NaN"):
        pair.decode_owner(memoryview(factor), 41)


def test_blocks_that_do_not_fit() -> None:
    pair = MergedPair(LAYOUT)
    with pytest.raises(ValueError, match="owner of 3 tokens, partner of 4"):
        pair.encode(block(3, 1), block(4, 1))
    with pytest.raises(ValueError, match="heads and dimensions"):
        pair.encode(block(3, 1, layout(heads=2)), block(3, 1))
    for name in ("share", "gamma"):
        with pytest.raises(ValueError, match=f"{name} 1.5: expected 0 to 1"):
            MergedPair(LAYOUT, **{name: 1.5})


def test_raw_sharing_is_the_owner() -> None:
    codec: LayerCodec = RawSharing()
    pair: PairCodec = MergedPair(LAYOUT)
    assert codec.mode is pair.mode is Mode.shared
    owner = block(41, 1)
    assert codec.encode(block(41, 2), owner) == b""
    assert codec.length(41) == 0
    assert codec.decode(memoryview(b""), 41, owner) is owner
    with pytest.raises(Corrupt):
        codec.decode(memoryview(b"x"), 41, owner)


def test_raw_sharing_without_an_owner() -> None:
    codec = RawSharing()
    for base in (None, block(40, 1), block(41, 1, layout(heads=1))):
        with pytest.raises(ValueError, match="expected an owner's"):
            codec.encode(block(41, 2), base)
    for base in (None, block(40, 1)):
        with pytest.raises(ValueError, match="expected an owner's of 41"):
            codec.decode(memoryview(b""), 41, base)


@pytest.mark.parametrize("number", [math.inf, math.nan])
@pytest.mark.parametrize("where", ["owner", "partner"])
def test_raw_sharing_of_no_numbers(number: float, where: str) -> None:
    layers = {"owner": block(5, 1), "partner": block(5, 2)}
    layers[where].k[0, 0, 0] = number
    with pytest.raises(ValueError, match="can't be shared"):
        RawSharing().encode(layers["partner"], layers["owner"])

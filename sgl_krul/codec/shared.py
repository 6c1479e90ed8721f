"""One layer's KV for two: a pair of layers of which the upper one, the partner, gives up its own.

Raw sharing (Krul, arXiv 2507.08045, without merging): the partner stores nothing, it is read as the owner.

Merging (MiniCache, arXiv 2405.14366), for K and V apart. x, y: the vectors of a token in owner and partner,
over all KV heads. Directions are merged, lengths are kept:
* angle = arccos(x.y / (|x| |y|)); the distance of a token's two vectors is angle / pi;
* e = sin((1-t) angle) / sin(angle) x/|x| + sin(t angle) / sin(angle) y/|y|, t = .6 (SLERP, eq. 3);
* x' = |x| e/|e|, y' = |y| e/|e| (eq. 2);
* tokens least alike are not merged but kept as they are in both layers: those whose distance lies in the top
  gamma = .05 of the range from the least to the greatest one. Here the range is that of the chunk.

Where SLERP says nothing: a zero vector takes the direction of the other one, and costs nothing by it;
opposite vectors (angle within 1e-4 of pi) have no direction between them, and are kept.

Stored, little-endian, K before V in each line (n tokens, r of them kept, w numbers a vector):
  owner    a bit for each token: kept or not [ceil(n/8) bytes]; factors float32 [n]; rows 16 bit [n, w]
  partner  factors float32 [n - r], of merged tokens; rows 16 bit [r, w], of kept tokens
A row of the owner is e, or a kept vector, whose factor is 1. 16 bit is bfloat16, in a float16 pool float16.
A factor is |x| over the length of e AS ROUNDED to 16 bits: so decoding is one product, and a decoded vector
has the length of x. Factors are float32 for their range: 1% of a pair's bytes at 192 numbers a vector.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sgl_krul.codec.base import Mode
from sgl_krul.codec.block import Float32, KvBlock, check_block, from_bits16, to_bits16
from sgl_krul.errors import Corrupt
from sgl_krul.layout import KvLayout

__all__ = ["GAMMA", "SHARE", "MergedPair", "RawSharing", "retained_tokens", "slerp_weights"]

SHARE = 0.6  # t of MiniCache: how far the merged direction lies from the owner's towards the partner's
GAMMA = 0.05  # of the range of distances: tokens above it are kept

Float64: TypeAlias = NDArray[np.float64]

_OPPOSITE = math.pi - 1e-4
_LARGEST = {"float16": 65504.0}  # longer vectors might be decoded beyond the pool's numbers
_LARGEST_ELSE = 1e38


class RawSharing:
    """A LayerCodec: the partner stores nothing, and is decoded as its owner (the very arrays)."""

    mode = Mode.shared

    def length(self, tokens: int) -> int:
        """None at all."""
        return 0

    def encode(self, block: KvBlock, base: KvBlock | None) -> bytes:
        """See LayerCodec. ValueError without a base, or where either block has inf or NaN."""
        if base is None or base.k.shape != block.k.shape or base.v.shape != block.v.shape:
            raise ValueError(
                f"base {None if base is None else base.k.shape}: expected an owner's {block.k.shape}"
            )
        for array in (block.k, block.v, base.k, base.v):
            if not np.isfinite(array).all():
                raise ValueError("inf or NaN: a layer with such numbers can't be shared")
        return b""

    def decode(self, data: memoryview, tokens: int, base: KvBlock | None) -> KvBlock:
        """See LayerCodec: the base. ValueError unless there is one of `tokens` tokens."""
        if base is None or base.tokens != tokens:
            found = None if base is None else base.tokens
            raise ValueError(f"base of {found} tokens: expected an owner's of {tokens}")
        if data.nbytes:
            raise Corrupt("length", f"{data.nbytes} bytes of a layer that is shared, expected none")
        return base


class MergedPair:
    """A PairCodec: MiniCache's merge of two layers (see the module)."""

    mode = Mode.shared

    def __init__(self, layout: KvLayout, *, share: float = SHARE, gamma: float = GAMMA) -> None:
        """`share` is t, `gamma` the part of the range that is kept. ValueError unless both are in [0, 1]."""
        for name, value in (("share", share), ("gamma", gamma)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} {value}: expected 0 to 1")
        self._layout = layout
        self._share = share
        self._gamma = gamma
        self._widths = layout.kv_heads * layout.head_dim, layout.kv_heads * layout.v_head_dim

    def owner_bytes(self, tokens: int) -> int:
        """Bytes of an owner of `tokens` tokens. (A partner's depend on how many tokens are kept.)"""
        return sum(_owner_sizes(tokens, self._widths))

    def encode(self, owner: KvBlock, partner: KvBlock) -> tuple[bytes, bytes]:
        """See PairCodec. ValueError for inf, NaN, vectors too long for the pool, blocks of other shapes."""
        check_block(owner, self._layout)
        check_block(partner, self._layout)
        if owner.tokens != partner.tokens or not owner.tokens:
            raise ValueError(f"owner of {owner.tokens} tokens, partner of {partner.tokens}: expected as many")
        k, v = (
            self._merge(lower.reshape(owner.tokens, -1), upper.reshape(owner.tokens, -1))
            for lower, upper in ((owner.k, partner.k), (owner.v, partner.v))
        )
        bits = [np.packbits(part.kept) for part in (k, v)]
        own = _joined(*bits, k.owner_factors, v.owner_factors, k.owner_rows, v.owner_rows)
        return own, _joined(k.partner_factors, v.partner_factors, k.partner_rows, v.partner_rows)

    def decode_owner(self, data: memoryview, tokens: int) -> KvBlock:
        """See PairCodec."""
        with _any_number():
            arrays = [part.rows * part.factors[:, None] for part in self._owner(data, tokens)]
        return self._block(arrays, tokens)

    def decode_partner(self, data: memoryview, owner_data: memoryview, tokens: int) -> KvBlock:
        """See PairCodec."""
        owner = self._owner(owner_data, tokens)
        counts = [int(part.kept.sum()) for part in owner]
        sizes = [4 * (tokens - count) for count in counts]
        sizes += [2 * count * width for count, width in zip(counts, self._widths, strict=True)]
        stored = _cut(data, sizes)
        arrays = []
        for part, factors, rows, width in zip(owner, stored[:2], stored[2:], self._widths, strict=True):
            array = np.empty((tokens, width), np.float32)
            merged = ~part.kept
            with _any_number():
                array[merged] = part.rows[merged] * np.frombuffer(factors, "<f4")[:, None]
                array[part.kept] = from_bits16(np.frombuffer(rows, "<u2"), self._layout).reshape(-1, width)
            arrays.append(array)
        return self._block(arrays, tokens)

    def _owner(self, data: memoryview, tokens: int) -> list[_Owner]:
        """What an owner's bytes say, K and V."""
        stored = _cut(data, _owner_sizes(tokens, self._widths))
        parts = []
        for bits, factors, rows, width in zip(stored[:2], stored[2:4], stored[4:], self._widths, strict=True):
            flags = np.unpackbits(np.frombuffer(bits, np.uint8)).astype(bool)
            if flags[tokens:].any():
                raise Corrupt("length", f"more than {tokens} tokens are marked as kept")
            numbers = from_bits16(np.frombuffer(rows, "<u2"), self._layout).reshape(tokens, width)
            parts.append(_Owner(flags[:tokens], np.frombuffer(factors, "<f4"), numbers))
        return parts

    def _block(self, arrays: list[Float32], tokens: int) -> KvBlock:
        """The block of K and V, vectors [tokens, w]. Corrupt for inf or NaN: none were encoded."""
        if not all(np.isfinite(array).all() for array in arrays):
            raise Corrupt("length", "inf or NaN in a merged layer")
        k, v = (array.reshape(tokens, self._layout.kv_heads, -1) for array in arrays)
        return KvBlock(k, v)

    def _merge(self, owner: Float32, partner: Float32) -> _Merged:
        """One tensor of both layers, [n, w]."""
        x, y = (array.astype(np.float64, order="C") for array in (owner, partner))
        x_length, y_length = _lengths(x), _lengths(y)
        longest = float(np.maximum(x_length, y_length).max())  # NaN where there is one
        if not longest <= _LARGEST.get(self._layout.dtype, _LARGEST_ELSE):
            raise ValueError(f"a vector of length {longest:g}, inf or NaN: such numbers can't be merged")
        x_divisor, y_divisor = _divisor(x_length), _divisor(y_length)
        cosine = np.einsum("nw,nw->n", x, y) / (x_divisor * y_divisor)
        cosine[(x_length == 0) | (y_length == 0)] = 1.0
        angle = np.arccos(np.clip(cosine, -1.0, 1.0))
        kept = retained_tokens(angle, self._gamma)
        x_weight, y_weight = slerp_weights(angle, self._share)
        x_weight[y_length == 0] = y_weight[x_length == 0] = 1.0  # then e has the direction of the other one
        x *= (x_weight / x_divisor)[:, None]
        y *= (y_weight / y_divisor)[:, None]
        x += y
        x[kept] = owner[kept]
        rows = to_bits16(x.astype(np.float32), self._layout)
        divisor = _divisor(_lengths(from_bits16(rows, self._layout).astype(np.float64)))
        return _Merged(
            kept=kept,
            owner_rows=rows,
            owner_factors=np.where(kept, 1.0, x_length / divisor).astype("<f4"),
            partner_rows=to_bits16(partner[kept], self._layout),
            partner_factors=(y_length / divisor)[~kept].astype("<f4"),
        )


class _Owner(NamedTuple):
    """An owner's part of K or V: kept bool [n], factors float32 [n], rows float32 [n, w]."""

    kept: NDArray[np.bool_]
    factors: Float32
    rows: Float32


class _Merged(NamedTuple):
    """K or V of a pair as stored: kept bool [n], rows uint16 [n or r, w], factors float32 [n or n - r]."""

    kept: NDArray[np.bool_]
    owner_rows: NDArray[np.uint16]
    owner_factors: Float32
    partner_rows: NDArray[np.uint16]
    partner_factors: Float32


def retained_tokens(angle: Float64, gamma: float) -> NDArray[np.bool_]:
    """Which tokens are kept, by their angles float64 [n] (n at least 1): bool [n]. Of equal angles: none."""
    least, greatest = float(angle.min()), float(angle.max())
    return (angle > greatest - gamma * (greatest - least)) | (angle > _OPPOSITE)


def slerp_weights(angle: Float64, share: float) -> tuple[Float64, Float64]:
    """sin((1-t) angle) / sin(angle) and sin(t angle) / sin(angle), t = `share`; their limits at angle 0 and,
    finite but without a meaning, at pi. float64 [n] each."""
    sine = np.sin(angle)
    plain = (angle == 0) | (angle > _OPPOSITE)
    sine[plain] = 1.0
    first = np.where(plain, 1.0 - share, np.sin((1.0 - share) * angle) / sine)
    return first, np.where(plain, share, np.sin(share * angle) / sine)


def _lengths(vectors: Float64) -> Float64:
    """|row| of [n, w], in float64: squares of any float32 fit there."""
    lengths: Float64 = np.sqrt(np.einsum("nw,nw->n", vectors, vectors))
    return lengths


def _divisor(lengths: Float64) -> Float64:
    """The lengths to divide by: 1 for a zero vector."""
    return np.where(lengths > 0, lengths, 1.0)


def _owner_sizes(tokens: int, widths: tuple[int, int]) -> list[int]:
    """Bytes of the parts of an owner's data, in their order."""
    return [(tokens + 7) // 8] * 2 + [4 * tokens] * 2 + [2 * tokens * width for width in widths]


def _any_number() -> np.errstate:
    """For products of bytes from a store, which may come to anything: `_block` looks at what came out."""
    return np.errstate(over="ignore", invalid="ignore")


def _joined(*arrays: NDArray[Any]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


def _cut(data: memoryview, sizes: list[int]) -> list[memoryview]:
    """`data` in parts of these bytes. Corrupt("length") unless that is all of it."""
    if data.nbytes != sum(sizes):
        raise Corrupt("length", f"{data.nbytes} bytes of a merged layer, expected {sum(sizes)}")
    ends = np.cumsum(sizes).tolist()
    return [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]

"""Fewer bits a number: 16 by a cast, 8 or 4 in groups of 32 with a zero and a scale of their own.

A group is x ~ zero + scale * code, code 0 to 2^bits - 1 (asymmetric). K is grouped per channel: 32
consecutive tokens of one channel, since a few channels of K are much larger than the others, and are so for
all tokens. V is grouped per token: 32 consecutive channels of one token, through the heads. (KIVI, arXiv
2402.02750, groups so.) The last group of a channel, or of a token, is shorter where 32 does not divide. With
zeros and scales, 4 bits come to 5 a number, 8 bits to 9.

`zero` is the group's least number rounded down to float16, `scale` is rounded up. So no code has to be
clipped, and |x - x'| <= scale / 2, but for the rounding of float32, with

    scale <= (1 + 2^-10) * (max - min + ulp16(|min|)) / (2^bits - 1) + 2^-24

(ulp16: the step of float16 there). A constant group of a number that float16 has comes back exactly.

Bytes: zeros float16 [groups], scales float16 [groups], codes; of each K first. K's groups are in the order of
their tokens, then of their channels; V's whole ones in that of tokens, then of channels, and after them V's
shorter ones. Codes lie crosswise: of 32 tokens of K the codes of the first token, then of the second one; of
V's whole groups all first codes, then all second ones; the same of its shorter ones. Codes of 8 bits are
bytes. Of 4 bits, byte i of n holds code i (low half) and code i + n, and an odd count leaves the last half 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_krul.codec.base import Mode
from sgl_krul.codec.block import Float32, KvBlock, check_block, numbers16, pack16, unpack16
from sgl_krul.errors import Corrupt
from sgl_krul.layout import KvLayout

__all__ = ["GROUP", "LARGEST", "CastCodec", "GroupCodec"]

GROUP = 32
LARGEST = 60_000.0
"""Numbers beyond are refused: near the end of float16 (65,504) a scale rounded up could lead past it."""

Codes = NDArray[np.uint8]


class CastCodec:
    """A LayerCodec: 16 bits a number, bfloat16 (in a float16 pool float16). Exact unless the pool is float32.

    It holds every number, inf and NaN too.
    """

    mode = Mode.quantized

    def __init__(self, layout: KvLayout) -> None:
        self._layout = layout

    def length(self, tokens: int) -> int:
        """See LayerCodec."""
        return 2 * numbers16(tokens, self._layout)

    def encode(self, block: KvBlock, base: KvBlock | None) -> bytes:
        """See LayerCodec."""
        _check_alone(block, base, self._layout)
        return pack16(block, self._layout)

    def decode(self, data: memoryview, tokens: int, base: KvBlock | None) -> KvBlock:
        """See LayerCodec."""
        _check_length(data, self.length(tokens), tokens)
        return unpack16(data, tokens, self._layout)


class GroupCodec:
    """A LayerCodec: `bits` 8 or 4 a number, in groups (see the module)."""

    mode = Mode.quantized

    def __init__(self, layout: KvLayout, bits: int) -> None:
        if bits not in (4, 8):
            raise ValueError(f"bits {bits}: expected 4 or 8")
        self._layout = layout
        self._bits = bits

    def length(self, tokens: int) -> int:
        """See LayerCodec."""
        return 4 * self._groups(tokens) + self._code_bytes(tokens)

    def encode(self, block: KvBlock, base: KvBlock | None) -> bytes:
        """See LayerCodec. ValueError too for numbers beyond LARGEST."""
        _check_alone(block, base, self._layout)
        groups = self._groups(block.tokens)
        params = np.empty((2, groups), "<f2")
        codes = np.empty(numbers16(block.tokens, self._layout), np.uint8)
        group = number = 0
        for view in _grouped(block):
            with np.errstate(invalid="ignore"):  # a signalling NaN, which is refused as any other
                zeros, scales, found = _quantized(np.ascontiguousarray(view), (1 << self._bits) - 1)
            params[:, group : group + zeros.size] = zeros, scales
            codes[number : number + found.size] = found
            group, number = group + zeros.size, number + found.size
        return params.tobytes() + (codes if self._bits == 8 else _packed(codes)).tobytes()

    def decode(self, data: memoryview, tokens: int, base: KvBlock | None) -> KvBlock:
        """See LayerCodec."""
        _check_length(data, self.length(tokens), tokens)
        groups = self._groups(tokens)
        params = np.frombuffer(data[: 4 * groups], "<f2").reshape(2, groups)
        if not np.isfinite(params).all() or (params[1] < 0).any():
            raise Corrupt("length", "a zero or scale that is no number, or a scale below 0")
        codes = np.frombuffer(data[4 * groups :], np.uint8)
        if self._bits == 4:
            codes = _unpacked(codes, numbers16(tokens, self._layout))
        heads = self._layout.kv_heads
        block = KvBlock(
            np.empty((tokens, heads, self._layout.head_dim), np.float32),
            np.empty((tokens, heads, self._layout.v_head_dim), np.float32),
        )
        group = number = 0
        zeros, scales = params.astype(np.float32)
        for view in _grouped(block):
            count = view.size // view.shape[1]
            shape = view.shape[0], 1, *view.shape[2:]
            numbers = codes[number : number + view.size].reshape(view.shape).astype(np.float32)
            numbers *= scales[group : group + count].reshape(shape)
            numbers += zeros[group : group + count].reshape(shape)
            view[...] = numbers
            group, number = group + count, number + view.size
        return block

    def _groups(self, tokens: int) -> int:
        """Groups of K and V together."""
        k_channels = self._layout.kv_heads * self._layout.head_dim
        v_channels = self._layout.kv_heads * self._layout.v_head_dim
        return -(-tokens // GROUP) * k_channels + tokens * -(-v_channels // GROUP)

    def _code_bytes(self, tokens: int) -> int:
        return -(-numbers16(tokens, self._layout) * self._bits // 8)


def _check_alone(block: KvBlock, base: KvBlock | None, layout: KvLayout) -> None:
    check_block(block, layout)
    if base is not None:
        raise ValueError("a base: expected none, this codec codes a layer by itself")


def _check_length(data: memoryview, expected: int, tokens: int) -> None:
    if data.nbytes != expected:
        raise Corrupt("length", f"{data.nbytes} bytes, expected {expected} for {tokens} tokens")


def _grouped(block: KvBlock) -> list[NDArray[Any]]:
    """Views of K, then V, in which axis 1 runs through a group, in the order in which they are stored.

    Of each the whole groups, then the shorter ones; what is empty is left out. To write to them writes to the
    block.
    """
    tokens = block.tokens
    k = block.k.reshape(tokens, -1)  # [tokens, channels]
    v = block.v.reshape(tokens, -1)
    k_whole = tokens // GROUP * GROUP
    v_whole = v.shape[1] // GROUP * GROUP
    views = [
        k[:k_whole].reshape(-1, GROUP, k.shape[1]),
        k[None, k_whole:],
        v[:, :v_whole].reshape(tokens, v_whole // GROUP, GROUP).transpose(2, 0, 1)[None],
        v[:, v_whole:].T[None],
    ]
    return [view for view in views if view.size]


def _quantized(numbers: Float32, levels: int) -> tuple[NDArray[np.float16], NDArray[np.float16], Codes]:
    """Zeros, scales and codes, each flat, of numbers [a, group, ...]. `levels`: the greatest code.

    ValueError for inf, NaN and numbers beyond LARGEST.
    """
    low = numbers.min(axis=1, keepdims=True)
    high = numbers.max(axis=1, keepdims=True)
    if not ((low >= -LARGEST) & (high <= LARGEST)).all():  # False for NaN, which min and max hand on
        raise ValueError(
            f"numbers from {low.min()} to {high.max()}: expected finite ones within {LARGEST:,.0f}"
        )
    zeros = _rounded(low, up=False)
    zero = zeros.astype(np.float32)
    scales = _rounded((high - zero) / levels, up=True)
    scale = scales.astype(np.float32)
    # A scale is 0 only where every number of the group is `zero`; then every code is.
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    scaled = numbers - zero
    scaled *= inverse
    scaled += 0.5  # the cast cuts off: with this it rounds
    return zeros.reshape(-1), scales.reshape(-1), scaled.astype(np.uint8).reshape(-1)


def _rounded(numbers: Float32, *, up: bool) -> NDArray[np.float16]:
    """As float16, none less (`up`) or none more than the number itself."""
    nearest = numbers.astype(np.float16)
    wrong = nearest < numbers if up else nearest > numbers
    if wrong.any():
        towards = np.float16(np.inf if up else -np.inf)
        nearest[wrong] = np.nextafter(nearest[wrong], towards)
    return nearest


def _packed(codes: Codes) -> Codes:
    """Codes below 16, two in a byte."""
    half = -(-codes.size // 2)
    packed = codes[:half].copy()
    packed[: codes.size - half] |= codes[half:] << 4
    return packed


def _unpacked(packed: Codes, count: int) -> Codes:
    """The `count` codes of `_packed`. Corrupt("length") where the half that is left over is not 0."""
    codes = np.empty(count, np.uint8)
    np.bitwise_and(packed, 15, out=codes[: packed.size])
    high = packed >> 4
    if count % 2 and high[-1]:
        raise Corrupt("length", "bits after the last number")
    codes[packed.size :] = high[: count - packed.size]
    return codes

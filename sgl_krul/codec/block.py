"""KV of one layer of one chunk as fp32 arrays: the form in which codecs compute; from pages and back.

bfloat16 is handled by its bits: it is the upper half of a float32, so to read it is exact, and to write it is
to round to nearest, ties to even. NaN stays NaN, with the upper bits of its payload; infinities stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sgl_krul.layout import KvLayout
from sgl_krul.store import Buffer
from sgl_krul.store.tier import byte_view, writable_view

__all__ = [
    "Float32",
    "KvBlock",
    "check_block",
    "from_bits16",
    "from_pages",
    "join_blocks",
    "numbers16",
    "pack16",
    "to_bits16",
    "to_pages",
    "unpack16",
]

Float32: TypeAlias = NDArray[np.float32]

_STORED: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}


@dataclass(frozen=True, eq=False)
class KvBlock:
    """K float32 [tokens, kv_heads, head_dim] and V float32 [tokens, kv_heads, v_head_dim] of one layer.

    The arrays are not to be changed: they may be views of each other's blocks.

    Raises:
        ValueError: other types, dimensions, or not the same tokens and heads in both.
    """

    k: Float32
    v: Float32

    def __post_init__(self) -> None:
        for name, array in (("k", self.k), ("v", self.v)):
            if array.dtype != np.float32 or array.ndim != 3:
                raise ValueError(
                    f"{name} of shape {array.shape}, dtype {array.dtype}: expected float32 [n, g, d]"
                )
        if self.k.shape[:2] != self.v.shape[:2]:
            raise ValueError(
                f"k of shape {self.k.shape}, v of {self.v.shape}: expected the same tokens and heads"
            )

    @property
    def tokens(self) -> int:
        """How many tokens."""
        return int(self.k.shape[0])

    def rows(self, first: int, end: int) -> KvBlock:
        """Tokens [first, end), as views."""
        return KvBlock(self.k[first:end], self.v[first:end])


def join_blocks(blocks: Sequence[KvBlock]) -> KvBlock:
    """The tokens of all blocks one after another; a single block is given back as it is."""
    if len(blocks) == 1:
        return blocks[0]
    return KvBlock(
        np.concatenate([block.k for block in blocks]), np.concatenate([block.v for block in blocks])
    )


def from_pages(buffers: Sequence[Buffer], layout: KvLayout) -> KvBlock:
    """The KV of page segments: buffers of one or more whole ones (K, then V, of a page), in token order.

    Raises:
        ValueError: a buffer that is not whole page segments.
    """
    pages = [_page_numbers(byte_view(buffer), layout) for buffer in buffers]
    tokens = sum(part.shape[0] for part in pages) * layout.page_size
    block = _empty(tokens, layout)
    row = 0
    for part in pages:
        end = row + part.shape[0] * layout.page_size
        for target, stored in zip((block.k, block.v), _split(part, layout), strict=True):
            target[row:end].reshape(stored.shape)[...] = _to_float32(stored, layout)
        row = end
    return block


def to_pages(block: KvBlock, layout: KvLayout, out: Sequence[memoryview]) -> None:
    """Fill the page segments `out` (as at `from_pages`, writable) with the block, in the pool's dtype.

    Raises:
        ValueError: a buffer that is read-only or not whole page segments; other tokens than the block's; a
            block of other heads or dimensions than the layout's.
    """
    check_block(block, layout)
    pages = [_page_numbers(writable_view(buffer), layout) for buffer in out]
    tokens = sum(part.shape[0] for part in pages) * layout.page_size
    if tokens != block.tokens:
        raise ValueError(f"pages for {tokens} tokens: expected room for {block.tokens}")
    row = 0
    for part in pages:
        end = row + part.shape[0] * layout.page_size
        for source, stored in zip((block.k, block.v), _split(part, layout), strict=True):
            stored[...] = _from_float32(source[row:end], layout).reshape(stored.shape)
        row = end


def check_block(block: KvBlock, layout: KvLayout) -> None:
    """ValueError for a block of other heads or dimensions than the layout's."""
    expected = (layout.kv_heads, layout.head_dim), (layout.kv_heads, layout.v_head_dim)
    found = block.k.shape[1:], block.v.shape[1:]
    if found != expected:
        raise ValueError(f"block of heads and dimensions {found}: expected {expected}")


def numbers16(tokens: int, layout: KvLayout) -> int:
    """Numbers of `tokens` tokens of one layer, K and V: `pack16` gives twice as many bytes."""
    return tokens * layout.kv_heads * (layout.head_dim + layout.v_head_dim)


def pack16(block: KvBlock, layout: KvLayout) -> bytes:
    """K, then V, in 16 bits a number: bfloat16, in a float16 pool float16. Exact but in a float32 pool."""
    return b"".join(to_bits16(array, layout).tobytes() for array in (block.k, block.v))


def unpack16(data: memoryview, tokens: int, layout: KvLayout) -> KvBlock:
    """What `pack16` packed. ValueError for another length than twice `numbers16`."""
    if data.nbytes != 2 * numbers16(tokens, layout):
        raise ValueError(f"{data.nbytes} bytes: expected {2 * numbers16(tokens, layout)} for {tokens} tokens")
    k_numbers = tokens * layout.kv_heads * layout.head_dim
    bits = np.frombuffer(data, dtype="<u2")
    return KvBlock(
        from_bits16(bits[:k_numbers], layout).reshape(tokens, layout.kv_heads, layout.head_dim),
        from_bits16(bits[k_numbers:], layout).reshape(tokens, layout.kv_heads, layout.v_head_dim),
    )


def to_bits16(numbers: Float32, layout: KvLayout) -> NDArray[np.uint16]:
    """The bits of each number as bfloat16, in a float16 pool as float16, rounded to nearest even."""
    if layout.dtype == "float16":
        with np.errstate(over="ignore", invalid="ignore"):  # to infinities; signalling NaN
            return numbers.astype("<f2").view("<u2")
    return _bfloat16_bits(numbers)


def from_bits16(bits: NDArray[np.uint16], layout: KvLayout) -> Float32:
    """The numbers whose bits `to_bits16` gave. Exact."""
    if layout.dtype == "float16":
        return _to_float32(bits.view("<f2"), layout)
    return _bfloat16_numbers(bits)


def _bfloat16_bits(numbers: Float32) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    # Half a step, and one more where the last bit kept is odd: the carry rounds ties to even. Infinities
    # carry nothing; uint32 wraps for some NaN only, and those are put right below.
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    nan = np.isnan(numbers)
    if nan.any():
        kept = (bits >> 16).astype(np.uint16)
        kept[(kept & 0x7F) == 0] |= 0x40  # a payload that lay in the lower half alone would leave an infinity
        rounded = np.where(nan, kept, rounded)
    return rounded


def _bfloat16_numbers(bits: NDArray[np.uint16]) -> Float32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_float32(stored: NDArray[Any], layout: KvLayout) -> Float32:
    if layout.dtype == "bfloat16":
        return _bfloat16_numbers(stored)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return stored.astype(np.float32, copy=False)


def _from_float32(numbers: Float32, layout: KvLayout) -> NDArray[Any]:
    return numbers if layout.dtype == "float32" else to_bits16(numbers, layout).view(_STORED[layout.dtype])


def _empty(tokens: int, layout: KvLayout) -> KvBlock:
    return KvBlock(
        np.empty((tokens, layout.kv_heads, layout.head_dim), np.float32),
        np.empty((tokens, layout.kv_heads, layout.v_head_dim), np.float32),
    )


def _page_numbers(view: memoryview, layout: KvLayout) -> NDArray[Any]:
    """Numbers [pages, numbers of a page segment] in the pool's dtype (bfloat16: its bits), no copy."""
    size = layout.page_segment_bytes
    if view.nbytes % size:
        raise ValueError(f"buffer of {view.nbytes} bytes: expected a multiple of {size}")
    return np.frombuffer(view, dtype=_STORED[layout.dtype]).reshape(-1, size // layout.itemsize)


def _split(pages: NDArray[Any], layout: KvLayout) -> tuple[NDArray[Any], NDArray[Any]]:
    """K and V of `_page_numbers`, as views [pages, page_size, numbers of a token]."""
    k_numbers = layout.k_page_bytes // layout.itemsize
    k, v = pages[:, :k_numbers], pages[:, k_numbers:]
    return (
        k.reshape(-1, layout.page_size, layout.kv_heads * layout.head_dim),
        v.reshape(-1, layout.page_size, layout.kv_heads * layout.v_head_dim),
    )

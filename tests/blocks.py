"""KV blocks for tests of codecs: shapes, numbers like those of a model, pages of them."""

from __future__ import annotations

import numpy as np

from sgl_krul.codec import KvBlock, to_pages
from sgl_krul.layout import KvLayout

DTYPES = ("float32", "float16", "bfloat16")


def layout_of(
    dtype: str = "float32", *, layers: int = 1, heads: int = 2, k: int = 8, v: int = 8, page: int = 1
) -> KvLayout:
    """A layout of `heads` KV heads of `k` and `v` numbers, `page` tokens a page."""
    return KvLayout(
        layers=layers, kv_heads=heads, head_dim=k, v_head_dim=v, dtype=dtype, page_size=page, rope="for tests"
    )


def block_of(layout: KvLayout, tokens: int, seed: int = 0) -> KvBlock:
    """Random numbers, each channel around a level of its own (as keys are); all of them the pool can hold."""
    rng = np.random.default_rng(seed)
    arrays = []
    for width in (layout.head_dim, layout.v_head_dim):
        levels = 4 * rng.standard_normal((layout.kv_heads, width))
        arrays.append((levels + rng.standard_normal((tokens, layout.kv_heads, width))).astype(np.float32))
    return KvBlock(*arrays)


def pages_of_block(block: KvBlock, layout: KvLayout) -> bytearray:
    """The page segments of a block, in one buffer."""
    pages = bytearray(block.tokens // layout.page_size * layout.page_segment_bytes)
    to_pages(block, layout, [memoryview(pages)])
    return pages


def same(one: KvBlock, other: KvBlock) -> bool:
    """Whether two blocks are the same numbers, NaN equal to NaN."""
    return np.array_equal(one.k, other.k, equal_nan=True) and np.array_equal(one.v, other.v, equal_nan=True)

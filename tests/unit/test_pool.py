"""The pool seen as pages: the layout that is read, and copies there and back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sgl_krul.errors import UnsupportedServer
from tests.pools import PAGE, KvPages, fill_rows, make_pool, page_bytes, pages_of, read_layout

DTYPES = [(torch.float32, "float32"), (torch.float16, "float16"), (torch.bfloat16, "bfloat16")]


@pytest.mark.parametrize(("dtype", "name"), DTYPES)
@pytest.mark.parametrize("v_head_dim", [8, 4, 16])
def test_the_layout_is_the_pools(dtype: torch.dtype, name: str, v_head_dim: int) -> None:
    layout = read_layout(make_pool(dtype, v_head_dim), PAGE, "rope")
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.v_head_dim) == (3, 2, 8, v_head_dim)
    assert (layout.dtype, layout.page_size, layout.rope) == (name, PAGE, "rope")


@pytest.mark.parametrize(("dtype", "name"), DTYPES)
@pytest.mark.parametrize("v_head_dim", [8, 4, 16])
def test_pages_go_out_and_come_back_bit_for_bit(dtype: torch.dtype, name: str, v_head_dim: int) -> None:
    """In fragmented runs: device pages 7 3 4 5 0 to rows 2 3 4 5 0, on to pages 1 8 9 10 2 elsewhere."""
    source, target = make_pool(dtype, v_head_dim), make_pool(dtype, v_head_dim)
    pages, layout = pages_of(source)
    untouched = [page_bytes(target, layer, 11) for layer in range(3)]
    back, _ = pages_of(target)
    for layer in range(3):
        rows = np.zeros((8, layout.page_segment_bytes), np.uint8)
        pages.to_host(layer, rows, [(2, 7, 1), (3, 3, 3), (0, 0, 1)])
        for row, page in ((2, 7), (3, 3), (4, 4), (5, 5), (0, 0)):
            assert rows[row].tobytes() == page_bytes(source, layer, page)
        assert not rows[[1, 6, 7]].any()
        back.to_device(layer, rows, [(2, 1, 1), (3, 8, 3), (0, 2, 1)])
        for old, new in ((7, 1), (3, 8), (4, 9), (5, 10), (0, 2)):
            assert page_bytes(target, layer, new) == page_bytes(source, layer, old)
        assert page_bytes(target, layer, 11) == untouched[layer]


def test_every_byte_pattern_survives() -> None:
    """NaNs with payloads and denormals are bytes like others."""
    pool = make_pool(torch.bfloat16)
    pages, layout = pages_of(pool)
    for layer, rows in enumerate(fill_rows(layout, 4)):
        pages.to_device(layer, rows, [(0, 4, 4)])
        out = np.zeros_like(rows)
        pages.to_host(layer, out, [(0, 4, 4)])
        assert np.array_equal(rows, out)


def test_no_runs_copy_nothing() -> None:
    pool = make_pool()
    pages, layout = pages_of(pool)
    before = page_bytes(pool, 0, 0)
    pages.to_device(0, fill_rows(layout, 1)[0], [])
    assert page_bytes(pool, 0, 0) == before


def changed(**changes: Any) -> Any:
    pool = make_pool()
    for name, value in changes.items():
        setattr(pool, name, value)
    return pool


@pytest.mark.parametrize(
    ("pool", "said"),
    [
        (SimpleNamespace(), "its KV pool is a SimpleNamespace, not the MHATokenToKVPool"),
        (changed(kv_cache_layout="hnd"), "has the layout 'hnd', expected 'nhd'"),
        (
            changed(dtype=torch.float8_e5m2, store_dtype=torch.uint8),
            "torch.float8_e5m2 .stored as torch.uint8",
        ),
        (changed(dtype=torch.float64, store_dtype=torch.float64), "torch.float64"),
    ],
)
def test_other_pools_are_refused_saying_why(pool: Any, said: str) -> None:
    with pytest.raises(UnsupportedServer, match=said) as caught:
        read_layout(pool, PAGE, "rope")
    assert "--radix-cache-backend krul" in str(caught.value)
    assert "drop the flag" in str(caught.value)


def test_a_derived_pool_is_not_the_plain_one() -> None:
    pool = make_pool()
    pool.__class__ = type("FancyPool", (type(pool),), {})
    with pytest.raises(UnsupportedServer, match="is a FancyPool"):
        read_layout(pool, PAGE, "rope")


def test_buffers_that_are_not_contiguous_are_refused() -> None:
    pool = make_pool()
    _, layout = pages_of(pool)
    pool.k_buffer = [buffer.transpose(1, 2).contiguous().transpose(1, 2) for buffer in pool.k_buffer]
    with pytest.raises((UnsupportedServer, RuntimeError)):
        KvPages(pool, layout)

"""A real KV pool of SGLang on the CPU, filled with numbers one can tell apart."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

with warnings.catch_warnings():
    # SGLang and the packages under it warn while they are imported on a CPU.
    warnings.simplefilter("ignore")
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sgl_krul.engine.pool import KvPages, read_layout

from sgl_krul.layout import KvLayout

PAGE = 16
PAGES = 12


def make_pool(dtype: torch.dtype = torch.float32, v_head_dim: int = 8, pages: int = PAGES) -> Any:
    """3 layers, 2 heads of 8, `pages` pages and the one SGLang keeps for padding, random contents."""
    pool = MHATokenToKVPool(
        size=(pages - 1) * PAGE,
        page_size=PAGE,
        dtype=dtype,
        head_num=2,
        head_dim=8,
        v_head_dim=v_head_dim,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    generator = torch.Generator().manual_seed(1)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return pool


def pages_of(pool: Any) -> tuple[KvPages, KvLayout]:
    """The pool seen as pages, and its layout."""
    layout = read_layout(pool, PAGE, "for tests")
    return KvPages(pool, layout), layout


def page_bytes(pool: Any, layer: int, page: int) -> bytes:
    """The page segment of one layer of one device page, made with torch alone."""
    rows = slice(page * PAGE, (page + 1) * PAGE)
    parts = [buffer[layer][rows].contiguous() for buffer in (pool.k_buffer, pool.v_buffer)]
    return b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)


def slots_of(pages: list[int]) -> torch.Tensor:
    """The token slots (int64 [n * PAGE]) of device pages."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def fill_rows(layout: KvLayout, rows: int, seed: int = 0) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Random host rows, one array [rows, page_segment_bytes] a layer."""
    rng = np.random.default_rng(seed)
    shape = (rows, layout.page_segment_bytes)
    return [rng.integers(0, 256, shape, dtype=np.uint8) for _ in range(layout.layers)]

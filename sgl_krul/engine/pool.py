"""SGLang's KV pool seen as pages: the layout of it, and copies between its slots and pages in host memory.

A page in host memory is, for one layer, K [page_size, kv_heads, head_dim] and then V [page_size, kv_heads,
v_head_dim], in the pool's dtype and as bytes (the `raw` segment of one page).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_krul.errors import UnsupportedServer
from sgl_krul.layout import KvLayout

__all__ = ["KvPages", "Rows", "Run", "Runs", "read_layout"]

Run = tuple[int, int, int]  # (first host row, first device page, pages)
Runs = Sequence[Run]
Rows = NDArray[np.uint8]  # [rows, page_segment_bytes]

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def read_layout(pool: Any, page_size: int, rope: str) -> KvLayout:
    """The shape of a KV pool.

    Raises:
        UnsupportedServer: the pool is not the plain one (layer by layer, [slot, head, dim], a float dtype).
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    problem = None
    if type(pool) is not MHATokenToKVPool:
        problem = f"its KV pool is a {type(pool).__name__}, not the MHATokenToKVPool of plain MHA or GQA"
    elif pool.kv_cache_layout != "nhd":
        problem = f"its KV pool has the layout {pool.kv_cache_layout!r}, expected 'nhd'"
    elif pool.store_dtype != pool.dtype or pool.dtype not in _DTYPES:
        problem = (
            f"its KV dtype is {pool.dtype} (stored as {pool.store_dtype}), expected a float of 16 or 32 bits"
        )
    if problem is not None:
        raise UnsupportedServer(
            f"this model can't be served with --radix-cache-backend krul: {problem}. Use another model or "
            f"--kv-cache-dtype auto, or drop the flag."
        )
    return KvLayout(
        layers=pool.layer_num,
        kv_heads=pool.head_num,
        head_dim=pool.head_dim,
        v_head_dim=pool.v_head_dim,
        dtype=_DTYPES[pool.dtype],
        page_size=page_size,
        rope=rope,
    )


class KvPages:
    """Copies pages between the pool and host rows, run by run.

    On a CPU both sides are NumPy views, and a run is one call without the GIL. Elsewhere the copy goes
    through torch on the caller's current stream, K and V apart.
    """

    def __init__(self, pool: Any, layout: KvLayout) -> None:
        self.layout = layout
        self.device: torch.device = pool.k_buffer[0].device
        self._k: list[Any] = [self._paged(buffer) for buffer in pool.k_buffer]
        self._v: list[Any] = [self._paged(buffer) for buffer in pool.v_buffer]
        self._both: list[Rows] = []
        if self.device.type == "cpu" and layout.k_page_bytes == layout.v_page_bytes:
            self._both = [_side_by_side(k, v) for k, v in zip(self._k, self._v, strict=True)]

    def to_device(self, layer: int, rows: Rows, runs: Runs) -> None:
        """Copy host rows into device pages for one layer. Elsewhere than on a CPU the caller's thread waits
        until its current stream has come so far.
        """
        if self._both:
            split = self.layout.k_page_bytes
            for row, page, count in runs:
                # Not copyto, which would go over K and then over V: .70 of a memcpy here, this is .90.
                source = rows[row : row + count].reshape(count, 2, split)
                np.positive(source, out=self._both[layer][page : page + count])
            return
        for target, source in self.parts(layer, rows, runs):
            self._copy_in(target, source)

    def parts(self, layer: int, rows: Rows, runs: Runs) -> Iterator[tuple[Any, Rows]]:
        """The copies that runs of one layer come to: device pages and the host bytes for them.

        Both are uint8 [pages, bytes of K or of V in a page], K and V of a run apart; the first is a NumPy
        view on a CPU, else a tensor view, the second a NumPy view that is not contiguous.
        """
        split = self.layout.k_page_bytes
        for row, page, count in runs:
            source = rows[row : row + count]
            yield self._k[layer][page : page + count], source[:, :split]
            yield self._v[layer][page : page + count], source[:, split:]

    def to_host(self, layer: int, rows: Rows, runs: Runs) -> None:
        """Copy device pages into host rows for one layer."""
        split = self.layout.k_page_bytes
        for row, page, count in runs:
            target = rows[row : row + count]
            self._copy_out(self._k[layer], page, target[:, :split])
            self._copy_out(self._v[layer], page, target[:, split:])

    def _paged(self, buffer: torch.Tensor) -> Any:
        """The buffer as bytes [pages, bytes of a page]: a NumPy view on a CPU, else a tensor view."""
        flat = buffer.view(torch.uint8).reshape(buffer.shape[0] // self.layout.page_size, -1)
        if flat.data_ptr() != buffer.data_ptr():
            raise UnsupportedServer(
                "the KV pool's buffers are not contiguous: this pool can't be read by pages"
            )
        return flat.numpy() if self.device.type == "cpu" else flat

    def _copy_in(self, target: Any, source: Rows) -> None:
        if self.device.type == "cpu":
            np.copyto(target, source)
        else:
            target.copy_(torch.from_numpy(source))

    def _copy_out(self, pages: Any, page: int, target: Rows) -> None:
        if self.device.type == "cpu":
            np.copyto(target, pages[page : page + len(target)])
        else:
            torch.from_numpy(target).copy_(pages[page : page + len(target)])


def _side_by_side(k: Rows, v: Rows) -> Rows:
    """K and V pages of a layer, both [pages, bytes], as one view [pages, 2, bytes], as host rows have them.

    The step from K to V is the distance of two allocations: the view spans what lies between them and touches
    none of it. It keeps `k` alive; the caller keeps `v`.
    """
    step = v.ctypes.data - k.ctypes.data
    return np.lib.stride_tricks.as_strided(k, (len(k), 2, k.shape[1]), (k.strides[0], step, 1))

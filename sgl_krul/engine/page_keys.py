"""The keys of a session, as the estimator asks for them: K of its pages in the memory tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from sgl_krul.layout import KvLayout
from sgl_krul.store.memory import MemoryTier, runs

__all__ = ["MemoryKeys"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class MemoryKeys:
    """A `similarity.KeySource` over the pages `keys` of the memory tier, in the order of the session.

    The write-through may still be on its way with them: `arrived()` is waited for once, on the estimator's
    thread. Pages are pinned only while one layer of them is copied; one that was evicted by then ends it.
    """

    def __init__(
        self, memory: MemoryTier, layout: KvLayout, keys: Sequence[str], arrived: Callable[[], None]
    ) -> None:
        self._memory = memory
        self._layout = layout
        self._keys = tuple(keys)
        self._arrived: Callable[[], None] | None = arrived

    @contextmanager
    def keys(self, layer: int) -> Iterator[torch.Tensor | None]:
        """A copy, [n, G, D] in the pool's dtype; n: the tokens of all pages. See KeySource."""
        if self._arrived is not None:
            self._arrived()
            self._arrived = None
        yield self._copy(layer)

    def _copy(self, layer: int) -> torch.Tensor | None:
        layout = self._layout
        pinned = self._memory.pin(self._keys)
        if pinned is None:
            return None
        with pinned:
            out = np.empty((len(self._keys), layout.k_page_bytes), np.uint8)
            rows = self._memory.layer(layer)
            for slot, page, count in runs(pinned.slots, np.arange(len(self._keys))):
                np.copyto(out[page : page + count], rows[slot : slot + count, : layout.k_page_bytes])
        keys: torch.Tensor = torch.from_numpy(out).view(_DTYPES[layout.dtype])
        return keys.view(-1, layout.kv_heads, layout.head_dim)

"""The memory tier: to the KV pool against a plain memcpy, and the lookup of a long session.

To the pool: as a resume does it. The pages of 12 chunks, reserved chunk by chunk, are pinned, split into runs
and copied by the loader thread (`LayerLoad`) layer by layer into the tensors of SGLang's own KV pool on the
CPU; the clock stops when the last layer has landed. "In runs": the device pages are neighbours, as an idle
pool gives them; "scattered": every page lies elsewhere. The baseline is one np.copyto of the same number of
bytes between two buffers of the same kinds (one thread, as the loader is one).

Lookup: what KrulLinker does when SGLang asks for a session of 100,000 tokens at page size 16: build 6,250
keys and ask the tier, which holds 7 other such sessions too. No I/O.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.compare import Comparison, compare
from benchmarks.sample import CHUNK_PAGES, LAYOUT, NAMESPACE, Names, Sample
from sgl_krul.session.record import page_key
from sgl_krul.store.memory import MemoryTier, Slots, runs
from sgl_krul.store.workers import Workers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang's, about packages that need a GPU
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    from sgl_krul.engine.layer_load import LayerLoad
    from sgl_krul.engine.linker import KrulLinker
    from sgl_krul.engine.pool import KvPages

__all__ = ["LOOKUP_PAGES", "LookupResult", "measure_lookup", "measure_memory"]

LOOKUP_PAGES = 6250  # 100,000 tokens
_SESSIONS_BESIDE = 7


def measure_memory(sample: Sample, rounds: int, seed: int) -> tuple[Comparison, Comparison]:
    """Of pages in runs and of scattered ones."""
    count = sample.chunks * CHUNK_PAGES
    pool = _pool(2 * count)
    memory, keys = _filled(sample)
    loader = _Load(KvPages(pool, LAYOUT), memory, keys)
    scattered = np.random.default_rng(seed).permutation(2 * count)[:count] + 1  # page 0 is padding
    source = np.empty(sample.size_bytes, np.uint8)  # the kind of memory the arena is
    source[:] = 1
    target = torch.zeros(sample.size_bytes, dtype=torch.uint8).numpy()  # and the pool
    results = []
    for pages in (np.arange(1, count + 1), scattered):
        results.append(
            compare(
                sample.size_bytes,
                lambda number, pages=pages: loader.run(pages),
                lambda number: np.copyto(target, source),
                rounds=rounds,
            )
        )
        _require_landed(pool, pages, sample)
    loader.close()
    return results[0], results[1]


class _Load:
    """A session's way from pinned pages to the pool."""

    def __init__(self, pages: KvPages, memory: MemoryTier, keys: tuple[str, ...]) -> None:
        self._pages = pages
        self._memory = memory
        self._keys = keys
        self._workers = Workers("layer-load", 1)

    def run(self, device_pages: Slots) -> None:
        """Pin, find the runs, load, wait for the last layer, let go."""
        pinned = self._memory.pin(self._keys)
        if pinned is None:
            raise RuntimeError("a page has gone from the memory tier")
        load = LayerLoad(self._pages, self._memory, [(pinned, runs(pinned.slots, device_pages))])
        load.start(self._workers)
        load.finish()

    def close(self) -> None:
        """Stop the thread."""
        self._workers.close()


def _pool(pages: int) -> Any:
    """SGLang's own, with `pages` pages and the one it keeps for padding, its memory touched."""
    pool = MHATokenToKVPool(
        size=pages * LAYOUT.page_size,
        page_size=LAYOUT.page_size,
        dtype=torch.float32,
        head_num=LAYOUT.kv_heads,
        head_dim=LAYOUT.head_dim,
        layer_num=LAYOUT.layers,
        device="cpu",
        enable_memory_saver=False,
    )
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.fill_(1)
    return pool


def _filled(sample: Sample) -> tuple[MemoryTier, tuple[str, ...]]:
    """A tier with the sample's pages, and their keys."""
    names = Names(0, sample.chunks)
    keys = tuple(page_key(NAMESPACE, names.page_hash(page)) for page in range(sample.chunks * CHUNK_PAGES))
    memory = MemoryTier(LAYOUT.layers, LAYOUT.page_segment_bytes, 2 * sample.size_bytes)
    for index in range(sample.chunks):
        reservation = memory.reserve(keys[index * CHUNK_PAGES : (index + 1) * CHUNK_PAGES])
        if reservation is None:
            raise RuntimeError("no room in the memory tier")
        for layer in range(LAYOUT.layers):
            rows = sample.kv[layer, index].reshape(CHUNK_PAGES, LAYOUT.page_segment_bytes)
            memory.layer(layer)[reservation.slots] = rows
        memory.publish(reservation)
    return memory, keys


def _require_landed(pool: Any, pages: Slots, sample: Sample) -> None:
    """K and V of every layer must be those of the sample."""
    split = LAYOUT.k_page_bytes
    for layer in range(LAYOUT.layers):
        rows = sample.kv[layer].reshape(-1, LAYOUT.page_segment_bytes)
        for buffer, part in ((pool.k_buffer, rows[:, :split]), (pool.v_buffer, rows[:, split:])):
            paged = buffer[layer].view(torch.uint8).reshape(-1, split).numpy()
            if not np.array_equal(paged[pages], part):
                raise RuntimeError(f"layer {layer} of the pool is not what the memory tier holds")


@dataclass(frozen=True)
class LookupResult:
    """Microseconds of every round: the lookup, and SGLang's own hashing of the same pages."""

    lookup_us: tuple[float, ...]
    hashing_us: tuple[float, ...]

    @property
    def lookup_median_us(self) -> float:
        """Median of the lookup."""
        return statistics.median(self.lookup_us)

    @property
    def hashing_median_us(self) -> float:
        """Median of the hashing."""
        return statistics.median(self.hashing_us)


def measure_lookup(rounds: int) -> LookupResult:
    """All pages must be found."""
    tokens = Names(0, 1).token_ids(0, LOOKUP_PAGES).tolist()
    hashes = _hashes(tokens)
    memory = MemoryTier(LAYOUT.layers, 1, (1 + _SESSIONS_BESIDE) * LOOKUP_PAGES * LAYOUT.layers)
    for number in range(1 + _SESSIONS_BESIDE):
        other = Names(number, 1)
        ours = hashes if number == 0 else [other.page_hash(page) for page in range(LOOKUP_PAGES)]
        reservation = memory.reserve([page_key(NAMESPACE, page_hash) for page_hash in ours])
        if reservation is None:
            raise RuntimeError("no room in the memory tier")
        memory.publish(reservation)
    linker = KrulLinker(
        KvPages(_pool(1), LAYOUT), memory, NAMESPACE, max_layer_wait_s=0.02, forward_stream=None
    )
    transfers = [PoolTransfer(name=PoolName.KV, keys=list(hashes))]
    try:
        if len(linker.lookup("bench", transfers)) != LOOKUP_PAGES:
            raise RuntimeError("the session was not found")
        return LookupResult(
            _microseconds(lambda: linker.lookup("bench", transfers), rounds),
            _microseconds(lambda: _hashes(tokens), rounds),
        )
    finally:
        linker.close()


def _hashes(tokens: list[int]) -> list[str]:
    key = RadixKey(tokens, None, cache_salt=None)
    found: list[str] = get_storage_hash_str(key, None, page_size=LAYOUT.page_size)
    return found


def _microseconds(step: Callable[[], object], rounds: int) -> tuple[float, ...]:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e6)
    return tuple(times)

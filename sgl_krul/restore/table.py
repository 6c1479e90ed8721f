"""A restore as a table: what each chunk costs both streams at each depth.

A staircase R_0 >= R_1 >= ... (tokens recomputed at each layer) is the same as a depth for each chunk (layers
recomputed, from layer 0 on) that never grows from a chunk to the next. Both streams' costs are sums over
chunks of what a chunk costs at its depth, which is what the optimiser and the bound live on.

A lost chunk that the staircase does not recompute through all layers is filled at the end: when everything
before it is in place, it goes through all layers alone, and no load is left to hide it (`fill`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_krul.restore.cost import BLOCK_TOKENS, Floats, Rates, causal_pairs
from sgl_krul.restore.task import RestoreTask

__all__ = ["Chunks", "Depths", "Table", "compute_seconds", "read_chunks", "slice_starts"]

Depths = NDArray[np.int64]


class Chunks(NamedTuple):
    """The chunks that are not on the device yet, C of them, as arrays.

    `starts`, `ends`: their tokens, without those on the device, int64 [C]. `bytes`: int64 [C, L]. `holes`:
    bool [C]. `needed`: the depth a chunk must have because deeper layers alone are stored, int64 [C].
    `slices`: how many blocks begin in each, int64 [C].
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    tiers: tuple[str, ...]
    bytes: NDArray[np.int64]
    holes: NDArray[np.bool_]
    needed: Depths
    slices: NDArray[np.int64]

    @property
    def bare(self) -> NDArray[np.bool_]:
        """Chunks that can't be brought without recompute, bool [C]."""
        return self.holes | (self.needed > 0)

    def floor(self, count: int) -> Depths:
        """The least depths that bring the first `count` chunks: what one needs, all before it need."""
        return np.maximum.accumulate(self.needed[count - 1 :: -1])[::-1] if count else self.needed[:0]

    def count(self, tokens: int) -> int:
        """How many chunks end at or before `tokens`."""
        return int(np.searchsorted(self.ends, tokens, "right"))


def read_chunks(task: RestoreTask) -> Chunks:
    """The task's chunks from the first one on that is not whole on the device."""
    all_ends = np.cumsum([chunk.tokens for chunk in task.chunks], dtype=np.int64)
    skipped = int(np.searchsorted(all_ends, task.on_device_tokens, "right"))
    chunks = task.chunks[skipped:]
    ends = all_ends[skipped:]
    starts = np.concatenate([np.array([task.on_device_tokens], np.int64), ends[:-1]])[: len(ends)]
    flat = chain.from_iterable(chunk.segment_bytes for chunk in chunks)
    sizes = np.fromiter(flat, np.int64, len(chunks) * task.layers).reshape(len(chunks), task.layers)
    tiers = tuple(chunk.tier for chunk in chunks)
    holes = np.array([not tier for tier in tiers], bool)
    sizes[holes] = 0
    absent = (sizes == 0) & ~holes[:, None]
    needed = np.where(absent.any(1), task.layers - np.argmax(absent[:, ::-1], 1), 0)
    first = slice_starts(starts, ends)
    slices = np.searchsorted(first, ends, "left") - np.searchsorted(first, starts, "left")
    return Chunks(starts, ends, tiers, sizes, holes, needed.astype(np.int64), slices)


def slice_starts(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where blocks begin, int64: whole chunks up to BLOCK_TOKENS together; a longer chunk is cut."""
    found: list[int] = []
    end_of_block = -1
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if end > end_of_block:
            found.extend(range(start, end, BLOCK_TOKENS))
            end_of_block = start + BLOCK_TOKENS
    return np.array(found, np.int64)


def compute_seconds(task: RestoreTask, chunks: Chunks, rates: Rates, staircase: Sequence[int]) -> float:
    """What the compute stream takes for any staircase, to the token. 0.0 without compute rates."""
    rate = rates.compute
    if rate is None:
        return 0.0
    device = task.on_device_tokens
    begins = slice_starts(chunks.starts, chunks.ends)
    seconds = 0.0
    for layer, end in enumerate(staircase):
        slices = int(np.searchsorted(begins, end, "left"))
        seconds += (end - device) * rate.kv_s_per_token + slices * rate.slice_s
        goes_on = staircase[layer + 1] if layer + 1 < task.layers else device
        seconds += (goes_on - device) * rate.rest_s_per_token
        seconds += causal_pairs(device, goes_on - device) * rate.attention_s_per_pair
    return seconds


class Table:
    """Costs of C chunks at depths 0 ... L, float64 [C, L + 1], seconds; `bytes` likewise int64.

    `segments`: seconds of each segment in a load, float64 [C, L].
    """

    def __init__(self, task: RestoreTask, rates: Rates) -> None:
        self.task = task
        self.rates = rates
        self.chunks = chunks = read_chunks(task)
        count, layers = len(chunks.ends), task.layers
        self.bytes = np.zeros((count, layers + 1), np.int64)
        self.bytes[:, :layers] = np.cumsum(chunks.bytes[:, ::-1], 1)[:, ::-1]
        self.load = self._load_seconds()
        self.compute = np.zeros((count, layers + 1))
        self.fill = np.zeros((count, layers + 1))
        if rates.compute is not None:
            self._fill_compute(rates)

    def _fill_compute(self, rates: Rates) -> None:
        rate, chunks, layers = rates.compute, self.chunks, self.task.layers
        assert rate is not None
        tokens = chunks.ends - chunks.starts
        pairs = tokens * chunks.starts + tokens * (tokens + 1) // 2
        stop = tokens * rate.kv_s_per_token + chunks.slices * rate.slice_s
        onward = tokens * rate.rest_s_per_token + pairs * rate.attention_s_per_pair
        depths = np.arange(layers + 1)
        self.compute[:] = np.outer(stop, depths) + np.outer(onward, np.maximum(depths - 1, 0))
        # A lost chunk alone is a block of its own, whatever block it would have been in.
        own = tokens * rate.kv_s_per_token + np.ceil(tokens / BLOCK_TOKENS) * rate.slice_s
        whole = own * layers + onward * (layers - 1)
        self.fill[chunks.holes, :layers] = whole[chunks.holes, None]

    def _load_seconds(self) -> Floats:
        chunks, rates = self.chunks, self.rates
        segments = np.zeros(self.bytes.shape, np.int64)
        segments[:, :-1] = np.cumsum(chunks.bytes[:, ::-1] > 0, 1)[:, ::-1]
        # Whole segments to a request, as many as fit, at least one.
        together = np.maximum(rates.request_bytes * segments // np.maximum(self.bytes, 1), 1)
        requests = np.ceil(segments / together)
        load = np.zeros(self.bytes.shape)
        for name in self.tier_names(len(chunks.ends)):
            rows = np.array([tier == name for tier in chunks.tiers], bool)
            load[rows] = rates.tier(name).fetch_s(
                self.bytes[rows].astype(np.float64), requests[rows], rates.land_s_per_byte
            )
        return load

    def tier_names(self, count: int) -> list[str]:
        """Tiers of the first `count` chunks, in the order they come."""
        return [name for name in dict.fromkeys(self.chunks.tiers[:count]) if name]

    def start_seconds(self, depths: Depths) -> Floats:
        """What the load stream needs before it has its pace, for each tier it loads from.

        Of depths int64 [..., C]; float64 [...].
        """
        count = depths.shape[-1]
        loaded = self.bytes[np.arange(count), depths]
        seconds = np.zeros(depths.shape[:-1])
        for name in self.tier_names(count):
            rows = np.array([tier == name for tier in self.chunks.tiers[:count]], bool)
            size = np.minimum(loaded[..., rows].sum(-1), self.rates.request_bytes)
            start = self.rates.tier(name).start_s(size, self.rates.land_s_per_byte)
            seconds += np.where(size > 0, start, 0.0)
        return seconds

    def layer_loads(self, depths: Depths) -> Floats:
        """Seconds of each layer's loads, a chunk's shared out by bytes: [..., C] -> float64 [..., L]."""
        rows = np.arange(depths.shape[-1])
        pace = self.load[rows, depths] / np.maximum(self.bytes[rows, depths], 1)
        wanted = np.arange(self.task.layers) >= depths[..., None]
        seconds: Floats = (self.chunks.bytes[: len(rows)] * wanted * pace[..., None]).sum(-2)
        return seconds

    def staircase(self, depths: Depths) -> tuple[int, ...]:
        """Tokens recomputed at each layer, absolute, for depths that never grow."""
        deep = (depths[:, None] > np.arange(self.task.layers)).sum(0)
        edges = np.concatenate([np.array([self.task.on_device_tokens], np.int64), self.chunks.ends])
        return tuple(int(end) for end in edges[deep])

    def depths(self, staircase: Sequence[int], count: int) -> Depths:
        """Layers that need no load for each of the first `count` chunks: R_l reaches the chunk's end."""
        ends = self.chunks.ends[:count]
        depths: Depths = (np.array(staircase, np.int64) >= ends[:, None]).sum(1)
        return depths

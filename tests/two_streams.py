"""Two streams of a restore, simulated event by event: what the planner's sums are compared with.

Nothing of the planner is used here but its inputs. Compute takes slices, one after another: block by block
from the front, each block through layers 0, 1, 2, ... and narrower as its chunks are left to the loaders.
Loaders claim segments from the end: the last chunk first, in it the deepest layers first. A claim waits for
the latency, then for its turn on the tier's link, then for its turn to be landed. With a staircase each
stream has its own cells; without one (`meet`) they take what the other has not begun, and layer 0 is left to
compute until loaders have nothing else.

A lost chunk that no stream has computed on its way is computed when everything before it is in place.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from sgl_krul.restore.cost import Rates
from sgl_krul.restore.task import RestoreTask

__all__ = ["Outcome", "meet", "run_staircase"]

BLOCK = 512


class Outcome(NamedTuple):
    """`seconds`: until all is in place. `compute_s`, `load_s`: until that stream's last cell."""

    seconds: float
    compute_s: float
    load_s: float
    load_bytes: int
    staircase: tuple[int, ...]


@dataclass
class _Cells:
    """What each stream has taken of the chunks that are not on the device."""

    task: RestoreTask
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # index in task.chunks
    computed: list[int] = field(default_factory=list)  # layers compute has begun, from 0 on
    loaded: list[int] = field(default_factory=list)  # the lowest layer a loader has claimed
    stop: list[int] | None = None  # layers that are compute's by a staircase

    def __post_init__(self) -> None:
        end = 0
        for number, chunk in enumerate(self.task.chunks):
            start, end = max(end, self.task.on_device_tokens), end + chunk.tokens
            if end > self.task.on_device_tokens:
                self.starts.append(start)
                self.ends.append(end)
                self.numbers.append(number)
        self.computed = [0] * len(self.ends)
        self.loaded = [self.task.layers] * len(self.ends)

    def hole(self, chunk: int) -> bool:
        return not self.task.chunks[self.numbers[chunk]].tier

    def goes(self, chunk: int, layer: int) -> bool:
        """Whether compute takes this layer of the chunk."""
        if self.stop is not None:
            return layer < self.stop[chunk]
        return layer < self.loaded[chunk]

    def blocks(self) -> list[list[int]]:
        found: list[list[int]] = []
        for chunk, end in enumerate(self.ends):
            if found and end - self.starts[found[-1][0]] <= BLOCK:
                found[-1].append(chunk)
            else:
                found.append([chunk])
        return found


class _Loaders:
    """Workers in a ring: claim, latency, link, landing."""

    def __init__(self, cells: _Cells, rates: Rates) -> None:
        self.cells, self.rates = cells, rates
        self.bytes = 0
        self.done_s = 0.0
        self._link_free: dict[str, float] = {}
        self._landing_free = 0.0
        self._order = [c for c in reversed(range(len(cells.ends))) if not cells.hole(c)]
        self._next = 0
        self._tier_done: dict[str, float] = {}

    def claim(self, floor: int) -> tuple[str, int] | None:
        """The next claim that leaves layers below `floor` to compute: its tier and bytes."""
        cells = self.cells
        while self._next < len(self._order):
            chunk = self._order[self._next]
            stored = cells.task.chunks[cells.numbers[chunk]]
            least = cells.stop[chunk] if cells.stop is not None else max(floor, cells.computed[chunk])
            size = 0
            while cells.loaded[chunk] > least:
                segment = stored.segment_bytes[cells.loaded[chunk] - 1]
                if not segment or (size and size + segment > self.rates.request_bytes):
                    break
                size += segment
                cells.loaded[chunk] -= 1
            if size:
                self.bytes += size
                return stored.tier, size
            self._next += 1
        if floor and cells.stop is None:
            self._next = 0
            self._order = [c for c in self._order if cells.loaded[c] > cells.computed[c]]
            return self.claim(0)
        return None

    def carry(self, now: float, tier: str, size: int) -> float:
        """When a claim made now has landed."""
        rates = self.rates.tiers[tier]
        begins = max(now + rates.latency_s, self._link_free.get(tier, 0.0))
        arrives = begins + size / rates.bytes_per_s
        self._link_free[tier] = arrives
        self._landing_free = max(arrives, self._landing_free) + size * self.rates.land_s_per_byte
        self.done_s = max(self.done_s, self._landing_free)
        return self._landing_free


def _slice_s(rates: Rates, start: int, end: int, onward_end: int) -> float:
    """Tokens [start, end) through a layer, of which [start, onward_end) go on to the next."""
    rate = rates.compute
    assert rate is not None
    pairs = sum(token + 1 for token in range(start, onward_end))
    onward = max(onward_end - start, 0)
    kv_s = (end - start) * rate.kv_s_per_token
    return rate.slice_s + kv_s + onward * rate.rest_s_per_token + pairs * rate.attention_s_per_pair


def _computing(cells: _Cells, rates: Rates, blocks: list[list[int]]) -> Iterator[float]:
    """Yields the seconds of each slice, from the first block to the last."""
    assert rates.compute is not None
    layers = cells.task.layers
    for block in blocks:
        for layer in range(layers):
            going = [chunk for chunk in block if cells.goes(chunk, layer)]
            if not going:
                break
            for chunk in going:
                cells.computed[chunk] = layer + 1
            onward = [chunk for chunk in going if layer + 1 < layers and cells.goes(chunk, layer + 1)]
            start, end = cells.starts[going[0]], cells.ends[going[-1]]
            more = -(-(end - start) // BLOCK) - 1  # slices of a chunk longer than a block
            onward_end = cells.ends[onward[-1]] if onward else start
            yield _slice_s(rates, start, end, onward_end) + more * rates.compute.slice_s


def _simulate(cells: _Cells, rates: Rates, workers: int) -> Outcome:
    loaders = _Loaders(cells, rates)
    compute = _computing(cells, rates, cells.blocks()) if rates.compute is not None else iter(())
    order = count()
    events: list[tuple[float, int, str]] = [(0.0, next(order), "compute")]
    events += [(0.0, next(order), "load") for _ in range(workers)]
    heapq.heapify(events)
    compute_s = 0.0
    while events:
        now, _, who = heapq.heappop(events)
        if who == "compute":
            seconds = next(compute, None)
            if seconds is None:
                compute_s = now
                continue
            heapq.heappush(events, (now + seconds, next(order), who))
        else:
            claim = loaders.claim(floor=1 if rates.compute is not None else 0)
            if claim is not None:
                heapq.heappush(events, (loaders.carry(now, *claim), next(order), who))
    filled_s = _fill(cells, rates)
    layers = cells.task.layers
    depths = [layers if cells.hole(c) and filled_s else cells.computed[c] for c in range(len(cells.ends))]
    stairs = tuple(
        max([cells.task.on_device_tokens, *(e for e, d in zip(cells.ends, depths, strict=True) if d > layer)])
        for layer in range(layers)
    )
    return Outcome(
        max(compute_s, loaders.done_s) + filled_s, compute_s, loaders.done_s, loaders.bytes, stairs
    )


def _fill(cells: _Cells, rates: Rates) -> float:
    """Lost chunks that compute has not taken through all layers, one after another."""
    lost = [
        chunk for chunk, depth in enumerate(cells.computed) if cells.hole(chunk) and depth < cells.task.layers
    ]
    seconds = 0.0
    for chunk in lost:
        alone = _Cells(cells.task)
        alone.stop = [cells.task.layers if other == chunk else 0 for other in range(len(cells.ends))]
        seconds += sum(_computing(alone, rates, [[chunk]]))
    return seconds


def _cut(task: RestoreTask, tokens: int) -> RestoreTask:
    kept, end = 0, 0
    for chunk in task.chunks:
        end += chunk.tokens
        kept += end <= tokens
    return RestoreTask(
        task.layers, task.page_size, task.chunks[:kept], task.on_device_tokens, task.new_tokens
    )


def run_staircase(
    task: RestoreTask, rates: Rates, staircase: Sequence[int], tokens: int, workers: int
) -> Outcome:
    """Each stream does its own cells of a chunk-aligned staircase; what lies behind `tokens` stays."""
    cells = _Cells(_cut(task, tokens))
    cells.stop = [sum(end >= chunk_end for end in staircase) for chunk_end in cells.ends]
    return _simulate(cells, rates, workers)


def meet(task: RestoreTask, rates: Rates, workers: int) -> Outcome:
    """Both streams take what is left until nothing is."""
    return _simulate(_Cells(task), rates, workers)

"""The best staircase: depths of chunks, never growing, that make the slower of two streams as fast as can be.

Minimise max(a + sum_c A[c, k_c], b + sum_c B[c, k_c]) over k_0 >= k_1 >= ... >= k_(C-1), k_c >= floor_c,
where A falls and B rises less than A where k falls (compute and load).

Few staircases are tried all. Else a price is put on load: minimise sum_c A + price * B. For one price this is
easy: each chunk takes its own best depth, and where that would grow from a chunk to the next, a dynamic
programme over (group of chunks, depth) gives the best that does not. The higher the price, the deeper the
chunks: B - A falls in k, so the least minimisers are nested (Topkis). Two prices are found between which the
balance of the streams turns, then the cells between their two staircases are walked through one by one, once
chunk by chunk and once layer by layer, and the best point on the way is improved by exchanging chunks' ends.

Nothing here is restricted to convex costs or to equal layers; both only make it faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain, combinations_with_replacement
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_krul.restore.beam import search
from sgl_krul.restore.cost import Floats
from sgl_krul.restore.table import Depths

__all__ = ["StreamCosts", "all_depths", "best_depths"]

_FEW = 4000  # staircases that are tried one and all
_PRICES = 16  # tried at once; three times, each time between two neighbours of the time before
_PRICE_RANGE = 1e6
_SMALL = 24  # chunks: beyond, a cell is too little to search for
_GROUPS = 48  # of chunks, in the dynamic programme
_EXCHANGES = 24  # of chunks' ends, at most
_WIDE = 96  # moves on each side that are paired


class StreamCosts(NamedTuple):
    """Two streams' seconds for C chunks at depths 0 ... L, float64 [C, L + 1], and what comes besides.

    `floor`: int64 [C], never growing.
    """

    compute: Floats
    load: Floats
    floor: Depths
    compute_ahead_s: float = 0.0
    load_ahead_s: float = 0.0

    def totals(self, depths: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Both streams' seconds for depths int64 [S, C]: two float64 [S]."""
        chunks = np.arange(depths.shape[1])
        return (
            self.compute_ahead_s + self.compute[chunks, depths].sum(1),
            self.load_ahead_s + self.load[chunks, depths].sum(1),
        )

    def seconds(self, depths: NDArray[np.int64]) -> Floats:
        """The slower stream, for depths int64 [S, C]: float64 [S]."""
        result: Floats = np.maximum(*self.totals(depths))
        return result


def best_depths(streams: StreamCosts, seconds: Callable[[Depths], Floats] | None = None) -> Depths:
    """The depths found, int64 [C]. `seconds` judges where few staircases are tried one and all."""
    chunks, depths = streams.compute.shape
    if not chunks:
        return streams.floor
    if math.comb(depths - 1 + chunks, chunks) <= _FEW:
        tried = all_depths(depths - 1, chunks)
        tried = tried[(tried >= streams.floor).all(1)]
        best: Depths = tried[np.argmin((seconds or streams.seconds)(tried))]
        return best
    low, high, price = _nearest_balance(streams)
    near = _exchange(streams, _walk(streams, low, high))
    if chunks > _SMALL:
        return near
    compute, load = streams.compute.copy(), streams.load.copy()
    compute[0] += streams.compute_ahead_s
    load[0] += streams.load_ahead_s
    return search(compute, load, streams.floor, price, near, float(streams.seconds(near[None])[0]))


def all_depths(layers: int, chunks: int) -> NDArray[np.int64]:
    """Every staircase, int64 [S, C]."""
    every = combinations_with_replacement(range(layers, -1, -1), chunks)
    return np.fromiter(chain.from_iterable(every), np.int64).reshape(-1, chunks)


# -- a price on load --


def _nearest_balance(streams: StreamCosts) -> tuple[Depths, Depths, float]:
    """Two nested staircases, best at neighbouring prices, load-bound one first; a price between."""
    chunks, width = streams.compute.shape
    groups = _Groups.of(chunks, _GROUPS)
    compute, load = float(streams.compute.max()), float(streams.load.max())
    price = min(max(compute, 1e-150) / max(load, compute * 1e-9, 1e-150), 1e150)
    least, most = price / _PRICE_RANGE, price * _PRICE_RANGE
    low, high = streams.floor, np.full(chunks, width - 1)
    # Prices are found with chunks in groups, which is cheap; the last ones with every chunk on its own.
    few = groups.sum(streams)
    for rough in (few, few, streams):
        prices = np.geomspace(least, most, _PRICES)
        depths = _solve(rough, prices)
        if len(rough.floor) < chunks:
            depths = groups.spread(depths)
        computed, loaded = streams.totals(depths)
        below = computed <= loaded
        turn = _PRICES if below.all() else int(np.argmin(below))
        if turn > 0:
            low, least = depths[turn - 1], prices[turn - 1]
        if turn < _PRICES:
            high, most = depths[turn], prices[turn]
    return np.minimum(low, high), np.maximum(low, high), float(np.sqrt(least * most))


class _Groups(NamedTuple):
    """Neighbouring chunks together: the first of each group, how many they are."""

    firsts: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @staticmethod
    def of(chunks: int, groups: int) -> _Groups:
        firsts = np.arange(0, chunks, -(-chunks // groups))
        return _Groups(firsts, np.diff(np.append(firsts, chunks)))

    def sum(self, streams: StreamCosts) -> StreamCosts:
        """Groups as chunks. Floors never grow, so the first chunk's is the group's."""
        if len(self.firsts) == len(streams.floor):
            return streams
        return streams._replace(
            compute=np.add.reduceat(streams.compute, self.firsts, axis=0),
            load=np.add.reduceat(streams.load, self.firsts, axis=0),
            floor=streams.floor[self.firsts],
        )

    def spread(self, depths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Depths of groups, int64 [P, G], as depths of chunks, int64 [P, C]."""
        return np.repeat(depths, self.sizes, axis=1)


def _solve(streams: StreamCosts, prices: Floats) -> NDArray[np.int64]:
    """The least minimisers for each price, int64 [P, C]."""
    cost = streams.load * prices[:, None, None]
    cost += streams.compute
    forbidden = np.arange(streams.compute.shape[1]) < streams.floor[:, None]
    if forbidden.any():
        cost[:, forbidden] = np.inf
    depths: NDArray[np.int64] = cost.argmin(2)
    growing = (np.diff(depths, axis=1) > 0).any(1)
    if growing.any():
        groups = _Groups.of(len(streams.floor), _GROUPS)
        few = groups.sum(streams)
        depths[growing] = groups.spread(_solve_monotone(few, prices[growing]))
    return depths


def _solve_monotone(streams: StreamCosts, prices: Floats) -> NDArray[np.int64]:
    """The same where chunks on their own would grow deeper, by a dynamic programme from the last chunk on."""
    chunks, width = streams.compute.shape
    levels = np.arange(width)
    cost = streams.compute[:, None] + prices[:, None] * streams.load[:, None]
    cost += np.where(levels < streams.floor[:, None], np.inf, 0.0)[:, None]
    for chunk in range(chunks - 2, -1, -1):
        cost[chunk] += np.minimum.accumulate(cost[chunk + 1], axis=1)
    depths = np.empty((len(prices), chunks), np.int64)
    above = np.full(len(prices), width - 1)
    for chunk in range(chunks):
        above = np.where(levels <= above[:, None], cost[chunk], np.inf).argmin(1)
        depths[:, chunk] = above
    return depths


# -- between two staircases --


def _walk(streams: StreamCosts, low: Depths, high: Depths) -> Depths:
    """The best on two ways from `low` up to `high`, cell by cell."""
    grow_compute, grow_load = np.diff(streams.compute, axis=1), np.diff(streams.load, axis=1)
    layers = np.arange(grow_compute.shape[1])
    between = (layers >= low[:, None]) & (layers < high[:, None])
    by_chunk = np.nonzero(between)
    by_layer = np.nonzero(between.T)[::-1]
    best, best_s = low, np.inf
    start_compute, start_load = (float(total[0]) for total in streams.totals(low[None]))
    for chunks, cells in (by_chunk, by_layer):
        computed = np.cumsum(np.concatenate(([start_compute], grow_compute[chunks, cells])))
        loaded = np.cumsum(np.concatenate(([start_load], grow_load[chunks, cells])))
        worst = np.maximum(computed, loaded)
        step = int(worst.argmin())
        if worst[step] < best_s:
            best_s = float(worst[step])
            best = low + np.bincount(chunks[:step], minlength=len(low))
    return best


def _exchange(streams: StreamCosts, depths: Depths) -> Depths:
    """Improve by giving one chunk, or a deeper one and a shallower one together, other depths."""
    compute, load = (float(total[0]) for total in streams.totals(depths[None]))
    for _ in range(_EXCHANGES):
        chunk, depth, d_compute, d_load = _moves(streams, depths)
        seconds = np.maximum(compute + d_compute[:, None] + d_compute, load + d_load[:, None] + d_load)
        # Two moves of one chunk, or of neighbours, may not fit together: the first move is "none".
        clash = np.abs(chunk[:, None] - chunk) < 2
        clash[0], clash[:, 0] = False, False
        seconds[clash] = np.inf
        one, two = np.unravel_index(int(seconds.argmin()), seconds.shape)
        if not seconds[one, two] < max(compute, load) * (1 - 1e-6):
            break
        depths = depths.copy()
        for move in {int(one), int(two)} - {0}:
            depths[chunk[move]] = depth[move]
        compute += d_compute[one] + d_compute[two]
        load += d_load[one] + d_load[two]
    return depths


def _moves(streams: StreamCosts, depths: Depths) -> tuple[Depths, Depths, Floats, Floats]:
    """Single chunks that may change, to which depth, and both streams' change. The first does nothing."""
    width = streams.compute.shape[1]
    above = np.concatenate(([width - 1], depths[:-1]))
    below = np.maximum(np.concatenate((depths[1:], [0])), streams.floor)
    levels = np.arange(width)
    allowed = (levels <= above[:, None]) & (levels >= below[:, None]) & (levels != depths[:, None])
    chunk, depth = np.nonzero(allowed)
    d_compute = streams.compute[chunk, depth] - streams.compute[chunk, depths[chunk]]
    d_load = streams.load[chunk, depth] - streams.load[chunk, depths[chunk]]
    if len(chunk) > 2 * _WIDE:  # the smallest steps: the walk has done the large ones
        nearest = np.argsort(np.maximum(np.abs(d_compute), np.abs(d_load)), kind="stable")[: 2 * _WIDE]
        chunk, depth = chunk[nearest], depth[nearest]
        d_compute, d_load = d_compute[nearest], d_load[nearest]
    return (
        np.concatenate(([-2], chunk)),
        np.concatenate(([0], depth)),
        np.concatenate(([0.0], d_compute)),
        np.concatenate(([0.0], d_load)),
    )

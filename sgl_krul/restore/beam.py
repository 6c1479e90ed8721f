"""The last few percent on a small session, where one cell is a good part of the whole.

Chunks are decided one after another, from the first. A partial staircase is given up when it can't end below
the best one known: what is decided, plus for each later chunk the least it can cost at a price on load, is a
bound (sgl_krul.restore.bound), and so is each stream alone. Of what is left, the `_WIDTH` with the lowest
bounds are kept; while there are no more than that, what comes out is the best there is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sgl_krul.restore.cost import Floats
from sgl_krul.restore.table import Depths

__all__ = ["search"]

_WIDTH = 256


def search(compute: Floats, load: Floats, floor: Depths, price: float, best: Depths, best_s: float) -> Depths:
    """Depths int64 [C] that are better than `best`, which take `best_s`, if any are found.

    `compute`, `load`: seconds, float64 [C, L + 1], what comes besides added to one chunk. `price` puts the
    streams about in balance.
    """
    chunks, width = compute.shape
    prices = np.array([0.0, price / 1.3, price, price * 1.3, 1e9])
    levels = np.arange(width)
    allowed = levels >= floor[:, None]
    mixed = np.where(allowed, compute + prices[:, None, None] * load, np.inf)  # [P, C, L + 1]
    rest = np.zeros((len(prices), chunks + 1))
    rest[:, :chunks] = np.cumsum(mixed.min(2)[:, ::-1], 1)[:, ::-1]
    above = np.array([width - 1])
    computed, loaded = np.zeros(1), np.zeros(1)
    paths = np.zeros((1, 0), np.int64)
    for chunk in range(chunks):
        parent, depth = np.nonzero((levels <= above[:, None]) & allowed[chunk])
        a, b = computed[parent] + compute[chunk, depth], loaded[parent] + load[chunk, depth]
        bounds = ((a + prices[:, None] * b + rest[:, chunk + 1 : chunk + 2]) / (1 + prices)[:, None]).max(0)
        kept = np.nonzero(bounds < best_s * (1 - 1e-9))[0]
        kept = kept[_undominated(depth[kept], a[kept], b[kept])]
        if not len(kept):
            return best
        if len(kept) > _WIDTH:
            kept = kept[np.argpartition(bounds[kept], _WIDTH)[:_WIDTH]]
        above, computed, loaded = depth[kept], a[kept], b[kept]
        paths = np.column_stack([paths[parent[kept]], above])
    found: Depths = paths[int(np.maximum(computed, loaded).argmin())]
    return found


def _undominated(depth: Depths, computed: Floats, loaded: Floats) -> NDArray[np.int64]:
    """Which are not beaten by one of the same depth in both streams."""
    order = np.lexsort((loaded, computed, depth))
    # Of one depth, in the order of compute, only those count that load less than all before.
    keep: list[int] = []
    last_depth, least = -1, np.inf
    for index, level, load in zip(order.tolist(), depth[order].tolist(), loaded[order].tolist(), strict=True):
        if level != last_depth:
            last_depth, least = level, np.inf
        if load < least:
            least = load
            keep.append(index)
    return np.array(keep, np.int64)

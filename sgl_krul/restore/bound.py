"""No plan can be faster than this.

A restore of n chunks lasts max(A, B), A and B the seconds of the two streams (what is filled at the end
counts in both). For any price p >= 0, max(A, B) >= (A + p B) / (1 + p): the larger of two numbers is at least
any weighted mean of them. A and B are sums over chunks of what a chunk costs at its depth. Now let every
chunk take the depth that is best for itself at this price, whether depths then fall from chunk to chunk or
not, and let the load stream begin at once:

    max(A, B) >= sum_c min_k (A[c, k] + p B[c, k]) / (1 + p)

That holds for every staircase and every p, so the largest of it over p is taken. It is the dual of the linear
programme in which chunks may also mix depths, hence as good as any relaxation of that kind, and with many
small chunks close to what can be reached. To it comes the forward of all tokens after the n chunks, and the
smallest over n is the bound: n = all, where a plan may end, and none, which is exact.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sgl_krul.restore.cost import Floats
from sgl_krul.restore.table import Table

__all__ = ["restore_bounds"]

_PRICES = 24
_PRICE_RANGE = 1e6


def restore_bounds(table: Table, rounds: int) -> Floats:
    """The least seconds that bring the first 0 ... C chunks, without the forward: float64 [C + 1].

    More rounds of prices make it tighter for all chunks together; it holds after any number of them.
    """
    compute, load = table.compute + table.fill, table.load + table.fill
    count, width = compute.shape
    bounds = np.zeros(count + 1)
    highest = compute.max(initial=0.0) / max(load.max(initial=0.0), 1e-300)
    if not count or not highest > 0:  # nothing to bring, or nothing to bring it with but the link
        bounds[1:] = np.cumsum(load.min(1, initial=np.inf))
        return bounds
    forbidden = np.arange(width) < table.chunks.needed[:, None]
    least, most = min(highest, 1e280) / _PRICE_RANGE, min(highest, 1e280) * _PRICE_RANGE
    for _ in range(rounds):
        prices = np.geomspace(least, most, _PRICES)
        each = _cheapest(compute, load, forbidden, prices)
        means = np.cumsum(each, 1) / (1 + prices)[:, None]
        bounds[1:] = np.maximum(bounds[1:], means.max(0))
        best = int(means[:, -1].argmax())
        least, most = prices[max(best - 1, 0)], prices[min(best + 1, _PRICES - 1)]
    return bounds


def _cheapest(compute: Floats, load: Floats, forbidden: NDArray[np.bool_], prices: Floats) -> Floats:
    """Each chunk's least mixed cost at each price: float64 [P, C]."""
    cost = load * prices[:, None, None]
    cost += compute
    if forbidden.any():
        cost[:, forbidden] = np.inf
    least: Floats = cost.min(2)
    return least

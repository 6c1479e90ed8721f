"""Which layers share their KV: pairs of an owner (the lower layer) and a partner (the upper one)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Pair", "fixed_pairs", "greedy_pairs", "pair_count", "random_pairs"]


class Pair(NamedTuple):
    """Two layers, `owner` < `partner`. `distance`: of their attention; None where nobody looked at it."""

    owner: int
    partner: int
    distance: float | None = None


def pair_count(layers: int, share: float) -> int:
    """How many pairs there are when `share` (Krul's r_l) of all layers give up their own KV.

    One layer of each pair does, so it is floor(share * layers + .5), at most layers / 2.

    Raises:
        ValueError: no layers; a share below 0, above .5 or NaN.
    """
    if layers < 1:
        raise ValueError(f"layers: expected at least 1; got {layers}")
    if not 0 <= share <= 0.5:
        raise ValueError(f"share: expected 0 (no pairs) to .5 (all layers in pairs); got {share!r}")
    return min(math.floor(share * layers + 0.5), layers // 2)


def greedy_pairs(
    distances: NDArray[np.floating[Any]], candidates: Iterable[int], count: int
) -> tuple[Pair, ...]:
    """Krul's choice (arXiv 2507.08045): the closest pair, then the closest of what is left, up to `count`.

    `distances` [L, L]: ||A_i - A_j||_F of the layers' attention matrices; what lies above the diagonal is
    read. No layer is in two pairs. Of equally close pairs the one with the lower owner goes first, then the
    one with the lower partner. Fewer than `count` where the candidates are used up. Closest pair first.

    Raises:
        ValueError: distances not square, or one of a candidate pair negative or not finite; a candidate that
            is no layer; a negative count.
    """
    layers = len(distances)
    if distances.shape != (layers, layers):
        raise ValueError(f"distances: expected [layers, layers]; got {list(distances.shape)}")
    able = sorted(set(candidates))
    if able and not 0 <= able[0] <= able[-1] < layers:
        raise ValueError(f"candidates: expected layers of {layers}; got {able}")
    _check_count(count)
    rows, columns = np.triu_indices(len(able), 1)
    index = np.array(able, np.int64)
    found = distances[index[rows], index[columns]].astype(np.float64)
    if not (np.isfinite(found) & (found >= 0)).all():
        raise ValueError("distances: expected finite numbers >= 0")
    pairs: list[Pair] = []
    used: set[int] = set()
    for at in np.argsort(found, kind="stable"):  # stable: ties stay in the order of their layers
        owner, partner = able[rows[at]], able[columns[at]]
        if len(pairs) == count:
            break
        if owner not in used and partner not in used:
            used |= {owner, partner}
            pairs.append(Pair(owner, partner, float(found[at])))
    return tuple(pairs)


def fixed_pairs(layers: int, count: int, start: int | None = None) -> tuple[Pair, ...]:
    """MiniCache's choice (arXiv 2405.14366): neighbours from the middle up, the same for every session.

    (l, l+1) for l = start, start + 2, ...; `start` is layers // 2 where none is given. MiniCache ends at the
    last layer. Here, that any count may be compared, (start-2, start-1), (start-4, start-3), ... follow.
    Fewer than `count` where no two neighbours are left.

    Raises:
        ValueError: no layers, a negative count, a start that is no layer.
    """
    start = layers // 2 if start is None else start
    if not 0 <= start < layers:
        raise ValueError(f"start: expected a layer of {layers}; got {start}")
    _check_count(count)
    owners = [*range(start, layers - 1, 2), *range(start - 2, -1, -2)]
    return tuple(Pair(owner, owner + 1) for owner in owners[:count])


def random_pairs(layers: int, count: int, seed: int) -> tuple[Pair, ...]:
    """Pairs by chance, to compare with: layers shuffled by `seed`, then taken two by two.

    The shuffle sorts by SHA-256, so that a seed means the same with every version of everything.

    Raises:
        ValueError: no layers, a negative count.
    """
    if layers < 1:
        raise ValueError(f"layers: expected at least 1; got {layers}")
    _check_count(count)
    order = sorted(range(layers), key=lambda layer: hashlib.sha256(f"{seed}/{layer}".encode()).digest())
    couples = zip(order[::2], order[1::2], strict=False)  # of an odd number one is left over
    return tuple(Pair(min(couple), max(couple)) for couple in couples)[:count]


def _check_count(count: int) -> None:
    if count < 0:
        raise ValueError(f"count: expected at least 0; got {count}")

"""What coded KV does to a layer: the relative error of its attention output, on the session's own queries.

Everything here runs beside a server, so no product of matrices is large: OpenBLAS takes all cores for more
than 2^18 multiply-adds (and its threads spin for a while after that), and stays in the calling thread below.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sgl_krul.codec.block import KvBlock

__all__ = [
    "LossMeter",
    "Losses",
    "Probe",
    "Queries",
    "attention_output",
    "relative_loss",
    "row_losses",
    "spread_order",
]

Floats: TypeAlias = NDArray[np.float32]
Positions: TypeAlias = NDArray[np.int64]

_SERIAL_MACS = (
    1 << 18
)  # multiply-adds of one product: SMP_THRESHOLD_MIN * GEMM_MULTITHREAD_THRESHOLD of OpenBLAS
_QUERIES = 64  # query vectors at a time, so that a tile still holds some tens of keys
_SCORES = 1 << 22  # scores in memory at a time: 16 MiB
_BATCH_ROWS = 8  # rows between two looks at the clock


class Queries(NamedTuple):
    """Sampled query rows of one layer, RoPE applied.

    q: float32 [rows, H, D]; positions: int64 [rows], absolute; scale: what scores are multiplied with.
    """

    q: Floats
    positions: Positions
    scale: float


class Losses(NamedTuple):
    """The loss of each coding, in order (no unit, 0 is exact), and over how many rows it is the mean."""

    losses: tuple[float, ...]
    rows: int


def attention_output(q: Floats, k: Floats, v: Floats, positions: Positions, scale: float) -> Floats:
    """softmax(scale * q.k) v of every query row over the keys up to its position: float32 [rows, H, Dv].

    q float32 [rows, H, D]; k float32 [n, G, D]; v float32 [n, G, Dv]; positions int64 [rows], at least 0.
    Query head h reads KV head h // (H / G). A row at or behind position n sees all n keys.
    Takes about 21 MiB beside its arguments and result, and no thread but the caller's.

    Raises:
        ValueError: shapes that don't belong together, no keys, or a negative position.
    """
    _check_shapes(q, k, v, positions)
    rows, heads, _ = q.shape
    tokens, groups, _ = k.shape
    share = heads // groups
    output = np.empty((rows, heads, v.shape[2]), np.float32)
    seen = np.minimum(positions + 1, tokens)
    step = max(1, min(_QUERIES, _SCORES // tokens) // share)
    scaled = q * np.float32(scale)
    for start in range(0, rows, step):
        block = slice(start, start + step)
        ends = np.repeat(seen[block], share)
        last = int(ends.max())
        for group in range(groups):
            served = slice(group * share, (group + 1) * share)
            queries = scaled[block, served].reshape(ends.size, -1)
            found = _attend(queries, k[:last, group], v[:last, group], ends)
            output[block, served] = found.reshape(-1, share, v.shape[2])
    return output


def row_losses(exact: Floats, coded: Floats) -> NDArray[np.float64]:
    """||coded - exact||^2 / ||exact||^2 of each row, averaged over its heads: float64 [rows].

    Both float32 [rows, H, Dv]. Where the exact output is zero the loss is 0 if the coded one is too, else
    inf; inf also where the coded output is not finite.
    """
    error = np.square(coded.astype(np.float64) - exact).sum(axis=2)
    size = np.square(exact.astype(np.float64)).sum(axis=2)
    ratio = np.where(error > 0, math.inf, 0.0)
    np.divide(error, size, out=ratio, where=size > 0)
    ratio[~np.isfinite(error)] = math.inf
    means: NDArray[np.float64] = ratio.mean(axis=1)
    return means


def relative_loss(exact: Floats, coded: Floats) -> float:
    """Mean over rows (at least one) and heads of ||coded - exact||^2 / ||exact||^2.

    Both float32 [rows, H, Dv]; what is not finite counts as at `row_losses`.
    """
    return float(row_losses(exact, coded).mean())


def spread_order(rows: int) -> list[int]:
    """0 .. rows-1, the last first, so that any beginning of it is spread over the whole (van der Corput)."""
    bits = max(rows - 1, 0).bit_length()
    mirrored = (int(f"{index:0{bits}b}"[::-1], 2) for index in range(1 << bits))
    return [rows - 1 - row for row in mirrored if row < rows]


class Probe:
    """What a layer's exact KV gives at chosen query rows, to hold codings of the layer against.

    Keeps the rows and their exact outputs, not the KV. Thread safe.
    """

    def __init__(self, batches: Sequence[tuple[Queries, Floats]], shape: tuple[tuple[int, ...], ...]) -> None:
        """`batches`: query rows, and their exact outputs float32 [rows, H, Dv]; `shape`: of K and of V."""
        self._batches = tuple(batches)
        self._shape = shape
        self.rows = sum(queries.positions.size for queries, _ in batches)
        """Over how many rows a loss is the mean."""

    def loss(self, coded: KvBlock) -> float:
        """`relative_loss` of the layer as a decoder gives it back; 0 for the exact one, to the last bit.

        Raises:
            ValueError: a block of another shape than the exact one.
        """
        if (coded.k.shape, coded.v.shape) != self._shape:
            raise ValueError(f"coded K {coded.k.shape}, V {coded.v.shape}: expected {self._shape}")
        total = 0.0
        for (q, positions, scale), exact in self._batches:  # as they were: other tiles round otherwise
            total += float(row_losses(exact, attention_output(q, coded.k, coded.v, positions, scale)).sum())
        return total / self.rows


class LossMeter:
    """Prices codings of a layer against query rows, in bounded time.

    Which rows: those at `spread_order` of all, ordered by position; the first `max_rows` of them. When time
    does not suffice: as many of the first of these as fit. All codings of a layer have the same rows.
    """

    def __init__(self, max_rows: int = 32, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds. ValueError unless `max_rows` is at least 1."""
        if max_rows < 1:
            raise ValueError(f"max_rows {max_rows}: expected at least 1")
        self._max_rows = max_rows
        self.clock = clock

    def probe(self, queries: Queries, exact: KvBlock, codings: int, deadline_s: float = math.inf) -> Probe:
        """A probe with as many rows as may be priced for `codings` codings until `deadline_s` of the clock.

        A coding takes as long as the exact pass, so this one may take 1 of `codings` + 1 parts of the time.
        The first 8 rows are always taken; 8 more are begun only if they would end within that.

        Raises:
            ValueError: no rows, or shapes that don't belong together.
        """
        if not queries.positions.size:
            raise ValueError("queries: expected at least one row")
        order = np.argsort(queries.positions, kind="stable")[spread_order(queries.positions.size)]
        order = order[: self._max_rows]
        began = now = self.clock()
        end = began + (deadline_s - began) / (codings + 1)
        longest = 0.0
        batches: list[tuple[Queries, Floats]] = []
        for start in range(0, order.size, _BATCH_ROWS):
            if batches and now + longest > end:
                break
            batch = order[start : start + _BATCH_ROWS]
            rows = Queries(queries.q[batch], queries.positions[batch], queries.scale)
            batches.append((rows, attention_output(rows.q, exact.k, exact.v, rows.positions, rows.scale)))
            before, now = now, self.clock()
            longest = max(longest, now - before)
        return Probe(batches, (exact.k.shape, exact.v.shape))

    def measure(
        self, queries: Queries, exact: KvBlock, coded: Sequence[KvBlock], deadline_s: float = math.inf
    ) -> Losses:
        """The losses of `coded`: each the layer as a decoder gives it back. See `probe`."""
        probe = self.probe(queries, exact, len(coded), deadline_s)
        return Losses(tuple(probe.loss(block) for block in coded), probe.rows)


def _check_shapes(q: Floats, k: Floats, v: Floats, positions: Positions) -> None:
    """ValueError for what does not fit."""
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3 or k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q {q.shape}, k {k.shape}, v {v.shape}: expected [rows, H, D], [n, G, D], [n, G, Dv]"
        )
    if not k.shape[0] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q {q.shape}, k {k.shape}: expected keys, and heads in groups of equal size")
    if positions.shape != q.shape[:1] or (positions.size and int(positions.min()) < 0):
        raise ValueError(f"positions {positions.shape}: expected one for each row of q, none negative")


def _attend(q: Floats, k: Floats, v: Floats, ends: Positions) -> Floats:
    """softmax(q.k) v over the first ends[i] keys of query i: q [m, D], k [n, D], v [n, Dv] -> [m, Dv]."""
    first = int(ends.min())
    hidden = np.arange(first, k.shape[0]) >= ends[:, None]
    with np.errstate(over="ignore", invalid="ignore"):  # of inf or NaN comes NaN, and of that a loss of inf
        scores = _scores(q, k)
        scores[:, first:][hidden] = -math.inf
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        output: Floats = _weighted(scores, v) / scores.sum(axis=1, keepdims=True)
    return output


def _scores(q: Floats, k: Floats) -> Floats:
    """q k^T in products of at most _SERIAL_MACS: [m, D], [n, D] -> [m, n]."""
    (queries, dim), tokens = q.shape, k.shape[0]
    tile = max(1, _SERIAL_MACS // (queries * dim))
    whole = tokens - tokens % tile
    scores = np.empty((queries, tokens), np.float32)
    # Splitting an axis makes a view, so the tiles are read and written in place.
    keys = k[:whole].reshape(-1, tile, dim).transpose(0, 2, 1)
    np.matmul(q, keys, out=scores[:, :whole].reshape(queries, -1, tile).transpose(1, 0, 2))
    np.matmul(q, k[whole:].T, out=scores[:, whole:])
    return scores


def _weighted(weights: Floats, v: Floats) -> Floats:
    """weights v in products of at most _SERIAL_MACS: [m, n], [n, Dv] -> [m, Dv]."""
    (queries, tokens), dim = weights.shape, v.shape[1]
    tile = max(1, _SERIAL_MACS // (queries * dim))
    whole = tokens - tokens % tile
    left = weights[:, :whole].reshape(queries, -1, tile).transpose(1, 0, 2)
    total: Floats = np.matmul(weights[:, whole:], v[whole:])
    total += np.matmul(left, v[:whole].reshape(-1, tile, dim)).sum(axis=0)
    return total

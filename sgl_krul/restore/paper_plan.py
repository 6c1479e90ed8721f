"""Krul's bubble-free schedule (arXiv 2507.08045, eq. 1): a share r_c is recomputed, as a pyramid.

    r_c = argmin over r of | T_C(r) - T_L(1 - r) |,   T_C = F(N, L, d) / F_peak,   T_L = G(N, L, d) / B_peak

F counts the operations of recomputing the share r of N tokens in L layers, G the bytes of the rest. Here
measured rates stand for F / F_peak and G / B_peak. The split is by tokens and falls with depth, linearly,
with r as its mean over the layers: from 2 r N down to 0 while r <= 1/2, from N down to (2 r - 1) N above.

In paper mode what is recomputed is never stored, so a later restore recomputes at least that, whatever the
pyramid of its own rates says (`Chunks.floor`). `sgl_krul.pause.paper` is the pause's side of it.
"""

from __future__ import annotations

import numpy as np

from sgl_krul.restore.cost import Rates
from sgl_krul.restore.table import Depths, Table
from sgl_krul.restore.task import RestoreTask

__all__ = ["paper_share", "pyramid", "pyramid_depths"]

_HALVINGS = 12  # of the interval of shares: finer than any chunk


def pyramid(tokens: int, layers: int, share: float) -> tuple[float, ...]:
    """Tokens recomputed at each layer, not rounded: linear in the layer's middle, mean `share` of `tokens`.

    Raises:
        ValueError: a share below 0 or above 1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share {share:g}: expected 0 (load all) to 1 (recompute all)")
    top, bottom = min(2 * share, 1.0), max(2 * share - 1, 0.0)
    return tuple(tokens * (top + (bottom - top) * (layer + 0.5) / layers) for layer in range(layers))


def paper_share(task: RestoreTask, rates: Rates) -> float:
    """r_c of eq. 1 for this session and these rates, before it is rounded to whole chunks.

    Raises:
        ValueError: no compute rates.
    """
    if rates.compute is None:
        raise ValueError("rates without compute: eq. 1 needs them; calibrate first (krul calibrate restore)")
    return _balanced(Table(task, rates))[0]


def pyramid_depths(table: Table) -> Depths:
    """The pyramid of eq. 1 in whole chunks, as depths of all chunks."""
    return _balanced(table)[1]


def _balanced(table: Table) -> tuple[float, Depths]:
    """Recompute grows with the share and load falls: halve until the turn, take its better side."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _excess(table, _rounded(table, middle)) < 0:
            low = middle
        else:
            high = middle
    sides = ((abs(_excess(table, _rounded(table, share))), share) for share in (low, high))
    share = min(sides)[1]
    return share, _rounded(table, share)


def _excess(table: Table, depths: Depths) -> float:
    """T_C - T_L."""
    rows = np.arange(len(depths))
    loading = float(table.load[rows, depths].sum()) + float(table.start_seconds(depths))
    return float(table.compute[rows, depths].sum()) - loading


def _rounded(table: Table, share: float) -> Depths:
    """A chunk is in a layer's part when more than half of it is, and when it must be."""
    task, chunks = table.task, table.chunks
    device = task.on_device_tokens
    ends = device + np.array(pyramid(task.tokens - device, task.layers, share))
    depths = (ends > ((chunks.starts + chunks.ends) / 2)[:, None]).sum(1)
    rounded: Depths = np.maximum(depths, chunks.floor(len(depths)))
    return rounded

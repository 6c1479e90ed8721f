"""What coded KV did to a model's answers: divergence, agreement, perplexity, needles, their means. Pure.

All of it compares two runs over the same tokens: the model with its exact history, and with the coded one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Outcome",
    "compare",
    "interval",
    "log_softmax",
    "make_row",
    "needle_recall",
    "outlying",
    "ppl_ratio",
    "ranked",
    "spearman",
]

DRAWS = 2000

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    """One method on one prompt.

    Sums over `positions`: `kl` of KL(exact || coded), nats; `agreed` of those whose most likely token is the
    same; `nll_exact` and `nll_coded` of -log p of the true token. `found` and `exact_found`: by place,
    whether the greedy answer is the needle. `stored_bytes` stand for `raw_bytes` of 16-bit KV. `loss`: the
    loss meter's mean over the layers, `worst_loss` that of the worst layer; `predicted`: the mean that a plan
    within a budget was to have. `shared`: share of the layers that gave up their own KV. `modes`: layers in
    each.
    """

    method: str
    prompt: str
    domain: str
    positions: int
    kl: float
    agreed: int
    nll_exact: float
    nll_coded: float
    found: dict[str, bool]
    exact_found: dict[str, bool]
    stored_bytes: int
    raw_bytes: int
    loss: float = 0.0
    worst_loss: float = 0.0
    predicted: float | None = None
    shared: float = 0.0
    modes: str = ""

    @property
    def mean_kl(self) -> float:
        """Nats a position."""
        return self.kl / self.positions


def log_softmax(logits: NDArray[np.float32]) -> Floats:
    """log p over the last axis, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


def compare(exact: Floats, coded: Floats, targets: Sequence[int]) -> dict[str, Any]:
    """Sums over the positions of one probe: `kl`, `agreed`, `nll_exact`, `nll_coded`, `found`, `exact_found`.

    exact, coded: log p, float64 [positions, vocabulary]; targets: the true tokens. Found: at every position
    the true token is the most likely one, which is to say that greedy decoding gives exactly these tokens.
    """
    at = np.arange(len(targets)), np.asarray(targets)
    ours, theirs = coded.argmax(axis=1), exact.argmax(axis=1)
    return {
        "kl": float((np.exp(exact) * (exact - coded)).sum()),
        "agreed": int((ours == theirs).sum()),
        "nll_exact": float(-exact[at].sum()),
        "nll_coded": float(-coded[at].sum()),
        "found": bool((ours == at[1]).all()),
        "exact_found": bool((theirs == at[1]).all()),
    }


def interval(sums: Sequence[float], counts: Sequence[int], seed: int = 0) -> tuple[float, float]:
    """Bootstrap 95% interval of sum(sums) / sum(counts): whole prompts are drawn, `DRAWS` times.

    Positions of one prompt resemble each other, so prompts are what is drawn, not positions.
    """
    totals, sizes = np.asarray(sums, float), np.asarray(counts, float)
    drawn = np.random.default_rng(seed).integers(0, len(totals), (DRAWS, len(totals)))
    low, high = np.percentile(totals[drawn].sum(axis=1) / sizes[drawn].sum(axis=1), (2.5, 97.5))
    return float(low), float(high)


def ppl_ratio(outcomes: Sequence[Outcome]) -> float:
    """Perplexity with coded history over perplexity with the exact one."""
    positions = sum(outcome.positions for outcome in outcomes)
    return math.exp(sum(outcome.nll_coded - outcome.nll_exact for outcome in outcomes) / positions)


def needle_recall(outcomes: Sequence[Outcome], place: str, *, exact: bool = False) -> float | None:
    """Share of the needles at `place` that were found; None where none was hidden."""
    found = [(o.exact_found if exact else o.found)[place] for o in outcomes if place in o.found]
    return sum(found) / len(found) if found else None


def outlying(outcomes: Sequence[Outcome], bound: float) -> int:
    """How many prompts have a mean KL above `bound`."""
    return sum(outcome.mean_kl > bound for outcome in outcomes)


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Rank correlation. nan where one of them is constant."""
    left, right = ranked(one), ranked(other)
    left -= left.mean()
    right -= right.mean()
    size = math.sqrt(float((left**2).sum() * (right**2).sum()))
    return float((left * right).sum()) / size if size else math.nan


def ranked(values: Sequence[float]) -> Floats:
    """The rank of each value, from 0; equal values share the mean of their ranks."""
    array = np.asarray(values, float)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Floats = (ends - (counts + 1) / 2)[inverse]
    return ranks


def make_row(
    outcomes: Sequence[Outcome], needles: Sequence[Outcome], *, places: Sequence[str], bound: float
) -> dict[str, Any]:
    """A row of the result: one method in one domain, needle recall from `needles` (the same method's)."""
    positions = sum(outcome.positions for outcome in outcomes)
    low, high = interval([o.kl for o in outcomes], [o.positions for o in outcomes])
    return {
        "method": outcomes[0].method,
        "bytes_ratio": sum(o.stored_bytes for o in outcomes) / sum(o.raw_bytes for o in outcomes),
        "kl": sum(outcome.kl for outcome in outcomes) / positions,
        "kl_lo": low,
        "kl_hi": high,
        "top1": sum(outcome.agreed for outcome in outcomes) / positions,
        "ppl_ratio": ppl_ratio(outcomes),
        **{f"needle_{place}": needle_recall(needles, place) for place in places},
        "domain": outcomes[0].domain,
        "loss": sum(outcome.loss for outcome in outcomes) / len(outcomes),
        "r_l": sum(outcome.shared for outcome in outcomes) / len(outcomes),
        "prompts": len(outcomes),
        "positions": positions,
        "prompts_over_bound": outlying(outcomes, bound),
        "worst_kl": max(outcome.mean_kl for outcome in outcomes),
    }

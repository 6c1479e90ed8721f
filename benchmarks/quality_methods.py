"""The methods that are compared: what is asked of the strategy, and the layer plan that comes of it.

Names: what is stored, how a partner is (raw: as its owner; merged: MiniCache's merge), the share of layers
that is to give up its own KV (r_l). A name with a quality before it is the same wish held against a budget.

What chooses the pairs, two switches of Krul by themselves:

| | closest pairs | pairs by chance |
| --- | --- | --- |
| among I-R layers (gamma) | krul | ir-only |
| among all layers | all-layers | random |

`fixed` are MiniCache's pairs, neighbours from the middle on. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sgl_krul.strategy import LayerPlan, Method, Sharing, Wish

__all__ = ["ACCEPT", "AUTO", "FULL", "GAMMA", "OUTSIDE", "PAIRS", "QUICK", "Asked", "shared_share"]

GAMMA = 0.5
SHARES = (0.1, 0.25, 0.5)
SEED = 1


@dataclass(frozen=True)
class Asked:
    """A method by its name. `quality`: what the plan is held against, None for nothing. `by_chance`: the I-R
    layers are paired by chance."""

    name: str
    wish: Wish
    quality: str | None = None
    by_chance: bool = False

    def within(self, quality: str) -> Asked:
        """The same, held against a budget. Layers in no pair may go down to int4 then."""
        wish = replace(self.wish, alone="int4")
        return replace(self, name=f"{quality}:{self.name}", wish=wish, quality=quality)


def _sharing(label: str, method: Method, sharing: Sharing, share: float, gamma: float = GAMMA) -> Asked:
    wish = Wish(method, sharing=sharing, share=share, gamma=gamma, alone="bf16", seed=SEED)
    return Asked(f"{label}-{sharing.value}-{share:.2f}", wish)


def _ir_only(share: float) -> Asked:
    return replace(_sharing("ir-only", Method.krul, Sharing.raw, share), by_chance=True)


EXACT, INT8, INT4 = (Asked(method.value, Wish(method)) for method in (Method.exact, Method.int8, Method.int4))
KRUL = {
    (sharing, share): _sharing("krul", Method.krul, sharing, share) for sharing in Sharing for share in SHARES
}
AUTO = Asked("auto", Wish(Method.auto, share=max(SHARES), gamma=GAMMA))
FIXED_MERGED = _sharing("fixed", Method.fixed, Sharing.merged, 0.25)

QUICK = (EXACT, INT8, INT4, KRUL[Sharing.raw, 0.25], KRUL[Sharing.merged, 0.25])

_BUDGETED = (
    *(asked.within("high") for asked in (INT8, INT4, KRUL[Sharing.raw, 0.5], KRUL[Sharing.merged, 0.5])),
    *(asked.within("high") for asked in (FIXED_MERGED, AUTO)),
    *(AUTO.within(quality) for quality in ("balanced", "small")),
)
ACCEPT = (
    EXACT,
    INT8,
    INT4,
    *KRUL.values(),
    *(_sharing("all-layers", Method.krul, Sharing.raw, share, gamma=0.0) for share in SHARES),
    *(_sharing("fixed", Method.fixed, Sharing.raw, share) for share in (0.1, 0.25)),
    _sharing("fixed", Method.fixed, Sharing.merged, 0.1),
    FIXED_MERGED,
    *(_sharing("random", Method.random, Sharing.raw, share) for share in (0.1, 0.25)),
    *(_ir_only(share) for share in (0.1, 0.25)),
    *_BUDGETED,
)
_SWEEP = (
    *(
        replace(asked, name=f"{asked.name}-gamma-{gamma:g}")
        for gamma in (0.3, 0.7, 0.8)
        for asked in [_sharing("krul", Method.krul, Sharing.raw, 0.1, gamma)]
    ),
    *(_sharing("krul", Method.krul, Sharing.raw, share) for share in (0.03, 0.17)),
    *(_sharing("all-layers", Method.krul, Sharing.merged, share, gamma=0.0) for share in SHARES),
    _sharing("fixed", Method.fixed, Sharing.raw, 0.5),
    _sharing("random", Method.random, Sharing.merged, 0.25),
)
FULL = (*ACCEPT, *_SWEEP)
"""Methods of the full run: with sweeps of gamma, r_l and the choice of pairs."""
OUTSIDE = (
    EXACT,
    INT8,
    INT4,
    *(KRUL[sharing, share] for sharing in Sharing for share in (0.1, 0.25)),
    AUTO.within("high"),
)
"""Methods that are run out of domain too."""
PAIRS = KRUL[Sharing.raw, 0.25]
"""Whose pairs tell how alike two histories are."""


def shared_share(plan: LayerPlan) -> float:
    """r_l as it came out: the share of the layers that are a partner."""
    return len(plan.owners) / len(plan.choices)

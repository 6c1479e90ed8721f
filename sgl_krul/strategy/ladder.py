"""The cheapest choice of one option per unit whose losses together stay within an allowance.

A unit is what steps up as a whole: a layer by itself, or the two layers of a pair. To choose one option of
each unit is the multiple-choice knapsack problem (Sinha and Zoltners, Operations Research 27, 1979). The
greedy way along the convex hulls of the units' options, best loss saved per byte first, is optimal at each
of its steps; only between two steps may something cheaper exist. What the last step left over is spent on
steps down. So, and it is tested:
* The steps up don't depend on the allowance, which only says where to stop; nor do the steps down from there.
* Bytes never grow with the allowance: a step up never leads to fewer, a step down never to more, and no steps
  down lead to fewer than the state one step up earlier, which was optimal.
* No unit can take a cheaper option without the losses passing the allowance.

Losses are Fractions: sums of floats would make all of that true only nearly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from sgl_krul.strategy.layer_plan import LayerChoice

__all__ = ["Ladder", "Option", "cheapest_within", "ladder"]


class Option(NamedTuple):
    """One way to store a unit. `losses` and `choices`: of its layers; `loss`: their sum."""

    bytes: int
    loss: Fraction
    codes: tuple[int, ...]  # which of equals is taken: the one nearer to raw
    choices: tuple[LayerChoice, ...]
    losses: tuple[float, ...]


Ladder: TypeAlias = Sequence[Option]
"""Options of one unit, cheapest first: bytes rise strictly, losses fall strictly."""


def ladder(options: Iterable[Option]) -> Ladder:
    """Those options that none other beats or equals in bytes and in loss."""
    rungs: list[Option] = []
    for option in sorted(options, key=lambda option: (option.bytes, option.loss, option.codes)):
        if not rungs or option.loss < rungs[-1].loss:
            rungs.append(option)
    return rungs


def cheapest_within(units: Sequence[Ladder], allowance: Fraction) -> list[Option]:
    """One option of each unit, of losses that together are at most `allowance`.

    Where not even the dearest options are within it, those.
    """
    at = _climb(units, allowance)
    _descend(units, at, allowance)
    return [rungs[rung] for rungs, rung in zip(units, at, strict=True)]


def _climb(units: Sequence[Ladder], allowance: Fraction) -> list[int]:
    """The rung of each unit after the first steps up that bring the losses within the allowance."""
    steps = []
    for unit, rungs in enumerate(units):
        hull = _hull(rungs)
        steps += [(-_gain(rungs[low], rungs[high]), unit, high) for low, high in pairwise(hull)]
    at = [0] * len(units)
    loss = _total(units, at)
    # Gains fall along a hull, so one sort takes the steps as a heap would: each after those below it.
    for _, unit, rung in sorted(steps):
        if loss <= allowance:
            break
        loss += units[unit][rung].loss - units[unit][at[unit]].loss
        at[unit] = rung
    return at


def _descend(units: Sequence[Ladder], at: list[int], allowance: Fraction) -> None:
    """Take steps down, the one that costs least loss first, until none is within the allowance."""
    loss = _total(units, at)
    while downs := [_down(units[unit], rung, unit) for unit, rung in enumerate(at) if rung]:
        lost, _, unit = min(downs)
        if loss + lost > allowance:
            return
        loss += lost
        at[unit] -= 1


def _down(rungs: Ladder, rung: int, unit: int) -> tuple[Fraction, int, int]:
    """A step down: the loss it adds, minus the bytes it saves, its unit."""
    high, low = rungs[rung], rungs[rung - 1]
    return low.loss - high.loss, low.bytes - high.bytes, unit


def _gain(low: Option, high: Option) -> Fraction:
    """Loss saved per byte added."""
    return (low.loss - high.loss) / (high.bytes - low.bytes)


def _hull(rungs: Ladder) -> list[int]:
    """The rungs on the lower convex hull of (bytes, loss), cheapest first: gains never rise along it."""
    hull: list[int] = []
    for rung, option in enumerate(rungs):
        while len(hull) > 1:
            before, last = rungs[hull[-2]], rungs[hull[-1]]
            if _gain(before, last) >= _gain(last, option):
                break
            hull.pop()
        hull.append(rung)
    return hull


def _total(units: Sequence[Ladder], at: Sequence[int]) -> Fraction:
    return sum((rungs[rung].loss for rungs, rung in zip(units, at, strict=True)), Fraction())

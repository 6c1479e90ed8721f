"""From prices to a layer plan within a loss budget.

The plan is a pure function of its arguments: what the codecs ask for each layer of this history, and what was
wished for. Nothing of the turn to come is among them (Krul's "preemptive", arXiv 2507.08045).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import TypeAlias

from sgl_krul.strategy.ladder import Option, cheapest_within, ladder
from sgl_krul.strategy.layer_plan import CODINGS, RAW, LayerChoice, LayerPlan
from sgl_krul.strategy.pairs import Pair, pair_count
from sgl_krul.strategy.wish import Wish

__all__ = ["Offer", "Plan", "Table", "plan_layers"]


@dataclass(frozen=True)
class Offer:
    """One layer in one mode, as its codec prices it.

    `bytes`: what the layer takes in the store, over the whole session. `loss`: the mean squared relative
    error of the layer's attention output, without a unit; inf where the codec can't store the layer.

    Raises ValueError for a negative number or NaN.
    """

    choice: LayerChoice
    bytes: int
    loss: float

    def __post_init__(self) -> None:
        if type(self.bytes) is not int or self.bytes < 0:
            raise ValueError(f"bytes of {self.choice}: expected an int of at least 0; got {self.bytes!r}")
        if not self.loss >= 0:
            raise ValueError(f"loss of {self.choice}: expected a number of at least 0; got {self.loss!r}")


Table: TypeAlias = Sequence[Sequence[Offer]]
"""The offers of each layer, in layer order and, for a layer, in any order; no choice twice.

* Every layer offers `raw`, of loss 0.
* A partner of a pair offers ("shared", "raw", owner), ("shared", "merged", owner) or both, with one owner.
  With "merged" the owner offers ("shared", "merged-owner").
* A layer is in one pair at most.

`priced_choices` says which choices a wish has. The loss of a shared/raw partner is one number, although it
depends on how its owner is stored: it is the largest over all ways in which that may be.
"""


@dataclass(frozen=True)
class Plan:
    """A layer plan, and what it should come to.

    `bytes`: of the session's layers. `losses`: of each layer. `loss`: their mean, which the budget bounds.
    `refused`: pairs that the wish allowed and the plan doesn't have, since they were too lossy or, with both
    layers by themselves cheaper, too dear.
    """

    layer_plan: LayerPlan
    bytes: int
    loss: float
    losses: tuple[float, ...]
    refused: tuple[Pair, ...] = ()


def plan_layers(table: Table, budget: float, wish: Wish) -> Plan:
    """The cheapest plan, but for less than one step, whose loss is at most `budget`.

    The session's loss is the mean of its layers' losses. Every layer starts in the cheapest way that the wish
    allows. While the session is over the budget, the step that saves most loss per added byte is taken: a
    layer by itself goes to a dearer mode, a pair goes as a whole to what both its layers can be stored as.
    What is left of the budget at the end is spent on steps down. See `sgl_krul.strategy.ladder`.

    A smaller budget never gives a plan of fewer bytes. Budget 0 is exact: all layers `raw`, even where an
    offer claims to lose nothing. Budget inf takes what is cheapest.

    Raises:
        ValueError: a table that is not one (see Table), more pairs than the wish's `share` allows, a budget
            that is negative or NaN.
    """
    if not budget >= 0:
        raise ValueError(f"budget: expected a number of at least 0; got {budget!r}")
    pairs = _checked_pairs(table)
    codings = wish.codings if budget else frozenset([RAW.coding])
    if wish.shares and len(pairs) > pair_count(len(table), wish.share):
        raise ValueError(f"table with {len(pairs)} pairs: share {wish.share:g} of its layers is fewer")
    members = _members(len(table), pairs)
    units = [ladder(_options(table, layers, codings)) for layers in members]
    allowance = Fraction(budget) * len(table) if math.isfinite(budget) else _most(units)
    return _plan(members, cheapest_within(units, allowance), _allowed(table, pairs, wish.codings))


def _most(units: Sequence[Sequence[Option]]) -> Fraction:
    return sum((rungs[0].loss for rungs in units), Fraction())


def _members(layers: int, pairs: dict[int, int]) -> list[tuple[int, ...]]:
    """The layers of each unit, by their lowest layer; `pairs`: partner by owner."""
    partners = set(pairs.values())
    return [
        (layer, pairs[layer]) if layer in pairs else (layer,)
        for layer in range(layers)
        if layer not in partners
    ]


def _options(table: Table, layers: tuple[int, ...], codings: Collection[tuple[str, str]]) -> Iterator[Option]:
    """All ways to store a unit that the codings allow."""
    rows = [
        [offer for offer in table[layer] if offer.choice.coding in codings and math.isfinite(offer.loss)]
        for layer in layers
    ]
    for offers in product(*rows):
        if len(offers) == 1 or _fit(offers[0].choice, offers[1].choice):
            yield Option(
                sum(offer.bytes for offer in offers),
                sum((Fraction(offer.loss) for offer in offers), Fraction()),
                tuple(CODINGS.index(offer.choice.coding) for offer in offers),
                tuple(offer.choice for offer in offers),
                tuple(float(offer.loss) for offer in offers),
            )


def _fit(owner: LayerChoice, partner: LayerChoice) -> bool:
    """Whether the two layers of a pair may be stored so together."""
    if owner.variant == "merged-owner":
        return partner.variant == "merged"
    return partner.stands_alone or partner.coding == ("shared", "raw")


def _allowed(table: Table, pairs: dict[int, int], codings: Collection[tuple[str, str]]) -> list[Pair]:
    """The pairs that have an allowed offer, by owner."""
    return [
        Pair(owner, partner)
        for owner, partner in sorted(pairs.items())
        if any(offer.choice.owner is not None and offer.choice.coding in codings for offer in table[partner])
    ]


def _plan(members: Sequence[tuple[int, ...]], chosen: Sequence[Option], allowed: Sequence[Pair]) -> Plan:
    by_layer = {
        layer: (choice, loss)
        for layers, option in zip(members, chosen, strict=True)
        for layer, choice, loss in zip(layers, option.choices, option.losses, strict=True)
    }
    choices, losses = zip(*(by_layer[layer] for layer in range(len(by_layer))), strict=True)
    layer_plan = LayerPlan(choices)
    return Plan(
        layer_plan,
        sum(option.bytes for option in chosen),
        # Rounded once, from the exact mean, it can't come out above a budget that the mean is within.
        float(sum((option.loss for option in chosen), Fraction()) / len(losses)),
        losses,
        tuple(pair for pair in allowed if pair.partner not in layer_plan.owners),
    )


# -- the table --


def _checked_pairs(table: Table) -> dict[int, int]:
    """Partner by owner. ValueError for a table that breaks one of the rules of `Table`."""
    pairs: dict[int, int] = {}
    for layer, offers in enumerate(table):
        choices = [offer.choice for offer in offers]
        if len(set(choices)) < len(choices):
            raise ValueError(f"layer {layer}: a choice is offered twice")
        if not any(offer.choice == RAW and offer.loss == 0 for offer in offers):
            raise ValueError(f"layer {layer}: expected an offer of raw with loss 0")
        owners = {choice.owner for choice in choices if choice.owner is not None}
        if not owners:
            continue
        owner = owners.pop()
        if owners or owner >= layer or owner in pairs:
            raise ValueError(f"layer {layer}: expected one owner, a lower layer with no other partner")
        pairs[owner] = layer
    partners = set(pairs.values())
    for layer, offers in enumerate(table):
        if layer in pairs and layer in partners:
            raise ValueError(f"layer {layer}: is in two pairs")
        offered = any(offer.choice.variant == "merged-owner" for offer in offers)
        wanted = layer in pairs and any(offer.choice.variant == "merged" for offer in table[pairs[layer]])
        if offered != wanted:
            raise ValueError(f"layer {layer}: merged-owner needs a merged partner, and the other way round")
    if not table:
        raise ValueError("table: expected at least one layer")
    return pairs

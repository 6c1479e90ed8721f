"""What was asked for: a method and its settings, and the pairs they come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_krul.strategy.ir_layers import ir_layers
from sgl_krul.strategy.layer_plan import RAW, LayerChoice, LayerPlan
from sgl_krul.strategy.pairs import Pair, fixed_pairs, greedy_pairs, pair_count, random_pairs

__all__ = ["Method", "Sharing", "Wish", "as_asked", "blind_pairs", "choose_pairs", "priced_choices"]

_LADDER = ("int4", "int8", "bf16")  # a layer by itself, cheapest first; above them all is raw


class Method(StrEnum):
    """How layers are stored where the loss budget allows it."""

    exact = "exact"  # raw
    int8 = "int8"
    int4 = "int4"
    krul = "krul"  # pairs of I-R layers, the closest ones (arXiv 2507.08045)
    fixed = "fixed"  # MiniCache's pairs (arXiv 2405.14366)
    random = "random"  # pairs by chance, to compare with
    auto = "auto"  # whatever is cheapest


class Sharing(StrEnum):
    """What the partner of a pair gets."""

    raw = "raw"  # the owner's KV as it is
    merged = "merged"  # MiniCache's merge of both


_MERGED_OWNER = LayerChoice("shared", "merged-owner")
_PARTS = {
    Sharing.raw: (("shared", "raw"),),
    Sharing.merged: (("shared", "merged-owner"), ("shared", "merged")),
}


@dataclass(frozen=True)
class Wish:
    """A method and its settings; a method doesn't look at those it does not have.

    `share`: Krul's r_l, which part of all layers gives up its own KV, 0 to .5 (half: the paper's tables).
    `gamma`: which layers are I-R, see `ir_layers`; 0 is all. `sharing`: what krul, fixed and random do with
    pairs. `alone`: how cheaply they may store a layer by itself, be it in no pair, in a refused one, or the
    owner of a raw one: int4 and int8 (which a pair gives way to where both cost less and lose less), or bf16,
    which is as published. auto may do all of it; its pairs are krul's. `seed`: of random.

    Raises ValueError for a name or a number that is none of these.
    """

    method: Method = Method.auto
    sharing: Sharing = Sharing.merged
    share: float = 0.5
    gamma: float = 0.5
    alone: str = "int4"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("method", tuple(Method)), ("sharing", tuple(Sharing)), ("alone", _LADDER)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}; got {value!r}")
        # A configuration brings plain texts.
        object.__setattr__(self, "method", Method(self.method))
        object.__setattr__(self, "sharing", Sharing(self.sharing))
        pair_count(1, self.share)
        if not self.gamma >= 0:
            raise ValueError(f"gamma: expected a number of at least 0; got {self.gamma!r}")

    @property
    def shares(self) -> bool:
        """Whether layers may be paired."""
        return self.method in (Method.krul, Method.fixed, Method.random, Method.auto)

    @property
    def cheapest(self) -> LayerChoice:
        """The cheapest way in which a layer by itself may be stored."""
        if self.method is Method.exact:
            return RAW
        own = {Method.int8: "int8", Method.int4: "int4", Method.auto: _LADDER[0]}
        return LayerChoice("quantized", own.get(self.method, self.alone))

    @property
    def codings(self) -> frozenset[tuple[str, str]]:
        """(mode, variant) of all that a layer may be stored as: `cheapest` and dearer, and parts of pairs."""
        allowed = {RAW.coding}
        if self.method is not Method.exact:
            dearer = _LADDER[_LADDER.index(self.cheapest.variant) :]
            allowed.update(("quantized", variant) for variant in dearer)
        if self.shares:
            kinds = tuple(Sharing) if self.method is Method.auto else (self.sharing,)
            allowed.update(coding for kind in kinds for coding in _PARTS[kind])
        return frozenset(allowed)


def choose_pairs(
    wish: Wish, mass: NDArray[np.floating[Any]], distances: NDArray[np.floating[Any]]
) -> tuple[Pair, ...]:
    """The pairs that the codecs are to price, from the statistics of the history: mass [L], distances [L, L].

    krul and auto: Algorithm 1 (arXiv 2507.08045) leaves the I-R layers, and of these the closest are paired.
    fixed and random look at the number of layers only. The others have no pairs.

    Raises:
        ValueError: statistics of two different numbers of layers, or that are none.
    """
    layers = len(mass)
    if distances.shape != (layers, layers):
        raise ValueError(f"distances: expected [{layers}, {layers}], as mass; got {list(distances.shape)}")
    if wish.method in (Method.krul, Method.auto):
        return greedy_pairs(distances, ir_layers(mass, wish.gamma), pair_count(layers, wish.share))
    return blind_pairs(wish, layers)


def blind_pairs(wish: Wish, layers: int) -> tuple[Pair, ...]:
    """The pairs of a wish for so many layers where nothing is known of the history: fixed and random have
    theirs, the others none.
    """
    if wish.method is Method.fixed:
        return fixed_pairs(layers, pair_count(layers, wish.share))
    if wish.method is Method.random:
        return random_pairs(layers, pair_count(layers, wish.share), wish.seed)
    return ()


def priced_choices(wish: Wish, layers: int, pairs: Sequence[Pair]) -> list[list[LayerChoice]]:
    """For each layer, what the codecs are to price: the rows of the Table that `plan_layers` takes.

    Raises:
        ValueError: pairs as at `as_asked`.
    """
    _check_pairs(wish, layers, pairs)
    codings = wish.codings
    alone = [RAW, *(LayerChoice("quantized", variant) for variant in _LADDER)]
    rows = [[choice for choice in alone if choice.coding in codings] for _ in range(layers)]
    for owner, partner, _ in pairs:
        parts = [(owner, _MERGED_OWNER)]
        parts += [(partner, LayerChoice("shared", kind.value, owner)) for kind in Sharing]
        for layer, choice in parts:
            if choice.coding in codings:
                rows[layer].append(choice)
    return rows


def as_asked(wish: Wish, layers: int, pairs: Sequence[Pair]) -> LayerPlan:
    """The method as published, with no budget: all `pairs` shared, whatever stands by itself in bf16.

    exact, int8 and int4 store all layers so.

    Raises:
        ValueError: method auto, which needs prices; pairs where the method has none, that are no layers, or
            with a layer in two of them.
    """
    if wish.method is Method.auto:
        raise ValueError("method auto: expected one that says itself what a layer is stored as")
    _check_pairs(wish, layers, pairs)
    choices = [LayerChoice("quantized", "bf16") if wish.shares else wish.cheapest] * layers
    for owner, partner, _ in pairs:
        choices[partner] = LayerChoice("shared", wish.sharing.value, owner)
        if wish.sharing is Sharing.merged:
            choices[owner] = _MERGED_OWNER
    return LayerPlan(tuple(choices))


def _check_pairs(wish: Wish, layers: int, pairs: Sequence[Pair]) -> None:
    if pairs and not wish.shares:
        raise ValueError(f"pairs: expected none for method {wish.method}; got {len(pairs)}")
    used = [layer for pair in pairs for layer in (pair.owner, pair.partner)]
    ordered = all(0 <= pair.owner < pair.partner < layers for pair in pairs)
    if not ordered or len(set(used)) < len(used):
        raise ValueError(f"pairs: expected owner < partner < {layers}, no layer twice; got {pairs}")

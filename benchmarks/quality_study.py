"""A history at its pause: how alike its layers are, the plan that a method gives it, what coding loses."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from benchmarks.quality_methods import AUTO, Asked
from benchmarks.quality_runs import CHUNK_PAGES, History, alike
from sgl_krul.codec.block import KvBlock
from sgl_krul.codec.loss import LossMeter, Probe
from sgl_krul.codec.pricing import Prices, price
from sgl_krul.layout import KvLayout
from sgl_krul.similarity import Similarity
from sgl_krul.strategy import (
    LayerPlan,
    Pair,
    Plan,
    Table,
    Wish,
    as_asked,
    choose_pairs,
    ir_layers,
    loss_budget,
    pair_count,
    plan_layers,
    random_pairs,
)

__all__ = ["Study"]


class Study:
    """What is known of a history when it is paused: statistics, prices. Nothing of the turn to come."""

    def __init__(self, history: History, layout: KvLayout) -> None:
        self.history = history
        self.layout = layout
        self._meter = LossMeter()
        self._plans: dict[Asked, Plan] = {}

    @cached_property
    def similarity(self) -> Similarity:
        """From the sampled rows."""
        return alike(self.history)

    def pairs(self, asked: Asked) -> tuple[Pair, ...]:
        """The pairs that a method shares. Chance is another one for every history."""
        wish = replace(asked.wish, seed=zlib.crc32(f"{asked.wish.seed} {self.history.prompt.name}".encode()))
        mass = self.similarity.mass()
        if asked.by_chance:
            return _paired_by_chance(ir_layers(mass, wish.gamma), wish, self.layout.layers)
        return choose_pairs(wish, mass, self.similarity.distances())

    def plan(self, asked: Asked) -> LayerPlan:
        """The layer plan of a method."""
        if asked.quality is None:
            return as_asked(asked.wish, self.layout.layers, self.pairs(asked))
        if asked not in self._plans:
            self._plans[asked] = plan_layers(self._table(asked), loss_budget(asked.quality), asked.wish)
        return self._plans[asked].layer_plan

    def predicted(self, asked: Asked) -> float | None:
        """The loss that the plan of a method within a budget is to have; None before `plan`."""
        return self._plans[asked].loss if asked in self._plans else None

    def losses(self, coded: Sequence[KvBlock]) -> list[float]:
        """What the loss meter says of every layer as a decoder gave it back."""
        return [probe.loss(block) for probe, block in zip(self._probes, coded, strict=True)]

    def _table(self, asked: Asked) -> Table:
        """The prices that a server would ask for. Where auto has the same pairs, or none are wanted, they are
        among its own, and are not measured again."""
        pairs, codings = self.pairs(asked), asked.wish.codings
        same = not asked.wish.shares or pairs == self.pairs(AUTO)
        prices = self._prices if same else self._priced(asked.wish, pairs)
        return [[offer for offer in row if offer.choice.coding in codings] for row in prices.table]

    @cached_property
    def _prices(self) -> Prices:
        return self._priced(AUTO.wish, self.pairs(AUTO))

    def _priced(self, wish: Wish, pairs: Sequence[Pair]) -> Prices:
        pool = self.history.pool
        chunks = [
            [[pages[first : first + CHUNK_PAGES].reshape(-1).data] for pages in pool]
            for first in range(0, pool.shape[1], CHUNK_PAGES)
        ]
        return price(chunks, self.layout, self.history.queries, wish, pairs, meter=self._meter)

    @cached_property
    def _probes(self) -> tuple[Probe, ...]:
        layers = zip(self.history.queries, self.history.blocks, strict=True)
        return tuple(self._meter.probe(queries, block, 1) for queries, block in layers)


def _paired_by_chance(candidates: tuple[int, ...], wish: Wish, layers: int) -> tuple[Pair, ...]:
    if len(candidates) < 2:
        return ()
    drawn = random_pairs(len(candidates), pair_count(layers, wish.share), wish.seed)
    return tuple(Pair(candidates[owner], candidates[partner]) for owner, partner, _ in drawn)

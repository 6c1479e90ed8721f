"""From the statistics of a history and the codecs' prices to a layer plan. All of it is pure."""

from __future__ import annotations

from sgl_krul.strategy.ir_layers import ir_layers
from sgl_krul.strategy.layer_plan import RAW, LayerChoice, LayerPlan
from sgl_krul.strategy.pairs import Pair, fixed_pairs, greedy_pairs, pair_count, random_pairs
from sgl_krul.strategy.plan import Offer, Plan, Table, plan_layers
from sgl_krul.strategy.quality import QUALITY_BUDGETS, Quality, loss_budget
from sgl_krul.strategy.wish import Method, Sharing, Wish, as_asked, blind_pairs, choose_pairs, priced_choices

__all__ = [
    "QUALITY_BUDGETS",
    "RAW",
    "LayerChoice",
    "LayerPlan",
    "Method",
    "Offer",
    "Pair",
    "Plan",
    "Quality",
    "Sharing",
    "Table",
    "Wish",
    "as_asked",
    "blind_pairs",
    "choose_pairs",
    "fixed_pairs",
    "greedy_pairs",
    "ir_layers",
    "loss_budget",
    "pair_count",
    "plan_layers",
    "priced_choices",
    "random_pairs",
]

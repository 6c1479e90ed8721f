"""Prices and a budget to a layer plan: what is chosen, what is refused, and what it can depend on."""

from __future__ import annotations

import ast
import inspect
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import sgl_krul.strategy
from sgl_krul.strategy import (
    QUALITY_BUDGETS,
    RAW,
    LayerChoice,
    LayerPlan,
    Method,
    Offer,
    Pair,
    Plan,
    Quality,
    Sharing,
    Wish,
    as_asked,
    choose_pairs,
    fixed_pairs,
    loss_budget,
    plan_layers,
    priced_choices,
    random_pairs,
)

BF16, INT8, INT4 = (LayerChoice("quantized", variant) for variant in ("bf16", "int8", "int4"))
MERGED_OWNER = LayerChoice("shared", "merged-owner")
# Bytes and losses as they may be for a bfloat16 pool, of 1,000 bytes a layer.
PRICES = {
    "raw": (1000, 0.0),
    "quantized/bf16": (1001, 0.0),
    "quantized/int8": (563, 2e-5),
    "quantized/int4": (313, 6e-3),
    "shared/merged-owner": (1020, 0.1),
    "shared/merged": (30, 0.2),
    "shared/raw": (2, 0.4),
}


def priced(wish: Wish, layers: int, pairs: Sequence[Pair], **other: float) -> list[list[Offer]]:
    """A table of PRICES; `_3=10`: losses of layer 3 are ten times as high."""
    table = []
    for layer, choices in enumerate(priced_choices(wish, layers, pairs)):
        factor = other.get(f"_{layer}", 1.0)
        table.append([Offer(c, PRICES[str(c)][0], PRICES[str(c)][1] * factor) for c in choices])
    return table


def modes(plan: Plan) -> list[str]:
    return [str(choice) for choice in plan.layer_plan.choices]


class TestSteps:
    def test_without_a_bound_all_is_as_cheap_as_was_wished(self) -> None:
        for method, mode in (
            (Method.int4, "quantized/int4"),
            (Method.int8, "quantized/int8"),
            (Method.exact, "raw"),
        ):
            wish = Wish(method)
            plan = plan_layers(priced(wish, 3, ()), math.inf, wish)
            assert modes(plan) == [mode] * 3
            assert plan.layer_plan == as_asked(wish, 3, ())
            assert (plan.bytes, plan.loss) == (3 * PRICES[mode][0], pytest.approx(PRICES[mode][1]))

    def test_the_worst_layer_steps_up_first(self) -> None:
        wish = Wish(Method.int4)
        table = priced(wish, 4, (), _2=3)
        plan = plan_layers(table, 0.005, wish)
        assert modes(plan) == ["quantized/int4", "quantized/int4", "quantized/int8", "quantized/int4"]
        assert plan.losses == (6e-3, 6e-3, pytest.approx(6e-5), 6e-3)
        assert plan.loss == pytest.approx((3 * 6e-3 + 6e-5) / 4)
        assert plan.bytes == 3 * 313 + 563

    def test_int8_wished_is_never_stored_cheaper(self) -> None:
        wish = Wish(Method.int8)
        table = priced(Wish(Method.int4), 3, ())
        assert modes(plan_layers(table, 1.0, wish)) == ["quantized/int8"] * 3

    def test_of_two_ways_that_cost_and_lose_the_same_raw_is_taken(self) -> None:
        table = [[Offer(BF16, 1000, 0.0), Offer(RAW, 1000, 0.0)]]
        assert modes(plan_layers(table, 0.1, Wish())) == ["raw"]

    def test_a_mode_that_the_hull_leaves_out_is_found_going_down(self) -> None:
        # Between int4 and raw int8 is a bad bargain, so the climb goes past it; the budget has room for it.
        table = [[Offer(RAW, 1000, 0.0), Offer(INT8, 990, 0.09), Offer(INT4, 300, 0.1)]]
        assert modes(plan_layers(table, 0.095, Wish())) == ["quantized/int8"]

    def test_what_the_last_step_left_over_is_spent(self) -> None:
        # The climb takes layer 0 first (more loss per byte), then layer 1, after which layer 0 may go back.
        table = [
            [Offer(RAW, 1000, 0.0), Offer(INT4, 900, 0.2)],
            [Offer(RAW, 1000, 0.0), Offer(INT4, 100, 1.0)],
        ]
        plan = plan_layers(table, 0.1, Wish())
        assert modes(plan) == ["quantized/int4", "raw"]
        assert plan.loss == 0.1

    def test_a_budget_that_is_met_exactly_is_met(self) -> None:
        # The climb takes layers 2 and 0. One step more, and the way down would end at 2,900 bytes.
        losses = (0.5, 0.375, 0.125)
        sizes = (300, 300, 900)
        table = [
            [Offer(RAW, 1000, 0.0), Offer(INT4, size, loss)] for size, loss in zip(sizes, losses, strict=True)
        ]
        table.append([Offer(RAW, 1000, 0.0)])
        plan = plan_layers(table, 0.375 / 4, Wish())
        assert modes(plan) == ["raw", "quantized/int4", "raw", "raw"]

    def test_no_step_leads_back_down(self) -> None:
        # Of layer 0 the second step is the better one: taken by itself, the first would come after it.
        table = [
            [Offer(RAW, 1000, 0.0), Offer(INT8, 990, 0.09), Offer(INT4, 300, 0.1)],
            [Offer(RAW, 1000, 0.0), Offer(INT4, 0, 1e-9)],
        ]
        assert modes(plan_layers(table, 1e-12, Wish())) == ["raw", "raw"]

    def test_a_codec_that_cannot_store_a_layer_is_not_asked_to(self) -> None:
        table = [[Offer(RAW, 1000, 0.0), Offer(INT8, 500, 0.1), Offer(INT4, 300, math.inf)]]
        assert modes(plan_layers(table, math.inf, Wish())) == ["quantized/int8"]

    def test_budget_0_is_exact_whatever_the_offers_claim(self) -> None:
        table = [[Offer(RAW, 1000, 0.0), Offer(INT4, 300, 0.0)]]
        for wish in map(Wish, Method):
            plan = plan_layers(table, 0.0, wish)
            assert plan.layer_plan.is_exact
            assert plan.loss == 0

    def test_any_budget_can_be_held(self) -> None:
        for method in Method:
            wish = Wish(method, gamma=0)
            pairs = choose_pairs(wish, np.ones(6), np.ones((6, 6)))
            assert plan_layers(priced(wish, 6, pairs), 1e-300, wish).loss == 0


class TestPairs:
    pairs = (Pair(1, 4), Pair(2, 3))

    @pytest.mark.parametrize("sharing", Sharing)
    def test_as_published_no_bound_holds_it(self, sharing: Sharing) -> None:
        wish = Wish(Method.krul, sharing=sharing, alone="bf16")
        asked = as_asked(wish, 6, self.pairs)
        assert asked.owners == {4: 1, 3: 2}
        owner = MERGED_OWNER if sharing is Sharing.merged else BF16
        assert asked.choices == (
            BF16,
            owner,
            owner,
            LayerChoice("shared", sharing.value, 2),
            LayerChoice("shared", sharing.value, 1),
            BF16,
        )
        # Where bf16 is worth its price, the plan without a bound is the same.
        table = priced(wish, 6, self.pairs)
        table = [[offer for offer in offers if offer.choice != RAW] for offers in table]
        table = [[*offers, Offer(RAW, 2000, 0.0)] for offers in table]
        plan = plan_layers(table, math.inf, wish)
        assert plan.layer_plan == asked
        assert plan.refused == ()

    def test_as_asked_alone_says_nothing(self) -> None:
        assert as_asked(Wish(Method.fixed), 6, self.pairs) == as_asked(
            Wish(Method.fixed, alone="bf16"), 6, self.pairs
        )

    def test_a_merged_pair_steps_up_as_a_whole(self) -> None:
        wish = Wish(Method.krul, alone="bf16")
        table = priced(wish, 6, self.pairs, _1=5, _4=5)
        plan = plan_layers(table, 0.1, wish)
        assert modes(plan) == ["raw", "raw", "shared/merged-owner", "shared/merged", "raw", "raw"]
        assert plan.refused == (Pair(1, 4),)
        assert plan.loss == pytest.approx((0.1 + 0.2) / 6)

    def test_a_raw_pair_steps_up_as_a_whole(self) -> None:
        wish = Wish(Method.krul, sharing=Sharing.raw)
        table = priced(wish, 6, self.pairs)
        assert modes(plan_layers(table, math.inf, wish)) == [
            *["quantized/int4"] * 3,
            *["shared/raw"] * 2,
            "quantized/int4",
        ]
        plan = plan_layers(table, 0.004, wish)
        assert plan.layer_plan.owners == {}
        assert plan.refused == self.pairs
        assert set(modes(plan)) == {"quantized/int4", "quantized/int8"}

    def test_a_pair_gives_way_to_what_costs_less_and_loses_less(self) -> None:
        wish = Wish(Method.krul, sharing=Sharing.merged, alone="int4")
        plan = plan_layers(priced(wish, 6, self.pairs), math.inf, wish)
        assert modes(plan) == ["quantized/int4"] * 6
        assert plan.refused == self.pairs

    @pytest.mark.parametrize("method", [Method.krul, Method.fixed, Method.random, Method.auto])
    @pytest.mark.parametrize("sharing", Sharing)
    def test_quality_high_holds_whatever_was_asked_for(self, method: Method, sharing: Sharing) -> None:
        wish = Wish(method, sharing=sharing, gamma=0, share=0.5)
        pairs = choose_pairs(wish, np.ones(30), np.ones((30, 30)))
        plan = plan_layers(priced(wish, 30, pairs), loss_budget("high"), wish)
        assert plan.loss <= QUALITY_BUDGETS[Quality.high]
        assert plan.bytes <= 0.55 * 30 * 1000

    def test_other_methods_do_not_see_pairs(self) -> None:
        table = priced(Wish(Method.auto), 6, self.pairs)
        plan = plan_layers(table, math.inf, Wish(Method.int4))
        assert modes(plan) == ["quantized/int4"] * 6
        assert plan.refused == ()
        plan = plan_layers(table, math.inf, Wish(Method.krul, sharing=Sharing.merged))
        assert "shared/raw" not in modes(plan)

    def test_auto_takes_the_cheapest_of_all(self) -> None:
        table = priced(Wish(Method.auto), 6, self.pairs)
        plan = plan_layers(table, math.inf, Wish(Method.auto))
        assert plan.layer_plan.owners == {4: 1, 3: 2}
        assert plan.bytes == 4 * 313 + 2 * 2

    def test_an_allowed_pair_that_cannot_be_stored_is_refused(self) -> None:
        table = [
            [Offer(RAW, 1000, 0.0)],
            [Offer(RAW, 1000, 0.0), Offer(LayerChoice("shared", "raw", 0), 1, math.inf)],
        ]
        assert plan_layers(table, math.inf, Wish()).refused == (Pair(0, 1),)
        assert plan_layers(table, 0.0, Wish()).refused == (Pair(0, 1),)


class TestRefused:
    pair: Callable[..., Offer] = staticmethod(
        lambda kind, owner: Offer(LayerChoice("shared", kind, owner), 1, 0.1)
    )
    raw = Offer(RAW, 10, 0.0)
    owner = Offer(MERGED_OWNER, 10, 0.1)

    @pytest.mark.parametrize("budget", [-1.0, math.nan])
    def test_budgets(self, budget: float) -> None:
        with pytest.raises(ValueError, match="budget"):
            plan_layers([[self.raw]], budget, Wish())

    def test_tables(self) -> None:
        raw, pair = self.raw, self.pair
        bad: list[tuple[list[list[Offer]], str]] = [
            ([], "at least one layer"),
            ([[raw], []], "layer 1: expected an offer of raw"),
            ([[Offer(RAW, 10, 0.1)]], "layer 0: expected an offer of raw"),
            ([[raw, Offer(RAW, 11, 0.0)]], "layer 0: a choice is offered twice"),
            ([[raw, pair("raw", 0)]], "layer 0: expected one owner"),
            ([[raw, pair("raw", 1)], [raw]], "layer 0: expected one owner"),
            ([[raw], [raw, pair("raw", 3)]], "layer 1: expected one owner"),
            ([[raw], [raw], [raw, pair("raw", 0), pair("merged", 1)]], "layer 2: expected one owner"),
            ([[raw], [raw, pair("raw", 0)], [raw, pair("raw", 0)]], "layer 2: expected one owner"),
            ([[raw], [raw, pair("raw", 0)], [raw, pair("raw", 1)]], "layer 1: is in two pairs"),
            ([[raw], [raw, pair("merged", 0)]], "layer 0: merged-owner needs"),
            ([[raw, self.owner], [raw, pair("raw", 0)]], "layer 0: merged-owner needs"),
            ([[raw, self.owner]], "layer 0: merged-owner needs"),
        ]
        for table, message in bad:
            with pytest.raises(ValueError, match=message):
                plan_layers(table, 0.1, Wish())

    def test_more_pairs_than_the_share(self) -> None:
        table = priced(Wish(Method.auto), 8, fixed_pairs(8, 2))
        with pytest.raises(ValueError, match="2 pairs"):
            plan_layers(table, 0.1, Wish(Method.krul, share=0.1))
        plan_layers(table, 0.1, Wish(Method.int4, share=0.1))  # has no use for a share

    @pytest.mark.parametrize(("size", "loss"), [(-1, 0.0), (True, 0.0), (1.5, 0.0), (1, -0.1), (1, math.nan)])
    def test_offers(self, size: Any, loss: float) -> None:
        with pytest.raises(ValueError, match="expected"):
            Offer(RAW, size, loss)

    @pytest.mark.parametrize(
        "settings",
        [
            {"method": "krull"},
            {"sharing": "mean"},
            {"alone": "raw"},
            {"share": 0.6},
            {"gamma": -1},
            {"gamma": math.nan},
        ],
    )
    def test_wishes(self, settings: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=f"{next(iter(settings))}: expected"):
            Wish(**settings)

    def test_pairs_of_a_wish(self) -> None:
        krul = Wish(Method.krul)
        for pairs in ((Pair(0, 4),), (Pair(-1, 2),), (Pair(2, 1),), (Pair(1, 1),), (Pair(0, 1), Pair(1, 2))):
            for use in (as_asked, priced_choices):
                with pytest.raises(ValueError, match="pairs: expected owner"):
                    use(krul, 4, pairs)
        with pytest.raises(ValueError, match="pairs: expected none"):
            as_asked(Wish(Method.int4), 4, (Pair(0, 1),))
        with pytest.raises(ValueError, match="method auto"):
            as_asked(Wish(Method.auto), 4, ())


class TestQuality:
    def test_names_are_budgets_that_rise(self) -> None:
        budgets = [loss_budget(name) for name in ("exact", "high", "balanced", "small")]
        assert budgets[0] == 0
        assert sorted(set(budgets)) == budgets
        assert [loss_budget(quality) for quality in Quality] == budgets

    def test_numbers_are_themselves(self) -> None:
        assert [loss_budget(number) for number in (0, 0.25, 3, math.inf)] == [0.0, 0.25, 3.0, math.inf]

    @pytest.mark.parametrize("quality", ["best", "High", "0.1", "", -1, math.nan, True, None, [0.1]])
    def test_anything_else_is_refused(self, quality: Any) -> None:
        with pytest.raises(ValueError, match="exact, high, balanced, small"):
            loss_budget(quality)

    def test_plain_texts_of_a_configuration_will_do(self) -> None:
        wish = Wish(method="krul", sharing="raw")  # type: ignore[arg-type]
        assert wish == Wish(Method.krul, sharing=Sharing.raw)
        assert as_asked(wish, 2, (Pair(0, 1),)).owners == {1: 0}


# -- preemptive: of the history alone --

PACKAGE = Path(sgl_krul.strategy.__file__).parent
PURE = {
    *("__future__", "collections.abc", "dataclasses", "enum", "fractions", "hashlib", "itertools", "math"),
    *("numpy", "numpy.typing", "struct", "types", "typing", "xxhash", "sgl_krul.errors"),
}


def history_of(
    seed: int, *, turn: int, layers: int = 8, tokens: int = 40, last: int = 12
) -> NDArray[np.float64]:
    """Attention rows [layers, tokens, tokens] of a history that `last` more tokens of the seed `turn` follow.

    Computed over all of it, as a model would, and cut where the history ends.
    """
    past, coming = np.random.default_rng(seed), np.random.default_rng(1000 + turn)
    shape = (2, layers, last, 6)
    q, k = np.concatenate([past.normal(size=(2, layers, tokens, 6)), coming.normal(size=shape)], axis=2)
    scores = q @ k.transpose(0, 2, 1)
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    rows = np.exp(scores - scores.max(-1, keepdims=True))
    rows /= rows.sum(-1, keepdims=True)
    return rows[:, :tokens, :tokens]


def plan_of(rows: NDArray[np.float64], method: Method) -> Plan:
    """The plan at the end of a history, from its rows; prices made up from the same."""
    layers, tokens, _ = rows.shape
    flat = rows.reshape(layers, -1)
    distances = np.linalg.norm(flat[:, None] - flat, axis=-1)
    edge = tokens // 10
    mass = (rows[..., :edge].sum(-1) + rows[..., -edge:].sum(-1)).mean(-1)
    wish = Wish(method, sharing=Sharing.raw, gamma=0.12)
    pairs = choose_pairs(wish, mass, distances)
    factors = {f"_{layer}": float(m) for layer, m in enumerate(mass)}
    return plan_layers(priced(wish, layers, pairs, **factors), 0.03, wish)


@pytest.mark.parametrize("method", Method)
def test_the_turn_to_come_changes_no_byte(method: Method) -> None:
    plans = [plan_of(history_of(3, turn=turn), method) for turn in range(4)]
    assert len({plan.layer_plan.encode() for plan in plans}) == 1
    assert plans == [plans[0]] * 4


def test_another_history_does() -> None:
    plans = [plan_of(history_of(seed, turn=0), Method.krul) for seed in range(4)]
    assert len({plan.layer_plan.encode() for plan in plans}) > 1


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (plan_layers, ["table", "budget", "wish"]),
        (choose_pairs, ["wish", "mass", "distances"]),
        (priced_choices, ["wish", "layers", "pairs"]),
        (as_asked, ["wish", "layers", "pairs"]),
    ],
)
def test_there_is_no_argument_for_a_turn(function: Callable[..., Any], arguments: list[str]) -> None:
    assert list(inspect.signature(function).parameters) == arguments


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_nothing_else_can_be_asked(path: Path) -> None:
    """No clock, no chance, no file, no environment, no state: nothing that has any of them is imported."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global | ast.Nonlocal)
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= PURE
        if isinstance(node, ast.ImportFrom):
            assert node.module in PURE or (node.module or "").startswith("sgl_krul.strategy")
        if isinstance(node, ast.Attribute):
            assert node.attr != "random" or ast.unparse(node) == "Method.random"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"hash", "id", "open", "input", "eval", "exec", "__import__"}


CHILD = """
from sgl_krul.strategy import Method, Offer, Sharing, Wish, plan_layers, priced_choices, random_pairs
for method in Method:
    wish = Wish(method, sharing=Sharing.raw, seed=7)
    pairs = random_pairs(24, 12, wish.seed) if wish.shares else ()
    rows = priced_choices(wish, 24, pairs)
    table = [
        [
            Offer(c, 1000 >> at, 0.0 if c.mode == "raw" else 0.01 * at * (1 + 7 * layer % 5))
            for at, c in enumerate(choices)
        ]
        for layer, choices in enumerate(rows)
    ]
    for budget in (1e-3, 0.01, 0.03, 0.1):
        plan = plan_layers(table, budget, wish)
        print(plan.layer_plan.plan_id, plan.layer_plan.encode().hex())
        print(plan.bytes, plan.loss.hex(), plan.refused)
print(hash("a text"))
"""


def test_every_process_gets_the_same() -> None:
    told = []
    for seed in ("0", "4711"):
        done = subprocess.run(
            [sys.executable, "-c", CHILD],
            capture_output=True,
            text=True,
            check=True,
            cwd=PACKAGE.parents[1],
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        told.append(done.stdout.splitlines())
    assert len(told[0]) == 2 * 4 * len(Method) + 1
    assert told[0][-1] != told[1][-1]  # the processes do differ
    assert told[0][:-1] == told[1][:-1]


def test_what_was_given_is_left_as_it_was() -> None:
    wish = Wish(Method.auto)
    table = priced(wish, 8, random_pairs(8, 4, 1))
    before = [list(offers) for offers in table]
    plan = plan_layers(table, 0.01, wish)
    assert table == before
    assert plan_layers(table, 0.01, wish) == plan
    assert isinstance(plan.layer_plan, LayerPlan)

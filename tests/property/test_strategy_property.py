"""What holds for any table: plans against all plans there are, budgets against each other, any bytes."""

from __future__ import annotations

import itertools
import math
import struct
from fractions import Fraction

import numpy as np
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_krul.errors import Corrupt
from sgl_krul.strategy import (
    RAW,
    LayerChoice,
    LayerPlan,
    Method,
    Offer,
    Pair,
    Sharing,
    Wish,
    greedy_pairs,
    plan_layers,
    priced_choices,
    random_pairs,
)

Table = list[list[Offer]]

LOSS = st.one_of(
    st.sampled_from([0.0, 1e-12, 0.1, 0.2, 0.3, 0.7]),
    st.floats(0, 2, allow_subnormal=False),
    st.just(math.inf),
)
BYTES = st.one_of(st.integers(0, 12), st.integers(0, 10**7))


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    return Wish(
        draw(st.sampled_from(Method)),
        sharing=draw(st.sampled_from(Sharing)),
        alone=draw(st.sampled_from(["bf16", "int8", "int4"])),
        gamma=0.0,
    )


@st.composite
def tables(draw: st.DrawFn, wish: Wish, most_layers: int) -> Table:
    layers = draw(st.integers(1, most_layers))
    count = draw(st.integers(0, layers // 2)) if wish.shares else 0
    table = []
    for choices in priced_choices(wish, layers, random_pairs(layers, count, draw(st.integers(0, 9)))):
        kept = [c for c in choices if not c.stands_alone or c == RAW or draw(st.booleans())]
        table.append([Offer(c, draw(BYTES), 0.0 if c == RAW else draw(LOSS)) for c in kept])
    return table


@st.composite
def tasks(draw: st.DrawFn, most_layers: int = 12) -> tuple[Table, Wish]:
    wish = draw(wishes())
    return draw(tables(wish, most_layers)), wish


@st.composite
def budgets(draw: st.DrawFn, table: Table) -> float:
    """Budgets where something happens: sums of the table's own losses, and others."""
    losses = [offer.loss for offers in table for offer in offers if math.isfinite(offer.loss)]
    some = draw(st.lists(st.sampled_from(losses), max_size=len(table)))
    small = st.sampled_from([5e-324, 1e-9, 1e-3, math.inf])
    return draw(st.one_of(st.just(math.fsum(some) / len(table)), st.floats(0, 2), small))


def exact_loss(losses: tuple[float, ...]) -> Fraction:
    return sum((Fraction(loss) for loss in losses), Fraction()) / len(losses)


def every_plan(table: Table, wish: Wish) -> list[tuple[LayerPlan, int, Fraction]]:
    """All plans that the wish allows, with their bytes and losses; LayerPlan itself says which there are."""
    plans = []
    usable = [
        [offer for offer in offers if offer.choice.coding in wish.codings and math.isfinite(offer.loss)]
        for offers in table
    ]
    for offers in itertools.product(*usable):
        try:
            plan = LayerPlan(tuple(offer.choice for offer in offers))
        except ValueError:
            continue
        loss = exact_loss(tuple(offer.loss for offer in offers))
        plans.append((plan, sum(offer.bytes for offer in offers), loss))
    return plans


def pairs_in(table: Table) -> dict[int, int]:
    """Owner by partner."""
    return {
        layer: offer.choice.owner
        for layer, offers in enumerate(table)
        for offer in offers
        if offer.choice.owner is not None
    }


def units_of(table: Table) -> list[set[int]]:
    pairs = pairs_in(table)
    alone = set(range(len(table))) - set(pairs) - set(pairs.values())
    return [{layer} for layer in alone] + [{owner, partner} for partner, owner in pairs.items()]


@settings(deadline=None)
@given(st.data())
def test_the_budget_holds_and_the_figures_are_those_of_the_table(data: st.DataObject) -> None:
    table, wish = data.draw(tasks())
    budget = data.draw(budgets(table))
    plan = plan_layers(table, budget, wish)
    offers = [
        next(offer for offer in offers if offer.choice == choice)
        for offers, choice in zip(table, plan.layer_plan.choices, strict=True)
    ]
    assert plan.loss <= budget
    assert exact_loss(plan.losses) <= Fraction(budget) if math.isfinite(budget) else True
    assert plan.losses == tuple(offer.loss for offer in offers)
    assert plan.loss == float(exact_loss(plan.losses))
    assert plan.bytes == sum(offer.bytes for offer in offers)
    assert all(choice.coding in wish.codings for choice in plan.layer_plan.choices)


@settings(deadline=None)
@given(st.data())
def test_no_pair_is_half_shared(data: st.DataObject) -> None:
    table, wish = data.draw(tasks())
    plan = plan_layers(table, data.draw(budgets(table)), wish)
    owners = plan.layer_plan.owners
    for partner, owner in pairs_in(table).items():
        shared = plan.layer_plan.choices[partner].mode == "shared"
        assert (owners.get(partner) == owner) == shared
        kind = plan.layer_plan.choices[partner].variant if shared else ""
        assert (plan.layer_plan.choices[owner].variant == "merged-owner") == (kind == "merged")
        allowed = any(o.choice.owner is not None and o.choice.coding in wish.codings for o in table[partner])
        assert (Pair(owner, partner) in plan.refused) == (allowed and not shared)
    assert len(plan.refused) + len(owners) <= len(pairs_in(table))


@settings(deadline=None)
@given(st.data())
def test_against_all_plans_there_are(data: st.DataObject) -> None:
    table, wish = data.draw(tasks(most_layers=4))
    budget = data.draw(budgets(table))
    found = plan_layers(table, budget, wish)
    if budget == 0:
        assert found.layer_plan.is_exact
        return
    plans = every_plan(table, wish)
    assert found.layer_plan in [plan for plan, _, _ in plans]
    within = [entry for entry in plans if math.isinf(budget) or entry[2] <= Fraction(budget)]
    # Only between two steps of the climb may there be something cheaper: less than one step of one unit.
    best = min(size for _, size, _ in within)
    step = max(sum(max(offer.bytes for offer in table[layer]) for layer in unit) for unit in units_of(table))
    assert best <= found.bytes
    assert found.bytes == best or found.bytes - best < step
    # Local optimality: whatever one unit alone could be instead is dearer, or past the budget.
    for unit in units_of(table):
        for plan, size, _ in within:
            changed = {
                layer
                for layer, (a, b) in enumerate(zip(plan.choices, found.layer_plan.choices, strict=True))
                if a != b
            }
            if changed and changed <= unit:
                assert size >= found.bytes


@settings(deadline=None)
@given(st.data())
def test_without_a_bound_it_is_the_cheapest_and_of_these_the_closest(data: st.DataObject) -> None:
    table, wish = data.draw(tasks(most_layers=4))
    plan = plan_layers(table, math.inf, wish)
    least = min((size, loss) for _, size, loss in every_plan(table, wish))
    assert (plan.bytes, exact_loss(plan.losses)) == least


@settings(deadline=None)
@given(st.data())
def test_a_smaller_budget_never_costs_less(data: st.DataObject) -> None:
    table, wish = data.draw(tasks())
    some = sorted(data.draw(st.lists(budgets(table), min_size=2, max_size=8)))
    plans = [plan_layers(table, budget, wish) for budget in some]
    sizes = [plan.bytes for plan in plans]
    assert sizes == sorted(sizes, reverse=True)


@settings(deadline=None)
@given(st.data())
def test_the_order_of_offers_is_nothing(data: st.DataObject) -> None:
    table, wish = data.draw(tasks())
    budget = data.draw(budgets(table))
    shuffled = [data.draw(st.permutations(offers)) for offers in table]
    assert plan_layers(shuffled, budget, wish) == plan_layers(table, budget, wish)


@given(
    st.integers(2, 12).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.integers(0, 4), min_size=n * n, max_size=n * n))
    ),
    st.data(),
)
def test_greedy_pairs_are_the_closest_of_what_is_left(
    shape: tuple[int, list[int]], data: st.DataObject
) -> None:
    layers, numbers = shape
    distances = np.array(numbers, np.float64).reshape(layers, layers)
    distances = np.triu(distances, 1) + np.triu(distances, 1).T
    candidates = data.draw(st.sets(st.integers(0, layers - 1)))
    count = data.draw(st.integers(0, layers))
    pairs = greedy_pairs(distances, candidates, count)
    assert len(pairs) == min(count, len(candidates) // 2)
    left = set(candidates)
    for owner, partner, distance in pairs:
        choices = [(distances[i, j], i, j) for i, j in itertools.combinations(sorted(left), 2)]
        assert (distance, owner, partner) == min(choices)
        left -= {owner, partner}
    assert greedy_pairs(distances, candidates, max(count - 1, 0)) == pairs[: max(count - 1, 0)]


@given(st.binary(max_size=64))
def test_any_bytes_are_corrupt_or_the_one_form_of_a_plan(data: bytes) -> None:
    try:
        plan = LayerPlan.decode(data)
    except Corrupt:
        return
    assert plan.encode() == data


@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.one_of(st.integers(0, 6), st.just(0xFFFF))), min_size=1, max_size=6
    )
)
def test_any_layers_under_a_right_checksum_too(layers: list[tuple[int, int]]) -> None:
    body = struct.pack("<BH", 1, len(layers)) + b"".join(struct.pack("<BH", *layer) for layer in layers)
    data = body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
    try:
        plan = LayerPlan.decode(data)
    except Corrupt as error:
        reason = error.reason
    else:
        assert plan.encode() == data
        _check_pairs(plan)
        return
    assert reason == "length"


def _check_pairs(plan: LayerPlan) -> None:
    partners = plan.owners
    for partner, owner in partners.items():
        assert owner < partner
        assert plan.partner_of(owner) == partner
        assert owner not in partners
    assert len(set(partners.values())) == len(partners)
    merged = {layer for layer, choice in enumerate(plan.choices) if choice.variant == "merged-owner"}
    assert merged == {o for p, o in partners.items() if plan.choices[p] == LayerChoice("shared", "merged", o)}

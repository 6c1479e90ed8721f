"""What holds for any session and any machine: plans against brute force, the bound and the simulator."""

from __future__ import annotations

import itertools
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_krul.restore.cost import ComputeRates, Rates, TierRates
from sgl_krul.restore.planner import (
    Follow,
    RestorePlan,
    RestoreTask,
    StoredChunk,
    Strategy,
    lower_bound,
    plan_restore,
    predict,
)
from tests.two_streams import run_staircase

PAGE = 16
BYTES = st.sampled_from([20_000, 100_000, 400_000, 1_500_000])


@st.composite
def machines(draw: st.DrawFn) -> Rates:
    rate = st.floats(0.1, 10.0)
    compute = ComputeRates(
        1e-5 * draw(rate), 6e-5 * draw(rate), 2e-9 * draw(rate), draw(st.sampled_from([0.0, 1e-3, 5e-3]))
    )
    tiers = {
        name: TierRates(
            draw(st.sampled_from([0.0, 1e-3, 3e-2])),
            draw(st.sampled_from([2e6, 1e7, 5e7, 4e8])),
            draw(st.integers(1, 4)),
        )
        for name in ("ssd", "redis")
    }
    return Rates(compute, tiers, draw(st.sampled_from([0.0, 1e-9, 2e-8])))


@st.composite
def sessions(
    draw: st.DrawFn, layers: st.SearchStrategy[int], chunks: st.SearchStrategy[int], *, alike: bool = False
) -> RestoreTask:
    count, depth = draw(chunks), draw(layers)
    tiers = st.sampled_from(["ssd", "redis", "ssd", "ssd", ""])
    shapes = [draw(st.lists(BYTES, min_size=depth, max_size=depth)) for _ in range(2)]
    if alike:
        shapes = [[draw(BYTES)] * depth]
    stored = []
    for _ in range(count):
        sizes = list(draw(st.sampled_from(shapes)))
        for layer in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):  # layers that paper mode did not store
            sizes[min(layer, depth - 1)] = 0
        stored.append(StoredChunk(PAGE * draw(st.sampled_from([4, 16, 16, 40])), draw(tiers), tuple(sizes)))
    total = sum(chunk.tokens for chunk in stored)
    device = PAGE * draw(st.integers(0, total // PAGE)) if draw(st.booleans()) else 0
    return RestoreTask(depth, PAGE, tuple(stored), device, draw(st.sampled_from([0, 16, 300])))


SMALL = sessions(st.integers(1, 4), st.integers(1, 5))


def every_plan(task: RestoreTask, rates: Rates, follow: Follow = "end") -> list[RestorePlan]:
    """All chunk-aligned staircases with all cuts at ends of chunks, priced."""
    plans = [plan_restore(task, rates, Strategy.recompute)]
    ends = [end for end in itertools.accumulate(chunk.tokens for chunk in task.chunks)]
    ends = [end for end in ends if end > task.on_device_tokens]
    for tokens in ends:
        edges = [end for end in reversed(ends) if end <= tokens] + [task.on_device_tokens]
        for stairs in itertools.combinations_with_replacement(edges, task.layers):
            with suppress(ValueError):  # leaves out what is stored nowhere
                plans.append(predict(task, rates, stairs, tokens, follow=follow))
    return plans


def worth(load: RestorePlan) -> float:
    """What loading all may cost more before recompute takes part."""
    return 0.05 * load.ttft_s + 0.010


@settings(max_examples=60, deadline=None)
@given(SMALL, machines())
def test_no_staircase_and_no_cut_is_2_percent_faster(task: RestoreTask, rates: Rates) -> None:
    plan = plan_restore(task, rates)
    best = min(other.ttft_s for other in every_plan(task, rates))
    slack = worth(plan) if plan.strategy == Strategy.load else 0.0
    assert plan.ttft_s <= best * 1.02 + slack + 1e-9
    assert plan.ttft_s >= best * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(SMALL, machines())
def test_the_same_when_the_forward_follows_layer_by_layer(task: RestoreTask, rates: Rates) -> None:
    plan = plan_restore(task, rates, follow="layers")
    best = min(other.ttft_s for other in every_plan(task, rates, "layers"))
    slack = worth(plan) if plan.strategy == Strategy.load else 0.0
    assert plan.ttft_s <= best * 1.02 + slack + 1e-9
    assert plan.ttft_s <= plan_restore(task, rates).ttft_s * 1.0 + worth(plan) + 1e-9


@settings(max_examples=60, deadline=None)
@given(SMALL, machines())
def test_nothing_beats_the_bound(task: RestoreTask, rates: Rates) -> None:
    bound = lower_bound(task, rates)
    assert all(bound <= plan.ttft_s * (1 + 1e-9) for plan in every_plan(task, rates))


@settings(max_examples=60, deadline=None)
@given(sessions(st.integers(1, 30), st.integers(1, 40)), machines(), st.sampled_from(list(Strategy)))
def test_every_plan_is_one_that_can_be_carried_out(
    task: RestoreTask, rates: Rates, strategy: Strategy
) -> None:
    plan = plan_restore(task, rates, strategy)
    assert plan.tokens == 0 or task.on_device_tokens <= plan.tokens <= task.tokens
    assert all(above >= below for above, below in itertools.pairwise(plan.staircase))
    assert len(plan.staircase) == task.layers
    if plan.tokens:
        assert task.on_device_tokens <= plan.staircase[-1] <= plan.staircase[0] <= plan.tokens
        again = predict(task, rates, plan.staircase, plan.tokens)
        assert (again.ttft_s, again.load_bytes) == (plan.ttft_s, plan.load_bytes)
    assert plan.why


@settings(max_examples=60, deadline=None)
@given(sessions(st.integers(2, 30), st.integers(3, 30), alike=True), machines(), st.data())
def test_any_staircase_takes_what_the_simulated_streams_take(
    task: RestoreTask, rates: Rates, data: st.DataObject
) -> None:
    strategy = data.draw(st.sampled_from([Strategy.optimal, Strategy.half, Strategy.paper, Strategy.load]))
    plan = plan_restore(task, rates, strategy)
    if not plan.tokens:
        return
    workers = rates.tiers["ssd"].in_flight
    rates = Rates(  # one ring of loaders serves all tiers
        rates.compute,
        {name: TierRates(t.latency_s, t.bytes_per_s, workers) for name, t in rates.tiers.items()},
        rates.land_s_per_byte,
    )
    plan = predict(task, rates, plan.staircase, plan.tokens)
    outcome = run_staircase(task, rates, plan.staircase, plan.tokens, workers)
    assert outcome.load_bytes == plan.load_bytes
    assert abs(outcome.compute_s - plan.compute_s) <= 1e-9 + 1e-6 * plan.compute_s
    # Tiers that alternate overlap, so they may be earlier.
    alone = len({chunk.tier for chunk in task.chunks if chunk.tier}) < 2
    requests_s = [
        tier.latency_s + 1_500_000 * (1 / tier.bytes_per_s + rates.land_s_per_byte)
        for tier in rates.tiers.values()
    ]
    request_s = max(requests_s) if alone else sum(requests_s)  # each tier has a last one of its own
    assert outcome.load_s <= plan.load_s * 1.05 + request_s
    if alone:
        assert outcome.load_s >= plan.load_s * 0.9 - request_s
    assert outcome.seconds <= max(plan.compute_s, plan.load_s) * 1.05 + plan.fill_s + request_s

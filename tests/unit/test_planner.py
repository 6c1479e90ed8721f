"""Plans by example: what is charged, chosen, refused. The property tests have what holds always."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from sgl_krul.restore.cost import ComputeRates, Rates, TierRates
from sgl_krul.restore.paper_plan import paper_share, pyramid
from sgl_krul.restore.planner import (
    RestoreTask,
    StoredChunk,
    Strategy,
    lower_bound,
    plan_restore,
    predict,
)
from tests.two_streams import meet, run_staircase

# Round numbers: a token costs 1 ms for K and V, 10 ms for the rest, a pair 10 us; a byte 1 ms, nothing else.
ROUND = Rates(ComputeRates(1e-3, 1e-2, 1e-5, 0.0), {"ssd": TierRates(0.0, 1e3, 1)}, 0.0)
# About what SmolLM2 does on two cores (shared/measurements.md): 30 layers, fp32 K and V, 18 MB/s.
COMPUTE = ComputeRates(1.2e-5, 7e-5, 1.2e-9, 1e-3)
SEGMENT = 256 * 2 * 192 * 4


def machine(bytes_per_s: float = 18e6, *, tier: str = "redis", in_flight: int = 4) -> Rates:
    return Rates(COMPUTE, {tier: TierRates(1e-3, bytes_per_s, in_flight)}, 1e-9)


def session(
    chunks: int = 12, layers: int = 30, *, device: int = 0, new: int = 16, shape: str = "equal"
) -> RestoreTask:
    """Chunks of 256 tokens. `shape`: how bytes are spread over the layers."""
    sizes = {
        "equal": [SEGMENT] * layers,
        "first": [int(SEGMENT * 2 * (1 - layer / layers)) + 1 for layer in range(layers)],
        "last": [int(SEGMENT * 2 * layer / layers) + 1 for layer in range(layers)],
        "spiky": [SEGMENT * (6 if layer % 5 == 2 else 1) for layer in range(layers)],
    }[shape]
    return RestoreTask(
        layers, 16, tuple(StoredChunk(256, "redis", tuple(sizes)) for _ in range(chunks)), device, new
    )


def tiny(*chunks: StoredChunk, device: int = 0, new: int = 0) -> RestoreTask:
    return RestoreTask(3, 1, chunks, device, new)


def lose(task: RestoreTask, *indices: int) -> RestoreTask:
    chunks = [replace(c, tier="") if i in indices else c for i, c in enumerate(task.chunks)]
    return replace(task, chunks=tuple(chunks))


A, B = StoredChunk(10, "ssd", (1, 2, 4)), StoredChunk(10, "ssd", (8, 16, 32))


# -- what is charged --


def test_a_token_that_stops_costs_kv_and_one_that_goes_on_the_whole_layer() -> None:
    plan = predict(tiny(A, B), ROUND, (20, 10, 10), 20)
    # Layer 0: K and V of 20, the rest for the 10 that go on, with their 55 pairs. Layer 1: 10 and 10 go on.
    # Layer 2 is the last: nobody goes on.
    kv_s, rest_s, attention_s = (20 + 10 + 10) * 1e-3, (10 + 10) * 1e-2, (55 + 55) * 1e-5
    assert plan.compute_s == pytest.approx(kv_s + rest_s + attention_s)
    assert plan.load_bytes == 16 + 32
    assert plan.load_s == pytest.approx(0.048)
    assert plan.ttft_s == pytest.approx(max(plan.compute_s, plan.load_s))
    assert plan.recomputes


def test_the_last_layer_never_costs_more_than_kv_and_layer_0_alone_neither() -> None:
    assert predict(tiny(A, B), ROUND, (20, 0, 0), 20).compute_s == pytest.approx(20e-3)
    full, less = (predict(tiny(A, B), ROUND, (20, 20, last), 20).compute_s for last in (20, 0))
    # What goes on to the last layer pays the rest of the layer before it.
    assert full - less == pytest.approx(20 * 1e-3 + 20 * 1e-2 + 210 * 1e-5)


def test_a_segment_is_charged_whole_when_recompute_does_not_reach_its_end() -> None:
    assert predict(tiny(A, B), ROUND, (15, 10, 9), 20).load_bytes == 8 + 16 + 32 + 4
    assert predict(tiny(A, B), ROUND, (20, 10, 10), 20).load_bytes == 16 + 32


def test_what_is_on_the_device_costs_nothing() -> None:
    plan = predict(tiny(A, B, device=10), ROUND, (10, 10, 10), 20)
    assert (plan.compute_s, plan.load_bytes, plan.recomputes) == (0.0, 56, False)
    # From token 10 on: 10 tokens whose attention reaches over the first 10.
    plan = predict(tiny(A, B, device=10), ROUND, (20, 20, 20), 20)
    assert plan.compute_s == pytest.approx(30e-3 + 20e-2 + 2 * (100 + 55) * 1e-5)
    # In the middle of a chunk: its segments are charged whole, its first tokens are not computed.
    plan = predict(tiny(A, B, device=5), ROUND, (10, 5, 5), 20)
    assert (plan.load_bytes, plan.compute_s) == (2 + 4 + 56, pytest.approx(5e-3))
    everything = tiny(A, B, device=20, new=3)
    plan = plan_restore(everything, ROUND)
    assert (plan.tokens, plan.load_bytes, plan.compute_s) == (20, 0, 0.0)
    assert plan.ttft_s == plan.forward_s > 0


def test_a_lost_chunk_is_filled_when_both_streams_are_done() -> None:
    plan = predict(lose(tiny(A, B), 0), ROUND, (0, 0, 0), 20)
    alone_s = 3 * 10e-3 + 2 * 10e-2 + 2 * 55 * 1e-5
    assert (plan.fill_s, plan.load_bytes) == (pytest.approx(alone_s), 56)
    assert plan.ttft_s == pytest.approx(plan.load_s + alone_s)
    assert plan.recomputes
    through = predict(lose(tiny(A, B), 0), ROUND, (10, 10, 10), 20)
    assert (through.fill_s, through.compute_s) == (0.0, pytest.approx(alone_s))
    assert through.ttft_s == pytest.approx(max(alone_s, 56e-3))


def test_blocks_are_whole_chunks_up_to_512_tokens_and_long_chunks_are_cut() -> None:
    slices = Rates(ComputeRates(1e-9, 0, 0, 1.0), {})
    for sizes, counted in (
        ([256] * 4, 2),
        ([256, 272, 256], 3),
        ([1024], 2),
        ([128, 608, 128], 4),
        ([16], 1),
    ):
        chunks = tuple(StoredChunk(size, "ssd", (1,)) for size in sizes)
        plan = predict(RestoreTask(1, 16, chunks, 0, 0), slices, (sum(sizes),), sum(sizes))
        assert plan.compute_s == pytest.approx(counted, abs=1e-3), sizes


def test_latency_hides_behind_requests_in_flight() -> None:
    task = session(4)
    one, four = (predict(task, machine(in_flight=n), (0,) * 30, 1024) for n in (1, 4))
    link_s = 4 * 30 * SEGMENT / 18e6
    requests = 4 * 15  # two segments fit into a request of 1 MiB
    assert one.load_s == pytest.approx(link_s + requests * 1e-3 + four.load_bytes * 1e-9)
    assert four.load_s == pytest.approx(link_s, rel=0.001)
    far = Rates(COMPUTE, {"redis": TierRates(0.5, 18e6, 4)}, 1e-9)
    assert predict(task, far, (0,) * 30, 1024).load_s == pytest.approx(
        (requests * 0.5 + link_s) / 4 + 0.75 * 0.5, rel=0.01
    )


def test_tiers_count_one_after_another_and_slow_landing_sets_the_pace() -> None:
    two = tiny(A, replace(B, tier="redis"))
    rates = replace(ROUND, tiers={"ssd": TierRates(0.0, 1e3, 1), "redis": TierRates(0.0, 100.0, 1)})
    assert predict(two, rates, (0, 0, 0), 20).load_s == pytest.approx(7e-3 + 0.56)
    landing = Rates(ROUND.compute, {"ssd": TierRates(0.0, 1e3, 8)}, 1.0)
    assert predict(tiny(A, B), landing, (0, 0, 0), 20).load_s == pytest.approx(63, rel=0.01)


def test_the_forward_of_the_new_tokens_follows_the_restore_and_takes_what_was_cut() -> None:
    rate = ROUND.compute
    assert rate is not None
    plan = predict(tiny(A, B, new=4), replace(ROUND, request_s=0.5), (0, 0, 0), 20)
    assert plan.forward_s == pytest.approx(3 * rate.layer_s(20, 4) + 0.5)
    cut = predict(tiny(A, B, new=4), ROUND, (0, 0, 0), 10)
    assert cut.forward_s == pytest.approx(3 * rate.layer_s(10, 14))
    assert cut.load_bytes == 7
    nothing = predict(tiny(A, B, device=10, new=4), ROUND, (0, 0, 0), 0)
    assert (nothing.strategy, nothing.staircase, nothing.tokens) == (Strategy.recompute, (0, 0, 0), 0)
    assert nothing.ttft_s == pytest.approx(3 * rate.layer_s(10, 14))


def test_a_forward_that_follows_layer_by_layer_waits_for_the_slowest_layer() -> None:
    rate = ROUND.compute
    assert rate is not None
    task = tiny(A, B, new=4)
    layer_s = rate.forward_s(20, 4)
    plan = predict(task, ROUND, (0, 0, 0), 20, follow="layers")
    ready = [9e-3, 27e-3, 63e-3]
    assert plan.ttft_s == pytest.approx(max(at + (3 - i) * layer_s for i, at in enumerate(ready)))
    computed = predict(task, ROUND, (20, 20, 0), 20, follow="layers")
    assert computed.ttft_s == pytest.approx(
        max(computed.compute_s + 3 * layer_s, 3 * layer_s, 36e-3 + layer_s)
    )
    assert plan.ttft_s < predict(task, ROUND, (0, 0, 0), 20).ttft_s


# -- what is chosen --


@pytest.mark.parametrize("shape", ["equal", "first", "last", "spiky"])
@pytest.mark.parametrize("bytes_per_s", [2e6, 5e6, 18e6, 50e6])
@pytest.mark.parametrize(("layers", "chunks"), [(30, 12), (30, 100), (30, 400), (80, 100)])
def test_a_large_plan_is_within_5_percent_of_the_bound(
    layers: int, chunks: int, bytes_per_s: float, shape: str
) -> None:
    task, rates = session(chunks, layers, shape=shape), machine(bytes_per_s)
    plan, bound = plan_restore(task, rates), lower_bound(task, rates)
    assert plan.strategy == Strategy.optimal
    assert bound <= plan.ttft_s <= 1.05 * bound


def test_long_sessions_with_quadratic_attention_too() -> None:
    rates = replace(machine(50e6), compute=ComputeRates(1e-5, 2e-5, 2e-8, 1e-3))
    task = session(400)
    assert plan_restore(task, rates).ttft_s <= 1.01 * lower_bound(task, rates)


def test_at_the_balanced_point_both_streams_halve_the_time() -> None:
    task = session(24)
    recompute = plan_restore(task, machine(), Strategy.recompute)
    balanced = machine(24 * 30 * SEGMENT / (recompute.ttft_s - 0.07))
    load, both = (plan_restore(task, balanced, strategy) for strategy in (Strategy.load, Strategy.optimal))
    assert load.ttft_s == pytest.approx(recompute.ttft_s, rel=0.01)
    assert load.ttft_s / both.ttft_s > 1.85
    assert abs(both.compute_s - both.load_s) < 0.02 * both.compute_s
    assert both.staircase[0] == task.tokens  # K and V of layer 0 cost next to nothing


def test_400_chunks_are_planned_in_10_milliseconds() -> None:
    worst = 0.0
    for shape in ("equal", "first", "last", "spiky"):
        task, rates = session(400, shape=shape), machine()
        best = 1.0
        for _ in range(7):
            began = time.thread_time()  # of this thread: other processes don't count
            plan_restore(task, rates)
            best = min(best, time.thread_time() - began)
        worst = max(worst, best)
    assert worst < 0.010


@pytest.mark.parametrize(
    ("bytes_per_s", "strategy"), [(1e3, Strategy.optimal), (18e6, Strategy.optimal), (5e9, Strategy.load)]
)
def test_the_link_decides(bytes_per_s: float, strategy: Strategy) -> None:
    task, rates = session(), machine(bytes_per_s)
    plan = plan_restore(task, rates)
    assert plan.strategy == strategy
    assert plan.ttft_s <= 1.02 * plan_restore(task, rates, Strategy.recompute).ttft_s
    assert "loading all takes" in plan.why
    assert "recomputing all" in plan.why


def test_without_a_link_to_speak_of_nothing_is_restored() -> None:
    task, rates = session(shape="last"), machine(1.0)
    plan = plan_restore(task, replace(rates, compute=replace(COMPUTE, slice_s=0.05)))
    assert (plan.strategy, plan.tokens, plan.load_bytes) == (Strategy.recompute, 0, 0)
    assert plan.why.startswith("nothing is restored: SGLang prefills")


def test_a_small_gain_is_not_worth_the_device() -> None:
    task, rates = session(1), machine(1.5e9)
    plan = plan_restore(task, rates)
    assert plan.strategy == Strategy.load
    assert plan.why.endswith("which is not worth the device")
    best = min(predict(task, rates, (256,) * depth + (0,) * (30 - depth), 256).ttft_s for depth in range(31))
    assert 0 < plan.ttft_s - best < 0.05 * plan.ttft_s + 0.010


def test_one_lost_chunk_is_filled_and_a_lost_tail_is_left_to_the_forward() -> None:
    filled = plan_restore(lose(session(24), 12), machine(100e6))
    assert filled.tokens == 24 * 256
    assert filled.fill_s > 0
    tail = plan_restore(lose(session(24), *range(12, 24)), machine(1e9))
    assert (tail.tokens, tail.fill_s) == (12 * 256, 0.0)
    first = plan_restore(lose(session(24), 0), machine(18e6))
    assert first.tokens == 24 * 256
    assert min(first.staircase) >= 256
    assert first.fill_s == 0.0


def test_where_a_slow_tier_begins_the_restore_may_be_cut() -> None:
    task = session(20)
    fast = tuple(replace(chunk, tier="memory") for chunk in task.chunks[:15])
    mixed = replace(task, chunks=fast + task.chunks[15:])
    rates = replace(machine(1e4), tiers={"memory": TierRates(0, 5e9, 2), "redis": TierRates(1e-3, 1e4, 4)})
    plan = plan_restore(mixed, rates)
    assert plan.tokens == 15 * 256
    assert "cut at token 3840" in plan.why


def test_layers_that_are_not_stored_are_recomputed_there_and_before() -> None:
    sizes = (0, 0, *[SEGMENT] * 28)
    task = session(6)
    task = replace(task, chunks=(*task.chunks[:3], StoredChunk(256, "redis", sizes), *task.chunks[4:]))
    plan = plan_restore(task, machine(1e9), Strategy.load)
    assert plan.staircase == (1024, 1024, *[0] * 28)
    refused = plan_restore(task, machine(1e9), may_recompute=False)
    assert (refused.tokens, refused.compute_s) == (768, 0.0)


def test_without_data_all_is_loaded_at_safe_rates() -> None:
    task = session()
    task = replace(task, chunks=tuple(replace(chunk, tier="memory") for chunk in task.chunks))
    for strategy in (Strategy.optimal, Strategy.load, Strategy.half, Strategy.paper):
        plan = plan_restore(task, Rates(None, {}), strategy)
        assert (plan.strategy, plan.tokens, plan.measured) == (Strategy.load, task.tokens, False)
        assert (plan.staircase, plan.forward_s) == ((0,) * 30, 0.0)
        assert "nothing was measured yet" in plan.why
    assert plan_restore(task, Rates(None, {}), Strategy.recompute).tokens == 0
    known = plan_restore(session(), Rates(COMPUTE, {}))
    assert not known.measured
    assert known.strategy == Strategy.optimal  # the default of redis is slow
    assert plan_restore(session(), machine()).measured


def test_where_recompute_is_refused_holes_cut_and_prefill_may_still_be_best() -> None:
    cut = plan_restore(lose(session(), 5), machine(1e9), may_recompute=False)
    assert (cut.strategy, cut.tokens, cut.recomputes) == (Strategy.load, 5 * 256, False)
    assert "recompute is refused here" in cut.why
    slow = plan_restore(session(), machine(1e6), may_recompute=False)
    assert slow.strategy == Strategy.recompute
    lost = plan_restore(lose(session(), 0), machine(), Strategy.load)
    assert (lost.strategy, lost.tokens) == (Strategy.recompute, 0)
    assert "its first chunk after what the device has is lost" in lost.why
    half = plan_restore(session(), machine(), Strategy.half, may_recompute=False)
    assert half.why == "half needs recompute, and recompute is refused here: load all"


# -- fixed strategies --


def test_half_is_half_of_what_is_not_on_the_device_in_every_layer() -> None:
    assert plan_restore(session(12), machine(), Strategy.half).staircase == (6 * 256,) * 30
    assert plan_restore(session(12, device=1024), machine(), Strategy.half).staircase == (8 * 256,) * 30


def test_a_pyramid_is_linear_with_the_share_as_its_mean() -> None:
    for share in (0.0, 0.2, 0.5, 0.7, 1.0):
        stairs = pyramid(1000, 30, share)
        assert sum(stairs) / 30 == pytest.approx(1000 * share)
        steps = [above - below for above, below in pairwise(stairs)]
        assert steps == pytest.approx([steps[0]] * 29)
        assert 0 <= stairs[-1] <= stairs[0] <= 1000


def test_paper_mode_balances_the_streams_by_a_pyramid() -> None:
    task = session(40)
    for bytes_per_s in (5e6, 18e6, 60e6):
        plan = plan_restore(task, machine(bytes_per_s), Strategy.paper)
        assert plan.strategy == Strategy.paper
        assert plan.compute_s == pytest.approx(plan.load_s, rel=0.05)
        share = paper_share(task, machine(bytes_per_s))
        wanted = pyramid(task.tokens, 30, share)
        assert max(abs(a - b) for a, b in zip(plan.staircase, wanted, strict=True)) <= 128
        assert plan.ttft_s >= plan_restore(task, machine(bytes_per_s)).ttft_s


def test_what_paper_mode_did_not_store_is_recomputed_when_the_link_is_faster_now() -> None:
    task = session(20)
    depths = [sum(end > (index + 0.5) * 256 for end in pyramid(5120, 30, 0.5)) for index in range(20)]
    chunks = tuple(StoredChunk(256, "redis", (0,) * depth + (SEGMENT,) * (30 - depth)) for depth in depths)
    task = replace(task, chunks=chunks)
    plan = plan_restore(task, machine(1e10), Strategy.paper)
    assert [sum(end >= (index + 1) * 256 for end in plan.staircase) for index in range(20)] == depths


# -- against the simulated streams --


@pytest.mark.parametrize("bytes_per_s", [2e6, 18e6, 60e6, 200e6])
@pytest.mark.parametrize("strategy", [Strategy.optimal, Strategy.paper, Strategy.half, Strategy.load])
@pytest.mark.parametrize("shape", ["equal", "first", "last"])
@pytest.mark.parametrize("device", [0, 1040])
def test_predicted_seconds_are_those_of_the_streams(
    bytes_per_s: float, strategy: Strategy, shape: str, device: int
) -> None:
    task, rates = session(24, shape=shape, device=device), machine(bytes_per_s)
    plan = plan_restore(task, rates, strategy)
    outcome = run_staircase(task, rates, plan.staircase, plan.tokens, workers=4)
    assert outcome.load_bytes == plan.load_bytes
    assert outcome.compute_s == pytest.approx(plan.compute_s)
    assert outcome.load_s == pytest.approx(plan.load_s, rel=0.03)
    assert outcome.staircase == plan.staircase


@pytest.mark.parametrize("chunks", [12, 40])
@pytest.mark.parametrize("bytes_per_s", [10e6, 18e6, 60e6])
@pytest.mark.parametrize("lost", [(), (3,), (7, 8)])
def test_streams_that_meet_by_themselves_are_no_slower_than_the_plan(
    chunks: int, bytes_per_s: float, lost: tuple[int, ...]
) -> None:
    task, rates = lose(session(chunks), *lost), machine(bytes_per_s)
    plan = plan_restore(task, rates)
    seconds = meet(task, rates, workers=4).seconds
    # Where they meet, a slice and the claims under way are still to end.
    edge_s = COMPUTE.layer_s(task.tokens - 512, 512) + 4 * (1 << 20) / bytes_per_s
    assert seconds <= 1.02 * max(plan.compute_s, plan.load_s) + plan.fill_s + edge_s
    if not lost:
        assert seconds >= 0.98 * max(plan.compute_s, plan.load_s)


# -- what is refused --


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: RestoreTask(0, 1, (), 0, 0),
            r"layers 0, page_size 1: expected 1 or more of each; take both",
        ),
        (
            lambda: RestoreTask(3, 16, (A,), 0, 0),
            r"chunks\[0\].tokens 10: expected one or more whole pages of 16",
        ),
        (
            lambda: RestoreTask(2, 1, (A,), 0, 0),
            r"chunks\[0\].segment_bytes has 3 layers: expected 2; give one",
        ),
        (
            lambda: RestoreTask(1, 1, (StoredChunk(1, "ssd", (-5,)),), 0, 0),
            r"chunks\[0\].segment_bytes has -5: expected 0 \(not stored\) or more",
        ),
        (
            lambda: tiny(A, device=11),
            r"on_device_tokens 11: expected whole pages of 1 tokens, at most the session's 10",
        ),
        (
            lambda: RestoreTask(30, 16, session(1).chunks, 8, 0),
            r"on_device_tokens 8: expected whole pages of 16",
        ),
        (lambda: tiny(A, new=-1), r"new_tokens -1: expected 0 \(no request follows\) or more"),
        (
            lambda: predict(tiny(A, B), ROUND, (0, 0), 20),
            r"staircase of 2 layers: expected 3, one R_l for each",
        ),
        (lambda: predict(tiny(A, B), ROUND, (0, 0, 0), 15), r"tokens 15: expected the end of a chunk after"),
        (
            lambda: predict(tiny(A, B), ROUND, (10, 20, 0), 20),
            r"staircase \(10, 20, 0\): expected R_0 >= R_1 >= ",
        ),
        (
            lambda: predict(tiny(A, B), ROUND, (20, 0, 0), 10),
            r"from at most 10 tokens down to at least the 0 on",
        ),
        (
            lambda: predict(tiny(A, B, device=10), ROUND, (10, 10, 0), 20),
            r"down to at least the 10 on the device",
        ),
        (
            lambda: predict(session(2), machine(), (8,) * 30, 512),
            r"expected whole pages of 16 tokens",
        ),
        (
            lambda: predict(tiny(A, StoredChunk(10, "ssd", (0, 1, 1))), ROUND, (10, 0, 0), 20),
            r"the first 1 layers of the chunk that ends at token 20 must be recomputed, .* at least 20 in",
        ),
        (
            lambda: plan_restore(tiny(A), ROUND, follow="start"),  # type: ignore[arg-type]
            r"follow 'start': expected 'end' \(the restore job\) or 'layers' \(the memory path\)",
        ),
        (
            lambda: lower_bound(tiny(A), Rates(None, {})),
            r"rates without compute: nothing bounds a plan; calibrate",
        ),
        (
            lambda: paper_share(tiny(A), Rates(None, {})),
            r"rates without compute: eq. 1 needs them; calibrate",
        ),
        (lambda: pyramid(10, 2, 1.5), r"share 1.5: expected 0 \(load all\) to 1 \(recompute all\)"),
    ],
)
def test_refusals_name_the_value_and_what_was_expected(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_session_of_no_chunks_needs_nothing() -> None:
    task = RestoreTask(30, 16, (), 0, 16)
    for strategy in Strategy:
        plan = plan_restore(task, machine(), strategy)
        assert (plan.load_bytes, plan.compute_s, plan.load_s) == (0, 0.0, 0.0)
        assert plan.ttft_s == plan.forward_s
    assert lower_bound(task, machine()) == pytest.approx(plan.ttft_s)

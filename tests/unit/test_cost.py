"""Rates, what they refuse, and rates fitted from samples."""

from __future__ import annotations

import random

import pytest

from sgl_krul.restore.cost import (
    ComputeRates,
    ComputeSample,
    ForwardSample,
    LandSample,
    LoadSample,
    Rates,
    TierRates,
    causal_pairs,
)
from sgl_krul.restore.rate_fit import CLAMP, average, fit_compute, fit_tier, land_s_per_byte, request_s

COMPUTE = ComputeRates(
    kv_s_per_token=1.2e-5, rest_s_per_token=7e-5, attention_s_per_pair=1.5e-9, slice_s=1e-3
)
LINK = TierRates(latency_s=2e-3, bytes_per_s=18e6, in_flight=4)


def slices(rates: ComputeRates, noise: float = 0.0, seed: int = 0) -> list[ComputeSample]:
    """What a calibration measures: 32 slices."""
    rng = random.Random(seed)
    found = []
    for first in (0, 512, 2048, 4096):
        for tokens in (64, 128, 256, 512):
            for kv_only in (False, True):
                exact = rates.kv_s(tokens) if kv_only else rates.layer_s(first, tokens)
                found.append(ComputeSample(first, tokens, kv_only, exact * (1 + noise * rng.random())))
    return found


def requests(rates: TierRates, noise: float = 0.0, seed: int = 0) -> list[LoadSample]:
    rng = random.Random(seed)
    return [
        LoadSample(
            "redis",
            size,
            (rates.latency_s + under_way * size / rates.bytes_per_s) * (1 + noise * rng.random()),
            under_way,
        )
        for size in (50_000, 200_000, 400_000, 1_000_000, 4_000_000)
        for under_way in range(1, rates.in_flight + 1)
    ]


def test_pairs_are_counted_as_causal_attention_does() -> None:
    for first, tokens in ((0, 1), (0, 5), (7, 3), (100, 0)):
        counted = sum(1 for query in range(first, first + tokens) for key in range(query + 1))
        assert causal_pairs(first, tokens) == counted


def test_a_layer_is_its_kv_and_all_the_rest() -> None:
    assert COMPUTE.kv_s(100) == pytest.approx(1e-3 + 100 * 1.2e-5)
    pairs = 100 * 1000 + 100 * 101 // 2
    assert COMPUTE.layer_s(1000, 100) == pytest.approx(COMPUTE.kv_s(100) + 100 * 7e-5 + pairs * 1.5e-9)


def test_blocks_add_up_to_one_long_slice_but_for_their_fixed_cost() -> None:
    whole = COMPUTE.layer_s(0, 1024)
    assert COMPUTE.layer_s(0, 512) + COMPUTE.layer_s(512, 512) == pytest.approx(whole + COMPUTE.slice_s)


def test_a_forward_has_one_fixed_cost_for_each_pass_of_prefill() -> None:
    assert COMPUTE.forward_s(0, 0) == 0
    assert COMPUTE.forward_s(10, 100) == COMPUTE.layer_s(10, 100)
    assert COMPUTE.forward_s(0, 8193) == pytest.approx(COMPUTE.layer_s(0, 8193) + COMPUTE.slice_s)


def test_tiers_that_were_not_measured_have_slow_defaults() -> None:
    rates = Rates(COMPUTE, {"ssd": LINK})
    assert rates.tier("ssd") is LINK
    assert rates.tier("memory").bytes_per_s > rates.tier("redis").bytes_per_s
    assert rates.tier("a tier nobody knows") == rates.tier("redis")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ComputeRates(-1, 1, 1, 1),
            r"compute.kv_s_per_token -1: expected seconds, 0 or more; measure",
        ),
        (lambda: ComputeRates(1, float("nan"), 1, 1), r"compute.rest_s_per_token nan: expected seconds"),
        (lambda: ComputeRates(0, 0, 1, 1), r"0 seconds a token: expected more than 0; calibrate again"),
        (lambda: TierRates(float("inf"), 1, 1), r"latency_s inf: expected seconds, 0 or more; measure"),
        (lambda: TierRates(0, 0, 1), r"bytes_per_s 0: expected more than 0; leave the tier out"),
        (lambda: TierRates(0, 1, 0), r"in_flight 0: expected 1 or more; give the number of loaders"),
        (lambda: Rates(None, {}, -2.0), r"land_s_per_byte -2: expected seconds"),
        (lambda: Rates(None, {}, 0.0, -1.0), r"request_s -1: expected seconds"),
        (lambda: Rates(None, {}, 0.0, 0.0, 0), r"request_bytes 0: expected 1 or more"),
    ],
)
def test_rates_that_are_none_are_refused_by_name(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


# -- fitted from samples --


def test_exact_samples_give_the_rates_back() -> None:
    fitted = fit_compute(slices(COMPUTE))
    assert fitted is not None
    for name in ("kv_s_per_token", "rest_s_per_token", "attention_s_per_pair", "slice_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(COMPUTE, name), rel=1e-3), name
    tier = fit_tier(requests(LINK))
    assert tier is not None
    assert tier.latency_s == pytest.approx(LINK.latency_s, rel=1e-3)
    assert tier.bytes_per_s == pytest.approx(LINK.bytes_per_s, rel=1e-3)
    assert tier.in_flight == 4


@pytest.mark.parametrize("seed", range(5))
def test_a_fifth_of_disturbed_samples_has_no_say(seed: int) -> None:
    rng = random.Random(seed)

    def disturbed(seconds: float) -> float:
        return seconds * 10 if rng.random() < 0.2 else seconds

    fitted = fit_compute(
        [
            ComputeSample(s.first, s.tokens, s.kv_only, disturbed(s.seconds))
            for s in slices(COMPUTE, 0.05, seed)
        ]
    )
    assert fitted is not None
    for first, tokens in ((0, 512), (3000, 256), (6000, 512)):
        assert fitted.layer_s(first, tokens) == pytest.approx(COMPUTE.layer_s(first, tokens), rel=0.1)
    assert fitted.kv_s(512) == pytest.approx(COMPUTE.kv_s(512), rel=0.12)
    tier = fit_tier(
        [LoadSample(s.tier, s.bytes, disturbed(s.seconds), s.in_flight) for s in requests(LINK, 0.05, seed)]
    )
    assert tier is not None
    assert tier.bytes_per_s == pytest.approx(LINK.bytes_per_s, rel=0.1)


def test_samples_that_cannot_tell_the_rates_apart_give_none() -> None:
    samples = slices(COMPUTE)
    assert fit_compute([]) is None
    assert fit_compute([s for s in samples if not s.kv_only]) is None
    assert fit_compute([s for s in samples if s.kv_only]) is None
    assert fit_compute([s for s in samples if s.first == 0]) is None
    assert fit_compute([s for s in samples if s.tokens == 512]) is None
    assert fit_tier(requests(LINK)[:2]) is None
    assert fit_tier([]) is None


def test_samples_without_time_or_size_count_as_none() -> None:
    assert fit_compute([ComputeSample(0, 512, False, 0.0)] * 40) is None
    assert fit_compute([ComputeSample(0, 0, False, 1.0)] * 40, COMPUTE) is COMPUTE
    assert fit_tier([LoadSample("ssd", 0, 1.0, 1)] * 10, LINK) is LINK


def test_requests_of_one_size_are_all_bandwidth() -> None:
    tier = fit_tier([LoadSample("ssd", 1_000_000, 0.1, 2)] * 5)
    assert tier is not None
    assert (tier.latency_s, tier.in_flight) == (0.0, 2)
    assert tier.bytes_per_s == pytest.approx(20e6)


def test_a_machine_that_became_slower_is_followed() -> None:
    slower = ComputeRates(2.4e-5, 1.4e-4, 3e-9, 2e-3)
    known = COMPUTE
    restore = [s for s in slices(slower) if s.tokens == 512 and not s.kv_only]
    for _ in range(15):
        refreshed = fit_compute(restore, known)
        assert refreshed is not None
        known = refreshed
    for sample in restore:
        assert known.layer_s(sample.first, sample.tokens) == pytest.approx(sample.seconds, rel=0.1)


def test_a_link_that_became_ten_times_slower_is_followed_within_some_restores() -> None:
    slower = TierRates(2e-3, 1.8e6, 4)
    known: TierRates | None = LINK
    for _ in range(12):
        known = fit_tier([s for s in requests(slower) if s.in_flight == 4], known)
    assert known is not None
    assert known.bytes_per_s == pytest.approx(1.8e6, rel=0.15)


def test_one_mad_observation_moves_a_rate_by_a_bounded_factor() -> None:
    mad = [ComputeSample(0, 512, False, 1e6)]
    known = fit_compute(mad, COMPUTE)
    assert known is not None
    assert known.layer_s(0, 512) <= COMPUTE.layer_s(0, 512) * CLAMP
    stalled = fit_tier([LoadSample("redis", 1_000_000, 3600.0, 4)], LINK)
    assert stalled is not None
    assert LINK.bytes_per_s / CLAMP <= stalled.bytes_per_s <= LINK.bytes_per_s


def test_one_number_is_averaged_and_bounded() -> None:
    assert average(None, None) is None
    assert average(None, 2.0) == 2.0
    assert average(2.0, None) == 2.0
    assert average(1.0, 2.0) == pytest.approx(1.3)
    assert average(1.0, 1e9) == pytest.approx(1 + 0.3 * (CLAMP - 1))
    assert average(0.0, 5.0) == pytest.approx(1.5)


def test_landing_and_what_requests_take_beside_their_layers_are_medians() -> None:
    assert land_s_per_byte([]) is None
    assert land_s_per_byte([LandSample(100, 1.0), LandSample(100, 2.0), LandSample(1, 900.0)]) == 0.02
    layers_s = 30 * COMPUTE.forward_s(1000, 16)
    samples = [ForwardSample(1000, 16, 30, layers_s + beside) for beside in (0.1, 0.2, 9.0)]
    assert request_s(samples, COMPUTE) == pytest.approx(0.2)
    assert request_s([ForwardSample(1000, 16, 30, layers_s / 2)], COMPUTE) == 0.0
    assert request_s([], COMPUTE) is None

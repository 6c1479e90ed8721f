"""Rates from what was measured: non-negative, robust, from a few dozen samples.

A slice takes `slice_s + tokens * kv` and, through a whole layer, `+ tokens * rest + pairs * attention`; a
request of a loader takes `latency + in_flight * bytes / bytes_per_s`, since those under way share the link.
Both are linear in the rates. Errors count relative to the measured time, so that short slices weigh as much
as long ones.

From nothing, the sum of absolute errors is made least: a minority of samples that were disturbed (another
process, a page fault) has no say. Known rates are refreshed instead: what they predict stands for the past
with the weight 1 - WEIGHT, the new samples with WEIGHT, and squares are made least. So a rate that new
samples say nothing about stays, and one that they do drifts to it exponentially. Before that, each sample is
bounded to CLAMP times what was expected, and to a factor of its batch's median.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TypeVar

import numpy as np

from sgl_krul.restore.cost import (
    ComputeRates,
    ComputeSample,
    Floats,
    ForwardSample,
    LandSample,
    LoadSample,
    TierRates,
    causal_pairs,
)

__all__ = ["CLAMP", "WEIGHT", "average", "fit_compute", "fit_tier", "land_s_per_byte", "request_s"]

_S = TypeVar("_S")

WEIGHT = 0.3  # of new samples
CLAMP = 4.0  # one observation counts as at most so many times faster or slower than expected
_SPREAD = 1.5  # of a batch, around its median
_MAX_SAMPLES = 512  # of one batch, evenly taken
_MIN_LOADS = 3
_LEAST_SLICES = {"kv_only": 2, "whole": 4}
_LEAST_S_PER_BYTE = 1e-13  # no link is faster; keeps 1 / it finite
_STEPS = 12  # of reweighting
_SMALL = 0.01  # relative errors below count alike

# What stands for the past of known rates: slices and requests of all sizes.
_PAST_SLICES = [
    ComputeSample(first, tokens, kv_only, 0.0)
    for first in (0, 1024, 4096, 16384)
    for tokens in (64, 256, 512)
    for kv_only in (False, True)
]
_PAST_BYTES = (1 << 16, 1 << 20, 1 << 24)


# -- compute --


def fit_compute(samples: Sequence[ComputeSample], known: ComputeRates | None = None) -> ComputeRates | None:
    """Rates from slices, or `known` ones refreshed by them.

    From nothing it takes at least 2 slices that stop at their layer and 4 whole ones, the whole ones of two
    sizes and after two different prefixes; None (or `known`) when there are not.
    """
    samples = _thinned([s for s in samples if s.seconds > 0 and s.tokens > 0 and s.first >= 0])
    if known is not None:
        if not samples:
            return known
        fitted = _refresh(_slices(samples), _seconds(samples), _slices(_PAST_SLICES), _rates_vector(known))
    elif _tells_apart(samples):
        fitted = _least_absolute(_slices(samples), _seconds(samples))
    else:
        return None
    if not fitted[0] + fitted[1] > 0:
        return known
    return ComputeRates(*(float(rate) for rate in fitted))


def _rates_vector(rates: ComputeRates) -> Floats:
    return np.array([rates.kv_s_per_token, rates.rest_s_per_token, rates.attention_s_per_pair, rates.slice_s])


def _slices(samples: Sequence[ComputeSample]) -> Floats:
    """How often each of the four rates is in a slice, float64 [S, 4]."""
    return np.array(
        [
            (s.tokens, 0, 0, 1) if s.kv_only else (s.tokens, s.tokens, causal_pairs(s.first, s.tokens), 1)
            for s in samples
        ],
        np.float64,
    )


def _tells_apart(samples: Sequence[ComputeSample]) -> bool:
    whole = [sample for sample in samples if not sample.kv_only]
    return (
        len(samples) - len(whole) >= _LEAST_SLICES["kv_only"]
        and len(whole) >= _LEAST_SLICES["whole"]
        and len({sample.tokens for sample in whole}) > 1
        and len({sample.first for sample in whole}) > 1
    )


# -- load --


def fit_tier(samples: Sequence[LoadSample], known: TierRates | None = None) -> TierRates | None:
    """Rates from requests to one tier, or `known` ones refreshed by them; None for fewer than 3 of them.

    Requests of one size can't tell latency from bandwidth: then all is bandwidth.
    """
    samples = _thinned([s for s in samples if s.seconds > 0 and s.bytes > 0 and s.in_flight > 0])
    if not samples or (known is None and len(samples) < _MIN_LOADS):
        return known
    in_flight = max(sample.in_flight for sample in samples)
    rows = np.array([(1, sample.in_flight * sample.bytes) for sample in samples], np.float64)
    if known is not None:
        past = np.array([(1, known.in_flight * size) for size in _PAST_BYTES], np.float64)
        rates = np.array([known.latency_s, 1 / known.bytes_per_s])
        latency, per_byte = _refresh(rows, _seconds(samples), past, rates)
    elif rows[:, 1].max() < 2 * rows[:, 1].min():
        latency, per_byte = 0.0, float(np.median(_seconds(samples) / rows[:, 1]))
    else:
        latency, per_byte = _least_absolute(rows, _seconds(samples))
    return TierRates(float(latency), 1 / max(float(per_byte), _LEAST_S_PER_BYTE), in_flight)


# -- one number --


def land_s_per_byte(samples: Sequence[LandSample]) -> float | None:
    """The median; None without samples."""
    paces = [sample.seconds / sample.bytes for sample in samples if sample.bytes > 0 and sample.seconds >= 0]
    return float(np.median(paces)) if paces else None


def request_s(samples: Sequence[ForwardSample], rates: ComputeRates) -> float | None:
    """The median of what requests took beside their layers; None without samples."""
    beside = [
        max(0.0, sample.seconds - sample.layers * rates.forward_s(sample.first, sample.tokens))
        for sample in samples
    ]
    return float(np.median(beside)) if beside else None


def average(known: float | None, new: float | None) -> float | None:
    """The exponential average of one number, `new` bounded to CLAMP times `known`."""
    if known is None or new is None:
        return known if new is None else new
    bounded = min(max(new, known / CLAMP), known * CLAMP) if known > 0 else new
    return known + WEIGHT * (bounded - known)


# -- linear algebra of a few unknowns --


def _least_absolute(rows: Floats, seconds: Floats) -> Floats:
    """Rates >= 0 with the least sum of |rows @ rates / seconds - 1|, by reweighted squares."""
    scaled = rows / seconds[:, None]
    weights = np.ones(len(rows))
    for _ in range(_STEPS):
        rates = _least_squares(scaled, np.ones(len(rows)), weights)
        weights = 1 / np.maximum(np.abs(scaled @ rates - 1), _SMALL)
    return rates


def _refresh(rows: Floats, seconds: Floats, past: Floats, known: Floats) -> Floats:
    """Known rates drawn to new samples: see the module's docstring."""
    expected = np.maximum(rows @ known, 1e-12)
    ratios = np.clip(seconds / expected, 1 / CLAMP, CLAMP)
    median = float(np.median(ratios))
    ratios = np.clip(ratios, median / _SPREAD, median * _SPREAD)
    was = np.maximum(past @ known, 1e-12)
    return _least_squares(
        np.concatenate([past / was[:, None], rows / expected[:, None]]),
        np.concatenate([np.ones(len(past)), ratios]),
        np.concatenate(
            [np.full(len(past), (1 - WEIGHT) / len(past)), np.full(len(rows), WEIGHT / len(rows))]
        ),
    )


def _least_squares(rows: Floats, targets: Floats, weights: Floats) -> Floats:
    """Rates >= 0 with the least weighted squares, [K <= 4]: the best solution with some of them at 0."""
    root = np.sqrt(weights)
    scale = np.maximum(np.abs(rows).max(0), 1e-300)
    matrix, goal = rows / scale * root[:, None], targets * root
    unknowns = range(rows.shape[1])
    best, least = np.zeros(rows.shape[1]), float(goal @ goal)
    for size in range(1, rows.shape[1] + 1):
        for chosen in combinations(unknowns, size):
            columns = list(chosen)
            solution = np.linalg.lstsq(matrix[:, columns], goal, rcond=None)[0]
            if (solution < 0).any():
                continue
            error = float(((matrix[:, columns] @ solution - goal) ** 2).sum())
            if error < least:
                least = error
                best = np.zeros(rows.shape[1])
                best[columns] = solution
    rates: Floats = best / scale
    return rates


def _seconds(samples: Sequence[ComputeSample] | Sequence[LoadSample]) -> Floats:
    return np.array([sample.seconds for sample in samples], np.float64)


def _thinned(samples: Sequence[_S]) -> Sequence[_S]:
    step = -(-len(samples) // _MAX_SAMPLES)
    return samples[:: max(step, 1)]

"""What the quality benchmark makes of two runs of a model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from benchmarks.quality_metrics import (
    Outcome,
    compare,
    interval,
    log_softmax,
    make_row,
    needle_recall,
    outlying,
    ppl_ratio,
    ranked,
    spearman,
)


def logp(*rows: list[float]) -> Any:
    return np.log(np.array(rows))


def outcome(kl: float, positions: int = 10, **fields: Any) -> Outcome:
    values: dict[str, Any] = {
        "method": "int4",
        "prompt": "a",
        "domain": "prose",
        "positions": positions,
        "kl": kl,
        "agreed": positions,
        "nll_exact": 0.0,
        "nll_coded": 0.0,
        "found": {},
        "exact_found": {},
        "stored_bytes": 30,
        "raw_bytes": 100,
    }
    return Outcome(**{**values, **fields})


def test_log_softmax_sums_to_one_and_stands_large_logits() -> None:
    found = log_softmax(np.array([[1000.0, 999.0, -1000.0]], np.float32))
    assert np.exp(found).sum() == pytest.approx(1, abs=1e-12)
    assert found[0, 0] - found[0, 1] == pytest.approx(1)
    assert found[0, 2] == pytest.approx(-2000, abs=1)


def test_equal_runs_have_no_divergence() -> None:
    exact = logp([0.7, 0.2, 0.1], [0.1, 0.1, 0.8])
    found = compare(exact, exact.copy(), [0, 1])
    assert found["kl"] == 0
    assert found["agreed"] == 2
    assert found["nll_exact"] == found["nll_coded"] == pytest.approx(-math.log(0.7) - math.log(0.1))


def test_divergence_is_of_the_exact_run_to_the_coded_one() -> None:
    exact, coded = logp([0.5, 0.5]), logp([0.25, 0.75])
    forward = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert compare(exact, coded, [0])["kl"] == pytest.approx(forward)
    assert compare(coded, exact, [0])["kl"] != pytest.approx(forward)


def test_agreement_is_with_the_exact_run_and_found_is_with_the_truth() -> None:
    exact = logp([0.6, 0.4], [0.6, 0.4])
    coded = logp([0.4, 0.6], [0.9, 0.1])
    found = compare(exact, coded, [1, 0])
    assert found["agreed"] == 1
    assert found["found"]
    assert not found["exact_found"]
    assert not compare(exact, coded, [1, 1])["found"]  # one wrong token is enough


def test_the_interval_is_of_whole_prompts() -> None:
    assert interval([5.0], [10]) == (0.5, 0.5)
    low, high = interval([1.0, 2.0, 3.0, 4.0] * 6, [10] * 24)
    assert 0.1 < low < 0.25 < high < 0.4
    # A prompt of many positions weighs more: 20 nats over 200 and 0 over 10 each.
    low, high = interval([20.0] + [0.0] * 9, [200] + [10] * 9)
    assert low == 0
    assert high == pytest.approx(0.1, rel=0.2)
    assert interval([1.0, 2.0], [10, 10]) == interval([1.0, 2.0], [10, 10])  # no draw is random


def test_the_interval_covers_the_true_mean_about_95_times_in_100() -> None:
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(200):
        low, high = interval(rng.exponential(1.0, 40).tolist(), [1] * 40)
        covered += low <= 1.0 <= high
    assert 170 <= covered <= 199  # of a skewed distribution, a bootstrap covers a little less


def test_perplexity_ratio_is_over_all_positions() -> None:
    runs = [outcome(0, 30, nll_exact=30.0, nll_coded=33.0), outcome(0, 10, nll_exact=5.0, nll_coded=6.0)]
    assert ppl_ratio(runs) == pytest.approx(math.exp(4.0 / 40))


def test_needle_recall_is_by_place_beside_the_exact_models() -> None:
    runs = [
        outcome(0, found={"start": True, "end": False}, exact_found={"start": True, "end": True}),
        outcome(0, found={"start": False, "end": False}, exact_found={"start": True, "end": False}),
        outcome(0),
    ]
    assert needle_recall(runs, "start") == 0.5
    assert needle_recall(runs, "end") == 0
    assert needle_recall(runs, "end", exact=True) == 0.5
    assert needle_recall(runs, "middle") is None


def test_outlying_prompts_are_above_the_bound() -> None:
    assert outlying([outcome(0.1), outcome(0.2), outcome(0.05)], 0.01) == 1


def test_rank_correlation_counts_ranks_and_shares_them_among_equals() -> None:
    assert ranked([3.0, 1.0, 2.0, 2.0]).tolist() == [3.0, 0.0, 1.5, 1.5]
    assert spearman([1.0, 2.0, 3.0], [10.0, 100.0, 101.0]) == pytest.approx(1)
    assert spearman([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1)
    assert math.isnan(spearman([1.0, 1.0], [1.0, 2.0]))


def test_a_row_has_sums_over_sums() -> None:
    runs = [
        outcome(0.1, 10, agreed=9, loss=0.002, shared=0.1),
        outcome(0.5, 30, agreed=30, stored_bytes=70, raw_bytes=100, loss=0.004, shared=0.3),
    ]
    needles = [outcome(9.0, found={"start": True}, exact_found={"start": True})]
    row = make_row(runs, needles, places=("start", "middle"), bound=0.012)
    assert row["kl"] == pytest.approx(0.6 / 40)
    assert row["kl_lo"] == pytest.approx(0.01)
    assert row["kl_hi"] == pytest.approx(0.5 / 30)
    assert row["top1"] == pytest.approx(39 / 40)
    assert row["bytes_ratio"] == pytest.approx(0.5)
    assert (row["needle_start"], row["needle_middle"]) == (1.0, None)
    assert row["loss"] == pytest.approx(0.003)
    assert row["r_l"] == pytest.approx(0.2)
    assert (row["prompts"], row["positions"], row["prompts_over_bound"]) == (2, 40, 1)
    assert row["worst_kl"] == pytest.approx(0.5 / 30)

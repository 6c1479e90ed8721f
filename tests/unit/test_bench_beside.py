"""The pure parts of benchmarks/bench_beside.py: percentiles, gaps, slices of a timeline, rows, goals."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.beside_report import (
    DEAD,
    SLOWER,
    STEADY,
    Beside,
    Slices,
    gaps_within,
    goals,
    itl_report,
    link_row,
    percentile,
    read_slices,
    show,
)


def compute(start: float, seconds: float, tokens: int = 512, layer: int = 1) -> list[Any]:
    return ["compute", start, start + seconds, 0, tokens, layer, 1, 0, ""]


def load(start: float, seconds: float) -> list[Any]:
    return ["load", start, start + seconds, 512, 256, 0, 4, 1000, "ssd"]


def timeline(*spans: list[Any], idle_load: float = 0.25) -> dict[str, Any]:
    return {"spans": list(spans), "idle": {"compute": 0.1, "load": idle_load}}


def test_a_percentile_is_one_of_the_values() -> None:
    values = list(range(100, 0, -1))
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1)) == (50, 99, 100)
    assert percentile([7.0], 0.01) == 7.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_gaps_that_overlap_the_restore_count() -> None:
    arrivals = [0.0, 1.0, 3.0, 6.0, 10.0]
    assert gaps_within(arrivals, 0.0, float("inf")) == [1.0, 2.0, 3.0, 4.0]
    assert gaps_within(arrivals, 1.5, 2.5) == [2.0]
    assert gaps_within(arrivals, 3.0, 6.5) == [3.0, 4.0]
    assert gaps_within(arrivals, 11.0, 12.0) == []


def test_slices_of_a_timeline() -> None:
    found = read_slices(
        timeline(
            compute(0.0, 0.004, layer=0),  # K and V alone: no full slice
            compute(0.0041, 0.020),
            load(0.0, 0.08),
            compute(0.0700, 0.022),
            compute(0.1300, 0.010, tokens=256),
            compute(0.2000, 0.024),
        )
    )
    assert found.full_s == pytest.approx((0.020, 0.022, 0.024))
    assert [count for count, _ in found.rounds] == [2, 1, 1, 1]
    assert [seconds for _, seconds in found.rounds] == pytest.approx([0.024, 0.022, 0.010, 0.024])
    assert (found.tokens, found.both) == (512, 0.75)


@pytest.mark.parametrize("spans", [[compute(0, 1)], [load(0, 1)], []])
def test_both_streams_must_have_worked(spans: list[list[Any]]) -> None:
    with pytest.raises(ValueError, match="both streams"):
        read_slices(timeline(*spans))


def beside(gap: float, slice_s: float) -> Beside:
    return Beside((gap,) * 100, 2.0, Slices((slice_s,) * 10, ((1, slice_s),) * 10, 512, 0.9))


def test_the_rise_is_counted_in_slices() -> None:
    found = itl_report([Beside((0.040,) * 100), beside(0.058, 0.020), Beside((0.040,) * 100)])
    assert (found["alone_s"]["p99"], found["alone_s"]["gaps"]) == (0.040, 200)
    assert (found["beside_s"]["p99"], found["beside_s"]["gaps"]) == (0.058, 100)
    assert found["rise_s"] == {"p50": 0.018, "p99": 0.018}
    assert found["rise_slices"] == {"p50": 0.9, "p99": 0.9}
    assert found["round_s"] == {"p50": 0.020, "p99": 0.020, "slices_mean": 1, "slices_most": 1}
    assert (found["restore_s"], found["load_busy"], found["rounds"]) == (2.0, 0.9, 1)


def test_a_steady_link_counts_by_the_median_and_a_change_by_the_slowest() -> None:
    steady = link_row(1000, 10e6, STEADY, [2.0, 2.0, 9.0], [2.0, 2.2, 9.0], [10, 20, 30])
    assert steady == {
        "tokens": 1000,
        "link_MBps": 10.0,
        "link": "steady",
        "recompute_s": 2.0,
        "restore_s": 2.2,
        "over_recompute": 1.1,
        "bound_s": 2.25,
        "met": True,
        "spread": [2.0, 9.0],
        "bytes": 20,
        "repetitions": 3,
    }
    for link, slowest, met in ((SLOWER, 5.0, True), (DEAD, 5.01, False)):
        row = link_row(1000, 10e6, link, [2.0], [1.0, slowest], [1, 1])
        assert (row["restore_s"], row["bound_s"], row["met"]) == (slowest, 5.0, met)


def test_goals_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    itl = itl_report([Beside((0.040,) * 100), beside(0.070, 0.020)])
    links = [
        link_row(1000, 10e6, link, [2.0], [seconds], [1])
        for link, seconds in ((STEADY, 2.3), (SLOWER, 2.9), (DEAD, 3.1))
    ]
    assert {goal.name: (goal.value, goal.bound, goal.met) for goal in goals(itl, links)} == {
        "inter-token time beside a restore, rise at p99, slices": (1.5, 1.0, False),
        "restore, 1000 tokens, 10 MB/s steady, s": (2.3, 2.25, False),
        "restore, 1000 tokens, 10 MB/s 10x slower, s": (2.9, 5.0, True),
        "restore, 1000 tokens, 10 MB/s dead, s": (3.1, 5.0, True),
    }
    show(itl, links)
    shown = capsys.readouterr().out
    assert "inter-token, beside" in shown
    assert shown.count("MISSED") == 2

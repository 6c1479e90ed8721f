"""The pure parts of benchmarks/bench_restore.py: the balanced link, medians, speedups, goals, the chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_restore import METHODS, later_points
from benchmarks.restore_report import Run, balanced_speed, chart, goals, make_row, show, speedups
from benchmarks.restore_server import Session, read_timeline

STORED = 46_000_000


def row(method: str, *times: float, tokens: int = 1000, link: float = 18e6, **fields: Any) -> dict[str, Any]:
    balanced = fields.pop("balanced", True)
    runs = [Run(time, **fields) for time in times]
    return make_row(tokens, link, method, runs, balanced=balanced, stored_bytes=STORED)


def point(ours: float, load: float, recompute: float, **fields: Any) -> list[dict[str, Any]]:
    return [
        row("recompute-all", recompute, **fields),
        row("load-all", load, **fields),
        row("ours", ours, **fields),
    ]


def test_the_balanced_link_brings_the_bytes_while_they_are_computed() -> None:
    assert balanced_speed(STORED, 2.5, 0.2) == pytest.approx(20e6)
    assert balanced_speed(STORED, 2.5, 0.2, latency_s=0.3) == pytest.approx(23e6)
    with pytest.raises(ValueError, match="no link is so fast"):
        balanced_speed(STORED, 0.2, 0.2)


def test_a_session_knows_its_balanced_link_by_its_medians() -> None:
    session = Session(1000, [], STORED, cold_s=[2.501, 2.501, 9.0], warm_s=[0.2, 0.1, 0.9])
    assert session.balanced_bytes_s == pytest.approx(20e6)


def test_a_row_has_medians_and_the_spread() -> None:
    runs = [
        Run(1.0, 100, 0.1, 500.0, 0.8),
        Run(3.0, 300, 0.0, 400.0, 1.0),
        Run(2.0, 200, 0.3, 600.0, 1.0),
    ]
    assert make_row(1000, 5e6, "ours", runs, balanced=False, stored_bytes=STORED) == {
        "tokens": 1000,
        "link_MBps": 5.0,
        "balanced": False,
        "method": "ours",
        "ttft_s": 2.0,
        "bytes": 200,
        "bubble": 0.1,
        "predicted_s": 1.0,
        "over_prediction": 2.0,
        "recomputed_tokens": 500.0,
        "stored_bytes": STORED,
        "repetitions": 3,
        "spread": [1.0, 3.0],
    }


def test_without_a_prediction_there_is_none() -> None:
    found = row("half", 1.0)
    assert (found["predicted_s"], found["over_prediction"]) == (None, None)


def test_the_speedup_is_over_the_better_of_both_and_at_the_balanced_link() -> None:
    rows = [
        *point(1.0, 1.9, 2.0),
        *point(2.0, 4.4, 4.2, tokens=3000),
        *point(1.0, 9.0, 9.0, link=2e6, balanced=False),
        row("paper_stored", 0.1),
        row("ours", 0.1, link=17e6),  # nothing to compare with
    ]
    assert speedups(rows) == {1000: 1.9, 3000: 2.1}


def test_goals() -> None:
    rows = [
        *point(1.0, 1.7, 2.0, bubble=0.05, predicted_s=0.9),
        *point(2.3, 9.0, 2.0, link=2e6, balanced=False, predicted_s=2.0),
    ]
    found = {goal.name: (goal.value, goal.bound, goal.met) for goal in goals(rows)}
    assert found == {
        "speedup at the balanced link, 1000 tokens": (1.7, 1.8, False),
        "bubble at the balanced link, 1000 tokens": (0.05, 0.08, True),
        "TTFT at 18 MB/s, 1000 tokens, s": (1.0, 1.92, True),
        "TTFT at 2 MB/s, 1000 tokens, s": (2.3, 2.25, False),
        "TTFT over predicted, median": (pytest.approx((1 / 0.9 + 1.15) / 2, abs=1e-4), 1.15, True),
    }


def test_what_is_measured() -> None:
    sessions = [Session(tokens, [], tokens * 46_080, [tokens / 400], [0.2]) for tokens in (1000, 3000, 6000)]
    points = later_points(sessions, quick=False)
    assert [(p.balanced, p.sizes) for p in points[:3]] == [(True, (1000,)), (True, (3000,)), (True, (6000,))]
    assert [(p.link_bytes_s / 1e6, p.sizes) for p in points[3:]] == [
        (50, (1000, 3000)),
        (20, (1000, 3000)),
        (10, (1000, 3000)),
        (5, (1000,)),
        (2, (1000,)),
    ]
    assert [(p.balanced, p.sizes) for p in later_points(sessions[:1], quick=True)] == [
        (True, (1000,)),
        (False, (1000,)),
    ]


def span(stream: str, size: int) -> list[Any]:
    return [stream, 0.0, 1.0, 0, 256, 0, 30, size, ""]


def test_a_run_is_read_from_its_timeline() -> None:
    answer = {
        "plan": {"ttft_s": 1.5},
        "timeline": {
            "spans": [span("load", 100), span("compute", 0), span("load", 20)],
            "bubble": 0.04,
            "staircase": [992, 512, 0, 0],
        },
    }
    assert read_timeline(answer, 1.6, predicted=True) == Run(1.6, 120, 0.04, 376.0, 1.5)
    assert read_timeline(answer, 1.6, predicted=False).predicted_s is None
    with pytest.raises(RuntimeError, match="no timeline"):
        read_timeline(None, 1.6, predicted=True)


def test_tables_and_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row(method, 1.0, 1.2, link=link, tokens=tokens, balanced=link == 18e6, predicted_s=1.0)
        for link in (2e6, 18e6)
        for tokens in (1000, 3000)
        for method in METHODS
    ]
    show(rows)
    shown = capsys.readouterr().out
    assert "18*" in shown
    assert "speedup at the balanced link, 3000 tokens" in shown
    assert "MISSED" in shown
    chart(rows, tmp_path / "results" / "restore.png", "title")
    assert (tmp_path / "results" / "restore.png").stat().st_size > 10_000

"""Metrics: what a Prometheus registry shows after each call, also across processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from sgl_krul.metrics import MISS_REASONS, Metrics, MetricsSink, NoMetrics
from sgl_krul.service import Counters

PROJECT = Path(__file__).parents[2]
RANK = {"model_name": "tiny", "tp_rank": "0"}

# What a scheduler process does: environment first, then the import.
WRITER = """
import sys
from sgl_krul.metrics import Metrics

rank, fill = sys.argv[1], int(sys.argv[2])
metrics = Metrics({"model_name": "tiny", "tp_rank": rank})
metrics.set_tier("redis", used_bytes=fill, capacity_bytes=100, sessions=1, breaker="open")
metrics.set_sessions({"paused": fill})
metrics.count({"pauses": fill})
metrics.restored("redis", 0.3, 500, 20)
metrics.miss("corrupt")
metrics.hit()
"""


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    return Metrics(RANK, registry)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {**RANK, **labels})


def test_importing_leaves_prometheus_client_alone() -> None:
    """SGLang sets PROMETHEUS_MULTIPROC_DIR later than plugins are imported."""
    code = "import sys, sgl_krul.metrics; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT).returncode == 0


def test_tier(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.set_tier("redis", used_bytes=70, capacity_bytes=100, sessions=3, breaker="closed")
    metrics.set_tier("memory", used_bytes=5, capacity_bytes=10, sessions=1, breaker=None)
    assert value(registry, "krul_tier_bytes", tier="redis") == 70
    assert value(registry, "krul_tier_capacity_bytes", tier="redis") == 100
    assert value(registry, "krul_tier_sessions", tier="redis") == 3
    assert value(registry, "krul_tier_bytes", tier="memory") == 5
    assert value(registry, "krul_breaker_state", tier="memory") is None
    # They begin at zero once the tier is known: the first failure has a rate.
    assert value(registry, "krul_put_failures_total", tier="redis") == 0
    assert value(registry, "krul_bytes_written_total", tier="memory") == 0


@pytest.mark.parametrize(("breaker", "number"), [("closed", 0), ("half-open", 1), ("open", 2)])
def test_breaker(registry: CollectorRegistry, metrics: Metrics, breaker: str, number: int) -> None:
    metrics.set_tier("redis", used_bytes=0, capacity_bytes=1, sessions=0, breaker=breaker)
    assert value(registry, "krul_breaker_state", tier="redis") == number


def test_an_unknown_breaker_state_changes_nothing(registry: CollectorRegistry, metrics: Metrics) -> None:
    with pytest.raises(ValueError, match="'ajar': expected one of closed, half-open, open, or None"):
        metrics.set_tier("redis", used_bytes=1, capacity_bytes=1, sessions=1, breaker="ajar")
    assert value(registry, "krul_tier_bytes", tier="redis") is None


def test_states_that_vanish_become_zero(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.set_sessions({"active": 4, "paused": 2})
    metrics.set_sessions({"paused": 5})
    assert value(registry, "krul_sessions", state="active") == 0
    assert value(registry, "krul_sessions", state="paused") == 5
    metrics.set_sessions({"active": 1})
    assert value(registry, "krul_sessions", state="active") == 1
    assert value(registry, "krul_sessions", state="paused") == 0


def test_totals_grow_by_the_difference(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.count({"pauses": 0, "evictions": 3})
    assert value(registry, "krul_pauses_total") == 0
    metrics.count({"pauses": 2, "evictions": 3})
    metrics.count({"pauses": 7, "evictions": 4})
    assert value(registry, "krul_pauses_total") == 7
    assert value(registry, "krul_evictions_total") == 4


def test_a_total_that_fell_counts_from_zero(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.count({"pauses": 7})
    metrics.count({"pauses": 2})
    metrics.count({"pauses": 3})
    assert value(registry, "krul_pauses_total") == 10


def test_totals_that_have_a_method_are_not_counted_twice(
    registry: CollectorRegistry, metrics: Metrics
) -> None:
    metrics.restored("ssd", 0.1, 30, 0)
    metrics.count({"restored_tokens": 30, "hits": 1})
    assert value(registry, "krul_restored_tokens_total") == 30
    assert value(registry, "krul_hits_total") == 0


def test_every_counter_of_the_service_is_taken(registry: CollectorRegistry, metrics: Metrics) -> None:
    names = asdict(Counters())
    metrics.count(names)
    for name in names:
        assert value(registry, f"krul_{name}_total") == 0, name


@pytest.mark.parametrize("reason", sorted(MISS_REASONS))
def test_misses_begin_at_zero(registry: CollectorRegistry, metrics: Metrics, reason: str) -> None:
    assert value(registry, "krul_misses_total", reason=reason) == 0
    metrics.miss(reason)
    assert value(registry, "krul_misses_total", reason=reason) == 1


def test_other_reasons_make_no_series(registry: CollectorRegistry, metrics: Metrics) -> None:
    before = len(generate_latest(registry).splitlines())
    for number in range(100):
        metrics.miss(f"chunk {number} has 17 bytes")
    assert value(registry, "krul_misses_total", reason="other") == 100
    assert len(generate_latest(registry).splitlines()) == before


def test_restores(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.restored("ssd", 0.3, 2_900, 100)
    metrics.restored("redis", 3.0, 10, 0)
    metrics.hit()
    assert value(registry, "krul_restore_seconds_bucket", tier="ssd", le="0.25") == 0
    assert value(registry, "krul_restore_seconds_bucket", tier="ssd", le="0.5") == 1
    assert value(registry, "krul_restore_seconds_sum", tier="redis") == 3.0
    assert value(registry, "krul_restored_tokens_total") == 2_910
    assert value(registry, "krul_recomputed_tokens_total") == 100
    assert value(registry, "krul_hits_total") == 1


def test_buckets_reach_from_5_ms_to_a_minute(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.restored("memory", 0.004, 1, 0)
    metrics.restored("memory", 59.0, 1, 0)
    assert value(registry, "krul_restore_seconds_bucket", tier="memory", le="0.005") == 1
    assert value(registry, "krul_restore_seconds_bucket", tier="memory", le="30.0") == 1
    assert value(registry, "krul_restore_seconds_bucket", tier="memory", le="60.0") == 2


def test_pauses(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.paused("ssd", 0.7, 1_000)
    metrics.paused("ssd", 0.1, 24)
    metrics.put_failed("redis")
    assert value(registry, "krul_pause_seconds_count", tier="ssd") == 2
    assert value(registry, "krul_bytes_written_total", tier="ssd") == 1_024
    assert value(registry, "krul_put_failures_total", tier="redis") == 1


def test_without_labels(registry: CollectorRegistry) -> None:
    metrics = Metrics(registry=registry)
    use(metrics)
    assert registry.get_sample_value("krul_hits_total") == 1
    assert registry.get_sample_value("krul_pauses_total") == 1
    assert registry.get_sample_value("krul_tier_bytes", {"tier": "ssd"}) == 1


def test_labels_that_are_not_text_are_shown_as_text(registry: CollectorRegistry) -> None:
    """SGLang's ranks are numbers."""
    labels: dict[str, object] = {"model_name": "tiny", "tp_rank": 0}
    Metrics(labels, registry).hit()  # type: ignore[arg-type]
    assert value(registry, "krul_hits_total") == 1


@pytest.mark.parametrize("label", ["tier", "state", "reason", "outcome", "le"])
def test_labels_of_the_operator_do_not_shadow_ours(registry: CollectorRegistry, label: str) -> None:
    with pytest.raises(ValueError, match=f"metric label '{label}'.*extra-metric-labels"):
        Metrics({label: "x"}, registry)
    assert generate_latest(registry) == b""


def test_rows_of_estimates(registry: CollectorRegistry, metrics: Metrics) -> None:
    assert value(registry, "krul_estimator_rows_total", outcome="dropped") == 0
    metrics.estimated("seen", 30)
    metrics.estimated("dropped", 2)
    metrics.estimated("seen", 4)
    assert value(registry, "krul_estimator_rows_total", outcome="seen") == 34
    assert value(registry, "krul_estimator_rows_total", outcome="dropped") == 2
    with pytest.raises(ValueError, match="outcome 'lost': expected one of seen, dropped"):
        metrics.estimated("lost", 1)


def test_every_help_text_names_its_unit(registry: CollectorRegistry, metrics: Metrics) -> None:
    use(metrics)
    metrics.count(asdict(Counters()) | {"something_new": 1})
    texts = {family.name: family.documentation for family in registry.collect()}
    assert texts["krul_something_new"] == "Something new (count)."
    for name, text in texts.items():
        assert text.endswith(")."), f"{name}: {text}"


def test_a_server_without_metrics_takes_the_same_calls() -> None:
    use(NoMetrics())


def test_other_processes_are_seen(tmp_path: Path) -> None:
    """As on a server: scheduler processes write files, the front end reads them."""
    write(tmp_path, rank="0", fill=3)
    write(tmp_path, rank="1", fill=40)
    seen = collect(tmp_path)
    for rank, fill in (("0", 3), ("1", 40)):
        labels = {"model_name": "tiny", "tp_rank": rank}
        assert seen("krul_tier_bytes", tier="redis", **labels) == fill
        assert seen("krul_breaker_state", tier="redis", **labels) == 2
        assert seen("krul_sessions", state="paused", **labels) == fill
        assert seen("krul_pauses_total", **labels) == fill
        assert seen("krul_misses_total", reason="corrupt", **labels) == 1
        assert seen("krul_misses_total", reason="stale", **labels) == 0
        assert seen("krul_restore_seconds_bucket", tier="redis", le="0.5", **labels) == 1
        assert seen("krul_restored_tokens_total", **labels) == 500


def test_of_a_process_and_the_one_before_it_gauges_show_the_living(tmp_path: Path) -> None:
    """A directory that the operator names outlives the server; SGLang doesn't empty it."""
    write(tmp_path, rank="0", fill=50)
    write(tmp_path, rank="0", fill=3)
    seen = collect(tmp_path)
    assert seen("krul_tier_bytes", tier="redis", **RANK) == 3
    assert seen("krul_sessions", state="paused", **RANK) == 3
    assert seen("krul_pauses_total", **RANK) == 53


def collect(folder: Path) -> Callable[..., float | None]:
    """What the front end shows of the files in `folder`, by name and labels."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
    }
    return lambda name, **labels: samples.get((name, frozenset(labels.items())))


def write(folder: Path, *, rank: str, fill: int) -> None:
    subprocess.run(
        [sys.executable, "-c", WRITER, rank, str(fill)],
        cwd=PROJECT,
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
        check=True,
    )


def use(sink: MetricsSink) -> None:
    """Every method once."""
    sink.set_tier("ssd", used_bytes=1, capacity_bytes=2, sessions=1, breaker="closed")
    sink.set_sessions({"paused": 1})
    sink.count({"pauses": 1})
    sink.hit()
    sink.miss("missing")
    sink.put_failed("ssd")
    sink.restored("ssd", 0.1, 1, 1)
    sink.paused("ssd", 0.1, 1)
    sink.estimated("seen", 1)

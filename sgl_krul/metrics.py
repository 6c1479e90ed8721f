"""What one scheduler process tells Prometheus: the metrics `krul_*`, beside SGLang's own on /metrics.

While prometheus_client is imported it chooses whether values live in the process or in files of
PROMETHEUS_MULTIPROC_DIR, from which SGLang's front end answers /metrics. Plugins are imported before SGLang
sets that variable. So nothing here imports prometheus_client before metrics are made: SGLang's own would be
lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["MISS_REASONS", "Metrics", "MetricsSink", "NoMetrics"]

MISS_REASONS = frozenset(
    {
        "missing",
        "corrupt",
        "unavailable",
        "deadline",
        "no_room",
        "stale",
        "partial",
        "coded",
        "cancelled",
        "recompute",
        "other",
    }
)
_BREAKER_STATES = {"closed": 0, "half-open": 1, "open": 2}
_OWN_LABELS = frozenset({"tier", "state", "reason", "outcome", "le"})
_ROW_OUTCOMES = ("seen", "dropped")
_NO_LABELS: Mapping[str, str] = MappingProxyType({})

# A restore from memory takes milliseconds; the longest hold that anybody configures, about a minute.
_SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

# SGLang never removes the file of a process that died, so "livesum" would count dead ones for ever. Labels
# name the rank: each series has one living writer, and what that one wrote is the newest.
_GAUGE_MODE: Final = "mostrecent"

# Counted by methods of their own, with more detail than a total has.
_COUNTED_ELSEWHERE = frozenset(
    {"bytes_written", "hits", "misses", "put_failures", "recomputed_tokens", "restored_tokens"}
)
_HELP = {
    "corrupt_chunks": "Chunks that failed their checks and were recomputed (chunks).",
    "corrupt_manifests": "Manifests that failed their checks; their sessions are gone (manifests).",
    "demotions": "Sessions moved to a slower tier in the background (sessions).",
    "demotions_failed": "Such moves that failed; the sessions stay where they were (sessions).",
    "evictions": "Pages that left the memory tier to make room for others (pages).",
    "expired": "Sessions deleted because nobody used them for session.ttl_s (sessions).",
    "duplicated_tokens": "Tokens restored as lossy that memory has exactly too (tokens).",
    "holes": "Restores that were cut short; the rest was recomputed (restores).",
    "lossy_resumes": "Restores that were not exact: into a session's own cache namespace (restores).",
    "missing_chunks": "Chunks that were gone when they were wanted, and recomputed (chunks).",
    "orphans_removed": "Chunks without a manifest that a sweep deleted (chunks).",
    "pauses": "Pauses that succeeded (pauses).",
    "pauses_failed": "Pauses that failed; their sessions went on as they were (pauses).",
    "resumes": "Times a session was brought back, in full or in part (resumes).",
}


class MetricsSink(Protocol):
    """Where the service reports to. Amounts are of this process; `tier` is a tier's name.

    `count` and `set_sessions` remember the last call: one thread calls them. The others take any thread.
    """

    def set_tier(
        self, tier: str, *, used_bytes: int, capacity_bytes: int, sessions: int, breaker: str | None
    ) -> None:
        """What a tier holds now. `breaker`: closed, half-open or open; None where the tier has none.

        Raises:
            ValueError: another text as `breaker`; nothing was changed.
        """

    def set_sessions(self, counts: Mapping[str, int]) -> None:
        """Sessions by state, now. A state that is left out has none."""

    def count(self, counters: Mapping[str, int]) -> None:
        """Totals since the start, by name. One that fell started anew and counts from zero."""

    def hit(self) -> None:
        """A session was brought back in full."""

    def miss(self, reason: str) -> None:
        """A session, or its tail, must be recomputed. A `reason` not in MISS_REASONS counts as "other"."""

    def put_failed(self, tier: str) -> None:
        """A tier did not confirm an object."""

    def restored(self, tier: str, seconds: float, tokens: int, recompute_tokens: int) -> None:
        """A restore from `tier` ended: it gave `tokens`, and left `recompute_tokens` to be computed."""

    def paused(self, tier: str, seconds: float, bytes_written: int) -> None:
        """A pause into `tier` was confirmed."""

    def estimated(self, outcome: str, rows: int) -> None:
        """So many sampled rows of attention were "seen" (they are in an estimate) or "dropped".

        Raises:
            ValueError: another text as `outcome`; nothing was changed.
        """


class NoMetrics:
    """A MetricsSink of a server that was started without --enable-metrics."""

    def set_tier(
        self, tier: str, *, used_bytes: int, capacity_bytes: int, sessions: int, breaker: str | None
    ) -> None:
        pass

    def set_sessions(self, counts: Mapping[str, int]) -> None:
        pass

    def count(self, counters: Mapping[str, int]) -> None:
        pass

    def hit(self) -> None:
        pass

    def miss(self, reason: str) -> None:
        pass

    def put_failed(self, tier: str) -> None:
        pass

    def restored(self, tier: str, seconds: float, tokens: int, recompute_tokens: int) -> None:
        pass

    def paused(self, tier: str, seconds: float, bytes_written: int) -> None:
        pass

    def estimated(self, outcome: str, rows: int) -> None:
        pass


class Metrics:
    """A MetricsSink that Prometheus can read. Make one a process, after SGLang set up its own metrics."""

    def __init__(
        self, labels: Mapping[str, str] = _NO_LABELS, registry: CollectorRegistry | None = None
    ) -> None:
        """`labels` stand on every metric; `registry` None is prometheus_client's own.

        Raises:
            ValueError: a label that the metrics use themselves, or one Prometheus does not take; a registry
                that has such metrics already.
        """
        import prometheus_client

        taken = sorted(_OWN_LABELS & labels.keys())
        if taken:
            raise ValueError(
                f"metric label {taken[0]!r}: expected none of {', '.join(sorted(_OWN_LABELS))}, which the "
                "krul_* metrics have already. Give it another name in --extra-metric-labels."
            )
        self._labels = {name: str(value) for name, value in labels.items()}
        self._registry = prometheus_client.REGISTRY if registry is None else registry
        self._client = prometheus_client
        self._totals: dict[str, Counter] = {}
        self._last: dict[str, int] = {}
        self._states: set[str] = set()
        self._make_gauges()
        self._make_counters()
        self._restore_seconds = self._histogram(
            "krul_restore_seconds", "Time to bring a session back to memory, by tier it came from (seconds)."
        )
        self._pause_seconds = self._histogram(
            "krul_pause_seconds", "Time to write a session, by tier it went to (seconds)."
        )
        # A series that begins at 1 has no rate until it grows again.
        for reason in sorted(MISS_REASONS):
            self._misses.labels(**self._labels, reason=reason)
        for outcome in _ROW_OUTCOMES:
            self._estimator_rows.labels(**self._labels, outcome=outcome)
        for counter in (self._hits, self._restored_tokens, self._recomputed_tokens):
            self._plain(counter)

    def set_tier(
        self, tier: str, *, used_bytes: int, capacity_bytes: int, sessions: int, breaker: str | None
    ) -> None:
        if breaker is not None and breaker not in _BREAKER_STATES:
            raise ValueError(f"breaker {breaker!r}: expected one of {', '.join(_BREAKER_STATES)}, or None")
        labels = {**self._labels, "tier": tier}
        self._tier_bytes.labels(**labels).set(used_bytes)
        self._tier_capacity.labels(**labels).set(capacity_bytes)
        self._tier_sessions.labels(**labels).set(sessions)
        if breaker is not None:
            self._breaker.labels(**labels).set(_BREAKER_STATES[breaker])
        for counter in (self._put_failures, self._bytes_written):
            counter.labels(**labels)

    def set_sessions(self, counts: Mapping[str, int]) -> None:
        self._states |= counts.keys()
        for state in self._states:
            self._sessions.labels(**self._labels, state=state).set(counts.get(state, 0))

    def count(self, counters: Mapping[str, int]) -> None:
        """Totals since the start. Those that other methods count already (restored_tokens) are left out.

        Raises:
            ValueError: a name that is no Prometheus name, or a total below zero.
        """
        for name, total in counters.items():
            if name in _COUNTED_ELSEWHERE:
                continue
            if name not in self._totals:
                self._totals[name] = self._counter(
                    f"krul_{name}", _HELP.get(name, f"{name.replace('_', ' ').capitalize()} (count).")
                )
            last = self._last.get(name, 0)
            self._plain(self._totals[name]).inc(total - last if total >= last else total)
            self._last[name] = total

    def hit(self) -> None:
        self._plain(self._hits).inc()

    def miss(self, reason: str) -> None:
        known = reason if reason in MISS_REASONS else "other"
        self._misses.labels(**self._labels, reason=known).inc()

    def put_failed(self, tier: str) -> None:
        self._put_failures.labels(**self._labels, tier=tier).inc()

    def restored(self, tier: str, seconds: float, tokens: int, recompute_tokens: int) -> None:
        self._restore_seconds.labels(**self._labels, tier=tier).observe(seconds)
        self._plain(self._restored_tokens).inc(tokens)
        self._plain(self._recomputed_tokens).inc(recompute_tokens)

    def paused(self, tier: str, seconds: float, bytes_written: int) -> None:
        self._pause_seconds.labels(**self._labels, tier=tier).observe(seconds)
        self._bytes_written.labels(**self._labels, tier=tier).inc(bytes_written)

    def estimated(self, outcome: str, rows: int) -> None:
        if outcome not in _ROW_OUTCOMES:
            raise ValueError(f"outcome {outcome!r}: expected one of {', '.join(_ROW_OUTCOMES)}")
        self._estimator_rows.labels(**self._labels, outcome=outcome).inc(rows)

    # ---- making them ----

    def _make_gauges(self) -> None:
        self._tier_bytes = self._gauge("krul_tier_bytes", "What the tier holds (bytes).", "tier")
        self._tier_capacity = self._gauge(
            "krul_tier_capacity_bytes", "What the tier may hold at most (bytes).", "tier"
        )
        self._tier_sessions = self._gauge(
            "krul_tier_sessions", "Sessions that lie in the tier (sessions).", "tier"
        )
        self._breaker = self._gauge(
            "krul_breaker_state",
            "Circuit breaker of the tier (0 closed, 1 half-open, 2 open).",
            "tier",
        )
        self._sessions = self._gauge("krul_sessions", "Sessions known, by state (sessions).", "state")

    def _make_counters(self) -> None:
        self._hits = self._counter("krul_hits", "Sessions brought back in full (restores).")
        self._misses = self._counter(
            "krul_misses", "Sessions recomputed in part or in full, by reason (restores).", "reason"
        )
        self._put_failures = self._counter(
            "krul_put_failures", "Objects that the tier did not confirm (objects).", "tier"
        )
        self._restored_tokens = self._counter(
            "krul_restored_tokens", "Tokens whose KV was brought back to memory (tokens)."
        )
        self._recomputed_tokens = self._counter(
            "krul_recomputed_tokens", "Tokens of resumed sessions whose KV had to be computed anew (tokens)."
        )
        self._bytes_written = self._counter(
            "krul_bytes_written", "What pauses wrote to the tier (bytes).", "tier"
        )
        self._estimator_rows = self._counter(
            "krul_estimator_rows", "Rows of attention that were sampled for estimates (rows).", "outcome"
        )

    def _gauge(self, name: str, text: str, own_label: str) -> Gauge:
        return self._client.Gauge(
            name, text, [*self._labels, own_label], registry=self._registry, multiprocess_mode=_GAUGE_MODE
        )

    def _counter(self, name: str, text: str, *own_labels: str) -> Counter:
        return self._client.Counter(name, text, [*self._labels, *own_labels], registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return self._client.Histogram(
            name, text, [*self._labels, "tier"], registry=self._registry, buckets=_SECONDS_BUCKETS
        )

    def _plain(self, counter: Counter) -> Counter:
        """The one series of a counter that has no label of its own."""
        # Without any label the metric itself is the series, and labels() is refused.
        return counter.labels(**self._labels) if self._labels else counter

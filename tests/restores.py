"""Canned answers about restores, as the scheduler gives them: a session of 1,024 tokens in 4 layers."""

from __future__ import annotations

from typing import Any

from sgl_krul.restore.timeline import Span, Timeline

__all__ = ["DEFAULT_RATES", "PLAN", "RATES", "SPANS", "TIMELINE", "plan_answer", "timeline_of"]

RATES: dict[str, Any] = {
    "compute": {
        "kv_s_per_token": 35e-6,
        "rest_s_per_token": 110e-6,
        "attention_s_per_pair": 1.2e-8,
        "slice_s": 0.0012,
    },
    "tiers": {"ssd": {"latency_s": 0.001, "bytes_per_s": 18_874_368.0, "in_flight": 4}},
    "land_s_per_byte": 1e-9,
    "measured": True,
}
DEFAULT_RATES: dict[str, Any] = RATES | {"compute": None, "measured": False}
STAIRCASE = [1024, 512, 512, 256]
PLAN: dict[str, Any] = {
    "strategy": "optimal",
    "tokens": 1024,
    "staircase": STAIRCASE,
    "load_bytes": 3 << 20,
    "compute_s": 1.5,
    "load_s": 1.4,
    "forward_s": 0.12,
    "ttft_s": 1.62,
    "why": "both streams end together, 1.9 times as fast as either alone",
    "measured": True,
}
_ALL = {"staircase": [0] * 4, "load_bytes": 8 << 20, "compute_s": 0.0, "load_s": 3.0}
LOAD_ALL = PLAN | _ALL | {"strategy": "load", "ttft_s": 3.12, "why": ""}
_NONE = {"tokens": 0, "staircase": [], "load_bytes": 0, "compute_s": 0.0, "load_s": 0.0}
RECOMPUTE_ALL = PLAN | _NONE | {"strategy": "recompute", "forward_s": 3.3, "ttft_s": 3.3, "why": ""}


def plan_answer(**changes: Any) -> dict[str, Any]:
    """The answer of the verb "plan", without its session_id."""
    answer = {
        "tokens": 1024,
        "on_device_tokens": 0,
        "new_tokens": 32,
        "path": "device",
        "tiers": {"ssd": 1024},
        "recompute": {"available": True, "reason": ""},
        "rates": RATES,
        "plan": PLAN,
        "load_all": LOAD_ALL,
        "recompute_all": RECOMPUTE_ALL,
    }
    return answer | changes


SPANS = [
    Span("compute", 0.0, 0.4, 0, 512, 0, 1, note=""),
    Span("compute", 0.4, 0.9, 0, 512, 1, 1, note=""),
    Span("compute", 0.9, 1.5, 0, 256, 2, 2, note="hole"),
    Span("load", 0.0, 0.7, 768, 256, 1, 3, 3 << 20, "ssd"),
    Span("load", 0.2, 0.9, 512, 256, 0, 4, 4 << 20, "redis"),  # beside the one before
    Span("load", 1.2, 1.4, 256, 256, 1, 1, 1 << 20, "wasted"),
]


def timeline_of(spans: list[Span], seconds: float) -> Timeline:
    """A timeline that holds them."""
    timeline = Timeline()
    for span in spans:
        timeline.add(span)
    timeline.close(seconds, tuple(STAIRCASE) if spans else ())
    return timeline


TIMELINE: dict[str, Any] = {
    "ended_at": 1.75e9,
    "plan": PLAN,
    "timeline": timeline_of(SPANS, 1.5).as_dict(),
    "path": "device",
    "reason": "",
}

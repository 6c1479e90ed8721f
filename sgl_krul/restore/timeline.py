"""What both streams of a restore did, when: for `krul timeline`, the rates, and the share of idle time."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import Any, NamedTuple

__all__ = ["Span", "Timeline"]

_IN_VAIN = ("wasted", "failed", "hole")
_MAX_SPANS = 20_000  # 100,000 tokens in 80 layers make about as many


class Span(NamedTuple):
    """One piece of work. Times are in seconds since the restore began. `note`: the tier, "wasted", ..."""

    stream: str
    start_s: float
    end_s: float
    first_token: int
    tokens: int
    first_layer: int
    layers: int
    bytes: int = 0
    note: str = ""


class Timeline:
    """The spans of the streams "compute" and "load". Thread safe; what is over the bound is counted only."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._spans: list[Span] = []
        self.dropped = 0
        self.seconds = 0.0
        self.staircase: tuple[int, ...] = ()

    def add(self, span: Span) -> None:
        """Enter a piece of work."""
        with self._lock:
            if len(self._spans) < _MAX_SPANS:
                self._spans.append(span)
            else:
                self.dropped += 1

    def close(self, seconds: float, staircase: tuple[int, ...]) -> None:
        """The restore took so long, and this is where the streams met."""
        self.seconds = seconds
        self.staircase = staircase

    @property
    def spans(self) -> list[Span]:
        """What was entered so far."""
        with self._lock:
            return list(self._spans)

    @property
    def loaded_bytes(self) -> int:
        """Bytes that loads brought into place, from tiers and from memory."""
        return sum(span.bytes for span in self.spans if span.stream == "load" and span.note not in _IN_VAIN)

    def busy_s(self, stream: str) -> float:
        """Seconds in which the stream had something under way."""
        return _covered(span for span in self.spans if span.stream == stream)

    def idle(self) -> dict[str, float]:
        """Share of the restore in which each stream that took part did nothing."""
        names = sorted({span.stream for span in self.spans})
        if not self.seconds:
            return dict.fromkeys(names, 0.0)
        return {name: max(0.0, 1 - self.busy_s(name) / self.seconds) for name in names}

    def bubble(self) -> float:
        """Share of the restore in which a stream that took part had nothing under way: neither progressed, or
        one waited for the other. The worse of the two.
        """
        return max(self.idle().values(), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        """JSON: spans as lists, in the order of `Span`."""
        return {
            "seconds": self.seconds,
            "staircase": list(self.staircase),
            "idle": self.idle(),
            "bubble": self.bubble(),
            "spans_dropped": self.dropped,
            "spans": [list(span) for span in self.spans],
        }


def _covered(spans: Iterable[Span]) -> float:
    """Length of the union of the spans."""
    total, reached = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start_s):
        total += max(0.0, span.end_s - max(reached, span.start_s))
        reached = max(reached, span.end_s)
    return total

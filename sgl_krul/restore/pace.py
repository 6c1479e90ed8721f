"""How many bytes a loader asks for at once: what a link brings in 50 ms, so that streams meet finely."""

from __future__ import annotations

from threading import Lock

__all__ = ["MOST_BYTES", "Pace"]

MOST_BYTES = 4 << 20
_TARGET_S = 0.05
_LEAST_SHARE = 0.1  # of a fetch's time that was transfer, at least: the latency is only an estimate


class Pace:
    """Measured in one restore; starts at `least_bytes` (a segment). Thread safe.

    With several fetches under way each gets its part of the link, and that part is what is measured. Over a
    link of much latency a fetch aims at twice the latency for its bytes: else two loaders would not keep it
    busy.
    """

    def __init__(self, least_bytes: int) -> None:
        self._least_bytes = least_bytes
        self._lock = Lock()
        self._latency_s = float("inf")
        self._bytes = 0.0
        self._seconds = 0.0

    def answered(self, seconds: float) -> None:
        """A request for next to no bytes took so long."""
        with self._lock:
            self._latency_s = min(self._latency_s, seconds)

    def fetched(self, size_bytes: int, seconds: float) -> None:
        """A fetch brought so many bytes. What was before counts half."""
        with self._lock:
            latency = min(self._latency_s, seconds)
            self._bytes = self._bytes / 2 + size_bytes
            self._seconds = self._seconds / 2 + max(seconds - latency, _LEAST_SHARE * seconds, 1e-6)

    @property
    def claim_bytes(self) -> int:
        """How much to ask for next."""
        with self._lock:
            if not self._bytes:
                return self._least_bytes
            latency = 0.0 if self._latency_s == float("inf") else self._latency_s
            wanted = self._bytes / self._seconds * max(_TARGET_S, 2 * latency)
        return max(self._least_bytes, min(int(wanted), MOST_BYTES))

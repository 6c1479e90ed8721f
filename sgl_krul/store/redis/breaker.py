"""A circuit breaker: after a few failures in a row calls are refused at once; now and then one may try."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal, TypeAlias

__all__ = ["Breaker", "BreakerState"]

BreakerState: TypeAlias = Literal["closed", "open", "half-open"]


class Breaker:
    """What is known of one place: reachable (closed), not (open), or being tried by one call (half-open).

    A call asks `admit` for a ticket, and reports with it: `succeeded`, `failed` or, when it ended without
    having learned anything, `abandoned`. A ticket from before the last change of state counts no more, so
    eight calls that were under way when the place died double the delay once, not eight times.

    `clock` gives seconds that never go back, `jitter` numbers from 0 to 1. Thread safe; never waits.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        jitter: Callable[[], float],
        failures: int = 3,
        first_delay_s: float = 0.5,
        max_delay_s: float = 15.0,
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._limit = failures
        self._first_delay_s = first_delay_s
        self._max_delay_s = max_delay_s
        self._lock = threading.Lock()
        self._state: BreakerState = "closed"
        self._ticket = 0
        self._failures = 0
        self._failing_since = 0.0
        self._reason = ""
        self._delay_s = first_delay_s
        self._retry_at = 0.0

    @property
    def state(self) -> BreakerState:
        """What the breaker does now."""
        return self._state

    @property
    def available(self) -> bool:
        """Whether `admit` would let a call through now."""
        with self._lock:
            return self._state == "closed" or (self._state == "open" and self._clock() >= self._retry_at)

    def admit(self) -> int | None:
        """A ticket for one call, or None when it is refused."""
        with self._lock:
            if self._state == "closed":
                return self._ticket
            if self._state == "half-open" or self._clock() < self._retry_at:
                return None
            self._change("half-open")
            return self._ticket

    def succeeded(self) -> None:
        """A call got its answer. Also one from before the place was given up shows that it lives."""
        with self._lock:
            self._failures = 0
            if self._state != "closed":
                self._change("closed")
                self._delay_s = self._first_delay_s

    def failed(self, ticket: int, reason: str) -> None:
        """A call found the place out of reach."""
        with self._lock:
            if ticket != self._ticket:
                return
            if self._failures == 0:
                self._failing_since = self._clock()
            self._failures += 1
            self._reason = reason
            if self._state == "half-open":
                self._delay_s = min(2 * self._delay_s, self._max_delay_s)
                self._open()
            elif self._failures >= self._limit:
                self._open()

    def abandoned(self, ticket: int) -> None:
        """A call ended without a verdict. If it was the one that tried, the next may try at once."""
        with self._lock:
            if ticket == self._ticket and self._state == "half-open":
                self._change("open")

    def refusal(self) -> str:
        """Why calls are refused, and until when; for a message."""
        with self._lock:
            now = self._clock()
            failing_s = max(now - self._failing_since, 0.0)
            wait_s = max(self._retry_at - now, 0.0)
            return f"{self._reason} (for {failing_s:.1f} s now; trying again in {wait_s:.1f} s)"

    def _open(self) -> None:
        self._change("open")
        self._retry_at = self._clock() + self._delay_s * (0.5 + 0.5 * self._jitter())

    def _change(self, state: BreakerState) -> None:
        self._state = state
        self._ticket += 1

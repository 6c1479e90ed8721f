"""Two ways to do one thing, in alternation, and what their times say."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Comparison", "compare"]

Step = Callable[[int], object]


@dataclass(frozen=True)
class Comparison:
    """Seconds of every round for the same `size_bytes`, ours and those of the baseline."""

    size_bytes: int
    ours_s: tuple[float, ...]
    baseline_s: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Our speed over that of the baseline, by round."""
        return [bare / ours for ours, bare in zip(self.ours_s, self.baseline_s, strict=True)]

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """Quartiles of the rounds' ratios: a round that something else disturbed does not count."""
        low, _, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return low, high

    @property
    def ours_mb_s(self) -> float:
        """Median speed, in 10^6 bytes a second."""
        return self.size_bytes / statistics.median(self.ours_s) / 1e6

    @property
    def baseline_mb_s(self) -> float:
        """Median speed of the baseline."""
        return self.size_bytes / statistics.median(self.baseline_s) / 1e6


def compare(
    size_bytes: int, ours: Step, baseline: Step, *, rounds: int, before: Step = lambda number: None
) -> Comparison:
    """Time both in every round, in an order that alternates. Each gets the number of the round.

    `before` comes before each of the two and is not timed. A first round, number 0, does not count.
    """
    seconds: dict[Step, list[float]] = {ours: [], baseline: []}
    for number in range(rounds + 1):
        for step in (ours, baseline) if number % 2 else (baseline, ours):
            before(number)
            start = time.perf_counter()
            step(number)
            elapsed = time.perf_counter() - start
            if number:
                seconds[step].append(elapsed)
    return Comparison(size_bytes, tuple(seconds[ours]), tuple(seconds[baseline]))

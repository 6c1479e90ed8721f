"""Ranks as threads: an Agreement that fails where SGLang's would hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

WAIT_S = 20.0  # a rank that does not come has taken another branch


class ThreadRank:
    """One rank. `calls` counts its collectives."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self.size = meeting.size
        self.calls = 0
        self._meeting = meeting

    def agree_min(self, values: Sequence[int]) -> list[int]:
        """See Agreement."""
        self.calls += 1
        columns = zip(*self._meeting.exchange(self.rank, "agree_min", list(values)), strict=True)
        return [min(column) for column in columns]

    def gather(self, text: str) -> list[str]:
        """See Agreement."""
        self.calls += 1
        return self._meeting.exchange(self.rank, "gather", text)


class Meeting:
    """Where the ranks meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks = [ThreadRank(rank, self) for rank in range(size)]
        self._barrier = threading.Barrier(size)
        self._brought: list[tuple[str, Any]] = [("", None)] * size

    def exchange(self, rank: int, call: str, value: Any) -> list[Any]:
        """What every rank brought to this call; AssertionError where they came for different ones."""
        self._brought[rank] = (call, value)
        self._barrier.wait(WAIT_S)
        brought = list(self._brought)
        self._barrier.wait(WAIT_S)  # nobody writes before all have read
        assert {name for name, _ in brought} == {call}, brought
        return [value for _, value in brought]

    def everywhere(self, work: Callable[[int], T]) -> list[T]:
        """Run `work(rank)` in a thread for each rank; their results, or the first error."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(work, range(self.size)))

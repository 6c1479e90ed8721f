"""What the ranks of a tensor parallel server agree on: the seam between the service and SGLang's groups.

Every rank runs a service of its own over its own heads. Ranks never talk about KV; they only have to take the
same branches in the same round of the scheduler, because the radix tree must be the same everywhere. Where
a branch depends on what a rank's own workers, disk or clock say, all of them ask here first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Agreement", "Alone"]


class Agreement(Protocol):
    """One rank's part. Every method is a collective: all ranks call it, in the same order, in the thread of
    the scheduler. A call costs a round trip between processes (0.1 ms), so none is made in a round that has
    nothing to agree on.
    """

    rank: int
    size: int

    def agree_min(self, values: Sequence[int]) -> list[int]:
        """The least value of all ranks at each place; every rank brings as many."""
        ...

    def gather(self, text: str) -> list[str]:
        """The text of every rank, in their order."""
        ...


class Alone:
    """The only rank: what it says is agreed."""

    rank = 0
    size = 1

    def agree_min(self, values: Sequence[int]) -> list[int]:
        """`values`."""
        return list(values)

    def gather(self, text: str) -> list[str]:
        """`text`."""
        return [text]

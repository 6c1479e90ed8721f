"""Handles on the slots of a MemoryTier, and how slot arrays fall into runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

__all__ = ["PageReservation", "PinnedPages", "Slots", "runs"]

Slots = NDArray[np.int64]


def runs(slots_a: Slots, slots_b: Slots) -> list[tuple[int, int, int]]:
    """Split two slot arrays [n] into maximal runs (a0, b0, length) where both ascend by one together."""
    if slots_a.shape != slots_b.shape or slots_a.ndim != 1:
        raise ValueError(f"slots of shapes {slots_a.shape} and {slots_b.shape}: expected two equal [n]")
    if slots_a.size == 0:
        return []
    breaks = np.flatnonzero((np.diff(slots_a) != 1) | (np.diff(slots_b) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [slots_a.size])))
    return list(zip(slots_a[starts].tolist(), slots_b[starts].tolist(), lengths.tolist(), strict=True))


class PinnedPages:
    """Slots that stay as they are until `release()`. `slots[i]` (int64 [n]) holds the page of `keys[i]`."""

    def __init__(
        self, keys: tuple[str, ...], slots: Slots, unpin: Callable[[tuple[str, ...], Slots], None]
    ) -> None:
        self.keys = keys
        self.slots = slots
        self._unpin = unpin
        self._lock = threading.Lock()
        self._held = True

    def release(self) -> None:
        """Let the slots go. A second call does nothing."""
        with self._lock:
            held, self._held = self._held, False
        if held:
            self._unpin(self.keys, self.slots)

    def __enter__(self) -> PinnedPages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class PageReservation:
    """Slots to be written by the holder: `slots[i]` (int64 [n], ascending) is for the page of `keys[i]`.

    Ends with one `publish` or one `abandon`; a second one is an AssertionError.
    """

    def __init__(self, keys: tuple[str, ...], slots: Slots, epoch: int) -> None:
        self.keys = keys
        self.slots = slots
        self.epoch = epoch
        self.open = True

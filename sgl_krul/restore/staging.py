"""Host buffers for bytes on their way to the device: bounded, used again, shared by a server's restores."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from threading import Event

import numpy as np
from numpy.typing import NDArray

__all__ = ["Staging", "StagingBuffer"]

_STEPS = 4  # sizes between two powers of two: a buffer is at most a quarter larger than was asked for
_LEAST_BYTES = 4096
_LOOK_AGAIN_S = 0.1


class StagingBuffer:
    """`data`: uint8 [n], of the n bytes asked for; it holds anything. The holder gives it back once."""

    def __init__(self, owner: Staging, whole: NDArray[np.uint8], size_bytes: int) -> None:
        self.data: NDArray[np.uint8] = whole[:size_bytes]
        self.whole = whole  # what its owner knows it by
        self._owner = owner

    def give(self) -> None:
        """The same as `Staging.give`."""
        self._owner.give(self)


class Staging:
    """At most `capacity_bytes` of buffers, those that lie ready included. Thread safe.

    `allocate(n)` makes an uint8 [n]: on CUDA one in page-locked memory, which is dear; so buffers are kept
    and used again. First come, first served: a large one gets its turn.
    """

    def __init__(
        self, capacity_bytes: int, allocate: Callable[[int], NDArray[np.uint8]] | None = None
    ) -> None:
        if capacity_bytes < 1:
            raise ValueError(f"capacity_bytes {capacity_bytes}: expected at least 1")
        self.capacity_bytes = capacity_bytes
        self.peak_bytes = 0
        self._allocate = allocate or (lambda size: np.empty(size, np.uint8))
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._taken: dict[int, NDArray[np.uint8]] = {}  # by id
        self._taken_bytes = 0  # with those that are being allocated
        self._ready: list[NDArray[np.uint8]] = []  # the one given back last at the end
        self._ready_bytes = 0

    @property
    def taken_bytes(self) -> int:
        """Bytes of the buffers that somebody has now."""
        return self._taken_bytes

    def take(self, size_bytes: int, cancelled: Event) -> StagingBuffer | None:
        """A buffer of `size_bytes`. Waits for room; None when `cancelled` was set before there was any.

        Who sets `cancelled` calls `wake()` after it.

        Raises:
            ValueError: more than the capacity, or less than a byte.
        """
        if not 1 <= size_bytes <= self.capacity_bytes:
            raise ValueError(f"size_bytes {size_bytes}: expected 1 to the capacity, {self.capacity_bytes}")
        size = min(_rounded(size_bytes), self.capacity_bytes)
        me = object()
        with self._changed:
            self._queue.append(me)
            while not cancelled.is_set() and not (self._queue[0] is me and self._fits(size)):
                self._changed.wait(_LOOK_AGAIN_S)
            self._queue.remove(me)
            self._changed.notify_all()
            if cancelled.is_set():
                return None
            whole = self._find(size)
            if whole is None:
                self._make_room(size)
            else:
                size = whole.nbytes
            self._taken_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._taken_bytes + self._ready_bytes)
        return StagingBuffer(self, self._own(whole, size), size_bytes)

    def give(self, buffer: StagingBuffer) -> None:
        """Take a buffer back. A second time is an AssertionError."""
        with self._changed:
            whole = self._taken.pop(id(buffer.whole), None)
            assert whole is not None, "a staging buffer was given back twice, or to another owner"
            self._taken_bytes -= whole.nbytes
            self._ready.append(whole)
            self._ready_bytes += whole.nbytes
            self._changed.notify_all()

    def wake(self) -> None:
        """Have all who wait look again whether they were cancelled."""
        with self._changed:
            self._changed.notify_all()

    def trim(self) -> None:
        """Let go of the buffers that lie ready."""
        with self._changed:
            self._ready.clear()
            self._ready_bytes = 0

    def check(self) -> list[str]:
        """Problems found; empty when sound."""
        with self._changed:
            held, taken = (
                self._taken_bytes + self._ready_bytes,
                sum(whole.nbytes for whole in self._taken.values()),
            )
            ready = sum(whole.nbytes for whole in self._ready)
            problems = []
            if max(held, self.peak_bytes) > self.capacity_bytes:
                problems.append(f"staging: {held} bytes, {self.peak_bytes} at most, of {self.capacity_bytes}")
            if taken > self._taken_bytes or ready != self._ready_bytes:
                problems.append(
                    f"staging: {taken} bytes taken and {ready} ready, "
                    f"counted {self._taken_bytes} and {self._ready_bytes}"
                )
            if self._queue and not self._taken_bytes:
                problems.append(f"staging: {len(self._queue)} wait, and nothing is taken")
            return problems

    # -- inside, with the lock --

    def _fits(self, size: int) -> bool:
        """Whether there is room once the buffers that lie ready have gone, or one of them will do."""
        return self._taken_bytes + size <= self.capacity_bytes

    def _find(self, size: int) -> NDArray[np.uint8] | None:
        """The smallest ready buffer that is large enough, not twice as large; it is no longer ready.

        None also where all that are taken would then be too much.
        """
        fitting = [
            (whole.nbytes, -place)
            for place, whole in enumerate(self._ready)
            if size <= whole.nbytes <= min(2 * size, self.capacity_bytes - self._taken_bytes)
        ]
        if not fitting:
            return None
        whole = self._ready.pop(-min(fitting)[1])
        self._ready_bytes -= whole.nbytes
        return whole

    def _make_room(self, size: int) -> None:
        """Let ready buffers go, those that lie there longest first, until `size` more stay in the bound."""
        while self._taken_bytes + self._ready_bytes + size > self.capacity_bytes:
            self._ready_bytes -= self._ready.pop(0).nbytes

    # -- inside, without it --

    def _own(self, whole: NDArray[np.uint8] | None, size: int) -> NDArray[np.uint8]:
        """Enter the buffer as taken; allocate it first if there is none. `size` bytes are counted already."""
        try:
            if whole is None:
                whole = self._allocate(size)
        except BaseException:
            with self._changed:
                self._taken_bytes -= size
                self._changed.notify_all()
            raise
        with self._changed:
            self._taken[id(whole)] = whole
        return whole


def _rounded(size_bytes: int) -> int:
    """The size of buffer for so many bytes: few different ones, so that a buffer suits the next who asks."""
    if size_bytes <= _LEAST_BYTES:
        return _LEAST_BYTES
    step = (1 << (size_bytes - 1).bit_length()) // (2 * _STEPS)
    return -(-size_bytes // step) * step

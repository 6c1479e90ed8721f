"""A device whose copies run when the test says so: what CUDA does by itself, made deterministic.

It keeps the contract of `engine.device_queue`: lines of work that run in order, events between them, and a
thread that waits only in `DeviceEvent.synchronize`.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable

with warnings.catch_warnings():
    # SGLang and the packages under it warn while they are imported on a CPU.
    warnings.simplefilter("ignore")
    from sgl_krul.engine.device_queue import DeviceEvent

__all__ = ["FakeDevice"]

PATIENCE_S = 20.0
Work = Callable[[], None]


class _Event:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.reached = threading.Event()

    def synchronize(self) -> None:
        """See DeviceEvent."""
        if not self.reached.is_set():
            self._device.waiters.append(threading.get_ident())
        assert self.reached.wait(PATIENCE_S), "waited for work that the test never let run"


class _Line:
    """Work, events to reach and events to run after, in order."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._items: deque[Work | _Event | tuple[_Event]] = deque()

    def follow(self, event: DeviceEvent) -> None:
        """See DeviceQueue."""
        assert isinstance(event, _Event)
        self._put((event,))

    def enqueue(self, copy: Work) -> None:
        """See DeviceQueue."""
        self._put(copy)

    def record(self) -> DeviceEvent:
        """See DeviceQueue."""
        event = _Event(self._device)
        self._put(event)
        return event

    @property
    def pending(self) -> int:
        """Work that has not run."""
        return sum(callable(item) for item in self._items)

    def advance(self, most: int) -> int:
        """Run at most that much of the work at the head, under the device's lock; returns how much."""
        done = 0
        while self._items:
            item = self._items[0]
            if isinstance(item, tuple):
                if not item[0].reached.is_set():
                    break
            elif isinstance(item, _Event):
                item.reached.set()
            elif done == most:
                break
            else:
                item()
                done += 1
            self._items.popleft()
        return done

    def _put(self, item: Work | _Event | tuple[_Event]) -> None:
        with self._device.lock:
            self._items.append(item)
            self._device.settle()


class FakeDevice:
    """A Device. Forwards (`launch`) run by themselves as far as their waits let them, copies by `step`.

    `waiters` are the threads that had to wait for the device, one entry a wait.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.waiters: list[int] = []
        self.queues: list[_Line] = []
        self._compute = _Line(self)
        self._held = False

    # -- Device --

    def launched(self) -> DeviceEvent:
        """See Device."""
        return self._compute.record()

    def wait(self, event: DeviceEvent) -> None:
        """See Device."""
        self._compute.follow(event)

    def queue(self) -> _Line:
        """See Device."""
        self.queues.append(_Line(self))
        return self.queues[-1]

    # -- for the test --

    def launch(self, work: Work) -> None:
        """What a forward does, in the order of the launches."""
        self._compute.enqueue(work)

    def hold_compute(self, held: bool) -> None:
        """Stop the forwards where they are, or let them go on."""
        with self.lock:
            self._held = held
            self.settle()

    @property
    def pending(self) -> int:
        """Copies enqueued that have not run."""
        with self.lock:
            return sum(queue.pending for queue in self.queues)

    def step(self, copies: int = 1, queue: int | None = None) -> int:
        """Run at most that many copies (of one queue); returns how many ran."""
        done = 0
        with self.lock:
            for line in self.queues if queue is None else [self.queues[queue]]:
                done += line.advance(copies - done)
                self.settle()
        return done

    def settle(self) -> None:
        """Everything that needs no step."""
        for _ in range(2):  # a forward may reach what a queue runs after, and the other way round
            for line in self.queues:
                line.advance(0)
            if not self._held:
                self._compute.advance(1 << 30)

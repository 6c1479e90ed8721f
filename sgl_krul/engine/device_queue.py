"""What the copies to the device need of it: queues of copies beside the forward, and events between the two.

A `Device` is where the calling thread launches work (on CUDA its current stream, which runs in order). A
`DeviceQueue` is a line of copies of its own, in order too. Events order the one after the other on the
device, without a thread that waits for it; only `DeviceEvent.synchronize` makes a thread wait, and for what
is before that event only: nothing here waits for the whole device.

On a CPU everything is done when the call returns. The CUDA classes are thin on purpose: what is built on them
is tested with a device that copies when the test says so (tests/devices.py), they themselves need a GPU and
are not run by the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["CudaDevice", "Device", "DeviceEvent", "DeviceQueue", "HostDevice", "open_device"]


class DeviceEvent(Protocol):
    """A place in the work of a queue or of a launching thread."""

    def synchronize(self) -> None:
        """Block the calling thread until the device has come past this place."""


class DeviceQueue(Protocol):
    """Copies that run one after the other, beside everything else. One thread enqueues at a time."""

    def follow(self, event: DeviceEvent) -> None:
        """What is enqueued from now on runs after `event`. Returns at once."""

    def enqueue(self, copy: Callable[[], None]) -> None:
        """Have the device run what `copy` launches. It is called now; host memory it reads must stay as it
        is until an event recorded later has been passed."""

    def record(self) -> DeviceEvent:
        """The place after all that was enqueued so far. Returns at once."""


class Device(Protocol):
    """What launches forwards. Any thread may ask; `launched` and `wait` are about the thread that calls."""

    def launched(self) -> DeviceEvent:
        """The place after all that the calling thread has launched so far. Returns at once."""

    def wait(self, event: DeviceEvent) -> None:
        """What the calling thread launches from now on runs after `event`. Returns at once."""

    def queue(self) -> DeviceQueue:
        """A new queue."""


class _Passed:
    """The event of a device that is never behind."""

    def synchronize(self) -> None:
        """See DeviceEvent."""


_PASSED = _Passed()


class _HostQueue:
    """A DeviceQueue that runs a copy when it gets it, on the caller's thread."""

    def follow(self, event: DeviceEvent) -> None:
        """See DeviceQueue."""

    def enqueue(self, copy: Callable[[], None]) -> None:
        """See DeviceQueue."""
        copy()

    def record(self) -> DeviceEvent:
        """See DeviceQueue."""
        return _PASSED


class HostDevice:
    """The Device where KV lies in the memory of the CPU."""

    def launched(self) -> DeviceEvent:
        """See Device."""
        return _PASSED

    def wait(self, event: DeviceEvent) -> None:
        """See Device."""

    def queue(self) -> DeviceQueue:
        """See Device."""
        return _HostQueue()


class _CudaQueue:
    """A DeviceQueue that is a side stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def follow(self, event: DeviceEvent) -> None:
        """See DeviceQueue."""
        self._stream.wait_event(event)

    def enqueue(self, copy: Callable[[], None]) -> None:
        """See DeviceQueue."""
        with torch.cuda.stream(self._stream):
            copy()

    def record(self) -> DeviceEvent:
        """See DeviceQueue."""
        return _record(self._stream)


class CudaDevice:
    """The Device of a GPU: a thread launches on its current stream there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def launched(self) -> DeviceEvent:
        """See Device."""
        return _record(torch.cuda.current_stream(self._device))

    def wait(self, event: DeviceEvent) -> None:
        """See Device."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def queue(self) -> DeviceQueue:
        """See Device."""
        return _CudaQueue(self._device)


def open_device(device: torch.device) -> Device:
    """The Device of a KV pool's tensors."""
    return CudaDevice(device) if device.type == "cuda" else HostDevice()


def _record(stream: torch.cuda.Stream) -> DeviceEvent:
    # Blocking: a thread that waits for it sleeps; spinning would take a core from the scheduler.
    event: DeviceEvent = torch.cuda.Event(blocking=True)
    stream.record_event(event)
    return event

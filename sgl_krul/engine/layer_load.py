"""Memory -> device, layer by layer, while the forward of the new turn runs.

A loader thread copies layer 0, 1, 2 ...; the forward asks before it reads a layer
(`LayerCounter.wait_until`). It waits at most `max_wait_s` for the loader; then, or if the loader failed, it
copies that layer itself. So the scheduler's thread waits for memory copies only, and a load can't fail half
way (invariant 5). Both may copy the same
layer: they write the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from threading import Event

import torch

from sgl_krul.engine.pool import KvPages, Run
from sgl_krul.store.memory import MemoryTier, PinnedPages
from sgl_krul.store.workers import Workers

__all__ = ["LayerCounter", "LayerLoad"]


class LayerLoad:
    """The loads of one batch: pinned pages in host memory and the device pages they go to."""

    def __init__(
        self, pages: KvPages, memory: MemoryTier, loads: Sequence[tuple[PinnedPages, Sequence[Run]]]
    ) -> None:
        self._pages = pages
        self._memory = memory
        self._loads = loads
        self._copied = [Event() for _ in range(pages.layout.layers)]
        self._stream = torch.cuda.Stream(pages.device) if pages.device.type == "cuda" else None
        self._events: list[torch.cuda.Event | None] = [None] * pages.layout.layers
        self._future: Future[None] | None = None
        self.takeovers = 0

    def start(self, workers: Workers) -> None:
        """Begin on a loader thread."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._pages.device))
        self._future = workers.submit(self._run)

    def wait(self, layer: int, max_wait_s: float) -> None:
        """Return when `layer` may be read by the current stream."""
        copied = self._copied[layer]
        # A loader that is done and has not copied this layer has failed: there is nothing to wait for.
        ended = self._future is not None and self._future.done()
        if not copied.is_set() and (ended or not copied.wait(max_wait_s)) and not copied.is_set():
            self.takeovers += 1
            self._copy(layer, None)
            return
        event = self._events[layer]
        if event is not None:
            torch.cuda.current_stream(self._pages.device).wait_event(event)

    def finish(self) -> None:
        """Wait until the loader is off the device, see that every layer is in place, let the pages go."""
        if self._future is not None and self._future.exception() is not None:
            for layer, copied in enumerate(self._copied):
                if not copied.is_set():
                    self._copy(layer, None)
        if self._stream is not None:
            self._stream.synchronize()
        for pinned, _ in self._loads:
            pinned.release()

    def _run(self) -> None:
        for layer in range(self._pages.layout.layers):
            self._copy(layer, self._stream)

    def _copy(self, layer: int, stream: torch.cuda.Stream | None) -> None:
        rows = self._memory.layer(layer)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for _, runs in self._loads:
                self._pages.to_device(layer, rows, runs)
            if stream is not None:
                event = torch.cuda.Event()
                event.record(stream)
                self._events[layer] = event
        self._copied[layer].set()


class LayerCounter:
    """What the KV pool asks before it hands out a layer. One batch is the consumer at a time."""

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._loads: dict[int, LayerLoad] = {}
        self._next = 0
        self._current: LayerLoad | None = None
        self.takeovers = 0

    def add(self, load: LayerLoad) -> int:
        """Enter a batch's load; returns the index the scheduler knows it by."""
        index = self._next
        self._next += 1
        self._loads[index] = load
        return index

    def set_consumer(self, index: int) -> None:
        """The next forward belongs to batch `index` (-1: to one that loads nothing)."""
        self._current = self._loads.get(index)

    def wait_until(self, threshold: int) -> None:
        """Called by the pool before layer `threshold` is read."""
        if self._current is not None:
            self._current.wait(threshold, self._max_wait_s)

    def finish(self, index: int) -> None:
        """Wait for batch `index` and forget it."""
        load = self._loads.pop(index, None)
        if load is None:
            return
        if load is self._current:
            self._current = None
        load.finish()
        self.takeovers += load.takeovers

    def reset(self) -> None:
        """Wait for all."""
        for index in list(self._loads):
            self.finish(index)

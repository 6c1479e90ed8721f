"""Memory -> device, layer by layer, while the forward of the new turn runs.

A loader thread enqueues the copies of layer 0, 1, 2 ... in a queue of the device; the forward asks before it
reads a layer (`LayerCounter.wait_until`). The thread that launches the forward waits until the copy was
*enqueued*; that it has run by the time the layer is read is between the two streams of the device. (On a CPU
both are one: enqueued is done.) It waits at most `max_wait_s` a layer for the loader; then, or as soon as the
loader failed, it copies that layer itself. So the scheduler's thread waits for memory copies only, and a load
can't fail half way (invariant 5). Both may copy the same layer: they write the same bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from threading import Condition

from sgl_krul.engine.device_queue import DeviceEvent, open_device
from sgl_krul.engine.pool import KvPages, Run
from sgl_krul.engine.upload import Upload, open_upload
from sgl_krul.store.memory import MemoryTier, PinnedPages
from sgl_krul.store.workers import Workers

__all__ = ["LayerCounter", "LayerLoad"]

logger = logging.getLogger(__name__)


class LayerLoad:
    """The loads of one batch: pinned pages in host memory and the device pages they go to.

    `start`, `wait` and `finish` are called by the thread that launches forwards. `upload` may be shared by
    loads that start on the same single worker, which runs them one after the other; by default it is the
    load's own.
    """

    def __init__(
        self,
        pages: KvPages,
        memory: MemoryTier,
        loads: Sequence[tuple[PinnedPages, Sequence[Run]]],
        upload: Upload | None = None,
    ) -> None:
        self.layers = pages.layout.layers
        self.takeovers = 0
        self._pages = pages
        self._memory = memory
        self._loads = loads
        self._upload = open_upload(pages, open_device(pages.device)) if upload is None else upload
        self._changed = Condition()
        self._enqueued: list[DeviceEvent] = []  # after layer 0, 1, ...: the loader goes through them in order
        self._ended = False  # the loader: nothing more will be enqueued
        self._taken: set[int] = set()  # layers the launching thread has copied
        self._last: DeviceEvent | None = None  # after all the loader enqueued; valid once its future is done
        self._ready = 0  # leading layers that are enqueued or taken
        self._free: DeviceEvent | None = None
        self._future: Future[None] | None = None

    def start(self, workers: Workers) -> None:
        """Begin on a loader thread. Nothing is copied before what the calling thread has launched so far: it
        may still read what was in these pages.
        """
        self._free = self._upload.device.launched()
        self._future = workers.submit(self._run)

    def wait(self, layer: int, max_wait_s: float) -> None:
        """Return when what the calling thread launches next may read the layers up to `layer`."""
        for missing in range(self._ready, layer + 1):
            if not self._await_enqueued(missing, max_wait_s):
                self.takeovers += 1
                self._take_over(missing)
            self._ready = missing + 1
        with self._changed:
            event = self._enqueued[min(layer, len(self._enqueued) - 1)] if self._enqueued else None
        if event is not None:
            self._upload.device.wait(event)

    def finish(self) -> None:
        """Wait until nothing of this load is on its way, see that every layer is in place, let the pages go.

        Copies of other loads, enqueued later, are not waited for.
        """
        if self._future is not None:
            wait_for_futures([self._future])
            if not self._future.cancelled() and self._future.exception() is not None:
                logger.error("a layer load failed, the forward copied instead: %r", self._future.exception())
        for layer in range(len(self._enqueued), self.layers):
            if layer not in self._taken:
                self._take_over(layer)
        if self._last is not None:
            self._last.synchronize()
        for pinned, _ in self._loads:
            pinned.release()

    def _await_enqueued(self, layer: int, max_wait_s: float) -> bool:
        """Whether the loader has enqueued `layer`, once it has, has ended, or `max_wait_s` are over."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or layer < len(self._enqueued), max_wait_s)
            return layer < len(self._enqueued)

    def _take_over(self, layer: int) -> None:
        """Copy a layer in the calling thread, in the line of what it launches."""
        for _, runs in self._loads:
            self._pages.to_device(layer, self._memory.layer(layer), runs)
        with self._changed:
            self._taken.add(layer)

    def _run(self) -> None:
        """The loader."""
        queue = self._upload.queue
        try:
            if self._free is not None:
                queue.follow(self._free)
            for layer in range(self.layers):
                self._enqueue(layer)
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            # Also for a layer that failed half way: what was enqueued of it still runs.
            self._last = queue.record()

    def _enqueue(self, layer: int) -> None:
        with self._changed:
            taken = layer in self._taken
        if not taken:
            for _, runs in self._loads:
                self._upload.send(layer, self._memory.layer(layer), runs)
        event = self._upload.queue.record()
        with self._changed:
            self._enqueued.append(event)
            self._changed.notify_all()


class LayerCounter:
    """What the KV pool asks before it hands out a layer. One batch is the consumer at a time.

    `consumer_index` and `num_layers` are read by SGLang: before it replays a whole prefill as one CUDA graph
    it waits for the last layer alone, if the batch loads anything.
    """

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._loads: dict[int, LayerLoad] = {}
        self._next = 0
        self._current: LayerLoad | None = None
        self.consumer_index = -1
        self.takeovers = 0

    @property
    def num_layers(self) -> int:
        """Layers of the load of the current batch; 0 when it loads nothing."""
        return 0 if self._current is None else self._current.layers

    def add(self, load: LayerLoad) -> int:
        """Enter a batch's load; returns the index the scheduler knows it by."""
        index = self._next
        self._next += 1
        self._loads[index] = load
        return index

    def set_consumer(self, index: int) -> None:
        """The next forward belongs to batch `index` (-1: to one that loads nothing)."""
        self._current = self._loads.get(index)
        self.consumer_index = -1 if self._current is None else index

    def wait_until(self, threshold: int) -> None:
        """Called by the pool before layer `threshold` is read; those before it are in place then, too."""
        if self._current is not None:
            self._current.wait(threshold, self._max_wait_s)

    def finish(self, index: int) -> None:
        """Wait for batch `index` and forget it."""
        load = self._loads.pop(index, None)
        if load is None:
            return
        if load is self._current:
            self.set_consumer(-1)
        load.finish()
        self.takeovers += load.takeovers

    def reset(self) -> None:
        """Wait for all."""
        for index in list(self._loads):
            self.finish(index)

    def check(self) -> list[str]:
        """Problems found when no batch is under way; empty when sound."""
        return [f"batch {index}: its load was never finished" for index in self._loads]

"""A device without a model: a pool of pages, a tree of page names, and something that makes a page's true KV.

It is strict where the real one would quietly make wrong KV: a slice needs its block's layer before, and every
earlier page of its own layer in place and right.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np

from sgl_krul.restore.cost import ComputeSample, LoadSample
from sgl_krul.restore.rate_book import RateBook
from sgl_krul.service.prepared import Prepared
from tests.sessions import LAYOUT, PAGE, hash_pages, true_kv


def teach(book: RateBook, *, bytes_per_s: float, s_per_token: float) -> None:
    """Samples of an SSD and of a model that are so fast."""
    slices = [
        ComputeSample(first, tokens, kv_only, s_per_token * tokens * (0.1 if kv_only else 1.0))
        for first in (0, 256, 512, 1024)
        for tokens in (64, 128, 256, 512)
        for kv_only in (False, True)
    ]
    book.observe_compute(slices)
    book.observe_load([LoadSample("ssd", size, size / bytes_per_s, 1) for size in (4096, 65536, 1 << 20) * 4])


class FakeDevice:
    """`pages` pool pages. `slice_s`: how long a slice takes. `fails_at`: a layer whose compute raises. `bug`:
    what begins a block raises.
    """

    def __init__(self, pages: int = 64, *, slice_s: float = 0.0, refuses: str = "") -> None:
        self.pool = np.zeros((LAYOUT.layers, pages, LAYOUT.page_segment_bytes), np.uint8)
        self.free = list(range(pages))
        self.tree: dict[str, int] = {}
        self.pinned: dict[str, int] = {}
        self.refuses_recompute = refuses
        self.slice_s = slice_s
        self.fails_at: int | None = None
        self.bug = False
        self.epoch = 0
        self.slices = 0
        self.longest = 0  # tokens of a slice
        self.mistakes: list[str] = []  # slices that could not follow
        self.reserved = 0

    def hashes(self, prepared: Prepared) -> tuple[str, ...]:
        """Names of all pages that can be restored."""
        return hash_pages(prepared.key, prepared.token_ids[: prepared.tokens])

    def on_device(self, prepared: Prepared) -> int:
        """See Device."""
        names = self.hashes(prepared)
        return PAGE * next((n for n, name in enumerate(names) if name not in self.tree), len(names))

    def reserve(self, prepared: Prepared) -> FakeReservation | None:
        """See Device. Nothing is evicted."""
        names = self.hashes(prepared)
        start = self.on_device(prepared) // PAGE
        if len(names) - start > len(self.free):
            return None
        places = [self.free.pop() for _ in names[start:]]
        self.reserved += len(places)
        for place in places:
            self.pool[:, place] = 0xEE  # whatever was there
        return FakeReservation(self, names, [self.tree[name] for name in names[:start]], places)

    def calibration(self) -> Iterator[ComputeSample]:
        """See Device."""
        for first in (0, 512, 1024, 2048):
            for tokens in (64, 128, 256, 512):
                for kv_only in (False, True):
                    seconds = 1e-5 * tokens * (0.1 if kv_only else 1 + first * 1e-4)
                    yield ComputeSample(first, tokens, kv_only, seconds + 1e-4)

    def flush(self) -> None:
        """Everything on the device goes."""
        self.epoch += 1
        self.tree.clear()
        self.pinned.clear()
        self.free = list(range(self.pool.shape[1]))
        self.reserved = 0

    def check(self) -> list[str]:
        """Leaks, and wrong pages in the tree."""
        problems = list(self.mistakes)
        problems += [f"{name} is pinned" for name, count in self.pinned.items() if count]
        if self.reserved:
            problems.append(f"{self.reserved} pages are reserved")
        if len(self.free) + len(self.tree) != self.pool.shape[1]:
            problems.append(f"{len(self.free)} free and {len(self.tree)} cached of {self.pool.shape[1]}")
        return problems + [
            f"{name} is wrong" for name, place in self.tree.items() if not self.right(name, place)
        ]

    def right(self, name: str, place: int) -> bool:
        """Whether a pool page holds what the page's tokens make."""
        return all(bytes(self.pool[n, place]) == true_kv(name, n) for n in range(LAYOUT.layers))


class FakeReservation:
    """See Reservation."""

    def __init__(
        self, device: FakeDevice, names: tuple[str, ...], there: list[int], places: list[int]
    ) -> None:
        self.start = PAGE * len(there)
        self.target = self
        self._device = device
        self._epoch = device.epoch
        self._names = names
        self._there = there
        self._places = there + places
        self._closed = False
        self._lock = threading.Lock()
        self._blocks: dict[int, tuple[int, int]] = {}  # start -> end, layer done
        for name in names[: len(there)]:
            device.pinned[name] = device.pinned.get(name, 0) + 1

    @property
    def revoked(self) -> bool:
        """See Reservation."""
        return self._device.epoch != self._epoch

    def write(self, layer: int, first_page: int, rows: np.ndarray) -> None:
        """See Target."""
        with self._lock:
            if self._closed:
                return
            for offset, row in enumerate(rows):
                if first_page + offset >= len(self._there):
                    self._device.pool[layer, self._places[first_page + offset]] = row

    def compute(self, start: int, end: int, layer: int, *, kv_only: bool) -> None:
        """See Reservation."""
        try:
            self._compute(start, end, layer, kv_only)
        except (AssertionError, KeyError) as error:  # whoever called takes it for a model's failure
            self._device.mistakes.append(f"[{start}, {end}) in layer {layer}: {error!r}")
            raise

    def _compute(self, start: int, end: int, layer: int, kv_only: bool) -> None:
        device = self._device
        device.slices += 1
        device.longest = max(device.longest, end - start)
        if device.fails_at == layer:
            raise RuntimeError("no such kernel")
        if layer:
            last_end, last_layer = self._blocks[start]
            assert last_layer == layer - 1, "the layer before was not computed"
            assert end <= last_end, "a block can't grow"
        time.sleep(device.slice_s)
        for page in range(start // PAGE):
            if layer or not kv_only:
                good = bytes(device.pool[layer, self._places[page]]) == true_kv(self._names[page], layer)
                assert good, f"page {page} was not in place when [{start}, {end}) ran in layer {layer}"
        for page in range(start // PAGE, end // PAGE):
            kv = np.frombuffer(true_kv(self._names[page], layer), np.uint8)
            device.pool[layer, self._places[page]] = kv
        self._blocks[start] = (end, layer)
        if kv_only:
            del self._blocks[start]

    def drop_blocks(self) -> None:
        """See Reservation."""
        if self._device.bug:
            raise RuntimeError("a bug of the engine")
        self._blocks.clear()

    def keep(self, tokens: int) -> FakePin:
        """See Reservation."""
        self._close()
        kept = max(tokens // PAGE, len(self._there))
        for name, place in zip(
            self._names[len(self._there) : kept], self._places[len(self._there) : kept], strict=True
        ):
            if name in self._device.tree:
                self._device.free.append(place)
            else:
                self._device.tree[name] = place
        self._device.free += self._places[max(kept, len(self._there)) :]
        self._unhold()
        return FakePin(self._device, self._names[:kept])

    def give_back(self) -> None:
        """See Reservation."""
        self._close()
        if not self.revoked:
            self._device.free += self._places[len(self._there) :]
            self._unhold()

    def _close(self) -> None:
        with self._lock:
            self._closed = True

    def _unhold(self) -> None:
        self._device.reserved -= len(self._places) - len(self._there)
        for name in self._names[: len(self._there)]:
            self._device.pinned[name] -= 1


class FakePin:
    """Pages that stay."""

    def __init__(self, device: FakeDevice, names: tuple[str, ...]) -> None:
        self._device = device
        self._epoch = device.epoch
        self._names = names
        for name in names:
            device.pinned[name] = device.pinned.get(name, 0) + 1

    def release(self) -> None:
        """Once."""
        names, self._names = self._names, ()
        if self._device.epoch == self._epoch:
            for name in names:
                self._device.pinned[name] -= 1

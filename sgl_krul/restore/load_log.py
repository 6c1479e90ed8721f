"""What the loaders of one restore did: a report, samples for the rate book, spans of the timeline."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from threading import Lock

from sgl_krul.errors import StoreError
from sgl_krul.restore.chunk_reader import Ending, why_lost
from sgl_krul.restore.cost import LandSample, LoadSample
from sgl_krul.restore.streams import Claim
from sgl_krul.restore.timeline import Span, Timeline

__all__ = ["LoadLog", "LoadReport", "Timed"]

_MAX_SAMPLES = 1024


@dataclass
class LoadReport(Ending):
    """What was loaded. `bytes_read`: by tier ("memory": pages that were there), also what was dropped.

    `wasted_bytes`: of those, what was not needed any more or not intact. `cells`: segments that reached the
    target. `corrupt_chunks` counts copies, and is there at the end; the other two count chunks of `lost`.
    `cut` says why the first chunk was lost, or that loading ended early; `miss` the same in one word
    (missing, corrupt, unavailable, cancelled). Empty: neither.
    """

    bytes_read: Counter[str] = field(default_factory=Counter)
    wasted_bytes: int = 0
    cells: int = 0
    corrupt_chunks: int = 0
    missing_chunks: int = 0
    unavailable_chunks: int = 0
    lost: list[int] = field(default_factory=list)


@dataclass
class Timed:
    """A transfer under way. `in_flight`: how many there were at its begin or end, whichever is more."""

    size_bytes: int
    in_flight: int
    seconds: float = 0.0


class LoadLog:
    """Thread safe. `clock` gives seconds since the restore began."""

    def __init__(self, timeline: Timeline, clock: Callable[[], float], page_size: int) -> None:
        self.report = LoadReport()
        self._samples: deque[LoadSample] = deque(maxlen=_MAX_SAMPLES)
        self._land_samples: deque[LandSample] = deque(maxlen=_MAX_SAMPLES)
        self._timeline = timeline
        self._clock = clock
        self._page_size = page_size
        self._lock = Lock()
        self._in_flight: Counter[str] = Counter()

    @property
    def samples(self) -> list[LoadSample]:
        """Of the last transfers that went well."""
        with self._lock:
            return list(self._samples)

    @property
    def land_samples(self) -> list[LandSample]:
        """Of the last claims that were wanted to the last layer."""
        with self._lock:
            return list(self._land_samples)

    @contextmanager
    def transfer(self, tier: str, size_bytes: int) -> Iterator[Timed]:
        """Bytes come from a tier inside, `size_bytes` of what it gives: a sample, unless it fails."""
        with self._lock:
            self._in_flight[tier] += 1
            timed = Timed(size_bytes, self._in_flight[tier])
        began = self._clock()
        try:
            yield timed
            timed.seconds = self._clock() - began
            with self._lock:
                timed.in_flight = max(timed.in_flight, self._in_flight[tier])
                self.report.bytes_read[tier] += timed.size_bytes
                if timed.size_bytes:
                    sample = LoadSample(tier, timed.size_bytes, timed.seconds, timed.in_flight)
                    self._samples.append(sample)
        finally:
            with self._lock:
                self._in_flight[tier] -= 1

    def placed(
        self,
        claim: Claim,
        pages: range,
        layer_bytes: int,
        written: Sequence[bool],
        began: float,
        tier: str,
        *,
        dropped_bytes: int,
    ) -> None:
        """A claim has been dealt with: which of its layers were written. The others were in vain, and
        `dropped_bytes` of each had been read.
        """
        now, layer = self._clock(), claim.first_layer
        for kept, group in groupby(written):
            layers = len(list(group))
            run = Claim(claim.chunk, layer, layers)
            size = layers * (layer_bytes if kept else dropped_bytes)
            self._span(run, pages, (began, now), size, tier if kept else "wasted")
            layer += layers
            with self._lock:
                self.report.cells += layers * kept
                self.report.wasted_bytes += 0 if kept else size

    def landed(self, size_bytes: int, seconds: float) -> None:
        """Bytes were verified and written."""
        with self._lock:
            self._land_samples.append(LandSample(size_bytes, seconds))

    def failed(self, claim: Claim, pages: range, wasted_bytes: int, began: float) -> None:
        """A claim could not be read from a tier, or not intact."""
        with self._lock:
            self.report.wasted_bytes += wasted_bytes
        self._span(claim, pages, (began, self._clock()), wasted_bytes, "failed")

    def lost(self, claim: Claim, pages: range, error: StoreError) -> None:
        """No tier has the chunk."""
        miss, cut = why_lost(error)
        with self._lock:
            self.report.lost.append(claim.chunk)
            self.report.missing_chunks += miss == "missing"
            self.report.unavailable_chunks += miss == "unavailable"
            self.report.end(miss, cut)
        now = self._clock()
        self._span(claim, pages, (now, now), 0, "hole")

    def cancelled(self, why: str) -> None:
        """Loading ends early."""
        with self._lock:
            self.report.end("cancelled", why)

    def check(self) -> list[str]:
        """Problems found once nothing is under way."""
        with self._lock:
            return [f"loader: {n} reads of {tier} are under way" for tier, n in self._in_flight.items() if n]

    def _span(self, run: Claim, pages: range, times: tuple[float, float], size: int, note: str) -> None:
        first_token, tokens = pages.start * self._page_size, len(pages) * self._page_size
        self._timeline.add(Span("load", *times, first_token, tokens, run.first_layer, run.layers, size, note))

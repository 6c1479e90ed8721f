"""The load stream of a restore to the device: segments from the tiers and from memory to reserved slots.

A loader takes what `Streams.claim` gives, from the end of the session backwards. Pages that memory has pinned
go from the arena straight to the target. Others are fetched into staging, one read for all layers of the
claim, and all of them are verified before one of their bytes reaches a slot (invariant 1). Coded ones are
decoded there; where a layer is coded on another one, that one's bytes come with it, for both. What has been
computed meanwhile is dropped. A chunk that one tier has lost or damaged comes from the next; one that none
has is a hole, which the streams are told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sgl_krul.codec.coder import ChunkCoder
from sgl_krul.errors import Corrupt
from sgl_krul.layout import KvLayout
from sgl_krul.restore.chunk_reader import READ_ERRORS, ChunkCopies, ChunkCopy, ChunkReader, Reach
from sgl_krul.restore.coded_bytes import staged_bytes
from sgl_krul.restore.cost import LandSample, LoadSample
from sgl_krul.restore.load_log import LoadLog, LoadReport
from sgl_krul.restore.pace import Pace
from sgl_krul.restore.pipeline import RestoreReport
from sgl_krul.restore.segment_fetch import STORED_MODES, SegmentFetch
from sgl_krul.restore.staging import Staging
from sgl_krul.restore.streams import Claim, Streams
from sgl_krul.restore.task_group import TaskGroup
from sgl_krul.restore.timeline import Timeline
from sgl_krul.session.record import ChunkRef
from sgl_krul.store.memory import MemoryTier, PinnedPages, runs
from sgl_krul.store.tier import Tier
from sgl_krul.store.workers import Workers

__all__ = ["ChunkSource", "SegmentLoader", "Target"]

_NOT_NOW_S = 0.005  # until a loader asks again whether compute needs it
_WAITED_S = 1e-3  # a longer wait for staging is no work, and not shown as such

Rows = NDArray[np.uint8]  # [pages, page segment bytes]


class Target(Protocol):
    """Where the pages go: the reserved slots of the device."""

    def write(self, layer: int, first_page: int, rows: Rows) -> None:
        """Copy `rows` (uint8 [pages, page_segment_bytes]) to the pages from `first_page` on, counted from the
        session's first. From any thread; returns when the bytes have landed.
        """
        ...


class ChunkSource(NamedTuple):
    """Where a chunk is. `first_page`: counted from the session's first. `keys`: tier name -> its key there,
    where that is not `ref.key`. `pinned`: all of its pages, if memory has them; the loader releases them.
    """

    ref: ChunkRef
    first_page: int
    keys: Mapping[str, str]
    pinned: PinnedPages | None = None

    @property
    def pages(self) -> range:
        """Its pages, counted from the session's first."""
        return range(self.first_page, self.first_page + self.ref.pages)


@dataclass(eq=False)
class _Chunk:
    source: ChunkSource
    copies: ChunkCopies
    known: bool = False  # its header is asked for
    entered: bool = False  # a claim of it was taken
    lost: bool = False


class SegmentLoader:
    """Loads `sources` (one for each chunk of `streams`, in their order) with `loaders` tasks at once.
    `coders`: by plan id, for those that are coded.

    A task deals with one claim, then goes to the end of the queue of `workers`: restores side by side take
    turns. `done` ends when no task is left: nothing was or will be written after it, no staging is held and
    the pins are released. Its exception is a bug; then the streams are stopped. What else goes wrong is in
    `report`. `clock`: seconds since the restore began.

    Raises:
        ValueError: a segment that is larger than all of `staging`, or pins that are not the chunk's pages.
    """

    def __init__(
        self,
        streams: Streams,
        sources: Sequence[ChunkSource],
        tiers: Sequence[Tier],
        memory: MemoryTier,
        target: Target,
        layout: KvLayout,
        namespace: str,
        workers: Workers,
        *,
        staging: Staging,
        timeline: Timeline,
        clock: Callable[[], float],
        loaders: int = 2,
        coders: Mapping[str, ChunkCoder] = MappingProxyType({}),
    ) -> None:
        self._streams = streams
        self._memory = memory
        self._target = target
        self._page_bytes = layout.page_segment_bytes
        self._page_size = layout.page_size
        self._staging = staging
        self._clock = clock
        self._loaders = loaders
        self._tiers = [tier.name for tier in tiers]
        reader = ChunkReader(tiers, layout, namespace, modes=STORED_MODES, reach=Reach(), clock=clock)
        self._chunks = [_Chunk(source, reader.copies(source.ref, source.keys)) for source in sources]
        largest = max((source.ref.pages for source in sources), default=1) * self._page_bytes
        self._pace = Pace(largest)
        self._log = LoadLog(timeline, clock, layout.page_size)
        self._fetch = SegmentFetch(reader, self._page_bytes, staging, self._pace, self._log, coders)
        self._check_sizes()
        self._lock = Lock()
        self._tasks = TaskGroup(workers, on_stop=self._stopping, on_end=self._end)

    @property
    def done(self) -> Future[None]:
        """Ends with the last task."""
        return self._tasks.done

    @property
    def report(self) -> LoadReport:
        """What was loaded so far."""
        return self._log.report

    @property
    def samples(self) -> list[LoadSample]:
        """How long reads took, those of the last thousand that went well. "memory": writes from there."""
        return self._log.samples

    @property
    def land_samples(self) -> list[LandSample]:
        """How long it took to verify what was read and to write it, of the last thousand."""
        return self._log.land_samples

    def start(self) -> None:
        """Begin; returns at once. Once only."""
        self._tasks.start(self._loaders, self._turn)

    def cancel(self) -> None:
        """No further read or write is begun; returns at once. `done` follows what is under way.

        The streams go on: what was claimed may be computed. Before `start`, it ends at once.
        """
        self._tasks.stop("cancelled")

    def enter(self, report: RestoreReport) -> None:
        """Add what was loaded so far to the report of the restore. If the streams did not get to the end,
        and a chunk was lost, that is why.
        """
        mine = self._log.report
        report.bytes_read += sum(size for tier, size in mine.bytes_read.items() if tier in self._tiers)
        report.corrupt_chunks += sum(chunk.copies.damaged for chunk in self._chunks)
        report.missing_chunks += mine.missing_chunks
        used = [tier for tier in self._tiers if mine.bytes_read[tier]]
        report.origin = used[-1] if used else report.origin
        ends = self._streams.grid.ends
        if mine.lost and self._streams.placed_tokens(self._streams.view()) < ends[-1]:
            report.end(mine.miss, mine.cut)

    def check(self) -> list[str]:
        """Problems found; empty when sound."""
        problems = self._tasks.check()
        if self._tasks.ended:
            problems += self._fetch.check() + self._log.check()
        return problems

    # -- tasks --

    def _stopping(self, why: str, bug: BaseException | None) -> None:
        self._log.cancelled(why)
        if bug is not None:
            self._streams.stop()
        self._staging.wake()

    def _end(self) -> None:
        """The pages of the session age like any others from now on, the last one first."""
        for chunk in reversed(self._chunks):
            if chunk.source.pinned is not None:
                chunk.source.pinned.release()
        self.report.corrupt_chunks = sum(chunk.copies.damaged for chunk in self._chunks)

    def _turn(self) -> None:
        """Deal with one claim, and queue again."""
        claim = None if self._tasks.stopped.is_set() else self._streams.claim(self._pace.claim_bytes)
        if claim is None:
            return
        if not claim.layers:
            self._tasks.stopped.wait(_NOT_NOW_S)
            self._tasks.spawn(self._turn)
            return
        chunk = self._chunks[claim.chunk]
        if chunk.source.pinned is not None:
            self._from_memory(chunk.source, claim, chunk.source.pinned)
        else:
            self._peek_beside(claim.chunk)
            for part in self._parts(claim, staged_bytes(chunk.source.ref, self._page_bytes)):
                self._from_tiers(chunk, part)
        self._tasks.spawn(self._turn)

    def _parts(self, claim: Claim, layer_bytes: int) -> Iterator[Claim]:
        """The claim, deepest layers first, in parts that staging can hold."""
        most = max(1, self._staging.capacity_bytes // layer_bytes)
        end = claim.first_layer + claim.layers
        while end > claim.first_layer:
            first = max(claim.first_layer, end - most)
            yield Claim(claim.chunk, first, end - first)
            end = first

    def _peek_beside(self, number: int) -> None:
        """At the first claim of a chunk, have the header of the next one read by somebody meanwhile."""
        with self._lock:
            chunk = self._chunks[number]
            grid = self._streams.grid
            beside = [n for n in (number - 1, number + 1) if 0 <= n < len(grid.ends)]
            wanted = [self._chunks[n] for n in beside if grid.ends[n] > grid.start]
            ahead = [other for other in wanted if not other.known]
            entered, chunk.entered, chunk.known = chunk.entered, True, True
            if entered or not ahead or ahead[0].source.pinned is not None:
                return
            ahead[0].known = True
        self._tasks.spawn(self._peek, ahead[0].copies)

    def _peek(self, copies: ChunkCopies) -> None:
        if not self._tasks.stopped.is_set():
            copies.open()

    # -- one claim --

    def _from_memory(self, source: ChunkSource, claim: Claim, pinned: PinnedPages) -> None:
        """From the arena, a run of slots at a time. Memory was verified when it was filled."""
        places = runs(pinned.slots, np.arange(pinned.slots.size, dtype=np.int64))

        def pieces(layer: int) -> Iterable[tuple[int, Rows]]:
            arena = self._memory.layer(layer)
            return [(source.first_page + page, arena[slot : slot + n]) for slot, page, n in places]

        began = self._clock()
        size = source.ref.pages * self._page_bytes
        with self._log.transfer(self._memory.name, claim.layers * size) as timed:
            written = self._write(claim, pieces)
            timed.size_bytes = sum(written) * size
        self._log.placed(claim, source.pages, size, written, began, self._memory.name, dropped_bytes=0)

    def _from_tiers(self, chunk: _Chunk, claim: Claim) -> None:
        """From the first tier that has the chunk intact."""
        source = chunk.source
        joined = self._streams.join(
            claim.chunk, self._fetch.bases(source.ref, claim.first_layer, claim.layers)
        )
        claims = [claim, *(Claim(claim.chunk, layer, 1) for layer in joined)]
        while not self._tasks.stopped.is_set():
            began = self._clock()
            copy = chunk.copies.open()
            if copy is None:
                self._lose(chunk, claim)
                return
            try:
                self._bring(source, copy, claims, began)
                return
            except READ_ERRORS as error:
                chunk.copies.failed(copy, error)
                read = isinstance(error, Corrupt) and error.reason == "checksum"
                wasted = claim.layers * source.ref.pages * self._page_bytes if read else 0
                self._log.failed(claim, source.pages, wasted, began)

    def _bring(self, source: ChunkSource, copy: ChunkCopy, claims: Sequence[Claim], began: float) -> None:
        """Read, verify and write the segments of some claims. Nothing is written unless all are intact.

        Raises:
            Corrupt, Missing, StoreUnavailable
        """
        layers = [claim.first_layer + n for claim in claims for n in range(claim.layers)]
        asked = self._clock()
        first_token = source.first_page * self._page_size
        with self._fetch.room(copy, layers, first_token, self._tasks.stopped) as room:
            if room is None:
                return
            if self._clock() - asked > _WAITED_S:
                began = self._clock()
            verify = self._fetch.read(copy, room)
            fetched = self._clock()
            verify()
            written = [
                self._write(claim, lambda layer: [(source.first_page, room.rows[layer])]) for claim in claims
            ]
            if all(map(all, written)):
                self._log.landed(room.fetched_bytes, self._clock() - fetched)
            size = room.fetched_bytes // len(layers)
        for claim, done in zip(claims, written, strict=True):
            self._log.placed(claim, source.pages, size, done, began, copy.tier.name, dropped_bytes=size)

    def _write(self, claim: Claim, pieces: Callable[[int], Iterable[tuple[int, Rows]]]) -> list[bool]:
        """Write the layers that are still wanted, the deepest first; which were, in layer order."""
        written = [False] * claim.layers
        for index in reversed(range(claim.layers)):
            layer = claim.first_layer + index
            if self._tasks.stopped.is_set() or not self._streams.may_write(claim.chunk, layer):
                continue
            for first_page, rows in pieces(layer):
                self._target.write(layer, first_page, rows)
            self._streams.loaded(claim.chunk, layer)
            written[index] = True
        return written

    def _lose(self, chunk: _Chunk, claim: Claim) -> None:
        with self._lock:
            lost, chunk.lost = chunk.lost, True
        if not lost:
            self._log.lost(claim, chunk.source.pages, chunk.copies.error)
        self._streams.lost(claim.chunk)

    def _check_sizes(self) -> None:
        sizes = [staged_bytes(chunk.source.ref, self._page_bytes) for chunk in self._chunks]
        largest = max(sizes, default=0)
        if largest > self._staging.capacity_bytes:
            raise ValueError(
                f"staging of {self._staging.capacity_bytes} bytes: a segment takes {largest}; give more"
            )
        for chunk in self._chunks:
            pinned = chunk.source.pinned
            if pinned is not None and pinned.slots.size != chunk.source.ref.pages:
                raise ValueError(
                    f"{pinned.slots.size} pages are pinned, the chunk has {chunk.source.ref.pages}"
                )

"""Bring a paused session from slower tiers into the memory tier: read, verify, publish, chunk by chunk.

Nothing from a store is trusted: the chunk's header must be the one the manifest promises (`chunk_reader`),
and every segment must match its checksum before its pages can be found by anyone. A chunk that one tier has
lost or damaged is taken from the next that has the session. What none of them has is a miss; the restore is
cut there and the rest of the session is computed again (invariant 1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Event
from typing import NamedTuple, Protocol

import numpy as np

from sgl_krul.codec.frame import token_digest, verify_segment
from sgl_krul.layout import KvLayout
from sgl_krul.restore.chunk_reader import (
    READ_ERRORS,
    ChunkCopies,
    ChunkCopy,
    ChunkReader,
    Ending,
    keys_of,
    names_in,
    why_lost,
)
from sgl_krul.session.record import ChunkRef, Manifest, page_key
from sgl_krul.store.memory import MemoryTier, PageReservation, PinnedPages
from sgl_krul.store.tier import Tier
from sgl_krul.store.workers import Workers

__all__ = ["OwnChunk", "Pin", "RestoreReport", "Restorer", "count_own_chunks", "own_chunks"]


class OwnChunk(NamedTuple):
    """A chunk of the manifest's own tokens; its first page, counted from the session's; its pages' keys."""

    ref: ChunkRef
    first_page: int
    keys: tuple[str, ...]


def own_chunks(manifest: Manifest) -> list[OwnChunk]:
    """The leading chunks that are of the manifest's own tokens, with the names of their pages in memory."""
    hashes, first = manifest.hashes, 0
    chunks = []
    for ref in manifest.chunks[: count_own_chunks(manifest)]:
        keys = tuple(page_key(manifest.namespace, h) for h in hashes[first : first + ref.pages])
        chunks.append(OwnChunk(ref, first, keys))
        first += ref.pages
    return chunks


def count_own_chunks(manifest: Manifest) -> int:
    """How many leading chunks have the token digest of the manifest's own tokens; all, if it does not lie."""
    token_ids = np.frombuffer(manifest.token_ids, "<i4")
    end = 0
    for count, ref in enumerate(manifest.chunks):
        start, end = end, end + ref.tokens
        if token_digest(token_ids[start:end]) != ref.token_digest:
            return count
    return len(manifest.chunks)


class Pin(Protocol):
    """Pages that stay where they are until they are released."""

    def release(self) -> None:
        """Let them age like any others. Again: nothing."""
        ...


@dataclass
class RestoreReport(Ending):
    """What a restore did. `cut` says why it ended early ("" when the whole session came), `miss` the same in
    one word: missing, corrupt, unavailable, deadline, no_room, stale, partial, coded, cancelled, recompute.
    `origin` is the slowest tier that bytes came from. `private`: the pages are in the session's private
    namespace of this number, since not all of them are exact; `manifest` names them as they are called there.
    Of the first `duplicated_tokens` memory has exact pages too, which others may use.
    """

    manifest: Manifest | None = None
    tiers: tuple[str, ...] = ()
    tokens: int = 0
    from_memory_tokens: int = 0
    bytes_read: int = 0
    corrupt_chunks: int = 0
    missing_chunks: int = 0
    origin: str = ""
    private: int | None = None
    duplicated_tokens: int = 0
    pins: list[Pin] = field(default_factory=list)

    def end_of_own_chunks(self) -> None:
        """The manifest names a chunk that is not of its tokens: nothing from there on."""
        self.corrupt_chunks += 1
        self.end("corrupt", "corrupt manifest (identity: token_digest of a chunk is not of its tokens)")

    def release(self) -> None:
        """Let the restored pages age like any others, the last one of the session first."""
        for pinned in reversed(self.pins):
            pinned.release()
        self.pins.clear()


class _NoRoom(Exception):
    """The memory tier has no slot left that is not in use."""


class _Partial(Exception):
    """Of some layers of the chunk nothing is stored (paper mode): only the device can make them."""


class _Coded(Exception):
    """The chunk is stored under a layer plan. Memory keeps what is exact."""


@dataclass
class _Fetched:
    """One chunk in memory, pinned; `bytes_read` 0: it was there. `damaged`: copies that were no good."""

    pinned: PinnedPages
    bytes_read: int = 0
    tier: str = ""
    damaged: int = 0


class Restorer:
    """Reads chunks with a few loader workers, in order, a bounded number ahead.

    `tiers` are asked one after another for each chunk, the first that has it intact serves it.
    """

    def __init__(
        self, tiers: Sequence[Tier], memory: MemoryTier, layout: KvLayout, workers: Workers, *, ahead: int
    ) -> None:
        self._tiers = tiers
        self._memory = memory
        self._layout = layout
        self._workers = workers
        self._ahead = ahead

    def run(
        self,
        manifest: Manifest,
        *,
        copies: Mapping[str, Manifest] | None = None,
        deadline: float,
        clock: Callable[[], float],
        cancelled: Event,
    ) -> RestoreReport:
        """Restore the leading chunks of `manifest`; returns them pinned. Blocks: call it from its own worker.

        `copies`: by tier, the session's manifest there, where the same chunks may have other names.
        `deadline` is in seconds of `clock`. After it, or when `cancelled` is set, no further chunk is begun.
        """
        report = RestoreReport(manifest=manifest)
        reader, names = ChunkReader(self._tiers, self._layout, manifest.namespace), names_in(copies or {})
        waiting = deque(own_chunks(manifest))
        running: deque[tuple[OwnChunk, Future[_Fetched]]] = deque()
        try:
            while waiting or running:
                while waiting and len(running) < self._ahead and not report.cut:
                    if cancelled.is_set() or clock() > deadline:
                        why = "cancelled" if cancelled.is_set() else "deadline"
                        report.end(why, why)
                        break
                    chunk = waiting.popleft()
                    there = reader.copies(chunk.ref, keys_of(chunk.ref, names))
                    running.append((chunk, self._workers.submit(self._fetch, chunk, there)))
                if not running:
                    break
                self._collect(*running.popleft(), report)
        except BaseException:  # a bug, or a loader that was shut down: no page stays pinned for it
            for _, future in running:
                future.add_done_callback(_let_go)
            report.release()
            raise
        if len(report.pins) < len(manifest.chunks) and not report.cut:
            report.end_of_own_chunks()
        return report

    def _collect(self, chunk: OwnChunk, future: Future[_Fetched], report: RestoreReport) -> None:
        """Enter one finished chunk in the report. Chunks after a cut are let go again."""
        try:
            fetched = future.result()
        except READ_ERRORS as error:
            miss, text = why_lost(error)
            report.corrupt_chunks += miss == "corrupt"
            report.missing_chunks += miss == "missing"
            report.end(miss, text)
        except _NoRoom:
            report.end("no_room", "memory tier full")
        except _Partial:
            report.end("partial", "stored in paper mode: its first layers are recomputed on the device only")
        except _Coded:
            report.end(
                "coded", "stored under a layer plan, which is decoded for the device only: resume it there"
            )
        else:
            report.corrupt_chunks += fetched.damaged
            if report.cut:
                fetched.pinned.release()
                return
            report.pins.append(fetched.pinned)
            report.tokens += chunk.ref.tokens
            report.bytes_read += fetched.bytes_read
            report.from_memory_tokens += 0 if fetched.bytes_read else chunk.ref.tokens
            report.origin = self._slower(report.origin, fetched.tier)

    def _slower(self, one: str, other: str) -> str:
        names = ["", *(tier.name for tier in self._tiers)]
        return max(one, other, key=names.index)

    def _fetch(self, chunk: OwnChunk, copies: ChunkCopies) -> _Fetched:
        """The chunk from the first tier that has it intact; else what the fastest one's copy lacked."""
        pinned = self._memory.pin(chunk.keys)
        if pinned is not None:
            return _Fetched(pinned)
        if chunk.ref.plan_id:
            raise _Coded
        while (copy := copies.open()) is not None:
            try:
                pinned, bytes_read = self._fetch_from(copy, chunk)
            except READ_ERRORS as error:
                copies.failed(copy, error)
                continue
            return _Fetched(pinned, bytes_read, copy.tier.name, copies.damaged)
        if chunk.ref.depth:
            raise _Partial
        raise copies.error

    def _fetch_from(self, copy: ChunkCopy, chunk: OwnChunk) -> tuple[PinnedPages, int]:
        """The chunk's pages in memory, verified and pinned, and the bytes read."""
        reservation = self._memory.reserve(chunk.keys)
        if reservation is None:
            raise _NoRoom
        try:
            bytes_read = self._read_body(copy, chunk, reservation)
        except BaseException:
            self._memory.abandon(reservation)
            raise
        self._memory.publish(reservation)
        pinned = self._memory.pin(chunk.keys)
        if pinned is None:  # a page that was present at first was evicted meanwhile: nothing to hold on to
            raise _NoRoom
        return pinned, bytes_read

    def _read_body(self, copy: ChunkCopy, chunk: OwnChunk, reservation: PageReservation) -> int:
        """Read all segments straight into the reserved slots and check them; returns the bytes read."""
        buffers = self._targets(chunk, reservation)
        copy.tier.read_segments(copy.ref.key, 0, [part for layer in buffers for part in layer])
        for segment, layer in zip(copy.header.segments, buffers, strict=True):
            verify_segment(segment, layer)
        return sum(segment.length for segment in copy.header.segments)

    def _targets(self, chunk: OwnChunk, reservation: PageReservation) -> list[list[memoryview]]:
        """Per layer the buffers to read into: runs of reserved slots, scratch for pages that are there."""
        slot_of = dict(zip(reservation.keys, reservation.slots.tolist(), strict=True))
        present = [key for key in chunk.keys if key not in slot_of]
        scratch = np.empty((self._layout.layers, len(present), self._layout.page_segment_bytes), np.uint8)
        runs: list[tuple[bool, int, int]] = []  # (in the arena?, first row, rows)
        skipped = 0
        for key in chunk.keys:
            slot = slot_of.get(key)
            here = (slot is not None, skipped if slot is None else slot)
            skipped += slot is None
            if runs and runs[-1][0] == here[0] and runs[-1][1] + runs[-1][2] == here[1]:
                runs[-1] = (here[0], runs[-1][1], runs[-1][2] + 1)
            else:
                runs.append((*here, 1))
        targets: list[list[memoryview]] = []
        for index in range(self._layout.layers):
            arena, spare = self._memory.layer(index), scratch[index]
            targets.append([(arena if a else spare)[r : r + n].reshape(-1).data for a, r, n in runs])
        return targets


def _let_go(future: Future[_Fetched]) -> None:
    """Release what a loader brings that nobody waits for any more."""
    if not future.cancelled() and future.exception() is None:
        future.result().pinned.release()

"""Bring a paused session from slower tiers into the memory tier: read, verify, publish, chunk by chunk.

Nothing from a store is trusted: the chunk's header must be the one the manifest promises (namespace, chained
page hash, a digest of the manifest's own tokens, counts), and every segment must match its checksum before
its pages can be found by anyone. A chunk that one tier has lost or damaged is taken from the next that has
the session. What none of them has is a miss; the restore is cut there and the rest of the session is computed
again (invariant 1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from threading import Event

import msgspec
import numpy as np

from sgl_krul.codec.base import Mode
from sgl_krul.codec.frame import ChunkHeader, decode_header, expect, token_digest, verify_segment
from sgl_krul.errors import Corrupt, LeaseHeld, Missing, StoreError, StoreUnavailable
from sgl_krul.layout import KvLayout
from sgl_krul.session.record import ChunkRef, Manifest, page_key
from sgl_krul.store.memory import MemoryTier, PageReservation, PinnedPages
from sgl_krul.store.tier import Tier
from sgl_krul.store.workers import Workers

__all__ = ["RestoreReport", "Restorer", "count_own_chunks"]


def count_own_chunks(manifest: Manifest) -> int:
    """How many leading chunks have the token digest of the manifest's own tokens; all, if it does not lie."""
    token_ids = np.frombuffer(manifest.token_ids, "<i4")
    end = 0
    for count, ref in enumerate(manifest.chunks):
        start, end = end, end + ref.tokens
        if token_digest(token_ids[start:end]) != ref.token_digest:
            return count
    return len(manifest.chunks)


@dataclass
class RestoreReport:
    """What a restore did. `cut` says why it ended early ("" when the whole session came), `miss` the same in
    one word: missing, corrupt, unavailable, deadline, no_room, stale, cancelled. `origin` is the slowest tier
    that bytes came from.
    """

    manifest: Manifest | None = None
    tiers: tuple[str, ...] = ()
    tokens: int = 0
    from_memory_tokens: int = 0
    bytes_read: int = 0
    corrupt_chunks: int = 0
    missing_chunks: int = 0
    cut: str = ""
    miss: str = ""
    origin: str = ""
    pins: list[PinnedPages] = field(default_factory=list)

    def end(self, miss: str, cut: str) -> None:
        """Nothing more comes, for this reason; the first one counts."""
        if not self.cut:
            self.miss, self.cut = miss, cut

    def release(self) -> None:
        """Let the restored pages age like any others, the last one of the session first."""
        for pinned in reversed(self.pins):
            pinned.release()
        self.pins.clear()


Names = Mapping[str, Mapping[tuple[str, int], str]]  # tier -> (last page hash, pages) -> key of the chunk


class _NoRoom(Exception):
    """The memory tier has no slot left that is not in use."""


@dataclass(frozen=True)
class _Chunk:
    ref: ChunkRef
    keys: tuple[str, ...]


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
        names = {
            tier: {(ref.last_page_hash, ref.pages): ref.key for ref in copy.chunks}
            for tier, copy in (copies or {}).items()
        }
        waiting = deque(self._chunks(manifest))
        running: deque[tuple[_Chunk, Future[_Fetched]]] = deque()
        try:
            while waiting or running:
                while waiting and len(running) < self._ahead and not report.cut:
                    if cancelled.is_set() or clock() > deadline:
                        why = "cancelled" if cancelled.is_set() else "deadline"
                        report.end(why, why)
                        break
                    chunk = waiting.popleft()
                    running.append(
                        (chunk, self._workers.submit(self._fetch, chunk, manifest.namespace, names))
                    )
                if not running:
                    break
                self._collect(*running.popleft(), report)
        except BaseException:  # a bug, or a loader that was shut down: no page stays pinned for it
            for _, future in running:
                future.add_done_callback(_let_go)
            report.release()
            raise
        if len(report.pins) < len(manifest.chunks) and not report.cut:
            report.corrupt_chunks += 1
            report.end("corrupt", "corrupt manifest (identity: token_digest of a chunk is not of its tokens)")
        return report

    def _chunks(self, manifest: Manifest) -> list[_Chunk]:
        """The leading chunks that are of the manifest's own tokens, with the names of their pages."""
        hashes, first = manifest.hashes, 0
        chunks = []
        for ref in manifest.chunks[: count_own_chunks(manifest)]:
            keys = tuple(page_key(manifest.namespace, h) for h in hashes[first : first + ref.pages])
            chunks.append(_Chunk(ref, keys))
            first += ref.pages
        return chunks

    def _collect(self, chunk: _Chunk, future: Future[_Fetched], report: RestoreReport) -> None:
        """Enter one finished chunk in the report. Chunks after a cut are let go again."""
        try:
            fetched = future.result()
        except Corrupt as error:
            report.corrupt_chunks += 1
            report.end("corrupt", f"corrupt chunk ({error})")
        except Missing:
            report.missing_chunks += 1
            report.end("missing", "missing chunk")
        except StoreUnavailable as error:
            report.end("unavailable", f"store unavailable ({error})")
        except _NoRoom:
            report.end("no_room", "memory tier full")
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

    def _fetch(self, chunk: _Chunk, namespace: str, names: Names) -> _Fetched:
        """The chunk from the first tier that has it intact; else what the fastest one's copy lacked."""
        pinned = self._memory.pin(chunk.keys)
        if pinned is not None:
            return _Fetched(pinned)
        errors: list[StoreError] = []
        for tier in self._tiers:
            key = names.get(tier.name, {}).get((chunk.ref.last_page_hash, chunk.ref.pages), chunk.ref.key)
            there = replace(chunk, ref=msgspec.structs.replace(chunk.ref, key=key))
            try:
                pinned, bytes_read = self._fetch_from(tier, there, namespace)
            except (Corrupt, Missing, StoreUnavailable) as error:
                errors.append(error)
                self._drop_if_damaged(tier, there, error)
                continue
            damaged = sum(isinstance(error, Corrupt) for error in errors)
            return _Fetched(pinned, bytes_read, tier.name, damaged)
        raise next((error for error in errors if not isinstance(error, Missing)), errors[0])

    def _drop_if_damaged(self, tier: Tier, chunk: _Chunk, error: StoreError) -> None:
        """Delete what can never be read again. Another version or identity stays: it may be wanted."""
        if isinstance(error, Corrupt) and error.reason in ("checksum", "length"):
            try:
                tier.delete(chunk.ref.key)
            except (StoreUnavailable, LeaseHeld):
                return  # it stays, and stays a miss

    def _fetch_from(self, tier: Tier, chunk: _Chunk, namespace: str) -> tuple[PinnedPages, int]:
        """The chunk's pages in memory, verified and pinned, and the bytes read from `tier`."""
        header = self._read_header(tier, chunk, namespace)
        reservation = self._memory.reserve(chunk.keys)
        if reservation is None:
            raise _NoRoom
        try:
            bytes_read = self._read_body(tier, chunk, header, reservation)
        except BaseException:
            self._memory.abandon(reservation)
            raise
        self._memory.publish(reservation)
        pinned = self._memory.pin(chunk.keys)
        if pinned is None:  # a page that was present at first was evicted meanwhile: nothing to hold on to
            raise _NoRoom
        return pinned, bytes_read

    def _read_header(self, tier: Tier, chunk: _Chunk, namespace: str) -> ChunkHeader:
        data = tier.read_header(chunk.ref.key)
        if data is None:
            raise Missing(f"chunk {chunk.ref.key} has gone")
        header = decode_header(data)
        expect(
            header,
            namespace=namespace,
            last_page_hash=chunk.ref.last_page_hash,
            token_digest=chunk.ref.token_digest,
            tokens=chunk.ref.tokens,
        )
        length = chunk.ref.pages * self._layout.page_segment_bytes
        if len(header.segments) != self._layout.layers:
            raise Corrupt(
                "identity", f"{len(header.segments)} segments, this model has {self._layout.layers} layers"
            )
        for segment in header.segments:
            if segment.mode is not Mode.raw or segment.length != length:
                raise Corrupt("identity", f"segment of {segment.length} bytes in mode {segment.mode.value}")
        return header

    def _read_body(self, tier: Tier, chunk: _Chunk, header: ChunkHeader, reservation: PageReservation) -> int:
        """Read all segments straight into the reserved slots and check them; returns the bytes read."""
        buffers = self._targets(chunk, reservation)
        tier.read_segments(chunk.ref.key, 0, [part for layer in buffers for part in layer])
        for segment, layer in zip(header.segments, buffers, strict=True):
            verify_segment(segment, layer)
        return sum(segment.length for segment in header.segments)

    def _targets(self, chunk: _Chunk, reservation: PageReservation) -> list[list[memoryview]]:
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

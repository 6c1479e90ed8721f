"""Bring a paused session from a slow tier into the memory tier: read, verify, publish, chunk by chunk.

Nothing from the store is trusted: the chunk's header must be the one the manifest promises (namespace,
chained page hash, token digest, counts) and every segment must match its checksum before its pages can be
found by anyone. What fails is a miss; the restore is cut there and the rest of the session is computed again
(invariant 1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Event

import numpy as np

from sgl_krul.codec.base import Mode
from sgl_krul.codec.frame import ChunkHeader, decode_header, expect, verify_segment
from sgl_krul.errors import Corrupt, Missing, StoreUnavailable
from sgl_krul.layout import KvLayout
from sgl_krul.session.record import ChunkRef, Manifest, page_key
from sgl_krul.store.memory import MemoryTier, PageReservation, PinnedPages
from sgl_krul.store.tier import Tier
from sgl_krul.store.workers import Workers

__all__ = ["RestoreReport", "Restorer"]


@dataclass
class RestoreReport:
    """What a restore did. `cut` says why it ended early ("" when the whole session came)."""

    tokens: int = 0
    from_memory_tokens: int = 0
    bytes_read: int = 0
    corrupt_chunks: int = 0
    missing_chunks: int = 0
    cut: str = ""
    pins: list[PinnedPages] = field(default_factory=list)

    def release(self) -> None:
        """Let the restored pages age like any others, the last one of the session first."""
        for pinned in reversed(self.pins):
            pinned.release()
        self.pins.clear()


class _NoRoom(Exception):
    """The memory tier has no slot left that is not in use."""


@dataclass(frozen=True)
class _Chunk:
    ref: ChunkRef
    keys: tuple[str, ...]


class Restorer:
    """Reads chunks with a few loader workers, in order, a bounded number ahead."""

    def __init__(
        self, tier: Tier, memory: MemoryTier, layout: KvLayout, workers: Workers, *, ahead: int
    ) -> None:
        self._tier = tier
        self._memory = memory
        self._layout = layout
        self._workers = workers
        self._ahead = ahead

    def run(
        self, manifest: Manifest, *, deadline: float, clock: Callable[[], float], cancelled: Event
    ) -> RestoreReport:
        """Restore the leading chunks of `manifest`; returns them pinned. Blocks: call it from its own worker.

        `deadline` is in seconds of `clock`. After it, or when `cancelled` is set, no further chunk is begun.
        """
        report = RestoreReport()
        waiting = deque(self._chunks(manifest))
        running: deque[tuple[_Chunk, Future[tuple[PinnedPages, int]]]] = deque()
        try:
            while waiting or running:
                while waiting and len(running) < self._ahead and not report.cut:
                    if cancelled.is_set() or clock() > deadline:
                        report.cut = "cancelled" if cancelled.is_set() else "deadline"
                        break
                    chunk = waiting.popleft()
                    running.append((chunk, self._workers.submit(self._fetch, chunk, manifest.namespace)))
                if not running:
                    break
                self._collect(*running.popleft(), report)
        except BaseException:  # a bug, or a loader that was shut down: no page stays pinned for it
            for _, future in running:
                future.add_done_callback(_let_go)
            report.release()
            raise
        return report

    def _chunks(self, manifest: Manifest) -> list[_Chunk]:
        hashes = manifest.hashes
        chunks, first = [], 0
        for ref in manifest.chunks:
            keys = tuple(page_key(manifest.namespace, h) for h in hashes[first : first + ref.pages])
            chunks.append(_Chunk(ref, keys))
            first += ref.pages
        return chunks

    def _collect(self, chunk: _Chunk, future: Future[tuple[PinnedPages, int]], report: RestoreReport) -> None:
        """Enter one finished chunk in the report. Chunks after a cut are let go again."""
        try:
            pinned, bytes_read = future.result()
        except Corrupt as error:
            report.corrupt_chunks += 1
            self._drop_if_damaged(chunk, error)
            report.cut = report.cut or f"corrupt chunk ({error})"
        except Missing:
            report.missing_chunks += 1
            report.cut = report.cut or "missing chunk"
        except StoreUnavailable as error:
            report.cut = report.cut or f"store unavailable ({error})"
        except _NoRoom:
            report.cut = report.cut or "memory tier full"
        else:
            if report.cut:
                pinned.release()
                return
            report.pins.append(pinned)
            report.tokens += chunk.ref.tokens
            report.bytes_read += bytes_read
            report.from_memory_tokens += 0 if bytes_read else chunk.ref.tokens

    def _drop_if_damaged(self, chunk: _Chunk, error: Corrupt) -> None:
        """Delete what can never be read again. Another version or identity stays: it may be wanted."""
        if error.reason in ("checksum", "length"):
            try:
                self._tier.delete(chunk.ref.key)
            except StoreUnavailable:
                return  # it stays, and stays a miss

    def _fetch(self, chunk: _Chunk, namespace: str) -> tuple[PinnedPages, int]:
        """The chunk's pages in memory, verified and pinned, and the bytes read (0: they were there)."""
        pinned = self._memory.pin(chunk.keys)
        if pinned is not None:
            return pinned, 0
        header = self._read_header(chunk, namespace)
        reservation = self._memory.reserve(chunk.keys)
        if reservation is None:
            raise _NoRoom
        try:
            bytes_read = self._read_body(chunk, header, reservation)
        except BaseException:
            self._memory.abandon(reservation)
            raise
        self._memory.publish(reservation)
        pinned = self._memory.pin(chunk.keys)
        if pinned is None:  # a page that was present at first was evicted meanwhile: nothing to hold on to
            raise _NoRoom
        return pinned, bytes_read

    def _read_header(self, chunk: _Chunk, namespace: str) -> ChunkHeader:
        data = self._tier.read_header(chunk.ref.key)
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

    def _read_body(self, chunk: _Chunk, header: ChunkHeader, reservation: PageReservation) -> int:
        """Read all segments straight into the reserved slots and check them; returns the bytes read."""
        buffers = self._targets(chunk, reservation)
        self._tier.read_segments(chunk.ref.key, 0, [part for layer in buffers for part in layer])
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


def _let_go(future: Future[tuple[PinnedPages, int]]) -> None:
    """Release what a loader brings that nobody waits for any more."""
    if not future.cancelled() and future.exception() is None:
        future.result()[0].release()

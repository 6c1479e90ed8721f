"""What a restore to the device starts from: a session's chunks, where each lies, what is in memory."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sgl_krul.codec.coder import ChunkCoder
from sgl_krul.layout import KvLayout
from sgl_krul.restore.chunk_reader import keys_of, names_in
from sgl_krul.restore.coded_bytes import charged_bytes, staged_bytes
from sgl_krul.restore.loader import ChunkSource
from sgl_krul.restore.pipeline import RestoreReport, own_chunks
from sgl_krul.restore.planner import RestoreTask, StoredChunk
from sgl_krul.service.copies import Found
from sgl_krul.session.record import ChunkRef, SessionKey
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.tier import Tier
from sgl_krul.store.tiered import TieredStore

__all__ = ["Prepared"]

_NOWHERE = Found(("", ""))


@dataclass
class Prepared:
    """A session ready to be restored. `token_ids` are all its tokens; `chunks` cover the leading ones.

    `report` says what was wrong when there are no chunks; it goes on as the report of the restore. `coders`:
    by plan id, for the chunks that are coded.
    """

    key: SessionKey
    report: RestoreReport
    layout: KvLayout
    namespace: str
    token_ids: array[int] = field(default_factory=lambda: array("q"))
    chunks: Sequence[ChunkSource] = ()
    tiers: Sequence[Tier] = ()
    found: Found = _NOWHERE
    coders: Mapping[str, ChunkCoder] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        key: SessionKey,
        report: RestoreReport,
        found: Found,
        memory: MemoryTier,
        store: TieredStore,
        layout: KvLayout,
        namespace: str,
    ) -> Prepared:
        """A session with a manifest (`report.manifest`); without one there is nothing to restore."""
        manifest = report.manifest
        if manifest is None:
            return cls(key, report, layout, namespace, found=found)
        names = names_in(found.copies)
        chunks = [
            ChunkSource(ref, first, keys_of(ref, names), memory.pin(keys))
            for ref, first, keys in own_chunks(manifest)
        ]
        if len(chunks) < len(manifest.chunks):
            report.end_of_own_chunks()
        coders = {name: ChunkCoder(layout, plan) for name, plan in manifest.layer_plans.items()}
        tiers = found.sources(store)
        return cls(key, report, layout, namespace, manifest.token_array, chunks, tiers, found, coders)

    @classmethod
    def in_memory_only(
        cls,
        key: SessionKey,
        memory: MemoryTier,
        keys: Sequence[str],
        layout: KvLayout,
        namespace: str,
        token_ids: array[int],
        chunk_tokens: int,
    ) -> Prepared:
        """A session that rests in memory, where `keys` name its pages: the leading ones still there."""
        pages = max(1, chunk_tokens // layout.page_size)
        chunks = []
        for first in range(0, memory.leading(keys), pages):
            some = keys[first : first + pages]
            some = some[: memory.leading(some)]
            pinned = memory.pin(some) if some else None
            if pinned is None:
                break
            tokens = len(some) * layout.page_size
            ref = ChunkRef("", len(some), tokens, "", "", tokens * layout.token_bytes)
            chunks.append(ChunkSource(ref, first, {}, pinned))
            if len(some) < pages:
                break
        return cls(key, RestoreReport(), layout, namespace, token_ids, chunks)

    @property
    def tokens(self) -> int:
        """Leading tokens that can be restored."""
        return sum(source.ref.tokens for source in self.chunks)

    @property
    def largest_segment_bytes(self) -> int:
        """Staging that one layer of one chunk takes."""
        sizes = [staged_bytes(source.ref, self.layout.page_segment_bytes) for source in self.chunks]
        return max(sizes, default=0)

    @property
    def all_in_memory(self) -> bool:
        """Whether memory has every page."""
        return all(source.pinned is not None for source in self.chunks)

    @property
    def tokens_by_tier(self) -> dict[str, int]:
        """How many of them come from where."""
        counts: Counter[str] = Counter()
        for source in self.chunks:
            counts[self._tier_of(source)] += source.ref.tokens
        return dict(counts)

    def pin_in(self, report: RestoreReport) -> None:
        """All is in memory: the report takes over the pins."""
        report.pins += [source.pinned for source in self.chunks if source.pinned is not None]
        report.tokens = report.from_memory_tokens = self.tokens
        self.chunks = ()

    def limit(self, tokens: int) -> None:
        """Not more than so many leading tokens are wanted, in full pages: chunks beyond are left out."""
        kept, end = [], 0
        tokens = tokens // self.layout.page_size * self.layout.page_size
        for source in self.chunks:
            if end >= tokens:
                if source.pinned is not None:
                    source.pinned.release()
                continue
            kept.append(source)
            end += source.ref.tokens
        self.chunks = kept

    def segment_bytes(self) -> NDArray[np.int64]:
        """Bytes [chunks, layers] that can be had; 0 where a layer lies nowhere (paper mode)."""
        sizes = np.zeros((len(self.chunks), self.layout.layers), np.int64)
        for row, source in zip(sizes, self.chunks, strict=True):
            if source.pinned is None and source.ref.plan_id:
                first_token = source.first_page * self.layout.page_size
                row[:] = charged_bytes(self.coders[source.ref.plan_id], source.ref, first_token)
            else:
                depth = 0 if source.pinned is not None else source.ref.depth
                row[depth:] = source.ref.pages * self.layout.page_segment_bytes
        return sizes

    def task(self, on_device_tokens: int, new_tokens: int) -> RestoreTask:
        """The planner's view of it."""
        chunks = tuple(
            StoredChunk(source.ref.tokens, self._tier_of(source), tuple(sizes))
            for source, sizes in zip(self.chunks, self.segment_bytes().tolist(), strict=True)
        )
        return RestoreTask(
            self.layout.layers, self.layout.page_size, chunks, on_device_tokens, max(1, new_tokens)
        )

    def _tier_of(self, source: ChunkSource) -> str:
        """Where it would be taken from first."""
        if source.pinned is not None:
            return MemoryTier.name
        return self.found.tiers[0].name if self.found.tiers else ""

    def release(self) -> None:
        """Let the pinned pages go."""
        for source in self.chunks:
            if source.pinned is not None:
                source.pinned.release()
        self.chunks = ()

"""Write one session to a tier: plan which chunks are new, and land them (`session.landing` has the order).

In paper mode the first layers of a chunk, as many as its depth says, are not stored (see `paper`). Under a
layer plan its layers are coded (`codec.coder`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from sgl_krul.codec.base import Mode
from sgl_krul.codec.coder import ChunkCoder
from sgl_krul.codec.frame import (
    ChunkHeader,
    SegmentEntry,
    build_segments,
    decode_header,
    encode_header,
    expect,
    token_digest,
)
from sgl_krul.errors import Corrupt
from sgl_krul.layout import KvLayout
from sgl_krul.pause.paper import falling, settle_depths
from sgl_krul.session.landing import Landing
from sgl_krul.session.record import (
    MANIFEST_VERSION,
    MAX_LOSS,
    ChunkRef,
    Manifest,
    chunk_key,
    is_exact_chunk,
    pack_tokens,
    plans_used,
)
from sgl_krul.store.tier import Buffer, Tier
from sgl_krul.strategy.layer_plan import LayerPlan

__all__ = [
    "ChunkPlan",
    "Depths",
    "PageSource",
    "PauseReport",
    "Segments",
    "Snapshot",
    "kept_depths",
    "plan_chunks",
    "still_there",
    "write_session",
]

Segments = Sequence[Sequence[memoryview]]
Depths = Callable[[Sequence[int]], Sequence[int]]
"""From the tokens of each chunk to how many leading layers of each are not stored; never rising."""


class PageSource(Protocol):
    """Where the KV of a session's pages comes from while it is paused."""

    def segments(self, first_page: int, pages: int) -> AbstractContextManager[Segments | None]:
        """Per layer, the buffers that hold pages [first_page, first_page + pages) one after another.

        The buffers stay unchanged within the `with`. None when a page is to be had nowhere.
        """
        ...


@dataclass(frozen=True)
class Snapshot:
    """What is to be paused, frozen at the moment of asking. `page_hashes` covers all full pages.

    `exact`: the KV is what the model made. False for a session that lives in its private namespace; memory
    has its pages under `private_hashes` then, and what is stored of it is never taken for exact.
    `statistics` go into the manifest as they are; without any, those of the pause before stay.
    """

    namespace: str
    digest: str
    session_id: str
    salted: bool
    layout: KvLayout
    token_ids: Sequence[int]
    page_hashes: tuple[str, ...]
    exact: bool = True
    statistics: bytes = b""
    private_hashes: tuple[str, ...] | None = None

    @property
    def names_in_memory(self) -> tuple[str, ...]:
        """What the pages are called in memory and on the device."""
        return self.page_hashes if self.private_hashes is None else self.private_hashes


@dataclass(frozen=True)
class ChunkPlan:
    """One chunk of the new generation; `reuse` is the old chunk that holds the same bytes already, `coded`
    one that was coded from them: better than nothing.
    """

    index: int
    first_page: int
    pages: int
    tokens: int
    last_page_hash: str
    reuse: ChunkRef | None
    coded: ChunkRef | None = None


@dataclass(frozen=True)
class PauseReport:
    """What a pause did."""

    manifest: Manifest
    chunks_written: int
    chunks_kept: int
    bytes_written: int


def plan_chunks(
    snapshot: Snapshot, previous: Manifest | None, chunk_pages: int, *, coded: bool = False
) -> list[ChunkPlan]:
    """Cut the session's full pages into chunks and find which of them an earlier pause wrote already. Pure.

    A chunk is reused when its last page hash is the same: the hash is chained, so it commits to every token
    before it (and to the salt). `coded`: also one that is stored under a layer plan. Exact KV is written anew
    where an earlier pause was of a lossy session.
    """
    old = () if previous is None else previous.chunks
    kept = {(c.last_page_hash, c.pages): c for c in old if _stays(c, snapshot, coded)}
    lossy = {(c.last_page_hash, c.pages): c for c in old if c.plan_id}
    plans = []
    total = len(snapshot.page_hashes)
    for index, first in enumerate(range(0, total, chunk_pages)):
        pages = min(chunk_pages, total - first)
        last_hash = snapshot.page_hashes[first + pages - 1]
        plans.append(
            ChunkPlan(
                index=index,
                first_page=first,
                pages=pages,
                tokens=pages * snapshot.layout.page_size,
                last_page_hash=last_hash,
                reuse=kept.get((last_hash, pages)),
                coded=lossy.get((last_hash, pages)),
            )
        )
    return plans


def _stays(ref: ChunkRef, snapshot: Snapshot, coded: bool) -> bool:
    """Whether a chunk of an earlier pause will do for this one, if it holds the same tokens."""
    if not snapshot.exact:
        return True
    return coded if ref.plan_id else is_exact_chunk(ref.key)


def write_session(
    snapshot: Snapshot,
    source: PageSource,
    tier: Tier,
    *,
    chunk_tokens: int,
    now: Callable[[], float],
    generation: int = 1,
    depths: Depths | None = None,
    plan: LayerPlan | None = None,
    loss: float = 0.0,
    coded: bool = False,
) -> PauseReport:
    """Pause one session into `tier`. Blocks on I/O: call it from a worker.

    Pages are stored up to the first one that `source` does not have; the rest is recomputed at resume.
    `generation` is the least that the new manifest may have: copies in other tiers may be ahead.
    `depths` None stores every layer, and a chunk that an earlier pause stored without its first ones is
    written anew (or ends what is stored, if `source` does not have it). With `depths` such a chunk stays as
    it is, and so does a whole one; those after it are then stored no deeper.
    `coded`: what an earlier pause stored under a layer plan stays as it is, since coding what was decoded
    would lose twice; else it stays only where `source` has it no more. `plan`: how the layers of other chunks
    are coded (one of raw layers: they are not); None as those of the earlier pause, if `coded`, else raw.
    `loss`: what the session is expected to lose by the plan.

    Raises:
        ValueError: `depths` gives other than a number of layers for each chunk, or rising ones; or there are
            both `depths` and a `plan`.
        StoreFull, StoreUnavailable, LeaseHeld: the session is paused as before or not at all.
    """
    if depths is not None and plan is not None:
        raise ValueError("depths and a layer plan: what is coded is stored in all layers, give one of them")
    chunk_pages = max(1, chunk_tokens // snapshot.layout.page_size)
    with Landing(tier, snapshot.namespace, snapshot.digest) as landing:
        previous = landing.previous
        if previous is not None:
            generation = max(generation, previous.generation + 1)
            if plan is None and coded:
                plan = previous.layer_plans.get(previous.layer_plan)
            loss = max(previous.loss, loss)
        coder = None if plan is None or plan.is_exact else ChunkCoder(snapshot.layout, plan)
        plans = plan_chunks(snapshot, previous, chunk_pages, coded=coded or plan is not None)
        wanted = _wanted_depths(plans, depths, snapshot.layout.layers)
        deepest = 0 if depths is None else snapshot.layout.layers
        kept = kept_depths(plans, tier, snapshot.namespace, deepest=deepest)
        writer = _ChunkWriter(snapshot, source, landing, generation, coder)
        chunks: list[ChunkRef] = []
        for chunk, stays, depth in zip(plans, kept, settle_depths(wanted, kept), strict=True):
            ref = chunk.reuse if stays is not None else writer.write(chunk, depth)
            if ref is None:
                ref = _last_resort(chunk, tier, snapshot.namespace)
            if ref is None:
                break
            chunks.append(ref)
        if previous is not None:
            snapshot = replace(snapshot, statistics=snapshot.statistics or previous.statistics)
        manifest = _manifest(snapshot, generation, chunks, _plans(plan, previous), loss, now())
        landing.commit(manifest)
    return PauseReport(
        manifest=manifest,
        chunks_written=landing.puts,
        chunks_kept=len(chunks) - landing.puts,
        bytes_written=landing.bytes_written,
    )


def _wanted_depths(plans: Sequence[ChunkPlan], depths: Depths | None, layers: int) -> Sequence[int]:
    """What `depths` gives for the chunks, checked."""
    if depths is None:
        return [0] * len(plans)
    wanted = depths([plan.tokens for plan in plans])
    if len(wanted) != len(plans) or not falling(wanted) or not all(0 <= depth <= layers for depth in wanted):
        raise ValueError(
            f"depths {list(wanted)[:8]}: expected {len(plans)} of 0 to {layers}, none above the one before"
        )
    return wanted


def kept_depths(plans: Sequence[ChunkPlan], tier: Tier, namespace: str, *, deepest: int) -> list[int | None]:
    """The depth of each chunk that can stay as it is in the tier; None for those that are to be written.

    A chunk deeper than `deepest`, or than one that stays before it, does not stay.

    Raises:
        StoreUnavailable
    """
    kept: list[int | None] = []
    for ref in (plan.reuse for plan in plans):
        if ref is None or ref.depth > deepest or not still_there(tier, ref, namespace):
            kept.append(None)
        else:
            kept.append(ref.depth)
            deepest = ref.depth
    return kept


def still_there(tier: Tier, ref: ChunkRef, namespace: str) -> bool:
    """A reused chunk must still be what the manifest calls it (segments are checked when they are read)."""
    try:
        data = tier.read_header(ref.key)
        if data is None:
            return False
        header = decode_header(data)
        expect(
            header,
            namespace=namespace,
            last_page_hash=ref.last_page_hash,
            token_digest=ref.token_digest,
            tokens=ref.tokens,
        )
    except Corrupt:
        return False
    return header.depth == ref.depth and header.plan_id == ref.plan_name


def _last_resort(chunk: ChunkPlan, tier: Tier, namespace: str) -> ChunkRef | None:
    """What an earlier pause coded of a chunk that is nowhere else any more."""
    return chunk.coded if chunk.coded is not None and still_there(tier, chunk.coded, namespace) else None


@dataclass(frozen=True)
class _ChunkWriter:
    """Writes chunks of one pause. `coder`: None stores layers raw."""

    snapshot: Snapshot
    source: PageSource
    landing: Landing
    generation: int
    coder: ChunkCoder | None

    def write(self, chunk: ChunkPlan, depth: int) -> ChunkRef | None:
        """Write a chunk without its first `depth` layers; None when `source` does not have its pages."""
        layers = self.snapshot.layout.layers
        if depth == layers:  # nothing of it is stored, so nothing is asked for
            return self._put(chunk, (), build_segments([()] * layers, Mode.raw, depth=depth), depth)
        with self.source.segments(chunk.first_page, chunk.pages) as segments:
            if segments is None:
                return None
            if self.coder is not None:
                coded = self.coder.encode(segments, chunk.first_page * self.snapshot.layout.page_size)
                return self._put(chunk, coded.buffers, coded.entries, depth)
            body = [buffer for layer in segments[depth:] for buffer in layer]
            return self._put(chunk, body, build_segments(segments, Mode.raw, depth=depth), depth)

    def _put(
        self, chunk: ChunkPlan, body: Sequence[Buffer], entries: tuple[SegmentEntry, ...], depth: int
    ) -> ChunkRef:
        snapshot, coder = self.snapshot, self.coder
        first = chunk.first_page * snapshot.layout.page_size
        exact = snapshot.exact and coder is None
        ref = ChunkRef(
            key=chunk_key(snapshot.namespace, snapshot.digest, self.generation, chunk.index, exact=exact),
            pages=chunk.pages,
            tokens=chunk.tokens,
            last_page_hash=chunk.last_page_hash,
            token_digest=token_digest(snapshot.token_ids[first : first + chunk.tokens]),
            bytes=0,  # the tier says
            depth=depth,
            plan_id="" if coder is None else coder.plan_id,
        )
        header = ChunkHeader(
            namespace=snapshot.namespace,
            last_page_hash=ref.last_page_hash,
            token_digest=ref.token_digest,
            tokens=ref.tokens,
            plan_id=ref.plan_name,
            segments=entries,
        )
        return self.landing.put(ref, encode_header(header), body)


def _plans(plan: LayerPlan | None, previous: Manifest | None) -> dict[str, LayerPlan]:
    """The layer plans that chunks may be coded under, by id: the new one, and those of chunks that stay."""
    known = {} if previous is None else previous.layer_plans
    return known if plan is None else known | {plan.plan_id: plan}


def _manifest(
    snapshot: Snapshot,
    generation: int,
    chunks: list[ChunkRef],
    plans: Mapping[str, LayerPlan],
    loss: float,
    paused_at: float,
) -> Manifest:
    manifest = Manifest(
        version=MANIFEST_VERSION,
        namespace=snapshot.namespace,
        digest=snapshot.digest,
        session_id=snapshot.session_id,
        salted=snapshot.salted,
        generation=generation,
        page_size=snapshot.layout.page_size,
        token_ids=pack_tokens(snapshot.token_ids),
        page_hashes=b"".join(bytes.fromhex(page_hash) for page_hash in snapshot.page_hashes),
        chunks=tuple(chunks),
        exact=snapshot.exact and not any(chunk.plan_id for chunk in chunks),
        raw_bytes=0,
        stored_bytes=sum(chunk.bytes for chunk in chunks),
        paused_at=paused_at,
        plans=plans_used(plans, chunks),
        loss=min(loss, MAX_LOSS) if any(chunk.plan_id for chunk in chunks) else 0.0,
        statistics=snapshot.statistics,
    )
    return msgspec.structs.replace(manifest, raw_bytes=manifest.stored_tokens * snapshot.layout.token_bytes)

"""Write one session to a tier: plan which chunks are new, and land them (`session.landing` has the order)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from sgl_krul.codec.base import Mode
from sgl_krul.codec.frame import (
    ChunkHeader,
    build_segments,
    decode_header,
    encode_header,
    expect,
    token_digest,
)
from sgl_krul.errors import Corrupt
from sgl_krul.layout import KvLayout
from sgl_krul.session.landing import Landing
from sgl_krul.session.record import (
    MANIFEST_VERSION,
    ChunkRef,
    Manifest,
    chunk_key,
    pack_tokens,
)
from sgl_krul.store.tier import Tier

__all__ = [
    "RAW_PLAN",
    "ChunkPlan",
    "PageSource",
    "PauseReport",
    "Segments",
    "Snapshot",
    "plan_chunks",
    "still_there",
    "write_session",
]

RAW_PLAN = "raw"  # the only layer plan so far: every layer of every chunk is stored as it is

Segments = Sequence[Sequence[memoryview]]


class PageSource(Protocol):
    """Where the KV of a session's pages comes from while it is paused."""

    def segments(self, first_page: int, pages: int) -> AbstractContextManager[Segments | None]:
        """Per layer, the buffers that hold pages [first_page, first_page + pages) one after another.

        The buffers stay unchanged within the `with`. None when a page is to be had nowhere.
        """
        ...


@dataclass(frozen=True)
class Snapshot:
    """What is to be paused, frozen at the moment of asking. `page_hashes` covers all full pages."""

    namespace: str
    digest: str
    session_id: str
    salted: bool
    layout: KvLayout
    token_ids: Sequence[int]
    page_hashes: tuple[str, ...]
    exact: bool = True


@dataclass(frozen=True)
class ChunkPlan:
    """One chunk of the new generation; `reuse` is the old chunk that holds the same bytes already."""

    index: int
    first_page: int
    pages: int
    tokens: int
    last_page_hash: str
    reuse: ChunkRef | None


@dataclass(frozen=True)
class PauseReport:
    """What a pause did."""

    manifest: Manifest
    chunks_written: int
    chunks_kept: int
    bytes_written: int


def plan_chunks(snapshot: Snapshot, previous: Manifest | None, chunk_pages: int) -> list[ChunkPlan]:
    """Cut the session's full pages into chunks and find which of them an earlier pause wrote already. Pure.

    A chunk is reused when its last page hash is the same: the hash is chained, so it commits to every token
    before it (and to the salt).
    """
    kept = {} if previous is None else {(c.last_page_hash, c.pages): c for c in previous.chunks}
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
            )
        )
    return plans


def write_session(
    snapshot: Snapshot,
    source: PageSource,
    tier: Tier,
    *,
    chunk_tokens: int,
    now: Callable[[], float],
    generation: int = 1,
) -> PauseReport:
    """Pause one session into `tier`. Blocks on I/O: call it from a worker.

    Pages are stored up to the first one that `source` does not have; the rest is recomputed at resume.
    `generation` is the least that the new manifest may have: copies in other tiers may be ahead.

    Raises:
        StoreFull, StoreUnavailable, LeaseHeld: the session is paused as before or not at all.
    """
    chunk_pages = max(1, chunk_tokens // snapshot.layout.page_size)
    with Landing(tier, snapshot.namespace, snapshot.digest) as landing:
        previous = landing.previous
        if previous is not None:
            generation = max(generation, previous.generation + 1)
        chunks: list[ChunkRef] = []
        for plan in plan_chunks(snapshot, previous, chunk_pages):
            if plan.reuse is not None and still_there(tier, plan.reuse, snapshot.namespace):
                chunks.append(plan.reuse)
                continue
            with source.segments(plan.first_page, plan.pages) as segments:
                if segments is None:
                    break
                chunks.append(_put_chunk(snapshot, plan, segments, landing, generation))
        manifest = _manifest(snapshot, generation, chunks, now())
        landing.commit(manifest)
    return PauseReport(
        manifest=manifest,
        chunks_written=landing.puts,
        chunks_kept=len(chunks) - landing.puts,
        bytes_written=landing.bytes_written,
    )


def still_there(tier: Tier, ref: ChunkRef, namespace: str) -> bool:
    """A reused chunk must still be what the manifest calls it (segments are checked when they are read)."""
    try:
        data = tier.read_header(ref.key)
        if data is None:
            return False
        expect(
            decode_header(data),
            namespace=namespace,
            last_page_hash=ref.last_page_hash,
            token_digest=ref.token_digest,
            tokens=ref.tokens,
        )
    except Corrupt:
        return False
    return True


def _put_chunk(
    snapshot: Snapshot, plan: ChunkPlan, segments: Segments, landing: Landing, generation: int
) -> ChunkRef:
    size = snapshot.layout.page_size
    digest = token_digest(snapshot.token_ids[plan.first_page * size : (plan.first_page + plan.pages) * size])
    header = encode_header(
        ChunkHeader(
            namespace=snapshot.namespace,
            last_page_hash=plan.last_page_hash,
            token_digest=digest,
            tokens=plan.tokens,
            plan_id=RAW_PLAN,
            segments=build_segments(segments, Mode.raw),
        )
    )
    ref = ChunkRef(
        key=chunk_key(snapshot.namespace, snapshot.digest, generation, plan.index),
        pages=plan.pages,
        tokens=plan.tokens,
        last_page_hash=plan.last_page_hash,
        token_digest=digest,
        bytes=0,  # the tier says
    )
    return landing.put(ref, header, [buffer for layer in segments for buffer in layer])


def _manifest(snapshot: Snapshot, generation: int, chunks: list[ChunkRef], paused_at: float) -> Manifest:
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
        exact=snapshot.exact,
        raw_bytes=0,
        stored_bytes=sum(chunk.bytes for chunk in chunks),
        paused_at=paused_at,
    )
    return msgspec.structs.replace(manifest, raw_bytes=manifest.stored_tokens * snapshot.layout.token_bytes)

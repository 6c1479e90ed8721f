"""Copy a paused session from one tier to another, byte for byte. What is damaged is never copied.

Each chunk must be the one its manifest names, and match every checksum, before it is put. The order is that
of a pause (invariant 2): chunks, then the manifest, then what no manifest names any more goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from sgl_krul.codec.frame import ChunkHeader, decode_header, expect, verify_segment
from sgl_krul.errors import Corrupt, KrulError, Missing, StoreError
from sgl_krul.session.landing import Landing
from sgl_krul.session.record import ChunkRef, Manifest, chunk_key, is_exact_chunk, plans_used
from sgl_krul.store.tier import Tier

__all__ = [
    "MoveReport",
    "Stopped",
    "check_chunk",
    "copy_session",
    "cut_text",
    "leading",
    "read_chunk",
    "segment_buffers",
]


class Stopped(KrulError):
    """The work was stopped before its end, by the server going down say. Nothing changed; try again."""

    status: ClassVar[int] = 503


@dataclass(frozen=True)
class MoveReport:
    """What a copy did. `manifest` is the target's; `cut` says why it ended early ("": all is there)."""

    manifest: Manifest
    chunks_copied: int
    chunks_kept: int
    bytes_written: int
    cut: str


def copy_session(
    manifest: Manifest, source: Tier, target: Tier, *, stopped: Callable[[], bool] = lambda: False
) -> MoveReport:
    """Copy the session of `manifest`, which lies in `source`, to `target`. Blocks on I/O: for a worker.

    A chunk that `source` has lost, or has damaged, ends the copy there; the rest is recomputed at resume.
    `source` is not touched. The session as `target` had it is replaced; for a shared target hold its lease.
    At most one chunk is in memory at a time.

    Raises:
        Missing, Corrupt: the first chunk already is lost. `target` is as before.
        StoreFull, StoreUnavailable, LeaseHeld, Stopped: `target` is as before, except when it failed after it
            took the manifest.
    """
    with Landing(target, manifest.namespace, manifest.digest) as landing:
        generation, keys = _place(manifest, landing.previous)
        chunks: list[ChunkRef] = []
        cut = ""
        for ref, key in zip(manifest.chunks, keys, strict=True):
            if stopped():
                raise Stopped(
                    f"copying session {manifest.session_id!r} to {target.name} was stopped after "
                    f"{len(chunks)} of {len(keys)} chunks: nothing changed there, try again later"
                )
            outcome = _copy_chunk(manifest.namespace, ref, key, source, landing)
            if isinstance(outcome, StoreError):
                if not chunks:
                    raise outcome
                cut = cut_text(outcome)
                break
            chunks.append(outcome)
        copied = msgspec.structs.replace(leading(manifest, chunks), generation=generation)
        landing.commit(copied)
    return MoveReport(copied, landing.puts, len(chunks) - landing.puts, landing.bytes_written, cut)


def _place(manifest: Manifest, previous: Manifest | None) -> tuple[int, list[str]]:
    """The generation in the target, and the key of each chunk there. Pure.

    Both are the source's, unless the target's session has another chunk under one of the keys (two servers
    paused the session each for itself), or the same with other layers left out: that one must stay until the
    new manifest is in place.
    """
    keys = [ref.key for ref in manifest.chunks]
    if previous is None:
        return manifest.generation, keys
    theirs = {ref.key: _identity(ref) for ref in previous.chunks}
    taken = [ref.key in theirs and theirs[ref.key] != _identity(ref) for ref in manifest.chunks]
    if not any(taken):
        return manifest.generation, keys
    generation = max(manifest.generation, previous.generation) + 1
    fresh = [
        chunk_key(manifest.namespace, manifest.digest, generation, index, exact=is_exact_chunk(key))
        for index, key in enumerate(keys)
    ]
    return generation, [new if clash else key for new, key, clash in zip(fresh, keys, taken, strict=True)]


def _identity(ref: ChunkRef) -> tuple[str, str, int, int, str, int]:
    return ref.last_page_hash, ref.token_digest, ref.pages, ref.tokens, ref.plan_name, ref.depth


def _copy_chunk(
    namespace: str, ref: ChunkRef, key: str, source: Tier, landing: Landing
) -> ChunkRef | Missing | Corrupt:
    """The chunk as the target has it, or what is wrong with the source's. Its bytes go when this returns."""
    try:
        data, header = _read_header(source, namespace, ref)
        there = landing.find(key, data)
        if there is not None:
            return msgspec.structs.replace(ref, key=key, bytes=there)
        segments = _read_body(source, ref, header)
    except (Missing, Corrupt) as error:
        return error
    return landing.put(msgspec.structs.replace(ref, key=key), data, segments)


# -- reading a chunk --


def check_chunk(data: bytes, namespace: str, ref: ChunkRef) -> ChunkHeader:
    """The chunk header in `data`, if it is that of the chunk `ref` names.

    Raises:
        Corrupt: damaged, another chunk's, of another depth, or of a body longer than the whole chunk is said
            to be.
    """
    header = decode_header(data)
    expect(
        header,
        namespace=namespace,
        last_page_hash=ref.last_page_hash,
        token_digest=ref.token_digest,
        tokens=ref.tokens,
    )
    if header.depth != ref.depth:
        raise Corrupt("identity", f"{header.depth} layers are not stored, expected {ref.depth}")
    if header.plan_id != ref.plan_name:
        raise Corrupt("identity", f"stored under the plan {header.plan_id}, expected {ref.plan_name}")
    length = sum(segment.length for segment in header.segments)
    if length > ref.bytes:  # before anyone makes room for it
        raise Corrupt("length", f"body of {length} bytes, the manifest has {ref.bytes} for the chunk")
    return header


def segment_buffers(header: ChunkHeader) -> list[memoryview]:
    """One buffer a segment, all in one piece of memory."""
    body = memoryview(bytearray(sum(segment.length for segment in header.segments)))
    return [body[segment.offset : segment.offset + segment.length] for segment in header.segments]


def read_chunk(tier: Tier, namespace: str, ref: ChunkRef) -> tuple[bytes, list[memoryview]]:
    """The chunk `ref` as `tier` has it: its header and its segments, all verified.

    Raises:
        Missing, Corrupt, StoreUnavailable
    """
    data, header = _read_header(tier, namespace, ref)
    return data, _read_body(tier, ref, header)


def _read_header(tier: Tier, namespace: str, ref: ChunkRef) -> tuple[bytes, ChunkHeader]:
    data = tier.read_header(ref.key)
    if data is None:
        raise Missing(f"chunk {ref.key} has gone from {tier.name}: the session is computed anew from there")
    return data, check_chunk(data, namespace, ref)


def _read_body(tier: Tier, ref: ChunkRef, header: ChunkHeader) -> list[memoryview]:
    segments = segment_buffers(header)
    tier.read_segments(ref.key, 0, segments)
    for entry, segment in zip(header.segments, segments, strict=True):
        verify_segment(entry, [segment])
    return segments


def leading(manifest: Manifest, chunks: Sequence[ChunkRef]) -> Manifest:
    """`manifest` with `chunks` for its first ones and without the others; the sums follow."""
    token_bytes = manifest.raw_bytes // manifest.stored_tokens if manifest.stored_tokens else 0
    return msgspec.structs.replace(
        manifest,
        chunks=tuple(chunks),
        plans=plans_used(manifest.layer_plans, chunks),
        raw_bytes=token_bytes * sum(ref.tokens for ref in chunks),
        stored_bytes=sum(ref.bytes for ref in chunks),
    )


def cut_text(error: StoreError) -> str:
    """Why a copy ended early, for a report."""
    return f"{'missing' if isinstance(error, Missing) else 'corrupt'} chunk ({error})"

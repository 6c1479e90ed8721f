"""A session as the demo model leaves it: random KV in chunks, with headers and manifest of a pause."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_krul.codec.base import Mode
from sgl_krul.codec.frame import ChunkHeader, build_segments, encode_header, token_digest
from sgl_krul.layout import KvLayout
from sgl_krul.pause.pipeline import RAW_PLAN
from sgl_krul.session.record import (
    MANIFEST_VERSION,
    ChunkRef,
    Manifest,
    chunk_key,
    encode_manifest,
    manifest_key,
    pack_tokens,
    session_prefix,
)

__all__ = ["CHUNK_PAGES", "LAYOUT", "NAMESPACE", "SEGMENT_BYTES", "Names", "Sample"]

LAYOUT = KvLayout(
    layers=30, kv_heads=3, head_dim=64, v_head_dim=64, dtype="float32", page_size=16, rope="SmolLM2-135M"
)
CHUNK_PAGES = 16  # 256 tokens
SEGMENT_BYTES = CHUNK_PAGES * LAYOUT.page_segment_bytes  # 393,216
NAMESPACE = hashlib.sha256(b"bench").hexdigest()[:32]


@dataclass(frozen=True)
class Names:
    """Session number `number` of a benchmark: its tokens, hashes and keys. No KV."""

    number: int
    chunks: int

    @property
    def digest(self) -> str:
        """Its name in stores."""
        return _sha256(f"session {self.number}")

    @property
    def prefix(self) -> str:
        """What all its keys start with."""
        return session_prefix(NAMESPACE, self.digest)

    @property
    def manifest_key(self) -> str:
        """Key of the manifest."""
        return manifest_key(NAMESPACE, self.digest)

    def chunk_key(self, index: int) -> str:
        """Key of one chunk. Built anew at each call, as a server does."""
        return chunk_key(NAMESPACE, self.digest, 1, index)

    def page_hash(self, page: int) -> str:
        """As long as SGLang's."""
        return _sha256(f"page {page} of {self.number}")

    def token_ids(self, first_page: int, pages: int) -> NDArray[np.int64]:
        """Token ids of some pages."""
        size = LAYOUT.page_size
        return (np.arange(first_page * size, (first_page + pages) * size) + self.number) % 49152

    def header(self, index: int, segments: list[list[memoryview]]) -> bytes:
        """Header of one chunk."""
        first = index * CHUNK_PAGES
        return encode_header(
            ChunkHeader(
                namespace=NAMESPACE,
                last_page_hash=self.page_hash(first + CHUNK_PAGES - 1),
                token_digest=token_digest(self.token_ids(first, CHUNK_PAGES)),
                tokens=CHUNK_PAGES * LAYOUT.page_size,
                plan_id=RAW_PLAN,
                segments=build_segments(segments, Mode.raw),
            )
        )

    def manifest(self) -> bytes:
        """The manifest."""
        pages = self.chunks * CHUNK_PAGES
        chunk_bytes = LAYOUT.layers * SEGMENT_BYTES
        chunks = tuple(
            ChunkRef(
                key=self.chunk_key(index),
                pages=CHUNK_PAGES,
                tokens=CHUNK_PAGES * LAYOUT.page_size,
                last_page_hash=self.page_hash((index + 1) * CHUNK_PAGES - 1),
                token_digest=token_digest(self.token_ids(index * CHUNK_PAGES, CHUNK_PAGES)),
                bytes=chunk_bytes,
            )
            for index in range(self.chunks)
        )
        return encode_manifest(
            Manifest(
                version=MANIFEST_VERSION,
                namespace=NAMESPACE,
                digest=self.digest,
                session_id=f"bench-{self.number}",
                salted=False,
                generation=1,
                page_size=LAYOUT.page_size,
                token_ids=pack_tokens(self.token_ids(0, pages)),
                page_hashes=b"".join(bytes.fromhex(self.page_hash(page)) for page in range(pages)),
                chunks=chunks,
                exact=True,
                raw_bytes=self.chunks * chunk_bytes,
                stored_bytes=self.chunks * chunk_bytes,
                paused_at=1.0,
            )
        )


class Sample:
    """The KV of a session in host memory, uint8 [layers, chunks, SEGMENT_BYTES], and where to read it to."""

    def __init__(self, chunks: int, seed: int) -> None:
        shape = (LAYOUT.layers, chunks, SEGMENT_BYTES)
        self.chunks = chunks
        self.kv = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        self._into = np.zeros(shape, np.uint8)
        names = Names(0, chunks)
        self.sources = [[layer[index].data for layer in self.kv] for index in range(chunks)]
        self.targets = [[layer[index].data for layer in self._into] for index in range(chunks)]
        self.headers = [names.header(i, [[view] for view in views]) for i, views in enumerate(self.sources)]
        self.manifest = names.manifest()

    @property
    def size_bytes(self) -> int:
        """Bytes of KV."""
        return self.kv.nbytes

    def require_read(self) -> None:
        """What was read last must be the KV; it is wiped then."""
        if not np.array_equal(self._into, self.kv):
            raise RuntimeError("the bytes that were read are not those that were written")
        self._into.fill(0)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()

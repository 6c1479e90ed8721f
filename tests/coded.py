"""Sessions whose KV are numbers, so that codecs have something to code; and plans of all kinds."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sgl_krul.codec.coder import ChunkCoder
from sgl_krul.codec.frame import decode_header
from sgl_krul.layout import KvLayout, namespace
from sgl_krul.pause.pipeline import Snapshot
from sgl_krul.session.record import ChunkRef, Manifest
from sgl_krul.store.tier import Tier
from sgl_krul.strategy.layer_plan import LayerChoice, LayerPlan
from tests.sessions import Chat

LAYERS = 6
LAYOUT = KvLayout(
    layers=LAYERS, kv_heads=2, head_dim=16, v_head_dim=16, dtype="float32", page_size=16, rope="for tests"
)
NAMESPACE = namespace(LAYOUT, "weights", "", 0, 1)

BF16, INT8, INT4 = (LayerChoice("quantized", variant) for variant in ("bf16", "int8", "int4"))
OWNER = LayerChoice("shared", "merged-owner")


def sharing(kind: str, owner: int) -> LayerChoice:
    """The partner of `owner`."""
    return LayerChoice("shared", kind, owner)


PLANS = {
    "bf16": LayerPlan.uniform(LAYERS, BF16),
    "int8": LayerPlan.uniform(LAYERS, INT8),
    "int4": LayerPlan.uniform(LAYERS, INT4),
    "raw pairs": LayerPlan((BF16, INT8, sharing("raw", 0), INT4, sharing("raw", 1), LayerChoice("raw"))),
    "a raw owner": LayerPlan((INT4, LayerChoice("raw"), INT4, INT4, INT4, sharing("raw", 1))),
    "merged pairs": LayerPlan((OWNER, OWNER, INT4, sharing("merged", 0), BF16, sharing("merged", 1))),
}


def random_plan(rng: random.Random) -> LayerPlan:
    """Any plan of the layers."""
    alone = [LayerChoice("raw"), BF16, INT8, INT4]
    choices = [rng.choice(alone) for _ in range(LAYERS)]
    left = list(range(LAYERS))
    rng.shuffle(left)
    for _ in range(rng.randint(0, LAYERS // 2)):
        owner, partner = sorted((left.pop(), left.pop()))
        kind = rng.choice(["raw", "merged"])
        choices[partner] = sharing(kind, owner)
        if kind == "merged":
            choices[owner] = OWNER
    return LayerPlan(tuple(choices))


def number_kv(page_hash: str, layer: int) -> bytes:
    """The page segment of these tokens: normal numbers, alike in neighbouring layers."""
    seed = int.from_bytes(hashlib.sha256(page_hash.encode()).digest()[:8], "little")
    base = np.random.default_rng(seed).standard_normal(LAYOUT.page_segment_bytes // 4)
    own = np.random.default_rng(seed + 1 + layer).standard_normal(base.size)
    return (base + 0.1 * own).astype("<f4").tobytes()


class NumberPages:
    """A PageSource that has all pages. `asked`: the chunks it was asked for."""

    def __init__(self, hashes: Sequence[str]) -> None:
        self.hashes = hashes
        self.asked: list[tuple[int, int]] = []

    @contextmanager
    def segments(self, first_page: int, pages: int) -> Iterator[Sequence[Sequence[memoryview]] | None]:
        """See PageSource."""
        self.asked.append((first_page, pages))
        wanted = self.hashes[first_page : first_page + pages]
        yield [[memoryview(number_kv(h, layer)) for h in wanted] for layer in range(LAYERS)]


def snapshot(session: Chat, *, exact: bool = True) -> Snapshot:
    """The session as it is paused."""
    return replace(session.snapshot(), namespace=NAMESPACE, layout=LAYOUT, exact=exact)


def decoded(tier: Tier, manifest: Manifest) -> NDArray[np.uint8]:
    """What the stored chunks come to, uint8 [layers, pages, page bytes], without the loader."""
    parts = []
    first_token = 0
    for ref in manifest.chunks:
        parts.append(_decoded(tier, manifest, ref, first_token))
        first_token += ref.tokens
    return np.concatenate(parts, axis=1)


def _decoded(tier: Tier, manifest: Manifest, ref: ChunkRef, first_token: int) -> NDArray[np.uint8]:
    data = tier.read_header(ref.key)
    assert data is not None
    header = decode_header(data)
    buffers = [bytearray(entry.length) for entry in header.segments]
    tier.read_segments(ref.key, 0, [memoryview(buffer) for buffer in buffers])
    rows = np.zeros((LAYERS, ref.pages, LAYOUT.page_segment_bytes), np.uint8)
    if not ref.plan_id:
        for row, buffer in zip(rows, buffers, strict=True):
            row.reshape(-1)[:] = np.frombuffer(buffer, np.uint8)
        return rows
    coder = ChunkCoder(LAYOUT, manifest.layer_plans[ref.plan_id])
    segments = {layer: memoryview(buffer) for layer, buffer in enumerate(buffers)}
    for layer in range(LAYERS):
        coder.decode_layer(layer, header, segments, first_token, [rows[layer].reshape(-1).data])
    return rows


def exact_kv(session: Chat) -> NDArray[np.uint8]:
    """What was paused, uint8 [layers, pages, page bytes]."""
    kv = [[np.frombuffer(number_kv(h, layer), np.uint8) for h in session.hashes] for layer in range(LAYERS)]
    return np.array(kv)

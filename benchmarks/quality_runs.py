"""One chat through a model: the KV of its history out, coded KV back in, and the last turn on top of it.

The history is computed once. Its KV goes into pages of a pool, as a server keeps it; what a codec gives back
are pages too, and from them the model reads. The last turn is computed exactly on top of either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from benchmarks.quality_chats import Probe, Prompt
from benchmarks.quality_metrics import Floats, log_softmax
from benchmarks.quality_models import Subject
from sgl_krul.codec import ChunkHeader, decode_header, encode_header, token_digest
from sgl_krul.codec.block import KvBlock, from_pages, to_pages
from sgl_krul.codec.coder import ChunkCoder
from sgl_krul.codec.loss import Queries
from sgl_krul.layout import KvLayout
from sgl_krul.similarity import Similarity, Windows, attention_rows, sampled_positions
from sgl_krul.strategy import LayerPlan

__all__ = ["CHUNK_PAGES", "History", "Pool", "alike", "history_of", "read", "score", "stored", "thinned"]

CHUNK_PAGES = 16  # 256 tokens, as the server has by default
_ROWS = 64  # at a time, of all layers

Pool = NDArray[np.uint8]
"""Page segments of all layers: uint8 [layers, pages, page segment bytes]."""


@dataclass(frozen=True)
class History:
    """A computed history. `pool`: its exact KV; `blocks`: the same as numbers, by layer; `queries`: those of
    sampled positions, by layer."""

    prompt: Prompt
    pool: Pool
    blocks: tuple[KvBlock, ...]
    queries: tuple[Queries, ...]


def history_of(subject: Subject, prompt: Prompt, rows_per_1000: int) -> History:
    """Compute the history of a prompt. Its KV is rounded to the pool's dtype, as a server's is."""
    tokens = len(prompt.history)
    positions = _sampled(subject, prompt, rows_per_1000)
    capture = subject.capture
    capture.positions = torch.from_numpy(positions)
    cache = DynamicCache()
    try:
        with torch.inference_mode():
            subject.model(torch.tensor([prompt.history]), past_key_values=cache, logits_to_keep=1)
    finally:
        capture.positions = None
    pool = np.empty(
        (subject.layout.layers, tokens // subject.layout.page_size, subject.layout.page_segment_bytes),
        np.uint8,
    )
    for layer, pages in enumerate(pool):
        k, v = (_rows(part) for part in (cache.layers[layer].keys, cache.layers[layer].values))
        to_pages(KvBlock(k, v), subject.layout, [pages.reshape(-1).data])
    queries = tuple(
        Queries(capture.queries.pop(layer).numpy(), positions, subject.scale) for layer in range(len(pool))
    )
    return History(prompt, pool, read(pool, subject.layout), queries)


def read(pool: Pool, layout: KvLayout) -> tuple[KvBlock, ...]:
    """The numbers of a pool, by layer."""
    return tuple(from_pages([pages.reshape(-1).data], layout) for pages in pool)


def score(subject: Subject, blocks: Sequence[KvBlock], probe: Probe) -> Floats:
    """log p, float64 [scored, vocabulary], of the tokens of the answer, with `blocks` as the history's KV."""
    cache = DynamicCache()
    for layer, block in enumerate(blocks):
        cache.update(_states(block.k), _states(block.v), layer)
    with torch.inference_mode():
        kept = probe.scored + 1  # the token before the answer tells its first one
        answer = subject.model(torch.tensor([probe.ids]), past_key_values=cache, logits_to_keep=kept)
    return log_softmax(answer.logits[0, :-1].numpy())


def stored(history: History, layout: KvLayout, plan: LayerPlan) -> tuple[Pool, int]:
    """What comes back when the history is stored under `plan`, and the bytes of all chunks and headers."""
    coder = ChunkCoder(layout, plan)
    back = np.zeros_like(history.pool)
    size = 0
    for first in range(0, history.pool.shape[1], CHUNK_PAGES):
        pages = slice(first, first + CHUNK_PAGES)
        tokens = history.prompt.history[first * layout.page_size : (first + CHUNK_PAGES) * layout.page_size]
        size += _through_chunk(
            coder, tokens, first * layout.page_size, history.pool[:, pages], back[:, pages]
        )
    return back, size


def _through_chunk(coder: ChunkCoder, tokens: Sequence[int], first_token: int, pool: Pool, back: Pool) -> int:
    """Store the pages of one chunk as a tier would get them, and read them again into `back`; its bytes."""
    encoded = coder.encode([[pages.reshape(-1).data] for pages in pool], first_token)
    header = encode_header(
        ChunkHeader(
            namespace="bench-quality",
            last_page_hash=token_digest(tokens),  # as long as one; nobody asks for the chunk by it
            token_digest=token_digest(tokens),
            tokens=len(tokens),
            plan_id=coder.plan_id,
            segments=encoded.entries,
        )
    )
    body = b"".join(encoded.buffers)
    read_header = decode_header(header)
    coder.check_header(read_header, first_token)
    segments = {
        layer: memoryview(body)[entry.offset : entry.offset + entry.length]
        for layer, entry in enumerate(read_header.segments)
    }
    out = {layer: [pages.reshape(-1).data] for layer, pages in enumerate(back)}
    coder.decode_group(range(len(back)), read_header, segments, first_token, out)
    return len(header) + len(body)


def alike(history: History, windows: Windows = Windows.relative) -> Similarity:
    """How alike the layers attend over the sampled rows of the history."""
    state = Similarity(len(history.blocks), windows)
    positions = history.queries[0].positions
    for start in range(0, len(positions), _ROWS):
        at = positions[start : start + _ROWS]
        rows = torch.stack(
            [
                attention_rows(
                    torch.from_numpy(queries.q[start : start + _ROWS]),
                    torch.from_numpy(block.k),
                    torch.from_numpy(at),
                    queries.scale,
                )
                for queries, block in zip(history.queries, history.blocks, strict=True)
            ]
        )
        state.add(rows, torch.from_numpy(at), history=len(history.prompt.history))
    return state


def thinned(history: History, subject: Subject, rows_per_1000: int) -> History:
    """The same history with fewer rows: those that would have been sampled at `rows_per_1000`."""
    chosen = _sampled(subject, history.prompt, rows_per_1000)
    kept = np.isin(history.queries[0].positions, chosen)
    queries = tuple(Queries(of.q[kept], of.positions[kept], of.scale) for of in history.queries)
    return replace(history, queries=queries)


def _sampled(subject: Subject, prompt: Prompt, rows_per_1000: int) -> NDArray[np.int64]:
    digest = hashlib.sha256(prompt.name.encode()).hexdigest()
    return sampled_positions(subject.name, digest, 0, len(prompt.history), rows_per_1000)


def _rows(states: torch.Tensor) -> NDArray[np.float32]:
    """[1, G, n, D] of a cache as [n, G, D]."""
    array: NDArray[np.float32] = states[0].transpose(0, 1).contiguous().numpy()
    return array


def _states(array: NDArray[np.float32]) -> torch.Tensor:
    """[n, G, D] as a cache has it, [1, G, n, D]."""
    return torch.from_numpy(array).transpose(0, 1).contiguous()[None]

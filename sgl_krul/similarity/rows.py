"""Attention rows of sampled queries, tiled: nothing of size n x n is ever held.

The row of the query at position p in one layer, over its H heads (head h reads KV head h // (H / G)):

    row = 1/H sum_h softmax(scale q_h . k_0..p),  float32, zero behind p

The heads of one KV head are computed together, a few rows at a time: scores q [rows x heads, D] by k^T
[D, keys], their softmax (one pass of torch's own; exponential and sums by separate operators took 1.3 times
as long), and its mean over the heads as a product.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["TILE_BYTES", "attention_rows", "row_tiles"]

TILE_BYTES = 1 << 19  # scores and their softmax together stay in a core's L2 (1 MiB)


def attention_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    *,
    tile_bytes: int = TILE_BYTES,
) -> torch.Tensor:
    """Rows float32 [r, n] of the queries of one layer, on q's device.

    q: [r, H, D]; k: [n, G, D], the keys of tokens 0..n-1, H a multiple of G; both of any float dtype and
    rotated alike. positions: int64 [r], each below n. `tile_bytes` bounds each of the buffers beside the
    answer: scores and their softmax (but one row of one head is the least), and keys widened to float32.

    Raises:
        ValueError: shapes that do not fit, a query whose context is longer than the keys given.
    """
    out = torch.empty((q.shape[0], k.shape[0]), dtype=torch.float32, device=q.device)
    for _ in row_tiles(q, k, positions, scale, out, tile_bytes=tile_bytes):
        pass
    return out


def row_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    tile_bytes: int = TILE_BYTES,
) -> Iterator[None]:
    """`attention_rows` into `out` float32 [r, n or fewer], step by step: yields after each tile.

    `out` needs as many columns as the longest row has keys. It is complete when the iterator is exhausted.

    Raises:
        ValueError: as attention_rows, and for an `out` that does not fit; at the first step.
    """
    at = _check(q, k, positions, out, tile_bytes)
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    group = heads // kv_heads
    q = q.detach().float().reshape(len(at), kv_heads, group, dim) * scale
    k = k.detach()
    ones = torch.ones((len(at), 1, group), dtype=torch.float32, device=q.device)
    done = 0
    while done < len(at):
        end, together = _tile(at, done, group, tile_bytes)
        width = max(at[done:end]) + 1
        out[done:end].zero_()
        rows = out[done:end, None, :width]
        for head in range(0, heads, together):
            kv_head, begin = divmod(head, group)
            block = q[done:end, kv_head, begin : begin + together]
            scores = _scores(block, k[:width, kv_head], tile_bytes)
            for index, position in enumerate(at[done:end]):
                scores[index, :, position + 1 :] = -torch.inf
            rows.baddbmm_(ones[done:end, :, :together], torch.softmax(scores, 2), alpha=1 / heads)
            yield
        done = end


def _tile(at: list[int], done: int, group: int, tile_bytes: int) -> tuple[int, int]:
    """Rows [done, end) to compute together, and how many heads of a group (a divisor of it)."""
    end, longest = done, 0
    while end < len(at):
        longer = max(longest, at[end] + 1)
        if end > done and 4 * group * longer * (end + 1 - done) > tile_bytes:
            break
        end, longest = end + 1, longer
    fitting = tile_bytes // (4 * longest * (end - done))
    divisors = [heads for heads in range(1, group + 1) if group % heads == 0]
    return end, max((heads for heads in divisors if heads <= fitting), default=1)


def _scores(q: torch.Tensor, k: torch.Tensor, tile_bytes: int) -> torch.Tensor:
    """q.k float32 [rows, heads, n] of q float32 [rows, heads, D] and k [n, D], which is widened in pieces."""
    rows, heads, dim = q.shape
    scores = torch.empty((rows * heads, k.shape[0]), dtype=torch.float32, device=q.device)
    flat = q.reshape(rows * heads, dim)
    piece = k.shape[0] if k.dtype == torch.float32 else max(tile_bytes // (4 * dim), 1)
    for start in range(0, k.shape[0], piece):
        keys = k[start : start + piece].float()
        torch.mm(flat, keys.T, out=scores[:, start : start + piece])
    return scores.view(rows, heads, -1)


def _check(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, tile_bytes: int
) -> list[int]:
    """The positions; ValueError naming what does not fit."""
    if q.ndim != 3 or k.ndim != 3 or 0 in q.shape[1:] or 0 in k.shape[1:]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}: expected [r, H, D] and [n, G, D]")
    if q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q of {q.shape[1]} heads by {q.shape[2]}, k of {k.shape[1]} by {k.shape[2]}: expected the same "
            "head_dim, and heads a multiple of the KV heads"
        )
    if not (q.is_floating_point() and k.is_floating_point()):
        raise ValueError(f"q {q.dtype}, k {k.dtype}: expected floats")
    if tile_bytes < 1:
        raise ValueError(f"tile_bytes {tile_bytes}: expected at least 1")
    if positions.dtype != torch.int64 or tuple(positions.shape) != (q.shape[0],):
        raise ValueError(
            f"positions {positions.dtype} {tuple(positions.shape)}: expected int64 [{q.shape[0]}]"
        )
    at: list[int] = positions.tolist()
    longest = max(at, default=-1) + 1
    if min(at, default=0) < 0 or longest > k.shape[0]:
        raise ValueError(
            f"positions {min(at)} to {max(at)}, {k.shape[0]} keys: expected 0 or more, and the keys of each "
            "row's whole context"
        )
    if out.dtype != torch.float32 or out.ndim != 2 or out.shape[0] != len(at) or out.shape[1] < longest:
        raise ValueError(
            f"out {out.dtype} {tuple(out.shape)}: expected float32 [{len(at)}, {longest} or more]"
        )
    return at

"""Attention of the backend `krul_cpu`: what SGLang's `torch_native` computes, without its detours.

`torch_native` runs a prompt's whole length through attention again when only its tail is new, gathers K and V
by advanced indexing, copies both once per query head, and reads every length from a tensor in every layer.
Here the lengths and slots of a batch are read once per forward, K and V come as a slice where a sequence's
slots are consecutive and by one `index_select` where not, query heads that share a KV head are computed
together, and only new queries are computed:

    out = merge(attention(new queries, cached keys), causal attention(new queries, new keys))

where merge weighs the two by their log-sum-exp. The result differs from one softmax over all keys by rounding
only (1e-7 in float32), whatever the split into cached and new tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

__all__ = ["CPU_ATTENTION", "Span", "attend", "register_cpu_backend", "slots_of"]

CPU_ATTENTION = "krul_cpu"

# Query rows computed at once under a sliding window: bounds the mask at this many rows.
_WINDOW_ROWS = 256

# The operator behind scaled_dot_product_attention on a CPU. Called by name because only it returns the
# log-sum-exp that a merge needs.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001


class Span(NamedTuple):
    """One sequence of a batch.

    `start`..`end`: its rows in the query. `cached`: how many of its tokens lie before the first of them.
    `slots`: where its `cached + end - start` tokens lie in the KV pool, in order: a slice, or int32 [tokens].
    """

    start: int
    end: int
    cached: int
    slots: slice | torch.Tensor


def register_cpu_backend() -> None:
    """Make `--attention-backend krul_cpu` known to SGLang in this process. Repeating it changes nothing."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import (
        ATTENTION_BACKENDS,
        register_attention_backend,
    )

    if CPU_ATTENTION not in ATTENTION_BACKENDS:
        register_attention_backend(CPU_ATTENTION)(_create_attention)
    if CPU_ATTENTION not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([CPU_ATTENTION])


def _create_attention(runner: Any) -> AttentionBackend:
    from sgl_krul.engine.cpu_backend import KrulCpuAttention

    return KrulCpuAttention(runner)


def slots_of(slots: torch.Tensor) -> slice | torch.Tensor:
    """The slots int32 [tokens] as a slice if they are consecutive, else a copy of them."""
    count = slots.shape[0]
    if count == 0:
        return slice(0, 0)
    first = int(slots[0])
    if int(slots[-1]) - first == count - 1 and bool((slots.diff() == 1).all()):
        return slice(first, first + count)
    return slots.clone()


def attend(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    spans: list[Span],
    out: torch.Tensor,
    *,
    scale: float | None,
    window: int | None = None,
) -> None:
    """Causal attention of every span's new queries over its cached and new keys, written to `out`.

    q, out: [tokens, heads, head_dim], same dtype, CPU. k_pool, v_pool: [slots, kv_heads, head_dim]; heads is
    a multiple of kv_heads. `window`: how many earlier tokens a query sees besides itself; None for all. Rows
    of `out` behind the last span become zero.
    """
    done = 0
    for span in spans:
        done = max(done, span.end)
        if span.start == span.end:
            continue
        k, v = _gather(k_pool, span.slots, q.dtype), _gather(v_pool, span.slots, q.dtype)
        rows = q[span.start : span.end]
        if window is None or k.shape[0] <= window + 1:
            out[span.start : span.end] = _attend_all(rows, k, v, span.cached, scale)
        else:
            _attend_window(rows, k, v, span.cached, scale, window, out[span.start : span.end])
    out[done:].zero_()


def _gather(pool: torch.Tensor, slots: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    taken = pool[slots] if isinstance(slots, slice) else pool.index_select(0, slots)
    return taken.to(dtype)


def _grouped(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[tokens, heads, dim] as [kv_heads, group, tokens, dim], a view."""
    tokens, heads, dim = q.shape
    return q.view(tokens, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)


def _shared(kv: torch.Tensor, group: int) -> torch.Tensor:
    """[tokens, kv_heads, dim] as [kv_heads, group, tokens, dim]: one copy for all heads of a group."""
    tokens, kv_heads, dim = kv.shape
    return kv.transpose(0, 1).unsqueeze(1).expand(kv_heads, group, tokens, dim)


def _attend_all(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cached: int, scale: float | None
) -> torch.Tensor:
    """[new, heads, dim]: attention of `q` [new, heads, dim] over k, v [cached + new, kv_heads, dim]."""
    new, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = _grouped(q, kv_heads)
    group = heads // kv_heads
    if new == 1:
        merged, _ = _attend_seen(grouped, k, v, scale)
    elif cached == 0:
        merged, _ = _flash(grouped, _shared(k, group), _shared(v, group), 0.0, True, scale=scale)
    else:
        old, old_lse = _attend_seen(grouped, k[:cached], v[:cached], scale)
        own, own_lse = _flash(
            grouped, _shared(k[cached:], group), _shared(v[cached:], group), 0.0, True, scale=scale
        )
        share = torch.sigmoid(own_lse.reshape(kv_heads, group, new) - old_lse).unsqueeze(-1)
        merged = torch.lerp(old.float(), own.float(), share).to(q.dtype)
    return merged.permute(2, 0, 1, 3).reshape(new, heads, dim)


def _attend_seen(
    grouped: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every query sees every key: all rows of a group are one block against their KV head.

    grouped: [kv_heads, group, new, dim]; k, v: [seen, kv_heads, dim]. Returns grouped's shape, and the
    log-sum-exp float32 [kv_heads, group, new].
    """
    kv_heads, group, new, dim = grouped.shape
    rows = grouped.reshape(1, kv_heads, group * new, dim)
    out, lse = _flash(rows, k.transpose(0, 1)[None], v.transpose(0, 1)[None], 0.0, False, scale=scale)
    return out.reshape(kv_heads, group, new, dim), lse.reshape(kv_heads, group, new)


def _attend_window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cached: int,
    scale: float | None,
    window: int,
    out: torch.Tensor,
) -> None:
    """As `_attend_all`, but a query sees itself and the `window` tokens before it. Writes `out`."""
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    for start in range(0, q.shape[0], _WINDOW_ROWS):
        end = min(q.shape[0], start + _WINDOW_ROWS)
        first, last = max(0, cached + start - window), cached + end
        positions = torch.arange(cached + start, last)[:, None]
        keys = torch.arange(first, last)[None, :]
        block: Any = scaled_dot_product_attention(
            _grouped(q[start:end], kv_heads),
            _shared(k[first:last], group),
            _shared(v[first:last], group),
            attn_mask=(keys <= positions) & (keys >= positions - window),
            scale=scale,
        )
        out[start:end] = block.permute(2, 0, 1, 3).reshape(end - start, *q.shape[1:])

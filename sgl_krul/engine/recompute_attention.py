"""Attention of a recomputed slice: writes the slice's K and V to given pool slots, attends over given slots.

SGLang's layers ask the active forward context for their attention backend. A slice runs in a context of its
own whose backend is `SliceAttention`, so no layer is wrapped and no other batch sees it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from sgl_krul.engine.cpu_attention import Span, attend, slots_of

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

__all__ = [
    "KvWritten",
    "NotPlainAttention",
    "SliceAttention",
    "attend_gathered",
    "attention_layers",
    "why_not_plain",
]


class KvWritten(Exception):
    """K and V of the layer are in the pool, and nothing more was asked for. Never leaves `Recompute.run`."""


class NotPlainAttention(Exception):
    """The layer attends in a way that is not computed here."""


def why_not_plain(layer: RadixAttention) -> str:
    """What makes this layer's attention other than causal attention over all tokens; "" when nothing does."""
    from sglang.srt.layers.radix_attention import AttentionType

    window = layer.sliding_window_size
    oddities = {
        f"a sliding window of {window} tokens": window not in (None, -1),
        f"a logit cap of {layer.logit_cap}": bool(layer.logit_cap),
        "cross attention": layer.is_cross_attention,
        f"attention of the kind {layer.attn_type!r}": layer.attn_type != AttentionType.DECODER,
        f"heads of {layer.qk_head_dim} and {layer.v_head_dim}": layer.qk_head_dim != layer.v_head_dim,
        "attention in local chunks": layer.use_irope,
        f"positions of the kind {layer.pos_encoding_mode!r}": layer.pos_encoding_mode != "NONE",
        "a temperature by length": layer.xai_temperature_len > 0,
        "scaled K and V": layer.k_scale is not None or layer.v_scale is not None,
    }
    return next((f"layer {layer.layer_id} has {what}" for what, there in oddities.items() if there), "")


class SliceAttention:
    """What SGLang's layers get as their attention backend while a slice runs.

    `aim` says which tokens the slice has; the slots of all tokens before them must hold K and V of the layer.
    """

    def __init__(self, pool: Any, req_to_token_pool: Any, slots: torch.Tensor) -> None:
        """`pool`: the plain pool that `pool.read_layout` accepts. `slots`: int64 [tokens], on its device."""
        # The names by which SGLang's accessors find the pools of the active context.
        self.token_to_kv_pool = pool
        self.req_to_token_pool = req_to_token_pool
        self._slots = slots
        self._aimed = (-1, -1)
        self._seen: slice | torch.Tensor = slice(0, 0)
        self._kv_only = False
        self._written = 0

    def aim(self, start: int, end: int, *, kv_only: bool) -> None:
        """The next layer call is for the tokens [start, end)."""
        if self._aimed != (start, end):
            seen = self._slots[:end]
            self._seen = slots_of(seen) if seen.device.type == "cpu" else seen
            self._aimed = (start, end)
        self._kv_only = kv_only
        self._written = 0

    @property
    def written(self) -> int:
        """How often K and V were written since `aim`: once, for a layer as recompute expects it."""
        return self._written

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Write k, v [tokens, kv_heads, head_dim]; return the attention of q [tokens, heads * head_dim].

        Raises:
            KvWritten: the slice wants K and V only.
            NotPlainAttention: nothing was written.
        """
        self._require_plain(k, v, layer, save_kv_cache, kwargs)
        pool = self.token_to_kv_pool
        start, end = self._aimed
        pool.set_kv_buffer(layer, self._write_loc(self._slots[start:end]), k, v)
        self._written += 1
        if self._kv_only:
            raise KvWritten
        # Not get_key_buffer, which waits for whatever load the last batch was registered with.
        k_all, v_all = pool.k_buffer[layer.layer_id], pool.v_buffer[layer.layer_id]
        rows = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if rows.device.type != "cpu":
            seen = self._slots[:end]
            return attend_gathered(
                rows, k_all.index_select(0, seen), v_all.index_select(0, seen), layer.scaling
            ).reshape(q.shape)
        out = torch.empty_like(rows)
        attend(rows, k_all, v_all, [Span(0, end - start, start, self._seen)], out, scale=layer.scaling)
        return out.view(q.shape)

    def _write_loc(self, slots: torch.Tensor) -> Any:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        return KVWriteLoc(slots, None)

    def _require_plain(
        self, k: object, v: object, layer: RadixAttention, save_kv_cache: bool, kwargs: dict[str, Any]
    ) -> None:
        extras = sorted(name for name, value in kwargs.items() if value is not None)
        why = why_not_plain(layer)
        if extras:
            why = f"layer {layer.layer_id} gives its attention {', '.join(extras)}"
        elif k is None or v is None or not save_kv_cache:
            why = f"layer {layer.layer_id} writes its K and V by itself"
        if why:
            raise NotPlainAttention(why)


def attend_gathered(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Causal attention of the last queries, q [new, heads, dim], over k, v [all, kv_heads, dim]; any device.

    The last query sees every key, the one before it all but the last, and so on. Returns q's shape.
    """
    out: torch.Tensor = scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.to(q.dtype).transpose(0, 1).unsqueeze(0),
        v.to(q.dtype).transpose(0, 1).unsqueeze(0),
        attn_mask=causal_lower_right(q.shape[0], k.shape[0]),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)


def attention_layers(model: torch.nn.Module) -> Iterable[RadixAttention]:
    """Every attention of the model, in the order of its modules."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return [module for module in model.modules() if isinstance(module, RadixAttention)]

"""The attention backend `krul_cpu` as SGLang sees it; the arithmetic is in cpu_attention.py.

Apart from that module because this one needs much of SGLang, which must not be imported before its plugins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sgl_krul.engine.cpu_attention import Span, attend, slots_of

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

__all__ = ["KrulCpuAttention"]


class _Plan(NamedTuple):
    # The tensors the plan was made from. Their identity tells whether it fits a batch.
    rows: torch.Tensor
    seq_lens: torch.Tensor
    spans: list[Span]


class KrulCpuAttention(TorchNativeAttnBackend):
    """Attention on a CPU for plain decoder layers; all else is left to `torch_native`."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self.forward_metadata = self._plan(forward_batch)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """New queries `q` [tokens, heads * head_dim] over all keys so far; returns q's shape and dtype."""
        return self._forward(super().forward_extend, q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """One query a sequence, `q` [sequences, heads * head_dim]; returns q's shape and dtype."""
        q = q.reshape(-1, layer.tp_q_head_num * layer.qk_head_dim)
        return self._forward(super().forward_decode, q, k, v, layer, forward_batch, save_kv_cache)

    def _is_unusual(self, layer: RadixAttention, forward_batch: ForwardBatch) -> bool:
        return bool(
            self.use_sliding_window_kv_pool
            or layer.is_cross_attention
            or layer.attn_type == AttentionType.ENCODER_ONLY
            or layer.qk_head_dim != layer.v_head_dim
            or forward_batch.encoder_lens is not None
        )

    def _forward(
        self,
        native: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        """Attention of either kind; `native` is what `torch_native` has for layers that are not plain."""
        if self._is_unusual(layer, forward_batch):
            return native(q, k, v, layer, forward_batch, save_kv_cache)
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        window = layer.sliding_window_size
        out = torch.empty_like(q)
        attend(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            self._spans(forward_batch),
            out.view(-1, layer.tp_q_head_num, layer.v_head_dim),
            scale=layer.scaling,
            window=None if window is None or window < 0 else window,
        )
        return out

    def _spans(self, forward_batch: ForwardBatch) -> list[Span]:
        plan = self.forward_metadata
        if (
            isinstance(plan, _Plan)
            and plan.rows is forward_batch.req_pool_indices
            and plan.seq_lens is forward_batch.seq_lens
        ):
            return plan.spans
        return self._plan(forward_batch).spans

    def _plan(self, forward_batch: ForwardBatch) -> _Plan:
        rows, lengths = forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist()
        if forward_batch.forward_mode.is_decode_or_idle():
            new = [1] * len(lengths)
        else:
            new = forward_batch.extend_seq_lens.tolist()
        table = self.req_to_token_pool.req_to_token
        spans, start = [], 0
        for row, length, count in zip(rows, lengths, new, strict=True):
            spans.append(Span(start, start + count, length - count, slots_of(table[row, :length])))
            start += count
        return _Plan(forward_batch.req_pool_indices, forward_batch.seq_lens, spans)

"""K and V of a session's leading tokens, computed anew by the model's own layers, slice by slice.

A slice is one block of tokens through one layer. Between two slices the scheduler may run any batch, and
other sessions their slices: a block keeps its activations and its residual state to itself, and the forward
context that SGLang's layers read is put back after every slice, also after a failed one.

Slices run in the scheduler's thread. Under tensor parallelism layers add up their parts between the ranks, so
every rank must run the same slices in the same order.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_krul.engine.recompute_attention import (
    KvWritten,
    SliceAttention,
    attention_layers,
    why_not_plain,
)
from sgl_krul.layout import KvLayout

__all__ = ["Recompute", "Recomputer"]

log = logging.getLogger(__name__)

# Rotations that depend on the length of the batch they are in, which no test of a few tokens would show.
_ROTATIONS_BY_LENGTH = ("Phi3LongRoPEScaledRotaryEmbedding", "DualChunkRotaryEmbedding")


@dataclass
class _Block:
    """A block of tokens on its way through the layers: what layer `layer` will get."""

    start: int
    end: int
    layer: int
    hidden: Any  # a tensor [end - start, hidden_size]
    batch: Any


class Recomputer:
    """Recomputes with the layers of one server's model. `reason`: why it must not be used, "" when it may.

    Until `self_test` has passed, `reason` is not empty.
    """

    def __init__(self, model_runner: Any, layout: KvLayout) -> None:
        self.runner = model_runner
        self.layout = layout
        self.device = torch.device(model_runner.device)
        self.vocab_size: int = model_runner.model_config.vocab_size
        self.context_tokens: int = model_runner.model_config.context_len
        self._unfit = _why_unfit(model_runner.model, layout)
        self.reason = self._unfit or "recompute has not been tested on this server yet"

    @property
    def model_name(self) -> str:
        """The class of the model, as it is told to people."""
        return type(self.runner.model).__name__

    def self_test(self) -> None:
        """Compute a few tokens with the server's own forward, recompute them in several ways, and compare.

        Sets `reason`. Never raises, and leaves the KV pool and the request pool as they were. Call it in the
        scheduler's thread, on every rank, while nothing else uses the pools.
        Some 40 tokens go through the model four times.
        """
        from sgl_krul.engine.recompute_check import check_recompute, same_on_all_ranks

        reason = self._unfit
        if not reason:
            try:
                reason = check_recompute(self)
            except Exception as error:  # whatever a model does here, the server goes on without recompute
                log.warning("recompute is off: its self-test failed", exc_info=True)
                text = str(error).strip().splitlines()
                reason = (
                    f"the self-test of {self.model_name} failed with {type(error).__name__}"
                    f"{f': {text[0]}' if text else ''}"
                )
        self.reason = same_on_all_ranks(reason)
        if self.reason:
            log.warning("recompute is off, sessions are loaded whole: %s", self.reason)

    def open(self, token_ids: array[int] | NDArray[np.int64], slots: torch.Tensor) -> Recompute:
        """Recompute for one session.

        Args:
            token_ids: all tokens of the session that may be recomputed, from its first on.
            slots: int64 [tokens], the pool slot of each.

        Raises:
            ValueError: tokens the model does not have, more than its context, or another count of slots.
        """
        ids = np.ascontiguousarray(token_ids, np.int64)
        if ids.ndim != 1 or slots.shape != ids.shape:
            raise ValueError(f"expected one slot a token; got {tuple(slots.shape)} for {ids.shape} tokens")
        if len(ids) > self.context_tokens:
            raise ValueError(f"{len(ids)} tokens are more than the model's context of {self.context_tokens}")
        # An id beyond the vocabulary would stop a CUDA device for good.
        if len(ids) and not (0 <= int(ids.min()) and int(ids.max()) < self.vocab_size):
            raise ValueError(
                f"token ids from {ids.min()} to {ids.max()}: the model has 0 to {self.vocab_size - 1}"
            )
        with self.on_device():
            return Recompute(self, torch.from_numpy(ids).to(self.device), slots.to(self.device, torch.int64))

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """No gradients; on CUDA, on the stream of the forwards, behind what the scheduler has enqueued.

        Slices share the workspaces of collectives and kernels with the forwards, so they must not overlap.
        """
        with torch.no_grad():
            if self.device.type != "cuda":
                yield
                return
            stream = self.runner.forward_stream
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                yield

    def synchronize(self) -> None:
        """Wait until the slices run so far are done on the device. On a CPU they are when `run` returns."""
        if self.device.type == "cuda":
            self.runner.forward_stream.synchronize()


class Recompute:
    """One session's recompute: at most one block is on its way through the layers."""

    def __init__(self, recomputer: Recomputer, token_ids: torch.Tensor, slots: torch.Tensor) -> None:
        """Made by `Recomputer.open`."""
        self._recomputer = recomputer
        self._layers = recomputer.layout.layers
        self._model = recomputer.runner.model.model
        self._token_ids = token_ids
        self._slots = slots
        self._positions = torch.arange(len(token_ids), device=token_ids.device)
        runner = recomputer.runner
        self._attention = SliceAttention(runner.token_to_kv_pool, runner.req_to_token_pool, slots)
        self._block: _Block | None = None

    def run(self, start: int, end: int, layer: int, kv_only: bool) -> None:
        """Run the tokens [start, end) through one layer; their K and V of it are in their slots then.

        Layer 0 begins a block, and drops one that was not finished. Every other layer goes on with the block
        that began at `start`; `end` may be smaller than at the layer before. With `kv_only` the block ends
        here and costs no attention and no MLP; it ends in the last layer anyway.

        The slots of [0, start) must hold K and V of this layer.

        Raises:
            ValueError: no such slice can follow. Nothing was run.
            Exception: what the model raised. The block is gone; its slots of this layer hold anything.
        """
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        self._require_next(start, end, layer)
        context: Any = ForwardContext(attn_backend=self._attention)
        kv_only = kv_only or layer == self._layers - 1
        with self._recomputer.on_device(), forward_context(context):
            block, self._block = self._block, None  # not kept where anything below fails
            block = self._begin(start, end) if layer == 0 or block is None else self._narrow(block, end)
            self._attention.aim(start, end, kv_only=kv_only)
            try:
                hidden = self._model.layers[layer](block.batch.positions, block.hidden, block.batch)
            except KvWritten:
                return
            if self._attention.written != 1:
                raise RuntimeError(
                    f"layer {layer} wrote its K and V {self._attention.written} times, expected once"
                )
            block.hidden = _settle(hidden, block.batch)
        block.layer = layer + 1
        self._block = block

    def close(self) -> None:
        """Drop the block. The slots are the caller's. May be called again."""
        self._block = None

    def _require_next(self, start: int, end: int, layer: int) -> None:
        if not 0 <= start < end <= len(self._token_ids):
            raise ValueError(f"tokens [{start}, {end}): expected some of [0, {len(self._token_ids)})")
        if not 0 <= layer < self._layers:
            raise ValueError(f"layer {layer}: expected 0 to {self._layers - 1}")
        block = self._block
        if layer == 0 or (block is not None and (block.start, block.layer) == (start, layer)):
            if layer and block is not None and end > block.end:
                raise ValueError(
                    f"tokens [{start}, {end}): the block ended at {block.end} in the layer before"
                )
            return
        at = "no block is under way" if block is None else f"token {block.start}, layer {block.layer} is next"
        raise ValueError(f"token {start}, layer {layer} can't follow: {at}")

    def _begin(self, start: int, end: int) -> _Block:
        from sglang.srt.layers.layer_boundary.residual import batch as residual

        batch = self._make_batch(start, end)
        hidden = self._model.embed_tokens(batch.input_ids)
        residual.start(batch)
        return _Block(start, end, 0, hidden, batch)

    def _narrow(self, block: _Block, end: int) -> _Block:
        """The same block without its tokens from `end` on."""
        from sglang.srt.layers.layer_boundary.residual import batch as residual

        if end == block.end:
            return block
        count = end - block.start
        whole = residual.export_replay_handoff(block.hidden, block.batch)
        rest = None if whole.residual is None else whole.residual[:count]
        batch = self._make_batch(block.start, end)
        hidden = residual.import_replay_handoff(
            whole._replace(value=whole.value[:count], residual=rest), batch
        )
        return _Block(block.start, end, block.layer, hidden, batch)

    def _make_batch(self, start: int, end: int) -> Any:
        """An extend batch of one request whose tokens [0, start) are cached.

        It has no row in the request pool: only our own attention, which needs none, is asked about it.
        """
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        count, device = end - start, self._token_ids.device
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            input_ids=self._token_ids[start:end],
            req_pool_indices=torch.zeros(1, dtype=torch.int64, device=device),
            seq_lens=torch.full((1,), end, dtype=torch.int64, device=device),
            out_cache_loc=self._slots[start:end],
            seq_lens_sum=end,
            seq_lens_cpu=torch.full((1,), end, dtype=torch.int64),
            positions=self._positions[start:end],
            extend_num_tokens=count,
            extend_seq_lens_cpu=[count],
            extend_prefix_lens_cpu=[start],
        )


def _settle(hidden: Any, batch: Any) -> Any:
    """Complete a sum that the layer left to the next one (tensor parallelism).

    Other batches may run before the next layer does, and what is owed may lie in a buffer they share.
    """
    from sglang.srt.layers.layer_boundary.residual import batch as residual

    return residual.complete_output(hidden, batch)


def _why_unfit(model: Any, layout: KvLayout) -> str:
    """What shows without running anything that the model can't be recomputed; "" when nothing does."""
    name, inner = type(model).__name__, getattr(model, "model", None)
    layers = getattr(inner, "layers", ())
    if not hasattr(inner, "embed_tokens") or len(layers) != layout.layers:
        return f"{name} has not the layers and embeddings that recompute knows, one layer for each of its KV"
    for hook in ("prepare_for_forward", "prepare_forward_batch"):
        if hasattr(model, hook):
            return f"{name} prepares every batch by itself ({hook})"
    attentions = list(attention_layers(model))
    if [attention.layer_id for attention in attentions] != list(range(layout.layers)):
        return f"{name} has not one attention a layer"
    why = next(filter(None, map(why_not_plain, attentions)), "")
    if why:
        return f"{name} is not plain causal attention: {why}"
    for module in model.modules():
        if type(module).__name__ in _ROTATIONS_BY_LENGTH:
            return f"{name} rotates K by the length of the batch ({type(module).__name__})"
    return ""

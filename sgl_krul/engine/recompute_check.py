"""Does recompute give what the server's own forward gives? Asked once, before the server serves.

A few tokens go through the server's forward as a request's would, attention backend and all. Then they are
recomputed into other slots along several staircases, the cells below the stairs taken from the reference as a
restore takes them from a tier, and every recomputed cell is compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from sgl_krul.engine.recompute import Recompute, Recomputer

__all__ = [
    "TOLERANCES",
    "Difference",
    "borrowed_slots",
    "check_recompute",
    "compare",
    "largest_difference",
    "largest_of_all_ranks",
    "read_kv",
    "run_staircase",
    "same_on_all_ranks",
    "serve_forward",
]

TOLERANCES = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 1.2e-1}
"""How far a token's K (or V) in one layer may be off: the norm of the difference, over the root mean square
of the norms of that layer's K (or V). Splitting a prompt otherwise moves the sums by rounding alone: after 30
layers by 4e-6 in float32, 9e-3 in float16, 4.5e-2 in bfloat16 (measured, SmolLM2-135M). A wrong mask,
position or scale moves some token by tens of percent.
"""

_TOKENS = 40
_SEED = 20261130


class Staircase(NamedTuple):
    """`ends`: how many leading tokens are recomputed, for each layer, never rising. `blocks`: where blocks
    begin.
    """

    blocks: tuple[int, ...]
    ends: tuple[int, ...]


class Difference(NamedTuple):
    """The largest of a comparison. `side`: K or V."""

    size: float
    layer: int
    side: str


def check_recompute(recomputer: Recomputer) -> str:
    """Compare; returns why recompute must not be used, "" when it may. Raises what the model raises."""
    computed_in = str(recomputer.runner.model_config.dtype).removeprefix("torch.")
    dtype = max(recomputer.layout.dtype, computed_in, key=lambda name: TOLERANCES.get(name, 0.0))
    worst = largest_difference(recomputer)
    if worst.size <= TOLERANCES[dtype]:
        return ""
    return (
        f"{recomputer.model_name} recomputed gives another {worst.side} in layer {worst.layer} than the "
        f"server's own forward: it is off by {worst.size:.2g} of its size, and rounding in {dtype} explains "
        f"at most {TOLERANCES[dtype]:g}"
    )


def largest_difference(recomputer: Recomputer) -> Difference:
    """Of all staircases. The pools are as before when this returns or raises."""
    layout, runner = recomputer.layout, recomputer.runner
    # More than a page, so that slots are not consecutive; fewer where the model has less context.
    count = min(max(_TOKENS, layout.page_size + 8), recomputer.context_tokens - 1)
    token_ids = np.random.default_rng(_SEED).integers(0, recomputer.vocab_size, count, np.int64)
    reference = serve_forward(recomputer, token_ids)
    worst = Difference(0.0, 0, "K")
    with borrowed_slots(runner, count, layout.page_size) as slots:
        for staircase in _staircases(count, layout.layers):
            _prepare(runner.token_to_kv_pool, slots, reference, staircase.ends)
            run_staircase(recomputer.open(token_ids, slots), staircase.blocks, staircase.ends)
            recomputer.synchronize()
            found = compare(runner.token_to_kv_pool, slots, reference, staircase.ends)
            worst = max(worst, found, key=lambda difference: difference.size)
    return worst


def run_staircase(recompute: Recompute, blocks: Sequence[int], ends: Sequence[int]) -> None:
    """Recompute the first `ends[layer]` tokens in each layer, block by block. `blocks`: where each begins."""
    for index, start in enumerate(blocks):
        stop = blocks[index + 1] if index + 1 < len(blocks) else ends[0]
        block_ends = [min(stop, end) for end in ends]
        for layer, end in enumerate(block_ends):
            if end <= start:
                break
            deeper = layer + 1 < len(ends) and block_ends[layer + 1] > start
            recompute.run(start, end, layer, kv_only=not deeper)
    recompute.close()


def _staircases(count: int, layers: int) -> list[Staircase]:
    half = count // 2
    steps = max(1, layers - 1)
    gentle = tuple(count - (count - half) * layer // steps for layer in range(layers))
    steep = tuple(count - (count - 1) * layer // steps for layer in range(layers))
    return [
        Staircase((0, half), gentle),
        Staircase((0, half // 2, half), steep),
    ]


class Reference(NamedTuple):
    """K [layers, tokens, kv_heads, head_dim] and V likewise, on the device."""

    k: torch.Tensor
    v: torch.Tensor


def serve_forward(recomputer: Recomputer, token_ids: np.ndarray[Any, Any]) -> Reference:
    """K and V as the server's own forward computes them; slots and row of the request are given back."""
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    runner = recomputer.runner
    request = Req("krul-self-test", "", array("q", token_ids.tolist()), SamplingParams(max_new_tokens=1))
    request.full_untruncated_fill_ids = request.origin_input_ids
    request.logprob_start_len = -1
    request.extend_end = len(token_ids)
    try:
        with torch.no_grad():
            batch = ScheduleBatch.init_new(
                reqs=[request],
                req_to_token_pool=runner.req_to_token_pool,
                token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
                tree_cache=_NoTree(runner, recomputer.layout.page_size),
                model_config=runner.model_config,
                enable_overlap=False,
                spec_algorithm=SpeculativeAlgorithm.NONE,
            )
            batch.prepare_for_extend()
            if batch.input_ids is None:
                batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
                batch.prefill_input_ids_cpu = None
            runner.forward(ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False))
            return read_kv(runner.token_to_kv_pool, _slots_of_request(runner, request))
    finally:
        if request.kv.holds_kv:
            slots = _slots_of_request(runner, request)
            if len(slots):
                runner.token_to_kv_pool_allocator.free(slots)
            runner.req_to_token_pool.free(request)


class _NoTree:
    """The radix cache of a batch that shares nothing: allocation asks it, and nothing is inserted."""

    def __init__(self, runner: Any, page_size: int) -> None:
        self.page_size = page_size
        self.device = runner.device
        self.token_to_kv_pool_allocator = runner.token_to_kv_pool_allocator

    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False

    def supports_prefix_sharing(self) -> bool:
        return True

    def evict(self, params: object) -> None:
        pass

    def maybe_hand_to_session(self, request: object) -> None:
        pass


@contextmanager
def borrowed_slots(runner: Any, count: int, page_size: int) -> Iterator[torch.Tensor]:
    """`count` free slots, int64, page by page from the last to the first, so that they are not consecutive.

    Raises:
        RuntimeError: the pool has no room.
    """
    allocator = runner.token_to_kv_pool_allocator
    slots = allocator.alloc(-(-count // page_size) * page_size)
    if slots is None:
        raise RuntimeError(f"the KV pool has no room for {count} tokens")
    try:
        yield slots.view(-1, page_size).flip(0).reshape(-1)[:count].to(torch.int64)
    finally:
        allocator.free(slots)


def _slots_of_request(runner: Any, request: Any) -> torch.Tensor:
    table = runner.req_to_token_pool.req_to_token
    taken: torch.Tensor = table[request.kv.req_pool_idx, : request.kv.kv_allocated_len].to(torch.int64)
    return taken


def read_kv(pool: Any, slots: torch.Tensor) -> Reference:
    """A copy of what these slots hold in every layer."""
    return Reference(
        torch.stack([buffer[slots] for buffer in pool.k_buffer]),
        torch.stack([buffer[slots] for buffer in pool.v_buffer]),
    )


def _prepare(pool: Any, slots: torch.Tensor, reference: Reference, ends: Sequence[int]) -> None:
    """What is to be recomputed holds NaN first; the rest is as a tier would bring it."""
    for buffers, values in ((pool.k_buffer, reference.k), (pool.v_buffer, reference.v)):
        for layer, end in enumerate(ends):
            buffers[layer][slots[:end]] = float("nan")
            buffers[layer][slots[end:]] = values[layer, end:]


def compare(pool: Any, slots: torch.Tensor, reference: Reference, ends: Sequence[int]) -> Difference:
    """The largest difference, in the measure of TOLERANCES. What is not a number is off by infinity."""
    found = read_kv(pool, slots)
    layers, count = len(ends), len(slots)
    computed = torch.arange(count)[None, :] < torch.tensor(ends)[:, None]
    worst = Difference(0.0, 0, "K")
    for side, ours, theirs in (("K", found.k, reference.k), ("V", found.v, reference.v)):
        sizes = theirs.reshape(layers, count, -1).float().norm(dim=2)
        scale = sizes.square().mean(dim=1, keepdim=True).sqrt().clamp_min(1e-20)
        off = (ours.float() - theirs.float()).reshape(layers, count, -1).norm(dim=2) / scale
        off = off.cpu().nan_to_num(torch.inf, torch.inf).masked_fill(~computed, 0.0).amax(dim=1)
        layer = int(off.argmax())
        worst = max(worst, Difference(float(off[layer]), layer, side), key=lambda d: d.size)
    return worst


def same_on_all_ranks(reason: str) -> str:
    """Under tensor parallelism a rank must not recompute alone: it refuses when another one does."""
    refused = largest_of_all_ranks(float(bool(reason)))
    return reason or ("another rank's self-test failed (see its log)" if refused else "")


def largest_of_all_ranks(value: float) -> float:
    """The same on every rank. All must call it, in the same order."""
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_size == 1:
        return value
    shared = torch.tensor([value], dtype=torch.float64)
    group = get_parallel().tp_group.cpu_group
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX, group=group)
    return float(shared)

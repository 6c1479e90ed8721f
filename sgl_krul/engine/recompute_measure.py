"""How long slices take on this machine, measured one by one between the batches of a running server."""

from __future__ import annotations

import time
from collections.abc import Generator

import numpy as np
import torch

from sgl_krul.engine.recompute import Recomputer
from sgl_krul.engine.recompute_check import largest_of_all_ranks
from sgl_krul.restore.cost import ComputeSample

__all__ = ["CALIBRATION_TOKENS", "calibration_slices"]

CALIBRATION_TOKENS = 2560
"""Slots that `calibration_slices` can make use of: blocks of 512 behind 2,048 tokens."""

# In an order in which few of them say most: short and long blocks, behind nothing and behind much.
_FIRSTS = (0, 2048, 512, 1024)
_BLOCKS = (64, 512, 128, 256)
_LAYERS = 4
_SEED = 20261130


def calibration_slices(
    recomputer: Recomputer, slots: torch.Tensor, *, budget_s: float = 8.0
) -> Generator[ComputeSample]:
    """Run slices of every kind, and yield after each what it took. Nothing is kept.

    Blocks of 64 to 512 tokens behind 0 to 2,048, each through three whole layers and to K and V of a fourth.
    Ends early when the slices have taken `budget_s` seconds in all. Under tensor parallelism every rank must
    drive its own to the same point.

    Args:
        recomputer: one that may be used.
        slots: int64 [tokens], pool slots reserved by the caller; their bytes are overwritten. Fewer than
            CALIBRATION_TOKENS leave out the longer ones; fewer than 64 yield nothing.
    """
    room = min(len(slots), recomputer.context_tokens, CALIBRATION_TOKENS)
    slots = slots[:room]
    layers = min(_LAYERS, recomputer.layout.layers)
    # What lies in free slots may be numbers of any size, also such that slow a processor down.
    pool = recomputer.runner.token_to_kv_pool
    for layer in range(layers):
        pool.k_buffer[layer][slots] = 0
        pool.v_buffer[layer][slots] = 0
    token_ids = np.random.default_rng(_SEED).integers(0, recomputer.vocab_size, room, np.int64)
    recompute = recomputer.open(token_ids, slots)
    spent = 0.0
    try:
        for first, tokens in ((first, tokens) for first in _FIRSTS for tokens in _BLOCKS):
            if first + tokens > room:
                continue
            for layer in range(layers):
                kv_only = layer == layers - 1
                began = time.perf_counter()
                recompute.run(first, first + tokens, layer, kv_only)
                recomputer.synchronize()
                seconds = time.perf_counter() - began
                spent += seconds
                yield ComputeSample(first, tokens, kv_only, seconds)
            if largest_of_all_ranks(spent) >= budget_s:
                return
    finally:
        recompute.close()

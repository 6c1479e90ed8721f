"""What a staircase and a cut come to, in seconds: every plan's numbers are made here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from sgl_krul.restore.bound import restore_bounds
from sgl_krul.restore.cost import Floats, Rates
from sgl_krul.restore.plan import RestorePlan, Strategy
from sgl_krul.restore.table import Depths, Table, compute_seconds
from sgl_krul.restore.task import RestoreTask

__all__ = ["Follow", "Pricer", "expect_staircase"]

Follow = Literal["end", "layers"]


class Pricer:
    """One task under one set of rates.

    Raises:
        ValueError: `follow` is neither of the two.
    """

    def __init__(self, task: RestoreTask, rates: Rates, follow: Follow) -> None:
        if follow not in ("end", "layers"):
            raise ValueError(
                f"follow {follow!r}: expected 'end' (the restore job) or 'layers' (the memory path)"
            )
        self.task, self.rates, self.follow = task, rates, follow
        self.table = Table(task, rates)

    def price(self, staircase: Sequence[int], tokens: int, strategy: Strategy, why: str) -> RestorePlan:
        """The plan of this staircase, which fits the task."""
        table, task = self.table, self.task
        count = table.chunks.count(tokens)
        depths = table.depths(staircase, count)
        rows = np.arange(count)
        compute_s = compute_seconds(task, table.chunks, self.rates, staircase)
        start_s = float(table.start_seconds(depths))
        load_s = start_s + float(table.load[rows, depths].sum())
        fill_s = float(table.fill[rows, depths].sum())
        layer_s = self.forward_layer_s(tokens)
        forward_s = task.layers * layer_s + self._request_s
        restored_s = max(compute_s, load_s) + forward_s
        if self.follow == "layers":
            ready = start_s + np.cumsum(table.layer_loads(depths))
            follows = ready + layer_s * np.arange(task.layers, 0, -1)
            restored_s = max(compute_s + task.layers * layer_s, float(follows.max())) + self._request_s
        return RestorePlan(
            strategy=strategy,
            tokens=tokens,
            staircase=tuple(staircase),
            load_bytes=int(table.bytes[rows, depths].sum()),
            compute_s=compute_s,
            load_s=load_s,
            forward_s=forward_s,
            ttft_s=restored_s + fill_s,
            measured=self._measured(table.tier_names(count)),
            why=why,
            fill_s=fill_s,
            on_device_tokens=task.on_device_tokens,
        )

    def _measured(self, tiers: Iterable[str]) -> bool:
        return self.rates.compute is not None and all(tier in self.rates.tiers for tier in tiers)

    @property
    def _request_s(self) -> float:
        return self.rates.request_s if self.task.new_tokens else 0.0

    def forward_layer_s(self, tokens: int) -> float:
        """One layer of the forward of everything after the first `tokens`; 0.0 without compute rates."""
        rate = self.rates.compute
        first = max(tokens, self.task.on_device_tokens)
        left = self.task.tokens - first + self.task.new_tokens
        return rate.forward_s(first, left) if rate is not None else 0.0

    def recompute_all(self, why: str = "nothing is restored: SGLang prefills") -> RestorePlan:
        """No restore."""
        forward_s = self.task.layers * self.forward_layer_s(0) + self._request_s
        return RestorePlan(
            strategy=Strategy.recompute,
            tokens=0,
            staircase=(0,) * self.task.layers,
            load_bytes=0,
            compute_s=0.0,
            load_s=0.0,
            forward_s=forward_s,
            ttft_s=forward_s,
            measured=self.rates.compute is not None,
            why=why,
            on_device_tokens=self.task.on_device_tokens,
        )

    def bounds(self, *, rough: bool = False) -> Floats:
        """Bounds of plans that bring 0 ... C chunks, the forward of the rest included, float64 [C + 1].

        A forward that follows layer by layer has its last layer after the restore, whatever it overlaps.
        """
        seconds = restore_bounds(self.table, rounds=2 if rough else 4)
        ends = [self.task.on_device_tokens, *self.table.chunks.ends.tolist()]
        layer_s = np.array([self.forward_layer_s(end) for end in ends])
        if self.follow == "layers":
            result: Floats = np.maximum(seconds + layer_s, self.task.layers * layer_s)
        else:
            result = seconds + self.task.layers * layer_s
        return result + self._request_s

    def restore_seconds(self, depths: Depths, layer_s: float) -> Floats:
        """Until the first new token, without what all depths have in common: [..., C] -> float64 [...]."""
        table, layers = self.table, self.task.layers
        rows = np.arange(depths.shape[-1])
        start_s = table.start_seconds(depths)
        computed = table.compute[rows, depths].sum(-1)
        if self.follow == "end":
            done = np.maximum(computed, start_s + table.load[rows, depths].sum(-1))
        else:
            ready = start_s[..., None] + np.cumsum(table.layer_loads(depths), -1)
            follows = ready + layer_s * np.arange(layers, 0, -1)
            done = np.maximum(computed + layers * layer_s, follows.max(-1))
        total: Floats = done + table.fill[rows, depths].sum(-1)
        return total


def expect_staircase(table: Table, staircase: Sequence[int], tokens: int) -> None:
    """Refuse what can't be priced.

    Raises:
        ValueError: see `sgl_krul.restore.planner.predict`.
    """
    task, chunks = table.task, table.chunks
    if len(staircase) != task.layers:
        raise ValueError(
            f"staircase of {len(staircase)} layers: expected {task.layers}, one R_l for each layer"
        )
    ends = chunks.ends.tolist()
    if tokens not in (0, task.on_device_tokens, *ends):
        raise ValueError(
            f"tokens {tokens}: expected the end of a chunk after the device's {task.on_device_tokens} tokens "
            f"(one of {ends[:3]}... {ends[-1:]}), or 0 for no restore"
        )
    if tokens <= task.on_device_tokens:
        return
    stairs = tuple(staircase)
    steps = [tokens, *stairs, task.on_device_tokens]
    if any(below > above for above, below in pairwise(steps)):
        raise ValueError(
            f"staircase {stairs}: expected R_0 >= R_1 >= ..., from at most {tokens} tokens down to at "
            f"least the {task.on_device_tokens} on the device; no layer can be recomputed for more tokens "
            "than the one before it"
        )
    if any(end % task.page_size for end in staircase):
        raise ValueError(f"staircase {stairs}: expected whole pages of {task.page_size} tokens")
    count = chunks.count(tokens)
    short = table.depths(staircase, count) < chunks.floor(count)
    if short.any():
        index = int(short.argmax())
        raise ValueError(
            f"staircase {stairs}: the first {int(chunks.floor(count)[index])} layers of the chunk that "
            f"ends at token {ends[index]} must be recomputed, for it or a later one is not stored there; "
            f"expected R_l of at least {ends[index]} in these layers, or a cut before"
        )

"""Which part of a session to recompute and which to load. Pure: a task and rates in, a plan out.

Both streams begin at once and neither waits for the other, so a restore lasts as long as the slower one, plus
the chunks that were lost and have to wait for everything before them (`fill_s`), plus the forward of what is
left: the new tokens, and stored tokens after a cut. A plan is a staircase and a cut; `predict` prices any of
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from sgl_krul.restore.cost import Floats, Rates
from sgl_krul.restore.paper_plan import pyramid_depths
from sgl_krul.restore.plan import RestorePlan, Strategy
from sgl_krul.restore.pricer import Follow, Pricer, expect_staircase
from sgl_krul.restore.staircase import StreamCosts, best_depths
from sgl_krul.restore.table import Depths
from sgl_krul.restore.task import RestoreTask, StoredChunk

__all__ = [
    "Follow",
    "RestorePlan",
    "RestoreTask",
    "StoredChunk",
    "Strategy",
    "lower_bound",
    "plan_restore",
    "predict",
]

# What recompute must gain over loading all: it takes the device from other chats.
_WORTH_PART, _WORTH_S = 0.05, 0.010
_CUTS = 6  # that are looked into
_CLOSE = 0.98  # of the best plan so far: a cut whose bound is above that is not worth a look


def plan_restore(
    task: RestoreTask,
    rates: Rates,
    strategy: Strategy = Strategy.optimal,
    *,
    follow: Follow = "end",
    may_recompute: bool = True,
) -> RestorePlan:
    """The plan for a strategy.

    `follow`: the forward of the new tokens comes after the whole restore ("end"), or layer by layer, each
    when its K and V are in place ("layers", SGLang's own loads from memory). `may_recompute` False: the
    model's class was refused; lost chunks cut the restore. Without compute rates all strategies but
    `recompute` load all.
    """
    planner = _Planner(task, rates, follow, may_recompute)
    match strategy:
        case Strategy.recompute:
            return planner.pricer.recompute_all()
        case Strategy.load:
            return planner.load_all()
        case Strategy.optimal:
            return planner.optimal()
    if not planner.can_compute:
        why = f"{strategy} needs recompute, and {planner.no_compute}: load all"
        return replace(planner.load_all(), why=why)
    depths = pyramid_depths(planner.table) if strategy == Strategy.paper else planner.half_depths()
    return planner.fixed(depths, strategy)


def predict(
    task: RestoreTask,
    rates: Rates,
    staircase: Sequence[int],
    tokens: int,
    *,
    follow: Follow = "end",
) -> RestorePlan:
    """What one given staircase costs, to the token: `tokens` in place, R_l of them recomputed at layer l.

    A chunk is loaded for every layer whose R_l does not reach its end, whole. Lost chunks that the staircase
    doesn't recompute in all layers are filled at the end.

    Raises:
        ValueError: the staircase does not fit the task, or leaves out what is stored nowhere.
    """
    pricer = Pricer(task, rates, follow)
    expect_staircase(pricer.table, staircase, tokens)
    if tokens <= task.on_device_tokens < task.tokens:
        return pricer.recompute_all()
    return pricer.price(staircase, tokens, Strategy.optimal, "a given staircase")


def lower_bound(task: RestoreTask, rates: Rates) -> float:
    """Seconds to the first new token that no plan of any staircase and cut can beat (`follow` "end").

    See sgl_krul.restore.bound for how it is derived.

    Raises:
        ValueError: no compute rates.
    """
    if rates.compute is None:
        raise ValueError(
            "rates without compute: nothing bounds a plan; calibrate first (krul calibrate restore)"
        )
    return float(Pricer(task, rates, "end").bounds().min())


class _Planner:
    """One task under one set of rates."""

    def __init__(self, task: RestoreTask, rates: Rates, follow: Follow, may_recompute: bool) -> None:
        self.task, self.rates, self.follow = task, rates, follow
        self.pricer = Pricer(task, rates, follow)
        self.table = self.pricer.table
        self.can_compute = may_recompute and rates.compute is not None
        self.no_compute = "nothing was measured yet" if may_recompute else "recompute is refused here"

    # -- the plans --

    def load_all(self) -> RestorePlan:
        """Everything that is stored before the first lost chunk."""
        chunks = self.table.chunks
        barred = chunks.holes if self.can_compute else chunks.bare
        count = int(barred.argmax()) if barred.any() else len(barred)
        if not count and len(barred):
            reason = "its first chunk after what the device has is lost"
            if not chunks.holes[0]:
                reason = f"its first chunk has layers that are not stored, and {self.no_compute}"
            return self.pricer.recompute_all(f"nothing can be loaded: {reason}")
        why = "all is loaded that is stored"
        if count < len(barred):
            why = "what lies before the first chunk that can't be loaded is loaded"
        if not self.can_compute:
            why += f"; {self.no_compute}"
        return self._plan(chunks.floor(count), Strategy.load, why)

    def half_depths(self) -> Depths:
        """Chunks that begin in the first half of what is not on the device, in all layers."""
        chunks, task = self.table.chunks, self.task
        middle = (task.on_device_tokens + task.tokens) / 2
        first = (chunks.starts + chunks.ends) / 2 <= middle
        depths: Depths = np.maximum(np.where(first, task.layers, 0), chunks.floor(len(first)))
        return depths

    def fixed(self, depths: Depths, strategy: Strategy) -> RestorePlan:
        """A plan for all chunks that looks at no other."""
        return self._plan(depths, strategy, f"the fixed strategy {strategy}")

    def _plan(self, depths: Depths, strategy: Strategy, why: str) -> RestorePlan:
        ends = self.table.chunks.ends
        tokens = int(ends[len(depths) - 1]) if len(depths) else self.task.tokens
        return self.pricer.price(self.table.staircase(depths), tokens, strategy, why)

    def optimal(self) -> RestorePlan:
        """The fastest plan; loading all where that is about as fast."""
        load = self.load_all()
        if self.rates.compute is None or not len(self.table.chunks.ends):
            return load
        nothing = self.pricer.recompute_all()
        best = min((load, nothing), key=lambda plan: plan.ttft_s)
        if self.can_compute:
            best = self._search(best)
        rivals = f"loading all takes {load.ttft_s:.3g} s, recomputing all {nothing.ttft_s:.3g} s"
        gain_s = load.ttft_s - best.ttft_s
        if load.strategy == Strategy.load and gain_s < _WORTH_PART * load.ttft_s + _WORTH_S:
            gain = f"recompute would save {gain_s:.3g} s, which is not worth the device"
            return replace(load, why=f"{load.why}: {rivals}, {gain}")
        if best.strategy == Strategy.recompute:
            return replace(best, why=f"{best.why}: {rivals}")
        cut = f", cut at token {best.tokens}" if best.tokens < self.task.tokens else ""
        return replace(best, why=f"both streams together take {best.ttft_s:.3g} s{cut}: {rivals}")

    def _search(self, best: RestorePlan) -> RestorePlan:
        """Better than `best`, if any staircase is: of all chunks first, then cut where that may pay.

        It may before a lost chunk, or where a slow tier begins; what can't pay is known from its bound.
        """
        count = len(self.table.chunks.ends)
        best = self._better(best, count)
        bounds = self.pricer.bounds(rough=True)
        for count in sorted(range(1, count), key=lambda count: float(bounds[count]))[:_CUTS]:
            if bounds[count] < _CLOSE * best.ttft_s:
                best = self._better(best, count)
        return best

    def _better(self, best: RestorePlan, count: int) -> RestorePlan:
        """The faster one of `best` and the plan that brings the first `count` chunks."""
        plans = (self._plan(depths, Strategy.optimal, "") for depths in self._staircases(count))
        return min((best, *plans), key=lambda plan: plan.ttft_s)

    # -- the staircases --

    def _staircases(self, count: int) -> Iterable[Depths]:
        """The best depths of the first `count` chunks, one for each view of what waits for what."""
        table, layers = self.table, self.task.layers
        layer_s = self.pricer.forward_layer_s(int(table.chunks.ends[count - 1]))
        fill, floor = table.fill[:count], table.chunks.floor(count)
        start_s = float(table.start_seconds(floor))
        streams = StreamCosts(table.compute[:count] + fill, table.load[:count] + fill, floor, 0.0, start_s)

        def seconds(depths: Depths) -> Floats:
            return self.pricer.restore_seconds(depths, layer_s)

        if self.follow == "end":
            yield best_depths(streams, seconds)
            return
        # The new tokens' forward at layer l waits for the loads of layers up to l: the slowest of these
        # counts. Any of them may be the one that binds, the last and the first being the likely ones.
        pace = table.load[:count, :1] / np.maximum(table.bytes[:count, :1], 1)
        before = np.zeros((count, layers + 1))
        before[:, 1:] = np.cumsum(table.chunks.bytes[:count] * pace, 1)
        for last in sorted({0, layers // 2, layers - 1}):
            wanted = np.maximum(before[:, last + 1 : last + 2] - before, 0.0)
            follows = StreamCosts(
                compute=streams.compute,
                load=wanted + fill,
                floor=floor,
                compute_ahead_s=layers * layer_s,
                load_ahead_s=start_s + (layers - last) * layer_s,
            )
            yield best_depths(follows, seconds)

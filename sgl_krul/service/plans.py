"""Restore plans of stored sessions: made from measured rates, explained before, and measured after."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict

from sgl_krul.config import Config
from sgl_krul.errors import NoTimeline
from sgl_krul.layout import KvLayout
from sgl_krul.pause.paper import paper_depths
from sgl_krul.pause.pipeline import Depths
from sgl_krul.restore.cost import ForwardSample, Rates
from sgl_krul.restore.paper_plan import paper_share
from sgl_krul.restore.pipeline import RestoreReport
from sgl_krul.restore.planner import (
    Follow,
    RestorePlan,
    RestoreTask,
    StoredChunk,
    Strategy,
    plan_restore,
)
from sgl_krul.restore.rate_book import RateBook
from sgl_krul.service.device_restore import Device, DeviceRestore
from sgl_krul.service.jobs import Body
from sgl_krul.service.prepared import Prepared
from sgl_krul.session.record import SessionKey
from sgl_krul.session.registry import Session
from sgl_krul.store.workers import Workers

__all__ = ["Plans"]

logger = logging.getLogger(__name__)

_KEPT_TIMELINES = 256
_USUAL_TURN_TOKENS = 64  # of a turn nobody has told us the length of


class Plans:
    """What this server knows of its speed, and what it makes of that. For one thread."""

    def __init__(self, config: Config, rates: RateBook) -> None:
        self.device: Device | None = None  # the engine sets it, where there is one
        self.book = rates
        self._config = config
        self._learner = Workers("rates", 1)
        self._timelines: OrderedDict[str, Body] = OrderedDict()

    @property
    def can_compute(self) -> bool:
        """Whether leading tokens can be recomputed here."""
        return (
            self._config.restore.recompute and self.device is not None and not self.device.refuses_recompute
        )

    @property
    def recompute(self) -> Body:
        """The same, with why not."""
        reason = "" if self.device is None else self.device.refuses_recompute
        if not self._config.restore.recompute:
            reason = "restore.recompute is false in the configuration"
        return {"available": self.can_compute, "reason": reason}

    def make(
        self,
        prepared: Prepared,
        on_device: int,
        prompt_tokens: int | None,
        strategy: Strategy | None,
    ) -> RestorePlan:
        """The plan for a session of which `on_device` tokens are there, for a request of `prompt_tokens`."""
        return self._plan(prepared.task(on_device, _new_tokens(prepared, prompt_tokens)), strategy)

    def _plan(self, task: RestoreTask, strategy: Strategy | None, follow: Follow = "end") -> RestorePlan:
        return plan_restore(
            task, self.book.rates(), self.chosen(strategy), follow=follow, may_recompute=self.can_compute
        )

    def chosen(self, strategy: Strategy | None) -> Strategy:
        """The wished or the configured one."""
        return Strategy(self._config.restore.strategy) if strategy is None else strategy

    def depths(self, tier: str, layout: KvLayout) -> Depths | None:
        """How many layers of each chunk a pause into `tier` leaves out: in paper mode Krul's pyramid.

        None: store all, as in every other mode, and where nothing can be or was measured to plan it with.
        """
        if self._config.restore.strategy != Strategy.paper or not self.can_compute:
            return None
        rates = self.book.rates()
        if rates.compute is None:
            logger.warning(
                "krul: paper mode stores all layers: nothing was measured (krul calibrate restore)"
            )
            return None

        def pyramid(chunk_tokens: Sequence[int]) -> Sequence[int]:
            size = layout.page_segment_bytes
            chunks = tuple(
                StoredChunk(tokens, tier, (tokens // layout.page_size * size,) * layout.layers)
                for tokens in chunk_tokens
            )
            task = RestoreTask(layout.layers, layout.page_size, chunks, 0, _USUAL_TURN_TOKENS)
            return paper_depths(chunk_tokens, plan_restore(task, rates, Strategy.paper).staircase)

        return pyramid

    def explain(self, session: Session, prepared: Prepared) -> Body:
        """What a resume would do now, beside loading all and recomputing all."""
        on_device = 0 if self.device is None or not prepared.chunks else self.device.on_device(prepared)
        by_memory = bool(prepared.chunks) and (self.device is None or prepared.all_in_memory)
        rates, task = self.book.rates(), prepared.task(on_device, _new_tokens(prepared, None))
        timed = rates.compute is not None
        # From memory SGLang loads layer by layer under the forward; a restore to the device comes before it.
        loads: Follow = "layers" if by_memory else "end"
        plans = {
            name: _plan_body(self._plan(task, strategy, follow), timed=timed)
            for name, strategy, follow in (
                ("plan", Strategy.load if by_memory else None, loads),
                ("load_all", Strategy.load, loads),
                ("recompute_all", Strategy.recompute, "end"),
                ("paper", Strategy.paper, "end"),
            )
            if prepared.chunks
        }
        comes = bool(prepared.chunks) and plans["plan"]["tokens"] > on_device
        return {
            "session_id": session.session_id,
            "state": session.state.value,
            "tokens": prepared.tokens,
            "on_device_tokens": on_device,
            "new_tokens": task.new_tokens,
            "path": ("memory" if by_memory else "device") if comes else "none",
            "tiers": prepared.tokens_by_tier,
            "recompute": self.recompute,
            "rates": self.rates(),
            "paper_share": paper_share(task, rates) if timed and prepared.chunks else None,
            "reason": prepared.report.cut,
        } | plans

    def rates(self) -> Body:
        """The rates that plans are made from."""
        rates: Rates = self.book.rates()
        return {
            "compute": None if rates.compute is None else asdict(rates.compute),
            "tiers": {name: asdict(tier) for name, tier in rates.tiers.items()},
            "land_s_per_byte": rates.land_s_per_byte,
            "measured": bool(rates.tiers) and (rates.compute is not None or not self.can_compute),
            "recompute": self.recompute,
        }

    def remember(self, key: SessionKey, restore: DeviceRestore, report: RestoreReport) -> Body:
        """A restore is over: learn its rates, keep its timeline; returns that."""
        self._learner.submit(self._learn, restore)  # it writes a file
        timeline = restore.timeline.as_dict()
        self._timelines[key.digest] = {
            "session_id": key.session_id,
            "ended_at": time.time(),
            "path": "device",
            "plan": _plan_body(restore.plan, timed=self.book.rates().compute is not None),
            "timeline": timeline,
            "reason": report.cut,
        }
        self._timelines.move_to_end(key.digest)
        while len(self._timelines) > _KEPT_TIMELINES:
            self._timelines.popitem(last=False)
        return timeline

    def _learn(self, restore: DeviceRestore) -> None:
        self.book.observe_load(restore.load_samples)
        self.book.observe_land(restore.land_samples)
        self.book.observe_compute(restore.compute_samples)

    def observe_forward(self, sample: ForwardSample) -> None:
        """What a request took from its release to the first token."""
        self._learner.submit(self.book.observe_forward, [sample])

    def timeline(self, key: SessionKey) -> Body:
        """What both streams did in the session's last restore to the device.

        Raises:
            NoTimeline: there was none since the server started.
        """
        body = self._timelines.get(key.digest)
        if body is None:
            raise NoTimeline(
                f"session {key.session_id!r} was not restored to the device since this server started: "
                "resume it, or send its next turn, and ask again"
            )
        return body

    def forget(self, digest: str) -> None:
        """The session is deleted."""
        self._timelines.pop(digest, None)

    def close(self) -> None:
        """What is being learnt is learnt."""
        self._learner.close()


def _new_tokens(prepared: Prepared, prompt_tokens: int | None) -> int:
    """How many tokens the request behind the restore has to compute at least."""
    if prompt_tokens is not None:
        return max(1, prompt_tokens - prepared.tokens)
    return len(prepared.token_ids) - prepared.tokens + _USUAL_TURN_TOKENS


def _plan_body(plan: RestorePlan, *, timed: bool) -> Body:
    """`timed`: what the model's forward takes is known; else neither is the time to the first token."""
    return {
        "strategy": plan.strategy.value,
        "tokens": plan.tokens,
        "staircase": list(plan.staircase),
        "load_bytes": plan.load_bytes,
        "compute_s": plan.compute_s,
        "load_s": plan.load_s,
        "forward_s": plan.forward_s if timed else None,
        "ttft_s": plan.ttft_s if timed else None,
        "measured": plan.measured,
        "why": plan.why,
    }

"""Resume: to memory by the loaders alone, or to the device by both streams.

Called by the scheduler's thread; every method returns at once. A session whose pages are all in memory goes
by memory when a request waits for it: SGLang loads them layer by layer under the request's own forward, which
no job done before it can beat. All else becomes a restore to the device, if there is room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sgl_krul.config import Config
from sgl_krul.errors import NoDeviceRoom
from sgl_krul.layout import KvLayout
from sgl_krul.metrics import MetricsSink
from sgl_krul.restore.loader import SegmentLoader, Target
from sgl_krul.restore.pipeline import RestoreReport
from sgl_krul.restore.planner import RestorePlan, Strategy
from sgl_krul.restore.rate_book import RateBook
from sgl_krul.restore.staging import Staging
from sgl_krul.service.agreed import agree_on_report, agreed
from sgl_krul.service.agreed_restore import agree_on_plan, agree_on_prepared
from sgl_krul.service.agreement import Agreement
from sgl_krul.service.counters import Counters
from sgl_krul.service.device_restore import DeviceRestore, DeviceRestores, Reservation, Settings
from sgl_krul.service.holds import Holds
from sgl_krul.service.isolation import Isolation, isolate
from sgl_krul.service.jobs import Body, Job, Jobs, Reply
from sgl_krul.service.plans import Plans
from sgl_krul.service.prepared import Prepared
from sgl_krul.service.transfers import Sought, Transfers
from sgl_krul.service.views import describe
from sgl_krul.service.wish import TargetPlace, Wish
from sgl_krul.session.record import SessionKey, common_tokens
from sgl_krul.session.registry import PausedCopy, Registry, Session, State
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.workers import Workers

__all__ = ["Resumes"]

_RESUMERS = 8  # each waits for the loaders, and for the store, most of the time


@dataclass(frozen=True)
class _Resume:
    """One resume under way."""

    session: Session
    key: SessionKey
    before: State
    start: float
    hold: bool
    wish: Wish
    reply: Reply
    isolation: Isolation


class Resumes:
    """The resumes of one rank, the holds of requests that wait, and the restores to the device."""

    def __init__(
        self,
        config: Config,
        layout: KvLayout,
        registry: Registry,
        jobs: Jobs,
        transfers: Transfers,
        memory: MemoryTier,
        counters: Counters,
        metrics: MetricsSink,
        namespace: Callable[[], str],
        ranks: Agreement,
        rates: RateBook,
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self.plans = Plans(config, rates)
        self._config = config
        self._layout = layout
        self._registry = registry
        self._jobs = jobs
        self._transfers = transfers
        self._memory = memory
        self._counters = counters
        self._metrics = metrics
        self._namespace = namespace
        self._ranks = ranks
        self._clock = clock
        self._now = now
        self.holds = Holds(config.session.hold_deadline_s, layout.layers, ranks, clock)
        self._staging = Staging(config.restore.staging_bytes)
        self._resumers = Workers("resume", _RESUMERS)
        self._askers = Workers("resume-shared", _RESUMERS)  # apart: they wait for a network
        self.restores = DeviceRestores(
            Settings(config.restore.max_slice_tokens, config.restore.max_step_s, clock, ranks)
        )

    # ---- resume ----

    def resume(self, key: SessionKey, *, hold: bool, reply: Reply, wish: Wish) -> None:
        """Bring a paused session back; the shared tier is asked for one that is not known here.

        With `hold`, a request waits: pages stay pinned until it has run.

        Raises:
            SessionBusy: another job of the session runs; nothing was changed.
        """
        known = self._registry.find(key.digest)
        session = known or Session(key.digest, key.session_id, key.salted, state=State.PAUSED)
        self._jobs.refuse_if_busy(session)
        isolation = isolate(session, self._registry, self._ranks)
        resume = _Resume(session, key, session.state, self._clock(), hold, wish, reply, isolation)
        session.state = State.RESUMING
        if self.plans.device is None or wish.target is TargetPlace.MEMORY:
            self._to_memory(resume)
        else:
            self._to_device(resume)

    def _to_memory(self, resume: _Resume) -> None:
        session = resume.session
        future = self._workers(session.paused).submit(
            self._transfers.restore,
            self._sought(resume.key, session, resume.isolation),
            resume.start + self._config.session.hold_deadline_s,
        )
        future = agreed(future, self._ranks, RestoreReport.release)

        def complete() -> Body:
            report = future.result()
            agree_on_report(report, self._layout.page_size, self._ranks)
            return self._finish(resume, report, {"path": "memory"})

        self._begin(resume, future, complete)

    def _to_device(self, resume: _Resume) -> None:
        future = self._prepare(resume.key, resume.session, resume.isolation)
        self._begin(resume, future, lambda: self._prepared(resume, future.result()))

    def _prepare(self, key: SessionKey, session: Session, isolation: Isolation) -> Any:
        future = self._workers(session.paused).submit(
            self._transfers.prepare, self._sought(key, session, isolation)
        )
        return agreed(future, self._ranks, Prepared.release)

    def _sought(self, key: SessionKey, session: Session, isolation: Isolation) -> Sought:
        return Sought(key, session.token_ids, session.paused, self._namespace(), isolation)

    def _prepared(self, resume: _Resume, prepared: Prepared) -> Body | None:
        """What is stored is known: by memory, by nothing, or to the device. None: the answer follows."""
        prompt, report = resume.wish.prompt, prepared.report
        if prepared.namespace != self._namespace():  # and its pages are those of the old weights
            prepared.release()
            report.end("stale", "the weights changed meanwhile")
            return self._finish(resume, report, {"path": "none"})
        if prompt is not None:
            prepared.limit(common_tokens(prepared.token_ids, prompt))
        all_in_memory = agree_on_prepared(prepared, self._ranks)
        if not prepared.chunks:
            return self._finish(resume, report, {"path": "none"})
        if resume.hold and all_in_memory:
            prepared.pin_in(report)
            return self._finish(resume, report, {"path": "memory"})
        if prepared.largest_segment_bytes > self._config.restore.staging_bytes:
            self._not_to_device(
                resume, prepared, "its segments are larger than restore.staging_bytes: raise that"
            )
            return None
        try:
            return self._reserve_and_begin(resume, prepared)
        except BaseException:
            prepared.release()
            raise

    def _reserve_and_begin(self, resume: _Resume, prepared: Prepared) -> Body | None:
        assert self.plans.device is not None
        reservation = self.plans.device.reserve(prepared)
        if reservation is None:
            self._not_to_device(resume, prepared, "running requests leave too little of it: try again later")
            return None
        wish = resume.wish
        try:
            prompt_tokens = None if wish.prompt is None else len(wish.prompt)
            plan = self.plans.make(prepared, reservation.start, prompt_tokens, wish.strategy)
            plan = agree_on_plan(plan, self._ranks)
            if plan.tokens <= reservation.start:
                return self._left_alone(resume, prepared, reservation, plan)
            cut = plan.why if plan.tokens < prepared.tokens else ""
            prepared.limit(plan.tokens)
            restore = DeviceRestore(
                prepared,
                reservation,
                plan,
                self.restores.settings,
                deadline=resume.start + self._config.session.hold_deadline_s,
                can_compute=self.plans.can_compute,
                adaptive=self.plans.chosen(wish.strategy) is Strategy.optimal,
            )
            restore.start(self._make_loader)
        except BaseException:
            reservation.give_back()
            raise
        self.restores.begin(restore)
        future = agreed(restore.future, self._ranks, RestoreReport.release)
        self._begin(resume, future, lambda: self._landed(resume, restore, cut))
        return None

    def _left_alone(
        self, resume: _Resume, prepared: Prepared, reservation: Reservation, plan: RestorePlan
    ) -> Body:
        """All of it is on the device, or recomputing the rest with the next turn is the best there is."""
        report, complete = prepared.report, reservation.start == prepared.tokens
        if reservation.start:
            resume.session.restored(prepared.token_ids[: reservation.start])
            report.pins.append(reservation.keep(reservation.start))
            report.tokens = reservation.start
        else:
            reservation.give_back()
        prepared.release()
        how = {"path": "device" if reservation.start else "none", "strategy": plan.strategy.value}
        how |= {"reason": "" if complete else plan.why}
        return self._finish(resume, report, how | {"on_device_tokens": reservation.start, "loaded_bytes": 0})

    def _not_to_device(self, resume: _Resume, prepared: Prepared, why: str) -> None:
        """There is no way to the device now. A request that waits is brought to memory instead."""
        tokens = prepared.tokens
        prepared.release()
        if resume.wish.target is TargetPlace.DEVICE:
            raise NoDeviceRoom(
                f"session {resume.key.session_id!r} can't come to the device, where it needs {tokens} tokens "
                f'of the KV pool: {why}, or resume to "memory"'
            )
        self._to_memory(resume)

    def _make_loader(self, restore: DeviceRestore, target: Target) -> SegmentLoader:
        prepared = restore.prepared
        workers, loaders = self._transfers.loaders(prepared.tiers)
        return SegmentLoader(
            restore.streams,
            prepared.chunks,
            prepared.tiers,
            self._memory,
            target,
            self._layout,
            self._namespace(),
            workers,
            staging=self._staging,
            timeline=restore.timeline,
            clock=restore.clock,
            loaders=loaders,
            coders=prepared.coders,
        )

    def _landed(self, resume: _Resume, restore: DeviceRestore, cut: str) -> Body:
        """A restore to the device is over. `cut`: why the plan was to end before the session."""
        report = restore.future.result()
        resume.session.restored(restore.prepared.token_ids[: report.tokens])
        timeline = self.plans.remember(resume.key, restore, report)
        return self._finish(
            resume,
            report,
            {
                "path": "device",
                "reason": cut,
                "strategy": restore.plan.strategy.value,
                "on_device_tokens": restore.streams.grid.start,
                "recomputed_tokens": restore.computed_cells / self._layout.layers,
                "loaded_bytes": restore.timeline.loaded_bytes,
                "seconds": timeline["seconds"],
                "predicted_s": max(restore.plan.compute_s, restore.plan.load_s) + restore.plan.fill_s,
                "bubble": timeline["bubble"],
            },
        )

    def _begin(self, resume: _Resume, future: Any, complete: Callable[[], Body | None]) -> None:
        def guarded() -> Body | None:
            try:
                return complete()
            except BaseException:
                self._back(resume)
                raise

        self._jobs.begin(Job(resume.key.digest, future, guarded, resume.reply))

    def _back(self, resume: _Resume) -> None:
        """The session is what it was."""
        if resume.session.state is State.RESUMING:
            resume.session.state = resume.before

    def _finish(self, resume: _Resume, report: RestoreReport, how: Mapping[str, Any]) -> Body:
        session, key = resume.session, resume.key
        self._back(resume)
        session.last_used = self._now()
        if report.private is not None and report.tokens:
            session.private = report.private
        seconds = self._clock() - resume.start
        self._account(session, report, seconds)
        to_device = how["path"] == "device"
        self._learn(session, report, to_device=to_device)
        if resume.hold:
            prompt = resume.wish.prompt
            self.holds.begin(key.digest, report, len(prompt) if to_device and prompt is not None else None)
        else:
            report.release()
        came = report.tokens > 0
        return (
            describe(session)
            | {
                "restored_tokens": report.tokens,
                "recompute_tokens": max(0, session.tokens - report.tokens),
                "bytes_read": report.bytes_read,
                "restored_from": report.origin or (self._memory.name if came else "nowhere"),
                "restored_to": ("device" if to_device else "memory") if came else "nowhere",
                "target": resume.wish.target.value if resume.wish.target else None,
                "missing_chunks": report.missing_chunks,
                "reason": report.cut or how.get("reason", ""),
                "elapsed_ms": round(1000 * seconds, 3),
            }
            | {name: value for name, value in how.items() if name != "reason"}
        )

    def _learn(self, session: Session, report: RestoreReport, *, to_device: bool) -> None:
        """What a restore found out about the stored copy: that it is newer, elsewhere, or gone."""
        if session.state not in (State.PAUSED, State.STALE):
            return
        manifest = report.manifest
        if manifest is not None and manifest.namespace == self._namespace():
            session.paused = PausedCopy.of(manifest, *report.tiers)
            session.state = State.PAUSED
            session.last_used = max(session.last_used, manifest.paused_at)
            session.in_memory = report.tokens > 0 and not to_device
            known = self._registry.add(session)
            known.in_memory = known.state is State.PAUSED and session.in_memory
        elif session.state is State.PAUSED and report.miss == "missing" and not session.rests_in_memory:
            self._registry.remove(session.digest)  # no tier has it: what is listed must be there

    def _account(self, session: Session, report: RestoreReport, seconds: float) -> None:
        session.corrupt_chunks += report.corrupt_chunks
        self._counters.corrupt_chunks += report.corrupt_chunks
        self._counters.missing_chunks += report.missing_chunks
        if session.paused is None and report.manifest is None:
            return  # a new chat: nobody expected to find it
        self._counters.resumes += 1
        self._counters.restored_tokens += report.tokens
        if report.private is not None and report.tokens:
            self._counters.lossy_resumes += 1
            self._counters.duplicated_tokens += min(report.duplicated_tokens, report.tokens)
        if report.miss:
            self._counters.holes += 1
            self._metrics.miss(report.miss)
        elif report.tokens:
            self._metrics.hit()
        self._metrics.restored(
            report.origin or self._memory.name, seconds, report.tokens, max(0, session.tokens - report.tokens)
        )

    def _workers(self, paused: PausedCopy | None) -> Workers:
        remote = self._transfers.copies.asks_shared(paused, self._namespace())
        return self._askers if remote else self._resumers

    def first_token(self, key: SessionKey) -> None:
        """A request of the session has its first token: what that took after a restore is a rate to learn."""
        sample = self.holds.first_token(key.digest)
        if sample is not None:
            self.plans.observe_forward(sample)

    # ---- plans ----

    def explain(self, session: Session, key: SessionKey, reply: Reply) -> None:
        """What a resume would do now, and why. Reads the manifest; changes nothing, is in nobody's way."""
        future = self._prepare(key, session, isolate(session, self._registry, self._ranks))

        def complete() -> Body:
            prepared = future.result()
            try:
                agree_on_prepared(prepared, self._ranks)
                return self.plans.explain(session, prepared)
            finally:
                prepared.release()

        self._jobs.begin(Job("", future, complete, reply))

    # ---- the round ----

    @property
    def working(self) -> bool:
        """True while a restore to the device runs."""
        return bool(self.restores)

    @property
    def computing(self) -> bool:
        """True while there is a slice to compute at once."""
        return self.restores.computing

    def step(self) -> None:
        """This round's part of the restores."""
        self.holds.end_old()
        if self.restores:
            self.restores.step()

    def give_room(self) -> bool:
        """Running requests are out of device pages: give up something of ours. False when nothing is left."""
        return self.restores.give_room() or self.holds.end_youngest()

    def cancel_all(self, why: str) -> None:
        """Give up all restores to the device; every slot goes back."""
        self.restores.cancel_all(why)

    def close(self) -> None:
        """Stop; nothing stays pinned."""
        self.cancel_all("the server stops")
        self.holds.close()
        self._resumers.close()
        self._askers.close()
        self.plans.close()

    def check(self) -> list[str]:
        """Problems found at rest: empty when sound."""
        return [] if self.working else self._staging.check()

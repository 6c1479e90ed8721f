"""pause(id), resume(id), forget(id): the verbs, and the state each session passes through.

One thread (the scheduler's) calls `SessionService`; every method returns at once. What takes time is a job on
a worker; `poll()` brings finished jobs back to the calling thread, where their `complete` step runs and the
caller is answered. Nothing here knows SGLang: the engine hands in where pages come from and what to do once
they are safe.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

from sgl_krul.config import Config
from sgl_krul.layout import KvLayout
from sgl_krul.metrics import MetricsSink, NoMetrics
from sgl_krul.pause.pipeline import PageSource, Snapshot
from sgl_krul.restore.rate_book import RateBook
from sgl_krul.service.agreed import agree_on_known, agree_on_session, agreed
from sgl_krul.service.agreement import Agreement, Alone
from sgl_krul.service.calibration import Calibration
from sgl_krul.service.copies import StoredCopies
from sgl_krul.service.counters import Counters
from sgl_krul.service.estimates import Estimates, NoEstimates
from sgl_krul.service.exchange import Exchange
from sgl_krul.service.jobs import Body, Job, Jobs, Reply
from sgl_krul.service.moves import Moves
from sgl_krul.service.resumes import Resumes
from sgl_krul.service.tenants import Tenants
from sgl_krul.service.transfers import HashPages, Transfers, Written
from sgl_krul.service.upkeep import Upkeep
from sgl_krul.service.views import describe, overview
from sgl_krul.service.wish import NO_WISH, Wish
from sgl_krul.session.catalog import find_sessions
from sgl_krul.session.record import SessionKey
from sgl_krul.session.registry import Registry, Session, State
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.tiered import TieredStore
from sgl_krul.store.workers import Workers

__all__ = ["SessionService"]

_SHARED_PAUSERS = 4


class SessionService:
    """Sessions of one rank: the registry, the tiers, and the jobs between them."""

    def __init__(
        self,
        config: Config,
        layout: KvLayout,
        namespace: str,
        memory: MemoryTier,
        store: TieredStore,
        hash_pages: HashPages,
        archive_key: bytes,
        metrics: MetricsSink | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        ranks: Agreement | None = None,
        rates: RateBook | None = None,
        estimates: Estimates | None = None,
    ) -> None:
        self.ranks = Alone() if ranks is None else ranks
        self.registry = Registry()
        self.counters = Counters()
        self.estimates = NoEstimates() if estimates is None else estimates
        self.memory = memory
        self.store = store
        self.layout = layout
        self.namespace = namespace
        self._config = config
        self._clock = clock
        self._now = now
        self._metrics = NoMetrics() if metrics is None else metrics
        self._jobs = Jobs(self.ranks)
        self._tenants = Tenants(config.tenants, self.registry, self.ranks)
        # A pause to disk does not wait for one that waits for a network.
        pausers = 1 if store.shared is None else _SHARED_PAUSERS
        self._pausers = Workers("pause", max(config.pause.workers, pausers))
        copies = StoredCopies(store)
        self._transfers = Transfers(
            config, layout, memory, copies, hash_pages, self._metrics, clock, now, self.estimates
        )
        self.resumes = Resumes(
            config,
            layout,
            self.registry,
            self._jobs,
            self._transfers,
            memory,
            self.counters,
            self._metrics,
            lambda: self.namespace,
            self.ranks,
            RateBook(None, "") if rates is None else rates,
            clock,
            now,
        )
        self._transfers.depths = self.resumes.plans.depths
        self.calibration = Calibration(
            store.tiers,
            self.resumes.plans,
            self._jobs,
            lambda: self.namespace,
            config.restore.workers,
            self.ranks,
        )
        moves = Moves(copies, self._transfers.stop, now, archive_key)
        self._upkeep = Upkeep(
            config.placement,
            namespace,
            self.registry,
            self._transfers,
            moves,
            self._jobs.busy,
            self.counters,
            clock,
            now,
        )
        self.exchange = Exchange(
            self.registry,
            self._jobs,
            copies,
            moves,
            self._upkeep,
            self._tenants,
            lambda: self.namespace,
            clock,
        )
        self._discover()
        self._pausers.submit(memory.prefault, config.memory.prefault_bytes)

    def _discover(self) -> None:
        """Find the sessions of earlier runs on the own disk, while the server starts.

        The shared tier is asked by the first upkeep: a server starts without it.
        """
        for tier in self.store.tiers:
            if self.store.is_shared(tier):
                continue
            catalog = find_sessions(
                tier, self.namespace, now=self._now(), stale_ttl_s=self._config.session.stale_ttl_s
            )
            for session in catalog.sessions:
                self.registry.add(session)
            self.counters.corrupt_manifests += catalog.corrupt
            self.counters.orphans_removed += catalog.orphans
        for session in agree_on_known(self.registry, self.ranks):
            self.counters.orphans_removed += self._transfers.copies.drop_unagreed(session.digest)

    # ---- what the engine tells ----

    def observe(
        self,
        key: SessionKey,
        token_ids: array[int],
        end_hash: str | None = None,
        aborted: bool = False,
        private: int | None = None,
    ) -> None:
        """A request of the session finished; these tokens are in the tree, the last page named `end_hash`.

        `private`: the number of the private namespace that it ran in. A session that was forgotten here lives
        there on. One that lives in another, or that was not lossy yet when a late request of it began, has
        nothing of that request in its own: it is computed anew there.
        An aborted one may have got less far than the session was: then the session stays where it was.
        """
        session = self.registry.open(key, self._now())
        if session.private is None:
            session.private = private
        if not aborted or len(token_ids) >= session.tokens:
            session.advance(token_ids, end_hash, self._now())
        self._upkeep.wakes(session.digest)
        self.resumes.holds.end(session.digest)

    def change_namespace(self, namespace: str) -> None:
        """The weights changed: what is stored becomes stale, what is in memory can't be found any more."""
        self.namespace = namespace
        self.resumes.cancel_all("the weights changed")
        self.memory.clear()
        self.estimates.start_over()
        self._upkeep.start_over(namespace)
        for session in self.registry:
            session.token_ids, session.end_hash, session.branches = array("q"), None, []
            session.in_memory = False
            if session.paused is not None and not session.rests_in_memory:
                session.state = State.PAUSED if session.paused.namespace == namespace else State.STALE
            elif not self._jobs.busy(session.digest):  # else its job, once done, says what is left of it
                self.registry.remove(session.digest)

    def agree_on(self, key: SessionKey) -> None:
        """Before a verb for `key` begins: see that all ranks know the session alike."""
        agree_on_session(self.registry, key.digest, self._jobs.busy(key.digest), self.ranks)

    @property
    def working(self) -> bool:
        """True while anything runs on a worker."""
        return bool(self._jobs) or self._upkeep.working

    @property
    def computing(self) -> bool:
        """True while a restore has a slice to compute at once."""
        return self.resumes.computing or self.calibration.computing

    def wait(self, timeout_s: float) -> None:
        """Return when a job is done, or after `timeout_s`: for a caller that has nothing else to do."""
        self._jobs.wait(timeout_s)

    # ---- the verbs ----

    def pause(
        self,
        session: Session,
        page_hashes: tuple[str, ...],
        source: PageSource,
        *,
        before: Callable[[], None],
        settle: Callable[[bool], int],
        reply: Reply,
        private_hashes: tuple[str, ...] | None = None,
    ) -> None:
        """Write the session to where placement puts it; without a tier for it, leave it to the memory tier.

        `page_hashes` are those under the caller's key; `private_hashes`, of a session that lives in its
        private namespace, what its pages are called there.

        `before()` runs first, on the worker: it waits for what the pages depend on. `settle(success)` runs in
        the calling thread when the writing is over: it releases what the engine holds and, on success, frees
        the session's own device pages; it returns the tokens that freed.

        Raises:
            SessionBusy: another job of the session runs; nothing was changed.
            QuotaExceeded: its tenant would pass its quota; nothing was changed.
        """
        self._jobs.refuse_if_busy(session)
        size = len(page_hashes) * self.layout.page_bytes
        self._tenants.claim(session, size)
        self._upkeep.wakes(session.digest)
        snapshot = Snapshot(
            namespace=self.namespace,
            digest=session.digest,
            session_id=session.session_id,
            salted=session.salted,
            layout=self.layout,
            token_ids=session.token_ids,
            page_hashes=page_hashes,
            exact=session.private is None,
            private_hashes=private_hashes,
        )
        start = self._clock()
        future = self._pausers.submit(
            self._transfers.write,
            snapshot,
            source,
            session.paused,
            before,
            to_memory=0 < size <= self._config.placement.memory_max_bytes,
        )
        future = agreed(future, self.ranks)
        session.state = State.PAUSING

        def complete() -> Body:
            self._tenants.settle(session)
            error = future.exception()
            if error is None:
                session.paused = future.result().copy
                session.left_in = future.result().left_in
            self._rest(session, snapshot.namespace, paused=error is None)
            freed = settle(session.state is State.PAUSED)
            if error is not None:
                self.counters.pauses_failed += 1
                raise error
            return self._paused(session, snapshot, future.result(), freed, self._clock() - start)

        self._jobs.begin(Job(session.digest, future, complete, reply))

    def _paused(
        self, session: Session, snapshot: Snapshot, written: Written, freed: int, seconds: float
    ) -> Body:
        if session.state is State.PAUSED:
            session.branches = []
            session.in_memory = False
            if session.rests_in_memory:
                self._upkeep.rests(snapshot)
        self.counters.pauses += 1
        report = written.report
        return self.describe(session) | {
            "already_paused": False,
            "device_tokens_freed": freed,
            "chunks_written": report.chunks_written if report is not None else 0,
            "chunks_kept": report.chunks_kept if report is not None else 0,
            "not_written": dict(written.failed),
            "elapsed_ms": round(1000 * seconds, 3),
        }

    def resume(self, key: SessionKey, *, hold: bool, reply: Reply, wish: Wish = NO_WISH) -> None:
        """Bring a paused session back, to memory or to the device; see `Resumes.resume`.

        Raises:
            SessionBusy: another job of the session runs; nothing was changed.
        """
        self.resumes.resume(key, hold=hold, reply=reply, wish=wish)

    def forget(
        self,
        session: Session,
        *,
        settle: Callable[[], int],
        reply: Reply,
        drop: Callable[[], None] = lambda: None,
    ) -> None:
        """Delete the session everywhere: manifest, then chunks, then its memory and its device pages.

        `drop()` takes its pages from memory, on the worker; `settle()` those on the device, in the calling
        thread, and returns the tokens that freed.

        Raises:
            SessionBusy: another job of the session runs; nothing was changed.
        """
        self._jobs.refuse_if_busy(session)
        self.resumes.holds.end(session.digest)
        self._upkeep.wakes(session.digest)
        future = self._pausers.submit(
            self._transfers.copies.delete, session.digest, self.namespace, session.may_lie_in, drop
        )
        future = agreed(future, self.ranks)

        def complete() -> Body:
            freed_bytes = future.result()
            freed_tokens = settle()
            self.registry.delete(session)
            self.estimates.forget(session.digest)
            self.resumes.plans.forget(session.digest)
            return {
                "session_id": session.session_id,
                "deleted": True,
                "bytes_freed": freed_bytes,
                "device_tokens_freed": freed_tokens,
            }

        self._jobs.begin(Job(session.digest, future, complete, reply))

    # ---- views ----

    def describe(self, session: Session) -> Body:
        """The session as the API shows it."""
        return describe(session) | {"similarity": self.estimates.describe(session.digest)}

    def overview(self) -> Body:
        """All sessions, the tiers and the counters."""
        sessions = [self.describe(session) for session in self.registry]
        return overview(sessions, self.memory, self.store, self.counters, self.namespace)

    def poll(self) -> None:
        """Answer what the workers are done with, and begin what is due. Never blocks."""
        self.resumes.step()
        self.calibration.step()
        self._jobs.poll()
        if self._upkeep.poll():
            self.counters.evictions = self.memory.evictions
            self._upkeep.publish(self._metrics)

    def close(self) -> None:
        """Stop the workers; a pause under way is finished first."""
        self._transfers.stop.set()
        self._upkeep.close()
        self.exchange.close()
        self._pausers.close()
        self.estimates.close()
        self.calibration.close()
        self.resumes.close()
        self._transfers.close()

    def check(self) -> list[str]:
        """Problems found: empty when sound."""
        problems = self.registry.check() + self.memory.check() + self.store.check() + self.resumes.check()
        return problems + ([] if self.working else self._transfers.copies.exclusive.check())

    # ---- small things ----

    def _rest(self, session: Session, namespace: str, *, paused: bool) -> None:
        """Where a session stands after its pause. A request may have gone on meanwhile: it is active then,
        and its copy older. The weights may have changed: the copy is another namespace's."""
        if session.state is not State.PAUSING:
            if session.state is State.STALE and paused and namespace == self.namespace:
                session.state = State.PAUSED
            return
        session.state = State.PAUSED if paused else State.ACTIVE
        if namespace == self.namespace:
            return
        if session.paused is None or session.rests_in_memory:
            self.registry.remove(session.digest)
            session.state = State.ACTIVE
        else:
            session.state = State.STALE

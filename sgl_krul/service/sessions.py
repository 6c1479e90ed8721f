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
from dataclasses import asdict, dataclass, field

from sgl_krul.config import Config
from sgl_krul.errors import SessionBusy
from sgl_krul.layout import KvLayout
from sgl_krul.pause.pipeline import PageSource, PauseReport, Snapshot
from sgl_krul.restore.pipeline import RestoreReport
from sgl_krul.service.jobs import Body, Job, Jobs, Reply
from sgl_krul.service.transfers import Transfers
from sgl_krul.session.catalog import find_sessions
from sgl_krul.session.record import SessionKey
from sgl_krul.session.registry import Registry, Session, State
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.tier import CheckedTier
from sgl_krul.store.workers import Workers

__all__ = ["Counters", "SessionService"]


@dataclass
class Counters:
    """What happened since the server started."""

    pauses: int = 0
    pauses_failed: int = 0
    resumes: int = 0
    restored_tokens: int = 0
    corrupt_chunks: int = 0
    corrupt_manifests: int = 0
    missing_chunks: int = 0
    orphans_removed: int = 0


@dataclass
class _Lease:
    """Pages held in memory for a request that waits for them."""

    until: float
    report: RestoreReport = field(default_factory=RestoreReport)


class SessionService:
    """Sessions of one rank: the registry, the tiers, and the jobs between them."""

    def __init__(
        self,
        config: Config,
        layout: KvLayout,
        namespace: str,
        memory: MemoryTier,
        ssd: CheckedTier | None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.registry = Registry()
        self.counters = Counters()
        self.memory = memory
        self.layout = layout
        self.namespace = namespace
        self._config = config
        self._ssd = ssd
        self._clock = clock
        self._now = now
        self._jobs = Jobs()
        self._leases: dict[str, _Lease] = {}
        self._pausers = Workers("pause", config.pause.workers)
        self._resumers = Workers("resume", config.restore.workers)
        self._transfers = Transfers(config, layout, memory, ssd, clock, now)
        self._discover()
        self._resumers.submit(memory.prefault, config.memory.prefault_bytes)

    def _discover(self) -> None:
        """Find the sessions of earlier runs. Once, while the server starts."""
        if self._ssd is None:
            return
        catalog = find_sessions(
            self._ssd, self.namespace, now=self._now(), stale_ttl_s=self._config.session.stale_ttl_s
        )
        for session in catalog.sessions:
            self.registry.add(session)
        self.counters.corrupt_manifests += catalog.corrupt
        self.counters.orphans_removed += catalog.orphans

    # ---- what the engine tells ----

    def observe(
        self, key: SessionKey, token_ids: array[int], end_hash: str | None = None, aborted: bool = False
    ) -> None:
        """A request of the session finished; these tokens are in the tree, the last page named `end_hash`.

        An aborted one may have got less far than the session was: then the session stays where it was.
        """
        session = self.registry.open(key, self._now())
        if not aborted or len(token_ids) >= session.tokens:
            session.advance(token_ids, end_hash, self._now())
        self._end_lease(session.digest)

    def change_namespace(self, namespace: str) -> None:
        """The weights changed: what is stored becomes stale, what is in memory can't be found any more."""
        self.namespace = namespace
        self.memory.clear()
        for session in self.registry:
            session.token_ids, session.end_hash, session.branches = array("q"), None, []
            if session.paused is not None and session.paused.tier != self.memory.name:
                session.state = State.PAUSED if session.paused.namespace == namespace else State.STALE
            elif not self._jobs.busy(session.digest):  # else its job, once done, says what is left of it
                self.registry.remove(session.digest)

    @property
    def working(self) -> bool:
        """True while any job runs."""
        return bool(self._jobs)

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
    ) -> None:
        """Write the session to the SSD tier, or, without one, leave it to the memory tier.

        `before()` runs first, on the worker: it waits for what the pages depend on. `settle(success)` runs in
        the calling thread when the writing is over: it releases what the engine holds and, on success, frees
        the session's own device pages; it returns the tokens that freed.

        Raises:
            SessionBusy: another job of the session runs; nothing was changed.
        """
        self._refuse_if_busy(session)
        snapshot = Snapshot(
            namespace=self.namespace,
            digest=session.digest,
            session_id=session.session_id,
            salted=session.salted,
            layout=self.layout,
            token_ids=session.token_ids,
            page_hashes=page_hashes,
        )
        start = self._clock()
        replaced = session.paused
        future = self._pausers.submit(self._transfers.write, snapshot, source, replaced, before)
        session.state = State.PAUSING

        def complete() -> Body:
            error = future.exception()
            report: PauseReport | None = None
            if error is None:
                session.paused, report = future.result()
            self._rest(session, snapshot.namespace, paused=error is None)
            freed = settle(session.state is State.PAUSED)
            if error is not None:
                self.counters.pauses_failed += 1
                raise error
            if session.state is State.PAUSED:
                session.branches = []
            self.counters.pauses += 1
            return self.describe(session) | {
                "already_paused": False,
                "device_tokens_freed": freed,
                "chunks_written": report.chunks_written if report is not None else 0,
                "chunks_kept": report.chunks_kept if report is not None else 0,
                "elapsed_ms": self._elapsed_ms(start),
            }

        self._jobs.begin(Job(session.digest, future, complete, reply))

    def resume(self, session: Session, *, hold: bool, reply: Reply) -> None:
        """Bring a paused session to memory. With `hold`, a request waits: pages stay pinned until it has run.

        Raises:
            SessionBusy: another job of the session runs; nothing was changed.
        """
        self._refuse_if_busy(session)
        start = self._clock()
        deadline = start + self._config.session.hold_deadline_s
        future = self._resumers.submit(
            self._transfers.restore, session.digest, session.paused, self.namespace, deadline
        )
        before, session.state = session.state, State.RESUMING

        def complete() -> Body:
            if session.state is State.RESUMING:
                session.state = before
            report = future.result()
            self._account(session, report)
            if hold:
                self._end_lease(session.digest)
                self._leases[session.digest] = _Lease(
                    self._clock() + self._config.session.hold_deadline_s, report
                )
            else:
                report.release()
            return self.describe(session) | {
                "restored_tokens": report.tokens,
                "recompute_tokens": max(0, session.tokens - report.tokens),
                "bytes_read": report.bytes_read,
                "restored_from": self._origin(session, report),
                "missing_chunks": report.missing_chunks,
                "reason": report.cut,
                "elapsed_ms": self._elapsed_ms(start),
            }

        self._jobs.begin(Job(session.digest, future, complete, reply))

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
        self._refuse_if_busy(session)
        self._end_lease(session.digest)
        future = self._pausers.submit(self._transfers.delete, session.digest, drop)

        def complete() -> Body:
            freed_bytes = future.result()
            freed_tokens = settle()
            self.registry.remove(session.digest)
            return {
                "session_id": session.session_id,
                "deleted": True,
                "bytes_freed": freed_bytes,
                "device_tokens_freed": freed_tokens,
            }

        self._jobs.begin(Job(session.digest, future, complete, reply))

    def describe(self, session: Session) -> Body:
        """The session as the API shows it."""
        paused = session.paused
        resting = session.state is not State.ACTIVE
        return {
            "session_id": session.session_id,
            "salted": session.salted,
            "state": session.state.value,
            "tokens": session.tokens,
            "stored_tokens": paused.stored_tokens if paused else 0,
            "bytes_raw": paused.raw_bytes if paused else 0,
            "bytes_stored": paused.stored_bytes if paused else 0,
            "tier": paused.tier if paused and resting else "device",
            "exact": paused.exact if paused else True,
            "corrupt_chunks": session.corrupt_chunks,
            "last_used": session.last_used,
        }

    def overview(self) -> Body:
        """All sessions, the tiers and the counters."""
        tiers = [self.memory] if self._ssd is None else [self.memory, self._ssd]
        return {
            "sessions": [self.describe(session) for session in self.registry],
            "tiers": {tier.name: tier.usage()._asdict() for tier in tiers},
            "counters": asdict(self.counters),
            "namespace": self.namespace,
        }

    def poll(self) -> None:
        """Answer what the workers are done with. Never blocks."""
        if self._leases:
            now = self._clock()
            for digest in [digest for digest, lease in self._leases.items() if lease.until < now]:
                self._end_lease(digest)
        self._jobs.poll()

    def close(self) -> None:
        """Stop the workers; a pause under way is finished first."""
        self._transfers.stop.set()
        for digest in list(self._leases):
            self._end_lease(digest)
        self._pausers.close()
        self._resumers.close()
        self._transfers.close()

    def check(self) -> list[str]:
        """Problems found: empty when sound."""
        problems = self.registry.check() + self.memory.check()
        return problems + (self._ssd.check() if self._ssd is not None else [])

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
        if session.paused is None or session.paused.tier == self.memory.name:
            self.registry.remove(session.digest)
            session.state = State.ACTIVE
        else:
            session.state = State.STALE

    def _refuse_if_busy(self, session: Session) -> None:
        if self._jobs.busy(session.digest):
            raise SessionBusy(
                f"session {session.session_id!r} is busy right now ({session.state.value}): "
                "try again when that is done"
            )

    def _account(self, session: Session, report: RestoreReport) -> None:
        session.corrupt_chunks += report.corrupt_chunks
        self.counters.resumes += 1
        self.counters.restored_tokens += report.tokens
        self.counters.corrupt_chunks += report.corrupt_chunks
        self.counters.missing_chunks += report.missing_chunks

    def _origin(self, session: Session, report: RestoreReport) -> str:
        if report.bytes_read and session.paused is not None:
            return session.paused.tier
        return self.memory.name if report.tokens else "nowhere"

    def _elapsed_ms(self, start: float) -> float:
        return round(1000 * (self._clock() - start), 3)

    def _end_lease(self, digest: str) -> None:
        lease = self._leases.pop(digest, None)
        if lease is not None:
            lease.report.release()

"""What goes on in the background: look what other servers did, demote, expire, write out what is in memory.

All of it runs on workers, plans and counts too: there may be many sessions. The polling thread hands over a
list of them, begins one move at a time, and enters what came of it. A verb that wants a session is never
refused for a move: the move stops and lets it through.
"""

from __future__ import annotations

import logging
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from threading import Event
from typing import Any, NamedTuple

from sgl_krul.config import PlacementConfig
from sgl_krul.errors import KrulError, StoreError
from sgl_krul.metrics import MetricsSink
from sgl_krul.pause.memory_only import MemoryPages
from sgl_krul.pause.pipeline import Snapshot
from sgl_krul.service.counters import Counters
from sgl_krul.service.mover import Stopped
from sgl_krul.service.moves import Moves
from sgl_krul.service.transfers import Transfers, Written
from sgl_krul.session.catalog import Catalog
from sgl_krul.session.record import page_key
from sgl_krul.session.registry import PausedCopy, Registry, Session, State
from sgl_krul.store.placement import Demotion, Parcel, select_demotions, select_expired
from sgl_krul.store.workers import Workers

__all__ = ["Upkeep"]

logger = logging.getLogger(__name__)

_PUBLISH_S = 1.0  # how often metrics are brought up to date

Task = tuple[Future[Any], Callable[[], None]]


class _Look(NamedTuple):
    """What a look at the shared tier found, and what was `known` when it began: it may have changed since."""

    namespace: str
    known: Mapping[str, PausedCopy]
    catalog: Catalog
    present: frozenset[str]
    tier: str


class Upkeep:
    """Used by the polling thread; `poll` begins what is due and takes what is done."""

    def __init__(
        self,
        config: PlacementConfig,
        namespace: str,
        registry: Registry,
        transfers: Transfers,
        moves: Moves,
        busy: Callable[[str], bool],
        counters: Counters,
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self._config = config
        self._namespace = namespace
        self._registry = registry
        self._memory = transfers.memory
        self._store = transfers.store
        self._transfers = transfers
        self._copies = transfers.copies
        self._moves = moves
        self._busy = busy
        self._counters = counters
        self._clock = clock
        self._now = now
        self._worker = Workers("upkeep", 1)
        self._lookers = Workers("look", 1)
        self._resting: dict[str, tuple[Snapshot, float]] = {}  # paused to memory: what, since when
        self._queue: deque[Callable[[], Task | None]] = deque()
        self._task: Task | None = None
        self._due = 0.0
        self._published = 0.0
        self._looking: Future[None] | None = None
        self._publishing: Future[None] | None = None
        self._found: deque[_Look] = deque()
        self._writing: tuple[str, Event] | None = None  # a write-out under way, and whether it was overtaken

    # ---- told by the service ----

    def rests(self, snapshot: Snapshot) -> None:
        """A session was paused to memory: it is written to a tier when it has rested long enough."""
        if self._store:
            self._resting[snapshot.digest] = (snapshot, self._clock())

    def wakes(self, digest: str) -> None:
        """The session goes on, or is deleted: nothing is to be written out."""
        self._resting.pop(digest, None)
        if self._writing is not None and self._writing[0] == digest:
            self._writing[1].set()

    def start_over(self, namespace: str) -> None:
        """The namespace changed: nothing that was planned holds."""
        self._namespace = namespace
        self._resting.clear()
        self._queue.clear()
        if self._writing is not None:
            self._writing[1].set()
        self._copies.forget_seen()

    def look_around(self) -> Future[None] | None:
        """See what other servers paused into the shared tier up to now; `take_found` when it is done.

        None when there is nothing to wait for.
        """
        if self._store.shared is None or not self._store.shared.available:
            return None
        waiting = self._looking is not None and not (self._looking.running() or self._looking.done())
        if not waiting:  # one that runs already may have looked too early
            known = {
                session.digest: session.paused for session in self._registry if session.paused is not None
            }
            self._looking = self._lookers.submit(self._look, self._namespace, known)
        return self._looking

    def take_found(self) -> None:
        """Enter what the worker found: new and newer sessions, and those that have gone."""
        while self._found:
            look = self._found.popleft()
            if look.namespace != self._namespace:
                continue
            self._counters.corrupt_manifests += look.catalog.corrupt
            for session in look.catalog.sessions:
                if session.digest not in look.known or self._registry.find(session.digest) is not None:
                    self._registry.add(session)  # else it was deleted here since
            for session in self._registry:
                paused = session.paused
                if paused is None or look.tier not in paused.tiers or session.state is not State.PAUSED:
                    continue
                if session.digest in look.present or self._busy(session.digest):
                    continue
                if look.known.get(session.digest) == paused:
                    self._gone(session, look.tier)  # else it was put there since

    @property
    def working(self) -> bool:
        """True while a worker is at it."""
        futures = (self._task[0] if self._task else None, self._looking, self._publishing)
        return any(future is not None and not future.done() for future in futures)

    def poll(self) -> bool:
        """Begin what is due, take what is done. True when metrics should be published. Never blocks."""
        self.take_found()
        if self._task is not None and self._task[0].done():
            task, self._task = self._task, None
            task[1]()
        now = self._clock()
        if self._task is None and not self._queue and now >= self._due:
            self._due = now + self._config.interval_s
            self.look_around()
            self._task = self._begin_plan()
        while self._task is None and self._queue:
            self._task = self._queue.popleft()()
        if now - self._published < _PUBLISH_S:
            return False
        self._published = now
        return True

    def publish(self, metrics: MetricsSink) -> None:
        """Bring the metrics up to date, on the worker that always does it."""
        if self._publishing is None or self._publishing.done():
            self._publishing = self._lookers.submit(self._publish, metrics, list(self._registry))

    def _publish(self, metrics: MetricsSink, sessions: list[Session]) -> None:
        metrics.set_sessions(Tally(session.state.value for session in sessions))
        copies = [paused for session in sessions if (paused := session.paused) is not None]
        tiers = Tally(name for paused in copies for name in paused.tiers)
        usage = {self._memory.name: self._memory.usage()} | self._store.usage()
        for name, tier in usage.items():
            metrics.set_tier(
                name,
                used_bytes=tier.bytes,
                capacity_bytes=tier.capacity_bytes,
                sessions=tiers[name],
                breaker=self._store.breaker_state(name),
            )
        metrics.count(vars(self._counters).copy())

    def close(self) -> None:
        """Stop the workers."""
        self._worker.close()
        self._lookers.close()

    # ---- the shared tier ----

    def _look(self, namespace: str, known: dict[str, PausedCopy]) -> None:
        """On a worker."""
        try:
            self._found.append(_Look(namespace, known, *self._copies.discover(namespace)))
        except StoreError as error:
            logger.warning("krul: the shared tier could not be listed: %s", error)

    def _gone(self, session: Session, tier: str) -> None:
        assert session.paused is not None
        session.paused = session.paused.without(tier)
        if session.paused is None:
            self._registry.remove(session.digest)

    # ---- plans ----

    def _begin_plan(self) -> Task:
        sessions = list(self._registry)
        known = {session.digest: session.paused for session in sessions}
        future = self._worker.submit(self._plan, sessions)

        def done() -> None:
            if self._succeeded(future, "planning", "of all"):
                expired, demotions = future.result()
                self._queue.extend(partial(self._expire, digest, known[digest]) for digest in expired)
                self._queue.extend(partial(self._demote, move, known[move.key]) for move in demotions)
            usage = self._memory.usage()
            tight = usage.bytes > self._config.high_watermark * usage.capacity_bytes
            for digest, (_, since) in self._resting.items():
                if tight or self._clock() - since >= self._config.memory_age_s:
                    self._queue.append(partial(self._write_out, digest))

        return future, done

    def _plan(self, sessions: list[Session]) -> tuple[list[str], list[Demotion]]:
        """On the worker. What changes meanwhile is seen when a move begins."""
        parcels = [
            Parcel(session.digest, "", paused.stored_bytes, _last_used(session, paused), paused.tiers)
            for session in sessions
            if (paused := _resting(session)) is not None
        ]
        now = self._now()
        self._copies.drop_superseded(
            {session.digest: paused for session in sessions if (paused := _resting(session)) is not None},
            self._namespace,
        )
        demotions = select_demotions(parcels, self._store.places(), self._store.policy, now)
        # In the shared tier its own life time counts, which every server's reading renews.
        own = [parcel for parcel in parcels if not self._store.in_shared(parcel.places)]
        return select_expired(own, self._store.policy, now), demotions

    def _as_planned(self, digest: str, paused: PausedCopy | None) -> Session | None:
        """The session, if it still rests as it did when that was planned."""
        session = self._registry.find(digest)
        if session is None or session.state is not State.PAUSED or session.paused != paused:
            return None
        return session

    def _expire(self, digest: str, paused: PausedCopy | None) -> Task | None:
        session = self._as_planned(digest, paused)
        if session is None or paused is None:
            return None
        future = self._worker.submit(self._copies.expire, digest, self._namespace, paused)

        def done() -> None:
            if self._succeeded(future, "expiry", digest) and future.result():
                self._counters.expired += 1
                if session.paused == paused and session.state is State.PAUSED:
                    self._registry.remove(digest)

        return future, done

    def _demote(self, demotion: Demotion, paused: PausedCopy | None) -> Task | None:
        session = self._as_planned(demotion.key, paused)
        if session is None or paused is None or self._busy(demotion.key):
            return None
        future = self._worker.submit(
            self._moves.move,
            demotion.key,
            self._namespace,
            paused,
            (demotion.source,),
            demotion.target,
            give_way=True,
        )

        def done() -> None:
            if not self._succeeded(future, "demotion", demotion.key):
                self._counters.demotions_failed += 1
                return
            self._counters.demotions += 1
            copy: PausedCopy = future.result()
            known = session.paused
            if known is not None and (known == paused or known.same_pause(copy)):
                left = known.without(demotion.source)
                session.paused = copy if left is None else left.joined(copy)

        return future, done

    def _write_out(self, digest: str) -> Task | None:
        session = self._registry.find(digest)
        snapshot, _ = self._resting.pop(digest, (None, 0.0))
        if session is None or snapshot is None or not session.rests_in_memory:
            return None
        paused = session.paused
        assert paused is not None
        keys = [page_key(snapshot.namespace, page_hash) for page_hash in snapshot.names_in_memory]
        overtaken = Event()
        self._writing = (digest, overtaken)
        future: Future[Written] = self._worker.submit(
            self._transfers.write,
            snapshot,
            MemoryPages(self._memory, keys),
            None,
            lambda: None,
            paused_at=paused.paused_at,
            unless=overtaken.is_set,
        )

        def done() -> None:
            self._writing = None
            if not self._succeeded(future, "writing out", digest):
                self._counters.demotions_failed += 1
                if session.paused is paused and not overtaken.is_set():
                    self._resting[digest] = (snapshot, self._clock())
                return
            self._counters.demotions += 1
            if session.paused is paused:
                session.paused = future.result().copy
                session.in_memory = True

        return future, done

    def _succeeded(self, future: Future[Any], what: str, digest: str) -> bool:
        error = future.exception()
        if error is None:
            return True
        if isinstance(error, Stopped):
            logger.debug("krul: %s of session %s gave way to a verb", what, digest[:12])
        elif isinstance(error, KrulError):
            logger.warning("krul: %s of session %s failed: %s", what, digest[:12], error)
        else:
            logger.error("krul: %s of session %s failed", what, digest[:12], exc_info=error)
        return False


def _resting(session: Session) -> PausedCopy | None:
    """Its copy, if it rests outside memory."""
    return session.paused if session.state is State.PAUSED and not session.rests_in_memory else None


def _last_used(session: Session, paused: PausedCopy) -> float:
    """Here, or by another server that paused it since."""
    return max(session.last_used, paused.paused_at)

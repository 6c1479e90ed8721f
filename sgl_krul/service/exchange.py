"""Stored sessions and other places: to another tier, to a file and back, from and to other servers.

As `SessionService`: one thread calls, every method returns at once, the answer follows by `reply`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sgl_krul.errors import SessionBusy, UnknownSession, UnknownTier
from sgl_krul.service.copies import StoredCopies
from sgl_krul.service.jobs import Body, Job, Jobs, Reply
from sgl_krul.service.moves import Moves
from sgl_krul.service.tenants import Tenants
from sgl_krul.service.upkeep import Upkeep
from sgl_krul.service.views import describe
from sgl_krul.session.catalog import as_session
from sgl_krul.session.record import Manifest, SessionKey
from sgl_krul.session.registry import PausedCopy, Registry, Session, State
from sgl_krul.store.workers import Workers

__all__ = ["Exchange"]

_WORKERS = 4  # gigabytes may be on their way: a pause does not queue behind them


class Exchange:
    """Made and closed by the service, whose registry and jobs it shares. `namespace`: the current one."""

    def __init__(
        self,
        registry: Registry,
        jobs: Jobs,
        copies: StoredCopies,
        moves: Moves,
        upkeep: Upkeep,
        tenants: Tenants,
        namespace: Callable[[], str],
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._jobs = jobs
        self._copies = copies
        self._store = copies.store
        self._moves = moves
        self._upkeep = upkeep
        self._tenants = tenants
        self._namespace = namespace
        self._clock = clock
        self._workers = Workers("exchange", _WORKERS)

    def move(self, session: Session, target: str, reply: Reply) -> None:
        """Put a paused session into one tier, and nowhere else.

        Raises:
            SessionBusy: it is not paused, or another job of it runs.
            UnknownTier
        """
        paused = self._paused_copy(session, "moved")
        if target not in self._store.names:
            names = ", ".join(self._store.names) or "none"
            raise UnknownTier(
                f"there is no tier {target!r} here, expected one of {names}: configure it, or name another"
            )
        start = self._clock()
        future = self._workers.submit(
            self._moves.move,
            session.digest,
            self._namespace(),
            paused,
            paused.tiers,
            target,
            give_way=False,
        )

        def complete() -> Body:
            copy = future.result()
            known = self._registry.add(session)  # a listing may have found it anew meanwhile
            known.paused = copy
            return describe(known) | {"elapsed_ms": round(1000 * (self._clock() - start), 3)}

        self._jobs.begin(Job(session.digest, future, complete, reply))

    def export(self, session: Session, path: Path, reply: Reply) -> None:
        """Write a paused session to a file.

        Raises:
            SessionBusy: it is not paused, or another job of it runs.
        """
        paused = self._paused_copy(session, "exported")
        future = self._workers.submit(self._moves.export, session.digest, paused, self._namespace(), path)

        def complete() -> Body:
            manifest = future.result()
            return describe(session) | {"exported_tokens": manifest.stored_tokens}

        self._jobs.begin(Job(session.digest, future, complete, reply))

    def take_in(self, path: Path, reply: Reply) -> None:
        """Store the session of an exported file; it is a paused session of this server then."""

        claimed: list[Session] = []

        def admit(manifest: Manifest, size_bytes: int) -> None:
            """On the worker."""
            known = self._registry.find(manifest.digest)
            session = known or Session(manifest.digest, manifest.session_id, manifest.salted)
            self._tenants.claim(session, size_bytes)
            claimed.append(session)

        future = self._workers.submit(self._moves.take_in, path, self._namespace(), admit)

        def complete() -> Body:
            for session in claimed:
                self._tenants.settle(session)
            manifest, tier = future.result()
            session = self._registry.add(as_session(manifest, tier))
            if session.state is State.PAUSED:
                session.paused = PausedCopy.of(manifest, tier)
            return describe(session)

        self._jobs.begin(Job("", future, complete, reply))

    def locate(self, key: SessionKey, then: Callable[[Session], None], reply: Reply) -> None:
        """Go on with the session of `key`, which the shared tier may know if this server does not.

        `then` runs now or in a later `poll`; a KrulError it raises is answered.

        Raises:
            UnknownSession: it is not known, and there is no shared tier to ask.
        """
        known = self._registry.find(key.digest)
        if known is not None or self._store.shared is None:
            then(known or self._registry.get(key))
            return
        future = self._workers.submit(self._copies.find, key.digest, None, self._namespace())

        def complete() -> Body | None:
            found = future.result()
            if found.manifest is None:
                if found.why[0] == "missing":
                    self._registry.get(key)  # raises what is to be said
                raise UnknownSession(f"session {key.session_id!r} is not known here, and {found.why[1]}")
            session = as_session(found.manifest, found.tiers[0].name)
            session.key = key
            then(self._registry.add(session))
            return None

        self._jobs.begin(Job("", future, complete, reply))

    def refresh(self, reply: Reply, then: Callable[[], Body]) -> None:
        """Look what other servers paused, then answer with `then()`; at once without a shared tier."""
        future = self._upkeep.look_around()
        if future is None:
            reply(then())
            return

        def complete() -> Body:
            self._upkeep.take_found()
            return then()

        self._jobs.begin(Job("", future, complete, reply))

    def _paused_copy(self, session: Session, verb: str) -> PausedCopy:
        """The stored copy of a session that rests in a tier."""
        self._jobs.refuse_if_busy(session)
        if session.state is not State.PAUSED or session.paused is None or session.rests_in_memory:
            raise SessionBusy(
                f"session {session.session_id!r} can't be {verb}: it is {session.state.value} and not stored "
                "outside memory. Pause it first (with ssd or redis configured)."
            )
        return session.paused

    def close(self) -> None:
        """Stop the workers."""
        self._workers.close()

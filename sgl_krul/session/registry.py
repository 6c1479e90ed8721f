"""All sessions this server knows: the ones that talk, the ones that rest, and where each stands."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from sgl_krul.errors import UnknownSession
from sgl_krul.layout import KvLayout
from sgl_krul.session.private import private_key
from sgl_krul.session.record import Manifest, SessionKey

__all__ = ["MEMORY", "PausedCopy", "Registry", "Session", "State"]


MEMORY = "memory"  # the one tier a session rests in without a manifest
MAX_UNPAUSED = 50_000
MAX_BRANCHES = 8  # older ones leave the device when the tree needs room


class State(StrEnum):
    """Where a session stands. STALE: stored under another namespace (other weights, say), unreadable here."""

    ACTIVE = "active"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    STALE = "stale"


@dataclass(frozen=True)
class PausedCopy:
    """What the last manifest of a session says, without its token ids: small, kept for every session.

    `tiers` are the places that have it, fastest first.
    """

    tiers: tuple[str, ...]
    namespace: str
    generation: int
    tokens: int
    stored_tokens: int
    raw_bytes: int
    stored_bytes: int
    exact: bool
    paused_at: float
    layer_plan: str = "raw"
    layer_modes: tuple[str, ...] = ()
    loss: float = 0.0

    @classmethod
    def of(cls, manifest: Manifest, *tiers: str) -> PausedCopy:
        """The summary of `manifest`, found in `tiers`."""
        return cls(
            tiers=tiers,
            namespace=manifest.namespace,
            generation=manifest.generation,
            tokens=manifest.tokens,
            stored_tokens=manifest.stored_tokens,
            raw_bytes=manifest.raw_bytes,
            stored_bytes=manifest.stored_bytes,
            exact=manifest.exact,
            paused_at=manifest.paused_at,
            layer_plan=manifest.layer_plan,
            layer_modes=manifest.layer_modes,
            loss=manifest.loss,
        )

    @classmethod
    def in_memory(
        cls,
        namespace: str,
        layout: KvLayout,
        token_ids: Sequence[int],
        stored_tokens: int,
        paused_at: float,
        *,
        exact: bool = True,
    ) -> PausedCopy:
        """A session that rests in the memory tier only: no manifest, lost with the server."""
        size = stored_tokens * layout.token_bytes
        return cls((MEMORY,), namespace, 1, len(token_ids), stored_tokens, size, size, exact, paused_at)

    def same_pause(self, other: PausedCopy) -> bool:
        """Whether both were written by one pause (or are copies of what it wrote)."""
        mine = (self.namespace, self.generation, self.paused_at)
        return mine == (other.namespace, other.generation, other.paused_at)

    def joined(self, other: PausedCopy) -> PausedCopy:
        """What is known after `other` was found too: the later pause counts, in all places that have it."""
        if self.same_pause(other):
            return replace(self, tiers=tuple(dict.fromkeys((*self.tiers, *other.tiers))))
        return self if self.paused_at >= other.paused_at else other

    def without(self, tier: str) -> PausedCopy | None:
        """The same where `tier` has it no more; None when no place is left."""
        tiers = tuple(name for name in self.tiers if name != tier)
        return replace(self, tiers=tiers) if tiers else None


@dataclass
class Session:
    """One session. `token_ids` is the key of its last finished request in this server's life (empty before).

    `branches` are earlier keys that `token_ids` does not extend (an edited or regenerated turn); their KV
    leaves the device at the next pause. `end_hash` names the last full page of `token_ids`.
    `private`: it came back lossy, and lives in its private cache namespace of this number until it is
    deleted (`session.private`). None: its KV is exact, and shared with all who have the same tokens.
    """

    digest: str
    session_id: str
    salted: bool
    key: SessionKey | None = None
    state: State = State.ACTIVE
    token_ids: array[int] = field(default_factory=lambda: array("q"))
    end_hash: str | None = None
    branches: list[array[int]] = field(default_factory=list)
    paused: PausedCopy | None = None
    last_used: float = 0.0
    corrupt_chunks: int = 0
    left_in: frozenset[str] = frozenset()  # tiers that could not be asked to delete an older copy
    in_memory: bool = False  # resumed to memory, and nothing has run since
    private: int | None = None

    def advance(self, token_ids: array[int], end_hash: str | None, now: float) -> None:
        """A request of this session finished with these tokens: they are its state from now on."""
        if self.token_ids and token_ids[: len(self.token_ids)] != self.token_ids:
            self.branches = [*self.branches[1 - MAX_BRANCHES :], self.token_ids]
        self.token_ids = token_ids
        self.end_hash = end_hash
        self.state = State.ACTIVE
        self.in_memory = False
        self.last_used = now

    def restored(self, token_ids: array[int]) -> None:
        """These tokens were put on the device: should the next turn differ, they are a branch of the chat."""
        if not self.token_ids:
            self.token_ids = token_ids

    def key_in_cache(self, key: SessionKey) -> SessionKey:
        """The key that its pages have, on the device and in memory; `key` is the caller's."""
        return key if self.private is None else private_key(key, self.private)

    @property
    def exact(self) -> bool:
        """Whether its KV is what the model made: where it runs, or of a resting one as it is stored."""
        if self.private is not None:
            return False
        runs = self.state in (State.ACTIVE, State.PAUSING)
        return self.paused is None or self.paused.exact or runs

    @property
    def may_lie_in(self) -> frozenset[str]:
        """Tiers that may have a copy of it."""
        return self.left_in if self.paused is None else self.left_in | set(self.paused.tiers)

    @property
    def rests_in_memory(self) -> bool:
        """Paused, and nowhere but in the memory tier."""
        return self.paused is not None and self.paused.tiers == (MEMORY,)

    @property
    def tokens(self) -> int:
        """Tokens of the session as far as known.

        Of a resting one, what is stored counts: another server may have gone on with it.
        """
        resting = self.state in (State.PAUSED, State.RESUMING, State.STALE)
        if self.paused is not None and (resting or not self.token_ids):
            return self.paused.tokens
        return len(self.token_ids)


class Registry:
    """Sessions by digest. Used by one thread (the scheduler's).

    Of the sessions that were never paused at most `max_unpaused` are kept: the ones not heard of for longest
    are forgotten, and computed anew should they come back.
    """

    def __init__(self, max_unpaused: int = MAX_UNPAUSED) -> None:
        self._sessions: dict[str, Session] = {}
        self._unpaused: dict[str, None] = {}  # oldest first; may hold some that were paused since
        self._max_unpaused = max_unpaused
        self._unused_private = 1  # sessions that are gone have used the numbers below

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, digest: str) -> Session | None:
        """The session, or None."""
        return self._sessions.get(digest)

    def get(self, key: SessionKey) -> Session:
        """The session of `key`.

        Raises:
            UnknownSession: naming the id; it also says so when the id exists under another salt.
        """
        session = self._sessions.get(key.digest)
        if session is None:
            hint = "list the known ones with GET /v1/sessions or `krul sessions list`"
            if any(s.session_id == key.session_id for s in self._sessions.values()):
                hint = "the id exists with another cache_salt or extra_key: pass the ones the chat uses"
            raise UnknownSession(f"no session {key.session_id!r} is known here: {hint}")
        return session

    def open(self, key: SessionKey, now: float) -> Session:
        """The session of `key`, made if it is new."""
        session = self._sessions.get(key.digest)
        if session is None:
            session = Session(digest=key.digest, session_id=key.session_id, salted=key.salted, last_used=now)
            self._sessions[key.digest] = session
        session.key = key
        self._unpaused.pop(key.digest, None)
        self._unpaused[key.digest] = None
        while len(self._unpaused) > self._max_unpaused:
            self._forget_oldest()
        return session

    def ends(self, *, but: Session) -> set[str]:
        """The last page hashes of all other active sessions."""
        return {
            s.end_hash
            for s in self._sessions.values()
            if s.end_hash is not None and s.state is State.ACTIVE and s is not but
        }

    def add(self, session: Session) -> Session:
        """Enter a session found in a store; returns it as it is known now.

        One that is known already and not active learns of the copy that was found.
        """
        known = self._sessions.setdefault(session.digest, session)
        if known.private is None:
            known.private = session.private
        if known is session or session.paused is None:
            return known
        if known.state is State.PAUSED and session.state is State.PAUSED and known.paused is not None:
            known.paused = known.paused.joined(session.paused)
        elif known.state is State.STALE and session.state is State.PAUSED:
            known.paused, known.state = session.paused, State.PAUSED
        return known

    def private_number(self, session: Session) -> int:
        """The number of the session's private namespace, or of the one it gets should it come back lossy:
        the generation it is stored as, and none that a deleted session of the name may have had.
        """
        if session.private is not None:
            return session.private
        generation = 1 if session.paused is None else session.paused.generation
        return max(self._unused_private, generation)

    def delete(self, session: Session) -> None:
        """Forget a session that was deleted: what its private namespace may hold is nobody's from now on."""
        if session.private is not None:
            self._unused_private = max(self._unused_private, session.private + 1)
        self.remove(session.digest)

    def remove(self, digest: str) -> None:
        """Forget the session."""
        self._sessions.pop(digest, None)
        self._unpaused.pop(digest, None)

    def _forget_oldest(self) -> None:
        digest = next(iter(self._unpaused))
        del self._unpaused[digest]
        session = self._sessions.get(digest)
        if session is not None and session.paused is None and session.state is State.ACTIVE:
            del self._sessions[digest]

    def check(self) -> list[str]:
        """Problems found: empty when sound."""
        return [
            f"session {session.digest[:12]} is {session.state.value} without a stored copy"
            for session in self._sessions.values()
            if session.state in (State.PAUSED, State.STALE) and session.paused is None
        ]

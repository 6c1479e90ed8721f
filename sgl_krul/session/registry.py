"""All sessions this server knows: the ones that talk, the ones that rest, and where each stands."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from sgl_krul.errors import UnknownSession
from sgl_krul.layout import KvLayout
from sgl_krul.session.record import Manifest, SessionKey

__all__ = ["PausedCopy", "Registry", "Session", "State"]


class State(StrEnum):
    """Where a session stands. STALE: stored under another namespace (other weights, say), unreadable here."""

    ACTIVE = "active"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    STALE = "stale"


@dataclass(frozen=True)
class PausedCopy:
    """What the last manifest of a session says, without its token ids: small, kept for every session."""

    tier: str
    namespace: str
    generation: int
    tokens: int
    stored_tokens: int
    raw_bytes: int
    stored_bytes: int
    exact: bool
    paused_at: float

    @classmethod
    def of(cls, manifest: Manifest, tier: str) -> PausedCopy:
        """The summary of `manifest`, found in `tier`."""
        return cls(
            tier=tier,
            namespace=manifest.namespace,
            generation=manifest.generation,
            tokens=manifest.tokens,
            stored_tokens=manifest.stored_tokens,
            raw_bytes=manifest.raw_bytes,
            stored_bytes=manifest.stored_bytes,
            exact=manifest.exact,
            paused_at=manifest.paused_at,
        )

    @classmethod
    def in_memory(
        cls, namespace: str, layout: KvLayout, token_ids: Sequence[int], stored_tokens: int, paused_at: float
    ) -> PausedCopy:
        """A session that rests in the memory tier only: no manifest, lost with the server."""
        size = stored_tokens * layout.token_bytes
        return cls("memory", namespace, 1, len(token_ids), stored_tokens, size, size, True, paused_at)


@dataclass
class Session:
    """One session. `token_ids` is the key of its last finished request in this server's life (empty before).

    `branches` are earlier keys that `token_ids` does not extend (an edited or regenerated turn); their KV
    leaves the device at the next pause.
    """

    digest: str
    session_id: str
    salted: bool
    key: SessionKey | None = None
    state: State = State.ACTIVE
    token_ids: array[int] = field(default_factory=lambda: array("q"))
    branches: list[array[int]] = field(default_factory=list)
    paused: PausedCopy | None = None
    last_used: float = 0.0
    corrupt_chunks: int = 0

    def advance(self, token_ids: array[int], now: float) -> None:
        """A request of this session finished with these tokens: they are its state from now on."""
        if self.token_ids and token_ids[: len(self.token_ids)] != self.token_ids:
            self.branches.append(self.token_ids)
        self.token_ids = token_ids
        self.state = State.ACTIVE
        self.last_used = now

    @property
    def tokens(self) -> int:
        """Tokens of the session as far as known."""
        if self.token_ids:
            return len(self.token_ids)
        return self.paused.tokens if self.paused is not None else 0


class Registry:
    """Sessions by digest. Used by one thread (the scheduler's)."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

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
            hint = "list the known ones with GET /v1/sessions"
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
        return session

    def add(self, session: Session) -> None:
        """Enter a session found in a store; one that is known already stays."""
        self._sessions.setdefault(session.digest, session)

    def remove(self, digest: str) -> None:
        """Forget the session."""
        self._sessions.pop(digest, None)

    def check(self) -> list[str]:
        """Problems found: empty when sound."""
        return [
            f"session {session.digest[:12]} is {session.state.value} without a stored copy"
            for session in self._sessions.values()
            if session.state in (State.PAUSED, State.STALE) and session.paused is None
        ]

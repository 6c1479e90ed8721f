"""A server without a model over real tiers: what the tests with real Redis servers drive."""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sgl_krul.config import PauseConfig, PlacementConfig, Replicate
from sgl_krul.errors import KrulError
from sgl_krul.service import SessionService
from sgl_krul.session.record import SessionKey, session_prefix
from sgl_krul.session.registry import Session
from sgl_krul.store import RedisTier
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.pages import PageReservation, PinnedPages
from sgl_krul.store.redis.writer import TEMPORARY_TTL_MS
from sgl_krul.store.tier import CheckedTier
from tests.redis_servers import open_tier
from tests.sessions import (
    LAYOUT,
    NAMESPACE,
    PAGE,
    Chat,
    TruePages,
    drive,
    make_config,
    make_service,
    open_ssd,
    policy,
    wrong_pages,
)

__all__ = [
    "TEMPORARY",
    "Answers",
    "Site",
    "WatchedMemory",
    "chunk_names",
    "open_site",
    "raw_key",
    "raw_keys",
    "session_of",
    "true_tokens",
]

Answers = list[Any]
MEMORY_PAGES = 4096
TEMPORARY = re.compile(rb"/\.tmp-[0-9a-f]+$")


class WatchedMemory(MemoryTier):
    """Calls `on_publish` when a chunk has come in: the middle of a resume."""

    def __init__(self) -> None:
        super().__init__(LAYOUT.layers, LAYOUT.page_segment_bytes, MEMORY_PAGES * LAYOUT.page_bytes)
        self.on_publish: Callable[[], None] = lambda: None

    def publish(
        self, reservation: PageReservation, header: bytes = b"", pin: bool = False
    ) -> PinnedPages | None:
        """See MemoryTier."""
        pinned = super().publish(reservation, header, pin)
        self.on_publish()
        return pinned


class Site:
    """One server: its service, its memory, its tiers, and the questions a test has."""

    def __init__(self, service: SessionService, memory: WatchedMemory, redis: RedisTier | None) -> None:
        self.service = service
        self.memory = memory
        self._redis = redis

    @property
    def redis(self) -> RedisTier:
        """The Redis tier."""
        assert self._redis is not None
        return self._redis

    # -- verbs --

    def begin_pause(
        self,
        session: Chat,
        on_read: Callable[[int], None] = lambda first_page: None,
        settle: Callable[[bool], int] = lambda success: 0,
    ) -> Answers:
        """A turn, and a pause asked for; the list gets the answer. `on_read` as in TruePages."""
        answers: Answers = []
        session.namespace = self.service.namespace
        self.service.observe(session.key, session.token_ids)
        self.service.pause(
            self.service.registry.get(session.key),
            session.hashes,
            TruePages(session.hashes, on_read=on_read),
            before=lambda: None,
            settle=settle,
            reply=answers.append,
        )
        return answers

    def pause(self, session: Chat, on_read: Callable[[int], None] = lambda first_page: None) -> Any:
        """A turn and a pause; the answer."""
        return self.answer(self.begin_pause(session, on_read))

    def begin_resume(self, key: SessionKey, hold: bool = False) -> Answers:
        """A resume asked for."""
        answers: Answers = []
        self.service.resume(key, hold=hold, reply=answers.append)
        return answers

    def resume(self, session: Chat, hold: bool = False) -> Any:
        """The answer to a resume."""
        return self.answer(self.begin_resume(session.key, hold))

    def begin_forget(self, session: Chat) -> Answers:
        """A forget asked for."""
        answers: Answers = []
        self.service.forget(self.find(session), settle=lambda: 0, reply=answers.append)
        return answers

    def forget(self, session: Chat) -> Any:
        """The answer to a forget."""
        return self.answer(self.begin_forget(session))

    def move(self, session: Chat, target: str) -> Any:
        """The answer to a move."""
        answers: Answers = []
        self.service.exchange.move(self.find(session), target, answers.append)
        return self.answer(answers)

    def look(self) -> None:
        """List the shared tier now."""
        answers: Answers = []
        self.service.exchange.refresh(answers.append, dict)
        self.answer(answers)

    def answer(self, answers: Answers, within_s: float = 30.0) -> Any:
        """Poll until the answer is there, without waiting for anybody else's."""
        self.poll_until(lambda: bool(answers), within_s)
        (answer,) = answers
        return answer

    def poll_until(self, condition: Callable[[], bool], within_s: float = 30.0) -> None:
        """Poll until the condition holds."""
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"not true within {within_s} s: a job hangs"
            self.service.poll()
            time.sleep(0.0005)

    # -- what is asked afterwards --

    def find(self, session: Chat) -> Session:
        """The session as the server knows it."""
        return self.service.registry.get(session.key)

    def knows(self, session: Chat) -> bool:
        """Whether the server knows the session."""
        return self.service.registry.find(session.digest) is not None

    def exact(self, session: Chat, answer: Any, tokens: int | None = None) -> None:
        """So many tokens (None: all full pages) were restored, the rest is computed, every byte is right."""
        wanted = len(session.token_ids) // PAGE * PAGE if tokens is None else tokens
        assert not isinstance(answer, KrulError), answer
        assert answer["restored_tokens"] == wanted, answer
        if self.knows(session):
            assert answer["recompute_tokens"] == len(session.token_ids) - wanted
        assert self.memory.leading(session.page_keys) * PAGE == wanted
        assert wrong_pages(self.memory) == []

    def resumes(self, session: Chat, tokens: int | None = None, origin: str | None = None) -> Any:
        """Resume from the store, not from memory, and it is exact."""
        self.memory.clear()
        answer = self.resume(session)
        self.exact(session, answer, tokens)
        assert origin is None or answer["restored_from"] == origin, answer
        return answer

    def reaches_redis(self) -> bool:
        """Whether the breaker lets calls through again."""
        return self.redis.breaker_state == "closed" or self.redis.available


@contextmanager
def open_site(
    url: str | None = None,
    *,
    ssd: Path | None = None,
    replicate: Replicate = "redis",
    namespace: str = NAMESPACE,
    redis: dict[str, Any] | None = None,
    placement: dict[str, Any] | None = None,
    rules: dict[str, Any] | None = None,
    hold_deadline_s: float = 20.0,
    pausers: int = 1,
    wrap: Callable[[Any], Any] = lambda tier: tier,
    now: Callable[[], float] = time.time,
) -> Iterator[Site]:
    """A server over a Redis at `url` and a disk below `ssd`. `wrap` is put around either tier.

    `redis`, `placement` and `rules` change settings of those names. At the end it must be sound.
    """
    with ExitStack() as stack:
        tier = None if url is None else stack.enter_context(open_tier(url, **(redis or {})))
        disk: CheckedTier | None = None if ssd is None else stack.enter_context(open_ssd(ssd))
        memory = WatchedMemory()
        config = replace(
            make_config(hold_deadline_s),
            pause=PauseConfig(workers=pausers),
            placement=PlacementConfig(replicate=replicate, **(placement or {})),
        )
        service = make_service(
            memory,
            None if disk is None else wrap(disk),
            shared=None if tier is None else wrap(tier),
            config=config,
            namespace=namespace,
            rules=policy(replicate, **(rules or {})),
            now=now,
        )
        stack.callback(service.close)
        site = Site(service, memory, tier)
        yield site
        memory.on_publish = lambda: None
        drive(service)
        assert service.registry.check() + memory.check() == []
        assert wrong_pages(memory) == []


def session_of(chunks: int, session_id: str, first: int = 0) -> Chat:
    """A session of so many full chunks and half a page."""
    return Chat(SessionKey(session_id), true_tokens(chunks, first))


def true_tokens(chunks: int, first: int = 0) -> array[int]:
    """Tokens of so many full chunks and half a page."""
    return array("q", range(first, first + 64 * chunks + 8))


def raw_key(session: Chat, name: str) -> str:
    """The key in Redis of an object of a session; "": of the index of its objects."""
    directory = session_prefix(session.namespace, session.digest)[:-1]
    return f"krul:{{{directory}}}/{name}" if name else f"krul:{{{directory}}}"


def raw_keys(client: Any, session: Chat) -> list[str]:
    """Names of the objects of a session in Redis, and ".lease". Half written ones must have a life time."""
    start = raw_key(session, "").encode() + b"/"
    names = []
    for key in client.keys("*"):
        if TEMPORARY.search(key):
            assert 0 < client.pttl(key) <= TEMPORARY_TTL_MS
        elif key.startswith(start):
            names.append(key.removeprefix(start).decode())
    return sorted(names)


def chunk_names(count: int, generation: int = 1) -> Sequence[str]:
    """Names of the first chunks of a generation."""
    return [f"g{generation:08d}-c{index:06d}" for index in range(count)]

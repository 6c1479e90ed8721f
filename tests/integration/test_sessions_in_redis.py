"""What happens to Redis while sessions go to it and come from it: right KV or none, and always an answer."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sgl_krul.cli.server_process import free_port
from sgl_krul.errors import StoreUnavailable
from sgl_krul.session.registry import State
from tests.integration.redis_site import Site, open_site, raw_keys, session_of
from tests.redis_servers import Proxy, ValkeyServer
from tests.sessions import CHUNK_TOKENS, PAGE, Chat

CHUNKS = 12
MIDDLE = 5  # the chunk of a pause at which something happens


def at_chunk(number: int, act: Callable[[], object]) -> Callable[[int], None]:
    """An `on_read` that acts when this chunk of a pause is read for the first time."""
    done = threading.Event()

    def on_read(first_page: int) -> None:
        if first_page * PAGE == number * CHUNK_TOKENS and not done.is_set():
            done.set()
            act()

    return on_read


def in_the_middle(site: Site, session: Chat, act: Callable[[], object]) -> None:
    """Act in the middle of the next resume: when the first two chunks have come in."""
    lock, done = threading.Lock(), threading.Event()

    def on_publish() -> None:
        with lock:
            if site.memory.leading(session.page_keys) * PAGE >= 2 * CHUNK_TOKENS and not done.is_set():
                done.set()
                act()

    site.memory.on_publish = on_publish


def restart(server: ValkeyServer) -> None:
    """kill -9, and again on the same port: what was in it has gone."""
    server.kill()
    server.start()


# -- restart --


@pytest.mark.parametrize("back_at_once", [True, False])
def test_redis_restarts_in_the_middle_of_a_pause(
    redis: ValkeyServer, tmp_path: Path, back_at_once: bool
) -> None:
    session = session_of(CHUNKS, "chat")
    with open_site(redis.url, ssd=tmp_path) as site:
        act = (lambda: restart(redis)) if back_at_once else redis.kill
        answer = site.pause(session, at_chunk(MIDDLE, act))
        assert (answer["state"], answer["tiers"]) == ("paused", ["ssd"])
        assert redis.address in answer["not_written"]["redis"]
        site.resumes(session, origin="ssd")
        if not back_at_once:
            redis.start()
        assert raw_keys(redis.client(), session) == []
        site.poll_until(site.reaches_redis)
        session.token_ids.extend(range(9000, 9100))
        answer = site.pause(session)
        assert (answer["tiers"], answer["not_written"]) == (["redis"], {})
        assert answer["chunks_written"] == len(session.token_ids) // CHUNK_TOKENS + 1
        site.resumes(session, origin="redis")
        assert site.redis.check() == []


@pytest.mark.parametrize("back_at_once", [True, False])
def test_without_a_disk_that_pause_is_an_error_and_the_session_stays(
    redis: ValkeyServer, back_at_once: bool
) -> None:
    session = session_of(CHUNKS, "chat")
    with open_site(redis.url) as site:
        act = (lambda: restart(redis)) if back_at_once else redis.kill
        answer = site.pause(session, at_chunk(MIDDLE, act))
        assert isinstance(answer, StoreUnavailable)
        assert redis.address in str(answer)
        assert site.find(session).state is State.ACTIVE
        assert site.find(session).paused is None
        if not back_at_once:
            redis.start()
        site.poll_until(site.reaches_redis)
        assert site.pause(session)["tiers"] == ["redis"]
        site.resumes(session, origin="redis")


@pytest.mark.parametrize("back_at_once", [True, False])
def test_redis_restarts_in_the_middle_of_a_resume(redis: ValkeyServer, back_at_once: bool) -> None:
    session = session_of(CHUNKS, "chat")
    with open_site(redis.url) as site:
        site.pause(session)
        in_the_middle(site, session, (lambda: restart(redis)) if back_at_once else redis.kill)
        answer = site.resume(session)
        restored = site.memory.leading(session.page_keys) * PAGE
        assert 2 * CHUNK_TOKENS <= restored < CHUNKS * CHUNK_TOKENS
        site.exact(session, answer, restored)
        assert answer["reason"].startswith(("missing", "store unavailable"))
        site.memory.on_publish = lambda: None
        if not back_at_once:
            answer = site.resumes(session, tokens=0)
            assert answer["reason"].startswith("store unavailable")
            assert site.knows(session)  # it may be there
            redis.start()
        site.poll_until(site.reaches_redis)
        assert site.resumes(session, tokens=0)["reason"] == "the manifest has gone"
        assert not site.knows(session)
        answer = site.pause(session)
        assert (answer["tiers"], answer["chunks_written"]) == (["redis"], CHUNKS + 0)
        site.resumes(session, origin="redis")


def test_what_is_also_on_the_disk_does_not_need_redis(redis: ValkeyServer, tmp_path: Path) -> None:
    """Of a session in both tiers, one chunk is lost on the disk: Redis has it. Without Redis it is a hole."""
    session = session_of(CHUNKS, "chat")
    with open_site(redis.url, ssd=tmp_path, replicate="both") as site:
        assert site.pause(session)["tiers"] == ["ssd", "redis"]
        (lost,) = tmp_path.rglob("g*-c000007")
        lost.unlink()
        site.resumes(session, origin="redis")
        redis.kill()
        answer = site.resumes(session, tokens=7 * CHUNK_TOKENS, origin="ssd")
        assert answer["reason"].startswith(("missing chunk", "store unavailable"))
        session.token_ids.extend(range(9000, 9100))
        answer = site.pause(session)
        assert (answer["tiers"], list(answer["not_written"])) == (["ssd"], ["redis"])
        site.resumes(session, origin="ssd")
        redis.start()
        site.poll_until(site.reaches_redis)
        assert site.pause(session)["tiers"] == ["ssd", "redis"]


# -- SIGSTOP --


def disk_goes_on(site: Site, others: list[Chat], until: float) -> int:
    """Resume sessions from the disk until then; returns how many were."""
    count = 0
    while time.monotonic() < until or count < len(others):
        site.resumes(others[count % len(others)], origin="ssd")
        count += 1
    return count


@pytest.mark.parametrize("verb", ["resume", "pause"])
def test_redis_stands_still_for_five_seconds(redis: ValkeyServer, tmp_path: Path, verb: str) -> None:
    session, others = session_of(CHUNKS, "chat"), [session_of(2, f"disk{n}", 5000 * n) for n in range(1, 5)]
    with open_site(None, ssd=tmp_path) as before:
        for other in others:
            before.pause(other)
    settings = {"timeout_s": 1.0, "connect_timeout_s": 1.0, "lease_s": 60.0}
    with open_site(redis.url, ssd=tmp_path, redis=settings, hold_deadline_s=10.0) as site:
        site.pause(session)
        with redis.stopped():
            until = time.monotonic() + 5
            if verb == "resume":
                answers = site.begin_resume(session.key, hold=True)
            else:
                session.token_ids.extend(range(9000, 9300))
                answers = site.begin_pause(session)
            assert disk_goes_on(site, others, until) >= len(others)
            answer = site.answer(answers, within_s=10.0)  # it still stands still
            if verb == "resume":
                assert answer["reason"].startswith("store unavailable (redis")
                assert answer["restored_tokens"] == 0
            else:
                assert (answer["tiers"], list(answer["not_written"])) == (["ssd"], ["redis"])
            assert answer["elapsed_ms"] < 10_000
        if verb == "pause":
            site.resumes(session, origin="ssd")
        site.poll_until(site.reaches_redis)
        session.token_ids.extend(range(9300, 9400))
        assert site.pause(session)["tiers"] == [
            "redis"
        ]  # its own lease, which it could not give back, is no bar
        site.resumes(session, origin="redis")
        assert site.redis.check() == []


@pytest.mark.parametrize("verb", ["resume", "pause"])
def test_redis_stops_in_the_middle(redis: ValkeyServer, tmp_path: Path, verb: str) -> None:
    session = session_of(CHUNKS, "chat")
    settings = {"timeout_s": 0.3, "connect_timeout_s": 0.3, "lease_s": 60.0}

    def stop() -> None:
        redis.signal(signal.SIGSTOP)

    with open_site(redis.url, ssd=tmp_path, redis=settings) as site:
        if verb == "resume":
            site.pause(session)
            in_the_middle(site, session, stop)
            answer = site.resume(session)
            restored = site.memory.leading(session.page_keys) * PAGE
            assert 2 * CHUNK_TOKENS <= restored < CHUNKS * CHUNK_TOKENS
            site.exact(session, answer, restored)
        else:
            answer = site.pause(session, at_chunk(MIDDLE, stop))
            assert (answer["tiers"], list(answer["not_written"])) == (["ssd"], ["redis"])
        redis.signal(signal.SIGCONT)
        site.memory.on_publish = lambda: None
        site.poll_until(site.reaches_redis)
        site.resumes(session, origin="redis" if verb == "resume" else "ssd")
        session.token_ids.extend(range(9300, 9400))
        assert site.pause(session)["tiers"] == [
            "redis"
        ]  # its own lease, which it could not give back, is no bar
        site.resumes(session, origin="redis")
        assert site.redis.check() == []


# -- many who wait --

NEVER_WAITS = {"name", "available", "breaker_state", "usage"}


class Spied:
    """A tier that remembers which thread used what of it, with which keys."""

    def __init__(self, tier: Any) -> None:
        self._tier = tier
        self.uses: list[tuple[int, str]] = []

    def __getattr__(self, name: str) -> Any:
        self.uses.append((threading.get_ident(), name))
        return getattr(self._tier, name)


def test_fifty_wait_for_a_slow_redis_and_nobody_else_does(redis: ValkeyServer, tmp_path: Path) -> None:
    """Redis answers after 200 ms. A hold of a session on the disk is through before the first of the fifty.

    And the calling thread never asks a tier for anything that waits.
    """
    sessions = [session_of(2, f"s{number}", 1000 * number) for number in range(50)]
    mine = session_of(4, "mine", 900_000)
    with open_site(redis.url) as before:
        for session in sessions:
            before.pause(session)
    tiers: list[Spied] = []

    def spied(tier: Any) -> Spied:
        tiers.append(Spied(tier))
        return tiers[-1]

    with Proxy(redis.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}"
        with open_site(url, ssd=tmp_path, replicate="ssd", wrap=spied) as site:
            disk, shared = tiers
            site.pause(mine)
            site.memory.clear()
            site.poll_until(lambda: not site.service.working)
            disk.uses.clear()
            shared.uses.clear()
            assert site.resume(mine, hold=True)["restored_from"] == "ssd"
            assert {name for _, name in shared.uses} <= NEVER_WAITS  # it has nothing to do with it
            site.memory.clear()
            proxy.delay_s = 0.2
            holds = [site.begin_resume(session.key, hold=True) for session in sessions]
            assert site.resume(mine, hold=True)["restored_tokens"] == 4 * CHUNK_TOKENS
            assert not any(holds)
            site.service.overview()
            for session, hold in zip(sessions, holds, strict=True):
                answer = site.answer(hold)
                assert (answer["restored_tokens"], answer["restored_from"]) == (2 * CHUNK_TOKENS, "redis")
                assert site.memory.leading(session.page_keys) == 2 * CHUNK_TOKENS // PAGE
            me = threading.get_ident()
            used = {name for tier in tiers for thread, name in tier.uses if thread == me}
            assert used <= NEVER_WAITS
            assert {name for _, name in shared.uses} > NEVER_WAITS - {"breaker_state"}
            proxy.delay_s = 0.0


def test_a_dead_redis_is_not_asked_by_every_hold(tmp_path: Path) -> None:
    """The proxy has nothing behind it: it counts how often somebody tried. 200 chats nobody has seen."""
    with Proxy(free_port()) as proxy:
        with open_site(f"redis://127.0.0.1:{proxy.port}", ssd=tmp_path, replicate="ssd") as site:
            for number in range(200):
                answer = site.resume(session_of(1, f"new{number}"), hold=True)
                assert answer["restored_tokens"] == 0
                assert answer["reason"].startswith("store unavailable (redis")
            # 3 until the breaker opens, and one now and then, each time after twice as long
            assert 3 <= proxy.connections <= 12
            assert site.redis.breaker_state != "closed"
            assert site.pause(session_of(2, "mine"))["not_written"] == {}
            assert len(site.service.registry) == 1


def test_a_pause_says_that_a_dead_redis_was_not_even_tried(tmp_path: Path) -> None:
    with open_site(f"redis://127.0.0.1:{free_port()}", ssd=tmp_path, replicate="both") as site:
        for number in range(100):
            site.resume(session_of(1, f"new{number}"))
            if not site.redis.available:
                break
        assert not site.redis.available
        answer = site.pause(session_of(2, "mine"))
        assert (answer["tiers"], list(answer["not_written"])) == (["ssd"], ["redis"])

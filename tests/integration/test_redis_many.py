"""Two thousand tiny sessions come, go on and are forgotten: nothing of them is left, here or in Redis."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sgl_krul.errors import KrulError
from tests.integration.redis_site import Answers, Site, open_site
from tests.redis_servers import ValkeyServer
from tests.sessions import PAGE, Chat, chat, wrong_pages

SESSIONS = 2000
BATCH = 100

# A session that stays behind with its tokens, copy and names takes about 3 KiB: 6 MiB for all of them.
# The allocator's own ups and downs were below 1 MiB when this was written.
GROWTH_BYTES = 4 << 20


def resident_bytes() -> int:
    """What this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def tiny_sessions(number: int) -> list[Chat]:
    """Those of a round, which no other round has: 16, 24 or 32 tokens."""
    first = number * SESSIONS
    return [chat(16 + 8 * (n % 3), f"s{n}", first=100 * n) for n in range(first, first + SESSIONS)]


def for_all(site: Site, sessions: list[Chat], begin: Callable[[Chat], Answers]) -> None:
    """Ask a verb for all sessions, a hundred at a time. None of the answers is an error."""
    for start in range(0, len(sessions), BATCH):
        for answers in [begin(session) for session in sessions[start : start + BATCH]]:
            answer = site.answer(answers)
            assert not isinstance(answer, KrulError), answer


def one_round(site: Site, sessions: list[Chat], client: Any) -> None:
    """Pause all, resume all, forget all."""
    for_all(site, sessions, site.begin_pause)
    assert client.dbsize() == 3 * len(sessions) + 2  # chunk, manifest and index of each; two lists
    for_all(site, sessions, lambda session: site.begin_resume(session.key, hold=True))
    for session in sessions:
        assert site.memory.leading(session.page_keys) == len(session.token_ids) // PAGE
    assert wrong_pages(site.memory) == []
    for_all(site, sessions, site.begin_forget)
    site.memory.clear()
    site.poll_until(lambda: not site.service.working)
    assert client.dbsize() == 0
    assert len(site.service.registry) == 0
    assert site.redis.usage()[:2] == (0, 0)


def test_two_thousand_sessions_leave_nothing_behind(redis: ValkeyServer) -> None:
    """Rounds 2 and 3 are compared: the first one fills pools, caches and the allocator's free lists."""
    client = redis.client()
    resident, objects = [], []
    with open_site(redis.url, pausers=4) as site:
        for number in range(3):
            one_round(site, tiny_sessions(number), client)
            gc.collect()
            resident.append(resident_bytes())
            objects.append(len(gc.get_objects()))
        assert site.service.counters.resumes == 3 * SESSIONS
    assert objects[2] - objects[1] < 100, objects
    assert resident[2] - resident[1] < GROWTH_BYTES, resident

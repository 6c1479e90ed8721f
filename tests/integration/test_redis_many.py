"""Two thousand tiny sessions come, go on and are forgotten: nothing of them is left, here or in Redis."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path

from sgl_krul.errors import KrulError
from tests.integration.redis_site import Answers, Site, open_site
from tests.redis_servers import ValkeyServer
from tests.sessions import PAGE, Chat, chat, wrong_pages

SESSIONS = 2000
BATCH = 100

# A session that stayed behind with its tokens, its copy and its names takes about 3 KiB, 6 MiB for all of them;
# the allocators' own ups and downs were below 1 MiB when this was written.
GROWTH_BYTES = 4 << 20


def resident_bytes() -> int:
    """What this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def answered(site: Site, batch: list[Answers]) -> None:
    """All of them, and none is an error."""
    for answers in batch:
        answer = site.answer(answers)
        assert not isinstance(answer, KrulError), answer


def one_round(site: Site, sessions: list[Chat]) -> None:
    """Pause, resume, forget; a hundred at a time."""
    for start in range(0, SESSIONS, BATCH):
        some = sessions[start : start + BATCH]
        answered(site, [site.begin_pause(session) for session in some])
        answered(site, [site.begin_resume(session.key, hold=True) for session in some])
        for session in some:
            assert site.memory.leading(session.page_keys) == len(session.token_ids) // PAGE
        forgotten: list[Answers] = []
        for session in some:
            answers: Answers = []
            site.service.forget(site.find(session), settle=lambda: 0, reply=answers.append)
            forgotten.append(answers)
        answered(site, forgotten)
        for session in some:
            for key in session.page_keys:
                site.memory.delete(key)


def test_two_thousand_sessions_leave_nothing_behind(redis: ValkeyServer) -> None:
    """Rounds 2 and 3 are compared: the first one fills pools, caches and the allocator's free lists."""
    assert os.path.exists("/proc/self/statm")
    sessions = [chat(16 + 8 * (number % 3), f"s{number}", first=100 * number) for number in range(SESSIONS)]
    client = redis.client()
    resident, objects = [], []
    with open_site(redis.url, pausers=4) as site:
        for _ in range(3):
            one_round(site, sessions)
            site.poll_until(lambda: not site.service.working)
            assert client.dbsize() == 0
            assert len(site.service.registry) == 0
            assert site.redis.usage()[:2] == (0, 0)
            assert wrong_pages(site.memory) == []
            gc.collect()
            resident.append(resident_bytes())
            objects.append(len(gc.get_objects()))
        assert site.service.counters.resumes == 3 * SESSIONS
        assert site.service.counters.restored_tokens == 3 * sum(len(s.token_ids) // 16 * 16 for s in sessions)
    assert objects[2] - objects[1] < SESSIONS // 4, objects
    assert resident[2] - resident[1] < GROWTH_BYTES, resident

"""More sessions than memory holds, paused and resumed in random order."""

from __future__ import annotations

import random

import pytest

from tests.e2e.harness import Answer, Chatter, ServerFactory, prompt

SESSIONS, LENGTH, TURNS = 50, 48, 3
PAGE_BYTES = 16 * 30 * 2 * 3 * 64 * 4


@pytest.fixture(scope="module")
def chatter(servers: ServerFactory) -> Chatter:
    pages = (LENGTH + 8) // 16 + 2
    return servers.start(config=servers.config(memory=5 * pages * PAGE_BYTES))


def test_fifty_sessions_memory_for_five(chatter: Chatter) -> None:
    turns = [[prompt(1000 * s + t, LENGTH if t == 0 else 9) for t in range(TURNS)] for s in range(SESSIONS)]
    references = [chatter.reference(turns[s], f"many-{s}", new=4) for s in range(SESSIONS)]
    assert chatter.http.post("/flush_cache").status_code == 200
    rng = random.Random(7)
    order = [s for s in range(SESSIONS) for _ in range(TURNS)]
    rng.shuffle(order)
    history: list[list[int]] = [[] for _ in range(SESSIONS)]
    done = [0] * SESSIONS
    origins = []
    for s in order:
        history[s] += turns[s][done[s]]
        answer: Answer = chatter.ask(history[s], f"many-{s}", new=4)
        assert answer.same_as(references[s][done[s]]), f"session {s}, turn {done[s]}"
        if done[s]:
            assert answer.restored == (len(history[s]) - 9 - 1) // 16 * 16
            origins.append(answer.krul["restored_from"])
        history[s] += answer.tokens
        done[s] += 1
        chatter.sessions.pause(f"many-{s}")
    overview = chatter.sessions.sessions()
    assert overview.tiers["memory"].bytes <= overview.tiers["memory"].capacity_bytes
    assert sum(session.state == "paused" for session in overview.sessions) == SESSIONS
    assert origins.count("ssd") > SESSIONS  # memory holds a tenth

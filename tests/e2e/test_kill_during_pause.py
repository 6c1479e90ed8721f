"""SIGKILL at ten seeded moments of a pause: afterwards each session is as before, or as after."""

from __future__ import annotations

import random
import threading
import time

from sgl_krul.errors import KrulError
from tests.e2e.harness import Chatter, ServerFactory, prompt

KILLS = 10
SESSIONS = [f"kill-{index}" for index in range(4)]


def test_killed_while_pausing(servers: ServerFactory, chatter: Chatter) -> None:
    rng = random.Random(11)
    history = {name: prompt(4000 + i, 300) for i, name in enumerate(SESSIONS)}
    stored = dict.fromkeys(SESSIONS, 0)  # tokens of the last pause that is known to be committed
    for round_number in range(KILLS):
        before = dict(stored)
        for name in SESSIONS:
            history[name] += chatter.ask(history[name], name, new=20).tokens
        pausing = threading.Thread(target=pause_all, args=(chatter, stored))
        pausing.start()
        time.sleep(rng.uniform(0.0, 0.25))
        chatter.kill()
        pausing.join()
        chatter = servers.start()
        listed = {s.session_id: s for s in chatter.sessions.sessions().sessions}
        for name in SESSIONS:
            full = (len(history[name]) - 1) // 16 * 16
            found = listed[name].stored_tokens if name in listed else 0
            assert found in (before[name], full), f"{name} in round {round_number}"
            if stored[name] != before[name]:  # the pause was answered: it must be there
                assert found == full
            stored[name] = found
        name = SESSIONS[round_number % len(SESSIONS)]
        answer = chatter.ask(history[name], name, new=2)
        assert answer.same_as(chatter.ask(history[name], new=2, cache_salt=f"kill-{round_number}"))
        assert answer.restored == stored[name]
    assert chatter.sessions.sessions().counters["corrupt_chunks"] == 0


def pause_all(chatter: Chatter, stored: dict[str, int]) -> None:
    """Pause all sessions; what was answered is committed."""
    for name in SESSIONS:
        try:
            stored[name] = chatter.sessions.pause(name).stored_tokens
        except KrulError:
            return  # the server is gone

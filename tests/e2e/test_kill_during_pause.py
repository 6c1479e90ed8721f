"""SIGKILL at ten seeded moments of a pause: afterwards each session is as before, or as after.

A round is a test of its own, so that it has its own time. Each begins with what the round before left on the
disk, whether that one passed or not; and any of them can be run alone.
"""

from __future__ import annotations

import random
import threading
import time

import pytest

from sgl_krul.api.client import KrulClient
from sgl_krul.errors import KrulError
from tests.e2e.harness import Chatter, ServerFactory, prompt

SESSIONS = [f"kill-{index}" for index in range(4)]
_RNG = random.Random(11)
# In parts of the time that pausing all sessions takes: machines differ. Some moments are after its end.
MOMENTS = [_RNG.uniform(0.0, 1.2) for _ in range(10)]


class Chats:
    """The chats and the server they are on, from round to round."""

    def __init__(self, servers: ServerFactory, chatter: Chatter) -> None:
        self._servers = servers
        self.chatter = chatter
        self.history = {name: prompt(4000 + i, 300) for i, name in enumerate(SESSIONS)}
        self.stored = dict.fromkeys(SESSIONS, 0)  # tokens, as listed after the last start
        self.pause_s = self._time_a_pause()

    def _time_a_pause(self) -> float:
        """Seconds that pausing as many sessions of that length takes here, when it is not their first."""
        names = [f"timed-{index}" for index in range(len(SESSIONS))]
        history = {name: prompt(4100 + i, 300) for i, name in enumerate(names)}
        elapsed = 0.0
        for _ in range(2):
            for name in names:
                history[name] += self.chatter.ask(history[name], name, new=4).tokens
            begun = time.monotonic()
            assert set(pause_all(self.chatter.process.base_url, names)) == set(names)
            elapsed = time.monotonic() - begun
        return elapsed

    def restart(self) -> None:
        """Kill the server, if there still is one, and see what the next one has."""
        self.chatter.kill()
        self.chatter = self._servers.start()
        listed = {s.session_id: s.stored_tokens for s in self.chatter.sessions.sessions().sessions}
        self.stored = {name: listed.get(name, 0) for name in SESSIONS}


@pytest.fixture(scope="module")
def chats(servers: ServerFactory, chatter: Chatter) -> Chats:
    return Chats(servers, chatter)


@pytest.mark.parametrize("number", range(len(MOMENTS)))
def test_killed_while_pausing(chats: Chats, number: int) -> None:
    if not chats.chatter.process.running:  # the round before ended in between
        chats.restart()
    history, before, answered = chats.history, chats.stored, {}
    for name in SESSIONS:
        history[name] += chats.chatter.ask(history[name], name, new=20).tokens
    url = chats.chatter.process.base_url
    pausing = threading.Thread(target=lambda: answered.update(pause_all(url, SESSIONS)))
    pausing.start()
    time.sleep(MOMENTS[number] * chats.pause_s)
    chats.chatter.process.kill()
    pausing.join()
    chats.restart()
    full = {name: (len(history[name]) - 1) // 16 * 16 for name in SESSIONS}
    for name in SESSIONS:
        # A pause that was answered is committed; any other is there as a whole, or not at all.
        allowed = (full[name],) if name in answered else (before[name], full[name])
        assert chats.stored[name] in allowed, f"{name}, answered: {answered}"
        assert answered.get(name, full[name]) == full[name], name
    name = SESSIONS[number % len(SESSIONS)]
    answer = chats.chatter.ask(history[name], name, new=2)
    assert answer.same_as(chats.chatter.ask(history[name], new=2, cache_salt=f"kill-{number}"))
    assert answer.restored == chats.stored[name]
    assert chats.chatter.sessions.sessions().counters["corrupt_chunks"] == 0


def pause_all(base_url: str, names: list[str]) -> dict[str, int]:
    """Pause one after another until the server is gone. Returns the tokens stored, where it was answered."""
    stored: dict[str, int] = {}
    with KrulClient(base_url) as client:
        for name in names:
            try:
                stored[name] = client.pause(name).stored_tokens
            except KrulError:
                break
    return stored

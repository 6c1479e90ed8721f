"""Without an SSD sessions rest in memory: until the server ends. And silent ones are paused by themselves."""

from __future__ import annotations

import time

import pytest

from sgl_krul.errors import UnknownSession
from tests.e2e.harness import Chatter, ServerFactory, prompt


@pytest.fixture(scope="module")
def chatter(servers: ServerFactory) -> Chatter:
    # Long enough to be seen active first, also on a machine that stalls for seconds.
    return servers.start(config=servers.config(ssd=False, idle_pause_s="10s"))


def test_a_session_rests_in_memory(chatter: Chatter) -> None:
    first, second = prompt(1, 300), prompt(2, 20)
    reference = chatter.reference([first, second], "memory")
    begun = chatter.ask(first, "a")
    paused = chatter.sessions.pause("a")
    assert (paused.state, paused.tier, paused.stored_tokens) == ("paused", "memory", 304)
    assert chatter.http.post("/flush_cache").status_code == 200
    answer = chatter.ask(first + begun.tokens + second, "a")
    assert answer.same_as(reference[1])
    assert answer.restored == 304


def test_deleting_one_session_leaves_what_another_shares(chatter: Chatter) -> None:
    trunk = prompt(3, 160)
    one, two = trunk + prompt(4, 40), trunk + prompt(5, 40)
    chatter.ask(one, "one")
    begun = chatter.ask(two, "two")
    for name in ("one", "two"):
        chatter.sessions.pause(name)
    before = chatter.sessions.sessions().tiers["memory"].objects
    chatter.sessions.delete("one")
    assert chatter.sessions.sessions().tiers["memory"].objects == before - 2
    assert chatter.ask([*two, *begun.tokens, 6], "two").restored == 192


def test_a_silent_session_is_paused_by_itself(chatter: Chatter) -> None:
    chatter.ask(prompt(6, 64), "silent")
    assert chatter.sessions.session("silent").state == "active"
    deadline = time.monotonic() + 300
    while chatter.sessions.session("silent").state != "paused":
        assert time.monotonic() < deadline
        time.sleep(0.25)
    assert chatter.sessions.session("silent").stored_tokens == 64


def test_memory_does_not_outlive_the_server(servers: ServerFactory, chatter: Chatter) -> None:
    chatter.kill()
    second = servers.start(config=servers.config(ssd=False))
    with pytest.raises(UnknownSession):
        second.sessions.session("a")

"""Sessions under a loss budget on a real server: what is stored, what comes back, what others see of it."""

from __future__ import annotations

import pytest

from tests.e2e.harness import Chatter, ServerFactory, prompt

CODED = (
    "estimator: {enabled: true, rows_per_1000: 32}\n"
    "quality: {level: high, method: int8}\n"
    "restore: {recompute: false}"  # what is recomputed would be exact, and the answer another
)
LENGTH, NEW = 1200, 8
SECOND = prompt(5001, 25)


@pytest.fixture(scope="module")
def story(servers: ServerFactory) -> tuple[Chatter, list[int]]:
    """A server under a budget, and the prompt of a session's second turn."""
    server = servers.start(config=servers.config(more=CODED))
    first = prompt(5000, LENGTH)
    begun = server.ask(first, "coded")
    return server, [*first, *begun.tokens, *SECOND]


def test_a_session_is_coded_and_comes_back_to_a_namespace_of_its_own(
    story: tuple[Chatter, list[int]], servers: ServerFactory
) -> None:
    server, history = story
    right = server.ask(history, cache_salt="reference")
    paused = server.sessions.pause("coded")
    assert not paused.exact
    assert set(paused.layer_modes) == {"quantized/int8"}
    assert 0 < paused.expected_loss <= 0.003
    assert paused.bytes_stored < 0.36 * paused.bytes_raw  # of float32: .53 of 16 bits, and headers
    server.kill()
    again = servers.start(config=servers.config(more=CODED))
    listed = again.sessions.session("coded")
    assert (listed.exact, listed.lossy_since, listed.layer_modes) == (False, None, paused.layer_modes)
    answer = again.ask(history, "coded")
    assert answer.restored == LENGTH // 16 * 16
    assert answer.krul["exact"] is False
    assert answer.tokens == right.tokens  # int8 does not change what is said; its logprobs differ
    assert not answer.same_as(right)
    # The same text from others, in the namespaces where it may be exact: nothing of it is found.
    assert again.ask(history, "another").same_as(right)
    assert again.ask(history).same_as(right)
    listed = again.sessions.session("coded")
    assert (listed.state, listed.exact) == ("active", False)
    # Paused again, what is new is coded; deleted and begun anew, it is exact.
    second = again.sessions.pause("coded")
    assert not second.exact
    assert second.stored_tokens > paused.stored_tokens
    assert again.sessions.delete("coded").deleted
    assert again.ask(history, "coded").same_as(right)
    assert again.sessions.session("coded").exact
    assert again.sessions.sessions().load["problems"] == []


def test_a_short_session_is_stored_exactly(servers: ServerFactory) -> None:
    server = servers.start(config=servers.config(more=CODED))
    server.ask(prompt(5002, 100), "short")
    paused = server.sessions.pause("short")
    assert (paused.exact, paused.layer_modes, paused.expected_loss) == (True, [], 0.0)

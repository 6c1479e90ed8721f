"""Whatever was paused answers as if it never had been: from memory, and from SSD after a SIGKILL."""

from __future__ import annotations

import pytest

from tests.e2e.harness import Answer, Chatter, ServerFactory, prompt

# None is a multiple of what it should not be: pages have 16 tokens, chunks 256.
LENGTHS = (5, 16, 17, 100, 255, 256, 257, 511, 777, 1300)


def turns_of(length: int) -> list[list[int]]:
    return [prompt(length, length), prompt(length + 1, 21), prompt(length + 2, 7), prompt(length + 3, 40)]


@pytest.fixture(scope="module")
def references(chatter: Chatter) -> dict[int, list[Answer]]:
    """Every chat, never paused."""
    return {length: chatter.reference(turns_of(length), f"reference-{length}") for length in LENGTHS}


def history_before(turn: int, length: int, references: dict[int, list[Answer]]) -> list[int]:
    ids: list[int] = []
    for number, new in enumerate(turns_of(length)[: turn + 1]):
        ids += new
        if number < turn:
            ids += references[length][number].tokens
    return ids


def test_memory_then_ssd_after_a_crash(
    servers: ServerFactory, chatter: Chatter, references: dict[int, list[Answer]]
) -> None:
    for length in LENGTHS:
        answer = chatter.ask(history_before(0, length, references), f"chat-{length}")
        assert answer.same_as(references[length][0]), f"first turn at {length} tokens"
        paused = chatter.sessions.pause(f"chat-{length}")
        assert paused.state == "paused"
        assert paused.stored_tokens == (length + 7) // 16 * 16
    for length in LENGTHS:
        answer = chatter.ask(history_before(1, length, references), f"chat-{length}")
        assert answer.same_as(references[length][1]), f"from memory at {length} tokens"
        assert answer.restored == (length + 7) // 16 * 16
        chatter.sessions.pause(f"chat-{length}")
    chatter.kill()
    second = servers.start()
    listed = {session.session_id: session for session in second.sessions.sessions().sessions}
    for length in LENGTHS:
        session = listed[f"chat-{length}"]
        assert (session.state, session.tier, session.exact) == ("paused", "ssd", True)
        answer = second.ask(history_before(2, length, references), f"chat-{length}")
        assert answer.same_as(references[length][2]), f"from SSD at {length} tokens"
        assert answer.restored == session.stored_tokens
        assert answer.krul["restored_from"] == ("ssd" if session.stored_tokens else "nowhere")
    for length in LENGTHS:  # what was restored is a chat like any other: it goes on, and pauses again
        second.sessions.pause(f"chat-{length}")
        answer = second.ask(history_before(3, length, references), f"chat-{length}")
        assert answer.same_as(references[length][3]), f"after a second pause at {length} tokens"
    assert second.sessions.sessions().counters["corrupt_chunks"] == 0

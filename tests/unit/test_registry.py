"""The sessions a server knows."""

from __future__ import annotations

from array import array

import pytest

from sgl_krul.errors import UnknownSession
from sgl_krul.session.record import SessionKey
from sgl_krul.session.registry import MAX_BRANCHES, PausedCopy, Registry, Session, State
from tests.sessions import LAYOUT, NAMESPACE, NOW, tokens

KEY = SessionKey("chat")


def copy_of(count: int) -> PausedCopy:
    return PausedCopy.in_memory(NAMESPACE, LAYOUT, tokens(count), count // 16 * 16, NOW)


def test_open_makes_a_session_once() -> None:
    registry = Registry()
    session = registry.open(KEY, 1.0)
    assert registry.open(KEY, 2.0) is session
    assert registry.get(KEY) is session
    assert registry.find(KEY.digest) is session
    assert (session.state, session.tokens, session.last_used) == (State.ACTIVE, 0, 1.0)
    assert [*registry] == [session]
    assert registry.check() == []


def test_an_unknown_session_says_what_is_known() -> None:
    registry = Registry()
    with pytest.raises(
        UnknownSession, match=r"no session 'chat' is known here: list the known ones"
    ) as caught:
        registry.get(KEY)
    assert caught.value.status == 404
    registry.open(SessionKey("chat", "salt"), 1.0)
    with pytest.raises(UnknownSession, match="exists with another cache_salt or extra_key"):
        registry.get(KEY)
    assert registry.find(KEY.digest) is None


def test_what_a_store_has_does_not_replace_what_is_known() -> None:
    registry = Registry()
    session = registry.open(KEY, 1.0)
    registry.add(Session(KEY.digest, "chat", False, state=State.PAUSED, paused=copy_of(32)))
    assert registry.get(KEY) is session
    registry.remove(KEY.digest)
    registry.remove(KEY.digest)
    assert len(registry) == 0


def test_sessions_may_go_while_they_are_listed() -> None:
    registry = Registry()
    for index in range(5):
        registry.open(SessionKey(f"s{index}"), 1.0)
    for session in registry:
        registry.remove(session.digest)
    assert len(registry) == 0


def test_a_session_found_in_a_store_learns_its_key_at_its_first_request() -> None:
    registry = Registry()
    registry.add(Session(KEY.digest, "chat", False, state=State.PAUSED, paused=copy_of(40)))
    session = registry.open(KEY, 2.0)
    assert session.key == KEY
    assert session.state is State.PAUSED  # until a request has finished
    assert session.tokens == 40


def advance(session: Session, token_ids: array[int]) -> None:
    session.advance(token_ids, None, NOW)


def test_a_chat_that_goes_on_has_no_branches() -> None:
    session = Session(KEY.digest, "chat", False, state=State.PAUSED, paused=copy_of(10))
    for count in (10, 10, 25, 300):
        advance(session, tokens(count))
    assert session.branches == []
    assert session.tokens == 300
    assert session.state is State.ACTIVE
    assert session.last_used == NOW


def test_what_diverges_is_remembered_as_a_branch() -> None:
    session = Session(KEY.digest, "chat", False)
    advance(session, tokens(50))
    advance(session, tokens(30) + tokens(30, first=900))  # edited
    advance(session, tokens(20))  # shortened
    assert session.branches == [tokens(50), tokens(30) + tokens(30, first=900)]
    assert session.token_ids == tokens(20)


@pytest.mark.parametrize("state", [State.PAUSED, State.STALE])
def test_check_finds_a_rest_without_a_copy(state: State) -> None:
    registry = Registry()
    registry.add(Session(KEY.digest, "chat", False, state=state))
    assert registry.check() == [f"session {KEY.digest[:12]} is {state.value} without a stored copy"]


def test_a_copy_in_memory_counts_raw_bytes() -> None:
    copy = copy_of(50)
    assert (copy.tiers, copy.tokens, copy.stored_tokens) == (("memory",), 50, 48)
    assert copy.raw_bytes == copy.stored_bytes == 3 * LAYOUT.page_bytes


def test_only_so_many_sessions_that_were_never_paused_are_kept() -> None:
    registry = Registry(max_unpaused=3)
    names = [SessionKey(f"s{index}") for index in range(6)]
    first = registry.open(names[0], 1.0)
    first.paused, first.state = copy_of(32), State.PAUSED
    for key in names[1:]:
        registry.open(key, 2.0)
    registry.open(names[3], 3.0)  # heard of again: s4 is the oldest now
    registry.open(SessionKey("new"), 4.0)
    assert {session.session_id for session in registry} == {"s0", "s3", "s5", "new"}
    assert registry.check() == []


def test_only_so_many_branches_are_kept() -> None:
    session = Session(KEY.digest, "chat", False)
    for turn in range(3 * MAX_BRANCHES):
        advance(session, array("q", [turn, 1, 2]))
    assert [branch[0] for branch in session.branches] == [*range(2 * MAX_BRANCHES - 1, 3 * MAX_BRANCHES - 1)]


def test_ends_are_those_of_other_active_sessions() -> None:
    registry = Registry()
    mine, other, resting = (registry.open(SessionKey(name), 1.0) for name in ("mine", "other", "resting"))
    for session, end in ((mine, "aa"), (other, "bb"), (resting, "cc")):
        session.advance(tokens(32), end, NOW)
    resting.paused, resting.state = copy_of(32), State.PAUSED
    assert registry.ends(but=mine) == {"bb"}

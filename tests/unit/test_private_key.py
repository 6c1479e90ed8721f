"""The key of a private namespace: one for each session, which no caller has."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sgl_krul.session.private import caller_key, looks_private, private_key
from sgl_krul.session.record import SessionKey

KEY = SessionKey("chat", "salt", "theirs")
DIGEST = KEY.digest

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
pieces = st.sampled_from(["krul:", DIGEST, ":", "1", "07", "0", "krul:" + "a" * 64, "\n", "x"])
extra_keys = st.none() | words | st.lists(pieces, max_size=6).map("".join)
keys = st.builds(SessionKey, words, st.none() | words, extra_keys)
generations = st.integers(1, 1 << 40)


def test_the_form_is_pinned() -> None:
    private = private_key(KEY, 7)
    assert private == SessionKey("chat", "salt", f"theirskrul:{DIGEST}:7")
    assert caller_key(private) == (KEY, 7)
    assert private_key(SessionKey("chat"), 1).extra_key == f"krul:{SessionKey('chat').digest}:1"


@given(keys, generations)
@example(SessionKey("a", None, ""), 1)
@example(SessionKey("a", None, None), 1)
@example(SessionKey("a", None, "krul:\n"), 12)
def test_it_gives_back_what_it_was_given(key: SessionKey, generation: int) -> None:
    if looks_private(key.extra_key):
        with pytest.raises(ValueError, match="private already"):
            private_key(key, generation)
        return
    private = private_key(key, generation)
    assert caller_key(private) == (key, generation)
    assert looks_private(private.extra_key)
    assert private[:2] == key[:2]


@given(st.tuples(keys, generations), st.tuples(keys, generations))
def test_two_sessions_never_have_the_same(one: tuple[SessionKey, int], other: tuple[SessionKey, int]) -> None:
    if looks_private(one[0].extra_key) or looks_private(other[0].extra_key) or one == other:
        return
    assert private_key(*one).extra_key != private_key(*other).extra_key


@given(keys)
def test_what_it_did_not_make_is_nobodys(key: SessionKey) -> None:
    """Not even what only looks like it: another session's digest, another number's spelling."""
    caller, generation = caller_key(key)
    assert (caller, generation) == (key, None) or private_key(caller, generation or 0) == key


@pytest.mark.parametrize(
    "forged",
    [
        f"krul:{DIGEST}:7",
        f"theirskrul:{DIGEST}:7",
        f"theirskrul:{DIGEST}:007",
        f"krul:{'0' * 64}:1",
        f"a\nkrul:{DIGEST}:1krul:{DIGEST}:2",
    ],
)
def test_a_caller_may_not_have_such_a_key(forged: str) -> None:
    assert looks_private(forged)


@pytest.mark.parametrize(
    "fine", [None, "", "krul:", f"krul:{DIGEST}", f"krul:{DIGEST}:", f"krul:{DIGEST}:7 ", "krul:1", ["a"], 5]
)
def test_all_others_are_the_callers_own(fine: object) -> None:
    assert not looks_private(fine)


@pytest.mark.parametrize("generation", [0, -1])
def test_a_number_that_no_generation_has_is_refused(generation: int) -> None:
    with pytest.raises(ValueError, match="expected 1 or more"):
        private_key(KEY, generation)

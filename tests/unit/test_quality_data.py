"""Which real chats the quality benchmark takes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.quality_data import CALIBRATION, EVALUATION, needle_chats, pick, split_of
from benchmarks.quality_filters import english_prose
from benchmarks.quality_spanish import EXCHANGES, spanish_chats
from tests.unit.test_quality_filters import CODE, PROSE, SPANISH

QUESTION = "And what of the beds that lie in the shade of the house?"


def piece(name: str, *values: str, first: str = "human") -> dict[str, Any]:
    roles = ("human", "gpt") if first == "human" else ("gpt", "human")
    return {
        "id": name,
        "conversations": [{"from": roles[index % 2], "value": text} for index, text in enumerate(values)],
    }


def prose(name: str) -> dict[str, Any]:
    """Two exchanges of 1,000 characters, two of 2,000 more, and a question with its answer."""
    return piece(name, PROSE, PROSE, PROSE, PROSE, QUESTION, PROSE[:400])


POOL = [prose(f"c{number}_{part}") for number in range(40) for part in (0, 7)]


def roots(chats: list[Any]) -> set[str]:
    return {chat.name.removeprefix("needle-").split("_")[0] for chat in chats}


def test_calibration_and_evaluation_never_share_a_conversation() -> None:
    for seed in (1, 2, 3):
        calibration = pick(POOL, "prose", CALIBRATION, 100, seed)
        evaluation = pick(POOL, "prose", EVALUATION, 100, seed)
        assert roots(calibration).isdisjoint(roots(evaluation))
        assert len(calibration) + len(evaluation) == 40  # one of each conversation, and none is left out
        assert roots(needle_chats(POOL, EVALUATION, 100, seed)) <= roots(evaluation)
    assert len(evaluation) in range(10, 31)


def test_the_split_goes_by_the_conversation_not_by_the_piece() -> None:
    assert all(split_of(f"c{n}_0") == split_of(f"c{n}_7") for n in range(100))
    assert {split_of(f"c{n}_0") for n in range(100)} == {CALIBRATION, EVALUATION}


def test_a_choice_depends_on_the_seed_and_not_on_the_order_of_the_file() -> None:
    chosen = pick(POOL, "prose", EVALUATION, 5, 1)
    assert [chat.name for chat in chosen] == [c.name for c in pick(POOL[::-1], "prose", EVALUATION, 5, 1)]
    assert [chat.name for chat in chosen] != [c.name for c in pick(POOL, "prose", EVALUATION, 5, 2)]
    assert pick(POOL, "prose", EVALUATION, 3, 1) == chosen[:3]  # a shorter run is the front of a longer one


def test_a_chat_ends_before_the_last_turn() -> None:
    for chat in pick(POOL, "prose", EVALUATION, 3, 1):
        assert [message.role for message in chat.history] == ["user", "assistant"] * 2
        assert chat.turns[0].question == QUESTION
        assert chat.turns[0].answer == PROSE[:400].strip()


@pytest.mark.parametrize(
    "values",
    [
        (PROSE, PROSE, QUESTION, PROSE),  # a history that is too short
        (PROSE * 3, PROSE * 4, QUESTION, PROSE),  # and one that is too long
        (PROSE, PROSE, PROSE, PROSE, QUESTION, "Yes."),
        (PROSE, PROSE, PROSE, PROSE, "Go on." * 40, PROSE),
        (PROSE, PROSE, PROSE, PROSE, QUESTION),
        (PROSE, PROSE, "", PROSE, QUESTION, PROSE),
        (PROSE, PROSE, SPANISH, SPANISH, QUESTION, SPANISH),
        (PROSE, PROSE, PROSE, PROSE, QUESTION, CODE),
    ],
    ids=["short", "long", "no answer", "long question", "no turn", "empty", "spanish", "code"],
)
def test_what_does_not_fit_is_not_taken(values: tuple[str, ...]) -> None:
    pieces = [piece(f"c{number}_0", *values) for number in range(10)]
    assert not pick(pieces, "prose", EVALUATION, 10, 1)


def test_a_chat_begins_with_the_user() -> None:
    pieces = [
        piece(f"c{number}_0", PROSE, PROSE, PROSE, PROSE, PROSE, QUESTION, PROSE, first="gpt")
        for number in range(10)
    ]
    assert not pick(pieces, "prose", EVALUATION, 10, 1)


def test_code_is_out_of_domain() -> None:
    code = CODE * 3
    pieces = [
        piece(f"c{n}_0", code, code, code, code, "How do I call it from a shell?", code) for n in range(10)
    ]
    assert pick(pieces, "code", EVALUATION, 10, 1)
    assert not pick(pieces, "prose", EVALUATION, 10, 1)
    assert not pick(POOL, "code", EVALUATION, 10, 1)


def test_spanish_chats_are_six_exchanges_in_an_order_of_their_own() -> None:
    chats = spanish_chats(3, seed=1)
    assert chats == spanish_chats(3, seed=1)
    assert len({chat.history for chat in chats}) == 3
    for chat in chats:
        assert [message.role for message in chat.history] == ["user", "assistant"] * 5
        texts = [message.content for message in chat.history] + [chat.turns[0].question, chat.turns[0].answer]
        assert sorted(texts) == sorted({text for text in texts})
        assert set(zip(texts[::2], texts[1::2], strict=True)) <= set(EXCHANGES)
        assert not english_prose("\n".join(texts))

"""Needle chats from templates, and chats to token ids."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks.quality_chats import PAGE, PLACES, Chat, Message, Turn, needle_chat, random_prompt, tokenised

FILLER = tuple(
    Message(role, f"{role} says thing number {number} at some length.")
    for number in range(4)
    for role in ("user", "assistant")
)


class WordTokenizer:
    """One id for each word, space or sign; a template like those of the two models."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        text = "".join(f"<{message['role']}>{message['content']}</>" for message in messages)
        return text + ("<assistant>" if add_generation_prompt else "")

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        words = re.findall(r" ?\w+|.", text)
        return {"input_ids": [self.ids.setdefault(word, len(self.ids)) for word in words]}

    def text(self, ids: Any) -> str:
        words = {number: word for word, number in self.ids.items()}
        return "".join(words[number] for number in ids)


def test_a_needle_chat_hides_three_facts_and_asks_for_each() -> None:
    chat = needle_chat("a", FILLER, seed=1)
    texts = [message.content for message in chat.history]
    places = []
    for turn in chat.turns:
        fact = f"{turn.lead} {turn.answer}."
        (at,) = [index for index, text in enumerate(texts) if fact in text]
        places.append(at)
        assert turn.answer not in turn.question
        assert not any(turn.answer in text for index, text in enumerate(texts) if index != at)
    assert [turn.place for turn in chat.turns] == list(PLACES)
    assert places == [0, 2 + 4, 4 + 8]  # before the filler, in its middle, behind it
    assert [message.role for message in chat.history] == ["user", "assistant"] * (len(chat.history) // 2)


def test_needle_chats_are_made_by_name_and_seed_alone() -> None:
    assert needle_chat("a", FILLER, 1) == needle_chat("a", FILLER, 1)
    assert needle_chat("a", FILLER, 1).turns != needle_chat("a", FILLER, 2).turns
    assert needle_chat("a", FILLER, 1).turns != needle_chat("b", FILLER, 1).turns


def test_a_prompt_is_whole_pages_and_what_follows() -> None:
    tokenizer = WordTokenizer()
    chat = Chat("a", "prose", FILLER, (Turn("And what of ten?", "Ten is more than nine."),))
    prompt = tokenised(chat, tokenizer, most_scored=3)
    (probe,) = prompt.probes
    assert len(prompt.history) % PAGE == 0
    whole = tokenizer.text(prompt.history + probe.ids)
    history = "".join(f"<{message.role}>{message.content}</>" for message in FILLER)
    assert whole == f"{history}<user>And what of ten?</><assistant>Ten is more"
    assert len(tokenizer.text(prompt.history)) <= len(history)
    assert tokenizer.text(probe.ids[-probe.scored :]) == "Ten is more"


def test_of_a_needle_only_the_value_is_scored() -> None:
    tokenizer = WordTokenizer()
    prompt = tokenised(needle_chat("a", FILLER, 1), tokenizer, most_scored=60)
    for turn, probe in zip(needle_chat("a", FILLER, 1).turns, prompt.probes, strict=True):
        assert tokenizer.text(probe.ids[-probe.scored :]) == f" {turn.answer}"
        assert tokenizer.text(probe.ids).endswith(f"{turn.question}</><assistant>{turn.lead} {turn.answer}")
        assert probe.place == turn.place


def test_a_chat_without_a_page_or_an_answer_is_refused() -> None:
    short = Chat("short", "prose", FILLER[:1], (Turn("What?", "That."),))
    with pytest.raises(ValueError, match="short: a history of 15 tokens fills no page"):
        tokenised(short, WordTokenizer(), 10)
    empty = Chat("empty", "prose", FILLER, (Turn("What?", ""),))
    with pytest.raises(ValueError, match="empty: the answer '' has no tokens"):
        tokenised(empty, WordTokenizer(), 10)


def test_random_prompts_are_whole_pages_of_the_vocabulary() -> None:
    prompt = random_prompt("r0", range(100, 200), 70, 20, seed=3)
    assert len(prompt.history) == 64
    assert len(prompt.probes[0].ids) == 36
    assert prompt.probes[0].scored == 20
    assert all(100 <= token < 200 for token in prompt.history + prompt.probes[0].ids)
    assert prompt == random_prompt("r0", range(100, 200), 70, 20, seed=3)
    assert prompt.history != random_prompt("r1", range(100, 200), 70, 20, seed=3).history

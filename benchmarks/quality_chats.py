"""Chats for the quality benchmark: what they are, needle chats from templates, and chats to token ids. Pure.

A chat has a history, whose KV is stored, and last turns, each of which is put to the model on top of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "PLACES",
    "Chat",
    "Message",
    "Probe",
    "Prompt",
    "Turn",
    "needle_chat",
    "random_prompt",
    "tokenised",
]

PLACES = ("start", "middle", "end")
PAGE = 16

_FACTS = (
    ("The door code of the {thing} is", "What is the door code of the {thing}?", "number"),
    ("The number of the key to the {thing} is", "What is the number of the key to the {thing}?", "number"),
    ("The person who looks after the {thing} is called", "Who looks after the {thing}?", "name"),
    ("The secret word for the {thing} is", "What is the secret word for the {thing}?", "word"),
)
_THINGS = (
    "boat house", "green cabin", "north tower", "old library", "music room", "wine cellar", "red garage",
    "school kitchen", "garden shed", "west office", "chess club", "river station",
)  # fmt: skip
_NAMES = ("Matilda", "Oswald", "Beatrice", "Cornelius", "Henrietta", "Barnaby", "Rosalind", "Augustus")
_WORDS = ("lantern", "walnut", "harbor", "copper", "meadow", "falcon", "velvet", "pepper")


@dataclass(frozen=True)
class Message:
    """One message. `role`: user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Turn:
    """A last turn: a question, how the answer begins (given to the model), and the answer that is scored.

    `place`: where in the history the answer stands (see PLACES); "" for an ordinary answer.
    """

    question: str
    answer: str
    lead: str = ""
    place: str = ""


@dataclass(frozen=True)
class Chat:
    """A history that ends with an assistant's message, and the turns put on top of it, each by itself."""

    name: str
    domain: str
    history: tuple[Message, ...]
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Probe:
    """A last turn as token ids; the last `scored` of them are the answer."""

    ids: tuple[int, ...]
    scored: int
    place: str = ""


@dataclass(frozen=True)
class Prompt:
    """A chat as token ids. `history` is whole pages; what fills none stands at the head of each probe."""

    name: str
    domain: str
    history: tuple[int, ...]
    probes: tuple[Probe, ...]


def needle_chat(name: str, filler: Sequence[Message], seed: int) -> Chat:
    """`filler` (pairs of user and assistant) with three facts: before it, in the middle, and near its end.

    Behind the last fact stands one short exchange, so that the fact lies in the stored pages. The answer
    begins with the words of the fact: the model only has to find the value.
    """
    rng = random.Random(f"needle {name} {seed}")
    things = rng.sample(_THINGS, len(PLACES))
    facts = rng.sample(_FACTS, len(PLACES))
    middle = len(filler) // 4 * 2  # behind a whole exchange
    parts = {"start": (), "middle": tuple(filler[:middle]), "end": tuple(filler[middle:])}
    history: list[Message] = []
    turns = []
    for place, thing, (statement, question, kind) in zip(PLACES, things, facts, strict=True):
        lead = statement.format(thing=thing)
        value = _value(kind, rng)
        history += parts[place]
        history += [
            Message("user", f"Please remember this for later. {lead} {value}."),
            Message("assistant", "All right, I will keep that in mind. Shall we go on?"),
        ]
        turns.append(Turn(question.format(thing=thing), value, lead, place))
    history += [
        Message("user", "Thank you. One moment, please."),
        Message("assistant", "Of course, take your time."),
    ]
    return Chat(name, "needle", tuple(history), tuple(turns))


def _value(kind: str, rng: random.Random) -> str:
    if kind == "number":
        return str(rng.randrange(1000, 10000))
    return rng.choice(_NAMES if kind == "name" else _WORDS)


def tokenised(chat: Chat, tokenizer: Any, most_scored: int) -> Prompt:
    """The chat as the server would see it, through the model's own chat template.

    Of each answer at most `most_scored` tokens are scored; the rest is left away.

    Raises:
        ValueError: the history fills no page, or an answer has no token of its own.
    """
    history = _templated(tokenizer, chat.history, more=False)
    heads = [
        _templated(tokenizer, (*chat.history, Message("user", turn.question)), more=True)
        for turn in chat.turns
    ]
    shared = min(_common(history, head) for head in heads) // PAGE * PAGE
    if not shared:
        raise ValueError(f"{chat.name}: a history of {len(history)} tokens fills no page of {PAGE}")
    probes = []
    for turn, head in zip(chat.turns, heads, strict=True):
        lead = _plain(tokenizer, turn.lead) if turn.lead else []
        whole = _plain(tokenizer, f"{turn.lead} {turn.answer}" if turn.lead else turn.answer)
        given = _common(lead, whole)
        answer = whole[given : given + most_scored]
        if not answer:
            raise ValueError(f"{chat.name}: the answer {turn.answer[:40]!r} has no tokens")
        probes.append(Probe((*head[shared:], *whole[:given], *answer), len(answer), turn.place))
    return Prompt(chat.name, chat.domain, tuple(history[:shared]), tuple(probes))


def random_prompt(name: str, vocabulary: range, tokens: int, scored: int, seed: int) -> Prompt:
    """Tokens without any sense: `tokens` (whole pages of them) of history, a turn of 16 and `scored` more."""
    rng = random.Random(f"random {name} {seed}")
    history = tuple(rng.choices(vocabulary, k=tokens // PAGE * PAGE))
    return Prompt(name, "random", history, (Probe(tuple(rng.choices(vocabulary, k=16 + scored)), scored),))


def _templated(tokenizer: Any, messages: Sequence[Message], *, more: bool) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": message.role, "content": message.content} for message in messages],
        tokenize=False,
        add_generation_prompt=more,
    )
    return _plain(tokenizer, text)


def _plain(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading ids are the same."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))

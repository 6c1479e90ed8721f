"""Which set of the benchmark a real chat belongs to: English prose, code, or neither. Pure.

In domain means `english_prose`. What else a conversation may be is out of domain.
"""

from __future__ import annotations

import re

__all__ = [
    "ENGLISH",
    "code_share",
    "english_prose",
    "mostly_code",
    "share_of_words",
]

ENGLISH = frozenset(
    "the of and to in a is that for it as with be on are this or by an from you your can will at not have "
    "has which their they these its".split()
)
MIN_WORDS = 100
MIN_ENGLISH = 0.28  # running text has about .35 to .45
MIN_PLAIN = 0.955
MIN_CODE = 0.4

_WORD = re.compile(r"[^\W\d_]+")
_FENCED = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_PLAIN = re.compile(r"[^\W\d_]|[ \n.,;:!?'\"()\u2019\u201c\u201d-]")


def english_prose(text: str) -> bool:
    """Whether `text` is running English: no code fence, no table, few signs and digits, little but ASCII."""
    if "```" in text or share_of_words(text, ENGLISH) < MIN_ENGLISH:
        return False
    plain = len(_PLAIN.findall(text)) / len(text)
    ascii_share = sum(ord(sign) < 128 for sign in text) / len(text)
    return plain >= MIN_PLAIN and ascii_share >= 0.98


def mostly_code(text: str) -> bool:
    """Whether at least 40% of the characters stand between code fences."""
    return code_share(text) >= MIN_CODE


def code_share(text: str) -> float:
    """Share of the characters of `text` between code fences, 0 to 1. An open fence runs to the end."""
    return sum(len(block) for block in _FENCED.findall(text)) / len(text) if text else 0.0


def share_of_words(text: str, common: frozenset[str]) -> float:
    """Share of the words of `text` that are in `common`; 0 for a text of fewer than 100 words."""
    words = _WORD.findall(text.lower())
    return sum(word in common for word in words) / len(words) if len(words) >= MIN_WORDS else 0.0

"""Which set of the quality benchmark a chat belongs to."""

from __future__ import annotations

import pytest

from benchmarks.quality_filters import (
    ENGLISH,
    code_share,
    english_prose,
    mostly_code,
    share_of_words,
)

PROSE = (
    "The garden behind the house is not large, but it has a wall that keeps the wind away from the beds. "
    "In the spring the first thing to do is to clear the leaves that have gathered in the corners, and to"
    " see which of the plants have come through the winter. Most of them will have. Roses are hardier "
    "than people think, and they can be cut back to a hand above the ground without harm. It is best to "
    "do this on a dry day, with a clean blade, and to burn what you cut. After that, feed the soil with "
    "compost and wait for the sun. "
) * 2
SPANISH = (
    "El jardín de la casa no es muy grande, pero tiene un muro que lo protege del viento. En la primavera"
    " lo primero que se hace es quitar las hojas que se han juntado en los rincones y ver qué plantas han"
    " pasado el invierno. La mayoría de las plantas sigue viva. Las rosas son más fuertes de lo que se "
    "cree, y se pueden cortar a un palmo del suelo sin que sufran. Es mejor hacer esto en un día seco, "
    "con una hoja limpia. "
) * 2
CODE = (
    "Here it is:\n```python\ndef add(one, other):\n    return one + other\n"
    + "print(add(1, 2))\n" * 20
    + "```\nDone."
)
TABLE = "| of | the | to |\n| 1.25 | 3.75 | 8.00 |\n" * 60


def test_running_english_is_in_domain() -> None:
    assert english_prose(PROSE)
    assert english_prose(PROSE.replace("roses", "\u201croses\u201d"))


@pytest.mark.parametrize(
    "text",
    [
        SPANISH,
        CODE,
        TABLE,
        PROSE + "```x = 1```",
        PROSE + "{a: [b, c]};\n" * 40,
        PROSE + "\u4e2d" * 60,
        "",
        "Yes.",
    ],
    ids=["spanish", "code", "table", "fence", "signs", "chinese", "nothing", "short"],
)
def test_anything_else_is_not(text: str) -> None:
    assert not english_prose(text)


def test_code_is_what_stands_between_fences() -> None:
    assert code_share("") == 0
    assert code_share("ab```cd```ef") == pytest.approx(8 / 12)
    assert code_share("ab```cd") == pytest.approx(5 / 7)  # a fence that is never closed
    assert mostly_code(CODE)
    assert not mostly_code(PROSE + CODE)


def test_a_few_words_say_nothing_of_a_language() -> None:
    assert share_of_words("the of and " * 33, ENGLISH) == 0
    assert share_of_words("the of and " * 34, ENGLISH) == 1

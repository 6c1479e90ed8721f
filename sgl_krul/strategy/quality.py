"""What a session may lose: names and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

__all__ = ["QUALITY_BUDGETS", "Quality", "loss_budget"]


class Quality(StrEnum):
    """How close to the exact session a resumed one must be."""

    exact = "exact"
    high = "high"
    balanced = "balanced"
    small = "small"


QUALITY_BUDGETS: Mapping[Quality, float] = MappingProxyType(
    {Quality.exact: 0.0, Quality.high: 0.003, Quality.balanced: 0.01, Quality.small: 0.03}
)
"""The loss a session may have: the mean over its layers of the mean squared relative error of the attention
output, a number without a unit.

For scale, SmolLM2 on four English chats: the loss is 2e-5 with all layers in int8 and .006 to .007 in int4;
raw or merged pairs that give up a tenth of the layers cost .4 to 1.1. KL(exact || coded) of the next turn was
.06 to .4 of the loss where layers were quantized, .13 to 1.3 of it where they were shared. `high` came to a
mix of int4 and int8: .41 to .43 of the bytes, KL .0003 to .0006.
"""


def loss_budget(quality: str | float) -> float:
    """The budget of a quality: a name of `Quality`, or the budget itself (0: exact; inf: whatever it costs).

    Raises:
        ValueError: another text, a negative number, NaN, or neither text nor number.
    """
    if isinstance(quality, str) and quality in QUALITY_BUDGETS:
        return QUALITY_BUDGETS[Quality(quality)]
    if isinstance(quality, int | float) and not isinstance(quality, bool) and quality >= 0:
        return float(quality)
    names = ", ".join(Quality)
    raise ValueError(f"quality: expected one of {names} or a number of at least 0; got {quality!r}")

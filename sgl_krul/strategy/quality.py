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
output, a number without a unit."""


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

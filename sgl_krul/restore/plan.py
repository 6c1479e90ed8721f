"""What a restore is going to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["RestorePlan", "Strategy"]


class Strategy(StrEnum):
    """How a session is brought back."""

    optimal = "optimal"  # the fastest of all plans
    load = "load"  # whatever is stored; recompute only what is not
    recompute = "recompute"  # nothing: SGLang prefills
    half = "half"  # the first half of the tokens is recomputed, in every layer
    paper = "paper"  # Krul's pyramid


@dataclass(frozen=True)
class RestorePlan:
    """What a restore is going to do, and the seconds it should take.

    `strategy`: what it comes to; `optimal` may find that `load` or `recompute` is best. `tokens`: leading
    tokens that will be in place, 0: no restore, all is prefilled. `staircase`: R_l for each layer, absolute,
    never growing with depth, at least `on_device_tokens` unless `tokens` is 0. `fill_s`: lost chunks,
    computed when both streams are done. `ttft_s`: until the first new token. `measured`: no default rates
    went into it. `why`: one sentence.
    """

    strategy: Strategy
    tokens: int
    staircase: tuple[int, ...]
    load_bytes: int
    compute_s: float
    load_s: float
    forward_s: float
    ttft_s: float
    measured: bool
    why: str
    fill_s: float = 0.0
    on_device_tokens: int = 0

    @property
    def recomputes(self) -> bool:
        """Whether the restore itself computes anything."""
        return self.tokens > 0 and (self.staircase[0] > self.on_device_tokens or self.fill_s > 0)

"""What the routes of plans, timelines and rates answer. The client reads the same types."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from sgl_krul.restore.timeline import Span

__all__ = [
    "CalibrateResult",
    "ComputeRatesInfo",
    "PlanInfo",
    "RatesInfo",
    "RecomputeInfo",
    "RestorePath",
    "Seconds",
    "SessionPlan",
    "SessionTimeline",
    "TierRatesInfo",
    "TimelineInfo",
]

RestorePath = Literal["memory", "device", "none"]


def _finite(value: Any) -> Any:
    """What can't be predicted may come as infinity: JSON has none."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


Seconds = Annotated[float | None, BeforeValidator(_finite)]


class RecomputeInfo(BaseModel):
    """Whether this server may recompute tokens in a restore, and why not."""

    available: bool
    reason: str = ""


class ComputeRatesInfo(BaseModel):
    """What one layer costs; all layers alike."""

    kv_s_per_token: float = Field(description="Norm, projection to K and V, rotation, writing them.")
    rest_s_per_token: float = Field(description="The rest of the layer but for attention.")
    attention_s_per_pair: float = Field(description="A query and a key of causal attention.")
    slice_s: float = Field(description="What a slice costs beside that: one block through one layer.")


class TierRatesInfo(BaseModel):
    """What a tier gives while `in_flight` reads are under way."""

    latency_s: float
    bytes_per_s: float
    in_flight: int


class RatesInfo(BaseModel):
    """What the planner counts with. `measured` false: safe defaults, for a part at least."""

    compute: ComputeRatesInfo | None = Field(
        default=None, description="null: not measured, or this server may not recompute: plans load all."
    )
    tiers: dict[str, TierRatesInfo] = Field(default_factory=dict)
    land_s_per_byte: float = Field(description="Verify, decode and copy to the device.")
    measured: bool = False
    recompute: RecomputeInfo | None = None


class CalibrateResult(RatesInfo):
    """The rates after measuring. `problems` says what could not be measured, and why."""

    problems: list[str] = Field(default_factory=list)
    samples: int = Field(default=0, description="Slices of the model that were timed.")


class PlanInfo(BaseModel):
    """One way to bring a session back, and what it is predicted to take. null: it can't be predicted."""

    strategy: str
    tokens: int = Field(description="Leading tokens that will be there; 0: none, the request computes all.")
    staircase: list[int] = Field(
        description="For each layer how many leading tokens are recomputed (those on the device included)."
    )
    load_bytes: int
    compute_s: Seconds = None
    load_s: Seconds = None
    forward_s: Seconds = Field(default=None, description="The forward of the new tokens, after the restore.")
    ttft_s: Seconds = Field(default=None, description="Time to first token: all of it.")
    why: str = ""
    measured: bool | None = Field(default=None, description="False: a rate that counts here is a default.")


class SessionPlan(BaseModel):
    """What a resume would do now. `path`: over host memory, straight to the device, or nothing at all.

    The three plans are null where nothing is stored. `reason` says why less than everything is there.
    """

    session_id: str
    tokens: int
    on_device_tokens: int
    new_tokens: int = Field(description="Tokens of the next turn that the prediction counts with.")
    path: RestorePath
    tiers: dict[str, int] = Field(description="Tokens by the tier they would come from.")
    recompute: RecomputeInfo
    rates: RatesInfo
    plan: PlanInfo | None = None
    load_all: PlanInfo | None = None
    recompute_all: PlanInfo | None = None
    paper: PlanInfo | None = Field(default=None, description="The pyramid of the Krul paper.")
    paper_share: float | None = Field(
        default=None, description="r_c of its eq. 1; null: nothing was measured."
    )
    reason: str = ""


class TimelineInfo(BaseModel):
    """What both streams did, in seconds since the restore began."""

    seconds: float
    spans: list[Span] = Field(
        description="[stream, start_s, end_s, first_token, tokens, first_layer, layers, bytes, note]"
    )
    idle: dict[str, float] = Field(description="For each stream that took part its idle share.")
    bubble: float = Field(description="The share in which one of them did nothing.")
    staircase: list[int] = Field(default_factory=list, description="Where they met, for each layer.")
    spans_dropped: int = Field(default=0, description="Spans over the bound, which are counted only.")


class SessionTimeline(BaseModel):
    """The last restore of a session, as it was planned and as it was."""

    session_id: str
    ended_at: float = Field(default=0.0, description="When it was over, in unix seconds.")
    plan: PlanInfo
    timeline: TimelineInfo
    path: RestorePath
    reason: str = ""

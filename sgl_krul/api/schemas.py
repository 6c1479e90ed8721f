"""What the session routes take and answer. The client reads the same types."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from sgl_krul.api.plans import RecomputeInfo, Seconds

__all__ = [
    "STRATEGIES",
    "TARGETS",
    "DeleteResult",
    "ErrorBody",
    "ErrorDetail",
    "ExportRequest",
    "MoveRequest",
    "MoveResult",
    "Overview",
    "PauseRequest",
    "PauseResult",
    "ResumeRequest",
    "ResumeResult",
    "SessionInfo",
    "SimilarityInfo",
    "TierInfo",
]

SessionState = Literal["active", "pausing", "paused", "resuming", "stale"]
TARGETS = ("memory", "device")
STRATEGIES = ("optimal", "load", "recompute", "half", "paper")


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")

    timeout_s: float | None = Field(
        default=None, ge=0, le=3600, description="How long to wait for a turn that is running; then 409."
    )
    cache_salt: str | None = Field(
        default=None, description="The cache_salt the chat's requests carry, if any."
    )
    extra_key: str | None = Field(
        default=None, description="The extra_key the chat's requests carry, if any."
    )


class PauseRequest(_Request):
    """Body of POST /v1/sessions/{id}/pause; may be left out."""


class ResumeRequest(_Request):
    """Body of POST /v1/sessions/{id}/resume; may be left out."""

    target: str = Field(
        default="memory",
        description='Where the KV is to be then: "memory" (of the host), or "device".',
        json_schema_extra={"enum": list(TARGETS)},
    )
    strategy: str | None = Field(
        default=None,
        description="How to bring it to the device; without one the server plans by itself.",
        json_schema_extra={"enum": [*STRATEGIES, None]},
    )


class SimilarityInfo(BaseModel):
    """How alike the layers attend in a session, as far as rows of attention were sampled."""

    rows: int = Field(description="Rows in the estimate, those of earlier turns and servers included.")
    dropped: int = Field(description="Rows that were to be sampled too, and for which there was no room.")
    dropped_share: float = Field(description="Part of all planned rows that was dropped, 0 to 1.")
    waiting: int = Field(description="Rows that are being computed.")
    ir_mass: list[float] = Field(
        description="Of each layer, the share of its attention on the first and the last 10% of the tokens; "
        "empty while there are no rows."
    )
    ir_layers: list[int] = Field(description="Layers with at least estimator.gamma of it there.")


class SessionInfo(BaseModel):
    """One session. `stale`: stored for other weights, dtype or page size; it can't be resumed here."""

    session_id: str
    salted: bool = Field(description="True when the chat has a cache_salt or extra_key.")
    state: SessionState
    tokens: int
    stored_tokens: int = Field(
        description="Leading tokens whose KV is stored; the rest is computed at resume."
    )
    bytes_raw: int = Field(description="Bytes of that KV as it lies on the device.")
    bytes_stored: int = Field(description="Bytes it takes in the tier.")
    layer_plan: str = Field(
        default="raw",
        description='"raw": every layer is stored as it is; "paper": the first layers are recomputed; '
        "else the name of the plan that layers are coded under.",
    )
    layer_modes: list[str] = Field(
        default_factory=list,
        description='How each layer is coded: "raw", "quantized/int8", "shared/merged of 4" and so on; empty '
        "where nothing is.",
    )
    expected_loss: float = Field(
        default=0.0,
        description="By that coding: the mean squared relative error of the layers' attention output, on the "
        "session's own queries.",
    )
    tier: str = Field(description='"device" while active, else the fastest place that has it: see `tiers`.')
    tiers: list[str] = Field(
        default_factory=list,
        description='Where a paused session rests: "memory", "ssd", "redis", fastest first.',
    )
    exact: bool = Field(
        description="False for a session that came back lossy, until it is deleted, and for one that would."
    )
    lossy_since: int | None = Field(
        default=None,
        description="The pause (its generation) that it came back lossy from. Since then no other session "
        "matches its KV. Null: all it runs on is exact.",
    )
    corrupt_chunks: int = Field(description="Stored chunks found damaged since the server started.")
    last_used: float = Field(description="Unix seconds.")
    similarity: SimilarityInfo | None = Field(
        default=None, description="With the estimator on: what it found in this session's attention."
    )


class PauseResult(SessionInfo):
    """What a pause did. `already_paused`: nothing was to be done."""

    already_paused: bool = False
    device_tokens_freed: int = 0
    chunks_written: int = 0
    chunks_kept: int = 0
    not_written: dict[str, str] = Field(
        default_factory=dict, description="Tiers that should have a copy and could not take it, and why."
    )
    elapsed_ms: float = 0.0


class ExportRequest(_Request):
    """Body of POST /v1/sessions/{id}/export; may be left out."""


class MoveRequest(_Request):
    """Body of POST /v1/sessions/{id}/move."""

    to: str = Field(description='The tier that is to have the session, alone: "ssd" or "redis".')


class MoveResult(SessionInfo):
    """What a move did."""

    elapsed_ms: float = 0.0


class ResumeResult(SessionInfo):
    """What a resume did. `reason` says why less than everything was restored ("" when all was)."""

    restored_tokens: int = Field(default=0, description="Tokens now in place, verified or recomputed.")
    recompute_tokens: int = Field(default=0, description="Tokens the next request has to compute.")
    bytes_read: int = 0
    restored_from: str = ""
    missing_chunks: int = 0
    reason: str = ""
    elapsed_ms: float = 0.0
    target: str | None = Field(default=None, description="What was asked for.")
    strategy: str | None = Field(default=None, description="What the plan was made by; null: there was none.")
    path: str = Field(default="", description='The way it came: "memory", "device" or "none".')
    restored_to: str = Field(default="", description='Where the tokens are: "memory", "device" or "nowhere".')
    on_device_tokens: int = Field(default=0, description="Those of them that were there before.")
    recomputed_tokens: float = Field(
        default=0.0, description="Computed anew meanwhile: tokens times layers, by the number of layers."
    )
    loaded_bytes: int = 0
    seconds: float = Field(default=0.0, description="The restore to the device, measured.")
    predicted_s: Seconds = Field(default=None, description="What the plan had said; null: there was none.")
    bubble: float | None = Field(default=None, description="Share of `seconds` in which a stream stood idle.")


class DeleteResult(BaseModel):
    """What a delete did."""

    session_id: str
    deleted: bool
    bytes_freed: int
    device_tokens_freed: int


class TierInfo(BaseModel):
    """What a tier holds and may hold; of one that is out of reach, what it held when it was last seen."""

    bytes: int
    objects: int
    capacity_bytes: int
    breaker: str | None = Field(
        default=None,
        description="closed: it answers; open or half-open: it does not (of a cluster: one node, at least); "
        "null: it can't be out of reach.",
    )

    @property
    def reachable(self) -> bool:
        """False for a tier, or a node of it, that did not answer."""
        return self.breaker in (None, "closed")


class Overview(BaseModel):
    """All sessions, the tiers, and counters since the server started."""

    sessions: list[SessionInfo]
    tiers: dict[str, TierInfo]
    counters: dict[str, int]
    load: dict[str, int | list[str] | RecomputeInfo] = Field(
        description="layer_takeovers: layers the forward copied itself; slow_steps: rounds in which the "
        "scheduler spent over 100 ms on sessions; recompute: whether a restore may recompute."
    )
    namespace: str

    @property
    def recompute(self) -> RecomputeInfo | None:
        """Whether the server may recompute; None for an older one."""
        found = self.load.get("recompute")
        return found if isinstance(found, RecomputeInfo) else None


class ErrorDetail(BaseModel):
    """`type` is the name of the error class, `message` says what to do."""

    type: str
    message: str


class ErrorBody(BaseModel):
    """The body of every answer that is no 2xx."""

    error: ErrorDetail

"""What a restore costs, in seconds: the rates of one machine, and the sums that follow from them.

Compute: the model's layers are alike. K and V of layer l need the layer's norm, its qkv projection and the
rotation (`kv`). Output projection, MLP (`rest`) and attention are needed only by tokens that go on to layer
l + 1. So tokens that stop at layer l cost `kv` there, and at the last layer every token stops. A slice is a
block of at most `BLOCK_TOKENS` tokens through one layer; each has a fixed cost beside its tokens.

Load: `in_flight` workers each ask for about `request_bytes`, wait for the latency, receive over the link they
share, and land what came (verify, decode, copy), one landing at a time. In such a ring the slowest of three
things sets the pace, and the others hide behind it:

    link      bytes / bytes_per_s
    landing   bytes * land_s_per_byte
    workers   (requests * latency + link + landing) / in_flight

This is added up chunk by chunk, so tiers count one after another. A restore whose chunks alternate between
two tiers overlaps them and is faster than said here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BLOCK_TOKENS",
    "DEFAULT_LAND_S_PER_BYTE",
    "DEFAULT_TIERS",
    "REQUEST_BYTES",
    "ComputeRates",
    "ComputeSample",
    "ForwardSample",
    "LandSample",
    "LoadSample",
    "Rates",
    "TierRates",
    "causal_pairs",
]

BLOCK_TOKENS = 512  # of a slice, at most
REQUEST_BYTES = 1 << 20  # a loader asks for about so much at once: whole segments, at least one
FORWARD_TOKENS = 8192  # SGLang prefills that many at a time

Floats = NDArray[np.float64]


def causal_pairs(first: int, tokens: int) -> int:
    """(query, key) pairs of causal attention for queries [first, first + tokens) over keys from 0."""
    return tokens * first + tokens * (tokens + 1) // 2


def _expect_seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(
            f"{name} {value:g}: expected seconds, 0 or more; measure again (krul calibrate restore)"
        )


@dataclass(frozen=True)
class ComputeRates:
    """One layer; all layers are alike. Seconds.

    Raises:
        ValueError: a rate that is negative or no number, or no cost per token at all.
    """

    kv_s_per_token: float
    rest_s_per_token: float
    attention_s_per_pair: float
    slice_s: float

    def __post_init__(self) -> None:
        for name in ("kv_s_per_token", "rest_s_per_token", "attention_s_per_pair", "slice_s"):
            _expect_seconds(f"compute.{name}", getattr(self, name))
        if self.kv_s_per_token + self.rest_s_per_token <= 0:
            raise ValueError(
                "compute rates of 0 seconds a token: expected more than 0; calibrate again "
                "(krul calibrate restore), or give None where nothing was measured"
            )

    def kv_s(self, tokens: int) -> float:
        """A slice that makes K and V of one layer and stops there."""
        return self.slice_s + tokens * self.kv_s_per_token

    def layer_s(self, first: int, tokens: int) -> float:
        """A slice of the tokens [first, first + tokens) through one whole layer."""
        return (
            self.kv_s(tokens)
            + tokens * self.rest_s_per_token
            + causal_pairs(first, tokens) * self.attention_s_per_pair
        )

    def forward_s(self, first: int, tokens: int) -> float:
        """SGLang's own forward of the tokens [first, first + tokens) through one whole layer."""
        passes = math.ceil(tokens / FORWARD_TOKENS)
        return self.layer_s(first, tokens) + (passes - 1) * self.slice_s if tokens else 0.0


@dataclass(frozen=True)
class TierRates:
    """One tier, read by `in_flight` workers at once that share `bytes_per_s`.

    Raises:
        ValueError: a value that is negative, no number, or 0 where more is needed.
    """

    latency_s: float
    bytes_per_s: float
    in_flight: int

    def __post_init__(self) -> None:
        _expect_seconds("latency_s", self.latency_s)
        if not (math.isfinite(self.bytes_per_s) and self.bytes_per_s > 0):
            raise ValueError(
                f"bytes_per_s {self.bytes_per_s:g}: expected more than 0; leave the tier out of the rates "
                "when it was not measured, then a default is used"
            )
        if self.in_flight < 1:
            raise ValueError(f"in_flight {self.in_flight}: expected 1 or more; give the number of loaders")

    def fetch_s(self, sizes: Floats, requests: Floats, land_s_per_byte: float) -> Floats:
        """Seconds that bytes in so many requests take of a load that goes on before and after them."""
        link = sizes / self.bytes_per_s
        landing = sizes * land_s_per_byte
        workers = (requests * self.latency_s + link + landing) / self.in_flight
        pace: Floats = np.maximum(np.maximum(link, landing), workers)
        return pace

    def start_s(self, request_bytes: NDArray[Any], land_s_per_byte: float) -> Floats:
        """What the ring needs to fill: until the first request has come no landing, no link is busy.

        One worker has nobody to overlap with: all of it is in `fetch_s` already.
        """
        shorter = request_bytes * min(1 / self.bytes_per_s, land_s_per_byte)
        start: Floats = (1 - 1 / self.in_flight) * (self.latency_s + shorter)
        return start


# For tiers that were not measured, on the slow side: with too low a guess compute takes part for nothing,
# with too high a one the restore waits for the link alone.
DEFAULT_TIERS: Mapping[str, TierRates] = MappingProxyType(
    {
        "memory": TierRates(latency_s=0.0, bytes_per_s=2e9, in_flight=1),
        "ssd": TierRates(latency_s=1e-3, bytes_per_s=200e6, in_flight=2),
        "redis": TierRates(latency_s=2e-3, bytes_per_s=50e6, in_flight=2),
    }
)
DEFAULT_LAND_S_PER_BYTE = 1 / 1e9


@dataclass(frozen=True)
class Rates:
    """What is known of this machine.

    `compute` None: nothing measured, or recompute is refused. A tier that is not in `tiers` gets a default.
    `land_s_per_byte`: verify, decode and copy to the device. `request_s`: what a request costs beside its
    layers (HTTP, tokenizer, scheduler, sampling); the same for every plan.

    Raises:
        ValueError: a number that is negative or not finite.
    """

    compute: ComputeRates | None
    tiers: Mapping[str, TierRates]
    land_s_per_byte: float = DEFAULT_LAND_S_PER_BYTE
    request_s: float = 0.0
    request_bytes: int = REQUEST_BYTES

    def __post_init__(self) -> None:
        _expect_seconds("land_s_per_byte", self.land_s_per_byte)
        _expect_seconds("request_s", self.request_s)
        if self.request_bytes < 1:
            raise ValueError(f"request_bytes {self.request_bytes}: expected 1 or more bytes a request")

    def tier(self, name: str) -> TierRates:
        """The tier's rates, measured or default; a tier nobody knows counts as the slowest one."""
        return self.tiers.get(name) or DEFAULT_TIERS.get(name) or DEFAULT_TIERS["redis"]


# -- what was measured; sgl_krul.restore.rate_fit makes rates of it --


@dataclass(frozen=True)
class ComputeSample:
    """One slice: the tokens [first, first + tokens) through one layer took `seconds`."""

    first: int
    tokens: int
    kv_only: bool
    seconds: float


@dataclass(frozen=True)
class LoadSample:
    """One request of `bytes`, from asking to the last byte, with `in_flight` (itself included) under way."""

    tier: str
    bytes: int
    seconds: float
    in_flight: int


@dataclass(frozen=True)
class LandSample:
    """`bytes` that were verified, decoded and copied in `seconds` by one worker."""

    bytes: int
    seconds: float


@dataclass(frozen=True)
class ForwardSample:
    """`tokens` new ones after `first` through `layers`; from the request's release to the first token."""

    first: int
    tokens: int
    layers: int
    seconds: float

"""The layer plan: how every layer of one session is stored, and its bytes in a manifest.

On the wire, little endian: version (1 byte), number of layers (2), per layer a code (1) and its owner (2,
0xffff: none), and the xxh3_64 of all that (8). Only what `LayerPlan.encode` gives is accepted.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from sgl_krul.errors import Corrupt

__all__ = ["CODINGS", "MAX_LAYERS", "RAW", "LayerChoice", "LayerPlan"]

MAX_LAYERS = 4096
_VERSION = 1
_HEAD = struct.Struct("<BH")
_LAYER = struct.Struct("<BH")
_TAIL = struct.Struct("<Q")
_NO_OWNER = 0xFFFF  # beyond MAX_LAYERS
CODINGS = (
    ("raw", ""),
    ("quantized", "bf16"),
    ("quantized", "int8"),
    ("quantized", "int4"),
    ("shared", "raw"),
    ("shared", "merged"),
    ("shared", "merged-owner"),
)
"""Mode and variant by their code on the wire. A code never changes its meaning; new ones come at the end."""
_CODES = {coding: code for code, coding in enumerate(CODINGS)}
_PARTNERS = (("shared", "raw"), ("shared", "merged"))  # the codings that have an owner
_MERGED_OWNER = ("shared", "merged-owner")


@dataclass(frozen=True)
class LayerChoice:
    """How one layer is stored: a mode of `sgl_krul.codec.Mode` and the mode's variant.

    | mode | variant | |
    | --- | --- | --- |
    | raw | | the pool's own bytes: exact |
    | quantized | bf16, int8, int4 | stands alone |
    | shared | raw | the partner of a raw pair; `owner` is the lower layer, which stands alone |
    | shared | merged | the partner of a merged pair; `owner` is the lower layer, a merged-owner |
    | shared | merged-owner | the owner of a merged pair: coded together with its one partner |

    Raises ValueError for any other mode and variant, an owner where there is none or none where there is one.
    """

    mode: str
    variant: str = ""
    owner: int | None = None

    def __post_init__(self) -> None:
        if self.coding not in _CODES:
            known = ", ".join("/".join(filter(None, coding)) for coding in CODINGS)
            raise ValueError(f"mode and variant: expected one of {known}; got {self.mode!r}/{self.variant!r}")
        if (self.owner is not None) != (self.coding in _PARTNERS):
            expected = "a layer" if self.coding in _PARTNERS else "None"
            raise ValueError(f"owner of {self}: expected {expected}; got {self.owner!r}")
        if self.owner is not None and (type(self.owner) is not int or not 0 <= self.owner < MAX_LAYERS):
            raise ValueError(f"owner: expected an int from 0 to {MAX_LAYERS - 1}; got {self.owner!r}")

    def __str__(self) -> str:
        return f"{self.mode}/{self.variant}" if self.variant else self.mode

    @property
    def coding(self) -> tuple[str, str]:
        """Mode and variant: what a codec is looked up by."""
        return self.mode, self.variant

    @property
    def stands_alone(self) -> bool:
        """Whether the layer is stored without any other: it is no partner and no owner of a merged pair."""
        return self.mode != "shared"


RAW = LayerChoice("raw")


@dataclass(frozen=True)
class LayerPlan:
    """How each layer of a session is stored, in layer order.

    Raises ValueError unless there are 1 to 4096 layers, and each partner's owner is a lower layer that has no
    other partner and can be its owner: for a raw pair one that stands alone (so there are no chains), for a
    merged pair a merged-owner. Every merged-owner has its partner.
    """

    choices: tuple[LayerChoice, ...]

    def __post_init__(self) -> None:
        problem = _problem(self.choices)
        if problem:
            raise ValueError(f"layer plan: {problem}")

    @classmethod
    def uniform(cls, layers: int, choice: LayerChoice = RAW) -> LayerPlan:
        """All `layers` stored alike."""
        return cls((choice,) * layers)

    @property
    def plan_id(self) -> str:
        """The plan's name in chunk headers: "k1-" and 32 hex digits of the SHA-256 of its encoding."""
        return f"k{_VERSION}-{hashlib.sha256(self.encode()).hexdigest()[:32]}"

    @property
    def owners(self) -> Mapping[int, int]:
        """The owner of each partner, by partner, in layer order."""
        return {layer: c.owner for layer, c in enumerate(self.choices) if c.owner is not None}

    def partner_of(self, layer: int) -> int | None:
        """The layer that is stored as a partner of `layer`, None where there is none."""
        return next((partner for partner, c in enumerate(self.choices) if c.owner == layer), None)

    @property
    def is_exact(self) -> bool:
        """Whether every layer is `raw`, so that what comes back is what was there."""
        return all(choice == RAW for choice in self.choices)

    def encode(self) -> bytes:
        """The wire form: 11 + 3 * layers bytes, the same in every process."""
        parts = [_HEAD.pack(_VERSION, len(self.choices))]
        for choice in self.choices:
            owner = _NO_OWNER if choice.owner is None else choice.owner
            parts.append(_LAYER.pack(_CODES[choice.coding], owner))
        body = b"".join(parts)
        return body + _TAIL.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def decode(cls, data: bytes) -> LayerPlan:
        """The plan of bytes from a store.

        Raises:
            Corrupt: "version": another format version; "checksum": changed bytes; "length": anything else
                that `encode` would not give.
        """
        if len(data) < _HEAD.size + _TAIL.size:
            raise Corrupt("length", f"layer plan of {len(data)} bytes")
        version, layers = _HEAD.unpack_from(data)
        if version != _VERSION:
            raise Corrupt("version", f"layer plan version {version}, expected {_VERSION}")
        size = _HEAD.size + layers * _LAYER.size
        if len(data) != size + _TAIL.size:
            raise Corrupt("length", f"layer plan of {len(data)} bytes for {layers} layers")
        (checksum,) = _TAIL.unpack_from(data, size)
        found = xxhash.xxh3_64_intdigest(data[:size])
        if checksum != found:
            raise Corrupt("checksum", f"layer plan has {found:016x}, expected {checksum:016x}")
        entries = _LAYER.iter_unpack(data[_HEAD.size : size])
        try:
            return cls(tuple(_choice(code, owner) for code, owner in entries))
        except ValueError as error:
            raise Corrupt("length", str(error)) from error


def _choice(code: int, owner: int) -> LayerChoice:
    if code >= len(CODINGS):
        raise ValueError(f"code {code}: expected 0 to {len(CODINGS) - 1}")
    return LayerChoice(*CODINGS[code], None if owner == _NO_OWNER else owner)


def _problem(choices: Sequence[LayerChoice]) -> str | None:
    """What is wrong with the choices together."""
    if not 1 <= len(choices) <= MAX_LAYERS:
        return f"{len(choices)} layers: expected 1 to {MAX_LAYERS}"
    taken: dict[int, int] = {}  # partner by owner
    for layer, choice in enumerate(choices):
        if choice.owner is None:
            continue
        if choice.owner >= layer:
            return f"layer {layer}: owner {choice.owner}, expected a lower layer"
        if choice.owner in taken:
            return f"layer {choice.owner}: owner of {taken[choice.owner]} and of {layer}"
        owner = choices[choice.owner]
        fits = owner.stands_alone if choice.variant == "raw" else owner.coding == _MERGED_OWNER
        if not fits:
            return f"layer {layer}: {choice} with an owner that is {owner}"
        taken[choice.owner] = layer
    for layer, choice in enumerate(choices):
        if choice.coding == _MERGED_OWNER and layer not in taken:
            return f"layer {layer}: {choice} without a partner"
    return None

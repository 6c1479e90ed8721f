"""Which codec stores what a layer plan says, by mode and variant, and the byte that names it in a segment.

Here another codec is added: its byte, and how it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from sgl_krul.codec.layer_codec import LayerCodec, PairCodec
from sgl_krul.codec.quantized import CastCodec, GroupCodec
from sgl_krul.codec.shared import MergedPair, RawSharing
from sgl_krul.layout import KvLayout
from sgl_krul.strategy.layer_plan import LayerPlan

__all__ = ["MERGED_OWNER", "MERGED_PARTNER", "PLAIN", "VARIANT_BYTES", "Coding", "PlanCodecs", "layer_codec"]

Coding: TypeAlias = tuple[str, str]
"""Mode and variant, as `LayerChoice.coding` gives them."""

PLAIN: Coding = ("raw", "")
MERGED_PARTNER: Coding = ("shared", "merged")
MERGED_OWNER: Coding = ("shared", "merged-owner")

# The first byte of a segment. These never change, and a coding that stores other bytes gets another one.
VARIANT_BYTES: Mapping[Coding, int] = {
    ("quantized", "bf16"): 1,
    ("quantized", "int8"): 2,
    ("quantized", "int4"): 3,
    ("shared", "raw"): 16,
    MERGED_PARTNER: 17,
    MERGED_OWNER: 18,
}

_LAYER_CODECS: Mapping[Coding, Callable[[KvLayout], LayerCodec]] = {
    ("quantized", "bf16"): CastCodec,
    ("quantized", "int8"): lambda layout: GroupCodec(layout, 8),
    ("quantized", "int4"): lambda layout: GroupCodec(layout, 4),
    ("shared", "raw"): lambda layout: RawSharing(),
}


def layer_codec(coding: Coding, layout: KvLayout) -> LayerCodec | None:
    """The codec of a layer; None for a raw one, which needs none, and for the two of a merged pair.

    Raises:
        ValueError: a coding that no codec stores.
    """
    if coding in _LAYER_CODECS:
        return _LAYER_CODECS[coding](layout)
    if coding in (PLAIN, MERGED_PARTNER, MERGED_OWNER):
        return None
    known = ", ".join("/".join(each) for each in VARIANT_BYTES)
    raise ValueError(f"mode and variant {'/'.join(coding)}: expected raw or one of {known}")


class PlanCodecs:
    """A layer plan with the codecs that carry it out. Read only.

    `owners`: owner by partner; `partners`: the other way round; `pair`: the codec of merged pairs.

    Raises:
        ValueError: a plan for another number of layers.
    """

    def __init__(self, layout: KvLayout, plan: LayerPlan) -> None:
        if len(plan.choices) != layout.layers:
            raise ValueError(f"plan for {len(plan.choices)} layers: expected {layout.layers}")
        self.layout = layout
        self.plan_id = plan.plan_id
        self.codings: tuple[Coding, ...] = tuple(choice.coding for choice in plan.choices)
        self.owners: Mapping[int, int] = dict(plan.owners)
        self.partners: Mapping[int, int] = {owner: partner for partner, owner in self.owners.items()}
        self.pair: PairCodec = MergedPair(layout)
        self._codecs = {coding: layer_codec(coding, layout) for coding in set(self.codings)}

    def codec(self, layer: int) -> LayerCodec | None:
        """As `layer_codec`, of what the plan says of `layer`."""
        return self._codecs[self.codings[layer]]

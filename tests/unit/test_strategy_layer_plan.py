"""Layer plans: what is one, and what of untrusted bytes is none."""

from __future__ import annotations

import struct

import pytest
import xxhash

from sgl_krul.errors import Corrupt
from sgl_krul.strategy import RAW, LayerChoice, LayerPlan

INT8 = LayerChoice("quantized", "int8")
MERGED_OWNER = LayerChoice("shared", "merged-owner")
NO_OWNER = 0xFFFF


def raw_partner(owner: int) -> LayerChoice:
    return LayerChoice("shared", "raw", owner)


def merged_partner(owner: int) -> LayerChoice:
    return LayerChoice("shared", "merged", owner)


MIXED = LayerPlan((INT8, MERGED_OWNER, raw_partner(0), merged_partner(1), RAW))


def sealed(*layers: tuple[int, int], version: int = 1, count: int | None = None) -> bytes:
    """(code, owner) of each layer as a manifest has them, with a checksum that is right."""
    body = struct.pack("<BH", version, len(layers) if count is None else count)
    body += b"".join(struct.pack("<BH", *layer) for layer in layers)
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


ALONE = (2, NO_OWNER)  # quantized/int8


def test_a_plan_comes_back_from_its_bytes() -> None:
    for plan in (MIXED, LayerPlan.uniform(1), LayerPlan.uniform(4096, LayerChoice("quantized", "int4"))):
        assert LayerPlan.decode(plan.encode()) == plan
        assert len(plan.encode()) == 11 + 3 * len(plan.choices)


def test_the_format_is_the_one_that_is_stored_already() -> None:
    assert MIXED.encode().hex() == "01050002ffff06ffff04000005010000ffff84e75d2605ade061"
    assert MIXED.plan_id == "k1-36fcdf3178f746337c18b33453590ae1"


def test_every_coding_has_its_code() -> None:
    assert LayerPlan.decode(
        sealed((0, NO_OWNER), (1, NO_OWNER), ALONE, (3, NO_OWNER), (4, 0), (6, NO_OWNER), (5, 5))
    ).choices == (
        RAW,
        LayerChoice("quantized", "bf16"),
        INT8,
        LayerChoice("quantized", "int4"),
        raw_partner(0),
        MERGED_OWNER,
        merged_partner(5),
    )


def test_who_owns_whom() -> None:
    assert MIXED.owners == {2: 0, 3: 1}
    assert [MIXED.partner_of(layer) for layer in range(5)] == [2, 3, None, None, None]


def test_only_raw_is_exact() -> None:
    assert LayerPlan.uniform(3).is_exact
    assert not LayerPlan((RAW, RAW, raw_partner(1))).is_exact
    assert not LayerPlan.uniform(3, LayerChoice("quantized", "bf16")).is_exact


def test_other_plans_have_other_ids() -> None:
    plans = [MIXED, LayerPlan.uniform(5), LayerPlan.uniform(6), LayerPlan.uniform(5, INT8)]
    ids = {plan.plan_id for plan in plans}
    assert len(ids) == len(plans)
    assert all(len(text) <= 128 and text.isascii() and text.isprintable() and " " not in text for text in ids)


@pytest.mark.parametrize(
    ("mode", "variant", "owner"),
    [
        ("quantised", "int8", None),
        ("quantized", "int3", None),
        ("quantized", "", None),
        ("raw", "int8", None),
        ("recompute", "", None),
        ("shared", "merged", None),
        ("shared", "raw", None),
        ("raw", "", 0),
        ("quantized", "int4", 3),
        ("shared", "merged-owner", 0),
        ("shared", "raw", -1),
        ("shared", "raw", 4096),
        ("shared", "raw", True),
    ],
)
def test_what_no_layer_can_be_is_refused(mode: str, variant: str, owner: int | None) -> None:
    with pytest.raises(ValueError, match=r"expected"):
        LayerChoice(mode, variant, owner)


BAD_PLANS = {
    "no layers": ((), "0 layers"),
    "too many layers": ((RAW,) * 4097, "4097 layers"),
    "owner is itself": ((RAW, raw_partner(1)), "owner 1"),
    "owner above": ((raw_partner(1), RAW), "owner 1"),
    "owner out of range": ((RAW, raw_partner(7)), "owner 7"),
    "a chain": ((RAW, raw_partner(0), raw_partner(1)), "layer 2"),
    "a chain of merged": ((MERGED_OWNER, merged_partner(0), merged_partner(1)), "layer 2"),
    "two raw partners": ((RAW, raw_partner(0), raw_partner(0)), "owner of 1 and of 2"),
    "two merged partners": ((MERGED_OWNER, merged_partner(0), merged_partner(0)), "owner of 1 and of 2"),
    "raw partner of a merged owner": ((MERGED_OWNER, raw_partner(0)), "layer 1"),
    "merged partner of a layer by itself": ((INT8, merged_partner(0)), "layer 1"),
    "merged owner without a partner": ((RAW, MERGED_OWNER), "without a partner"),
    "partner of one, owner of another": ((MERGED_OWNER, MERGED_OWNER, merged_partner(0)), "layer 1"),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_layers_that_do_not_go_together_are_refused(case: str) -> None:
    choices, message = BAD_PLANS[case]
    with pytest.raises(ValueError, match=message):
        LayerPlan(choices)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "length"),
        (b"\x01" * 10, "length"),
        (sealed(), "length"),
        (sealed(ALONE, version=2), "version"),
        (sealed(ALONE, count=2), "length"),
        (sealed(ALONE, ALONE, count=1), "length"),
        (sealed(ALONE) + b"\0", "length"),
        (sealed(ALONE)[:-1], "length"),
        (sealed(ALONE)[:-1] + b"\0", "checksum"),
        (sealed(ALONE, (7, NO_OWNER)), "length"),  # unknown mode
        (sealed(ALONE, (255, 0)), "length"),
        (sealed(ALONE, (4, NO_OWNER)), "length"),  # a partner without an owner
        (sealed(ALONE, (2, 0)), "length"),  # an owner of a layer by itself
        (sealed(ALONE, (4, 2)), "length"),  # out of range
        (sealed(ALONE, (4, 5000)), "length"),
        (sealed(ALONE, (4, 1)), "length"),  # itself
        (sealed((4, 1), ALONE), "length"),  # not below
        (sealed(ALONE, (4, 0), (4, 1)), "length"),  # a chain
        (sealed(ALONE, (4, 0), (4, 0)), "length"),  # in two pairs
        (sealed((6, NO_OWNER), (5, 0), (5, 0)), "length"),
        (sealed((6, NO_OWNER), ALONE), "length"),
        (sealed((6, NO_OWNER), (4, 0)), "length"),
        (sealed(ALONE, (5, 0)), "length"),
    ],
)
def test_doubtful_bytes_are_corrupt(data: bytes, reason: str) -> None:
    with pytest.raises(Corrupt) as caught:
        LayerPlan.decode(data)
    assert caught.value.reason == reason


def test_no_changed_bit_goes_unseen() -> None:
    data = MIXED.encode()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            LayerPlan.decode(bytes(changed))

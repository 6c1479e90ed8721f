"""Which methods the quality benchmark compares."""

from __future__ import annotations

import pytest

from benchmarks.quality_methods import ACCEPT, FULL, GAMMA, OUTSIDE, QUICK, Asked, shared_share
from sgl_krul.strategy import Method, Pair, Sharing, as_asked


def test_every_run_has_the_exact_method_and_no_name_twice() -> None:
    for methods in (QUICK, ACCEPT, FULL, OUTSIDE):
        names = [asked.name for asked in methods]
        assert names[0] == "exact"
        assert len(set(names)) == len(names)
    assert len(QUICK) == 5
    assert {asked.name for asked in ACCEPT} < {asked.name for asked in FULL}


def test_the_rows_that_were_asked_for_are_there() -> None:
    names = {asked.name for asked in ACCEPT}
    krul = {f"krul-{sharing}-{share}" for sharing in ("raw", "merged") for share in ("0.10", "0.25", "0.50")}
    assert {"exact", "int8", "int4", *krul} <= names
    for label in ("fixed", "random", "ir-only", "all-layers", "high:"):
        assert any(name.startswith(label) for name in names), label


@pytest.mark.parametrize("asked", FULL, ids=lambda asked: asked.name)
def test_a_name_says_what_is_wished_for(asked: Asked) -> None:
    name = asked.name.removeprefix(f"{asked.quality}:") if asked.quality else asked.name
    assert (":" in asked.name) == (asked.quality is not None)
    if not asked.wish.shares or asked.wish.method is Method.auto:
        assert name == asked.wish.method
        return
    label, _, rest = name.partition("-merged-" if asked.wish.sharing is Sharing.merged else "-raw-")
    share, *gamma = rest.split("-gamma-")
    assert float(share) == asked.wish.share
    methods = {"krul": Method.krul, "ir-only": Method.krul, "all-layers": Method.krul}
    assert asked.wish.method == methods.get(label, label)
    assert asked.wish.alone == ("int4" if asked.quality else "bf16")
    assert asked.by_chance == (label == "ir-only")
    assert asked.wish.gamma == (0 if label == "all-layers" else float(gamma[0]) if gamma else GAMMA)


def test_the_share_that_is_reported_is_the_one_that_came_out() -> None:
    krul = next(asked for asked in ACCEPT if asked.name == "krul-merged-0.50")
    plan = as_asked(krul.wish, 8, [Pair(0, 1, 0.1), Pair(2, 5, 0.2)])
    assert shared_share(plan) == 0.25

"""Sizes of a KV pool and the digest that keeps foreign KV apart."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from sgl_krul import layout as layout_module
from sgl_krul.layout import KvLayout, namespace

SMOL = KvLayout(
    layers=30, kv_heads=3, head_dim=64, v_head_dim=32, dtype="bfloat16", page_size=16, rope="theta=1e5"
)


def name_of(layout: KvLayout = SMOL, **changes: object) -> str:
    arguments: dict[str, object] = {
        "weights_fingerprint": "abc",
        "weight_version": "default",
        "rank": 0,
        "world_size": 2,
    }
    return namespace(layout, **{**arguments, **changes})  # type: ignore[arg-type]


def test_sizes_count_k_and_v_of_a_page() -> None:
    assert SMOL.itemsize == 2
    assert SMOL.k_page_bytes == 16 * 3 * 64 * 2
    assert SMOL.v_page_bytes == 16 * 3 * 32 * 2
    assert SMOL.page_segment_bytes == SMOL.k_page_bytes + SMOL.v_page_bytes
    assert SMOL.page_bytes == 30 * SMOL.page_segment_bytes
    assert SMOL.token_bytes * SMOL.page_size == SMOL.page_bytes


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_itemsize_of_each_dtype(dtype: str, itemsize: int) -> None:
    assert replace(SMOL, dtype=dtype).itemsize == itemsize


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_dim", "v_head_dim", "page_size"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "4", None])
def test_a_size_that_is_no_positive_int_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: expected an int of at least 1; got "):
        replace(SMOL, **{field: value})  # type: ignore[arg-type]


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"dtype: expected one of float32, float16, bfloat16; got 'int8'"):
        replace(SMOL, dtype="int8")


def test_namespace_is_half_a_sha256_and_stays_what_it_was() -> None:
    # A fixed value: if it changes, every stored session becomes a miss. Then raise FORMAT_VERSION.
    assert name_of() == "02cd792002927eb2d1a61d3dc511fe3c"


def test_namespace_does_not_depend_on_the_process() -> None:
    code = (
        "from sgl_krul.layout import KvLayout, namespace\n"
        "print(namespace(KvLayout(30, 3, 64, 32, 'bfloat16', 16, 'theta=1e5'), 'abc', 'default', 0, 2))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == name_of()


def test_namespace_differs_in_every_part() -> None:
    changed_layouts = [
        replace(SMOL, layers=29),
        replace(SMOL, kv_heads=4),
        replace(SMOL, head_dim=32),
        replace(SMOL, v_head_dim=64),
        replace(SMOL, dtype="float16"),
        replace(SMOL, page_size=32),
        replace(SMOL, rope="theta=1e6"),
    ]
    names = [name_of(), *(name_of(layout) for layout in changed_layouts)]
    names += [name_of(weights_fingerprint="abd"), name_of(weight_version="2")]
    names += [name_of(rank=1), name_of(world_size=3)]
    assert len(set(names)) == len(names) == 12


def test_namespace_differs_in_the_format_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = name_of()
    monkeypatch.setattr(layout_module, "FORMAT_VERSION", 2)
    assert name_of() != before


def test_texts_cannot_run_into_each_other() -> None:
    joined = name_of(weights_fingerprint='a","weight_version":"b', weight_version="c")
    assert joined != name_of(weights_fingerprint="a", weight_version='b","weight_version":"c')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2}, "rank: expected less than world_size 2; got 2"),
        ({"rank": -1}, "rank: expected an int of at least 0; got -1"),
        ({"world_size": 0}, "world_size: expected an int of at least 1; got 0"),
        ({"weights_fingerprint": ""}, "weights_fingerprint: expected a text that names the weights; got ''"),
        ({"weights_fingerprint": None}, "weights_fingerprint: expected a str; got None"),
        ({"weight_version": 3}, "weight_version: expected a str; got 3"),
    ],
)
def test_a_namespace_that_names_nothing_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        name_of(SMOL, **change)

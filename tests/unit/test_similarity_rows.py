"""Attention rows against the definition, in every shape, dtype and tiling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_krul.similarity import attention_rows
from sgl_krul.similarity.rows import row_tiles
from tests.naive_attention import naive_rows, random_layers

SHAPES = [(1, 1), (3, 1), (9, 3), (4, 4), (14, 2)]  # heads, KV heads


def one_layer(
    tokens: int, heads: int, kv_heads: int, dim: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = random_layers(1, tokens, heads, kv_heads, dim, seed=tokens + heads)
    return q[0].to(dtype), k[0].to(dtype)


@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 41, 123])
@pytest.mark.parametrize("tile_bytes", [1, 1000, 1 << 20])
def test_rows_are_those_of_the_definition(heads: int, kv_heads: int, tokens: int, tile_bytes: int) -> None:
    q, k = one_layer(tokens, heads, kv_heads)
    at = sorted({0, tokens // 3, tokens // 2, tokens - 1})
    rows = attention_rows(q[at], k, torch.tensor(at), 0.25, tile_bytes=tile_bytes)
    assert rows.dtype == torch.float32
    assert rows.shape == (len(at), tokens)
    np.testing.assert_allclose(rows.numpy(), naive_rows(q[at], k, at, 0.25), rtol=2e-5, atol=1e-8)
    for row, position in zip(rows, at, strict=True):
        assert not row[position + 1 :].any()
    np.testing.assert_allclose(rows.sum(1).numpy(), 1.0, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("tile_bytes", [1, 640, 1 << 20])
def test_narrow_keys_are_widened_not_rounded(dtype: torch.dtype, tile_bytes: int) -> None:
    q, k = one_layer(123, 9, 3, dtype=dtype)
    at = [5, 41, 122]
    rows = attention_rows(q[at], k, torch.tensor(at), 0.25, tile_bytes=tile_bytes)
    np.testing.assert_allclose(rows.numpy(), naive_rows(q[at], k, at, 0.25), rtol=2e-5, atol=1e-8)


def test_large_scores_do_not_overflow() -> None:
    q, k = one_layer(41, 3, 1)
    at = [3, 40]
    rows = attention_rows(q[at] * 1000, k * 100, torch.tensor(at), 1.0)
    assert bool(rows.isfinite().all())
    np.testing.assert_allclose(rows.sum(1).numpy(), 1.0, rtol=1e-5)


def test_positions_in_any_order_and_keys_behind_them() -> None:
    """Rows need not ascend, and keys past the longest row change nothing."""
    q, k = one_layer(123, 9, 3)
    at = [70, 3, 41, 3]
    rows = attention_rows(q[at], k, torch.tensor(at), 0.25, tile_bytes=2000)
    np.testing.assert_allclose(rows.numpy(), naive_rows(q[at], k, at, 0.25), rtol=2e-5, atol=1e-8)
    k[71:] = torch.nan
    assert torch.equal(attention_rows(q[at], k, torch.tensor(at), 0.25, tile_bytes=2000), rows)


def test_keys_in_a_strided_view() -> None:
    """Keys as a KV pool has them: K beside V."""
    q, k = one_layer(41, 9, 3)
    pool = torch.cat([k, torch.full_like(k, torch.nan)], dim=2)
    at = torch.tensor([7, 40])
    assert torch.equal(attention_rows(q[at], pool[:, :, :16], at, 0.25), attention_rows(q[at], k, at, 0.25))


def test_no_rows() -> None:
    q, k = one_layer(41, 9, 3)
    assert attention_rows(q[:0], k, torch.empty(0, dtype=torch.int64), 0.25).shape == (0, 41)


def test_inputs_are_left_as_they_were() -> None:
    q, k = one_layer(41, 9, 3)
    before = q.clone(), k.clone()
    attention_rows(q, k, torch.arange(41), 0.25)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def test_tensors_of_inference_mode_and_of_training() -> None:
    """Queries come out of a server's forward (inference mode), or out of a model with gradients."""
    q, k = one_layer(41, 9, 3)
    at = torch.tensor([7, 40])
    expected = attention_rows(q[at], k, at, 0.25)
    with torch.inference_mode():
        inference_q, inference_k = q[at] * 1, k * 1
        assert torch.equal(attention_rows(inference_q, inference_k, at, 0.25), expected)
    assert torch.equal(attention_rows(inference_q, inference_k, at, 0.25), expected)
    trained = attention_rows(q[at].requires_grad_(), k.requires_grad_(), at, 0.25)
    assert torch.equal(trained, expected)
    assert not trained.requires_grad


class _Allocations(TorchDispatchMode):
    """The largest tensor made that is none of the `known` ones, in bytes."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in self.known:
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile_bytes", [40_000, 100_000, 300_000])
@pytest.mark.parametrize("ascending", [True, False])
def test_no_tile_is_larger_than_allowed(tile_bytes: int, dtype: torch.dtype, ascending: bool) -> None:
    q, k = one_layer(5000, 8, 2, dim=32, dtype=dtype)
    positions = torch.arange(900, 5000, 800) if ascending else torch.arange(4900, 0, -800)
    rows = q[positions].clone()  # 8 heads of 6 or 7 rows: at most 7 KiB
    out = torch.empty((len(positions), 5000))
    with _Allocations(rows, k, positions, out) as seen:
        for _ in row_tiles(rows, k, positions, 0.2, out, tile_bytes=tile_bytes):
            pass
    assert 0 < seen.largest <= tile_bytes


def test_tiles_are_steps() -> None:
    """As many steps as tiles: what is between two of them belongs to the caller."""
    q, k = one_layer(1000, 8, 2)
    positions = torch.tensor([499, 999])
    out = torch.empty((2, 1000))

    def steps(tile_bytes: int) -> int:
        return sum(1 for _ in row_tiles(q[positions], k, positions, 0.2, out, tile_bytes=tile_bytes))

    # 4 heads by 500 and 1,000 keys are 8,000 and 16,000 bytes; there are 2 KV heads.
    assert [steps(tile_bytes) for tile_bytes in (1 << 20, 16_000, 8_000, 4_000)] == [2, 4, 6, 12]


@pytest.mark.parametrize(
    ("q", "k", "at", "named"),
    [
        ((2, 4, 8), (10, 2, 8), [3, 10], "whole context"),
        ((2, 4, 8), (10, 2, 8), [-1, 3], "positions"),
        ((2, 4, 8), (10, 2, 8), [3], "positions"),
        ((2, 4, 8), (10, 3, 8), [3, 4], "multiple"),
        ((2, 4, 8), (10, 2, 4), [3, 4], "head_dim"),
        ((2, 8), (10, 2, 8), [3, 4], "expected"),
        ((2, 4, 8), (10, 0, 8), [3, 4], "expected"),
    ],
)
def test_what_does_not_fit_is_refused(
    q: tuple[int, ...], k: tuple[int, ...], at: list[int], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        attention_rows(torch.zeros(q), torch.zeros(k), torch.tensor(at), 1.0)


def test_wrong_types_are_refused() -> None:
    q, k = torch.zeros((1, 2, 4)), torch.zeros((3, 1, 4))
    at = torch.tensor([2])
    with pytest.raises(ValueError, match="int64"):
        attention_rows(q, k, at.int(), 1.0)
    with pytest.raises(ValueError, match="floats"):
        attention_rows(q, k.int(), at, 1.0)
    with pytest.raises(ValueError, match="tile_bytes"):
        attention_rows(q, k, at, 1.0, tile_bytes=0)
    with pytest.raises(ValueError, match="out"):
        next(row_tiles(q, k, at, 1.0, torch.empty((1, 2))))

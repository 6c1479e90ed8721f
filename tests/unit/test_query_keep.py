"""Queries that are kept for pauses: which, in how many bytes, and for how long."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_krul.similarity import QueryKeep

SHAPE = (2, 3, 4)  # layers, heads, numbers
ROW_BYTES = 2 * 2 * 3 * 4


def rows(positions: list[int], first: float = 0.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """q [L, r, H, D], every row filled with its number."""
    layers, heads, dim = SHAPE
    numbers = torch.arange(len(positions), dtype=dtype) + first
    return numbers.view(1, -1, 1, 1).expand(layers, len(positions), heads, dim).clone()


def add(keep: QueryKeep, digest: str, positions: list[int], first: float = 0.0) -> None:
    keep.add(digest, np.array(positions, np.int64), rows(positions, first))
    assert keep.check() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_come_back_in_the_order_of_their_positions(dtype: torch.dtype) -> None:
    keep = QueryKeep(1 << 20, tokens=100, rows=8)
    keep.add("a", np.array([50, 60]), rows([50, 60], 1.0, dtype))
    keep.add("a", np.array([7]), rows([7], 9.0, dtype))
    kept = keep.get("a", 100)
    assert kept is not None
    assert kept.positions.tolist() == [7, 50, 60]
    assert kept.q.dtype == np.float32
    assert kept.q.shape == (2, 3, 3, 4)
    assert kept.q[0, :, 0, 0].tolist() == [9.0, 1.0, 2.0]


def test_only_leading_positions_are_kept_and_given() -> None:
    keep = QueryKeep(1 << 20, tokens=100, rows=8)
    add(keep, "a", [10, 99, 100, 500])
    kept = keep.get("a", 100)
    assert kept is not None
    assert kept.positions.tolist() == [10, 99]
    few = keep.get("a", 99)
    assert few is not None
    assert few.positions.tolist() == [10]
    assert keep.get("a", 10) is None
    assert keep.get("b", 100) is None


def test_so_many_rows_of_a_session_and_an_edited_turn_replaces_its_own() -> None:
    keep = QueryKeep(1 << 20, tokens=100, rows=2)
    add(keep, "a", [1, 2, 3])
    add(keep, "a", [2, 4], first=7.0)
    kept = keep.get("a", 100)
    assert kept is not None
    assert kept.positions.tolist() == [1, 2]
    assert kept.q[0, :, 0, 0].tolist() == [0.0, 7.0]


def test_over_the_budget_the_session_not_heard_of_for_longest_goes() -> None:
    keep = QueryKeep(4 * ROW_BYTES, tokens=100, rows=8)
    add(keep, "a", [1, 2])
    add(keep, "b", [1, 2])
    assert keep.get("a", 100) is not None  # heard of
    add(keep, "c", [1])
    assert [name for name in "abc" if keep.get(name, 100) is not None] == ["a", "c"]
    add(keep, "d", list(range(5)))  # more than all of it
    assert keep.get("d", 100) is None


def test_a_session_without_a_row_takes_nothing() -> None:
    keep = QueryKeep(4 * ROW_BYTES, tokens=100, rows=8)
    for number in range(10):
        add(keep, f"late {number}", [100, 200])
    add(keep, "a", [1])
    assert [name for name in ("late 0", "late 9", "a") if keep.get(name, 1000) is not None] == ["a"]


def test_numbers_that_16_bits_cannot_hold_are_left_out() -> None:
    keep = QueryKeep(1 << 20, tokens=100, rows=8)
    q = rows([1, 2, 3])
    q[0, 0] = 1e6
    q[1, 2, 0, 0] = float("nan")
    keep.add("a", np.array([1, 2, 3]), q)
    kept = keep.get("a", 100)
    assert kept is not None
    assert kept.positions.tolist() == [2]


def test_forgotten_and_cleared() -> None:
    keep = QueryKeep(1 << 20, tokens=100, rows=8)
    add(keep, "a", [1])
    add(keep, "b", [1])
    keep.forget("a")
    keep.forget("unheard of")
    assert keep.get("a", 100) is None
    assert keep.get("b", 100) is not None
    keep.clear()
    assert keep.get("b", 100) is None
    assert keep.check() == []


def test_bounds_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="0 bytes, 1 tokens, 1 rows: expected at least 1 each"):
        QueryKeep(0, 1, 1)

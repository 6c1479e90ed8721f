"""Attention outputs against a naive computation in float64, relative losses, the meter's rows and time."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from sgl_krul.codec import loss as loss_module
from sgl_krul.codec.block import KvBlock
from sgl_krul.codec.loss import (
    LossMeter,
    Queries,
    attention_output,
    relative_loss,
    row_losses,
    spread_order,
)

Array = NDArray[np.float32]


def random(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def naive(q: Array, k: Array, v: Array, positions: NDArray[np.int64], scale: float) -> NDArray[np.float64]:
    """One row and head at a time, in float64."""
    rows, heads, _ = q.shape
    share = heads // k.shape[1]
    out = np.empty((rows, heads, v.shape[2]))
    for row in range(rows):
        for head in range(heads):
            end = int(positions[row]) + 1
            keys = k[:end, head // share].astype(np.float64)
            scores = scale * (keys @ q[row, head].astype(np.float64))
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ v[:end, head // share].astype(np.float64) / weights.sum()
    return out


@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "groups", "dim", "v_dim"),
    [
        (1, 1, 1, 1, 4, 4),
        (3, 41, 9, 3, 64, 64),
        (32, 123, 9, 3, 64, 64),
        (5, 1000, 14, 2, 64, 32),
        (70, 700, 4, 4, 16, 24),
        (9, 2100, 8, 1, 128, 128),
    ],
)
def test_the_output_is_that_of_attention(
    rows: int, tokens: int, heads: int, groups: int, dim: int, v_dim: int
) -> None:
    q, k, v = random(1, rows, heads, dim), random(2, tokens, groups, dim), random(3, tokens, groups, v_dim)
    positions = np.random.default_rng(4).integers(0, tokens, rows)
    positions[0] = tokens - 1
    found = attention_output(q, k, v, positions, dim**-0.5)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, naive(q, k, v, positions, dim**-0.5), rtol=1e-4, atol=2e-6)


def test_later_keys_are_not_seen() -> None:
    q, k, v = random(1, 6, 4, 8), random(2, 500, 2, 8), random(3, 500, 2, 8)
    positions = np.array([0, 3, 60, 200, 400, 499])
    before = attention_output(q, k, v, positions, 0.3)
    k[201:] = 1e6
    v[201:] = np.nan
    after = attention_output(q, k, v, np.minimum(positions, 200), 0.3)
    np.testing.assert_allclose(before[:4], after[:4], rtol=1e-5, atol=1e-7)


def test_a_row_behind_the_keys_sees_them_all() -> None:
    q, k, v = random(1, 2, 4, 8), random(2, 50, 2, 8), random(3, 50, 2, 8)
    last = attention_output(q, k, v, np.array([49, 49]), 0.3)
    np.testing.assert_array_equal(attention_output(q, k, v, np.array([50, 5000]), 0.3), last)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = random(1, 2, 2, 8) * 100, random(2, 50, 2, 8) * 100, random(3, 50, 2, 8)
    found = attention_output(q, k, v, np.array([20, 49]), 1.0)
    np.testing.assert_allclose(found, naive(q, k, v, np.array([20, 49]), 1.0), rtol=1e-3, atol=1e-5)


def test_products_stay_within_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No product is larger than what OpenBLAS keeps in the calling thread; together they are all of it."""
    sizes: list[tuple[int, int]] = []  # multiply-adds of one product, how many products
    matmul = np.matmul

    def counted(a: Array, b: Array, **more: Array) -> Array:
        found: Array = matmul(a, b, **more)
        batch = max(math.prod(a.shape[:-2]), math.prod(b.shape[:-2]))
        sizes.append((a.shape[-2] * a.shape[-1] * b.shape[-1], batch))
        return found

    monkeypatch.setattr(loss_module.np, "matmul", counted)
    attention_output(
        random(1, 40, 9, 64), random(2, 3000, 3, 64), random(3, 3000, 3, 64), np.full(40, 2999), 0.1
    )
    assert max(size for size, _ in sizes) <= 1 << 18
    assert sum(size * batch for size, batch in sizes) == 2 * 40 * 9 * 64 * 3000


def test_scores_are_not_all_kept() -> None:
    q, k = random(1, 128, 2, 8), random(2, 50_000, 1, 8)
    tracemalloc.start()
    try:
        attention_output(q, k, k, np.full(128, 49_999), 0.1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 21 << 20  # of 49 MiB


@pytest.mark.parametrize(
    ("q", "k", "v", "positions"),
    [
        ((2, 4, 8), (5, 3, 8), (5, 3, 8), [0, 1]),
        ((2, 4, 8), (5, 2, 6), (5, 2, 8), [0, 1]),
        ((2, 4, 8), (5, 2, 8), (4, 2, 8), [0, 1]),
        ((2, 4, 8), (0, 2, 8), (0, 2, 8), [0, 1]),
        ((2, 4, 8), (5, 2, 8), (5, 2, 8), [0]),
        ((2, 4, 8), (5, 2, 8), (5, 2, 8), [0, -1]),
        ((2, 32), (5, 2, 8), (5, 2, 8), [0, 1]),
    ],
)
def test_shapes_that_do_not_fit(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], positions: list[int]
) -> None:
    with pytest.raises(ValueError, match="expected"):
        attention_output(
            np.zeros(q, np.float32), np.zeros(k, np.float32), np.zeros(v, np.float32), np.array(positions), 1
        )


def test_the_loss_is_the_mean_of_squared_relative_errors() -> None:
    exact = np.array([[[3.0, 4.0], [1.0, 0.0]], [[0.0, 2.0], [5.0, 0.0]]], np.float32)
    coded = np.array([[[3.0, 5.0], [1.0, 0.0]], [[0.0, 0.0], [5.0, 5.0]]], np.float32)
    assert row_losses(exact, coded).tolist() == [(1 / 25 + 0) / 2, (1 + 1) / 2]
    assert relative_loss(exact, coded) == pytest.approx((1 / 25 + 0 + 1 + 1) / 4)
    assert relative_loss(exact, exact) == 0


def test_the_loss_does_not_depend_on_the_scale() -> None:
    exact, coded = random(1, 5, 3, 8), random(2, 5, 3, 8)
    small = np.float32(2.0**-100)
    assert relative_loss(exact * small, coded * small) == pytest.approx(relative_loss(exact, coded))


def test_losses_without_a_scale() -> None:
    exact = np.zeros((1, 1, 2), np.float32)
    assert relative_loss(exact, exact) == 0
    assert relative_loss(exact, exact + 1) == math.inf
    for number in (math.nan, math.inf):
        assert relative_loss(exact + 1, np.full_like(exact, number)) == math.inf


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 9, 100])
def test_the_order_has_every_row_once_and_begins_with_the_last(rows: int) -> None:
    order = spread_order(rows)
    assert sorted(order) == list(range(rows))
    assert order[:1] == [rows - 1][:rows]


def test_every_beginning_of_the_order_is_spread_out() -> None:
    for used in (4, 8, 16, 32):
        begin = sorted(spread_order(64)[:used])
        assert np.diff(begin).tolist() == [64 // used] * (used - 1)


class Clock:
    """Each look costs a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def session(rows: int = 40, tokens: int = 300) -> tuple[Queries, KvBlock, list[KvBlock]]:
    """Queries, the exact layer, and two codings of it: near, and further off."""
    exact = KvBlock(random(2, tokens, 3, 16), random(3, tokens, 3, 16))
    coded = [
        KvBlock(exact.k + error * random(4, tokens, 3, 16), exact.v + error * random(5, tokens, 3, 16))
        for error in (0.01, 0.1)
    ]
    positions = np.random.default_rng(6).permutation(tokens)[:rows]
    return Queries(random(1, rows, 9, 16), positions, 0.25), exact, coded


def expected_losses(queries: Queries, rows: list[int], exact: KvBlock, coded: list[KvBlock]) -> list[float]:
    outputs = [
        naive(queries.q[rows], layer.k, layer.v, queries.positions[rows], queries.scale)
        for layer in (exact, *coded)
    ]
    return [
        float(np.mean(np.square(out - outputs[0]).sum(axis=2) / np.square(outputs[0]).sum(axis=2)))
        for out in outputs[1:]
    ]


@pytest.mark.parametrize(("rows", "most"), [(1, 32), (7, 32), (40, 64), (40, 32), (40, 3)])
def test_the_meter_measures_what_the_definition_says(rows: int, most: int) -> None:
    queries, exact, coded = session(rows)
    found = LossMeter(most).measure(queries, exact, coded)
    order = np.argsort(queries.positions)[spread_order(rows)][:most].tolist()
    assert found.rows == len(order) == min(rows, most)
    assert list(found.losses) == pytest.approx(expected_losses(queries, order, exact, coded), rel=1e-3)
    assert 0 < found.losses[0] < found.losses[1] < 1


def test_the_exact_layer_loses_nothing() -> None:
    queries, exact, _ = session()
    assert LossMeter().measure(queries, exact, [exact, KvBlock(exact.k.copy(), exact.v.copy())]).losses == (
        0,
        0,
    )


def test_the_order_in_which_rows_come_does_not_matter() -> None:
    queries, exact, coded = session()
    turned = Queries(queries.q[::-1], queries.positions[::-1], queries.scale)
    meter = LossMeter()
    assert meter.measure(queries, exact, coded) == meter.measure(turned, exact, coded)


@pytest.mark.parametrize(
    ("seconds", "rows"), [(-5.0, 8), (0.0, 8), (1.0, 8), (5.9, 8), (6.0, 16), (8.9, 16), (9.0, 24), (1e9, 40)]
)
def test_time_decides_how_many_rows_and_nothing_else(seconds: float, rows: int) -> None:
    """A batch of 8 rows takes a second, for two codings and the exact layer: 3 seconds."""
    queries, exact, coded = session()
    clock = Clock()
    found = LossMeter(64, clock).measure(queries, exact, coded, deadline_s=clock.now + 1.0 + seconds)
    order = np.argsort(queries.positions)[spread_order(40)][:rows].tolist()
    assert found.rows == rows
    assert list(found.losses) == pytest.approx(expected_losses(queries, order, exact, coded), rel=1e-3)


def test_a_slow_batch_counts_for_the_next_one() -> None:
    ticks = iter([0.0, 1.0, 5.0])
    clock: Callable[[], float] = lambda: next(ticks)  # noqa: E731
    queries, exact, _ = session()
    assert LossMeter(64, clock).probe(queries, exact, 1, deadline_s=16.0).rows == 16  # 5 + 4 > 16 / 2


def test_a_probe_refuses_other_shapes_and_no_rows() -> None:
    queries, exact, _ = session()
    probe = LossMeter().probe(queries, exact, 1)
    assert probe.rows == 32
    with pytest.raises(ValueError, match="expected"):
        probe.loss(exact.rows(0, 299))
    with pytest.raises(ValueError, match="at least one row"):
        LossMeter().probe(Queries(queries.q[:0], queries.positions[:0], 1.0), exact, 1)
    with pytest.raises(ValueError, match="max_rows 0"):
        LossMeter(0)

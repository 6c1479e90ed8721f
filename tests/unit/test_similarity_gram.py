"""The sums over attention rows: distances, mass, and the bytes they are kept in."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from sgl_krul.errors import Corrupt
from sgl_krul.similarity import Similarity, Windows, attention_rows
from sgl_krul.similarity.gram import encoded_bytes
from tests.naive_attention import naive_distances, naive_mass, naive_rows, random_layers

LAYERS, TOKENS = 5, 123


def all_rows(*, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows float32 [L, n, n] of every position, and the positions."""
    q, k = random_layers(LAYERS, TOKENS, 6, 2, 16, seed=1, spread=spread)
    at = torch.arange(TOKENS)
    rows = [attention_rows(q[layer], k[layer], at, 0.25) for layer in range(LAYERS)]
    return torch.stack(rows), at


def some_state() -> Similarity:
    state = Similarity(LAYERS)
    state.add(*all_rows())
    state.drop(3)
    return state


def test_distances_are_those_of_the_matrices() -> None:
    rows, at = all_rows()
    state = Similarity(LAYERS)
    state.add(rows, at)
    expected = naive_distances(rows.double().numpy())
    np.testing.assert_allclose(state.distances(), expected, rtol=1e-9)
    assert state.rows == TOKENS
    assert state.check() == []


def test_distances_from_q_and_k() -> None:
    """From end to end: what float32 does to the rows is far below what tells layers apart."""
    q, k = random_layers(LAYERS, TOKENS, 6, 2, 16, seed=1)
    rows, at = all_rows()
    state = Similarity(LAYERS)
    state.add(rows, at)
    matrices = np.stack([naive_rows(q[layer], k[layer], range(TOKENS), 0.25) for layer in range(LAYERS)])
    np.testing.assert_allclose(state.distances(), naive_distances(matrices), rtol=1e-6)


def test_rows_longer_than_a_piece() -> None:
    """Rows are widened to float64 in pieces; the borders between two of them lose nothing."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand((3, 2, 5000), generator=generator)
    rows /= rows.sum(2, keepdim=True)
    at = torch.tensor([4095, 4999])
    rows[:, 0, 4096:] = 0
    state = Similarity(3)
    state.add(rows, at)
    np.testing.assert_allclose(state.distances(), naive_distances(rows.double().numpy()), rtol=1e-9)


def test_layers_that_are_the_same_have_no_distance() -> None:
    """Rounding may take the square below 0: it must come out as 0, or as noise of 1e-7 of the norm."""
    rows, at = all_rows(spread=4.0)
    rows[2] = rows[1]
    rows[3] = rows[1] * (1 + 1e-7)
    state = Similarity(LAYERS)
    state.add(rows, at)
    distances = state.distances()
    norm = np.sqrt(state.gram[1, 1])
    assert np.isfinite(distances).all()
    assert distances[1, 2] <= 1e-7 * norm
    assert distances[1, 3] <= 3e-7 * norm
    assert not distances.diagonal().any()
    assert (distances == distances.T).all()


def test_a_square_below_zero_is_no_distance() -> None:
    """What rounding may leave of two layers that are alike."""
    state = Similarity(2)
    state.rows = 10
    state.gram[:] = [[4.0, 4.0 * (1 + 1e-12)], [4.0 * (1 + 1e-12), 4.0]]
    assert not state.distances().any()


def test_what_lies_behind_a_row_is_not_read() -> None:
    rows, at = all_rows()
    clean, dirty = Similarity(LAYERS), Similarity(LAYERS)
    clean.add(rows, at)
    for position in range(TOKENS):
        rows[:, position, position + 1 :] = torch.nan
    dirty.add(rows, at)
    assert clean.encode() == dirty.encode()


@pytest.mark.parametrize("windows", list(Windows))
@pytest.mark.parametrize("history", [TOKENS, TOKENS + 7, 5 * TOKENS])
def test_mass_is_counted_key_by_key(windows: Windows, history: int) -> None:
    rows, at = all_rows()
    state = Similarity(LAYERS, windows)
    state.add(rows, at, history=history)
    given = history if windows is Windows.absolute else None
    expected = naive_mass(rows.double().numpy(), at.tolist(), given)
    np.testing.assert_allclose(state.mass(), expected, rtol=1e-9)


def test_both_windows_of_a_short_row() -> None:
    """One key is first and last at once and counts once; ten keys give two, eleven give four, of eleven."""
    for length, expected in ((1, 1.0), (2, 1.0), (3, 2 / 3), (10, 0.2), (11, 4 / 11), (30, 0.2)):
        state = Similarity(1)
        state.add(torch.full((1, 1, length), 1 / length), torch.tensor([length - 1]))
        assert state.mass()[0] == pytest.approx(expected, rel=1e-6), length


def test_absolute_windows_need_the_history() -> None:
    state = Similarity(1, Windows.absolute)
    with pytest.raises(ValueError, match="history"):
        state.add(torch.ones((1, 1, 1)), torch.tensor([0]))
    with pytest.raises(ValueError, match="history"):
        state.add(torch.full((1, 1, 2), 0.5), torch.tensor([1]), history=1)


def test_without_rows_nothing_is_said() -> None:
    """Zeros would say: all layers alike."""
    state = Similarity(3)
    state.drop(5)
    with pytest.raises(ValueError, match="no rows"):
        state.distances()
    with pytest.raises(ValueError, match="no rows"):
        state.mass()
    assert state.dropped_share == 1.0
    assert Similarity(3).dropped_share == 0.0


def test_dropped_rows_are_counted() -> None:
    state = some_state()
    assert (state.rows, state.dropped) == (TOKENS, 3)
    assert state.dropped_share == pytest.approx(3 / (TOKENS + 3))
    with pytest.raises(ValueError, match="dropped"):
        state.drop(-1)


def test_merge_adds_everything() -> None:
    rows, at = all_rows()
    whole, first, second = Similarity(LAYERS), Similarity(LAYERS), Similarity(LAYERS)
    whole.add(rows, at)
    first.add(rows[:, :41], at[:41])
    second.add(rows[:, 41:], at[41:])
    first.drop(2)
    second.drop(5)
    first.merge(second)
    assert (first.rows, first.dropped) == (TOKENS, 7)
    np.testing.assert_allclose(first.distances(), whole.distances(), rtol=1e-9)
    np.testing.assert_allclose(first.mass(), whole.mass(), rtol=1e-12)


@pytest.mark.parametrize("other", [Similarity(LAYERS + 1), Similarity(LAYERS, Windows.absolute)])
def test_merge_refuses_other_kinds(other: Similarity) -> None:
    with pytest.raises(ValueError, match="expected 5 layers"):
        Similarity(LAYERS).merge(other)


@pytest.mark.parametrize("layers", [0, 4097])
def test_layers_out_of_range(layers: int) -> None:
    with pytest.raises(ValueError, match="layers"):
        Similarity(layers)


@pytest.mark.parametrize(
    ("rows", "at", "named"),
    [
        (torch.ones((2, 1, 4)), torch.tensor([3]), "rows"),
        (torch.ones((3, 4)), torch.tensor([3]), "rows"),
        (torch.ones((3, 1, 4), dtype=torch.float64), torch.tensor([3]), "rows"),
        (torch.ones((3, 1, 4)), torch.tensor([4]), "positions"),
        (torch.ones((3, 1, 4)), torch.tensor([-1]), "positions"),
        (torch.ones((3, 1, 4)), torch.tensor([1, 2]), "positions"),
        (torch.ones((3, 1, 4)), torch.tensor([1.0]), "positions"),
        (torch.full((3, 1, 4), torch.nan), torch.tensor([3]), "finite"),
        (torch.full((3, 1, 4), torch.inf), torch.tensor([3]), "finite"),
    ],
)
def test_rows_that_do_not_fit_change_nothing(rows: torch.Tensor, at: torch.Tensor, named: str) -> None:
    state = Similarity(3)
    with pytest.raises(ValueError, match=named):
        state.add(rows, at)
    assert state.encode() == Similarity(3).encode()


# -- bytes --


@pytest.mark.parametrize("windows", list(Windows))
def test_round_trip(windows: Windows) -> None:
    state = Similarity(LAYERS, windows)
    state.add(*all_rows(), history=TOKENS)
    state.drop(7)
    data = state.encode()
    again = Similarity.decode(data)
    assert len(data) == encoded_bytes(LAYERS)
    assert again.encode() == data
    assert (again.layers, again.windows, again.rows, again.dropped) == (LAYERS, windows, TOKENS, 7)
    assert np.array_equal(again.distances(), state.distances())
    assert np.array_equal(again.mass(), state.mass())


def test_a_decoded_state_goes_on() -> None:
    rows, at = all_rows()
    whole, first = Similarity(LAYERS), Similarity(LAYERS)
    whole.add(rows, at)
    first.add(rows[:, :50], at[:50])
    again = Similarity.decode(first.encode())
    again.add(rows[:, 50:], at[50:])
    np.testing.assert_allclose(again.distances(), whole.distances(), rtol=1e-9)


def test_a_state_without_rows_is_kept_too() -> None:
    state = Similarity(2)
    state.drop(4)
    assert Similarity.decode(state.encode()).dropped == 4


def test_every_truncation_is_found() -> None:
    data = some_state().encode()
    for length in range(len(data)):
        with pytest.raises(Corrupt):
            Similarity.decode(data[:length])
    with pytest.raises(Corrupt, match="length"):
        Similarity.decode(data + b"\0")


def test_every_flipped_bit_is_found() -> None:
    data = some_state().encode()
    for bit in range(8 * len(data)):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            Similarity.decode(bytes(bad))


def sealed(state: Similarity, change: Callable[[bytearray], None]) -> bytes:
    """The state's bytes, changed, under a checksum that is right."""
    body = bytearray(state.encode()[:-8])
    change(body)
    return bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(body)))


def test_another_version_is_told_from_damage() -> None:
    def newer(body: bytearray) -> None:
        body[4] = 2

    with pytest.raises(Corrupt, match="version: similarity version 2"):
        Similarity.decode(sealed(some_state(), newer))


def _put(offset: int, form: str, value: Any) -> Callable[[bytearray], None]:
    def change(body: bytearray) -> None:
        struct.pack_into(form, body, offset, value)

    return change


GRAM = 28  # where the upper triangle begins
FIRST = GRAM + 8 * LAYERS * (LAYERS + 1) // 2


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_put(0, "<4s", b"KRSN"), id="magic"),
        pytest.param(_put(6, "<H", 2), id="windows"),
        pytest.param(_put(8, "<I", 0), id="no layers"),
        pytest.param(_put(8, "<I", LAYERS + 1), id="more layers than bytes"),
        pytest.param(_put(8, "<I", 0xFFFFFFFF), id="layers beyond all bounds"),
        pytest.param(_put(12, "<Q", TOKENS // 200), id="fewer rows than the sums need"),
        pytest.param(_put(12, "<Q", 1 << 49), id="rows beyond all bounds"),
        pytest.param(_put(20, "<Q", (1 << 64) - 1), id="dropped beyond all bounds"),
        pytest.param(_put(GRAM, "<d", float("nan")), id="NaN"),
        pytest.param(_put(GRAM + 8, "<d", float("inf")), id="infinite"),
        pytest.param(_put(GRAM + 8, "<d", -0.5), id="negative"),
        pytest.param(_put(GRAM, "<d", TOKENS * 1.5), id="norm above the rows"),
        pytest.param(_put(GRAM, "<d", 1e-3), id="nearer to another layer than to itself"),
        pytest.param(_put(FIRST, "<d", -1e-9), id="negative mass"),
        pytest.param(_put(FIRST + 8, "<d", float("nan")), id="NaN mass"),
        pytest.param(_put(FIRST, "<d", TOKENS * 1.01), id="mass above the rows"),
    ],
)
def test_numbers_that_no_rows_give_are_refused(change: Callable[[bytearray], None]) -> None:
    with pytest.raises(Corrupt, match="length"):
        Similarity.decode(sealed(some_state(), change))


def test_a_broken_state_is_not_written() -> None:
    state = some_state()
    state.gram[0, 1] += 1e-3
    assert state.check() == ["gram is not symmetric"]
    with pytest.raises(ValueError, match="not symmetric"):
        state.encode()

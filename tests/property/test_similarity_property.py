"""Any split of a session gives the same sums: turns, chunks, jobs, in any order, also through the bytes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_krul.errors import Corrupt
from sgl_krul.similarity import Similarity, Windows, attention_rows, sampled_positions
from tests.naive_attention import naive_distances, naive_mass, naive_rows, random_layers

SHAPES = st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 6), (9, 3)])  # heads, KV heads


@given(
    namespace=st.text(max_size=20),
    session=st.text(max_size=20),
    start=st.integers(0, 10_000_000),
    cuts=st.lists(st.integers(0, 5000), max_size=8),
    per_thousand=st.integers(1, 1000),
)
def test_any_split_samples_the_same(
    namespace: str, session: str, start: int, cuts: list[int], per_thousand: int
) -> None:
    edges = [start, *sorted(start + cut for cut in cuts), start + 5000]
    whole = sampled_positions(namespace, session, start, edges[-1], per_thousand)
    parts = [sampled_positions(namespace, session, low, high, per_thousand) for low, high in pairwise(edges)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert (np.diff(whole) > 0).all()
    assert abs(len(whole) - 5 * per_thousand) <= 2


@given(
    tokens=st.integers(2, 60),
    heads=SHAPES,
    layers=st.integers(1, 5),
    windows=st.sampled_from(list(Windows)),
    tile_bytes=st.sampled_from([1, 200, 1000, 1 << 20]),
    data=st.data(),
)
@settings(max_examples=60)
def test_sums_equal_the_materialised_matrices(
    tokens: int,
    heads: tuple[int, int],
    layers: int,
    windows: Windows,
    tile_bytes: int,
    data: st.DataObject,
) -> None:
    """Turns end anywhere; the rows of a turn come in any split and order, with the keys up to its end."""
    q, k = random_layers(layers, tokens, *heads, 8, seed=tokens)
    ends = sorted({*data.draw(st.sets(st.integers(1, tokens), max_size=4), "turns"), tokens})
    state, start, matrices = Similarity(layers, windows), 0, []
    exact_mass = np.zeros(layers)
    for end in ends:
        split = data.draw(st.permutations(range(start, end)), "rows of the turn")
        cut = data.draw(st.integers(0, len(split)), "cut")
        turn = Similarity(layers, windows)
        for part in (split[:cut], split[cut:]):
            at = torch.tensor(part, dtype=torch.int64)
            rows = [
                attention_rows(q[layer, part], k[layer, :end], at, 0.4, tile_bytes=tile_bytes)
                for layer in range(layers)
            ]
            turn.add(torch.stack(rows), at, history=end)
        state = Similarity.decode(state.encode())  # as a pause and a resume between two turns
        state.merge(turn)
        exact = np.stack(
            [naive_rows(q[layer, start:end], k[layer], range(start, end), 0.4) for layer in range(layers)]
        )
        matrices.append(exact)
        history = end if windows is Windows.absolute else None
        exact_mass += naive_mass(exact, range(start, end), history) * (end - start)
        start = end
    whole = np.concatenate(matrices, axis=1)
    norm = float(np.sqrt(state.gram.max()))
    assert state.rows == tokens
    np.testing.assert_allclose(state.distances(), naive_distances(whole), rtol=1e-6, atol=1e-6 * norm)
    np.testing.assert_allclose(state.mass(), exact_mass / tokens, rtol=1e-6)


@st.composite
def states(draw: st.DrawFn) -> Similarity:
    """A state of some rows of any attention."""
    layers, rows, keys = (draw(st.integers(1, top)) for top in (6, 4, 12))
    values = np.random.default_rng(draw(st.integers(0, 1 << 16))).exponential(size=(layers, rows, keys))
    values = np.tril(values, keys - rows)
    values /= values.sum(2, keepdims=True) + 1e-30
    state = Similarity(layers, draw(st.sampled_from(list(Windows))))
    if keys >= rows:
        at = torch.arange(keys - rows, keys)
        state.add(torch.from_numpy(values.astype(np.float32)), at, history=keys)
    state.drop(draw(st.integers(0, 1 << 40)))
    return state


@given(states())
def test_bytes_round_trip(state: Similarity) -> None:
    again = Similarity.decode(state.encode())
    assert again.encode() == state.encode()
    assert (again.windows, again.rows, again.dropped) == (state.windows, state.rows, state.dropped)
    assert np.array_equal(again.gram, state.gram)


@given(states(), st.data())
def test_damaged_bytes_are_corrupt(state: Similarity, data: st.DataObject) -> None:
    good = state.encode()
    bad = bytearray(good)
    start = data.draw(st.integers(0, len(good)))
    patch = data.draw(st.binary(max_size=16))
    bad[start : start + len(patch)] = patch
    if bytes(bad) == good:
        bad = bad[:-1]
    with pytest.raises(Corrupt):
        Similarity.decode(bytes(bad))


@given(st.binary(max_size=200))
def test_any_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        Similarity.decode(data)

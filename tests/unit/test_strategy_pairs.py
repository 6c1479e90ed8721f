"""I-R layers, and the three ways to pair layers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from sgl_krul.strategy import (
    Method,
    Pair,
    Wish,
    choose_pairs,
    fixed_pairs,
    greedy_pairs,
    ir_layers,
    pair_count,
    random_pairs,
)

# Attention mass on the first and last 10%, measured on SmolLM2 with relative windows.
SMOLLM2 = np.array(
    [
        *(0.37, 0.67, 0.61, 0.48, 0.42, 0.45, 0.47, 0.41, 0.43, 0.60, 0.63, 0.82, 0.85, 0.93, 0.80),
        *(0.79, 0.89, 0.84, 0.91, 0.89, 0.80, 0.79, 0.84, 0.78, 0.77, 0.93, 0.86, 0.88, 0.76, 0.79),
    ]
)


def apart(layers: int, **near: float) -> NDArray[np.float64]:
    """Distances of 10, but for some: `_1_3=.5` is that of layers 1 and 3."""
    distances = np.full((layers, layers), 10.0)
    np.fill_diagonal(distances, 0)
    for name, distance in near.items():
        i, j = (int(part) for part in name.split("_")[1:])
        distances[i, j] = distances[j, i] = distance
    return distances


class TestIrLayers:
    def test_the_measured_profile_has_23(self) -> None:
        assert ir_layers(SMOLLM2, 0.5) == (1, 2, *range(9, 30))

    def test_gamma_itself_is_enough(self) -> None:
        assert ir_layers(np.array([0.5, 0.4999]), 0.5) == (0,)

    def test_gamma_0_takes_all_and_gamma_above_1_none(self) -> None:
        assert ir_layers(SMOLLM2, 0) == tuple(range(30))
        assert ir_layers(SMOLLM2, 1.01) == ()

    def test_a_history_without_rows_has_none(self) -> None:
        assert ir_layers(np.zeros(4), 0.5) == ()

    @pytest.mark.parametrize(
        "mass", [np.zeros((2, 2)), np.array([np.nan]), np.array([np.inf]), np.array([-1.0])]
    )
    def test_statistics_that_are_none_are_refused(self, mass: NDArray[np.float64]) -> None:
        with pytest.raises(ValueError, match="mass"):
            ir_layers(mass, 0.5)

    @pytest.mark.parametrize("gamma", [-0.1, math.nan])
    def test_gamma_is_a_share(self, gamma: float) -> None:
        with pytest.raises(ValueError, match="gamma"):
            ir_layers(SMOLLM2, gamma)


class TestPairCount:
    @pytest.mark.parametrize(
        ("layers", "share", "count"),
        [
            (30, 0.0, 0),
            (30, 0.1, 3),
            (30, 0.25, 8),
            (30, 0.5, 15),
            (24, 0.1, 2),
            (10, 0.25, 3),
            (7, 0.5, 3),
            (1, 0.5, 0),
        ],
    )
    def test_share_of_the_layers_that_give_up_their_kv(self, layers: int, share: float, count: int) -> None:
        assert pair_count(layers, share) == count

    @pytest.mark.parametrize("share", [-0.1, 0.51, math.nan])
    def test_at_most_half(self, share: float) -> None:
        with pytest.raises(ValueError, match="share"):
            pair_count(30, share)

    def test_no_layers(self) -> None:
        with pytest.raises(ValueError, match="layers"):
            pair_count(0, 0.5)


class TestGreedy:
    def test_the_closest_first_and_no_layer_twice(self) -> None:
        # 1-2 takes both from 0-1 and 2-3, although these two together are closer than 1-2 and 0-3.
        distances = apart(4, _1_2=1, _0_1=1.1, _2_3=1.1, _0_3=9)
        assert greedy_pairs(distances, range(4), 2) == (Pair(1, 2, 1.0), Pair(0, 3, 9.0))

    def test_layers_far_apart_may_be_a_pair(self) -> None:
        assert greedy_pairs(apart(30, _2_28=0.5), range(30), 1) == (Pair(2, 28, 0.5),)

    def test_only_candidates(self) -> None:
        assert greedy_pairs(apart(5, _1_2=1, _2_4=2), [4, 2, 0], 5) == (Pair(2, 4, 2.0),)

    def test_ties_go_to_the_lower_layers(self) -> None:
        assert [pair[:2] for pair in greedy_pairs(apart(6), range(6), 3)] == [(0, 1), (2, 3), (4, 5)]
        assert greedy_pairs(apart(4, _1_3=1, _1_2=1), range(4), 1) == (Pair(1, 2, 1.0),)

    def test_the_order_of_candidates_is_nothing(self) -> None:
        assert greedy_pairs(apart(6), [5, 1, 1, 3, 0], 2) == greedy_pairs(apart(6), [0, 1, 3, 5], 2)

    def test_none_are_asked_for_or_none_are_there(self) -> None:
        assert greedy_pairs(apart(4), range(4), 0) == ()
        assert greedy_pairs(apart(4), [], 2) == ()
        assert greedy_pairs(apart(4), [3], 2) == ()

    def test_what_is_not_looked_at_may_be_anything(self) -> None:
        distances = apart(3, _0_1=1)
        distances[2, :] = distances[:, 2] = math.nan
        assert greedy_pairs(distances, [0, 1], 1) == (Pair(0, 1, 1.0),)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
    def test_distances_that_are_none_are_refused(self, bad: float) -> None:
        with pytest.raises(ValueError, match="distances"):
            greedy_pairs(apart(4, _1_2=bad), range(4), 1)

    def test_shapes_and_ranges(self) -> None:
        with pytest.raises(ValueError, match="distances"):
            greedy_pairs(np.zeros((3, 4)), [0], 1)
        with pytest.raises(ValueError, match="candidates"):
            greedy_pairs(apart(3), [3], 1)
        with pytest.raises(ValueError, match="candidates"):
            greedy_pairs(apart(3), [-1, 2], 1)
        with pytest.raises(ValueError, match="count"):
            greedy_pairs(apart(3), [1], -1)


class TestFixedAndRandom:
    def test_minicache_goes_from_the_middle_up(self) -> None:
        assert fixed_pairs(30, 3) == (Pair(15, 16), Pair(17, 18), Pair(19, 20))
        assert fixed_pairs(32, 8)[-1] == Pair(30, 31)

    def test_more_than_the_upper_half_has_come_from_below(self) -> None:
        assert [pair.owner for pair in fixed_pairs(30, 15)] == [*range(15, 29, 2), *range(13, 0, -2)]
        assert [pair.owner for pair in fixed_pairs(8, 4)] == [4, 6, 2, 0]

    def test_the_start_may_be_given(self) -> None:
        assert fixed_pairs(10, 2, start=7) == (Pair(7, 8), Pair(5, 6))
        for start in (-1, 10):
            with pytest.raises(ValueError, match="start"):
                fixed_pairs(10, 2, start)

    def test_random_pairs_are_those_of_the_seed(self) -> None:
        # Pinned: a figure that was published under a seed must be made again under it.
        assert random_pairs(8, 4, 1) == (Pair(0, 3), Pair(1, 7), Pair(5, 6), Pair(2, 4))
        assert len({random_pairs(30, 8, seed) for seed in range(20)}) == 20
        assert random_pairs(30, 8, 5) == random_pairs(30, 15, 5)[:8]

    def test_random_pairs_reach_every_pair(self) -> None:
        found = {pair for seed in range(300) for pair in random_pairs(5, 2, seed)}
        assert found == {Pair(i, j) for i in range(5) for j in range(i + 1, 5)}

    @pytest.mark.parametrize("layers", [1, 2, 7, 30])
    def test_no_layer_is_in_two(self, layers: int) -> None:
        for pairs in (fixed_pairs(layers, 99), random_pairs(layers, 99, 3)):
            used = [layer for pair in pairs for layer in pair[:2]]
            assert len(set(used)) == len(used)
            assert all(0 <= pair.owner < pair.partner < layers for pair in pairs)
        assert len(random_pairs(layers, 99, 3)) == layers // 2

    def test_counts_and_layers(self) -> None:
        with pytest.raises(ValueError, match="count"):
            fixed_pairs(4, -1)
        with pytest.raises(ValueError, match="count"):
            random_pairs(4, -1, 0)
        with pytest.raises(ValueError, match="start"):
            fixed_pairs(0, 1)
        with pytest.raises(ValueError, match="layers"):
            random_pairs(0, 1, 0)


class TestChosen:
    mass = np.array([0.9, 0.2, 0.8, 0.7, 0.6, 0.9])

    def test_krul_pairs_the_closest_i_r_layers(self) -> None:
        distances = apart(6, _0_1=0.1, _2_5=0.5, _3_4=0.7)
        wish = Wish(Method.krul, share=0.5)
        assert choose_pairs(wish, self.mass, distances) == (Pair(2, 5, 0.5), Pair(3, 4, 0.7))
        assert choose_pairs(Wish(Method.krul, share=0.1), self.mass, distances) == (Pair(2, 5, 0.5),)
        assert choose_pairs(Wish(Method.auto), self.mass, distances) == choose_pairs(
            wish, self.mass, distances
        )

    def test_without_gamma_all_layers_may_be_paired(self) -> None:
        distances = apart(6, _0_1=0.1)
        assert choose_pairs(Wish(Method.krul, gamma=0, share=0.17), self.mass, distances) == (
            Pair(0, 1, 0.1),
        )

    def test_fixed_and_random_know_no_session(self) -> None:
        other = self.mass[::-1].copy()
        for method, pairs in (
            (Method.fixed, (Pair(3, 4), Pair(1, 2))),
            (Method.random, random_pairs(6, 2, 4)),
        ):
            wish = Wish(method, share=0.33, seed=4)
            assert choose_pairs(wish, self.mass, apart(6)) == pairs
            assert choose_pairs(wish, other, apart(6, _0_5=0.1)) == pairs

    @pytest.mark.parametrize("method", [Method.exact, Method.int8, Method.int4])
    def test_the_others_have_none(self, method: Method) -> None:
        assert choose_pairs(Wish(method), self.mass, apart(6)) == ()

    def test_statistics_of_one_model(self) -> None:
        with pytest.raises(ValueError, match="distances"):
            choose_pairs(Wish(Method.krul), self.mass, apart(5))

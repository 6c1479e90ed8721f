"""Which rows are sampled: the same ones whatever the split, one in every stratum."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_krul.similarity import sampled_positions


def test_the_choice_is_pinned() -> None:
    """Sessions paused by an older version go on with the same rows."""
    assert sampled_positions("space", "digest", 0, 1000, 10).tolist() == [
        73,
        103,
        291,
        339,
        498,
        540,
        671,
        767,
        869,
        967,
    ]
    far = 1 << 30
    assert (sampled_positions("space", "digest", far, far + 250, 16) - far).tolist() == [24, 66, 140, 222]


@pytest.mark.parametrize("per_thousand", [1, 7, 8, 12, 16, 64, 333, 501, 999, 1000])
def test_every_stratum_gives_one(per_thousand: int) -> None:
    positions = sampled_positions("space", "digest", 0, 20_000, per_thousand)
    assert positions.dtype == np.int64
    assert len(positions) == 20 * per_thousand
    edges = np.arange(20 * per_thousand + 1) * 1000 // per_thousand
    assert (edges[:-1] <= positions).all()
    assert (positions < edges[1:]).all()


def test_places_within_a_stratum_are_even() -> None:
    offsets = sampled_positions("space", "digest", 0, 1_000_000, 10) % 100
    counts = np.bincount(offsets // 10, minlength=10)
    assert len(offsets) == 10_000
    assert counts.min() > 850
    assert counts.max() < 1150


@pytest.mark.parametrize("other", [("space2", "digest"), ("space", "digest2"), ("spacedi", "gest")])
def test_namespace_and_session_choose(other: tuple[str, str]) -> None:
    ours = sampled_positions("space", "digest", 0, 10_000, 10)
    theirs = sampled_positions(*other, 0, 10_000, 10)
    assert np.intersect1d(ours, theirs).size < 10


def test_an_empty_range_has_none() -> None:
    assert sampled_positions("space", "digest", 500, 500, 1000).tolist() == []


@pytest.mark.parametrize(
    ("start", "end", "per_thousand", "named"),
    [(-1, 5, 10, "positions"), (6, 5, 10, "positions"), (0, 5, 0, "per_thousand"), (0, 5, 1001, "per_tho")],
)
def test_what_is_no_range_is_refused(start: int, end: int, per_thousand: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        sampled_positions("space", "digest", start, end, per_thousand)

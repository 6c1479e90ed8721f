"""The worker: the sums it gives, what it drops and counts, and that nobody waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event

import numpy as np
import pytest
import torch

from sgl_krul.similarity import Estimator, KeySource, RowCounts, RowJob, Similarity, Windows
from tests.naive_attention import Keys, keys_of, naive_distances, naive_mass, naive_rows, random_layers

LAYERS, TOKENS = 4, 300
BUDGET = 1 << 20
DEADLINE_S = 60.0


@pytest.fixture
def estimator() -> Iterator[Estimator]:
    """With room for every job here. At the end all rows are accounted for."""
    estimator = Estimator(BUDGET)
    yield estimator
    assert estimator.drain(DEADLINE_S)
    assert estimator.check() == []
    estimator.close()


class Sampled:
    """Queries and keys of one session."""

    def __init__(self, at: list[int], *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        q, k = random_layers(LAYERS, TOKENS, 6, 2, 16, seed=seed)
        self.at = at
        self.q, self.k = q[:, at].to(dtype), k.to(dtype)
        self.answers: list[Similarity] = []

    def job(self, keys: KeySource | None = None, done: Callable[[Similarity], None] | None = None) -> RowJob:
        return RowJob(
            self.q,
            torch.tensor(self.at, dtype=torch.int64),
            0.25,
            TOKENS,
            keys_of(self.k) if keys is None else keys,
            self.answers.append if done is None else done,
        )

    def matrices(self) -> np.ndarray:
        rows = [naive_rows(q, k, self.at, 0.25) for q, k in zip(self.q, self.k, strict=True)]
        return np.stack(rows)


def expect(answer: Similarity, sampled: Sampled) -> None:
    """The sums are those of the definition."""
    assert (answer.rows, answer.dropped) == (len(sampled.at), 0)
    np.testing.assert_allclose(answer.distances(), naive_distances(sampled.matrices()), rtol=1e-5)
    np.testing.assert_allclose(answer.mass(), naive_mass(sampled.matrices(), sampled.at), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sums_of_a_job(estimator: Estimator, dtype: torch.dtype) -> None:
    sampled = Sampled([0, 41, 123, 299], dtype=dtype)
    assert estimator.submit(sampled.job())
    assert estimator.drain(DEADLINE_S)
    expect(sampled.answers[0], sampled)
    assert estimator.counts == RowCounts(planned=4, seen=4, dropped=0)
    assert estimator.counts.dropped_share == 0.0
    assert estimator.busy_s > 0
    assert estimator.pending_rows == 0


def test_a_job_larger_than_the_area_is_cut() -> None:
    """One set of rows is held at a time: a long job asks for the keys of all layers again."""
    estimator = Estimator(208_000)  # room for the queries, and for ten rows of all layers
    sampled = Sampled(list(range(0, TOKENS, 3)))
    keys = keys_of(sampled.k)
    assert estimator.submit(sampled.job(keys))
    assert estimator.drain(DEADLINE_S)
    assert estimator.check() == []
    (answer,) = sampled.answers
    expect(answer, sampled)
    assert len(keys.asked) > LAYERS
    assert keys.asked == list(range(LAYERS)) * (len(keys.asked) // LAYERS)
    estimator.close()


def test_jobs_of_several_sessions(estimator: Estimator) -> None:
    sessions = [Sampled([7, 200 + seed], seed=seed) for seed in range(5)]
    for sampled in sessions:
        assert estimator.submit(sampled.job())
    assert estimator.drain(DEADLINE_S)
    for sampled in sessions:
        expect(sampled.answers[0], sampled)


def test_absolute_windows_and_a_longer_history() -> None:
    estimator = Estimator(BUDGET, windows=Windows.absolute)
    sampled = Sampled([0, 41, 123, 299])
    assert estimator.submit(sampled.job())
    assert estimator.drain(DEADLINE_S)
    estimator.close()
    expected = naive_mass(sampled.matrices(), sampled.at, TOKENS)
    assert sampled.answers[0].windows is Windows.absolute
    np.testing.assert_allclose(sampled.answers[0].mass(), expected, rtol=1e-5)


@pytest.mark.parametrize("gone", [0, LAYERS - 1])
def test_keys_that_are_gone_drop_the_rows(estimator: Estimator, gone: int) -> None:
    sampled = Sampled([41, 123])
    keys = keys_of(sampled.k)
    keys = Keys({layer: k for layer, k in keys.layers.items() if layer != gone})
    assert estimator.submit(sampled.job(keys))
    assert estimator.drain(DEADLINE_S)
    (answer,) = sampled.answers
    assert (answer.rows, answer.dropped) == (0, 2)
    assert not answer.gram.any()
    assert keys.asked == list(range(gone + 1))
    assert estimator.counts == RowCounts(2, 0, 2)
    assert estimator.counts.dropped_share == 1.0


def test_rows_before_the_keys_went_are_kept() -> None:
    estimator = Estimator(4 * 4 * LAYERS * TOKENS)  # an area of one row
    sampled = Sampled([100, 200, 299])

    class Leaving(Keys):
        @contextmanager
        def keys(self, layer: int) -> Iterator[torch.Tensor | None]:
            with super().keys(layer) as keys:
                yield keys if len(self.asked) <= 2 * LAYERS else None

    assert estimator.submit(sampled.job(Leaving(dict(enumerate(sampled.k)))))
    assert estimator.drain(DEADLINE_S)
    estimator.close()
    (answer,) = sampled.answers
    assert (answer.rows, answer.dropped) == (2, 1)
    np.testing.assert_allclose(answer.distances(), naive_distances(sampled.matrices()[:, :2]), rtol=1e-5)
    assert estimator.counts == RowCounts(3, 2, 1)


def test_keys_too_few_or_broken_drop_the_rows(estimator: Estimator, caplog: pytest.LogCaptureFixture) -> None:
    """A bug of a key source is logged and counted, and the next job is served."""
    short, broken, not_finite, good = (Sampled([41, 123]) for _ in range(4))

    class Broken:
        @contextmanager
        def keys(self, layer: int) -> Iterator[torch.Tensor | None]:
            raise RuntimeError("no such layer here")
            yield None

    not_finite.k[1, 50] = torch.nan
    assert estimator.submit(short.job(keys_of(short.k[:, :123])))
    assert estimator.submit(broken.job(Broken()))
    assert estimator.submit(not_finite.job())
    assert estimator.submit(good.job())
    assert estimator.drain(DEADLINE_S)
    assert [sampled.answers[0].dropped for sampled in (short, broken, not_finite)] == [2, 2, 2]
    expect(good.answers[0], good)
    assert "no such layer here" in caplog.text
    assert "whole context" in caplog.text
    assert "not finite" in caplog.text


def test_a_taker_that_fails_ends_nothing(estimator: Estimator, caplog: pytest.LogCaptureFixture) -> None:
    def taker(sums: Similarity) -> None:
        raise RuntimeError("nobody at home")

    sampled, good = Sampled([41]), Sampled([41])
    assert estimator.submit(sampled.job(done=taker))
    assert estimator.submit(good.job())
    assert estimator.drain(DEADLINE_S)
    expect(good.answers[0], good)
    assert "nobody at home" in caplog.text


class Held(Keys):
    """Keys that come when `go` is set."""

    def __init__(self, k: torch.Tensor) -> None:
        super().__init__(dict(enumerate(k)))
        self.asked_once, self.go = Event(), Event()

    @contextmanager
    def keys(self, layer: int) -> Iterator[torch.Tensor | None]:
        self.asked_once.set()
        assert self.go.wait(DEADLINE_S)
        with super().keys(layer) as keys:
            yield keys


def test_over_the_budget_is_refused_at_once_and_counted(estimator: Estimator) -> None:
    first, waiting = Sampled([41, 123]), Sampled([200])
    keys = Held(first.k)
    assert estimator.submit(first.job(keys))
    assert keys.asked_once.wait(DEADLINE_S)
    accepted = 0
    while estimator.submit(waiting.job()):
        accepted += 1
        assert accepted < 10_000
        assert estimator.check() == []
    assert accepted > 0
    assert (accepted + 1) * waiting.job().nbytes + first.job().nbytes > 3 * BUDGET // 4
    assert estimator.counts == RowCounts(3 + accepted, 0, 1)
    assert estimator.pending_rows == 2 + accepted
    assert not estimator.drain(0.0)
    assert waiting.answers == []
    keys.go.set()
    assert estimator.drain(DEADLINE_S)
    assert len(waiting.answers) == accepted
    assert estimator.counts == RowCounts(3 + accepted, 2 + accepted, 1)
    assert estimator.submit(waiting.job())  # there is room again


def test_a_context_too_long_for_the_area_is_refused() -> None:
    estimator = Estimator(4 * 4 * LAYERS * TOKENS - 4)
    assert not estimator.submit(Sampled([41, TOKENS - 1]).job())
    assert estimator.counts == RowCounts(2, 0, 2)
    assert estimator.submit(Sampled([41, TOKENS - 2]).job())
    assert estimator.drain(DEADLINE_S)
    estimator.close()


def test_rows_dropped_by_the_caller_count(estimator: Estimator) -> None:
    estimator.drop(3)
    assert estimator.counts == RowCounts(3, 0, 3)
    with pytest.raises(ValueError, match="dropped"):
        estimator.drop(-1)


def test_close_drops_what_waits_and_ends_what_runs() -> None:
    """Every accepted job is answered, exactly once, and its rows are counted."""
    estimator = Estimator(BUDGET)
    running, queued = Sampled([41, 123]), Sampled([200])
    keys = Held(running.k)
    assert estimator.submit(running.job(keys))
    assert keys.asked_once.wait(DEADLINE_S)
    assert estimator.submit(queued.job())

    def let_go(sums: Similarity) -> None:
        queued.answers.append(sums)
        keys.go.set()  # `close` has cancelled what was queued, and now waits for the running job

    assert estimator.submit(queued.job(done=let_go))
    estimator.close()
    assert [answer.dropped for answer in running.answers] == [2]
    assert [answer.dropped for answer in queued.answers] == [1, 1]
    assert estimator.counts == RowCounts(4, 0, 4)
    assert estimator.check() == []
    assert not estimator.submit(queued.job())
    assert estimator.counts == RowCounts(5, 0, 5)
    estimator.close()


def test_a_job_without_rows(estimator: Estimator) -> None:
    sampled = Sampled([])
    assert estimator.submit(sampled.job())
    assert estimator.drain(DEADLINE_S)
    assert [(answer.rows, answer.dropped) for answer in sampled.answers] == [(0, 0)]


def test_the_clock_is_the_one_given() -> None:
    ticks = iter(range(100))
    estimator = Estimator(BUDGET, clock=lambda: float(next(ticks)))
    assert estimator.submit(Sampled([41]).job())
    assert estimator.drain(DEADLINE_S)
    assert estimator.busy_s == 1.0
    estimator.close()


def test_submit_returns_while_the_worker_is_busy(estimator: Estimator) -> None:
    first, second = Sampled([41]), Sampled([41])
    keys = Held(first.k)
    assert estimator.submit(first.job(keys))
    assert keys.asked_once.wait(DEADLINE_S)
    start = time.monotonic()
    assert estimator.submit(second.job())
    assert time.monotonic() - start < DEADLINE_S / 2
    assert second.answers == []
    keys.go.set()


@pytest.mark.parametrize(
    ("q", "at", "history", "named"),
    [
        (torch.zeros((2, 1, 4)), [3], 10, "q "),
        (torch.zeros((2, 1, 4, 8), dtype=torch.int32), [3], 10, "q "),
        (torch.zeros((0, 1, 4, 8)), [3], 10, "q "),
        (torch.zeros((2, 1, 4, 8)), [3, 4], 10, "positions"),
        (torch.zeros((2, 2, 4, 8)), [4, 3], 10, "ascend"),
        (torch.zeros((2, 2, 4, 8)), [3, 3], 10, "ascend"),
        (torch.zeros((2, 2, 4, 8)), [-1, 3], 10, "ascend"),
        (torch.zeros((2, 1, 4, 8)), [3], 3, "history"),
    ],
)
def test_jobs_that_do_not_fit_are_refused(
    estimator: Estimator, q: torch.Tensor, at: list[int], history: int, named: str
) -> None:
    job = RowJob(q, torch.tensor(at), 1.0, history, Keys({}), lambda sums: None)
    with pytest.raises(ValueError, match=named):
        estimator.submit(job)
    assert estimator.counts == RowCounts(0, 0, 0)


@pytest.mark.parametrize("bad", [{"budget_bytes": 0}, {"tile_bytes": 0}, {"nice": -1}, {"nice": 20}])
def test_settings_out_of_range(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Estimator(**{"budget_bytes": BUDGET, **bad})  # type: ignore[arg-type]

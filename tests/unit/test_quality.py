"""The layer plan of a session that is paused: within its budget, from its own queries, else exactly."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sgl_krul.config import QualityConfig, load_config
from sgl_krul.errors import ConfigError
from sgl_krul.service.estimates import Evidence, NoEstimates
from sgl_krul.service.quality import QualityPlanner
from sgl_krul.similarity import KeptQueries, Similarity
from sgl_krul.strategy import Plan, loss_budget
from tests.coded import LAYERS, LAYOUT, NumberPages, snapshot
from tests.sessions import CHUNK_TOKENS, chat

SESSION = chat(400)
HEADS = 4
ROWS = 16


def queries(rows: int, tokens: int = 400) -> KeptQueries:
    """Of a model with twice as many heads as the KV has."""
    rng = np.random.default_rng(7)
    q = rng.standard_normal((LAYERS, rows, HEADS, LAYOUT.head_dim)).astype(np.float32)
    return KeptQueries(np.linspace(20, tokens - 1, rows).astype(np.int64), q)


def alike(*pairs: tuple[int, int]) -> Similarity:
    """An estimate by which these layers attend nearly alike, and all are I-R."""
    rng = np.random.default_rng(3)
    sums = Similarity(LAYERS)
    rows = torch.from_numpy(rng.random((LAYERS, 1, 40)).astype(np.float32))
    for one, other in pairs:
        rows[other] = rows[one]
    rows[:, :, 4:-4] *= 0.01
    sums.add(rows / rows.sum(-1, keepdim=True), torch.tensor([39]))
    return sums


@dataclass
class Told(NoEstimates):
    """Estimates that know one thing."""

    found: Evidence | None

    def evidence(self, digest: str, tokens: int) -> Evidence | None:
        assert digest == SESSION.digest
        return self.found


def make(
    found: Evidence | None, clock: Callable[[], float] = time.monotonic, **config: Any
) -> tuple[Plan | None, NumberPages]:
    source = NumberPages(SESSION.hashes)
    planner = QualityPlanner(QualityConfig(**config), LAYOUT, Told(found), clock)
    return planner.plan(snapshot(SESSION), source, CHUNK_TOKENS), source


def planned(**config: Any) -> Plan:
    similarity = config.pop("similarity", alike((0, 3), (1, 4)))
    plan, _ = make(Evidence(queries(ROWS), 0.25, similarity), **config)
    assert plan is not None
    return plan


@pytest.mark.parametrize("method", ["auto", "krul", "fixed", "int8", "int4"])
@pytest.mark.parametrize("level", ["high", "balanced", "small", 1e-5, 0.5])
def test_a_plan_keeps_its_budget(method: str, level: str | float) -> None:
    plan = planned(method=method, level=level)
    assert plan.loss <= loss_budget(level)
    assert not plan.layer_plan.is_exact or level == 1e-5


def test_a_larger_budget_takes_no_more_bytes() -> None:
    sizes = [planned(level=level).bytes for level in (1e-6, "high", "balanced", "small", 100.0)]
    assert all(one >= other for one, other in itertools.pairwise(sizes))
    assert sizes[0] > sizes[-1]


def test_layers_that_attend_alike_are_tried_as_a_pair() -> None:
    plan = planned(method="krul", sharing="raw", level=1e6, share=0.34, gamma=0.1)
    assert plan.layer_plan.owners == {3: 0, 4: 1}
    strict = planned(method="krul", sharing="raw", level="high", share=0.34, gamma=0.1)
    assert strict.layer_plan.owners == {}
    assert len(strict.refused) == 2


def test_without_an_estimate_there_are_no_pairs() -> None:
    plan = planned(method="krul", level=1e6, similarity=None)
    assert plan.layer_plan.owners == {}
    assert not plan.layer_plan.is_exact


@pytest.mark.parametrize("found", [None, Evidence(queries(7), 0.25, alike())])
def test_too_few_queries_leave_the_session_exact(found: Evidence | None) -> None:
    plan, source = make(found, level="small")
    assert plan is None
    assert source.asked == []


@pytest.mark.parametrize("level", ["exact", 0.0])
def test_exact_asks_nothing(level: str | float) -> None:
    plan, source = make(Evidence(queries(ROWS), 0.25, alike()), level=level)
    assert plan is None
    assert source.asked == []


def test_kv_that_was_decoded_is_not_judged_again() -> None:
    source = NumberPages(SESSION.hashes)
    evidence = Told(Evidence(queries(ROWS), 0.25, alike()))
    planner = QualityPlanner(QualityConfig(level="small"), LAYOUT, evidence, time.monotonic)
    assert planner.plan(snapshot(SESSION, exact=False), source, CHUNK_TOKENS) is None
    assert source.asked == []


def test_fixed_pairs_need_no_estimate() -> None:
    plan = planned(method="fixed", sharing="raw", level=1e6, similarity=None)
    assert plan.layer_plan.owners


def test_only_the_leading_tokens_are_read() -> None:
    _, source = make(Evidence(queries(ROWS, 128), 0.25, None), level="small", tokens=128)
    assert source.asked == [(0, 4), (4, 4)]


def test_what_was_not_priced_in_time_is_stored_as_it_is() -> None:
    ticks = itertools.count()
    plan, _ = make(
        Evidence(queries(ROWS), 0.25, None), clock=lambda: 10.0 * next(ticks), level=100.0, deadline_s=0.1
    )
    assert plan is not None
    assert plan.layer_plan.is_exact


class Nowhere(NumberPages):
    """A PageSource that has nothing."""

    @contextmanager
    def segments(self, first_page: int, pages: int) -> Iterator[None]:
        yield None


def test_a_session_that_is_nowhere_has_no_plan() -> None:
    evidence = Told(Evidence(queries(ROWS), 0.25, None))
    planner = QualityPlanner(QualityConfig(level="small"), LAYOUT, evidence, time.monotonic)
    assert planner.plan(snapshot(SESSION), Nowhere(SESSION.hashes), CHUNK_TOKENS) is None


def test_the_plan_is_of_the_history_alone() -> None:
    """The same history gives the same bytes, whatever else the session is called or when it is paused."""
    first = planned(level="balanced")
    again, _ = make(Evidence(queries(ROWS), 0.25, alike((0, 3), (1, 4))), level="balanced")
    assert again is not None
    assert first.layer_plan.encode() == again.layer_plan.encode()
    planner = QualityPlanner(
        QualityConfig(level="balanced"),
        LAYOUT,
        Told(Evidence(queries(ROWS), 0.25, alike((0, 3), (1, 4)))),
        time.monotonic,
    )
    other = replace(snapshot(SESSION), session_id="another name", statistics=b"anything")
    plan = planner.plan(other, NumberPages(SESSION.hashes), CHUNK_TOKENS)
    assert plan is not None
    assert plan.layer_plan.encode() == first.layer_plan.encode()


# -- the configuration --


def refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "krul.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    return str(caught.value).removeprefix(str(path) + ": ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "quality: {level: high}",
            "quality.level: 'high' cannot be used without the estimator, which has the queries that codings "
            "are judged by: set estimator.enabled to true, or choose exact.",
        ),
        (
            "{estimator: {enabled: true}, quality: {level: 0.01}, restore: {strategy: paper}}",
            "quality.level: 0.01 cannot be used with restore.strategy paper, which leaves out layers that "
            "others may be coded on: choose another strategy, or exact.",
        ),
        (
            "{estimator: {enabled: true}, quality: {level: small, share: 0.6}}",
            "quality.share: 0.6 cannot be used: expected at most 0.5, one layer of each pair. Correct it, or "
            "leave it out for the default.",
        ),
        (
            "quality: {level: best}",
            "quality.level: 'best' cannot be used (not one of them): expected one of exact, high, balanced, "
            "small, or a number of at least 0. Correct it, or leave the key out for the default.",
        ),
        (
            "quality: {level: -1}",
            "quality.level: -1 cannot be used (not such a number): expected one of exact, high, balanced, "
            "small, or a number of at least 0. Correct it, or leave the key out for the default.",
        ),
        (
            "quality: {level: true}",
            "quality.level: True cannot be used (not such a number): expected one of exact, high, balanced, "
            "small, or a number of at least 0. Correct it, or leave the key out for the default.",
        ),
        (
            "quality: {method: best}",
            "quality.method: 'best' cannot be used (not one of them): expected one of auto, krul, fixed, "
            "int8, int4. Correct it, or leave the key out for the default.",
        ),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text) == message


@pytest.mark.parametrize(
    ("text", "level"),
    [("{}", "exact"), ("quality: {level: 0}", 0.0), ("quality: {level: exact}", "exact")],
)
def test_levels_that_need_no_estimator(tmp_path: Path, text: str, level: object) -> None:
    path = tmp_path / "krul.yaml"
    path.write_text(text)
    config = load_config(path, {}).quality
    assert (config.level, config.codes) == (level, False)

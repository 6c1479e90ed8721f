"""The estimator in a real server: its sums are those of the model's own attention, and cost no answer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from sgl_krul.cli.demo_model import demo_model_path
from sgl_krul.config import cache_home
from sgl_krul.errors import KrulError
from sgl_krul.session.catalog import read_manifest
from sgl_krul.session.record import SessionKey
from sgl_krul.similarity import Similarity, sampled_positions
from tests.e2e.harness import Chatter, ServerFactory, prompt
from tests.sessions import open_ssd

ALL = "estimator: {enabled: true, rows_per_1000: 1000, budget_bytes: 2GiB}"
LONG_S = 300
PAGE = 16
LAYERS = 30


@pytest.fixture(scope="module")
def chatter(servers: ServerFactory) -> Chatter:
    """Rows of all tokens, and prefills in pieces."""
    return servers.start("--chunked-prefill-size", "112", config=servers.config(more=ALL))


@pytest.fixture(scope="module")
def model() -> Any:
    """The demo model outside of SGLang, with attention that can be looked at."""
    from transformers import AutoModelForCausalLM

    path = demo_model_path(cache_home(os.environ), print)
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)


def true_sums(model: Any, ids: Sequence[int], start: int, end: int) -> Similarity:
    """The sums of the rows [start, end), from the matrices themselves."""
    with torch.no_grad():
        found = model(torch.tensor([list(ids)[:end]]), output_attentions=True)
    rows = torch.stack([layer[0].mean(0)[start:end] for layer in found.attentions])
    sums = Similarity(len(found.attentions))
    sums.add(rows.contiguous(), torch.arange(start, end))
    return sums


def rested(chatter: Chatter, name: str) -> Any:
    """What is shown of the session once no row of it is under way."""
    deadline = time.monotonic() + LONG_S
    while True:
        shown = chatter.sessions.session(name).similarity
        assert shown is not None
        if not shown.waiting:
            return shown
        assert time.monotonic() < deadline, "rows do not end"
        time.sleep(0.1)


def stored(servers: ServerFactory, namespace: str, names: Sequence[str]) -> Iterator[Similarity]:
    """The estimates in the manifests of sessions; no server may run."""
    tier = open_ssd(servers.store, 4 << 30)
    try:
        for name in names:
            manifest = read_manifest(tier, namespace, SessionKey(name).digest)
            assert manifest is not None
            yield Similarity.decode(manifest.statistics)
    finally:
        tier.close()


def assert_same(found: Similarity, expected: Similarity) -> None:
    """Equal but for the rounding of two ways to compute a model in float32."""
    assert (found.rows, found.dropped) == (expected.rows, 0)
    np.testing.assert_allclose(found.gram, expected.gram, rtol=1e-3)
    np.testing.assert_allclose(found.mass(), expected.mass(), rtol=1e-3)
    off = ~np.eye(LAYERS, dtype=bool)
    np.testing.assert_allclose(found.distances()[off], expected.distances()[off], rtol=1e-2)


def test_rows_of_prefills_steps_turns_and_restores_are_the_models_own(
    servers: ServerFactory, chatter: Chatter, model: Any
) -> None:
    """Two sessions in the same batches, chunked prefill, decode steps, a radix hit, a restart in between."""
    histories: dict[str, list[int]] = {"one": [], "two": []}

    def turn(server: Chatter, name: str, seed: int, count: int) -> None:
        histories[name] += prompt(seed, count)
        histories[name] += server.ask(histories[name], name, new=40).tokens

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda part: turn(chatter, *part), [("one", 1, 250), ("two", 2, 333)]))
        list(pool.map(lambda part: turn(chatter, *part), [("one", 3, 30), ("two", 4, 70)]))
    for name in histories:
        # The last token is never computed, and what fills no page comes with the next turn.
        rows = (len(histories[name]) - 1) // PAGE * PAGE
        assert rested(chatter, name).rows == rows
        assert chatter.sessions.pause(name).state == "paused"
    again = servers.start(config=servers.config(more=ALL))
    assert again.sessions.session("one").similarity is None, (
        "an estimate lies in the manifest until it is used"
    )
    turn(again, "one", 5, 50)
    rested(again, "one")
    again.sessions.pause("one")
    namespace = again.sessions.sessions().namespace
    servers.close()
    for name, found in zip(histories, stored(servers, namespace, list(histories)), strict=True):
        end = (len(histories[name]) - 1) // PAGE * PAGE
        assert_same(found, true_sums(model, histories[name], 0, end))


def test_only_computed_and_sampled_tokens_of_sessions_give_rows(servers: ServerFactory, model: Any) -> None:
    some = "estimator: {enabled: true, rows_per_1000: 100}"
    chatter = servers.start(config=servers.config(more=some))
    ids = prompt(20, 400)
    plain = chatter.ask(ids[:256], new=1)
    answer = chatter.ask(ids, "suffix", new=1)
    assert answer.cached == 256
    namespace = chatter.sessions.sessions().namespace
    digest = SessionKey("suffix").digest
    expected = sampled_positions(namespace, digest, 256, 400, 100)
    shown = rested(chatter, "suffix")
    assert (shown.rows, shown.dropped, shown.dropped_share) == (len(expected), 0, 0.0)
    assert len(shown.ir_mass) == LAYERS
    assert [info.session_id for info in chatter.sessions.sessions().sessions if info.similarity] == ["suffix"]
    assert plain.cached == 0
    chatter.sessions.pause("suffix")
    servers.close()
    (found,) = stored(servers, namespace, ["suffix"])
    rows = [true_sums(model, ids, at, at + 1) for at in expected.tolist()]
    for more in rows[1:]:
        rows[0].merge(more)
    assert_same(found, rows[0])


def test_answers_are_the_same_and_the_estimator_is_off_by_default(servers: ServerFactory) -> None:
    ids = prompt(30, 300)
    answers = {}
    for more in ("", "estimator: {enabled: true, rows_per_1000: 64}"):
        chatter = servers.start(config=servers.config(more=more))
        answers[more] = chatter.ask(ids, "same", new=24)
        assert (chatter.sessions.session("same").similarity is None) == (not more)
        chatter.sessions.delete("same")
    off, on = answers.values()
    assert on.same_as(off)


def test_ranks_are_refused_and_told_why(servers: ServerFactory) -> None:
    process = servers.launch("--tp-size", "3", config=servers.config(more=ALL))
    with pytest.raises(KrulError, match=r"estimator\.enabled: not served with --tp-size 3 yet"):
        process.wait_ready(LONG_S)

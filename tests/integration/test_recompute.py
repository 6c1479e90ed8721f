"""Recompute on real SGLang model runners, against the server's own forward of the same tokens."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sgl_krul.engine.cpu_attention import Span, attend
    from sgl_krul.engine.recompute_attention import attend_gathered
from sgl_krul.cli.demo_model import demo_model_path
from sgl_krul.cli.server_process import free_port
from sgl_krul.config import cache_home
from tests.integration.recompute_child import (
    Child,
    Spec,
    Steps,
    agree,
    broken_forward,
    calibrate,
    difference,
    failing_layer,
    kv_only_writes_the_same,
    mixing_changes_nothing,
    refused,
    self_test,
    tampered,
    tiny_model,
)

ROUNDING = 1e-4  # float32: what splitting a prompt otherwise may change, in the measure of the self-test

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.close()


@pytest.fixture(scope="module")
def smollm(child: Child) -> Call:
    """Calls a function of the child with SmolLM2-135M."""
    spec = Spec(demo_model_path(cache_home(os.environ), print), port=free_port())
    return lambda function, *args, **kwargs: child.start(spec, function, *args, **kwargs).result()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Spec]:
    """A model of four small layers of a class."""

    def make(name: str, **fields: Any) -> Spec:
        return tiny_model(tmp_path_factory.mktemp(name), name, **fields)

    return make


def test_the_self_test_passes_and_gives_everything_back(smollm: Call) -> None:
    assert smollm(self_test) == ("", True)


@st.composite
def staircases(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    """Tokens, where blocks begin, how far each of SmolLM's 30 layers is recomputed."""
    count = draw(st.integers(3, 80))
    first = draw(st.integers(0, count - 2))
    more = draw(st.sets(st.integers(first + 1, count - 1), max_size=3))
    corners = draw(st.lists(st.integers(first, count), min_size=1, max_size=5))
    ends = sorted(draw(st.lists(st.sampled_from(corners), min_size=30, max_size=30)), reverse=True)
    return count, [first, *sorted(more)], ends


@settings(max_examples=10)
@given(case=staircases(), seed=st.integers(0, 3))
def test_any_staircase_gives_what_the_forward_gives(
    smollm: Call, case: tuple[int, list[int], list[int]], seed: int
) -> None:
    assert smollm(difference, *case, seed) < ROUNDING


@pytest.mark.parametrize("block", [16, 100, 512])
def test_blocks_of_all_sizes(smollm: Call, block: int) -> None:
    assert smollm(difference, 230, list(range(0, 230, block)), [230] * 30, 1) < ROUNDING


def test_sessions_and_forwards_in_between_change_no_bit(smollm: Call) -> None:
    assert smollm(mixing_changes_nothing)


def test_k_and_v_only_are_the_same_bits(smollm: Call) -> None:
    assert smollm(kv_only_writes_the_same)


def test_a_failing_layer_leaves_the_context_and_ends_the_block(smollm: Call) -> None:
    ended = "token 0, layer 3 can't follow: no block is under way"
    assert smollm(failing_layer) == ["broken layer", "True", ended] * 2


def test_a_model_that_does_more_than_its_layers_is_refused(smollm: Call) -> None:
    reason, given_back = smollm(tampered)
    assert given_back
    assert reason.startswith("LlamaForCausalLM recomputed gives another ")
    assert " in layer " in reason
    assert "rounding in float32 explains at most 0.001" in reason


def test_a_failing_forward_refuses_and_gives_everything_back(smollm: Call) -> None:
    assert smollm(broken_forward) == (
        "the self-test of LlamaForCausalLM failed with RuntimeError: no kernel",
        True,
    )


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([(0, 8, 1, False)], "no block is under way"),
        ([(0, 8, 0, False), (0, 8, 2, False)], "token 0, layer 1 is next"),
        ([(0, 8, 0, False), (4, 8, 1, False)], "token 0, layer 1 is next"),
        ([(0, 8, 0, False), (0, 9, 1, False)], "ended at 8"),
        ([(0, 8, 0, True), (0, 8, 1, False)], "no block is under way"),
        ([(0, 21, 0, False)], "[0, 20)"),
        ([(4, 4, 0, False)], "[4, 4)"),
        ([(0, 8, 30, False)], "0 to 29"),
    ],
)
def test_a_slice_that_can_not_follow(smollm: Call, steps: Steps, says: str) -> None:
    assert says in smollm(refused, steps, list(range(20)), 20)


@pytest.mark.parametrize(
    ("token_ids", "slots", "says"),
    [
        ([-1, 3], 2, "-1"),
        ([3, 10**6], 2, "1000000"),
        ([3, 4], 3, "one slot a token"),
        ([1] * 9000, 9000, "8192"),
    ],
)
def test_tokens_the_model_does_not_have(smollm: Call, token_ids: list[int], slots: int, says: str) -> None:
    assert says in smollm(refused, [], token_ids, slots)


def test_calibration_covers_every_kind_of_slice(smollm: Call) -> None:
    samples = smollm(calibrate, 2560, 600.0)
    kinds = {(first, tokens) for first, tokens, _, _ in samples}
    assert kinds == {(first, tokens) for first in (0, 512, 1024, 2048) for tokens in (64, 128, 256, 512)}
    assert [kv_only for _, _, kv_only, _ in samples] == [False, False, False, True] * 16
    assert all(seconds > 0 for *_, seconds in samples)


def test_calibration_takes_what_it_gets(smollm: Call) -> None:
    assert {sample[:2] for sample in smollm(calibrate, 130, 600.0)} == {(0, 64), (0, 128)}
    assert smollm(calibrate, 63, 600.0) == []
    assert len(smollm(calibrate, 2560, 1e-9)) == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"]
)
def test_classes_that_are_recomputed(child: Child, tiny: Callable[..., Spec], name: str, dtype: str) -> None:
    spec = tiny(name, dtype=dtype)
    assert child.start(spec, self_test).result() == ("", True)
    assert child.start(spec, tampered).result()[0].startswith(f"{name} recomputed gives another ")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("GemmaForCausalLM", "the self-test of GemmaForCausalLM failed"),
        ("Gemma2ForCausalLM", "is not plain causal attention: layer 0 has a "),
        ("Qwen2MoeForCausalLM", "the self-test of Qwen2MoeForCausalLM failed"),
    ],
)
def test_classes_that_are_refused(child: Child, tiny: Callable[..., Spec], name: str, says: str) -> None:
    reason, given_back = child.start(tiny(name), self_test).result()
    assert says in reason
    assert given_back


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_two_ranks(tiny: Callable[..., Spec], name: str) -> None:
    spec = tiny(name, tp_size=2)
    ranks = [Child(cores="0|1"), Child(cores="0|1")]

    def on_both(function: Callable[..., Any], *args: Sequence[Any]) -> list[Any]:
        futures = [
            child.start(spec._replace(tp_rank=rank), function, *(arg[rank] for arg in args))
            for rank, child in enumerate(ranks)
        ]
        return [future.result() for future in futures]

    try:
        assert on_both(self_test) == [("", True)] * 2
        narrowing = ([70], [[0, 40]], [[70, 60, 55, 45]], [1])
        assert max(on_both(difference, *(each * 2 for each in narrowing))) < ROUNDING
        assert on_both(mixing_changes_nothing) == [True, True]
        assert on_both(agree, ["", "mine"]) == ["another rank's self-test failed (see its log)", "mine"]
    finally:
        for child in ranks:
            child.close()


@pytest.mark.parametrize("new", [1, 7, 40])
@pytest.mark.parametrize("cached", [0, 33])
def test_attention_of_other_devices(new: int, cached: int) -> None:
    generator = torch.Generator().manual_seed(new)
    q = torch.randn(new, 6, 16, generator=generator)
    k, v = (torch.randn(cached + new, 2, 16, generator=generator) for _ in range(2))
    expected = torch.empty_like(q)
    attend(q, k, v, [Span(0, new, cached, slice(0, cached + new))], expected, scale=0.3)
    torch.testing.assert_close(attend_gathered(q, k, v, 0.3), expected, atol=1e-5, rtol=1e-5)

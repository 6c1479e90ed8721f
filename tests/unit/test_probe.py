"""Which rows of q leave a forward, and whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sgl_krul.engine.forward_rows import QueryShape
from sgl_krul.engine.hooks import probe_hooks
from sgl_krul.engine.probe import RowProbe, Sampled
from sgl_krul.session.record import SessionKey
from sgl_krul.similarity import sampled_positions

LAYERS, HEADS, DIM = 3, 4, 8
SHAPE = QueryShape(LAYERS, HEADS, DIM, torch.float32)
RATE = 100
BIG = 1 << 30


def sampler(digest: str, start: int, end: int) -> Any:
    return sampled_positions("space", digest, start, end, RATE)


@dataclass
class Request:
    """What the probe looks at in SGLang's Req."""

    rid: str
    session_id: str | None = "chat"
    cache_salt: str | None = None
    extra_key: str | None = None

    @property
    def digest(self) -> str:
        """Of its session."""
        assert self.session_id is not None
        return SessionKey(self.session_id, self.cache_salt, self.extra_key).digest


@dataclass
class Mode:
    """SGLang's ForwardMode."""

    decode: bool

    def is_decode(self) -> bool:
        """A step of one token a request."""
        return self.decode

    def is_extend(self) -> bool:
        """A prefill."""
        return not self.decode


@dataclass
class Engine:
    """Runs forwards as SGLang does: a batch is made, then its layers ask for attention."""

    probe: RowProbe
    marks: list[bool] = field(default_factory=list)

    def extend(self, *parts: tuple[Request, int, int], layers: Sequence[int] = range(LAYERS)) -> None:
        """A prefill of tokens [start, end) of every request."""
        batch = SimpleNamespace(
            forward_mode=Mode(decode=False),
            extend_prefix_lens_cpu=[start for _, start, _ in parts],
            extend_seq_lens_cpu=[end - start for _, start, end in parts],
        )
        self._run(batch, parts, layers)

    def decode(self, *parts: tuple[Request, int], layers: Sequence[int] = range(LAYERS)) -> None:
        """A step that computes the token at `position` of every request."""
        batch = SimpleNamespace(
            forward_mode=Mode(decode=True),
            seq_lens_cpu=torch.tensor([position + 1 for _, position in parts]),
        )
        self._run(batch, [(request, position, position + 1) for request, position in parts], layers)

    def _run(self, batch: Any, parts: Sequence[tuple[Request, int, int]], layers: Sequence[int]) -> None:
        self.probe.after_init_new(batch, None, SimpleNamespace(reqs=[part[0] for part in parts]), "runner")
        self.marks.append(hasattr(batch, "krul_rows"))
        answer = self.probe.around_forward(
            lambda *_args, **_kwargs: self._layers(parts, layers), "runner", batch, pp_proxy_tensors=None
        )
        assert answer == "logits"

    def _layers(self, parts: Sequence[tuple[Request, int, int]], layers: Sequence[int]) -> str:
        """Layers see a copy of the batch."""
        for layer in layers:
            q = torch.cat([query(request, layer, start, end) for request, start, end in parts])
            answer = self.probe.around_attention(
                lambda *args, **kwargs: ("out", args, kwargs),
                "backend",
                q=q.view(len(q), HEADS * DIM),
                k="k",
                v="v",
                layer=SimpleNamespace(layer_id=layer),
                forward_batch="a copy",
                save_kv_cache=False,
            )
            assert answer[0] == "out"
            assert answer[1][0] == "backend"
            assert answer[2] == {"forward_batch": "a copy", "save_kv_cache": False}
        return "logits"


def query(request: Request, layer: int, start: int, end: int) -> torch.Tensor:
    """q [n, H, D] of a request: every number tells request, layer, position and place."""
    row = torch.arange(HEADS * DIM, dtype=torch.float32).view(1, HEADS, DIM) / 1000
    at = torch.arange(start, end, dtype=torch.float32).view(-1, 1, 1)
    return row + at + 10_000 * layer + 100_000 * (sum(request.rid.encode()) % 97)


def engine(budget_bytes: int = BIG, max_requests: int = 100) -> Engine:
    return Engine(RowProbe(sampler, SHAPE, torch.device("cpu"), budget_bytes, max_requests))


def assert_rows(found: Sampled | None, request: Request, *ranges: tuple[int, int]) -> None:
    """The sampled positions of these ranges, each with its own q."""
    wanted = np.concatenate([sampler(request.digest, start, end) for start, end in ranges])
    assert found is not None
    assert found.positions.tolist() == sorted(set(wanted.tolist()))
    assert len(found.positions)
    assert found.q is not None
    for layer in range(LAYERS):
        for row, position in enumerate(found.positions.tolist()):
            assert torch.equal(found.q[layer, row], query(request, layer, position, position + 1)[0])


def test_a_prefill_gives_the_rows_of_its_sampled_positions() -> None:
    run, request = engine(), Request("a")
    run.extend((request, 0, 300))
    assert run.marks == [True]
    assert run.probe.held_bytes == 30 * SHAPE.row_bytes
    assert_rows(run.probe.collect("a"), request, (0, 300))
    assert run.probe.held_bytes == 0
    assert run.probe.collect("a") is None


def test_rows_exist_only_for_tokens_that_were_computed() -> None:
    """192 tokens came from the radix tree."""
    run, request = engine(), Request("a")
    run.extend((request, 192, 300))
    found = run.probe.collect("a")
    assert_rows(found, request, (192, 300))
    assert found is not None
    assert not len(found.missed)


def test_chunks_and_decode_steps_give_what_one_prefill_gives() -> None:
    run, request = engine(), Request("a")
    for start, end in ((0, 7), (7, 100), (100, 101), (101, 230)):
        run.extend((request, start, end))
    for position in range(230, 300):
        run.decode((request, position))
    assert 5 < sum(run.marks[4:]) < 10, "only steps with a sampled position are marked"
    assert_rows(run.probe.collect("a"), request, (0, 300))


def test_sessions_of_one_batch_stay_apart() -> None:
    run = engine()
    a, b = Request("a", "one"), Request("b", "two", extra_key="x")
    nobody = Request("n", None)
    run.extend((a, 0, 100), (nobody, 0, 50), (b, 64, 200))
    for step in range(40):
        run.decode((nobody, 50 + step), (b, 200 + step), (a, 100 + step))
    assert_rows(run.probe.collect("b"), b, (64, 240))
    assert run.probe.check() == []
    assert_rows(run.probe.collect("a"), a, (0, 140))
    assert run.probe.held_bytes == 0
    assert run.probe.check() == []


def test_requests_without_a_session_are_not_even_watched() -> None:
    run = engine()
    run.extend((Request("n", None), 0, 500))
    run.decode((Request("n", None), 500))
    assert run.marks == [False, False]
    assert run.probe.collect("n") is None


def test_a_request_that_was_sent_back_gives_every_position_once() -> None:
    run, request = engine(), Request("a")
    run.extend((request, 0, 120))
    run.decode(*[(request, 120)])
    run.extend((request, 48, 150))  # computed again from a page on
    assert_rows(run.probe.collect("a"), request, (0, 150))


@pytest.mark.parametrize("layers", [(), (0, 2), (0, 1, 1)])
def test_a_forward_whose_layers_were_not_all_seen_is_missed(layers: tuple[int, ...]) -> None:
    """A decode step under a CUDA graph runs no Python at all."""
    run, request = engine(), Request("a")
    run.extend((request, 0, 100))
    run.extend((request, 100, 150), layers=layers)
    found = run.probe.collect("a")
    assert_rows(found, request, (0, 100))
    assert found is not None
    assert found.missed.tolist() == sampler(request.digest, 100, 150).tolist()


def test_q_of_a_shape_nobody_expected_is_missed() -> None:
    run, request = engine(), Request("a")
    batch = SimpleNamespace(
        forward_mode=Mode(decode=False), extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[50]
    )
    run.probe.after_init_new(batch, None, SimpleNamespace(reqs=[request]))

    def layers(*_: Any) -> None:
        for shape in ((50, HEADS * DIM + 1), (2, HEADS * DIM)):
            for layer in range(LAYERS):
                run.probe.around_attention(
                    lambda *_: None, None, torch.zeros(shape), None, None, SimpleNamespace(layer_id=layer)
                )

    run.probe.around_forward(layers, None, batch)
    found = run.probe.collect("a")
    assert found is not None
    assert found.q is None
    assert len(found.missed) == 5


def test_rows_of_another_dtype_are_converted() -> None:
    run, request = engine(), Request("a")
    run.probe = RowProbe(sampler, SHAPE._replace(dtype=torch.float64), torch.device("cpu"), BIG, 10)
    run.extend((request, 0, 100))
    found = run.probe.collect("a")
    assert found is not None
    assert found.q is not None
    assert found.q.dtype == torch.float64


def test_the_budget_holds_and_what_gave_way_is_missed() -> None:
    run = engine(budget_bytes=12 * SHAPE.row_bytes)
    old, new, huge = Request("old"), Request("new", "other"), Request("huge", "third")
    run.extend((old, 0, 100))
    run.extend((new, 0, 100))
    assert run.probe.held_bytes <= 12 * SHAPE.row_bytes
    run.extend((huge, 0, 1000))
    assert run.probe.check() == []
    found = run.probe.collect("huge")
    assert found is not None
    assert (len(found.positions), len(found.missed)) == (0, 100)
    assert_rows(run.probe.collect("new"), new, (0, 100))
    found = run.probe.collect("old")
    assert found is not None
    assert (found.q, len(found.missed)) == (None, 10)
    assert run.probe.held_bytes == 0


def test_a_request_does_not_push_out_its_own_rows() -> None:
    run, request = engine(budget_bytes=12 * SHAPE.row_bytes), Request("a")
    run.extend((request, 0, 100))
    run.extend((request, 100, 200))
    found = run.probe.collect("a")
    assert_rows(found, request, (0, 100))
    assert found is not None
    assert found.missed.tolist() == sampler(request.digest, 100, 200).tolist()


def test_requests_that_nobody_tells_the_end_of_do_not_pile_up() -> None:
    run = engine(max_requests=3)
    for number in range(20):
        run.extend((Request(f"r{number}", f"s{number}"), 0, 100))
    assert run.probe.check() == []
    assert run.probe.held_bytes == 30 * SHAPE.row_bytes
    assert run.probe.collect("r16") is None
    assert run.probe.collect("r19") is not None
    run.probe.clear()
    assert run.probe.held_bytes == 0


def test_only_a_range_is_asked_for() -> None:
    run, request = engine(), Request("a")
    run.extend((request, 0, 300))
    run.extend((request, 300, 350), layers=())
    whole = run.probe.collect("a")
    assert whole is not None
    part = whole.between(100, 320)
    assert_rows(part, request, (100, 300))
    assert part.missed.tolist() == sampler(request.digest, 300, 320).tolist()
    assert part.q is not None
    assert part.q.is_contiguous()
    none = whole.between(400, 500)
    assert (none.q, len(none.positions), len(none.missed)) == (None, 0, 0)


def test_rows_taken_under_inference_mode_are_ordinary_tensors() -> None:
    """They are worked on by a thread that is not in that mode."""
    run, request = engine(), Request("a")
    with torch.inference_mode():
        run.extend((request, 0, 100))
        run.extend((request, 100, 200))
        found = run.probe.collect("a")
    assert found is not None
    assert found.q is not None
    assert not found.q.is_inference()


def test_a_forward_that_fails_leaves_nothing_to_the_next() -> None:
    run, request = engine(), Request("a")
    batch = SimpleNamespace(
        forward_mode=Mode(decode=False), extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[50]
    )
    run.probe.after_init_new(batch, None, SimpleNamespace(reqs=[request]))

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        run.probe.around_forward(fails, None, batch)
    run.extend((Request("n", None), 0, 50))  # its layers run with no mark
    found = run.probe.collect("a")
    assert found is not None
    assert (found.q, len(found.missed)) == (None, 5)


def test_the_hooks_are_on_functions_that_sglang_has() -> None:
    import importlib

    for target, _, _ in probe_hooks(engine().probe):
        module, name, function = target.rsplit(".", 2)
        assert callable(getattr(getattr(importlib.import_module(module), name), function))

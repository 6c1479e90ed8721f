"""SGLang model runners in a child process, and what test_recompute.py has them do.

SGLang keeps one configuration a process, and warns while it loads. Functions whose first parameter is `world`
run in the child, on the model that `World.use` has loaded.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from sgl_krul.cli.server_process import free_port

PAGE = 16

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "attention_bias": False,
}
_GEMMA = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
TINY: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama"},
    "Qwen2ForCausalLM": {"model_type": "qwen2"},
    "Qwen3ForCausalLM": {"model_type": "qwen3"},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": None},
    "GemmaForCausalLM": {"model_type": "gemma", **_GEMMA},
    "Gemma2ForCausalLM": {"model_type": "gemma2", "sliding_window": 32, **_GEMMA},
    "Qwen2MoeForCausalLM": {"model_type": "qwen2_moe", **_EXPERTS},
}
TINY["Gemma2ForCausalLM"] |= {
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


class Spec(NamedTuple):
    """A model to load. A tiny one (its weights are drawn here) where `random` is true."""

    path: Path
    random: bool = False
    dtype: str = "float32"
    tp_size: int = 1
    tp_rank: int = 0
    port: int = 0


def tiny_model(path: Path, name: str, **fields: Any) -> Spec:
    """A model of four small layers of a class, to be loaded from `path`."""
    config = _SHAPE | TINY[name] | {"architectures": [name], "torch_dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config))
    return Spec(path, random=True, port=free_port(), **fields)


class World:
    """The one model of a process."""

    def __init__(self) -> None:
        self.spec: Spec | None = None
        self.runner: Any = None

    def use(self, spec: Spec) -> None:
        """Load another model, unless it is there."""
        if spec == self.spec:
            return
        from sglang.srt.distributed import parallel_state
        from sglang.srt.runtime_context import reset_context

        if self.spec is not None:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
            reset_context()
        self.runner, self.spec = load(spec), spec

    def recomputer(self) -> Any:
        from sgl_krul.engine.pool import read_layout
        from sgl_krul.engine.recompute import Recomputer

        return Recomputer(self.runner, read_layout(self.runner.token_to_kv_pool, PAGE, "rope"))

    def tokens(self, count: int, seed: int = 0) -> np.ndarray[Any, Any]:
        return np.random.default_rng(seed).integers(0, self.runner.model_config.vocab_size, count, np.int64)

    def room(self) -> tuple[int, int]:
        """Free slots and free rows."""
        pool, rows = self.runner.token_to_kv_pool_allocator, self.runner.req_to_token_pool
        return pool.available_size(), rows.available_size()


WORLD = World()


def load(spec: Spec) -> Any:
    """A model runner as the scheduler makes it."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.benchmark import one_batch as sgl
    from sglang.srt.server_args import prepare_server_args

    arguments = f"--device cpu --dtype {spec.dtype} --page-size {PAGE} --max-total-tokens 4096"
    arguments += f" --mem-fraction-static 0.3 --tp-size {spec.tp_size}"
    arguments += " --load-format dummy" if spec.random else ""
    server_args = prepare_server_args(["--model-path", str(spec.path), *arguments.split()])
    rank = sgl.spawn_world_rank(server_args, tp_rank=spec.tp_rank, pp_rank=0)
    sgl.publish(server_args, role="scheduler", ranks=sgl.SpawnRanks(world_rank=rank, gpu_id=spec.tp_rank))
    sgl._init_process_global_configs()  # noqa: SLF001
    config = sgl.ModelConfig.from_server_args(server_args)
    sgl.bootstrap.init_parallel_runtime(server_args=server_args, device="cpu", dist_port=spec.port)
    sgl.bootstrap.init_layer_runtime(model_config=config)
    runner = sgl.ModelRunner(
        model_config=config,
        mem_fraction_static=0.3,
        gpu_id=spec.tp_rank,
        nccl_port=spec.port,
        server_args=server_args,
    )
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    if spec.random:
        draw_weights(runner.model)
    torch.set_num_threads(
        1
    )  # two that wait for each other are a hundred times slower where others use the cores
    return runner


def draw_weights(model: torch.nn.Module) -> None:
    """Large enough that every part of a layer shows in the next one (SGLang's dummy weights are 1e-3)."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.dim() > 1 else 0.1)
        parameter.data.copy_(values + (parameter.dim() == 1))


def self_test(world: World) -> tuple[str, bool]:
    """The reason, and whether everything was given back."""
    recomputer, before = world.recomputer(), world.room()
    assert recomputer.reason
    recomputer.self_test()
    return recomputer.reason, world.room() == before


def difference(world: World, count: int, starts: list[int], ends: list[int], seed: int) -> float:
    """Recompute [starts[0], ends[layer]) in each layer, all else in place; the largest difference."""
    from sgl_krul.engine import recompute_check as check

    recomputer, pool, token_ids = world.recomputer(), world.runner.token_to_kv_pool, world.tokens(count, seed)
    reference = check.serve_forward(recomputer, token_ids)
    with check.borrowed_slots(world.runner, count, PAGE) as slots:
        for buffers, values in ((pool.k_buffer, reference.k), (pool.v_buffer, reference.v)):
            for layer, end in enumerate(ends):
                buffers[layer][slots] = values[layer]
                buffers[layer][slots[starts[0] : end]] = math.nan
        check.run_staircase(recomputer.open(token_ids, slots), starts, ends)
        return check.compare(pool, slots, reference, [count] * len(ends)).size


Steps = list[tuple[int, int, int, bool]]


def staircase_steps(starts: Sequence[int], ends: Sequence[int]) -> Steps:
    """The slices of a staircase, as `run_staircase` makes them."""
    steps: Steps = []

    class Recorder:
        def run(self, *step: Any, kv_only: bool) -> None:
            steps.append((*step, kv_only))

        def close(self) -> None:
            pass

    from sgl_krul.engine.recompute_check import run_staircase

    run_staircase(Recorder(), starts, ends)  # type: ignore[arg-type]
    return steps


def two_sessions(world: World, *, mixed: bool) -> list[torch.Tensor]:
    """K and V of two sessions, their slices one after the other or in turns with forwards in between."""
    from sgl_krul.engine import recompute_check as check

    recomputer, layers = world.recomputer(), world.runner.token_to_kv_pool.layer_num
    counts = (70, 45)
    stairs = [[count - layer // 2 for layer in range(layers)] for count in counts]
    plans = [staircase_steps([0, 33], ends) for ends in stairs]
    with (
        check.borrowed_slots(world.runner, 70, PAGE) as one,
        check.borrowed_slots(world.runner, 45, PAGE) as two,
    ):
        pool = world.runner.token_to_kv_pool
        for buffer in pool.k_buffer + pool.v_buffer:
            buffer[one] = buffer[two] = 0.25
        sessions = [recomputer.open(world.tokens(len(s), seed), s) for seed, s in enumerate((one, two))]
        if mixed:
            for index in range(max(map(len, plans))):
                for session, plan in zip(sessions, plans, strict=True):
                    if index < len(plan):
                        session.run(*plan[index])
                if index % 20 == 0:
                    check.serve_forward(recomputer, world.tokens(30, 5))
        else:
            for session, plan in zip(sessions, plans, strict=True):
                for step in plan:
                    session.run(*step)
        return [tensor.clone() for slots in (one, two) for tensor in check.read_kv(pool, slots)]


def mixing_changes_nothing(world: World) -> bool:
    alone, mixed = two_sessions(world, mixed=False), two_sessions(world, mixed=True)
    return all(torch.equal(a, b) for a, b in zip(alone, mixed, strict=True))


def kv_only_writes_the_same(world: World) -> bool:
    """Layer 0 with K and V only, and whole."""
    from sgl_krul.engine import recompute_check as check

    recomputer = world.recomputer()
    with check.borrowed_slots(world.runner, 40, PAGE) as slots:
        found = []
        for kv_only in (True, False):
            world.runner.token_to_kv_pool.k_buffer[0][slots] = math.nan
            session = recomputer.open(world.tokens(40), slots)
            session.run(0, 40, 0, kv_only)
            found.append(check.read_kv(world.runner.token_to_kv_pool, slots))
        return torch.equal(found[0].k[0], found[1].k[0]) and torch.equal(found[0].v[0], found[1].v[0])


def failing_layer(world: World) -> list[str]:
    """A layer fails half way: what the caller sees, and what is left of it."""
    from sglang.srt.model_executor import forward_context as context

    from sgl_krul.engine import recompute_check as check

    recomputer, mlp = world.recomputer(), world.runner.model.model.layers[2].mlp
    outer: Any = context.ForwardContext(attn_backend=world.runner.attn_backend)
    seen = []
    with check.borrowed_slots(world.runner, 40, PAGE) as slots:
        session = recomputer.open(world.tokens(40), slots)
        for current in (None, outer):
            before = context.set_forward_context(current)
            forward = mlp.forward

            def broken(*_args: object, **_kwargs: object) -> None:
                raise RuntimeError("broken layer")

            mlp.forward = broken
            session.run(0, 40, 0, False)
            session.run(0, 40, 1, False)
            try:
                session.run(0, 40, 2, False)
            except RuntimeError as error:
                seen.append(str(error))
            finally:
                mlp.forward = forward
            seen.append(str(context.set_forward_context(before) is current))
            try:
                session.run(0, 40, 3, False)
            except ValueError as error:
                seen.append(str(error))
    return seen


def tampered(world: World) -> tuple[str, bool]:
    """The self-test of a model whose own forward scales its embeddings, which recompute knows nothing of."""
    inner = world.runner.model.model
    original = type(inner)

    class Scaled(original):  # type: ignore[misc, valid-type]
        def forward(
            self, ids: Any, positions: Any, batch: Any, input_embeds: Any = None, **kwargs: Any
        ) -> Any:
            return super().forward(ids, positions, batch, self.embed_tokens(ids) * 3, **kwargs)

    inner.__class__ = Scaled
    try:
        return self_test(world)
    finally:
        inner.__class__ = original


def broken_forward(world: World) -> tuple[str, bool]:
    """The self-test where the server's forward itself fails, after slots and a row were taken."""
    runner = world.runner

    def forward(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("no kernel\nlong explanation")

    runner.forward = forward
    try:
        return self_test(world)
    finally:
        del runner.forward


def refused(world: World, steps: Steps, token_ids: list[int], slots: int) -> str:
    """The ValueError of the last of these steps (of `open`, where there are none)."""
    session = None
    try:
        session = world.recomputer().open(np.array(token_ids), torch.arange(PAGE, PAGE + slots))
        for step in steps[:-1]:
            session.run(*step)
    except ValueError as error:
        return str(error) if session is None else f"too early: {error}"
    try:
        session.run(*steps[-1])
    except ValueError as error:
        return str(error)
    return ""


def calibrate(world: World, tokens: int, budget_s: float) -> list[tuple[int, int, bool, float]]:
    from sgl_krul.engine import recompute_check as check
    from sgl_krul.engine.recompute_measure import calibration_slices

    with check.borrowed_slots(world.runner, tokens, PAGE) as slots:
        samples = calibration_slices(world.recomputer(), slots, budget_s=budget_s)
        return [(s.first, s.tokens, s.kv_only, s.seconds) for s in samples]


def agree(_world: World, reason: str) -> str:
    from sgl_krul.engine.recompute_check import same_on_all_ranks

    return same_on_all_ranks(reason)


def _in_child(spec: Spec, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    warnings.simplefilter("ignore")
    WORLD.use(spec)
    return function(WORLD, *args, **kwargs)


class Child:
    """A process for models, one at a time."""

    def __init__(self, cores: str = "") -> None:
        # Read when the process starts: SGLang binds a rank of tensor parallelism to its cores.
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ.pop("SGLANG_CPU_OMP_THREADS_BIND", None)
        if cores:
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = cores
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def start(self, spec: Spec, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A future of `function(world, ...)` with that model."""
        return self._pool.submit(_in_child, spec, function, args, kwargs)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

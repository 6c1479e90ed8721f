"""The CPU attention backend against plain softmax attention in float64, and against itself."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

with warnings.catch_warnings():
    # SGLang and the packages under it warn while they are imported on a CPU.
    warnings.simplefilter("ignore")
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sgl_krul.engine import cpu
    from sgl_krul.engine.cpu_attention import Span, attend, register_cpu_backend
    from sgl_krul.engine.cpu_backend import KrulCpuAttention

DIM = 64
NEW = (1, 41, 123)
CACHED = (0, 16, 97)
HEADS = [(9, 3), (14, 2), (4, 4)]


class Pool:
    """The few calls of SGLang's KV pool that attention makes, over plain tensors."""

    def __init__(self, slots: int, kv_heads: int) -> None:
        self.k = torch.full((slots, kv_heads, DIM), float("nan"))
        self.v = torch.full((slots, kv_heads, DIM), float("nan"))

    def set_kv_buffer(self, layer: object, where: object, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k[where.loc] = k.view(-1, *self.k.shape[1:])  # type: ignore[attr-defined]
        self.v[where.loc] = v.view(-1, *self.v.shape[1:])  # type: ignore[attr-defined]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v


class Chat(NamedTuple):
    """One sequence: q [tokens, heads, dim], k and v [tokens, kv_heads, dim], its slots in the pool."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor


class Bench:
    """A pool, a backend over it, and chats whose pages are consecutive or scattered."""

    def __init__(self, heads: int, kv_heads: int, window: int = -1, stock: bool = False) -> None:
        self.pool = Pool(4096, kv_heads)
        self.table = torch.zeros(16, 1024, dtype=torch.int32)
        runner = SimpleNamespace(
            device="cpu",
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=self.pool,
        )
        self.backend = (TorchNativeAttnBackend if stock else KrulCpuAttention)(runner)
        self.layer = SimpleNamespace(
            layer_id=0,
            tp_q_head_num=heads,
            tp_k_head_num=kv_heads,
            qk_head_dim=DIM,
            v_head_dim=DIM,
            scaling=DIM**-0.5,
            sliding_window_size=window,
            is_cross_attention=False,
            attn_type=AttentionType.DECODER,
        )

    def run(
        self, chats: Sequence[Chat], cached: Sequence[int], new: Sequence[int], mode: ForwardMode
    ) -> list:
        """Attention of the `new` tokens of each chat after its `cached` ones: outputs [new, heads, dim]."""
        lengths = [c + n for c, n in zip(cached, new, strict=True)]
        for row, (chat, length) in enumerate(zip(chats, lengths, strict=True)):
            self.table[row + 1, :length] = chat.slots[:length].int()

        def joined(name: str) -> torch.Tensor:
            parts = [
                getattr(chat, name)[before:length]
                for chat, before, length in zip(chats, cached, lengths, strict=True)
            ]
            return torch.cat(parts).flatten(1) if name != "slots" else torch.cat(parts)

        batch = SimpleNamespace(
            forward_mode=mode,
            req_pool_indices=torch.arange(1, len(chats) + 1),
            seq_lens=torch.tensor(lengths),
            extend_prefix_lens=torch.tensor(cached),
            extend_seq_lens=torch.tensor(new),
            encoder_lens=None,
            out_cache_loc=joined("slots"),
        )
        self.backend.init_forward_metadata(batch)
        run = self.backend.forward_decode if mode.is_decode() else self.backend.forward_extend
        out = run(joined("q"), joined("k"), joined("v"), self.layer, batch)
        return list(out.view(-1, self.layer.tp_q_head_num, DIM).split(list(new)))


def make_chats(lengths: Sequence[int], heads: int, kv_heads: int, scattered: bool) -> list[Chat]:
    generator = torch.Generator().manual_seed(7)
    pages = torch.randperm(200, generator=generator) if scattered else torch.arange(200)
    slots = 16 + (pages[:, None] * 16 + torch.arange(16)).flatten()
    chats, first = [], 0
    for length in lengths:
        q = torch.randn(length, heads, DIM, generator=generator)
        k, v = torch.randn(2, length, kv_heads, DIM, generator=generator)
        chats.append(Chat(q, k, v, slots[first : first + length]))
        first += -(-length // 16) * 16
    return chats


def reference(chat: Chat, first: int, last: int, window: int = -1) -> torch.Tensor:
    """Softmax attention in float64 for the queries [first, last) of a chat, one formula, no kernels."""
    group = chat.q.shape[1] // chat.k.shape[1]
    q = chat.q[first:last].double().transpose(0, 1)
    k, v = (x[:last].double().repeat_interleave(group, dim=1).transpose(0, 1) for x in (chat.k, chat.v))
    position, key = torch.arange(first, last)[:, None], torch.arange(last)[None, :]
    hidden = (key > position) | ((key < position - window) if window >= 0 else False)
    scores = (q @ k.transpose(1, 2) * DIM**-0.5).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).float()


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("window", [-1, 0, 20, 100, 1000])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_extend_of_a_ragged_batch(heads: int, kv_heads: int, window: int, scattered: bool) -> None:
    cached, new = [c for c in CACHED for _ in NEW], [n for _ in CACHED for n in NEW]
    chats = make_chats([c + n for c, n in zip(cached, new, strict=True)], heads, kv_heads, scattered)
    bench = Bench(heads, kv_heads, window)
    bench.run(chats, [0] * len(chats), cached, ForwardMode.EXTEND)  # fills the pool; some have no token yet
    outputs = bench.run(chats, cached, new, ForwardMode.EXTEND)
    for chat, out, c, n in zip(chats, outputs, cached, new, strict=True):
        assert_close(out, reference(chat, c, c + n, window))


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("window", [-1, 20])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_decode_of_a_ragged_batch(heads: int, kv_heads: int, window: int, scattered: bool) -> None:
    cached = [0, 1, 40, 122, 300]
    chats = make_chats([c + 1 for c in cached], heads, kv_heads, scattered)
    bench = Bench(heads, kv_heads, window)
    bench.run(chats, [0] * len(chats), cached, ForwardMode.EXTEND)
    outputs = bench.run(chats, cached, [1] * len(chats), ForwardMode.DECODE)
    for chat, out, c in zip(chats, outputs, cached, strict=True):
        assert_close(out, reference(chat, c, c + 1, window))


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_any_split_of_a_prompt_gives_what_the_whole_gives(heads: int, kv_heads: int) -> None:
    length = 230
    (chat,) = make_chats([length], heads, kv_heads, scattered=True)
    (whole,) = Bench(heads, kv_heads).run([chat], [0], [length], ForwardMode.EXTEND)
    for split in (1, 16, 97, 128, 229):
        bench = Bench(heads, kv_heads)
        (head,) = bench.run([chat], [0], [split], ForwardMode.EXTEND)
        (tail,) = bench.run([chat], [split], [length - split], ForwardMode.EXTEND)
        torch.testing.assert_close(torch.cat((head, tail)), whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize("window", [-1, 20])
def test_gives_what_torch_native_gives(window: int) -> None:
    chats = make_chats([57, 138], 9, 3, scattered=True)
    results = []
    for stock in (False, True):
        bench = Bench(9, 3, window, stock)
        bench.run(chats, [0, 0], [16, 97], ForwardMode.EXTEND)
        results.append(torch.cat(bench.run(chats, [16, 97], [41, 41], ForwardMode.EXTEND)))
    torch.testing.assert_close(*results, atol=1e-6, rtol=0)


def test_a_plan_is_not_used_for_another_batch() -> None:
    chats = make_chats([50, 60], 9, 3, scattered=False)
    bench = Bench(9, 3)
    bench.run(chats, [0, 0], [50, 60], ForwardMode.EXTEND)
    kept = bench.backend.forward_metadata
    bench.backend.init_forward_metadata = lambda batch: None  # a caller that plans nothing
    (out,) = bench.run(chats[1:], [0], [60], ForwardMode.EXTEND)
    assert bench.backend.forward_metadata is kept
    assert_close(out, reference(chats[1], 0, 60))


def test_rows_behind_the_last_sequence_are_zero() -> None:
    (chat,) = make_chats([5], 9, 3, scattered=False)
    out = torch.full((8, 9, DIM), float("nan"))
    q = torch.cat((chat.q, torch.zeros(3, 9, DIM)))
    attend(q, chat.k, chat.v, [Span(0, 5, 0, slice(0, 5))], out, scale=DIM**-0.5)
    assert_close(out[:5], reference(chat, 0, 5))
    assert not out[5:].any()


def test_registering_twice_changes_nothing() -> None:
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    register_cpu_backend()
    factory = ATTENTION_BACKENDS["krul_cpu"]
    register_cpu_backend()
    assert ATTENTION_BACKENDS["krul_cpu"] is factory
    assert ATTENTION_BACKEND_CHOICES.count("krul_cpu") == 1


def test_the_platform_is_active_only_without_accelerator_and_own_cpu_engine() -> None:
    code = "from sgl_krul.engine.cpu import activate, has_accelerator; print(has_accelerator(), activate())"
    for own_engine in ("0", "1"):
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env={
                **os.environ,
                "SGLANG_USE_CPU_ENGINE": own_engine,
                "PYTHONPATH": str(Path(cpu.__file__).parents[2]),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        accelerator, platform = result.stdout.split()
        inactive = accelerator == "True" or own_engine == "1"
        assert platform == ("None" if inactive else "sgl_krul.engine.cpu:KrulCpuPlatform")


class Arguments(SimpleNamespace):
    """SGLang's server arguments as the platform sees them, after SGLang's own CPU rules."""

    def __init__(self, **typed: object) -> None:
        from sglang.srt.model_executor.cuda_graph_config import default_cuda_graph_config

        super().__init__(
            device="cpu",
            attention_backend="intel_amx",
            dtype="auto",
            page_size=None,
            max_total_tokens=None,
            chunked_prefill_size=None,
            cuda_graph_config=default_cuda_graph_config(),
            _raw_input=typed,
        )
        self.__dict__.update(typed)


def test_the_platform_fills_what_was_left_alone() -> None:
    arguments = Arguments()
    cpu.KrulCpuPlatform().apply_server_args_defaults(arguments)
    assert (arguments.attention_backend, arguments.dtype, arguments.page_size) == ("krul_cpu", "float32", 16)
    assert (arguments.max_total_tokens, arguments.chunked_prefill_size) == (32768, 1024)
    graphs = arguments.cuda_graph_config
    assert {graphs.decode.backend, graphs.prefill.backend} == {"disabled"}


def test_the_platform_keeps_what_was_given() -> None:
    given = {
        "attention_backend": "torch_native",
        "dtype": "bfloat16",
        "page_size": 64,
        "max_total_tokens": 4096,
        "chunked_prefill_size": 256,
    }
    arguments = Arguments(**given)
    cpu.KrulCpuPlatform().apply_server_args_defaults(arguments)
    assert {name: getattr(arguments, name) for name in given} == given

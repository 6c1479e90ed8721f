"""SGLang on a machine without an accelerator.

SGLang 0.5.23 serves a plain CPU once an out-of-tree platform is active (its own CPU engine needs a build of
sgl_kernel that no wheel carries). This module is that platform, and it brings the attention backend
`krul_cpu` (cpu_attention.py). Where any accelerator is present, or SGLang's own CPU engine was asked for,
`activate` answers None and nothing changes.

The entry point group `sglang.srt.platforms` names `activate`; SGLang calls it when something first asks for
the current platform. Nothing heavy is imported here for that reason.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt import platforms
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sgl_krul.engine.cpu_attention import CPU_ATTENTION, register_cpu_backend

__all__ = ["KrulCpuPlatform", "activate", "has_accelerator"]

_ACCELERATORS = ("cuda", "rocm", "npu", "xpu", "musa", "mps")

# What a server on a CPU gets for a field its user left alone. The token cap keeps a small model's KV pool
# near one GiB; SGLang lowers it by itself where memory does not suffice. Prefill beyond 1024 tokens a step
# gains no speed on a CPU (matrix products peak from 128 rows on) and keeps other chats waiting.
_DTYPE = "float32"
_PAGE_SIZE = 16
_MAX_TOTAL_TOKENS = 32768
_CHUNKED_PREFILL_SIZE = 1024


def has_accelerator() -> bool:
    """True where SGLang itself, or torch, finds a device other than the CPU."""
    if torch.accelerator.is_available():
        return True
    return any(getattr(platforms, f"_is_{name}_available")() for name in _ACCELERATORS)


def activate() -> str | None:
    """The platform class for SGLang, or None where there is an accelerator or SGLang's CPU engine is on."""
    # SGLang's own reading of SGLANG_USE_CPU_ENGINE, so that both always agree.
    own_cpu_engine = getattr(platforms, "_is_cpu_available")()  # noqa: B009
    if own_cpu_engine or has_accelerator():
        return None
    return "sgl_krul.engine.cpu:KrulCpuPlatform"


class KrulCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A plain CPU: torch kernels only, no graph capture, no pinned memory.

    SGLang loads the class by name and calls its hooks; nobody else does.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    capabilities = PlatformCapabilities(supports_triton=False)

    def get_device(self, device_id: int = 0) -> str:
        """The value `--device` gets when it is not given; SGLang splits it as a string."""
        return "cpu"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return CPU_ATTENTION

    def init_backend(self) -> None:
        register_cpu_backend()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill what the user left alone (`server_args`: SGLang's view of its arguments, set by attribute).

        `--device cpu`, the KV dtype and the sampling backend follow from the platform or from SGLang's own
        CPU rules, which have run by now.
        """
        if server_args.device != "cpu":
            return
        register_cpu_backend()
        # SGLang's CPU rule has put intel_amx where the user left a blank (torch_native on ARM). It needs the
        # sgl_kernel build that is not there: whoever has that build sets SGLANG_USE_CPU_ENGINE.
        if server_args.attention_backend == "intel_amx" or _left_alone(server_args, "attention_backend"):
            server_args.attention_backend = CPU_ATTENTION
        if server_args.dtype == "auto":
            server_args.dtype = _DTYPE
        if server_args.page_size is None:
            server_args.page_size = _PAGE_SIZE
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = _MAX_TOTAL_TOKENS
        if server_args.chunked_prefill_size is None:
            server_args.chunked_prefill_size = _CHUNKED_PREFILL_SIZE
        # An idle scheduler otherwise spins: heat on a laptop, and on two cores a slower front end.
        server_args.sleep_on_idle = True
        _disable_graphs(server_args)


def _left_alone(server_args: Any, field: str) -> bool:
    """True if the user gave no value; SGLang keeps what was typed apart from what its rules decided."""
    return getattr(server_args, "_raw_input", {}).get(field) is None


def _disable_graphs(server_args: Any) -> None:
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    config = server_args.cuda_graph_config
    for phase in (Phase.DECODE, Phase.PREFILL):
        config = with_phase(config, phase, backend=Backend.DISABLED)
    server_args.cuda_graph_config = config

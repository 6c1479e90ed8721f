"""What this plugin expects of SGLang: the version, the flags it can serve, and the hooks it needs.

Every private touch of SGLang lives in this package; what it was written against is `SGLANG_VERSION`. Another
version may have moved any of it, so it is refused before anything is hooked.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

from sgl_krul.errors import UnsupportedServer

__all__ = [
    "BACKEND",
    "SGLANG_VERSION",
    "Hook",
    "apply_hooks",
    "apply_late_hooks",
    "require_flags",
    "require_hooks",
    "require_version",
]

SGLANG_VERSION = "0.5.23"
BACKEND = "krul"

Hook = tuple[str, str, Callable[..., Any]]  # (dotted target, "AFTER" | "AROUND", function)

# Server argument -> (flag, is the value one that can be served?, why not)
_REFUSED: Mapping[str, tuple[str, Callable[[Any], bool], str]] = {
    "disable_radix_cache": (
        "--disable-radix-cache",
        lambda v: not v,
        "sessions are resumed into the radix tree",
    ),
    "enable_hierarchical_cache": (
        "--enable-hierarchical-cache",
        lambda v: not v,
        "HiCache and krul would both move the same pages",
    ),
    "enable_lmcache": (
        "--enable-lmcache",
        lambda v: not v,
        "LMCache and krul would both move the same pages",
    ),
    "enable_flexkv": ("--enable-flexkv", lambda v: not v, "FlexKV and krul would both move the same pages"),
    "enable_unified_cache_external_linker": (
        "--enable-unified-cache-external-linker",
        lambda v: not v,
        "krul brings its own linker",
    ),
    "enable_streaming_session": (
        "--enable-streaming-session",
        lambda v: not v,
        "streaming sessions keep their KV outside the tree",
    ),
    "enable_session_radix_cache": (
        "--enable-session-radix-cache",
        lambda v: not v,
        "it takes over session_id",
    ),
    "tokenizer_worker_num": (
        "--tokenizer-worker-num",
        lambda v: v == 1,
        "plugins don't run in tokenizer workers, so requests could not be held",
    ),
    "pp_size": ("--pp-size", lambda v: v == 1, "pipeline parallelism is not served"),
    "dp_size": ("--dp-size", lambda v: v == 1, "data parallelism is not served: run one server a replica"),
    "attn_cp_size": ("--attn-cp-size", lambda v: v in (None, 1), "context parallelism is not served"),
    "nnodes": ("--nnodes", lambda v: v == 1, "several nodes are not served"),
    "disaggregation_mode": (
        "--disaggregation-mode",
        lambda v: v in (None, "null"),
        "disaggregated prefill and decode are not served",
    ),
    "speculative_algorithm": (
        "--speculative-algorithm",
        lambda v: v is None,
        "the draft model's KV is not stored",
    ),
    "enable_unified_memory": (
        "--enable-unified-memory",
        lambda v: not v,
        "its KV pool can't be read by pages",
    ),
    "enable_hisparse": ("--enable-hisparse", lambda v: not v, "its KV pool is not the plain one"),
    "enable_lora": ("--enable-lora", lambda v: not v, "adapters are not part of a session's identity yet"),
    "lora_paths": ("--lora-paths", lambda v: not v, "adapters are not part of a session's identity yet"),
    "elastic_ep_backend": (
        "--elastic-ep-backend",
        lambda v: v is None,
        "it changes cache keys while serving",
    ),
    "enable_multimodal": (
        "--enable-multimodal",
        lambda v: not v,
        "images are not part of a session's tokens",
    ),
    "skip_tokenizer_init": ("--skip-tokenizer-init", lambda v: not v, "requests could not be held"),
    "smg_grpc_mode": ("--smg-grpc-mode", lambda v: not v, "the session routes need the HTTP server"),
    "grpc_mode": ("--grpc-mode", lambda v: not v, "the session routes need the HTTP server"),
    "dllm_algorithm": ("--dllm-algorithm", lambda v: v is None, "diffusion models rewrite their KV"),
}


def require_version(installed: str | None = None) -> None:
    """Raise unless the installed SGLang is the one this package was written against.

    Raises:
        UnsupportedServer: naming both versions and what to install.
    """
    if installed is None:
        installed = importlib.metadata.version("sglang")
    if installed != SGLANG_VERSION:
        raise UnsupportedServer(
            f"sglang {installed} is installed, sgl-krul needs {SGLANG_VERSION}: "
            f"pip install sglang=={SGLANG_VERSION}, or leave out --radix-cache-backend {BACKEND}"
        )


def require_flags(server_args: object) -> None:
    """Refuse server arguments under which sessions could not be kept right.

    Raises:
        UnsupportedServer: naming the flag, its value, the reason and what to do.
    """
    for name, (flag, served, why) in _REFUSED.items():
        if not hasattr(server_args, name):
            continue
        value = getattr(server_args, name)
        if not served(value):
            raise UnsupportedServer(
                f"--radix-cache-backend {BACKEND} can't be used with {flag} (here {value!r}): {why}. "
                f"Drop {flag}, or drop --radix-cache-backend {BACKEND}."
            )


def apply_hooks(hooks: list[Hook]) -> None:
    """Register hooks with SGLang; it applies them after all plugins have run."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, kind, function in hooks:
        HookRegistry.register(target, function, HookType[kind])


def apply_late_hooks(hooks: list[Hook]) -> None:
    """Hook now, in a process whose plugins have all run: for what only a configuration asks for.

    Raises:
        UnsupportedServer: naming the targets that were not hooked.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    apply_hooks(hooks)
    HookRegistry.apply_hooks()  # leaves alone what is hooked already
    require_hooks(hooks)


def require_hooks(hooks: list[Hook]) -> None:
    """SGLang only logs a hook that fails; here that is an error.

    Raises:
        UnsupportedServer: naming the targets that were not hooked.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    applied = HookRegistry._patched  # noqa: SLF001  (no public way to ask)
    missing = sorted({target for target, _, _ in hooks} - applied)
    if missing:
        raise UnsupportedServer(
            f"SGLang did not apply the hooks on {', '.join(missing)}; see 'Failed to apply hooks' in its "
            f"log. sgl-krul was written for sglang {SGLANG_VERSION}: check that nothing else replaces them."
        )

"""What is refused at start, and how it is said."""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

with warnings.catch_warnings():
    # SGLang and the packages under it warn while they are imported on a CPU.
    warnings.simplefilter("ignore")
    from sglang.srt.server_args import ServerArgs

from sgl_krul.engine.compat import (
    SGLANG_VERSION,
    apply_late_hooks,
    require_flags,
    require_hooks,
    require_version,
)
from sgl_krul.errors import UnsupportedServer

# Argument -> (flag, a value it may have, one that is refused)
FLAGS: dict[str, tuple[str, Any, Any]] = {
    "disable_radix_cache": ("--disable-radix-cache", False, True),
    "enable_hierarchical_cache": ("--enable-hierarchical-cache", False, True),
    "enable_lmcache": ("--enable-lmcache", False, True),
    "enable_flexkv": ("--enable-flexkv", False, True),
    "enable_unified_cache_external_linker": ("--enable-unified-cache-external-linker", False, True),
    "enable_streaming_session": ("--enable-streaming-session", False, True),
    "enable_session_radix_cache": ("--enable-session-radix-cache", False, True),
    "tokenizer_worker_num": ("--tokenizer-worker-num", 1, 2),
    "pp_size": ("--pp-size", 1, 2),
    "dp_size": ("--dp-size", 1, 2),
    "attn_cp_size": ("--attn-cp-size", 1, 2),
    "nnodes": ("--nnodes", 1, 2),
    "disaggregation_mode": ("--disaggregation-mode", "null", "prefill"),
    "speculative_algorithm": ("--speculative-algorithm", None, "EAGLE"),
    "enable_unified_memory": ("--enable-unified-memory", False, True),
    "enable_hisparse": ("--enable-hisparse", False, True),
    "enable_lora": ("--enable-lora", None, True),
    "lora_paths": ("--lora-paths", None, ["a=b"]),
    "elastic_ep_backend": ("--elastic-ep-backend", None, "mooncake"),
    "enable_multimodal": ("--enable-multimodal", None, True),
    "skip_tokenizer_init": ("--skip-tokenizer-init", False, True),
    "smg_grpc_mode": ("--smg-grpc-mode", False, True),
    "grpc_mode": ("--grpc-mode", False, True),
    "dllm_algorithm": ("--dllm-algorithm", None, "LowConfidence"),
}


def arguments(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{name: good for name, (_, good, _) in FLAGS.items()} | changes)


def test_plain_arguments_are_served() -> None:
    require_flags(arguments())
    require_flags(SimpleNamespace())


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_that_cannot_be_served_is_named(name: str) -> None:
    flag, _, bad = FLAGS[name]
    with pytest.raises(UnsupportedServer) as caught:
        require_flags(arguments(**{name: bad}))
    text = str(caught.value)
    assert f"{flag} (here {bad!r}): " in text
    assert f"Drop {flag}, or drop --radix-cache-backend krul." in text


def test_sglangs_own_defaults_are_served_and_known() -> None:
    """A flag that SGLang does not have would be checked in vain."""
    defaults = {item.name: item.default for item in msgspec.structs.fields(ServerArgs)}
    require_flags(SimpleNamespace(**{name: defaults[name] for name in FLAGS}))


def test_the_version_is_the_pinned_one() -> None:
    require_version()
    require_version(SGLANG_VERSION)


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.5.23.post1", "0.6.0"])
def test_another_version_is_refused_naming_both(version: str) -> None:
    with pytest.raises(UnsupportedServer) as caught:
        require_version(version)
    text = str(caught.value)
    assert f"sglang {version} is installed, sgl-krul needs {SGLANG_VERSION}" in text
    assert f"pip install sglang=={SGLANG_VERSION}" in text


def test_a_late_hook_wraps_at_once_and_one_that_cannot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    class Backend:
        def forward(self, q: int) -> int:
            return q

    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr("sgl_krul.engine.compat.Backend", Backend, raising=False)
    target = "sgl_krul.engine.compat.Backend.forward"
    backend = Backend()  # hooks come when the server's backends are there already
    apply_late_hooks([(target, "AROUND", lambda original, backend, q: original(backend, q) + 1)])
    assert backend.forward(1) == 2
    apply_late_hooks([])
    assert backend.forward(1) == 2, "what is hooked is not hooked again"
    with pytest.raises(UnsupportedServer, match=r"sglang\.srt\.nowhere\.Class\.method"):
        apply_late_hooks([("sglang.srt.nowhere.Class.method", "AFTER", print)])


def test_a_hook_that_was_not_applied_is_named() -> None:
    hooks = [
        ("sglang.srt.nowhere.Class.method", "AFTER", print),
        ("sglang.srt.elsewhere.function", "AROUND", print),
    ]
    with pytest.raises(UnsupportedServer) as caught:
        require_hooks(hooks)
    text = str(caught.value)
    assert "sglang.srt.elsewhere.function, sglang.srt.nowhere.Class.method" in text
    assert "Failed to apply hooks" in text
    require_hooks([])

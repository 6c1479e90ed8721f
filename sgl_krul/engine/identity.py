"""Who made this KV: a fingerprint of the weights that is cheap and can't be fooled by an equal name."""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path

from sgl_krul.layout import KvLayout, namespace

__all__ = ["Identity", "fingerprint_weights", "unknown_weights"]

_SAMPLE_BYTES = 1 << 16
_SAMPLES = 16
_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf", ".npz")
_CONFIG_NAMES = ("config.json", "quantize_config.json", "hf_quant_config.json")


class Identity:
    """Names the namespace of this server's KV, at start and after every change of weights."""

    def __init__(self, layout: KvLayout, weight_version: str | None) -> None:
        self._layout = layout
        self._weight_version = weight_version or ""

    def of_model(self, model: Path, weight_version: str | None = None) -> str:
        """The namespace for weights loaded from a directory, or from the local copy of a hub model."""
        return self._namespace(fingerprint_weights(_local(model)), weight_version)

    def of_unknown(self, weight_version: str | None = None) -> str:
        """A namespace that nothing stored has: for weights that came over the wire."""
        return self._namespace(unknown_weights(), weight_version)

    def _namespace(self, fingerprint: str, weight_version: str | None) -> str:
        self._weight_version = weight_version or self._weight_version
        return namespace(self._layout, fingerprint, self._weight_version, rank=0, world_size=1)


def _local(model: Path) -> Path:
    """The directory of a model's files; hub names are looked up in the local cache, never fetched."""
    if model.exists():
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(model), local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return model


def fingerprint_weights(model: Path) -> str:
    """SHA-256 (hex) over the model's config and, of every weight file, its size and 16 sampled blocks of 64
    KiB.

    The first block holds a safetensors file's whole header or most of it, so shapes and names count fully;
    weight values count by sample. Names and dates of files count not: a copy of a model is the same model.

    A directory without weight files (a hub name that can't be resolved, dummy weights) has no fingerprint
    that would hold: it gets one of its own, so that nothing stored is ever taken for it.
    """
    digest = hashlib.sha256(b"krul-weights-1")
    if model.is_file():  # a GGUF file holds its configuration itself
        _sample(model, digest)
        return digest.hexdigest()
    if not model.is_dir():
        return unknown_weights()
    for name in _CONFIG_NAMES:
        path = model / name
        if path.is_file():
            data = path.read_bytes()
            digest.update(len(data).to_bytes(8, "little") + data)
    files = sorted(p for p in model.iterdir() if p.suffix in _SUFFIXES and p.is_file())
    if not files:
        return unknown_weights()
    for path in files:
        _sample(path, digest)
    return digest.hexdigest()


def unknown_weights() -> str:
    """A fingerprint that equals no other: for weights that came from no file."""
    return f"unknown-{uuid.uuid4().hex}"


def _sample(path: Path, digest: hashlib._Hash) -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    step = max(1, size // _SAMPLES)
    with path.open("rb") as file:
        for index in range(_SAMPLES):
            digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, index * step))

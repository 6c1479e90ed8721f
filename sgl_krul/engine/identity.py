"""Who made this KV: the namespace of this server's pages, at start and after every change of weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sgl_krul.engine.weights import fingerprint_weights, unknown_weights
from sgl_krul.layout import KvLayout, namespace

__all__ = ["Identity", "model_settings"]

# Arguments that change what the same files compute. The effective configuration of the model is beside them.
_ARGUMENTS = ("load_format", "quantization", "dtype", "model_impl", "json_model_override_args", "revision")
# Formats that load the files that are hashed. Of any other, dummy weights above all, the weights are unknown.
_FILE_FORMATS = frozenset(
    {"auto", "safetensors", "pt", "npcache", "gguf", "bitsandbytes", "mistral", "layered", "fastsafetensors"}
)


class Identity:
    """Names namespaces. `settings` is text: what else than the files decides how the model computes."""

    def __init__(
        self,
        layout: KvLayout,
        weight_version: str | None,
        settings: str,
        load_format: str,
        memory: Path,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._layout = layout
        self._weight_version = weight_version or ""
        self._settings = hashlib.sha256(settings.encode()).hexdigest()
        self._from_files = load_format in _FILE_FORMATS
        self._memory = memory
        self._rank = rank
        self._world_size = world_size

    def of_model(self, model: Path, weight_version: str | None = None) -> str:
        """The namespace for weights loaded from a directory, or from the local copy of a hub model."""
        if not self._from_files:
            return self.of_unknown(weight_version)
        return self._namespace(fingerprint_weights(_local(model), self._memory), weight_version)

    def of_unknown(self, weight_version: str | None = None) -> str:
        """A namespace that nothing stored has: for weights that came over the wire."""
        return self._namespace(unknown_weights(), weight_version)

    def _namespace(self, fingerprint: str, weight_version: str | None) -> str:
        self._weight_version = weight_version or self._weight_version
        weights = f"{fingerprint}/{self._settings}"
        return namespace(self._layout, weights, self._weight_version, self._rank, self._world_size)


def model_settings(server_args: Any, hf_config: Any) -> str:
    """The arguments and the effective configuration of the model, as canonical text."""
    arguments = {name: getattr(server_args, name, None) for name in _ARGUMENTS}
    config = hf_config.to_dict()
    config.pop("_name_or_path", None)  # where it lies is not what it is
    return json.dumps([arguments, config], sort_keys=True, default=str)


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

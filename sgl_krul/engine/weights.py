"""A fingerprint of a model's files: SHA-256 of every byte, computed once for each file and remembered.

A sample would be faster and would miss an edit between the samples, and then another model's KV would be
taken for this one's. So every byte counts: 2 GB/s on a current core, some files at once, and the files were
just read anyway. A file is hashed again when its size, its inode, or its time of change differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["fingerprint_weights", "unknown_weights"]

_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf", ".npz")
_CONFIG_NAMES = ("config.json", "quantize_config.json", "hf_quant_config.json")
_HASHERS = 4

Stamp = list[int]  # size, inode, mtime_ns, ctime_ns


def fingerprint_weights(model: Path, memory: Path) -> str:
    """SHA-256 (hex) over a model's configuration and weight files; `memory` is where file digests are kept.

    Names and dates of files count not: a copy of a model is the same model. A directory without weight files
    (a hub name that can't be resolved) has no fingerprint that would hold: it gets one that equals no other.
    """
    if model.is_file():  # a GGUF file holds its configuration itself
        files = [model]
    elif model.is_dir():
        weights = sorted(p for p in model.iterdir() if p.suffix in _SUFFIXES and p.is_file())
        files = [model / name for name in _CONFIG_NAMES if (model / name).is_file()] if weights else []
        files += weights
    else:
        files = []
    if not files:
        return unknown_weights()
    known = _recall(memory)
    with ThreadPoolExecutor(_HASHERS) as pool:
        digests = list(pool.map(lambda path: _digest(path, known), files))
    _remember(memory, known)
    total = hashlib.sha256(b"krul-weights-2")
    for digest in digests:
        total.update(bytes.fromhex(digest))
    return total.hexdigest()


def unknown_weights() -> str:
    """A fingerprint that equals no other: for weights that came from no file."""
    return f"unknown-{uuid.uuid4().hex}"


def _digest(path: Path, known: dict[str, tuple[Stamp, str]]) -> str:
    """SHA-256 (hex) of one file, from `known` if the file is still the one it was."""
    real = path.resolve()
    with real.open("rb") as file:
        stamp = _stamp(file.fileno())
        entry = known.get(str(real))
        if entry is not None and entry[0] == stamp:
            return entry[1]
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if _stamp(file.fileno()) == stamp:  # else it is being written: what was read may be neither of both
            known[str(real)] = (stamp, digest)
    return digest


def _stamp(descriptor: int) -> Stamp:
    status = os.fstat(descriptor)
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def _recall(memory: Path) -> dict[str, tuple[Stamp, str]]:
    """What was hashed before; a file that can't be read is as good as none."""
    try:
        entries = json.loads(memory.read_bytes())
        return {
            path: (list(map(int, stamp)), str(digest))
            for path, (stamp, digest) in entries.items()
            if len(bytes.fromhex(digest)) == 32
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _remember(memory: Path, known: dict[str, tuple[Stamp, str]]) -> None:
    """Best effort: without it the next start hashes again."""
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=memory.parent, delete=False) as file:
            json.dump(known, file)
        os.replace(file.name, memory)
    except OSError:
        return

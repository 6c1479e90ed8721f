"""Which weights made this KV."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgl_krul.engine.identity import Identity, model_settings
from sgl_krul.engine.weights import fingerprint_weights as fingerprint
from tests.sessions import LAYOUT

BIG = 4 << 20
SMALL = 300_000


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fingerprint_weights(model: Path) -> str:
    return fingerprint(model, Path("memory.json"))


def identity_of(version: str | None = None, settings: str = "", load_format: str = "auto") -> Identity:
    return Identity(LAYOUT, version, settings, load_format, Path("memory.json"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of two weight files and a config."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"layers": 3}')
    (path / "tokenizer.json").write_text("{}")
    (path / "a.safetensors").write_bytes(bytes(range(256)) * (BIG // 256))
    (path / "b.safetensors").write_bytes(bytes(range(255)) * (SMALL // 255))
    return path


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def test_a_copy_is_the_same_model(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(model, copy)
    for path in copy.iterdir():
        path.touch()
    assert fingerprint_weights(copy) == fingerprint_weights(model) == fingerprint_weights(model)
    (copy / "tokenizer.json").write_text("{'other': 1}")
    (copy / "README.md").write_text("notes")
    assert fingerprint_weights(copy) == fingerprint_weights(model)


@pytest.mark.parametrize(
    ("name", "position"),
    [
        ("a.safetensors", 0),
        ("a.safetensors", 65_535),
        ("a.safetensors", BIG // 16 + 100_000),
        ("a.safetensors", 15 * BIG // 16 + 65_535),
        ("b.safetensors", 0),
        ("b.safetensors", 123_456),
        ("b.safetensors", SMALL // 255 * 255 - 1),
        ("config.json", 5),
    ],
)
def test_one_changed_byte_is_another_model(model: Path, name: str, position: int) -> None:
    before = fingerprint_weights(model)
    flip(model / name, position)
    assert fingerprint_weights(model) != before
    flip(model / name, position)
    assert fingerprint_weights(model) == before


def test_another_size_or_number_of_files_is_another_model(model: Path) -> None:
    seen = {fingerprint_weights(model)}
    with (model / "a.safetensors").open("ab") as file:
        file.write(b"\0")
    seen.add(fingerprint_weights(model))
    (model / "c.bin").write_bytes(b"")
    seen.add(fingerprint_weights(model))
    (model / "quantize_config.json").write_text("{}")
    seen.add(fingerprint_weights(model))
    (model / "config.json").unlink()
    seen.add(fingerprint_weights(model))
    assert len(seen) == 5


@pytest.mark.parametrize("kind", ["missing", "empty", "config only"])
def test_without_weight_files_every_start_is_another_model(tmp_path: Path, kind: str) -> None:
    """Dummy weights, or a name that cannot be resolved: nothing stored may be taken for it."""
    path = tmp_path / "model"
    if kind != "missing":
        path.mkdir()
    if kind == "config only":
        (path / "config.json").write_text("{}")
    prints = [fingerprint_weights(path) for _ in range(3)]
    assert len(set(prints)) == 3
    assert all(text.startswith("unknown-") for text in prints)


def test_namespaces_follow_weights_and_their_version(model: Path) -> None:
    identity = identity_of()
    first = identity.of_model(model)
    assert len(first) == 32
    assert identity_of().of_model(model) == identity_of("").of_model(model) == first
    second = identity.of_model(model, "v2")
    assert second != first
    assert identity.of_model(model) == second  # the version stays until another is named
    assert identity_of("v2").of_model(model) == second
    assert identity.of_unknown() != identity.of_unknown()


def test_a_name_that_is_no_directory_is_looked_up_locally_only() -> None:
    names = {identity_of().of_model(Path("no-such-owner/no-such-model")) for _ in range(2)}
    assert len(names) == 2


def test_a_model_may_be_one_file(model: Path) -> None:
    path = model / "a.safetensors"
    before = fingerprint_weights(path)
    assert not before.startswith("unknown")
    assert fingerprint_weights(path) == before
    flip(path, 100)
    assert fingerprint_weights(path) != before


def test_the_same_files_loaded_otherwise_are_another_model(model: Path) -> None:
    """Arguments can change what the same files compute."""
    config = SimpleNamespace(to_dict=lambda: {"rms_norm_eps": 1e-5, "_name_or_path": "/somewhere"})
    other = SimpleNamespace(to_dict=lambda: {"rms_norm_eps": 1e-3, "_name_or_path": "/somewhere"})
    moved = SimpleNamespace(to_dict=lambda: {"rms_norm_eps": 1e-5, "_name_or_path": "/elsewhere"})
    plain = SimpleNamespace(load_format="auto", quantization=None, dtype="float32")
    quantized = SimpleNamespace(load_format="auto", quantization="fp8", dtype="float32")
    names = [
        identity_of(settings=model_settings(arguments, hf_config)).of_model(model)
        for arguments, hf_config in ((plain, config), (plain, moved), (plain, other), (quantized, config))
    ]
    assert names[0] == names[1]
    assert len(set(names)) == 3


def test_weights_that_come_from_no_file_are_unknown(model: Path) -> None:
    names = {identity_of(load_format="dummy").of_model(model) for _ in range(2)}
    assert len(names) == 2


def test_an_edit_that_keeps_size_and_date_is_seen(model: Path) -> None:
    path = model / "a.safetensors"
    before, status = fingerprint_weights(model), path.stat()
    flip(path, 1_000_000)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fingerprint_weights(model) != before


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"a": 1}', '{"a": [[1], "zz"]}'])
def test_a_damaged_memory_is_as_good_as_none(model: Path, damage: str) -> None:
    before = fingerprint_weights(model)
    Path("memory.json").write_text(damage)
    assert fingerprint_weights(model) == before


def test_what_was_hashed_is_not_hashed_again(model: Path) -> None:
    fingerprint_weights(model)
    entries = json.loads(Path("memory.json").read_text())
    for entry in entries.values():
        entry[1] = "ab" * 32
    Path("memory.json").write_text(json.dumps(entries))
    assert fingerprint_weights(model) == hashlib.sha256(b"krul-weights-2" + b"\xab" * 32 * 3).hexdigest()

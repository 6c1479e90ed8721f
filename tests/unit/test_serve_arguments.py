"""`krul serve`: which arguments the server gets, and that its end is ours."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_krul.cli.serve import serve_arguments
from sgl_krul.cli.server_process import free_port
from sgl_krul.errors import ConfigError
from sgl_krul.store.root import RootDirectory

MODEL = ["--model-path", "/models/m"]
OURS = ["--radix-cache-backend", "krul", "--enable-cache-report"]


def no_demo() -> Path:
    raise AssertionError("the demo model was not asked for")


def arguments(*args: str) -> list[str]:
    return serve_arguments(args, demo_model=no_demo)


def test_adds_the_backend_and_the_cache_report() -> None:
    assert arguments(*MODEL, "--port", "1234") == [*MODEL, "--port", "1234", *OURS]


def test_the_input_is_not_changed() -> None:
    given = [*MODEL]
    serve_arguments(given, demo_model=no_demo)
    assert given == MODEL


@pytest.mark.parametrize("spelling", [["--radix-cache-backend", "krul"], ["--radix-cache-backend=krul"]])
def test_adds_nothing_twice(spelling: list[str]) -> None:
    given = [*MODEL, *spelling, "--enable-cache-report"]
    assert arguments(*given) == given


@pytest.mark.parametrize("spelling", [["--radix-cache-backend", "lru"], ["--radix-cache-backend=lru"]])
def test_refuses_another_backend(spelling: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"'lru'.*sglang serve"):
        arguments(*MODEL, *spelling)


def test_a_backend_flag_without_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="radix-cache-backend"):
        arguments(*MODEL, "--radix-cache-backend")


@pytest.mark.parametrize("spelling", [["--config", "krul.yaml"], ["--config=krul.yaml"]])
def test_our_configuration_travels_in_the_linker_configuration(spelling: list[str]) -> None:
    result = arguments(*spelling, *MODEL)
    assert not any(arg.startswith("--config") for arg in result)
    position = result.index("--unified-cache-external-linker-config")
    assert json.loads(result[position + 1]) == {"config_file": str(Path.cwd() / "krul.yaml")}
    assert result[: len(MODEL)] == MODEL


def test_a_configuration_beside_a_linker_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="keep one"):
        arguments(*MODEL, "--config", "a.yaml", "--unified-cache-external-linker-config={}")


def test_a_configuration_without_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a file"):
        arguments(*MODEL, "--config")


def test_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="no model was named"):
        arguments("--port", "1234")


@pytest.mark.parametrize(
    "spelling", [["demo"], ["--model-path", "demo"], ["--model-path=demo"], ["--model", "demo"]]
)
def test_the_demo_model_has_its_path_and_keeps_its_name(spelling: list[str]) -> None:
    result = serve_arguments([*spelling, "--port", "1"], demo_model=lambda: Path("/cache/demo"))
    assert result == ["--port", "1", "--model-path", "/cache/demo", "--served-model-name", "demo", *OURS]


def test_the_demo_model_keeps_a_name_given_to_it() -> None:
    result = serve_arguments(["demo", "--served-model-name=me"], demo_model=lambda: Path("/cache/demo"))
    assert result == ["--served-model-name=me", "--model-path", "/cache/demo", *OURS]


def test_a_model_may_be_the_first_argument() -> None:
    assert arguments("org/model", "--tp", "2") == ["--model-path", "org/model", "--tp", "2", *OURS]


# `krul serve` replaces its process, so it runs in one of its own, with a stand-in for the server: the first
# module `sglang.launch_server` on its path.
@pytest.fixture
def fake_server(tmp_path: Path) -> Path:
    package = tmp_path / "path" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    return package / "launch_server.py"


def start(fake_server: Path, *arguments: Path | str) -> subprocess.Popen[str]:
    root, place = Path(__file__).parents[2], fake_server.parents[2]
    environ = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "KRUL_CONFIG")}
    environ["PYTHONPATH"] = os.pathsep.join((str(fake_server.parents[1]), str(root)))
    environ["XDG_CACHE_HOME"] = str(place / "cache")  # the store of the default configuration
    command = [sys.executable, "-m", "sgl_krul.cli", "serve", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environ)


def test_exit_status_and_environment_pass_through(fake_server: Path, tmp_path: Path) -> None:
    fake_server.write_text(
        "import os, sys\nprint(os.environ.get('HF_HUB_OFFLINE'), *sys.argv[1:])\nsys.exit(7)\n"
    )
    for model, offline in ((tmp_path, "1"), ("org/model", "None")):
        process = start(fake_server, model)
        output, _ = process.communicate(timeout=60)
        assert output.split() == [offline, "--model-path", str(model), *OURS]
        assert process.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_pass_through(fake_server: Path, number: signal.Signals) -> None:
    fake_server.write_text(
        "import signal, sys, time\n"
        "for n in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(n, lambda number, frame: sys.exit(40 + number))\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = start(fake_server, "org/model")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 40 + number


def test_a_server_that_is_killed_leaves_nothing_in_between(fake_server: Path) -> None:
    fake_server.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    process = start(fake_server, "org/model")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def refused(fake_server: Path, *arguments: Path | str) -> tuple[int, str]:
    """The status and the one line of a start that ends before there is a server."""
    fake_server.write_text("print('the server started')\n")
    process = start(fake_server, *arguments)
    output, message = process.communicate(timeout=60)
    assert output == ""
    assert message.startswith("krul: ")
    assert message.count("\n") == 1
    return process.returncode, message


@pytest.mark.parametrize(
    ("text", "words"),
    [("memory: {capacity_byte: 1GiB}", "memory.capacity_bytes"), ("ssd: {path: here}", "absolute path")],
)
def test_a_configuration_that_cannot_be_used_is_told_at_once(
    fake_server: Path, tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "krul.yaml"
    file.write_text(text)
    linker_config = json.dumps({"config_file": str(file)})
    for given in (["--config", file], ["--unified-cache-external-linker-config", linker_config]):
        # `demo`: nothing is converted first
        status, message = refused(fake_server, "demo", *given)
        assert status == 2  # launch/krul.service relies on it
        assert str(file) in message
        assert words in message
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("redis", "words"),
    [
        ("{url: 'reddis://h:6379'}", "redis.url: .*'reddis'"),
        ("{url: 'h:6379'}", "redis.url: "),
        ("{url: 'redis://:s3cret@h:63x9'}", "redis.url: .*host"),
        (
            "{url: 'redis://h', tls_ca_file: /none.pem}",
            "redis.tls_ca_file.*TLS",
        ),
    ],
)
def test_a_redis_that_cannot_be_one_is_told_at_once(
    fake_server: Path, tmp_path: Path, redis: str, words: str
) -> None:
    file = tmp_path / "krul.yaml"
    file.write_text(f"redis: {redis}")
    status, message = refused(fake_server, "demo", "--config", file)
    assert status == 2
    assert re.match(f"krul: {re.escape(str(file))}: {words}", message)
    assert "s3cret" not in message
    assert not (tmp_path / "cache").exists()


def test_a_redis_that_is_down_is_no_error(fake_server: Path, tmp_path: Path) -> None:
    file = tmp_path / "krul.yaml"
    file.write_text(
        f"ssd: null\nplacement: {{replicate: redis}}\nredis: {{url: 'redis://127.0.0.1:{free_port()}'}}"
    )
    fake_server.write_text("print('the server started')\n")
    process = start(fake_server, "org/model", "--config", file)
    assert process.communicate(timeout=60) == ("the server started\n", "")


@pytest.mark.parametrize("model", ["/no/such/dir", "./no-such", "../no-such", "~/no-such"])
def test_a_model_that_is_not_there(fake_server: Path, model: str) -> None:
    for given in ([model], [f"--model-path={model}"]):
        status, message = refused(fake_server, *given)
        assert status == 2
        assert message.startswith(f"krul: model {model}: there is no such file or folder")
        assert ("~: write it out" in message) is model.startswith("~")
    asking = start(fake_server, model, "--help")
    assert asking.communicate(timeout=60) == ("the server started\n", "")


def test_a_configuration_that_is_not_there(fake_server: Path, tmp_path: Path) -> None:
    status, message = refused(fake_server, "org/model", "--config", tmp_path / "none.yaml")
    assert status == 2
    assert f"{tmp_path}/none.yaml" in message


def test_a_store_that_cannot_be_made(fake_server: Path, tmp_path: Path) -> None:
    file = tmp_path / "krul.yaml"
    file.write_text(f"ssd: {{path: {file}/store}}")
    status, message = refused(fake_server, "org/model", "--config", file)
    assert status == 1  # another start may find it
    assert f"{file}/store" in message
    assert "ENOTDIR" in message


def test_a_store_in_use_is_told_at_once_and_by_whom(fake_server: Path, tmp_path: Path) -> None:
    store, file = tmp_path / "store", tmp_path / "krul.yaml"
    file.write_text(f"ssd: {{path: {store}}}")
    other = RootDirectory(store, lock_wait_s=0)
    try:
        status, message = refused(fake_server, "org/model", "--config", file)
        assert status == 1  # another start may find it free
        assert f"{store}: in use by another server (pid {os.getpid()})" in message
        # What SGLang's server takes may be asked for all the same.
        asking = start(fake_server, "org/model", "--config", file, "--help")
        assert asking.communicate(timeout=60) == ("the server started\n", "")
    finally:
        other.close()
    process = start(fake_server, "org/model", "--config", file)
    assert process.communicate(timeout=60) == ("the server started\n", "")


def test_the_server_can_take_the_lock_itself(fake_server: Path, tmp_path: Path) -> None:
    fake_server.write_text(
        "from pathlib import Path\n"
        "from sgl_krul.store.root import RootDirectory\n"
        f"RootDirectory(Path({str(tmp_path / 'cache/sgl-krul/sessions')!r}), lock_wait_s=0)\n"
        "print('locked')\n"
    )
    output, _ = start(fake_server, "org/model").communicate(timeout=60)
    assert output == "locked\n"

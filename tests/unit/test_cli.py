"""The `krul` command: help, errors in one line, the doctor, the demo's report. No server of SGLang."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sgl_krul.api.schemas import PauseResult, ResumeResult
from sgl_krul.cli import app, main
from sgl_krul.cli.demo_report import Outcome, Way, krul_command, print_report
from sgl_krul.cli.doctor import Finding, Level, _check_config, _check_hooks, _check_model, _check_server
from sgl_krul.cli.progress import Steps
from sgl_krul.cli.sessions import pause_line, resume_line
from sgl_krul.cli.turns import Turn
from sgl_krul.config import client_settings
from sgl_krul.session.record import SessionKey
from tests.session_server import KEY, MemoryFront, make_app, serve

SESSION = {
    "session_id": "trip",
    "salted": False,
    "state": "paused",
    "tokens": 100,
    "stored_tokens": 96,
    "bytes_raw": 2048,
    "bytes_stored": 2048,
    "tier": "ssd",
    "exact": True,
    "corrupt_chunks": 0,
    "last_used": 1.0,
}
NOWHERE = "http://127.0.0.1:9"


def run(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("KRUL_")}
    return subprocess.run(
        [sys.executable, "-m", "sgl_krul.cli", *args],
        capture_output=True,
        text=True,
        timeout=120,
        env=variables | environ,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["serve", "doctor", "chat", "demo", "sessions"]),
        (["serve"], ["MODEL|demo", "SGLang"]),
        (["doctor"], ["--config", "--url", "--model"]),
        (["chat"], ["--url", "--max-tokens", "--new"]),
        (["demo"], ["kill the server"]),
        (["sessions"], ["list", "show", "pause", "resume", "move", "export", "import", "rm"]),
        (["sessions", "pause"], ["SESSION_ID", "--timeout-s", "--cache-salt", "--json"]),
    ],
)
def test_help(args: list[str], words: list[str]) -> None:
    result = CliRunner().invoke(app, [*args, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    assert [word for word in words if word not in result.output] == []


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["sessions", "list", "--url", NOWHERE], 1, "no server can be reached at http://127.0.0.1:9"),
        (["sessions", "rm", "", "--url", NOWHERE], 1, "session_id '' is empty"),
        (["chat", "--url", NOWHERE], 1, "no server can be reached"),
        (["serve"], 2, "no model was named: krul serve MODEL"),
        (["serve", "m", "--radix-cache-backend", "lmcache"], 2, "'lmcache'"),
        (["serve", "--config"], 2, "--config needs a file"),
    ],
)
def test_errors_are_one_line(
    args: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("krul: ")
    assert captured.err.count("\n") == 1


def test_a_process_ends_without_a_traceback() -> None:
    done = run("sessions", "list", KRUL_URL=NOWHERE)
    assert done.returncode == 1
    assert done.stderr.startswith("krul: no server can be reached at http://127.0.0.1:9")
    assert "Traceback" not in done.stderr


def test_unknown_command_and_version() -> None:
    assert run("sesions").returncode == 2
    assert run("--version").stdout.startswith("sgl-krul 0.")


def test_client_settings() -> None:
    assert client_settings({}).url == "http://127.0.0.1:30000"
    assert client_settings({}).api_key is None
    settings = client_settings({"KRUL_URL": "http://a", "KRUL_API_KEY": "k"})
    assert (settings.url, settings.api_key) == ("http://a", "k")
    settings = client_settings({"KRUL_URL": "http://a", "KRUL_API_KEY": "k"}, "http://b", "l")
    assert (settings.url, settings.api_key) == ("http://b", "l")


def config(tmp_path: Path, text: str) -> list[Finding]:
    file = tmp_path / "krul.yaml"
    file.write_text(text, encoding="utf-8")
    return list(_check_config(file, {}))


def named(findings: list[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


def test_doctor_on_a_sound_configuration(tmp_path: Path) -> None:
    text = f"memory: {{capacity_bytes: 1MiB}}\nssd: {{path: {tmp_path}/new/store, capacity_bytes: 1MiB, "
    findings = config(tmp_path, text + "free_space_floor_bytes: 0}")
    assert {finding.level for finding in findings} == {Level.OK}
    assert "made at the start" in named(findings, "store").text
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memry: {}", "Did you mean memory?"),
        ("memory: {capacity_bytes: lots}", "expected a size"),
        ("ssd: {path: here}", "absolute path"),
        ("{", "not YAML"),
    ],
)
def test_doctor_on_a_broken_configuration(tmp_path: Path, text: str, message: str) -> None:
    (finding,) = config(tmp_path, text)
    assert finding.level is Level.FAIL
    assert message in finding.text


def test_doctor_on_too_much_memory(tmp_path: Path) -> None:
    finding = named(config(tmp_path, "memory: {capacity_bytes: 1PiB}\nssd: null"), "memory")
    assert finding.level is Level.FAIL
    assert "memory.capacity_bytes" in finding.advice


def test_doctor_without_a_disk(tmp_path: Path) -> None:
    finding = named(config(tmp_path, "ssd: null"), "store")
    assert finding.level is Level.WARN
    assert "ssd.path" in finding.advice


def test_doctor_on_a_disk_below_the_floor(tmp_path: Path) -> None:
    text = f"ssd: {{path: {tmp_path}, free_space_floor_bytes: 1000TiB}}"
    finding = named(config(tmp_path, text), "store")
    assert finding.level is Level.FAIL
    assert "free_space_floor_bytes" in finding.advice


def test_doctor_on_a_store_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    finding = named(config(tmp_path, f"ssd: {{path: {tmp_path}/file/store}}"), "store")
    assert finding.level is Level.FAIL
    assert "Not a directory" in finding.text


def test_doctor_on_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    finding = named(config(tmp_path, "ssd: {path: /proc/store}"), "store")
    assert finding.level is Level.FAIL
    assert "ssd.path" in finding.advice


def test_doctor_on_models(tmp_path: Path) -> None:
    (missing,) = _check_model("org/name", tmp_path)
    assert missing.level is Level.WARN
    (empty,) = _check_model(str(tmp_path), tmp_path)
    assert empty.level is Level.FAIL
    assert "config.json" in empty.text
    (tmp_path / "config.json").write_text("{}")
    (weightless,) = _check_model(str(tmp_path), tmp_path)
    assert (weightless.level, weightless.advice) == (Level.FAIL, "fetch the model completely")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (sound,) = _check_model(str(tmp_path), tmp_path)
    assert sound.level is Level.OK
    (demo,) = _check_model("demo", tmp_path)
    assert demo.level is Level.WARN
    assert "krul demo" in demo.advice


def test_doctor_on_a_server_that_is_not_there() -> None:
    (finding,) = _check_server(NOWHERE, None)
    assert finding.level is Level.FAIL
    assert "krul serve" in finding.text


class FrontWithRedis(MemoryFront):
    """One with a tier that can be out of reach."""

    breaker = "closed"

    async def overview(self) -> dict[str, Any]:
        """See MemoryFront."""
        answer = await super().overview()
        answer["tiers"]["redis"] = {
            "bytes": 1_468_006,
            "objects": 2,
            "capacity_bytes": 64 << 30,
            "breaker": self.breaker,
        }
        return answer


@pytest.fixture(scope="module")
def front() -> FrontWithRedis:
    front = FrontWithRedis()
    front.add(SessionKey("trip"))
    front.content = b"exported"
    return front


@pytest.fixture(scope="module")
def url(front: FrontWithRedis) -> Iterator[str]:
    yield from serve(make_app(front))


def sessions(url: str, *args: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["sessions", *args, "--url", url, "--api-key", KEY])
    return int(end.value.code or 0)


@pytest.mark.parametrize("breaker", ["open", "half-open"])
def test_a_tier_out_of_reach_is_told(
    front: FrontWithRedis, url: str, breaker: str, capsys: pytest.CaptureFixture[str]
) -> None:
    front.breaker = breaker
    assert sessions(url, "list") == 0
    memory, redis = capsys.readouterr().out.splitlines()[-2:]
    assert memory == "memory: 1B of 10B in 1 objects"
    assert redis == "redis: out of reach; 1.4MiB of 64GiB in 2 objects when it was last seen"
    finding = named(list(_check_server(url, KEY)), "tier redis")
    assert finding.level is Level.WARN
    assert finding.text == "the server can't reach it; 1.4MiB of 64GiB used when it was last seen"
    assert "krul doctor --config FILE" in finding.advice


def test_a_tier_that_answers(front: FrontWithRedis, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    front.breaker = "closed"
    assert sessions(url, "list") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "redis: 1.4MiB of 64GiB in 2 objects"
    assert named(list(_check_server(url, KEY)), "tier redis") == Finding(
        Level.OK, "tier redis", "1.4MiB of 64GiB used"
    )


def test_an_export_replaces_nothing_unasked(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trip.krul"
    file.write_bytes(b"older")
    assert sessions(url, "export", "trip", str(file)) == 1
    message = f"krul: {file} exists: name another file, or give --force to replace it\n"
    assert capsys.readouterr().err == message
    assert file.read_bytes() == b"older"
    assert sessions(url, "export", "trip", str(file), "--force") == 0
    assert file.read_bytes() == b"exported"


def test_doctor_says_first_that_the_hooks_take_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"hooks": 7, "accelerator": False, "platform": "KrulCpuPlatform"}
    findings = list(_check_hooks([sys.executable, "-c", f"print({json.dumps(found)!r})"]))
    assert [(finding.level, finding.name) for finding in findings] == [
        (Level.OK, "hooks"),
        (Level.OK, "device"),
    ]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "Importing SGLang to try the hooks: this takes up to a minute ...\n"


def test_lines_of_the_session_commands() -> None:
    pause = PauseResult.model_validate(SESSION | {"device_tokens_freed": 96, "elapsed_ms": 3.2})
    assert pause_line(pause) == (
        "'trip' is paused: 96 of 100 tokens stored, 2KiB in ssd, exact; 96 tokens freed on the device, 3 ms"
    )
    again = PauseResult.model_validate(SESSION | {"already_paused": True})
    assert pause_line(again) == "'trip' was paused before: 96 of 100 tokens stored, 2KiB in ssd, exact"
    resumed = {"restored_tokens": 96, "recompute_tokens": 4, "restored_from": "ssd", "elapsed_ms": 5.0}
    modes = ["quantized/int8", "raw", "shared/raw of 0", "quantized/int8"]
    lossy = again.model_copy(update={"exact": False, "layer_modes": modes, "expected_loss": 0.0029})
    assert pause_line(lossy).endswith(
        "not exact (layers: 2 quantized/int8, 1 raw, 1 shared/raw; expected loss 0.0029)"
    )
    assert pause_line(again.model_copy(update={"exact": False})).endswith("2KiB in ssd, not exact")
    assert resume_line(ResumeResult.model_validate(SESSION | resumed)) == (
        "'trip': 96 tokens are in memory (from ssd), 4 will be computed, 5 ms"
    )
    assert "corrupt manifest" in resume_line(
        ResumeResult.model_validate(SESSION | {"reason": "corrupt manifest"})
    )


def turn(*tokens: str, restored: int = 0, logprob: float = -0.5) -> Turn:
    pairs = tuple((token, logprob) for token in tokens)
    return Turn("".join(tokens), pairs, 0.5, 1.0, 120, max(restored, 96), restored)


@pytest.mark.parametrize(
    ("ssd", "status", "words"),
    [
        (
            turn("A", "B", restored=96, logprob=-0.50001),
            0,
            ["Same answer: yes", "1.0e-05 at most (within 1e-04)"],
        ),
        (turn("A", "C", restored=96), 1, ["Same answer: no", "from SSD"]),
        (turn("A", restored=96), 1, ["Same answer: no"]),
        (turn("A", "B"), 1, ["nothing was restored: from SSD"]),
    ],
)
def test_report_of_the_demo(
    ssd: Turn, status: int, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    same = turn("A", "B")
    ways = [Way("cold", same), Way("never paused", same), Way("from memory", turn("A", "B", restored=96))]
    outcome = Outcome(
        (*ways, Way("from SSD", ssd)), PauseResult.model_validate(SESSION), 100, Path("/store"), "What?"
    )
    assert print_report(Console(force_terminal=False), outcome, ".venv/bin/krul") == status
    shown = capsys.readouterr().out
    assert [word for word in [*words, "/store", "96 of 100"] if word not in shown] == []
    assert (".venv/bin/krul sessions list    what is stored" in shown) is (status == 0)


def test_the_report_says_slower_where_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    cold = turn("A", "B")
    slow, fast = replace(cold, first_token_s=1.0), replace(cold, first_token_s=0.25)
    ways = (Way("cold", cold), Way("never paused", fast), Way("from memory", slow))
    outcome = Outcome(ways, PauseResult.model_validate(SESSION), 100, Path("/store"), "What?")
    print_report(Console(force_terminal=False), outcome, "krul")
    rows = {line[:12].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert " 2.0x faster " in rows["never paused"]
    assert " 2.0x slower " in rows["from memory"]


def test_the_command_that_works_here(tmp_path: Path) -> None:
    bin_, other = tmp_path / ".venv" / "bin", tmp_path / "other"
    for folder in (bin_, other):
        folder.mkdir(parents=True)

    def command(here: Path, *path: Path) -> str:
        return krul_command(os.pathsep.join(map(str, path)), "/a b/python", bin_, here)

    assert command(tmp_path, other) == "'/a b/python' -m sgl_krul.cli"
    for folder in (bin_, other):
        (folder / "krul").touch(mode=0o755)
    assert command(tmp_path, tmp_path, bin_, other) == "krul"
    assert command(tmp_path, other, bin_) == ".venv/bin/krul"  # what the bare name leads to is another one
    assert command(tmp_path) == ".venv/bin/krul"
    assert command(other) == str(bin_ / "krul")
    assert command(bin_) == str(bin_ / "krul")


def test_steps_without_a_terminal() -> None:
    out = io.StringIO()
    steps = Steps(Console(file=out, force_terminal=False), 2)
    with steps.step("first [x]") as step:
        step.note("not shown")
        step.outcome = "3 tokens"
    lines = out.getvalue().splitlines()
    assert lines[0] == "[1/2] first [x] ..."
    assert lines[1].startswith("[1/2] done in 0.")
    assert lines[1].endswith("3 tokens")

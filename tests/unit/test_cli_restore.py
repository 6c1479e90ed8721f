"""`krul explain`, `krul timeline`, `krul calibrate` and a resume to the device, against the real routes."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from sgl_krul.api.plans import PlanInfo, RatesInfo, SessionPlan, SessionTimeline
from sgl_krul.api.schemas import ResumeResult
from sgl_krul.cli import app, main
from sgl_krul.cli.doctor import Finding, Level, _check_server
from sgl_krul.cli.restore_text import (
    comparison_table,
    explain_lines,
    rates_note,
    rates_table,
    staircase_lines,
    timeline_lines,
)
from sgl_krul.cli.sessions import resume_line
from sgl_krul.engine.frontend import AnswerError
from sgl_krul.restore.timeline import Span
from sgl_krul.session.record import SessionKey
from tests.restores import DEFAULT_RATES, PLAN, RATES, SPANS, TIMELINE, plan_answer, timeline_of
from tests.session_server import KEY, MemoryFront, make_app, serve


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[MemoryFront, str]]:
    front = MemoryFront()
    for url in serve(make_app(front)):
        yield front, url


@pytest.fixture
def front(running: tuple[MemoryFront, str]) -> MemoryFront:
    front, _ = running
    front.failure = None
    front.load = {}
    front.resumed.clear()
    front.add(SessionKey("trip"))
    front.restores = {
        "plan": plan_answer(),
        "timeline": TIMELINE,
        "rates": RATES,
        "calibrate": {"samples": 41, "problems": []},
    }
    return front


@pytest.fixture
def url(running: tuple[MemoryFront, str], front: MemoryFront) -> str:
    return running[1]


def krul(url: str, *args: str) -> int:
    with pytest.raises(SystemExit) as end:
        main([*args, "--url", url, "--api-key", KEY])
    return int(end.value.code or 0)


def plan_of(**changes: Any) -> SessionPlan:
    return SessionPlan.model_validate({"session_id": "trip"} | plan_answer(**changes))


def shown(table: Table) -> list[list[str]]:
    """The table's rows as printed, cell by cell."""
    out = io.StringIO()
    Console(file=out, width=200).print(table)
    return [
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in out.getvalue().splitlines()
    ]


# -- explain --


def test_explain(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert krul(url, "explain", "trip") == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "'trip': 1,024 tokens (1,024 in ssd), assuming 32 new ones follow",
        "A resume would go straight to the device, as a job beside the other chats.",
        "Why: both streams end together, 1.9 times as fast as either alone",
        "Recompute: available",
        "Rates: ssd 18MiB/s after 1ms; recompute 145us a token and layer, beside attention",
        "",
        "way                 first token  brought back  bytes loaded    load  recompute  forward",
        "the plan (optimal)       1.62 s         1,024          3MiB  1.40 s     1.50 s   0.12 s",
        "load all                 3.12 s         1,024          8MiB  3.00 s     0.00 s   0.12 s",
        "recompute all            3.30 s             0            0B  0.00 s     0.00 s   3.30 s",
        "",
        "Staircase: # recomputed   . loaded   = on the device already   blank: computed by the request",
        "layer 0     |################################################|  1,024 recomputed",
        "layers 1-2  |########################........................|  512 recomputed",
        "layer 3     |############....................................|  256 recomputed",
    ]


def test_explain_says_plainly_that_rates_are_defaults(
    front: MemoryFront, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = PLAN | {"compute_s": None, "forward_s": None, "ttft_s": None}
    refused = {"available": False, "reason": "GptOssForCausalLM is no class that was tried"}
    front.restores["plan"] = plan_answer(rates=DEFAULT_RATES, recompute=refused, recompute_all=unknown)
    assert krul(url, "explain", "trip") == 0
    out = capsys.readouterr().out
    assert "These are safe defaults, in part at least: run `krul calibrate restore` to measure" in out
    assert "Recompute: not on this server: GptOssForCausalLM is no class that was tried\n" in out
    assert "recompute not measured" in out
    unpredicted = ["recompute all", "not known", "1,024", "3MiB", "1.40 s", "not known", "not known"]
    assert unpredicted in shown(comparison_table(plan_of(recompute_all=unknown)))
    # Nothing is counted for a model that was not measured: that is no prediction either.
    nothing = PLAN | {"tokens": 0, "load_bytes": 0, "load_s": 0.0, "compute_s": 0.0}
    nothing |= {"forward_s": 0.0, "ttft_s": 0.0}
    rows = shown(comparison_table(plan_of(rates=DEFAULT_RATES, recompute_all=nothing)))
    assert rows[-1] == ["recompute all", "not known", "0", "0B", "0.00 s", "not known", "not known"]


@pytest.mark.parametrize(
    ("path", "tiers", "words"),
    [
        ("memory", {"memory": 1024}, "over host memory"),
        ("device", {"ssd": 768, "redis": 256, "memory": 0}, "straight to the device"),
        ("none", {}, "bring nothing back"),
    ],
)
def test_explain_names_the_way_and_the_tiers(path: str, tiers: dict[str, int], words: str) -> None:
    first, way, *_ = explain_lines(plan_of(path=path, tiers=tiers, on_device_tokens=0))
    assert words in way
    named = ", ".join(f"{tokens} in {tier}" for tier, tokens in tiers.items() if tokens)
    assert f"({named.replace('1024', '1,024') or 'none stored'})" in first
    on_device = explain_lines(plan_of(path=path, tiers=tiers, on_device_tokens=512))[0]
    assert "(512 on the device" in on_device


def test_a_staircase_tells_four_kinds_of_tokens_apart() -> None:
    plan = PlanInfo.model_validate(PLAN | {"tokens": 768, "staircase": [768, 512, 256]})
    cells = [line.split("|")[1] for line in staircase_lines(plan, 1024, 256)[1:]]
    assert cells == [
        "=" * 12 + "#" * 24 + " " * 12,
        "=" * 12 + "#" * 12 + "." * 12 + " " * 12,
        "=" * 12 + "." * 24 + " " * 12,
    ]
    assert [line.split("|")[2].strip() for line in staircase_lines(plan, 1024, 256)[1:]] == [
        "512 recomputed",
        "256 recomputed",
        "0 recomputed",
    ]


def test_a_staircase_of_a_deep_model_stays_short() -> None:
    stairs = [8000 - 100 * layer for layer in range(80)]
    plan = PlanInfo.model_validate(PLAN | {"tokens": 8192, "staircase": stairs})
    lines = staircase_lines(plan, 8192, 0)
    assert len(lines) == 17
    assert lines[1].startswith("layers 0-4 ")
    assert lines[-1].startswith("layers 75-79  |")


def test_nothing_to_bring_back_has_no_staircase() -> None:
    plan = PlanInfo.model_validate(PLAN | {"tokens": 0, "staircase": []})
    assert staircase_lines(plan, 1024, 0) == ["Nothing is brought back, so there is no staircase."]


@pytest.mark.parametrize("command", ["explain", "timeline"])
def test_json_is_the_servers_answer(url: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert krul(url, command, "trip", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["plan"] == PLAN
    assert answer["session_id"] == "trip"


@pytest.mark.parametrize("command", ["explain", "timeline"])
def test_a_session_that_is_not_there(url: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert krul(url, command, "other") == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "krul: no session 'other': list them\n")


def test_markup_in_an_answer_is_text(
    front: MemoryFront, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    front.add(SessionKey("[red]x[/red]"))
    front.restores["plan"] = plan_answer(plan=PLAN | {"why": "see [bold]this[/bold] :smile:"})
    assert krul(url, "explain", "[red]x[/red]") == 0
    out = capsys.readouterr().out
    assert "'[red]x[/red]': 1,024 tokens" in out
    assert "Why: see [bold]this[/bold] :smile:" in out


def test_explain_of_a_session_that_is_not_stored(
    front: MemoryFront, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    front.restores["plan"] = plan_answer(
        tokens=0, path="none", tiers={}, plan=None, load_all=None, recompute_all=None, reason="missing"
    )
    assert krul(url, "explain", "trip") == 0
    out = capsys.readouterr().out
    assert "bring nothing back" in out
    assert "Of note: missing" in out
    assert "Staircase" not in out


def test_a_server_that_may_not_recompute_has_no_more_to_measure() -> None:
    rates = DEFAULT_RATES | {"recompute": {"available": False, "reason": "no known class"}}
    assert rates_note(RatesInfo.model_validate(rates)).startswith("The tiers were measured")
    assert "run `krul calibrate restore`" in rates_note(RatesInfo.model_validate(rates | {"tiers": {}}))
    assert "run `krul calibrate restore`" in rates_note(RatesInfo.model_validate(DEFAULT_RATES))


# -- timeline --


def test_timeline(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert krul(url, "timeline", "trip") == 0
    assert capsys.readouterr().out.splitlines() == [
        "'trip': first token after restore 1.50 s + forward 0.12 s (predicted), planned 1.62 s in all; "
        "bubble 27%",
        f"compute  |{'#' * 48}|  100% busy, 384 tokens recomputed (through all 4 layers, on average)",
        f"load     |{'#' * 29}{' ' * 9}{'#' * 7}{' ' * 3}|  73% busy, 8MiB loaded from redis and ssd",
        "In vain: 1 of 6 spans, 1MiB loaded",
    ]


def test_a_timeline_with_gaps_and_a_reason() -> None:
    timeline = timeline_of([SPANS[3]], 1.4).as_dict() | {"spans_dropped": 1200}
    answer = TIMELINE | {"session_id": "trip", "timeline": timeline, "reason": "ssd became slow"}
    lines = timeline_lines(SessionTimeline.model_validate(answer))
    assert lines[1] == "Of note: ssd became slow"
    assert [line[:5] for line in lines[2:]] == ["load ", "1,200"]  # no stream that took no part


def test_a_title_without_a_prediction() -> None:
    for forward_s in (0.0, None):
        answer = TIMELINE | {"session_id": "trip", "plan": PLAN | {"forward_s": forward_s}}
        title = timeline_lines(SessionTimeline.model_validate(answer))[0]
        assert title == "'trip': first token after restore 1.50 s; bubble 27%"


def test_a_timeline_without_work() -> None:
    answer = TIMELINE | {"session_id": "trip", "timeline": timeline_of([], 0.0).as_dict()}
    assert timeline_lines(SessionTimeline.model_validate(answer))[1:] == [
        "Neither stream had anything to do."
    ]


def test_a_bar_shows_half_a_columns_work() -> None:
    spans = [Span("load", 0.0, 0.9, 0, 256, 0, 4, 9, "ssd"), Span("load", 47.2, 47.6, 0, 256, 0, 4, 9, "ssd")]
    answer = TIMELINE | {"session_id": "trip", "timeline": timeline_of(spans, 48.0).as_dict()}
    bar = timeline_lines(SessionTimeline.model_validate(answer))[1].split("|")[1]
    assert bar == "#" + " " * 46 + "-"


def test_a_picture(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trip.png"
    assert krul(url, "timeline", "trip", "--out", str(file)) == 0
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert capsys.readouterr().out.splitlines()[-1] == f"drawn in {file}"
    file.unlink()
    assert krul(url, "timeline", "trip", "--out", str(file), "--json") == 0
    json.loads(capsys.readouterr().out)
    assert file.exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trip.jpg", "is no PNG file by its name: give one that ends in .png"),
        ("no/trip.png", "No such file or directory: give a file that can be read or written"),
    ],
)
def test_pictures_that_cannot_be_written(
    url: str, tmp_path: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert krul(url, "timeline", "trip", "--out", str(tmp_path / name)) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == "matplotlib":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "sgl_krul.cli.timeline_chart", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert krul(url, "timeline", "trip", "--out", str(tmp_path / "trip.png")) == 1
    captured = capsys.readouterr()
    assert "a picture needs matplotlib, which is not installed" in captured.err
    assert "run `pip install 'matplotlib>=3.10'`" in captured.err
    assert captured.out == ""
    assert krul(url, "timeline", "trip") == 0  # the text needs none


def test_no_restore_yet(front: MemoryFront, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    front.failure = AnswerError(404, "NoTimeline", "session 'trip' was not restored yet: resume it first")
    assert krul(url, "timeline", "trip") == 1
    assert capsys.readouterr().err == "krul: session 'trip' was not restored yet: resume it first\n"


# -- rates --


def test_calibrate(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert krul(url, "calibrate", "restore") == 0
    first, done, *rows, note = capsys.readouterr().out.splitlines()
    assert first == "[1/1] Measuring recompute and every tier, up to a minute ..."
    assert done.startswith("[1/1] done in ")
    assert done.endswith(": measured")
    assert [row.split("  ")[0] for row in rows[1:5]] == [
        "recompute: K and V",
        "recompute: rest of the layer",
        "recompute: attention",
        "recompute: a slice",
    ]
    assert note == "These were measured on this server, and follow what restores really take."


def test_rates_have_units() -> None:
    rows = {row[0]: row[1:] for row in shown(rates_table(RatesInfo.model_validate(RATES)))[1:]}
    assert rows == {
        "recompute: K and V": ["35us", "token and layer"],
        "recompute: rest of the layer": ["110us", "token and layer"],
        "recompute: attention": ["12ns", "pair of tokens and layer"],
        "recompute: a slice": ["1.2ms", "slice of one layer"],
        "ssd: bandwidth": ["18MiB/s", "4 reads in flight"],
        "ssd: latency": ["1ms", "read"],
        "verify, decode, copy": ["953.7MiB/s", "worker"],
    }
    nothing = RATES | {"compute": None, "tiers": {}, "land_s_per_byte": 0.0}
    assert shown(rates_table(RatesInfo.model_validate(nothing)))[1:] == [
        ["recompute", "not measured"],
        ["verify, decode, copy", "free", "worker"],
    ]


def test_calibrate_that_could_not_measure_all(
    front: MemoryFront, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    front.restores["calibrate"] = {"measured": False, "problems": ["redis was not measured: out of reach"]}
    assert krul(url, "calibrate", "restore") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].endswith(": not all of it could be measured")
    assert out[-2] == "redis was not measured: out of reach"
    assert out[-1].startswith("These are safe defaults")


def test_calibrate_as_json_prints_json_alone(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert krul(url, "calibrate", "restore", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["samples"] == 41
    assert "Measuring" in captured.err


def test_calibrate_that_fails(front: MemoryFront, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    front.failure = AnswerError(409, "SessionBusy", "a restore is running: try again")
    assert krul(url, "calibrate", "restore") == 1
    assert capsys.readouterr().err == "krul: a restore is running: try again\n"


def test_rates_alone(front: MemoryFront, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    front.restores["rates"] = DEFAULT_RATES
    assert krul(url, "calibrate", "rates") == 0
    out = capsys.readouterr().out
    assert "Measuring" not in out
    assert "run `krul calibrate restore`" in out.splitlines()[-1]


# -- resume --


def test_resume_to_the_device(front: MemoryFront, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    took = {"restored_to": "device", "path": "device", "seconds": 1.5, "predicted_s": 1.42, "bubble": 0.041}
    front.restores["resume"] = took | {"recomputed_tokens": 40.4, "loaded_bytes": 3 << 20}
    assert krul(url, "sessions", "resume", "trip", "--target", "device", "--strategy", "half") == 0
    assert front.resumed == [("device", "half")]
    assert capsys.readouterr().out == (
        "'trip': 96 tokens are on the device, 42% of their KV recomputed, 3MiB loaded, 4 will be computed, "
        "1.50 s "
        "(1.42 s predicted), a stream idle 4% of it\n"
    )


def test_a_bad_target_is_told_by_the_server(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert krul(url, "sessions", "resume", "trip", "--target", "disk") == 1
    assert capsys.readouterr().err.startswith("krul: target 'disk': expected one of memory, device")


def test_a_restore_without_a_plan(front: MemoryFront) -> None:
    took = {
        "restored_tokens": 96,
        "recompute_tokens": 4,
        "restored_to": "device",
        "reason": "chunk 3 was lost",
    }
    line = resume_line(ResumeResult.model_validate(front.sessions[SessionKey("trip")] | took))
    assert line == (
        "'trip': 96 tokens are on the device, 0% of their KV recomputed, 0B loaded, 4 will be computed, "
        "0.00 s; "
        "chunk 3 was lost"
    )


# -- doctor --


def findings(url: str) -> dict[str, Finding]:
    return {finding.name: finding for finding in _check_server(url, KEY)}


def test_doctor_says_whether_recompute_is_available(front: MemoryFront, url: str) -> None:
    assert not {"recompute", "rates"} & set(findings(url))  # a server that doesn't say
    front.load = {"slow_steps": 0, "recompute": {"available": True, "reason": ""}}
    assert findings(url)["recompute"].level is Level.OK
    assert findings(url)["rates"].level is Level.OK
    front.load = {"recompute": {"available": False, "reason": "layer 3 differs by 0.2"}}
    front.restores["rates"] = DEFAULT_RATES
    found = findings(url)
    assert found["recompute"].level is Level.WARN
    assert found["recompute"].text == "not on this server: layer 3 differs by 0.2"
    assert "just as exact" in found["recompute"].advice
    assert found["rates"] == Finding(
        Level.WARN, "rates", "restores are planned with safe defaults", "run `krul calibrate restore`"
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["explain", "timeline", "calibrate"]),
        (["explain"], ["SESSION_ID", "--cache-salt", "--json", "--url"]),
        (["timeline"], ["--out", "FILE.png", "--json"]),
        (["calibrate"], ["restore", "rates"]),
        (["sessions", "resume"], ["--target", "--strategy", "optimal, load, recompute, half, paper"]),
    ],
)
def test_help(args: list[str], words: list[str]) -> None:
    result = CliRunner().invoke(app, [*args, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    assert [word for word in words if word not in result.output] == []

"""`krul doctor`: can this machine serve and keep sessions? Each line says what was found and what to do."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from sgl_krul.api.client import KrulClient
from sgl_krul.api.plans import RatesInfo, RecomputeInfo
from sgl_krul.api.schemas import TierInfo
from sgl_krul.cli.demo_model import DEMO_MODEL, problems
from sgl_krul.cli.doctor_tiers import Finding, Level, check_tiers, usage_finding
from sgl_krul.cli.serve import DEMO
from sgl_krul.config import cache_home, client_settings, format_size, resolve_config
from sgl_krul.engine.compat import SGLANG_VERSION, require_version
from sgl_krul.errors import KrulError

__all__ = ["Finding", "Level", "run_doctor"]

_ENTRY_POINTS = (("sglang.srt.plugins", "krul"), ("sglang.srt.platforms", "krul_cpu"))
_SELFTEST = (sys.executable, "-W", "ignore", "-m", "sgl_krul.engine.selftest")
_SELFTEST_DEADLINE_S = 180
_REINSTALL = "run `pip install -e .` (or launch/setup.sh) in the Python that runs the server"


def run_doctor(
    environ: Mapping[str, str], model: str, config_file: Path | None, url: str | None, api_key: str | None
) -> int:
    """Run all checks, print each as it is done; returns 1 if any failed."""
    console = Console(soft_wrap=True)
    worst = 0
    for check in _checks(environ, model, config_file, url, api_key):
        with console.status("checking ..."):  # shows on a terminal only
            findings = list(check())
        for finding in findings:
            _print(console, finding)
            worst = max(worst, int(finding.level is Level.FAIL))
    return worst


def _checks(
    environ: Mapping[str, str], model: str, config_file: Path | None, url: str | None, api_key: str | None
) -> list[Callable[[], Iterator[Finding]]]:
    checks: list[Callable[[], Iterator[Finding]]] = [
        _check_python,
        _check_sglang,
        _check_entry_points,
        _check_hooks,
        lambda: _check_model(model, cache_home(environ)),
        lambda: _check_config(config_file, environ),
    ]
    if url is not None:
        settings = client_settings(environ, url, api_key)
        checks.append(lambda: _check_server(settings.url, settings.api_key))
    return checks


def _check_python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    # pip refuses older ones; what is left to say is which one it is.
    yield Finding(Level.OK, "Python", f"{version}, {sys.executable}")


def _check_sglang() -> Iterator[Finding]:
    try:
        require_version()
    except importlib.metadata.PackageNotFoundError:
        yield Finding(Level.FAIL, "SGLang", "not installed", f"run `pip install sglang=={SGLANG_VERSION}`")
    except KrulError as error:
        yield Finding(Level.FAIL, "SGLang", "another version", str(error))
    else:
        yield Finding(Level.OK, "SGLang", SGLANG_VERSION)


def _check_entry_points() -> Iterator[Finding]:
    missing = [
        f"{name} of group {group}"
        for group, name in _ENTRY_POINTS
        if name not in importlib.metadata.entry_points(group=group).names
    ]
    if missing:
        yield Finding(Level.FAIL, "plugin", f"SGLang can't find {', '.join(missing)}", _REINSTALL)
    else:
        yield Finding(Level.OK, "plugin", "SGLang finds it")


def _check_hooks(command: Sequence[str] = _SELFTEST) -> Iterator[Finding]:
    """In a process of its own: hooks change the process they are applied in."""
    print("Importing SGLang to try the hooks: this takes up to a minute ...", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SELFTEST_DEADLINE_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        yield Finding(
            Level.FAIL,
            "hooks",
            f"SGLang was not loaded within {_SELFTEST_DEADLINE_S} s",
            f"see what it does: {' '.join(command[-2:])}",
        )
        return
    try:
        result = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        yield Finding(
            Level.FAIL,
            "hooks",
            f"SGLang can't be loaded: {last[:300]}",
            "run `python -m sgl_krul.engine.selftest`",
        )
        return
    if "error" in result:
        yield Finding(Level.FAIL, "hooks", str(result["error"]), _REINSTALL)
        return
    yield Finding(Level.OK, "hooks", f"all {result['hooks']} applied")
    if result["accelerator"]:
        yield Finding(Level.OK, "device", "an accelerator; the plugin changes nothing but the cache")
    elif result["platform"] == "KrulCpuPlatform":
        yield Finding(Level.OK, "device", "no accelerator: small models run on the CPU")
    else:
        yield Finding(
            Level.WARN,
            "device",
            f"no accelerator, and SGLang uses {result['platform']}",
            "unset SGLANG_PLATFORM and SGLANG_USE_CPU_ENGINE for our CPU platform",
        )


def _check_model(model: str, home: Path) -> Iterator[Finding]:
    if model == DEMO:
        path = home / "models" / DEMO_MODEL
        found = problems(path)
        if found and path.exists():
            yield Finding(Level.WARN, "model", found[0], "it is converted again when it is needed")
        elif found:
            yield Finding(
                Level.WARN,
                "model",
                "the demo model is not there yet",
                "`krul demo` or `krul serve demo` makes it",
            )
        else:
            yield Finding(Level.OK, "model", f"the demo model, {path}")
        return
    path = Path(model)
    if not path.exists():
        yield Finding(
            Level.WARN,
            "model",
            f"{model} is no folder here",
            "right if it is a name on the hub; SGLang fetches that",
        )
        return
    yield _model_folder(path)


def _model_folder(path: Path) -> Finding:
    try:
        names = {entry.name for entry in path.iterdir()}
        (path / "config.json").read_bytes()
    except OSError as error:
        advice = "name a folder with a model in the format of transformers"
        return Finding(Level.FAIL, "model", f"{error.filename or path}: {error.strerror}", advice)
    weights = [name for name in names if name.endswith((".safetensors", ".bin", ".pt", ".gguf"))]
    if not weights:
        return Finding(Level.FAIL, "model", f"{path} has no weight files", "fetch the model completely")
    return Finding(Level.OK, "model", f"{path}, {len(weights)} weight files")


def _check_config(file: Path | None, environ: Mapping[str, str]) -> Iterator[Finding]:
    """The configuration, and then the places it names."""
    variables = {**environ, "KRUL_CONFIG": str(file)} if file is not None else environ
    try:
        config = resolve_config(None, variables)
    except KrulError as error:
        yield Finding(
            Level.FAIL, "configuration", str(error), "the message says which key and what it may be"
        )
        return
    source = variables.get("KRUL_CONFIG") or "built-in default"
    yield Finding(Level.OK, "configuration", source)
    yield from check_tiers(config)


def _check_server(url: str, api_key: str | None) -> Iterator[Finding]:
    try:
        with KrulClient(url, api_key, timeout_s=10.0) as client:
            overview = client.sessions()
            # An older server doesn't say, and has no rates either.
            rates = None if overview.recompute is None else client.rates()
    except KrulError as error:
        yield Finding(Level.FAIL, "server", str(error))
        return
    states = [session.state for session in overview.sessions]
    counted = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states))) or "none yet"
    yield Finding(Level.OK, "server", f"{url}, sessions: {counted}")
    for name, tier in overview.tiers.items():
        yield _tier_finding(name, tier)
    if overview.recompute is not None and rates is not None:
        yield _recompute_finding(overview.recompute)
        yield _rates_finding(rates)
    damaged = {name: count for name, count in overview.counters.items() if "corrupt" in name and count}
    if damaged:
        text = ", ".join(f"{name}: {count}" for name, count in damaged.items())
        yield Finding(Level.WARN, "stored data", text, "these were computed anew; check the disk")


def _recompute_finding(recompute: RecomputeInfo) -> Finding:
    """Only a running server knows: it tries recomputing on its own model when it starts."""
    if recompute.available:
        return Finding(Level.OK, "recompute", "a restore may recompute what it need not load")
    return Finding(
        Level.WARN,
        "recompute",
        f"not on this server: {recompute.reason}",
        "restores load everything, which is slower over a slow link and just as exact",
    )


def _rates_finding(rates: RatesInfo) -> Finding:
    may_not = rates.recompute is not None and not rates.recompute.available
    if rates.measured or (may_not and rates.tiers):
        return Finding(Level.OK, "rates", "measured: see `krul calibrate rates`")
    return Finding(
        Level.WARN, "rates", "restores are planned with safe defaults", "run `krul calibrate restore`"
    )


def _tier_finding(name: str, tier: TierInfo) -> Finding:
    if not tier.reachable:
        used = f"{format_size(tier.bytes)} of {format_size(tier.capacity_bytes)} used"
        return Finding(
            Level.WARN,
            f"tier {name}",
            f"the server can't reach it; {used} when it was last seen",
            "start it, or see why with `krul doctor --config FILE` on the server's machine; until it is "
            "back, what lies only there is computed anew",
        )
    finding = usage_finding(f"tier {name}", "", tier.bytes, tier.capacity_bytes)
    # Memory drops what is oldest by itself.
    return finding._replace(level=Level.OK, advice="") if name == "memory" else finding


def _print(console: Console, finding: Finding) -> None:
    color = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}[finding.level]
    console.print(f"[{color}]{finding.level.value:4}[/]", end="  ")
    console.print(f"{finding.name:14} {finding.text}", markup=False, highlight=False, emoji=False)
    if finding.advice:
        console.print(f"      {'':14} -> {finding.advice}", markup=False, highlight=False, emoji=False)

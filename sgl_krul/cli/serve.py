"""`krul serve`: SGLang's own server with our radix cache.

`serve_arguments` is pure; `serve` becomes the server, once the configuration and the store directory were
looked at: what cannot be used is told at once and in a line. What a plain CPU needs (device, attention and
sampling backend, dtype, page size, no CUDA graphs, a bounded KV pool) is set by the platform in
`engine/cpu.py`, so that `sglang serve` has it too: no flag is added for it here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from sgl_krul.cli.demo_model import demo_model_path
from sgl_krul.config import cache_home, resolve_config
from sgl_krul.errors import ConfigError
from sgl_krul.service.places import check_places
from sgl_krul.store.root import RootDirectory

__all__ = ["DEMO", "serve", "serve_arguments"]

DEMO = "demo"

_MODEL_FLAGS = ("--model-path", "--model")
_BACKEND_FLAG = "--radix-cache-backend"
_BACKEND = "krul"
_CONFIG_FLAG = "--config"
_LINKER_CONFIG_FLAG = "--unified-cache-external-linker-config"

# Switches that are added if they are not there yet.
_SWITCHES = ("--enable-cache-report",)

_HELP = {"-h", "--help"}  # SGLang's; it may be asked for while a server runs

_PATHS = ("/", "./", "../", "~")  # what else there is are names on the hub and URLs

_LOCK_WAIT_S = 5.0  # as SsdTier: the server before may be just about to end


def serve_arguments(args: Sequence[str], *, demo_model: Callable[[], Path]) -> list[str]:
    """The arguments for SGLang's server: the user's, and ours where the user did not decide.

    `--config FILE` is our configuration; it travels inside SGLang's linker configuration, path made absolute.
    The model `demo` becomes what `demo_model` returns (called only then). A model may be the first argument,
    as with `sglang serve`.

    Raises ConfigError for another `--radix-cache-backend`, a `--config` without a file or beside a linker
    configuration, or no model.
    """
    rest = list(args)
    if rest and not rest[0].startswith("-"):
        rest[:1] = [_MODEL_FLAGS[0], rest[0]]
    backend = _value(rest, _BACKEND_FLAG)
    if backend not in (None, _BACKEND):
        raise ConfigError(
            f"{_BACKEND_FLAG} is {backend!r}, but krul serve runs {_BACKEND!r}: leave the flag out, or start "
            "`sglang serve` for another one"
        )
    rest = _with_config(rest)
    rest = _with_model(rest, demo_model)
    added = [] if backend else [_BACKEND_FLAG, _BACKEND]
    added += [switch for switch in _SWITCHES if switch not in rest]
    return rest + added


def serve(args: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Become the server: this process is replaced, so signals and the exit status are the server's own.

    Raises ConfigError as `serve_arguments`, for a configuration that can't be used, and for a model's path
    that leads nowhere; StoreUnavailable for a store directory that can't be, or that another server has; and
    what `demo_model_path` raises. Then nothing was started.
    """
    home = cache_home(environ)
    # Before the demo model is made, which takes a while.
    _check(serve_arguments(args, demo_model=lambda: Path(DEMO)), environ)
    arguments = serve_arguments(args, demo_model=lambda: demo_model_path(home, _to_stderr))
    variables = dict(environ)
    if Path(_value(arguments, *_MODEL_FLAGS) or "").is_dir():
        # A local model needs nothing from the hub, and SGLang would ask it all the same.
        variables.setdefault("HF_HUB_OFFLINE", "1")
    # Not the `sglang` script, which may not be on the PATH. The module warns that it is not the script.
    quiet = ("-W", "ignore::UserWarning:__main__")
    command = [sys.executable, *quiet, "-m", "sglang.launch_server", *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, variables)


def _check(args: Sequence[str], environ: Mapping[str, str]) -> None:
    """Refuse now what the server would refuse after its imports. It looks again, and its word counts."""
    linker_config = _value(args, _LINKER_CONFIG_FLAG)
    config = resolve_config(linker_config, environ)
    try:
        check_places(config)
    except ConfigError as error:
        raise ConfigError(f"{_config_file(linker_config, environ)}: {error}") from error
    if _HELP.intersection(args):
        return
    _check_model(_value(args, *_MODEL_FLAGS) or "")
    if config.ssd is not None:
        # The server's own first steps; the lock is let go at once.
        RootDirectory(config.ssd.path, _LOCK_WAIT_S).close()


def _config_file(linker_config: str | None, environ: Mapping[str, str]) -> str:
    """The file that `resolve_config` has read, for a message: without one, no place could be wrong."""
    return environ.get("KRUL_CONFIG") or json.loads(linker_config or "{}").get("config_file", "")


def _check_model(model: str) -> None:
    """SGLang would take a path that leads nowhere for a name on the hub."""
    if model.startswith(_PATHS) and not Path(model).exists():
        tilde = " (the shell did not replace the ~: write it out)" if model.startswith("~") else ""
        raise ConfigError(
            f"model {model}: there is no such file or folder{tilde}: name a folder with a model, a name on "
            f"the hub (org/name), or {DEMO}"
        )


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _has(args: Sequence[str], flag: str) -> bool:
    return any(arg == flag or arg.startswith(f"{flag}=") for arg in args)


def _value(args: Sequence[str], *flags: str) -> str | None:
    """The last value given to any of `flags`, as argparse reads it; None if there is none."""
    value = None
    for index, arg in enumerate(args):
        name, separator, joined = arg.partition("=")
        if name in flags:
            value = joined if separator else (args[index + 1] if index + 1 < len(args) else "")
    return value


def _without(args: Sequence[str], *flags: str) -> list[str]:
    """The arguments without `flags` and their values."""
    kept, skip = [], False
    for arg in args:
        name, separator, _ = arg.partition("=")
        if skip:
            skip = False
        elif name in flags:
            skip = not separator
        else:
            kept.append(arg)
    return kept


def _with_config(args: list[str]) -> list[str]:
    file = _value(args, _CONFIG_FLAG)
    if file is None:
        return args
    if not file:
        raise ConfigError(f"{_CONFIG_FLAG} needs a file: {_CONFIG_FLAG} FILE")
    if _has(args, _LINKER_CONFIG_FLAG):
        raise ConfigError(
            f"{_CONFIG_FLAG} {file} and {_LINKER_CONFIG_FLAG} were both given, and both carry the "
            "configuration of sgl-krul: keep one"
        )
    config = json.dumps({"config_file": os.path.abspath(file)})
    return [*_without(args, _CONFIG_FLAG), _LINKER_CONFIG_FLAG, config]


def _with_model(args: list[str], demo_model: Callable[[], Path]) -> list[str]:
    model = _value(args, *_MODEL_FLAGS)
    if not model:
        raise ConfigError(
            "no model was named: krul serve MODEL (a folder, or a name on the hub), or "
            f"krul serve {DEMO} for a small one that runs on a CPU"
        )
    if model != DEMO:
        return args
    path = str(demo_model())
    name = [] if _has(args, "--served-model-name") else ["--served-model-name", DEMO]
    return [*_without(args, *_MODEL_FLAGS), _MODEL_FLAGS[0], path, *name]

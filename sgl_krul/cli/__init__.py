"""The `krul` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sgl_krul import __version__
from sgl_krul.cli.options import ApiKey, Url
from sgl_krul.cli.restore import calibrate_app, explain, timeline
from sgl_krul.cli.sessions import sessions_app
from sgl_krul.config import client_settings
from sgl_krul.errors import ConfigError, KrulError

__all__ = ["app", "main"]

app = typer.Typer(
    name="krul",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Pause the chats of an SGLang server, and resume them: also after a restart.",
)
app.add_typer(sessions_app, name="sessions")
app.add_typer(calibrate_app, name="calibrate")
app.command()(explain)
app.command()(timeline)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command. Ends with SystemExit: 0 well, 1 something failed, 2 a setting or argument is wrong."""
    try:
        app(args=None if args is None else list(args), prog_name="krul")
    except KrulError as error:
        print(f"krul: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"sgl-krul {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# What follows the options of `serve` is SGLang's: nothing of it is read here.
@app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="",
)
def serve(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|demo [--config FILE] [SGLANG FLAGS]...",
            help="A folder, a name on the hub, or `demo`; then any flags of `sglang serve`.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Start SGLang's server with pausable chats.

    `krul serve demo` serves a small model (135M, 540 MB on disk) that runs on any CPU. `--config FILE` is the
    configuration of sgl-krul (see configs/); everything else goes to SGLang as it is.
    """
    from sgl_krul.cli.serve import serve as become_server

    become_server(arguments or [], os.environ)


@app.command()
def doctor(
    model: Annotated[str, typer.Option(help="The model you want to serve: a folder, or `demo`.")] = "demo",
    config: Annotated[Path | None, typer.Option(help="Configuration file; else $KRUL_CONFIG.")] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Check the server that runs there, too: what it may recompute, and its rates."),
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Check versions, hooks, model, configuration, disk and memory. Exit status 1 if anything fails."""
    from sgl_krul.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(os.environ, model, config, url, api_key))


@app.command()
def chat(
    session_id: Annotated[
        str | None, typer.Argument(help="Name of the chat on the server; without it, one is made up.")
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Replace the server's chat of that name.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="The model's name; by default what is served.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of an answer, at most.")] = 512,
    temperature: Annotated[float | None, typer.Option(min=0, help="By default the model's own.")] = None,
) -> None:
    """Begin a chat in the terminal: shows time to first token and what was restored. /help tells the rest."""
    from sgl_krul.cli.chat import Chat

    settings = client_settings(os.environ, url, api_key)
    with Chat(
        settings, model, session_id, new=new, max_tokens=max_tokens, temperature=temperature
    ) as running:
        running.run(sys.stdin)


@app.command()
def demo() -> None:
    """Pause a chat, kill the server, start it again and go on: timed, compared token by token.

    Takes about two minutes on a CPU. Exit status 0 only if all answers are the same.
    """
    from sgl_krul.cli.demo import run_demo

    raise typer.Exit(run_demo(os.environ))

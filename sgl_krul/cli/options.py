"""What the commands that talk to a server have in common: options, the client, how answers are printed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.console import Console

from sgl_krul.api.client import KrulClient
from sgl_krul.config import client_settings
from sgl_krul.errors import KrulError

__all__ = [
    "ApiKey",
    "Extra",
    "Json",
    "Salt",
    "SessionId",
    "Url",
    "naming",
    "open_client",
    "out_console",
    "print_json",
]

Url = Annotated[
    str | None,
    typer.Option(help="The server; else $KRUL_URL, else http://127.0.0.1:30000.", show_default=False),
]
ApiKey = Annotated[str | None, typer.Option(help="The server's key; else $KRUL_API_KEY.", show_default=False)]
SessionId = Annotated[
    str, typer.Argument(metavar="SESSION_ID", help="The session_id of the chat's requests.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")]
Salt = Annotated[str | None, typer.Option(help="The cache_salt of the chat's requests, if any.")]
Extra = Annotated[str | None, typer.Option(help="The extra_key of the chat's requests, if any.")]


def open_client(url: str | None, api_key: str | None) -> KrulClient:
    """A client of the server that was named, by option or environment."""
    settings = client_settings(os.environ, url, api_key)
    return KrulClient(settings.url, settings.api_key)


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """An OSError leaves as a KrulError that names the file."""
    try:
        yield
    except OSError as error:
        raise KrulError(f"{file}: {error.strerror}: give a file that can be read or written") from error


def out_console() -> Console:
    """Where tables go."""
    console = Console()
    # A pipe has no width, and a program that reads it wants whole lines.
    return console if console.is_terminal else Console(width=200)


def print_json(result: BaseModel) -> None:
    """The answer as it came."""
    print(result.model_dump_json(indent=2))

"""`krul sessions`: list, show, pause, resume, move, export, import and remove a running server's sessions."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sgl_krul.api.client import KrulClient
from sgl_krul.api.schemas import Overview, PauseResult, ResumeResult, SessionInfo, TierInfo
from sgl_krul.config import client_settings, format_duration, format_size
from sgl_krul.errors import KrulError

__all__ = ["ApiKey", "Url", "overview_table", "pause_line", "resume_line", "sessions_app", "tier_line"]

Url = Annotated[
    str | None,
    typer.Option(help="The server; else $KRUL_URL, else http://127.0.0.1:30000.", show_default=False),
]
ApiKey = Annotated[str | None, typer.Option(help="The server's key; else $KRUL_API_KEY.", show_default=False)]
_Id = Annotated[str, typer.Argument(metavar="SESSION_ID", help="The session_id of the chat's requests.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")]
_Salt = Annotated[str | None, typer.Option(help="The cache_salt of the chat's requests, if any.")]
_Extra = Annotated[str | None, typer.Option(help="The extra_key of the chat's requests, if any.")]
_Timeout = Annotated[
    float | None, typer.Option(min=0, help="Seconds to wait for a turn that is running.", show_default=False)
]
_File = Annotated[Path, typer.Argument(metavar="FILE", help="The exported session.")]

sessions_app = typer.Typer(no_args_is_help=True, help="The sessions of a running server.")


@sessions_app.command("list")
def list_sessions(url: Url = None, api_key: ApiKey = None, json: _Json = False) -> None:
    """All sessions, and what the tiers hold."""
    with _client(url, api_key) as client:
        overview = client.sessions()
    if json:
        _print_json(overview)
        return
    console = _console()
    if overview.sessions:
        console.print(overview_table(overview))
    else:
        console.print("No sessions yet: send a chat request with a session_id.")
    for name, tier in overview.tiers.items():
        console.print(tier_line(name, tier), highlight=False)


@sessions_app.command()
def show(
    session_id: _Id,
    url: Url = None,
    api_key: ApiKey = None,
    cache_salt: _Salt = None,
    extra_key: _Extra = None,
    json: _Json = False,
) -> None:
    """One session."""
    with _client(url, api_key) as client:
        session = client.session(session_id, cache_salt=cache_salt, extra_key=extra_key)
    _print(session, json, f"{_name(session)} is {session.state}: {_what_is_stored(session)}")


@sessions_app.command()
def pause(
    session_id: _Id,
    url: Url = None,
    api_key: ApiKey = None,
    cache_salt: _Salt = None,
    extra_key: _Extra = None,
    timeout_s: _Timeout = None,
    json: _Json = False,
) -> None:
    """Store a session and free its place on the device."""
    with _client(url, api_key) as client:
        result = client.pause(session_id, timeout_s=timeout_s, cache_salt=cache_salt, extra_key=extra_key)
    _print(result, json, pause_line(result))


@sessions_app.command()
def resume(
    session_id: _Id,
    url: Url = None,
    api_key: ApiKey = None,
    cache_salt: _Salt = None,
    extra_key: _Extra = None,
    timeout_s: _Timeout = None,
    json: _Json = False,
) -> None:
    """Bring a session to memory. Its next request would do that by itself."""
    with _client(url, api_key) as client:
        result = client.resume(session_id, timeout_s=timeout_s, cache_salt=cache_salt, extra_key=extra_key)
    _print(result, json, resume_line(result))


@sessions_app.command()
def move(
    session_id: _Id,
    to: Annotated[str, typer.Option(help="The tier that is to have it: ssd or redis.")],
    url: Url = None,
    api_key: ApiKey = None,
    cache_salt: _Salt = None,
    extra_key: _Extra = None,
    json: _Json = False,
) -> None:
    """Put a paused session into one tier, and nowhere else. From redis, any server may resume it."""
    with _client(url, api_key) as client:
        result = client.move(session_id, to, cache_salt=cache_salt, extra_key=extra_key)
    _print(result, json, f"{_name(result)}: {_what_is_stored(result)}, {result.elapsed_ms:.0f} ms")


@sessions_app.command()
def export(
    session_id: _Id,
    file: _File,
    url: Url = None,
    api_key: ApiKey = None,
    cache_salt: _Salt = None,
    extra_key: _Extra = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a paused session to a file, to import it where the same model is served."""
    if file.exists() and not force:
        raise KrulError(f"{file} exists: name another file, or give --force to replace it")
    with _client(url, api_key) as client, _naming(file):
        size = client.export_session(session_id, file, cache_salt=cache_salt, extra_key=extra_key)
    print(f"{session_id!r} is in {file}: {format_size(size)}")


@sessions_app.command("import")
def import_session(file: _File, url: Url = None, api_key: ApiKey = None, json: _Json = False) -> None:
    """Store the session of an exported file. Its next request resumes it."""
    with _client(url, api_key) as client, _naming(file):
        session = client.import_session(file)
    _print(session, json, f"{_name(session)} is {session.state}: {_what_is_stored(session)}")


@sessions_app.command()
def rm(
    session_id: _Id,
    url: Url = None,
    api_key: ApiKey = None,
    cache_salt: _Salt = None,
    extra_key: _Extra = None,
    json: _Json = False,
) -> None:
    """Delete a session everywhere."""
    with _client(url, api_key) as client:
        result = client.delete(session_id, cache_salt=cache_salt, extra_key=extra_key)
    freed = f"{format_size(result.bytes_freed)} stored, {result.device_tokens_freed:,} tokens on the device"
    _print(result, json, f"{result.session_id!r} is deleted: {freed} freed")


def overview_table(overview: Overview) -> Table:
    """A row for each session, the last used first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("session", overflow="fold")
    for name in ("state", "tier"):
        table.add_column(name)
    for name in ("tokens", "stored tokens", "bytes", "last used"):
        table.add_column(name, justify="right")
    now = time.time()
    for session in sorted(overview.sessions, key=lambda session: -session.last_used):
        age = format_duration(float(round(max(0.0, now - session.last_used))))
        table.add_row(
            # Ids come from strangers: never read as markup.
            Text(session.session_id + (" (salted)" if session.salted else "")),
            session.state,
            session.tier,
            f"{session.tokens:,}",
            f"{session.stored_tokens:,}",
            format_size(session.bytes_stored),
            f"{age} ago",
        )
    return table


def tier_line(name: str, tier: TierInfo) -> str:
    """What a tier holds, in a line."""
    used = f"{format_size(tier.bytes)} of {format_size(tier.capacity_bytes)} in {tier.objects} objects"
    return f"{name}: {used}" if tier.reachable else f"{name}: out of reach; {used} when it was last seen"


def pause_line(result: PauseResult) -> str:
    """What a pause did, in a line."""
    if result.already_paused:
        return f"{_name(result)} was paused before: {_what_is_stored(result)}"
    line = (
        f"{_name(result)} is paused: {_what_is_stored(result)}; {result.device_tokens_freed:,} tokens "
        f"freed on the device, {result.elapsed_ms:.0f} ms"
    )
    return "; ".join([line, *(f"not in {tier}: {why}" for tier, why in result.not_written.items())])


def resume_line(result: ResumeResult) -> str:
    """What a resume did, in a line."""
    if not result.restored_tokens:
        return f"{_name(result)}: nothing was restored ({result.reason or 'nothing was stored'})"
    line = (
        f"{_name(result)}: {result.restored_tokens:,} tokens are in memory (from {result.restored_from}), "
        f"{result.recompute_tokens:,} will be computed, {result.elapsed_ms:.0f} ms"
    )
    return f"{line}; {result.reason}" if result.reason else line


def _what_is_stored(session: SessionInfo) -> str:
    damaged = f", {session.corrupt_chunks} chunks found damaged" if session.corrupt_chunks else ""
    kind = "exact" if session.exact else "not exact"
    if not session.stored_tokens:
        return f"{session.tokens:,} tokens, none stored{damaged}"
    return (
        f"{session.stored_tokens:,} of {session.tokens:,} tokens stored, {format_size(session.bytes_stored)} "
        f"in {' and '.join(session.tiers) or session.tier}, {kind}{damaged}"
    )


def _name(session: SessionInfo) -> str:
    return repr(session.session_id) + (" (salted)" if session.salted else "")


def _client(url: str | None, api_key: str | None) -> KrulClient:
    settings = client_settings(os.environ, url, api_key)
    return KrulClient(settings.url, settings.api_key)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """An OSError leaves as a KrulError that names the file."""
    try:
        yield
    except OSError as error:
        raise KrulError(f"{file}: {error.strerror}: give a file that can be read or written") from error


def _console() -> Console:
    console = Console()
    # A pipe has no width, and a program that reads it wants whole lines.
    return console if console.is_terminal else Console(width=200)


def _print(result: BaseModel, json: bool, line: str) -> None:
    if json:
        _print_json(result)
    else:
        print(line)


def _print_json(result: Any) -> None:
    print(result.model_dump_json(indent=2))

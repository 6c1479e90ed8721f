"""`krul sessions`: list, show, pause, resume, move, export, import and remove a running server's sessions."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.table import Table
from rich.text import Text

from sgl_krul.api.schemas import STRATEGIES, Overview, PauseResult, ResumeResult, SessionInfo, TierInfo
from sgl_krul.cli.options import (
    ApiKey,
    Extra,
    Json,
    Salt,
    SessionId,
    Url,
    naming,
    open_client,
    out_console,
    print_json,
)
from sgl_krul.config import format_duration, format_size
from sgl_krul.errors import KrulError

__all__ = ["overview_table", "pause_line", "resume_line", "sessions_app", "tier_line"]

_Timeout = Annotated[
    float | None, typer.Option(min=0, help="Seconds to wait for a turn that is running.", show_default=False)
]
_File = Annotated[Path, typer.Argument(metavar="FILE", help="The exported session.")]

sessions_app = typer.Typer(no_args_is_help=True, help="The sessions of a running server.")


@sessions_app.command("list")
def list_sessions(url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """All sessions, and what the tiers hold."""
    with open_client(url, api_key) as client:
        overview = client.sessions()
    if json:
        print_json(overview)
        return
    console = out_console()
    if overview.sessions:
        console.print(overview_table(overview))
    else:
        console.print("No sessions yet: send a chat request with a session_id.")
    for name, tier in overview.tiers.items():
        console.print(tier_line(name, tier), highlight=False)


@sessions_app.command()
def show(
    session_id: SessionId,
    url: Url = None,
    api_key: ApiKey = None,
    cache_salt: Salt = None,
    extra_key: Extra = None,
    json: Json = False,
) -> None:
    """One session."""
    with open_client(url, api_key) as client:
        session = client.session(session_id, cache_salt=cache_salt, extra_key=extra_key)
    _print(session, json, f"{_name(session)} is {session.state}: {_what_is_stored(session)}")


@sessions_app.command()
def pause(
    session_id: SessionId,
    url: Url = None,
    api_key: ApiKey = None,
    cache_salt: Salt = None,
    extra_key: Extra = None,
    timeout_s: _Timeout = None,
    json: Json = False,
) -> None:
    """Store a session and free its place on the device."""
    with open_client(url, api_key) as client:
        result = client.pause(session_id, timeout_s=timeout_s, cache_salt=cache_salt, extra_key=extra_key)
    _print(result, json, pause_line(result))


@sessions_app.command()
def resume(
    session_id: SessionId,
    url: Url = None,
    api_key: ApiKey = None,
    cache_salt: Salt = None,
    extra_key: Extra = None,
    target: Annotated[
        str | None, typer.Option(help="Where to: memory or device; by default memory.", show_default=False)
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help=f"How: {', '.join(STRATEGIES)} (recompute brings nothing).",
            show_default=False,
        ),
    ] = None,
    timeout_s: _Timeout = None,
    json: Json = False,
) -> None:
    """Bring a session to memory, or to the device. Its next request would do that by itself."""
    with open_client(url, api_key) as client:
        result = client.resume(
            session_id,
            target=target,
            strategy=strategy,
            timeout_s=timeout_s,
            cache_salt=cache_salt,
            extra_key=extra_key,
        )
    _print(result, json, resume_line(result))


@sessions_app.command()
def move(
    session_id: SessionId,
    to: Annotated[str, typer.Option(help="The tier that is to have it: ssd or redis.")],
    url: Url = None,
    api_key: ApiKey = None,
    cache_salt: Salt = None,
    extra_key: Extra = None,
    json: Json = False,
) -> None:
    """Put a paused session into one tier, and nowhere else. From redis, any server may resume it."""
    with open_client(url, api_key) as client:
        result = client.move(session_id, to, cache_salt=cache_salt, extra_key=extra_key)
    _print(result, json, f"{_name(result)}: {_what_is_stored(result)}, {result.elapsed_ms:.0f} ms")


@sessions_app.command()
def export(
    session_id: SessionId,
    file: _File,
    url: Url = None,
    api_key: ApiKey = None,
    cache_salt: Salt = None,
    extra_key: Extra = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a paused session to a file, to import it where the same model is served."""
    if file.exists() and not force:
        raise KrulError(f"{file} exists: name another file, or give --force to replace it")
    with open_client(url, api_key) as client, naming(file):
        size = client.export_session(session_id, file, cache_salt=cache_salt, extra_key=extra_key)
    print(f"{session_id!r} is in {file}: {format_size(size)}")


@sessions_app.command("import")
def import_session(file: _File, url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """Store the session of an exported file. Its next request resumes it."""
    with open_client(url, api_key) as client, naming(file):
        session = client.import_session(file)
    _print(session, json, f"{_name(session)} is {session.state}: {_what_is_stored(session)}")


@sessions_app.command()
def rm(
    session_id: SessionId,
    url: Url = None,
    api_key: ApiKey = None,
    cache_salt: Salt = None,
    extra_key: Extra = None,
    json: Json = False,
) -> None:
    """Delete a session everywhere."""
    with open_client(url, api_key) as client:
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
    if result.restored_to == "device":
        line = f"{_name(result)}: {result.restored_tokens:,} tokens are on the device, {_how(result)}"
    else:
        line = (
            f"{_name(result)}: {result.restored_tokens:,} tokens are in memory (from {result.restored_from})"
            f", {result.recompute_tokens:,} will be computed, {result.elapsed_ms:.0f} ms"
        )
    return f"{line}; {result.reason}" if result.reason else line


def _how(result: ResumeResult) -> str:
    """What a restore to the device took."""
    predicted = "" if result.predicted_s is None else f" ({result.predicted_s:.2f} s predicted)"
    idle = "" if result.bubble is None else f", a stream idle {result.bubble:.0%} of it"
    share = result.recomputed_tokens / max(1, result.restored_tokens)
    return (
        f"{share:.0%} of their KV recomputed, {format_size(result.loaded_bytes)} loaded, "
        f"{result.recompute_tokens:,} will be computed, {result.seconds:.2f} s{predicted}{idle}"
    )


def _what_is_stored(session: SessionInfo) -> str:
    damaged = f", {session.corrupt_chunks} chunks found damaged" if session.corrupt_chunks else ""
    kind = "exact" if session.exact else _how_coded(session)
    if not session.stored_tokens:
        return f"{session.tokens:,} tokens, none stored{damaged}"
    return (
        f"{session.stored_tokens:,} of {session.tokens:,} tokens stored, {format_size(session.bytes_stored)} "
        f"in {' and '.join(session.tiers) or session.tier}, {kind}{damaged}"
    )


def _how_coded(session: SessionInfo) -> str:
    counts = Counter(mode.split(" of ")[0] for mode in session.layer_modes)
    if not counts:
        return "not exact"
    layers = ", ".join(f"{count} {mode}" for mode, count in counts.most_common())
    return f"not exact (layers: {layers}; expected loss {session.expected_loss:.2g})"


def _name(session: SessionInfo) -> str:
    return repr(session.session_id) + (" (salted)" if session.salted else "")


def _print(result: BaseModel, json: bool, line: str) -> None:
    if json:
        print_json(result)
    else:
        print(line)

"""What `krul demo` shows at its end."""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sgl_krul.api.schemas import PauseResult
from sgl_krul.cli.turns import Turn
from sgl_krul.config import format_size

__all__ = ["LOGPROB_TOLERANCE", "Outcome", "Way", "krul_command", "print_report", "same_tokens"]

LOGPROB_TOLERANCE = 1e-4
_PLAIN_WIDTH = 120


@dataclass(frozen=True)
class Way:
    """One way in which the last question was answered."""

    name: str
    turn: Turn


@dataclass(frozen=True)
class Outcome:
    """What was measured. `ways`: cold, never paused, then those that were resumed."""

    ways: tuple[Way, ...]
    paused: PauseResult
    history_tokens: int
    store: Path
    question: str


def same_tokens(a: Turn, b: Turn) -> bool:
    """True for two answers of the same tokens; an answer without any is never the same."""
    return bool(a.tokens) and [text for text, _ in a.tokens] == [text for text, _ in b.tokens]


def krul_command(path: str, executable: str, scripts: Path, here: Path) -> str:
    """What to type in `here` for this `krul`: the bare name where `path` ($PATH) leads to it, else its file.

    `scripts` is where pip puts commands of `executable`, the Python that runs.
    """
    script = scripts / "krul"
    found = shutil.which("krul", path=path)
    if found is not None and os.path.realpath(found) == os.path.realpath(script):
        return "krul"
    if not script.exists():
        return f"{shlex.quote(executable)} -m sgl_krul.cli"
    below = script.is_relative_to(here) and script.parent != here
    return shlex.quote(str(script.relative_to(here) if below else script))


def print_report(console: Console, outcome: Outcome, krul: str) -> int:
    """Print the tables and the verdict; returns the exit status. `krul` is the command that works here."""
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    never_paused = outcome.ways[1]
    console.print()
    _say(console, f"The last question, after {outcome.history_tokens:,} tokens: {outcome.question}")
    for text in dict.fromkeys(way.turn.text.strip() for way in outcome.ways):
        names = [way.name for way in outcome.ways if way.turn.text.strip() == text]
        _say(console, f"The answer{'' if len(names) == len(outcome.ways) else f' ({names})'}: {text}")
    console.print()
    console.print(_times(outcome))
    console.print()
    console.print(_stored(outcome))
    console.print()
    return _verdict(console, outcome, never_paused, krul)


def _times(outcome: Outcome) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("how it was answered")
    columns = ("first token", "vs cold", "tokens restored", "still on device", "computed")
    for name in (*columns, "same answer"):
        table.add_column(name, justify="right")
    cold, reference = outcome.ways[0].turn, outcome.ways[1].turn
    for way in outcome.ways:
        turn = way.turn
        same = same_tokens(turn, reference)
        table.add_row(
            way.name,
            f"{turn.first_token_s:.3f} s",
            "1x" if turn is cold else _compared(turn.first_token_s, cold.first_token_s),
            f"{turn.restored_tokens:,}",
            f"{turn.cached_tokens - turn.restored_tokens:,}",
            f"{turn.computed_tokens:,}",
            Text("yes" if same else "NO", style="green" if same else "bold red"),
        )
    return table


def _compared(seconds: float, cold_s: float) -> str:
    faster = seconds <= cold_s
    return f"{cold_s / seconds:.1f}x faster" if faster else f"{seconds / cold_s:.1f}x slower"


def _stored(outcome: Outcome) -> Table:
    paused = outcome.paused
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what the pause stored")
    table.add_column("tier")
    for name in ("tokens", "KV on the device", "stored"):
        table.add_column(name, justify="right")
    table.add_column("where", overflow="fold")
    raw = format_size(paused.bytes_raw)
    tokens = f"{paused.stored_tokens:,} of {paused.tokens:,}"
    kind = "exact KV" if paused.exact else "KV, not exact"
    table.add_row(kind, paused.tier, tokens, raw, format_size(paused.bytes_stored), Text(str(outcome.store)))
    return table


def _verdict(console: Console, outcome: Outcome, reference: Way, krul: str) -> int:
    different = [way.name for way in outcome.ways if not same_tokens(way.turn, reference.turn)]
    empty = [way.name for way in outcome.ways[2:] if way.turn.restored_tokens == 0]
    if different:
        console.print("[bold red]Same answer: no.[/] Not the tokens of the chat that was never paused:")
        _say(console, ", ".join(different))
        return 1
    apart = max(_apart(way.turn, reference.turn) for way in outcome.ways)
    within = "within" if apart <= LOGPROB_TOLERANCE else "MORE than"
    console.print("[bold green]Same answer: yes.[/]", end=" ")
    _say(
        console,
        f"All {len(reference.turn.tokens)} tokens are equal in all {len(outcome.ways)} ways; their log "
        f"probabilities differ by {apart:.1e} at most ({within} {LOGPROB_TOLERANCE:.0e}).",
    )
    if empty:
        _say(console, f"But nothing was restored: {', '.join(empty)}. See the server's log.")
        return 1
    console.print()
    _next_steps(console, krul)
    return 0


def _next_steps(console: Console, krul: str) -> None:
    steps = {
        "serve demo": "start this server for yourself (or name your own model)",
        "chat": "chat with it: /pause, /resume, /sessions",
        "sessions list": "what is stored. Your own program only has to send session_id",
    }
    width = len(krul) + max(map(len, steps))
    for number, (command, what) in enumerate(steps.items()):
        lead = "       " if number else "Next:  "
        _say(console, f"{lead}{f'{krul} {command}':{width + 1}}    {what}")


def _apart(a: Turn, b: Turn) -> float:
    """The largest difference of log probabilities; the tokens are the same."""
    return max(abs(x - y) for (_, x), (_, y) in zip(a.tokens, b.tokens, strict=True))


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)

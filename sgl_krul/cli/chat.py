"""`krul chat`: a terminal chat against any server with our backend, over the OpenAI API and a session_id."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from typing import Self, TextIO

from openai import OpenAIError
from rich.console import Console

from sgl_krul.api.client import KrulClient
from sgl_krul.cli.sessions import overview_table, pause_line, resume_line
from sgl_krul.cli.turns import Turn, ask, connect, served_model
from sgl_krul.config import ClientSettings, format_duration
from sgl_krul.errors import KrulError, UnknownSession

__all__ = ["Chat", "turn_line"]

_PROMPT = "you> "
_HELP = """\
/pause     store this chat and free its place on the device
/resume    bring it to memory (the next message does that by itself)
/sessions  all chats of the server
/new       begin another chat
/quit      leave; the chat stays on the server (Ctrl-D does the same)
Ctrl-C stops an answer. A line that ends with \\ goes on in the next one."""


class Chat:
    """One chat at a time. Errors of the server are shown, and the chat goes on."""

    def __init__(
        self,
        settings: ClientSettings,
        model: str | None,
        session_id: str | None,
        *,
        new: bool,
        max_tokens: int,
        temperature: float | None,
    ) -> None:
        self._krul = KrulClient(settings.url, settings.api_key)
        self._client = connect(self._krul.base_url, settings.api_key)
        self._model = model
        self._given = session_id is not None and not new  # an id that must not be a chat of the server yet
        self._session_id = session_id or _new_id()
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._messages: list[dict[str, str]] = []
        self._console = Console(soft_wrap=True)
        self._commands: dict[str, Callable[[], None]] = {
            "/help": lambda: self._say(_HELP),
            "/new": self._new,
            "/pause": lambda: self._say(pause_line(self._krul.pause(self._session_id))),
            "/resume": lambda: self._say(resume_line(self._krul.resume(self._session_id))),
            "/sessions": lambda: self._console.print(overview_table(self._krul.sessions())),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._client.close()
        self._krul.close()

    def run(self, lines: TextIO) -> None:
        """Read messages and commands from `lines` until its end or /quit.

        Raises:
            KrulError: the server can't be reached at the start, or already has a chat of the given id.
        """
        self._krul.sessions()
        if self._given:
            self._require_unknown(self._session_id)
        try:
            self._model = self._model or served_model(self._client)
        except (OpenAIError, StopIteration) as error:
            raise KrulError(f"the server at {self._krul.base_url} names no model: {error}") from error
        self._say(
            f"{self._model} at {self._krul.base_url}, session {self._session_id!r}. /help lists the commands."
        )
        while True:
            try:
                text = self._read(lines)
            except KeyboardInterrupt:
                self._say("\n(/quit or Ctrl-D leaves)")
                continue
            if text is None or text == "/quit":
                return
            if text:
                self._handle(text)

    def _require_unknown(self, session_id: str) -> None:
        """The server keeps KV, no messages: to go on here would begin anew, and take the old chat's place."""
        try:
            known = self._krul.session(session_id)
        except UnknownSession:
            return
        raise KrulError(
            f"the server has a session {session_id!r} already ({known.tokens:,} tokens, {known.state}). Its "
            "messages are not kept there, so a chat begun here would replace it: give another id (or none), "
            "or --new to replace it"
        )

    def _handle(self, text: str) -> None:
        """A message or a command. Ctrl-C ends it, not the program."""
        command = self._commands.get(text)
        try:
            if command is not None:
                command()
            elif text.startswith("/") and " " not in text:
                self._say(f"{text} is no command.\n{_HELP}")
            else:
                self._send(text)
        except KeyboardInterrupt:
            self._say("\n(stopped)")
        except (KrulError, OpenAIError) as error:
            self._say(f"\nerror: {error}")

    def _send(self, text: str) -> None:
        message = {"role": "user", "content": text}
        shown: list[str] = []

        def show(piece: str) -> None:
            shown.append(piece)
            self._console.print(piece, end="", markup=False, highlight=False, emoji=False)

        assert self._model is not None
        try:
            turn = ask(
                self._client,
                self._model,
                [*self._messages, message],
                max_tokens=self._max_tokens,
                temperature=self._temperature,
                extra={"session_id": self._session_id},
                on_text=show,
            )
        finally:
            # What was said stays part of the chat, also when the answer was stopped.
            if shown:
                self._messages += [message, {"role": "assistant", "content": "".join(shown)}]
        self._console.print()
        self._console.print(turn_line(turn), style="dim", markup=False, highlight=False)

    def _new(self) -> None:
        self._session_id = _new_id()
        self._messages = []
        self._say(f"session {self._session_id!r}")

    def _read(self, lines: TextIO) -> str | None:
        """The next message; None at the end. input() gives a terminal its line editing."""
        parts: list[str] = []
        while True:
            line = self._read_line(lines, "...> " if parts else _PROMPT)
            if line is None:
                return "\n".join(parts).strip() if parts else None
            if not line.endswith("\\"):
                return "\n".join([*parts, line]).strip()
            parts.append(line[:-1])

    @staticmethod
    def _read_line(lines: TextIO, prompt: str) -> str | None:
        if not lines.isatty():
            line = lines.readline()
            return line.rstrip("\r\n") if line else None
        try:
            return input(prompt)
        except EOFError:
            print()
            return None

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, emoji=False)


def turn_line(turn: Turn) -> str:
    """What a turn cost: `first token 0.21 s; 2,087 tokens in: 2,064 restored, 23 computed`."""
    on_device = turn.cached_tokens - turn.restored_tokens
    parts = [
        f"{turn.restored_tokens:,} restored" if turn.restored_tokens else "",
        f"{on_device:,} on the device" if on_device > 0 else "",
        f"{turn.computed_tokens:,} computed",
    ]
    first, total = format_duration(turn.first_token_s), format_duration(turn.total_s)
    reused = ", ".join(part for part in parts if part)
    return f"[first token {first}, all {total}; {turn.prompt_tokens:,} tokens in: {reused}]"


def _new_id() -> str:
    return f"chat-{uuid.uuid4().hex[:8]}"


def _enable_line_editing() -> None:
    if sys.stdin.isatty():
        import readline  # noqa: F401  (input() edits lines and keeps a history once it is imported)


_enable_line_editing()

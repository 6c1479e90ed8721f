"""`krul demo`: a chat is paused, its server killed and started again, and the chat goes on.

The same last request is asked four times, each time from the same state of the chat:

* cold: under a `cache_salt` of its own, so that nothing of the chat can be reused;
* never paused: a twin of the chat under another salt, whose KV is still on the device;
* from memory: the chat itself, paused before;
* from SSD: the chat again in a new server. The old one was killed after it had answered, without another
  pause: what counts is the chat as it was paused.

Salts are part of a page's identity, so none of the four can find what another one left.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from sgl_krul.api.client import KrulClient
from sgl_krul.cli.demo_model import demo_model_path
from sgl_krul.cli.demo_report import Outcome, Way, krul_command, print_report
from sgl_krul.cli.demo_script import FINAL_QUESTION, USER_TURNS, WARM_UP
from sgl_krul.cli.demo_server import DemoServer, prepare_store
from sgl_krul.cli.progress import Step, Steps
from sgl_krul.cli.turns import Turn, ask, connect
from sgl_krul.config import cache_home, format_size
from sgl_krul.errors import KrulError, StoreUnavailable

__all__ = ["run_demo"]

SESSION_ID = "krul-demo"

_STEPS = 10
_ANSWER_TOKENS = 20
_MODEL = "demo"

Messages = list[dict[str, str]]


def run_demo(environ: Mapping[str, str]) -> int:
    """Run it; returns the exit status: 0 if all answers are the same tokens and KV was really restored.

    Raises:
        KrulError: a step failed; the server's log is named. No process is left behind.
    """
    console = Console()
    folder = cache_home(environ) / "demo"
    with _alone(folder), _ended_by_signals():
        console.print(
            f"A chat with a small model on this machine. Everything is kept in {cache_home(environ)}.",
            highlight=False,
            soft_wrap=True,
        )
        steps = Steps(console, _STEPS)
        with steps.step("The demo model (converted once)") as step:
            model = demo_model_path(cache_home(environ), step.note)
            step.outcome = "ready"
        store, config_file = prepare_store(folder)
        log = folder / "server.log"
        log.unlink(missing_ok=True)
        server = DemoServer(model, config_file, log, environ)
        try:
            outcome = _Demo(server, steps).run(store)
        finally:
            server.kill()
        scripts = Path(sysconfig.get_path("scripts"))
        krul = krul_command(environ.get("PATH", os.defpath), sys.executable, scripts, Path.cwd())
        return print_report(console, outcome, krul)


class _Demo:
    """The steps between the server's first start and its end."""

    def __init__(self, server: DemoServer, steps: Steps) -> None:
        self._server = server
        self._steps = steps
        self._messages: Messages = []

    def run(self, store: Path) -> Outcome:
        self._start("Starting the server")
        history_tokens = self._hold_chat()
        ways = [self._cold(), self._never_paused()]
        with self._steps.step("Pausing the chat") as step, KrulClient(self._server.url) as krul:
            paused = krul.pause(SESSION_ID)
            step.outcome = (
                f"{paused.stored_tokens:,} tokens, {format_size(paused.bytes_stored)} on {paused.tier}; "
                f"{paused.device_tokens_freed:,} tokens freed on the device"
            )
        ways.append(self._resume("Asking again, the chat comes back from memory", "resumed from memory"))
        with self._steps.step("Killing the server (SIGKILL)") as step:
            self._server.kill()
            step.outcome = "all its processes and their memory are gone"
        self._start("Starting it again")
        self._warm_up()
        ways.append(
            self._resume("Asking again, the chat comes back from SSD", "resumed from SSD, after the restart")
        )
        return Outcome(tuple(ways), paused, history_tokens, store, FINAL_QUESTION)

    def _start(self, title: str) -> None:
        with self._steps.step(title) as step:
            self._server.start()
            step.outcome = self._server.url

    def _hold_chat(self) -> int:
        """Returns the tokens of the history."""
        tokens = 0
        with self._steps.step(f"A chat of {len(USER_TURNS)} turns, session_id {SESSION_ID!r}") as step:
            for number, text in enumerate(USER_TURNS, start=1):
                step.note(f"turn {number} of {len(USER_TURNS)}, {tokens:,} tokens so far")
                self._messages.append({"role": "user", "content": text})
                turn = self._ask(self._messages, {"session_id": SESSION_ID})
                self._messages.append({"role": "assistant", "content": turn.text})
                tokens = turn.prompt_tokens + len(turn.tokens)
            step.outcome = f"{tokens:,} tokens"
        return tokens

    def _cold(self) -> Way:
        with self._steps.step("Asking about the first turn, cold (nothing reused)") as step:
            return self._way(step, "cold", {"cache_salt": "krul-demo-cold"})

    def _never_paused(self) -> Way:
        twin = {"cache_salt": "krul-demo-twin"}
        with self._steps.step("Asking a twin of the chat that was never paused") as step:
            step.note("computing the twin")
            self._ask(self._messages[:-1], twin)
            return self._way(step, "never paused", twin)

    def _resume(self, title: str, name: str) -> Way:
        with self._steps.step(title) as step:
            return self._way(step, name, {"session_id": SESSION_ID})

    def _warm_up(self) -> None:
        """The first request of a process pays for much that has nothing to do with the chat."""
        self._ask([{"role": "user", "content": WARM_UP}], {"cache_salt": "krul-demo-warm-up"})

    def _way(self, step: Step, name: str, extra: Mapping[str, Any]) -> Way:
        turn = self._ask([*self._messages, {"role": "user", "content": FINAL_QUESTION}], extra)
        step.outcome = f"first token after {turn.first_token_s:.2f} s"
        return Way(name, turn)

    def _ask(self, messages: Messages, extra: Mapping[str, Any]) -> Turn:
        from openai import OpenAIError

        try:
            with connect(self._server.url, None) as client:
                return ask(
                    client,
                    _MODEL,
                    messages,
                    max_tokens=_ANSWER_TOKENS,
                    extra=extra,
                    logprobs=True,
                    temperature=0.0,
                )
        except OpenAIError as error:
            raise self._server.failure(f"the server did not answer a request ({error})") from error


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One demo at a time: a second would empty the store of the first."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a")
    except OSError as error:
        raise StoreUnavailable(f"the demo's folder can't be used: {folder}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise KrulError(
                f"another `krul demo` is running (it holds {folder}): wait for its end"
            ) from error
        yield


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does, so that the server goes with it."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

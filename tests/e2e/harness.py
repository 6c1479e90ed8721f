"""A server of the tests, and chats with it by token ids, so that every comparison is exact."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sgl_krul.api.client import KrulClient
from sgl_krul.cli.demo_model import demo_model_path
from sgl_krul.cli.serve import serve_arguments
from sgl_krul.cli.server_process import ServerProcess
from sgl_krul.config import cache_home

MiB = 1 << 20
TOLERANCE = 1e-4  # logprobs, as the issue asks; tokens must be equal

# Bounds of waits that end by themselves. They only have to be longer than the slowest machine needs: a start
# takes 25 s on two idle cores, and minutes on two shared ones.
START_S = 600
ANSWER_S = 600

KRUL_SERVE = ("sgl_krul.cli", "serve")
SGLANG = ("sglang.launch_server",)  # without what `krul serve` checks before it becomes this

# SGLang's warm-up is 1.5 s of a start, and /health generates a token all the same before it says yes.
# (What it costs: the log tells that freeze_gc failed, since it is tried before the server listens.)
QUICK_START = ("--skip-server-warmup",)


@dataclass(frozen=True)
class Answer:
    """What one request brought."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    restored: int
    krul: dict[str, Any]

    def same_as(self, other: Answer) -> bool:
        """Equal tokens, and logprobs within the tolerance."""
        close = all(abs(a - b) <= TOLERANCE for a, b in zip(self.logprobs, other.logprobs, strict=True))
        return self.tokens == other.tokens and close


def prompt(seed: int, count: int) -> list[int]:
    """`count` ordinary tokens of the demo model; another seed shares no prefix."""
    return random.Random(seed).choices(range(1000, 48000), k=count)


class Chatter:
    """A running server."""

    def __init__(self, process: ServerProcess, api_key: str | None = None) -> None:
        self.process = process
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.http = httpx.Client(base_url=process.base_url, timeout=ANSWER_S, headers=headers)
        self.sessions = KrulClient(process.base_url, api_key=api_key)

    def ask(self, ids: Sequence[int], session: str | None = None, *, new: int = 8, **fields: Any) -> Answer:
        """One greedy request."""
        body: dict[str, Any] = {
            "input_ids": list(ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
            "return_logprob": True,
            **fields,
        }
        if session is not None:
            body["session_id"] = session
        answer = self.http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        return read(answer.json())

    def reference(self, turns: Sequence[Sequence[int]], salt: str, *, new: int = 8) -> list[Answer]:
        """The chat never paused, under a salt of its own: the answer to each turn."""
        history: list[int] = []
        answers = []
        for turn in turns:
            history += turn
            answers.append(self.ask(history, new=new, cache_salt=salt))
            history += answers[-1].tokens
        return answers

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self.process.kill(signal.SIGKILL)
        self.http.close()
        self.sessions.close()


def read(body: dict[str, Any]) -> Answer:
    """An answer of /generate."""
    meta = body["meta_info"]
    krul = meta.get("krul", {})
    return Answer(
        tokens=body["output_ids"],
        logprobs=[entry[0] for entry in meta["output_token_logprobs"]],
        cached=meta["cached_tokens"],
        restored=krul.get("restored_tokens", 0),
        krul=krul,
    )


class ServerFactory:
    """Starts servers that share one store directory."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.store = place / "store"
        self._running: list[Chatter] = []

    def config(
        self,
        *,
        memory: int = 512 * MiB,
        store: Path | None = None,
        ssd: bool = True,
        more: str = "",
        **session: Any,
    ) -> Path:
        """A configuration file; `more` are further sections."""
        path = self.place / "krul.yaml"
        lines = [
            f"memory: {{capacity_bytes: {memory}}}",
            f"ssd: {{path: {store or self.store}, capacity_bytes: 4GiB, free_space_floor_bytes: 0}}"
            if ssd
            else "ssd: null",
        ]
        if session:
            lines.append(
                "session: {" + ", ".join(f"{name}: {value}" for name, value in session.items()) + "}"
            )
        path.write_text("\n".join([*lines, more]) + "\n")
        return path

    def start(self, *arguments: str, config: Path | None = None, api_key: str | None = None) -> Chatter:
        """A server that answers requests; the one before must have been killed."""
        process = self.launch(*arguments, config=config, api_key=api_key)
        process.wait_ready(START_S)
        return self._running[-1]

    def launch(
        self,
        *arguments: str,
        config: Path | None = None,
        api_key: str | None = None,
        starter: Sequence[str] = KRUL_SERVE,
        environ: Mapping[str, str] | None = None,
    ) -> ServerProcess:
        """A server that is only starting, by `starter`: KRUL_SERVE or SGLANG."""
        self.close()
        given = ["demo", "--config", str(config or self.config()), "--max-total-tokens", "12288"]
        if api_key is not None:
            given += ["--api-key", api_key]
        given += [*QUICK_START, *arguments]
        if starter is SGLANG:
            given = serve_arguments(given, demo_model=lambda: demo_model_path(cache_home(os.environ), print))
        log = self.place / "server.log"
        process = ServerProcess(given, log=log, api_key=api_key, module=starter, environ=environ)
        self._running.append(Chatter(process, api_key))
        return process

    @property
    def running(self) -> Chatter:
        """The server that was launched last."""
        return self._running[-1]

    def close(self) -> None:
        """Kill what runs."""
        for chatter in self._running:
            chatter.kill()
        self._running.clear()

"""A chat of two turns on a server behind a slow link, and what it should say next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sgl_krul.session.record import SessionKey
from tests.e2e.harness import Answer, Chatter, MiB, prompt

# A link at which loading and computing take about as long on two cores, so both streams take part.
LINK = "link: {bytes_per_s: 18MB, latency_s: 1ms, jitter: 0.2}"
SMALL_MEMORY = 1 * MiB  # for one page: a session comes from the disk

FreshId = Callable[[], str]


class Told:
    """A chat of two turns, paused after the first, and what it should say next."""

    def __init__(self, chatter: Chatter, session: str, seed: int, tokens: int) -> None:
        self.chatter, self.session = chatter, session
        self.ids = prompt(seed, tokens)
        first = chatter.ask(self.ids, session)
        self.history = [*self.ids, *first.tokens, *prompt(seed + 1, 9)]
        self.expected = chatter.ask(self.history, cache_salt=f"never paused {session}")
        self.pause()

    def pause(self) -> dict[str, Any]:
        paused = self.chatter.sessions.pause(self.session)
        assert paused.state == "paused"
        return paused.model_dump()

    def resume(self, strategy: str | None = None) -> dict[str, Any]:
        answer = self.chatter.http.post(
            f"/v1/sessions/{self.session}/resume", json={"target": "device", "strategy": strategy}
        )
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def go_on(self) -> Answer:
        answer = self.chatter.ask(self.history, self.session)
        assert answer.same_as(self.expected)
        return answer

    def chunk_files(self, store: Path) -> list[Path]:
        digest = SessionKey(self.session).digest
        return sorted(path for path in store.rglob("*-c0*") if digest in str(path))

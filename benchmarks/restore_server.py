"""A server behind an emulated link, and the calls of bench_restore.py to it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Server, Timed, model_arguments
from benchmarks.restore_report import Run, balanced_speed

__all__ = [
    "LATENCY_S",
    "Session",
    "call",
    "read_timeline",
    "require_away",
    "require_cached",
    "serving",
    "timeline",
]

LATENCY_S = 0.001
PAGE = 16


@dataclass
class Session:
    """A paused session. `cold_s`, `warm_s`: TTFT of its prompt with nothing, and all of it, on the device."""

    tokens: int
    history: list[int]
    stored_bytes: int = 0
    cold_s: list[float] = field(default_factory=list)
    warm_s: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its session id."""
        return f"restore-{self.tokens}"

    @property
    def balanced_bytes_s(self) -> float:
        """The link over which loading takes as long as computing."""
        return balanced_speed(
            self.stored_bytes, statistics.median(self.cold_s), statistics.median(self.warm_s), LATENCY_S
        )


@contextmanager
def serving(
    place: Path,
    speed: float,
    *,
    strategy: str = "optimal",
    store: str = "store",
    name: str = "",
    link: str = "",
    restore: str = "",
) -> Iterator[Server]:
    """A server whose disk is behind a link of `speed` bytes a second; killed at the end.

    The memory tier has room for one page: what is paused lies on the disk only. Servers of one store and
    speed share their rates. `name`: of the configuration and the log, if there are several of these.
    `link`, `restore`: more keys of these sections.
    """
    rates = f"{store}-{speed:.0f}"
    config = place / f"{name or rates}.yaml"
    links = [f"tier: ssd, bytes_per_s: {round(speed)}, latency_s: {LATENCY_S}", link]
    restores = [
        "" if strategy == "optimal" else f"strategy: {strategy}",
        f"rates_file: {place / rates}.json",
        restore,
    ]
    config.write_text(
        "memory: {capacity_bytes: 1MiB, prefault_bytes: 0}\n"
        f"ssd: {{path: {place / store}, capacity_bytes: 32GiB, free_space_floor_bytes: 1GiB}}\n"
        f"link: {{{', '.join(filter(None, links))}}}\n"
        f"restore: {{{', '.join(filter(None, restores))}}}\n"
        "session: {hold_deadline_s: 5m}\n"
    )
    arguments = [*model_arguments(), "--radix-cache-backend", "krul"]
    server = Server(arguments, {"KRUL_CONFIG": str(config)}, config.with_suffix(".log"))
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


def call(server: Server, verb: str, session: Session, what: str, **body: Any) -> dict[str, Any]:
    """One session route; its answer."""
    answer = server.http.request(verb, f"/v1/sessions/{session.name}/{what}", json=body or None)
    if answer.is_error:
        raise RuntimeError(f"{what} of {session.name}: HTTP {answer.status_code}: {answer.text}")
    found: dict[str, Any] = answer.json()
    return found


def timeline(server: Server, session: Session) -> dict[str, Any] | None:
    """The timeline of the last restore; None before the first one."""
    answer = server.http.get(f"/v1/sessions/{session.name}/timeline")
    found: dict[str, Any] | None = answer.json() if answer.is_success else None
    return found


def read_timeline(answer: dict[str, Any] | None, ttft_s: float, *, predicted: bool) -> Run:
    """A run as its timeline shows it. A resume knows nothing of the request that follows: no prediction."""
    if answer is None:
        raise RuntimeError("a restore left no timeline")
    lines = answer["timeline"]
    staircase = lines["staircase"] or [0]
    return Run(
        ttft_s,
        bytes=sum(span[7] for span in lines["spans"] if span[0] == "load"),
        bubble=lines["bubble"],
        recomputed_tokens=sum(staircase) / len(staircase),
        predicted_s=answer["plan"]["ttft_s"] if predicted else None,
    )


def require_cached(timed: Timed, session: Session) -> None:
    """A row must be what it says: all full pages of the session were on the device when the request ran."""
    if timed.meta["cached_tokens"] < session.tokens // PAGE * PAGE:
        raise RuntimeError(f"of {session.tokens} tokens, some were computed by the request: {timed.meta}")


def require_away(server: Server, session: Session) -> None:
    """And none of it before."""
    plan = call(server, "GET", session, "plan")
    if plan["on_device_tokens"] or "memory" in plan["tiers"]:
        raise RuntimeError(f"session {session.name} is not only behind the link: {plan}")

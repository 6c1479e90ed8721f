"""A server of two ranks, a service each, over disks that can fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sgl_krul.config import Config, TenantsConfig
from sgl_krul.errors import KrulError
from sgl_krul.layout import namespace
from sgl_krul.service import SessionService
from sgl_krul.session.record import SessionKey
from sgl_krul.session.registry import State
from sgl_krul.store.memory import MemoryTier
from tests.conftest import MEMORY_PAGES
from tests.ranks import Meeting
from tests.sessions import (
    LAYOUT,
    Chat,
    FaultyTier,
    TruePages,
    free_slots,
    make_config,
    make_service,
    open_ssd,
    wrong_pages,
)

RANKS = 2
NAMESPACES = [namespace(LAYOUT, "weights", "", rank, RANKS) for rank in range(RANKS)]
KEY = SessionKey("chat")
Fault = Callable[[str, str, str], None]


def no_fault(when: str, operation: str, key: str) -> None:
    """Nothing goes wrong."""


class Site:
    """All ranks of a server, each with its own memory and disk."""

    def __init__(self, root: Path, config: Config | None = None) -> None:
        self.root = root
        self.config = config or make_config()
        self.meeting = Meeting(RANKS)
        self.faults: list[Fault] = [no_fault] * RANKS
        self.ssds = [open_ssd(root / f"rank{rank}") for rank in range(RANKS)]
        self.memories: list[MemoryTier] = []
        self.services: list[SessionService] = []
        self.settled: list[list[bool]] = [[] for _ in range(RANKS)]

    def start(self, tenants: TenantsConfig | None = None) -> None:
        """A new server over the same disks; memory is empty."""
        self.stop()
        config = replace(self.config, tenants=tenants or TenantsConfig())
        size = MEMORY_PAGES * LAYOUT.page_bytes
        self.memories = [MemoryTier(LAYOUT.layers, LAYOUT.page_segment_bytes, size) for _ in range(RANKS)]
        self.services = self.meeting.everywhere(
            lambda rank: make_service(
                self.memories[rank],
                FaultyTier(self.ssds[rank], lambda *args: self.faults[rank](*args)),
                config=config,
                namespace=NAMESPACES[rank],
                ranks=self.meeting.ranks[rank],
            )
        )

    def stop(self) -> None:
        for rank, service in enumerate(self.services):
            service.close()
            assert service.check() == []
            assert wrong_pages(self.memories[rank]) == []
            assert free_slots(self.memories[rank]) == MEMORY_PAGES
        self.services = []

    def turn(self, session: Chat) -> None:
        for service in self.services:
            service.observe(session.key, session.token_ids)

    def run(self, verb: Callable[[int, Callable[[Any], None]], None]) -> list[Any]:
        """Begin a verb on all ranks and poll in step until it is answered; the answer of each rank."""

        def rank_runs(rank: int) -> Any:
            answers: list[Any] = []
            service = self.services[rank]
            service.agree_on(KEY)
            try:
                verb(rank, answers.append)
            except KrulError as error:
                return error
            while not self.meeting.ranks[rank].agree_min([len(answers)])[0]:
                service.poll()
                time.sleep(0.0005)
            (answer,) = answers
            return answer

        return self.meeting.everywhere(rank_runs)

    def pause(self, session: Chat) -> list[Any]:
        def verb(rank: int, reply: Callable[[Any], None]) -> None:
            def settle(success: bool) -> int:
                self.settled[rank].append(success)
                return 0

            self.services[rank].pause(
                self.services[rank].registry.get(session.key),
                session.hashes,
                TruePages(session.hashes),
                before=lambda: None,
                settle=settle,
                reply=reply,
            )

        self.turn(session)
        return self.run(verb)

    def resume(self, hold: bool = False) -> list[Any]:
        return self.run(lambda rank, reply: self.services[rank].resume(KEY, hold=hold, reply=reply))

    def forget(self) -> list[Any]:
        def verb(rank: int, reply: Callable[[Any], None]) -> None:
            def settle() -> int:
                self.settled[rank].append(True)
                return 0

            session = self.services[rank].registry.get(KEY)
            self.services[rank].forget(session, settle=settle, reply=reply)

        return self.run(verb)

    def states(self) -> list[State | None]:
        found = [service.registry.find(KEY.digest) for service in self.services]
        return [None if session is None else session.state for session in found]

"""Servers over one shared tier: each has a disk and a memory of its own, all of it may fail on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sgl_krul.config import Config, PlacementConfig, Replicate, TenantsConfig
from sgl_krul.errors import KrulError
from sgl_krul.metrics import MetricsSink
from sgl_krul.pause.pipeline import PageSource
from sgl_krul.service import SessionService
from sgl_krul.service.jobs import Body
from sgl_krul.session.record import SessionKey
from sgl_krul.session.registry import Session, State
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.placement import Policy
from sgl_krul.store.ssd import SsdTier
from sgl_krul.store.tiered import TieredStore
from tests.faults import Backing, FakeSharedTier, FaultInjectingSharedTier, FaultInjectingTier
from tests.sessions import (
    LAYOUT,
    NAMESPACE,
    NOW,
    Chat,
    TruePages,
    free_slots,
    hash_pages,
    make_config,
    open_ssd,
    policy,
    wrong_pages,
)

PAGES = 64
KEY = SessionKey("chat")


@dataclass
class World:
    """What servers share: a place, and the time, which stands still (the same for monotonic and unix)."""

    root: Path
    time_s: float = NOW
    backing: Backing = field(default_factory=Backing)
    servers: list[Server] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.backing.now = lambda: self.time_s

    def server(self, name: str = "a", **settings: Any) -> Server:
        """A new server."""
        server = Server(self, name, **settings)
        self.servers.append(server)
        return server

    def finish(self) -> None:
        """Close all servers; each must be sound, hold nothing, and know no wrong page."""
        for server in self.servers:
            server.finish()


@dataclass
class Settings:
    """How a server is set up. Bytes of `memory_max_bytes` and watermarks are those of its configuration."""

    replicate: Replicate = "ssd"
    disk: bool = True
    shared: bool = True
    namespace: str = NAMESPACE
    memory_pages: int = PAGES
    memory_max_bytes: int = 0
    memory_age_s: float = 600.0
    demote_after_s: float = 0.0
    ttl_s: float = 0.0
    high_watermark: float = 1.0
    low_watermark: float = 1.0
    interval_s: float = 30.0
    ssd_bytes: int = 1 << 26
    redis_bytes: int = 1 << 26
    tenants: TenantsConfig = field(default_factory=TenantsConfig)

    def config(self) -> Config:
        """As the service takes it."""
        placement = PlacementConfig(
            replicate=self.replicate,
            memory_max_bytes=self.memory_max_bytes,
            memory_age_s=self.memory_age_s,
            demote_after_s=self.demote_after_s,
            high_watermark=self.high_watermark,
            low_watermark=self.low_watermark,
            interval_s=self.interval_s,
        )
        return replace(make_config(), placement=placement, tenants=self.tenants)

    def policy(self) -> Policy:
        """As placement takes it."""
        return policy(
            self.replicate,
            demote_after_s=self.demote_after_s,
            high_watermark=self.high_watermark,
            low_watermark=self.low_watermark,
            ttl_s=self.ttl_s,
        )


class Server:
    """One service and its tiers. `ssd` and `redis` stand before its disk and its view of the shared tier."""

    def __init__(
        self, world: World, name: str = "a", *, metrics: MetricsSink | None = None, **settings: Any
    ) -> None:
        self.world = world
        self.name = name
        self.settings = Settings(**settings)
        self.root = world.root / name
        self._metrics = metrics
        self._start()

    def _start(self) -> None:
        settings = self.settings
        self.disk: SsdTier | None = None
        if settings.disk:
            self.disk = open_ssd(self.root, settings.ssd_bytes)
            self.ssd = FaultInjectingTier(self.disk)
        self.view = FakeSharedTier(
            self.world.backing, owner=f"{self.name}:1", capacity_bytes=settings.redis_bytes
        )
        self.redis = FaultInjectingSharedTier(self.view)
        self.memory = MemoryTier(
            LAYOUT.layers, LAYOUT.page_segment_bytes, settings.memory_pages * LAYOUT.page_bytes
        )
        self.store = TieredStore(
            self.ssd if settings.disk else None,
            self.redis if settings.shared else None,
            policy=settings.policy(),
        )
        self.service = SessionService(
            settings.config(),
            LAYOUT,
            settings.namespace,
            self.memory,
            self.store,
            hash_pages,
            b"key",
            metrics=self._metrics,
            clock=lambda: self.world.time_s,
            now=lambda: self.world.time_s,
        )

    def restart(self) -> None:
        """A new service over the same disk and the same shared tier; memory is gone."""
        self.finish()
        self._start()

    def finish(self) -> None:
        """Close it: sound, nothing pinned, nothing wrong."""
        self.service.close()
        assert self.memory.check() == []
        assert wrong_pages(self.memory) == []
        assert free_slots(self.memory) == self.settings.memory_pages
        if self.disk is not None:
            self.disk.close()

    def drive(self, timeout_s: float = 20.0) -> None:
        """Poll until nothing is under way, and nothing is begun by what was found."""
        deadline = time.monotonic() + timeout_s
        quiet = 0
        while quiet < 4:
            assert time.monotonic() < deadline, "a job does not end"
            self.service.poll()
            quiet = 0 if self.service.working else quiet + 1
            if not quiet:
                time.sleep(0.0002)

    def upkeep(self, seconds: float = 31.0) -> None:
        """Time passes, and what is due in the background is done."""
        self.world.time_s += seconds
        self.drive()
        self.drive()

    def ask(self, verb: Callable[[Callable[[Body | KrulError], None]], None]) -> Any:
        """Run a verb to its end; the one answer. What the verb raises at once is the answer too."""
        answers: list[Body | KrulError] = []
        try:
            verb(answers.append)
        except KrulError as error:
            answers.append(error)
        self.drive()
        (answer,) = answers
        return answer

    def session(self, key: SessionKey = KEY) -> Session | None:
        """What the server knows of it."""
        return self.service.registry.find(key.digest)

    # -- the verbs, as the engine calls them --

    def turn(self, chat: Chat) -> Session:
        """A request of the session finished."""
        self.service.observe(chat.key, chat.token_ids)
        return self.service.registry.get(chat.key)

    def begin_pause(
        self,
        chat: Chat,
        reply: Callable[[Body | KrulError], None],
        *,
        source: PageSource | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Ask for a pause of the active session."""
        self.service.pause(
            self.service.registry.get(chat.key),
            chat.hashes,
            TruePages(chat.hashes) if source is None else source,
            before=before,
            settle=lambda success: 0,
            reply=reply,
        )

    def pause(self, chat: Chat, **how: Any) -> Any:
        """A turn and a pause; the answer."""
        self.turn(chat)
        return self.ask(lambda reply: self.begin_pause(chat, reply, **how))

    def hold(self, key: SessionKey = KEY) -> Any:
        """A request waits."""
        return self.ask(lambda reply: self.service.resume(key, hold=True, reply=reply))

    def resume(self, key: SessionKey = KEY) -> Any:
        """Resume without a request; of one that is not known, the shared tier is asked."""

        def verb(reply: Callable[[Body | KrulError], None]) -> None:
            self.service.exchange.locate(
                key, lambda _: self.service.resume(key, hold=False, reply=reply), reply
            )

        return self.ask(verb)

    def show(self, key: SessionKey = KEY) -> Any:
        """What it is."""

        def verb(reply: Callable[[Body | KrulError], None]) -> None:
            self.service.exchange.locate(key, lambda session: reply(self.service.describe(session)), reply)

        return self.ask(verb)

    def forget(self, key: SessionKey = KEY, drop: Callable[[], None] = lambda: None) -> Any:
        """Delete it."""

        def forget(session: Session, reply: Callable[[Body | KrulError], None]) -> None:
            self.service.forget(session, settle=lambda: 0, drop=drop, reply=reply)

        return self.ask(
            lambda reply: self.service.exchange.locate(key, lambda session: forget(session, reply), reply)
        )

    def move(self, target: str, key: SessionKey = KEY) -> Any:
        """Put it elsewhere."""
        return self.ask(
            lambda reply: self.service.exchange.locate(
                key, lambda session: self.service.exchange.move(session, target, reply), reply
            )
        )

    def list(self) -> Any:
        """What the API lists."""
        return self.ask(lambda reply: self.service.exchange.refresh(reply, self.service.overview))

    def listed(self) -> dict[str, Any]:
        """Sessions by id."""
        return {row["session_id"]: row for row in self.list()["sessions"]}

    @property
    def paused(self) -> bool:
        """Whether KEY is a paused session here."""
        session = self.session()
        return session is not None and session.state is State.PAUSED

"""Sessions whose stored KV is not exact.

The bytes of a lossy page are those that `true_kv` gives for its name in the session's private namespace of
number 1. So what checks that each page holds what its name says (`wrong_pages`, `FakeDevice.check`) finds any
lossy page under a name that others use, and any exact one under a private name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sgl_krul.pause.pipeline import PauseReport, write_session
from sgl_krul.service import SessionService
from sgl_krul.session.catalog import delete_session
from sgl_krul.session.private import private_key
from sgl_krul.session.record import page_key
from sgl_krul.session.registry import PausedCopy
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.tier import Tier
from tests.sessions import CHUNK_TOKENS, NOW, PAGE, Chat, TruePages, hash_pages
from tests.two_servers import Server

__all__ = ["in_memory", "keep", "names", "pause_lossy", "paused_lossily", "write_lossy"]


def names(session: Chat, number: int = 1) -> tuple[str, ...]:
    """What its pages are called in its private namespace."""
    return hash_pages(private_key(session.key, number), session.token_ids)


def write_lossy(session: Chat, tier: Tier, now: float = NOW, generation: int = 1) -> PauseReport:
    """Put it into `tier` as a lossy pause leaves it."""
    snapshot = replace(session.snapshot(), exact=False)
    return write_session(
        snapshot,
        TruePages(names(session)),
        tier,
        chunk_tokens=CHUNK_TOKENS,
        now=lambda: now,
        generation=generation,
    )


def paused_lossily(server: Server, session: Chat) -> None:
    """The session ran exactly in this server, and then its pause was lossy; memory is as it was."""
    server.pause(session)
    assert server.disk is not None
    delete_session(server.disk, session.namespace, session.digest)
    manifest = write_lossy(session, server.disk, now=server.world.time_s).manifest
    server.service.registry.get(session.key).paused = PausedCopy.of(manifest, "ssd")


def pause_lossy(
    service: SessionService, session: Chat, reply: Callable[[Any], None], available: int | None = None
) -> None:
    """A turn of a session that lives in its private namespace, and its pause, as the engine asks for it."""
    known = service.registry.get(session.key)
    assert known.private is not None
    service.observe(session.key, session.token_ids, private=known.private)
    service.pause(
        known,
        session.hashes,
        TruePages(names(session), available),
        before=lambda: None,
        settle=lambda _: 0,
        reply=reply,
        private_hashes=names(session, known.private),
    )


def in_memory(memory: MemoryTier, session: Chat) -> tuple[int, int]:
    """How many leading tokens memory has under the session's own names, and under its private ones."""
    private = [page_key(session.namespace, name) for name in names(session)]
    return PAGE * memory.leading(session.page_keys), PAGE * memory.leading(private)


def keep(memory: MemoryTier, session: Chat) -> None:
    """Put its exact pages into memory, as the write-through does."""
    reservation = memory.reserve(session.page_keys)
    assert reservation is not None
    slot_of = dict(zip(reservation.keys, reservation.slots, strict=True))
    with TruePages(session.hashes).segments(0, len(session.hashes)) as segments:
        assert segments is not None
        for layer, pages in enumerate(segments):
            for key, page in zip(session.page_keys, pages, strict=True):
                if key in slot_of:
                    memory.layer(layer)[slot_of[key]] = bytearray(page)
    memory.publish(reservation)

"""What the service does with estimates: asks for one at a pause, hands one over at a resume, forgets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from sgl_krul.service import SessionService
from sgl_krul.service.estimates import Estimates, Evidence, NoEstimates
from sgl_krul.session.catalog import read_manifest
from sgl_krul.session.record import Manifest
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.ssd import SsdTier
from tests.sessions import NAMESPACE, OTHER_NAMESPACE, TruePages, chat, drive, make_service, tokens

SHOWN = {"rows": 3, "dropped": 1, "dropped_share": 0.25, "waiting": 0, "ir_mass": [0.5], "ir_layers": [0]}


@dataclass
class Kept:
    """Estimates that are given from outside, and remember what they were told."""

    by_digest: dict[str, bytes] = field(default_factory=dict)
    told: list[Any] = field(default_factory=list)
    working: bool = False

    def statistics(self, digest: str) -> bytes:
        """See Estimates."""
        return self.by_digest.get(digest, b"")

    def evidence(self, digest: str, tokens: int) -> Evidence | None:
        """See Estimates: nothing is coded here."""
        return None

    def goes_on(self, manifest: Manifest) -> None:
        """See Estimates."""
        self.told.append((manifest.digest, manifest.statistics))

    def describe(self, digest: str) -> Any:
        """See Estimates."""
        return SHOWN if digest in self.by_digest else None

    def forget(self, digest: str) -> None:
        """See Estimates."""
        self.by_digest.pop(digest, None)

    def start_over(self) -> None:
        """See Estimates."""
        self.by_digest.clear()

    def close(self) -> None:
        """See Estimates."""
        self.told.append("closed")


@dataclass
class Bench:
    """A service over one store, and its estimates."""

    ssd: SsdTier
    memory: MemoryTier
    services: list[SessionService] = field(default_factory=list)

    def start(self, estimates: Estimates) -> SessionService:
        """A new server."""
        self.services.append(make_service(self.memory, self.ssd, estimates=estimates))
        return self.services[-1]

    def pause(self, service: SessionService, count: int) -> Any:
        """A turn and a pause; returns the answer."""
        session = chat(count)
        service.observe(session.key, session.token_ids)
        answers: list[Any] = []
        service.pause(
            service.registry.get(session.key),
            session.hashes,
            TruePages(session.hashes),
            before=lambda: None,
            settle=lambda success: 0,
            reply=answers.append,
        )
        drive(service)
        return answers[0]

    def stored(self) -> bytes:
        """The statistics in the store."""
        manifest = read_manifest(self.ssd, NAMESPACE, DIGEST)
        assert manifest is not None
        return manifest.statistics


KEY = chat(1).key
DIGEST = KEY.digest


@pytest.fixture
def bench(ssd: SsdTier, memory: MemoryTier) -> Iterator[Bench]:
    bench = Bench(ssd, memory)
    yield bench
    for service in bench.services:
        service.close()
        assert service.check() == []


def test_a_pause_saves_the_estimate_and_a_resume_hands_it_over(bench: Bench) -> None:
    kept = Kept({DIGEST: b"sums"})
    service = bench.start(kept)
    assert bench.pause(service, 150)["similarity"] == SHOWN
    assert bench.stored() == b"sums"
    service.close()
    assert kept.told == ["closed"]
    other = Kept()
    service = bench.start(other)
    assert other.told == [], "nothing is read before the session is wanted"
    service.resume(KEY, hold=True, reply=lambda _: None)
    drive(service)
    assert other.told == [(DIGEST, b"sums")]


def test_a_server_that_estimates_nothing_keeps_what_another_found(bench: Bench) -> None:
    bench.pause(bench.start(Kept({DIGEST: b"sums"})), 150)
    service = bench.start(NoEstimates())
    service.resume(KEY, hold=True, reply=lambda _: None)
    drive(service)
    assert bench.pause(service, 200)["similarity"] is None
    assert bench.stored() == b"sums"


def test_the_estimate_is_taken_when_the_pause_writes(bench: Bench) -> None:
    """Rows that end while the pause waits for pages are in it."""
    kept = Kept()
    service = bench.start(kept)
    session = chat(150)
    service.observe(session.key, session.token_ids)
    service.pause(
        service.registry.get(session.key),
        session.hashes,
        TruePages(session.hashes),
        before=lambda: kept.by_digest.update({DIGEST: b"late"}),
        settle=lambda success: 0,
        reply=lambda _: None,
    )
    drive(service)
    assert bench.stored() == b"late"


def test_a_deleted_session_and_new_weights_leave_no_estimate(bench: Bench) -> None:
    kept = Kept({DIGEST: b"sums", "other": b"more"})
    service = bench.start(kept)
    bench.pause(service, 150)
    service.forget(service.registry.get(KEY), settle=lambda: 0, reply=lambda _: None)
    drive(service)
    assert kept.by_digest == {"other": b"more"}
    service.change_namespace(OTHER_NAMESPACE)
    assert kept.by_digest == {}


def test_a_session_is_shown_with_its_estimate(bench: Bench) -> None:
    service = bench.start(Kept({DIGEST: b"sums"}))
    service.observe(KEY, tokens(100))
    assert service.describe(service.registry.get(KEY))["similarity"] == SHOWN
    (row,) = service.overview()["sessions"]
    assert row["similarity"] == SHOWN

"""Quotas: what a tenant stores, what a pause adds and replaces, and what happens when it is too much."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_krul.config import TenantRuleConfig, TenantsConfig
from sgl_krul.errors import QuotaExceeded, StoreFull
from sgl_krul.service.tenants import Tenants
from sgl_krul.session.record import SessionKey
from sgl_krul.session.registry import MEMORY, PausedCopy, Registry, Session, State
from tests.sessions import LAYOUT, NAMESPACE, Chat, chat, files
from tests.two_servers import World


def stored(session_id: str, size: int, tiers: tuple[str, ...] = ("ssd",)) -> Session:
    """A paused session of that many bytes."""
    copy = PausedCopy(tiers, NAMESPACE, 1, 10, 10, size, size, True, 1.0)
    return Session(SessionKey(session_id).digest, session_id, False, state=State.PAUSED, paused=copy)


def tenants(*sessions: Session, **config: Any) -> Tenants:
    """Quotas over those sessions."""
    registry = Registry()
    for session in sessions:
        registry.add(session)
    return Tenants(TenantsConfig(**config), registry)


def new(session_id: str) -> Session:
    """A session that was never paused."""
    return Session(SessionKey(session_id).digest, session_id, False)


def test_without_a_quota_anything_goes() -> None:
    tenants(stored("a/1", 1 << 60)).require_room(new("a/2"), 1 << 60)


@pytest.mark.parametrize(("size", "fits"), [(400, True), (401, False)])
def test_a_quota_is_for_all_sessions_of_a_tenant(size: int, fits: bool) -> None:
    rules = tenants(
        stored("a/1", 300), stored("a/2", 300), stored("b/1", 9000), stored("plain", 9000), quota_bytes=1000
    )
    if fits:
        rules.require_room(new("a/3"), size)
        return
    with pytest.raises(QuotaExceeded, match="tenant 'a' uses 600 bytes: 401 more would pass") as caught:
        rules.require_room(new("a/3"), size)
    assert caught.value.status == 507
    assert isinstance(caught.value, StoreFull)


def test_a_session_counts_once_however_many_tiers_have_it() -> None:
    rules = tenants(stored("a/1", 600, ("ssd", "redis")), stored("a/2", 300, (MEMORY,)), quota_bytes=1000)
    rules.require_room(new("a/3"), 100)
    with pytest.raises(QuotaExceeded):
        rules.require_room(new("a/3"), 101)


def test_what_is_replaced_does_not_count() -> None:
    old = stored("a/1", 900)
    rules = tenants(old, stored("a/2", 50), quota_bytes=1000)
    rules.require_room(old, 950)
    with pytest.raises(QuotaExceeded, match=r"951 more \(in place of 900\)"):
        rules.require_room(old, 951)


def test_sessions_without_a_tenant_share_a_quota() -> None:
    rules = tenants(stored("one", 600), stored("a/1", 600), quota_bytes=1000)
    with pytest.raises(QuotaExceeded, match="sessions without a tenant use 600"):
        rules.require_room(new("two"), 500)


def test_rules_and_separators_say_whose_a_session_is() -> None:
    rules = (
        TenantRuleConfig("vip-", "vip", 5000),
        TenantRuleConfig("vip-trial-", "trial", 100),
        TenantRuleConfig("a:", "vip"),
    )
    found = tenants(
        stored("vip-1", 2000),
        stored("a:2", 2000),
        stored("x:1", 50),
        separator=":",
        quota_bytes=60,
        rules=rules,
    )
    found.require_room(new("vip-2"), 1000)
    for session_id, size, who in (
        ("a:3", 1001, "'vip' uses 4000"),
        ("vip-trial-1", 101, "'trial' uses 0"),
        ("x:2", 11, "'x' uses 50"),
        ("x/2", 61, "without a tenant use 0"),
    ):
        with pytest.raises(QuotaExceeded, match=who):
            found.require_room(new(session_id), size)


# -- through the service --

QUOTA = TenantsConfig(quota_bytes=12 * LAYOUT.page_bytes + 5 * 4096)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.finish()


def test_over_quota_is_refused_and_nothing_changes(world: World) -> None:
    a = world.server("a", tenants=QUOTA)
    assert a.pause(chat(150, "t/1"))["state"] == "paused"
    before = files(a.root)
    session = chat(100, "t/2")
    assert isinstance(a.pause(session), QuotaExceeded)
    known = a.session(session.key)
    assert known is not None
    assert (known.state, known.paused) == (State.ACTIVE, None)
    assert files(a.root) == before
    assert world.backing.objects == {}
    assert a.service.registry.get(SessionKey("t/1")).state is State.PAUSED
    assert a.pause(chat(100, "u/2"))["state"] == "paused"  # another tenant
    assert a.pause(chat(170, "t/1"))["state"] == "paused"  # in place of what it has
    assert a.forget(SessionKey("t/1"))["deleted"]
    assert a.pause(session)["state"] == "paused"


def test_sessions_of_one_tenant_that_are_paused_at_once_share_its_quota(world: World) -> None:
    """What is being written counts, or any number of pauses at once would pass."""
    a = world.server("a", tenants=QUOTA)
    sessions: list[Chat] = [chat(150, f"t/{index}") for index in range(4)]
    answers: list[Any] = []
    refused = 0
    for session in sessions:
        a.turn(session)
        try:
            a.begin_pause(session, answers.append)
        except QuotaExceeded:
            refused += 1
    a.drive()
    assert refused == 3
    assert [answer["state"] for answer in answers] == ["paused"]
    # What is refused, or has failed, is not counted for ever.
    assert a.forget(sessions[0].key)["deleted"]
    assert a.pause(sessions[1])["state"] == "paused"


def test_an_import_is_held_to_the_quota_too(world: World, tmp_path: Path) -> None:
    a = world.server("a", tenants=QUOTA)
    b = world.server("b", shared=False)
    session = chat(150, "t/2")
    b.pause(session)
    path = tmp_path / "session.krul"
    b.ask(lambda reply: b.service.exchange.export(b.service.registry.get(session.key), path, reply))
    assert a.pause(chat(150, "t/1"))["state"] == "paused"
    before = files(a.root)
    answer = a.ask(lambda reply: a.service.exchange.take_in(path, reply))
    assert isinstance(answer, QuotaExceeded)
    assert files(a.root) == before
    assert a.session(session.key) is None

"""Tiers behind one manager: who takes a session, who is asked, and what is known without waiting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_krul.config import Replicate
from sgl_krul.errors import LeaseHeld
from sgl_krul.service.counters import Counters
from sgl_krul.service.views import overview
from sgl_krul.session.registry import Registry
from sgl_krul.store.link import LinkTier
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.ssd import SsdTier
from sgl_krul.store.tiered import TieredStore
from tests.faults import Backing, FakeSharedTier
from tests.sessions import open_ssd, policy


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SsdTier]:
    with open_ssd(tmp_path, 100_000) as tier:
        yield tier


@pytest.fixture
def shared() -> FakeSharedTier:
    return FakeSharedTier(Backing(), capacity_bytes=100_000)


def named(store: TieredStore, size: int, held: dict[str, int] | None = None) -> list[str]:
    return [tier.name for tier in store.targets(size, held or {})]


def test_without_tiers_it_is_false() -> None:
    store = TieredStore(policy=policy())
    assert not store
    assert (store.names, store.usage(), store.check(), store.places()) == ((), {}, [], ())
    assert store.choose(["ssd"]) == ()
    assert named(store, 10) == []
    store.refresh()
    store.touch(["a/b"])


def test_order_and_names(disk: SsdTier, shared: FakeSharedTier) -> None:
    store = TieredStore(disk, shared, policy=policy())
    assert store
    assert store.names == ("ssd", "redis")
    assert store.choose(("memory", "redis", "ssd", "elsewhere")) == (disk, shared)
    assert store.tier("redis") is shared
    with pytest.raises(KeyError):
        store.tier("tape")
    assert [store.is_shared(tier) for tier in store.tiers] == [False, True]
    assert store.others([disk]) == [shared]
    assert (store.breaker_state("ssd"), store.breaker_state("redis")) == (None, "closed")


@pytest.mark.parametrize(
    ("replicate", "expected"), [("ssd", ["ssd"]), ("redis", ["redis"]), ("both", ["ssd", "redis"])]
)
def test_targets_are_those_wanted(
    disk: SsdTier, shared: FakeSharedTier, replicate: Replicate, expected: list[str]
) -> None:
    assert named(TieredStore(disk, shared, policy=policy(replicate)), 1000) == expected


def test_a_full_target_is_replaced_and_what_it_holds_already_is_room(
    disk: SsdTier, shared: FakeSharedTier
) -> None:
    disk.put("a/b", b"", [bytes(90_000)])
    store = TieredStore(disk, shared, policy=policy("ssd"))
    assert named(store, 20_000) == ["redis"]
    assert named(store, 20_000, {"ssd": 90_000}) == ["ssd"]
    shared.put("a/b", b"", [bytes(90_000)])
    assert named(store, 20_000) == ["ssd"]  # it says best why not


def test_a_tier_known_to_be_down_is_nobodys_target(disk: SsdTier, shared: FakeSharedTier) -> None:
    store = TieredStore(disk, shared, policy=policy("both"))
    shared.known_down = True
    assert not store.available(shared)
    assert store.available(disk)
    assert named(store, 1000) == ["ssd"]
    assert store.others([disk]) == []
    assert [place.available for place in store.places()] == [True, False]
    assert store.breaker_state("redis") == "open"
    assert list(store.usage()) == ["ssd", "redis"]
    store.refresh()
    store.touch(["a/b"])
    assert TieredStore(None, shared, policy=policy("redis")).targets(10, {}) == [shared]


def test_the_overview_tells_of_a_tier_that_is_down(disk: SsdTier, shared: FakeSharedTier) -> None:
    store, memory = TieredStore(disk, shared, policy=policy()), MemoryTier(2, 64, 1024)
    shared.known_down = True
    tiers = overview(Registry(), memory, store, Counters(), "n")["tiers"]
    breakers = {name: tier["breaker"] for name, tier in tiers.items()}
    assert breakers == {"memory": None, "ssd": None, "redis": "open"}


def test_a_tier_that_goes_down_unnoticed_is_left_as_it_was(shared: FakeSharedTier) -> None:
    shared.put("a/b", b"", [bytes(100)])
    shared.down = True
    store = TieredStore(None, shared, policy=policy("redis"))
    store.refresh()
    assert store.usage()["redis"].objects == 1


def test_only_shared_tiers_are_leased(disk: SsdTier, shared: FakeSharedTier) -> None:
    store = TieredStore(disk, shared, policy=policy())
    with store.leased("a/", disk), store.leased("a/", disk), store.leased("a/", shared):
        with pytest.raises(LeaseHeld), store.leased("a/", shared):
            pass
    with store.leased("a/", shared):
        pass


def test_others_see_what_is_touched_and_counted(shared: FakeSharedTier) -> None:
    backing = Backing()
    here, there = FakeSharedTier(backing), FakeSharedTier(backing, owner="beta:2")
    there.put("a/b", b"", [bytes(100)])
    store = TieredStore(None, here, policy=policy("redis"))
    assert store.usage()["redis"].objects == 0
    store.refresh()
    assert store.usage()["redis"].objects == 1
    store.touch(["a/b"])
    assert backing.touched == {"a/b": 1}


def test_what_may_still_be_written_is_known_behind_a_link_too(tmp_path: Path) -> None:
    with SsdTier(
        tmp_path, capacity_bytes=1 << 20, free_space_floor_bytes=0, fsync="never", daily_write_bytes=1000
    ) as disk:
        for tier in (disk, LinkTier(disk, bytes_per_s=1)):
            assert [place.write_left_bytes for place in TieredStore(tier, policy=policy()).places()] == [1000]


def test_where_there_is_no_budget_none_is_known(disk: SsdTier, shared: FakeSharedTier) -> None:
    for tier in (disk, LinkTier(disk, bytes_per_s=1), LinkTier(MemoryTier(2, 64, 1024), bytes_per_s=1)):
        places = TieredStore(tier, shared, policy=policy()).places()
        assert [place.write_left_bytes for place in places] == [None, None]

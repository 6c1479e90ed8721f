"""Placement decisions by example; tests/property/test_placement_property.py has what holds always."""

from __future__ import annotations

import pytest

from sgl_krul.errors import ConfigError, QuotaExceeded
from sgl_krul.store.placement import (
    Demotion,
    Parcel,
    Place,
    Policy,
    TenantRule,
    TenantRules,
    check_quota,
    select_demotions,
    select_expired,
    select_places,
)


def place(
    name: str, used: int = 0, capacity: int = 100, *, up: bool = True, writes: int | None = None
) -> Place:
    return Place(name, capacity, used, up, writes)


def policy(replicate: str = "ssd", **changes: float) -> Policy:
    settings = {"demote_after_s": 0.0, "high_watermark": 0.9, "low_watermark": 0.5, "ttl_s": 0.0}
    return Policy(replicate=replicate, **{**settings, **changes})  # type: ignore[arg-type]


def parcel(key: str, last_used: float, *places: str, size: int = 10) -> Parcel:
    return Parcel(key, "", size, last_used, places)


# -- select_places --

SSD, REDIS = place("ssd"), place("redis")


@pytest.mark.parametrize(
    ("replicate", "size", "places", "expected"),
    [
        ("ssd", 10, [SSD, REDIS], ("ssd",)),
        ("redis", 10, [SSD, REDIS], ("redis",)),
        ("both", 10, [SSD, REDIS], ("ssd", "redis")),
        ("both", 10, [SSD], ("ssd",)),
        ("redis", 10, [SSD], ("ssd",)),
        ("ssd", 10, [], ()),
        ("ssd", 10, [place("memory")], ()),
        ("ssd", 10, [place("memory"), SSD], ("ssd",)),
        ("ssd", 10, [place("ssd", up=False), REDIS], ("redis",)),
        ("redis", 10, [SSD, place("redis", up=False)], ("ssd",)),
        ("both", 10, [SSD, place("redis", up=False)], ("ssd",)),
        ("both", 10, [place("ssd", up=False), place("redis", up=False)], ()),
        ("ssd", 0, [place("ssd", up=False)], ()),
        ("ssd", 10, [place("ssd", 90), REDIS], ("ssd",)),
        ("ssd", 10, [place("ssd", 91), REDIS], ("redis",)),
        ("ssd", 10, [place("ssd", 300), place("redis", 95)], ()),
        ("ssd", 10, [place("ssd", writes=10), REDIS], ("ssd",)),
        ("ssd", 10, [place("ssd", writes=9), REDIS], ("redis",)),
        ("both", 10, [place("ssd", writes=9), REDIS], ("redis",)),
        ("ssd", 101, [SSD, REDIS], ()),
    ],
)
def test_where_a_pause_writes(
    replicate: str, size: int, places: list[Place], expected: tuple[str, ...]
) -> None:
    assert select_places(size, places, policy(replicate)) == expected


# -- select_demotions --


def test_nothing_moves_by_default() -> None:
    parcels = [parcel("a", 0, "ssd"), parcel("b", 1, "ssd", "redis")]
    assert select_demotions(parcels, [place("ssd", 90), REDIS], policy(), now=1e9) == []


def test_idle_parcels_go_to_the_next_slower_place_oldest_first() -> None:
    parcels = [parcel("young", 50, "ssd"), parcel("b", 10, "ssd"), parcel("a", 20, "ssd")]
    demotions = select_demotions(parcels, [place("ssd", 30), REDIS], policy(demote_after_s=50), now=100)
    assert demotions == [Demotion("b", "ssd", "redis", True), Demotion("a", "ssd", "redis", True)]


def test_what_the_slower_place_has_is_only_dropped() -> None:
    parcels = [parcel("a", 0, "ssd", "redis"), parcel("b", 0, "ssd")]
    full = place("redis", 100)
    demotions = select_demotions(parcels, [place("ssd", 20), full], policy(demote_after_s=1), now=9)
    assert demotions == [Demotion("a", "ssd", "redis", False)]


def test_a_place_above_the_high_watermark_is_brought_to_the_low_one() -> None:
    parcels = [parcel(str(number), number, "ssd") for number in range(9)]
    over = select_demotions(parcels, [place("ssd", 91), REDIS], policy(), now=9)
    assert [demotion.key for demotion in over] == ["0", "1", "2", "3", "4"]  # 91 - 50 = 41 left
    assert select_demotions(parcels, [place("ssd", 90), REDIS], policy(), now=9) == []


def test_what_goes_by_age_counts_for_the_watermark() -> None:
    parcels = [parcel(str(number), number, "ssd") for number in range(9)]
    demotions = select_demotions(parcels, [place("ssd", 95), REDIS], policy(demote_after_s=2.5), now=9)
    assert [demotion.key for demotion in demotions] == ["0", "1", "2", "3", "4", "5", "6"]
    demotions = select_demotions(parcels, [place("ssd", 95), REDIS], policy(demote_after_s=7.5), now=9)
    assert [demotion.key for demotion in demotions] == ["0", "1", "2", "3", "4"]


def test_a_parcel_that_does_not_fit_lets_smaller_ones_pass() -> None:
    parcels = [parcel("large", 0, "ssd", size=50), parcel("small", 1, "ssd"), parcel("next", 2, "ssd")]
    demotions = select_demotions(parcels, [place("ssd", 95), place("redis", 85)], policy(), now=9)
    assert demotions == [Demotion("small", "ssd", "redis", True)]


@pytest.mark.parametrize(
    "places",
    [
        [place("ssd", 95)],
        [place("ssd", 95), place("redis", up=False)],
        [place("ssd", 95, up=False), REDIS],
        [place("ssd", 95), place("redis", 91)],
        [SSD, place("redis", 95)],
        [],
    ],
)
def test_nowhere_to_go(places: list[Place]) -> None:
    parcels = [parcel("a", 0, "ssd"), parcel("b", 0, "redis"), parcel("c", 0, "elsewhere")]
    assert select_demotions(parcels, places, policy(demote_after_s=1), now=9) == []


def test_the_only_copy_in_reach_stays() -> None:
    """Redis has it, but is down: dropping it from the SSD would lose it for now."""
    places = [place("ssd", 95), place("redis", up=False)]
    assert select_demotions([parcel("a", 0, "ssd", "redis")], places, policy(demote_after_s=1), now=9) == []


def test_a_full_place_is_passed_over() -> None:
    places = [place("memory", 50), place("ssd", 95, writes=5), REDIS]
    parcels = [parcel("a", 0, "memory"), parcel("b", 1, "memory", "redis")]
    assert select_demotions(parcels, places, policy(demote_after_s=1), now=9) == [
        Demotion("a", "memory", "redis", True),
        Demotion("b", "memory", "redis", False),
    ]


def test_a_parcel_leaves_several_places_at_once_and_one_step_at_a_time() -> None:
    places = [place("memory", 10), place("ssd", 20), REDIS]
    parcels = [parcel("twice", 0, "memory", "ssd"), parcel("once", 1, "memory")]
    assert select_demotions(parcels, places, policy(demote_after_s=1), now=9) == [
        Demotion("twice", "memory", "ssd", False),
        Demotion("twice", "ssd", "redis", True),
        Demotion("once", "memory", "ssd", True),
    ]


# -- the rest --


def test_expired() -> None:
    parcels = [parcel("c", 90, "ssd"), parcel("b", 20, "redis"), parcel("a", 10, "ssd", "redis")]
    assert select_expired(parcels, policy(ttl_s=50), now=100) == ["a", "b"]
    assert select_expired(parcels, policy(ttl_s=80), now=100) == ["a"]  # b: to the second, not past it
    assert select_expired(parcels, policy(), now=1e12) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"low_watermark": -0.1},
        {"low_watermark": 0.95},
        {"high_watermark": 1.1},
        {"demote_after_s": -1.0},
        {"ttl_s": -1.0},
    ],
)
def test_a_policy_out_of_range(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        policy(**changes)


def test_quota() -> None:
    check_quota("a", used_bytes=90, replaced_bytes=0, size_bytes=10, quota_bytes=100)
    check_quota("a", used_bytes=90, replaced_bytes=20, size_bytes=30, quota_bytes=100)
    check_quota("a", used_bytes=1 << 60, replaced_bytes=0, size_bytes=1 << 60, quota_bytes=0)
    with pytest.raises(
        QuotaExceeded, match=r"tenant 'a' uses 90 bytes: 11 more would pass the quota of 100; delete"
    ):
        check_quota("a", used_bytes=90, replaced_bytes=0, size_bytes=11, quota_bytes=100)
    with pytest.raises(
        QuotaExceeded, match=r"without a tenant use 90 .* 31 more \(in place of 20\).*tenants\.quota_bytes"
    ):
        check_quota("", used_bytes=90, replaced_bytes=20, size_bytes=31, quota_bytes=100)


def test_tenants() -> None:
    rules = TenantRules(
        "/",
        100,
        (
            TenantRule("team-", "teams", 500),
            TenantRule("team-a-", "a", 0),
            TenantRule("old/", "teams"),
            TenantRule("x/y", "odd", 7),
        ),
    )
    tenants = {
        "team-b": "teams",
        "team-a-1": "a",
        "team-a": "teams",
        "old/1": "teams",
        "x/yz": "odd",
        "x/z": "x",
        "bob/1/2": "bob",
        "/1": "",
        "bob": "",
        "": "",
    }
    assert {session: rules.tenant_of(session) for session in tenants} == tenants
    quotas = {"teams": 500, "a": 100, "odd": 7, "bob": 100, "": 100}
    assert {tenant: rules.quota_of(tenant) for tenant in quotas} == quotas


def test_no_separator_means_no_tenants() -> None:
    rules = TenantRules("", 0, (TenantRule("b", "bees"),))
    assert [rules.tenant_of(session) for session in ("a/b", "b/a")] == ["", "bees"]
    assert rules.quota_of("bees") == 0


def test_a_separator_may_be_long() -> None:
    assert TenantRules("::", 0, ()).tenant_of("a:b::c::d") == "a:b"


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        ((TenantRule("p", "a"), TenantRule("p", "b")), "prefix 'p' has the tenants 'a' and 'b'"),
        ((TenantRule("p", "a", 1), TenantRule("q", "a", 2)), "tenant 'a' has the quotas 1 and 2"),
        ((TenantRule("p", "a", -1),), "expected 0 or more"),
    ],
)
def test_rules_that_contradict(rules: tuple[TenantRule, ...], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        TenantRules("/", 0, rules)


def test_a_negative_quota() -> None:
    with pytest.raises(ConfigError, match="expected 0 or more"):
        TenantRules("/", -1, ())

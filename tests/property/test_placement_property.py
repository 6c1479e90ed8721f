"""What holds for any places and parcels."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from sgl_krul.errors import QuotaExceeded
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

NAMES = ("memory", "ssd", "redis")
SIZES = st.integers(0, 60)
POLICIES = st.builds(
    lambda replicate, after, marks, ttl: Policy(replicate, after, max(marks), min(marks), ttl),
    st.sampled_from(["ssd", "redis", "both"]),
    st.sampled_from([0.0, 1.0, 5.0]),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
    st.sampled_from([0.0, 3.0, 8.0]),
)
TEXTS = st.text("ab/-", max_size=6)


@st.composite
def places(draw: st.DrawFn) -> list[Place]:
    names = [name for name in NAMES if draw(st.booleans())]
    numbers = st.integers(0, 200)
    writes = st.none() | numbers
    return [Place(name, draw(numbers), draw(numbers), draw(st.booleans()), draw(writes)) for name in names]


@st.composite
def parcel_lists(draw: st.DrawFn) -> list[Parcel]:
    held = st.sets(st.sampled_from(NAMES)).map(lambda names: tuple(sorted(names)))
    return [
        Parcel(f"k{number}", "", draw(SIZES), float(draw(st.integers(0, 10))), draw(held))
        for number in range(draw(st.integers(0, 12)))
    ]


@given(st.integers(1, 250), places(), POLICIES)
def test_a_pause_writes_only_where_there_is_room(size: int, given: list[Place], policy: Policy) -> None:
    chosen = select_places(size, given, policy)
    by_name = {place.name: place for place in given}
    assert [name for name in by_name if name in chosen] == list(chosen)
    for name in chosen:
        place = by_name[name]
        assert place.available
        assert place.used_bytes + size <= place.capacity_bytes
        assert place.write_left_bytes is None or size <= place.write_left_bytes
    able = [place for place in given if place.name != "memory" and place.available]
    able = [place for place in able if size <= place.room_bytes]
    assert bool(chosen) == bool(able)
    assert len(chosen) <= (2 if policy.replicate == "both" else 1)


def spent(demotions: list[Demotion], parcels: list[Parcel]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes copied into each place, and bytes that leave each."""
    sizes = {parcel.key: parcel.bytes for parcel in parcels}
    copied, left = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)
    for demotion in demotions:
        copied[demotion.target] += sizes[demotion.key] if demotion.copy else 0
        left[demotion.source] += sizes[demotion.key]
    return copied, left


@given(parcel_lists(), places(), POLICIES)
def test_demotions_fit_and_go_down(parcels: list[Parcel], given: list[Place], policy: Policy) -> None:
    demotions = select_demotions(parcels, given, policy, now=10.0)
    by_key = {parcel.key: parcel for parcel in parcels}
    names = [place.name for place in given]
    available = {place.name for place in given if place.available}
    for demotion in demotions:
        parcel = by_key[demotion.key]
        assert names.index(demotion.source) < names.index(demotion.target)  # so never from the slowest
        assert {demotion.source, demotion.target} <= available
        assert demotion.source in parcel.places
        assert demotion.copy == (demotion.target not in parcel.places)
    copied, _ = spent(demotions, parcels)
    for place in given:
        if copied[place.name]:
            assert place.used_bytes + copied[place.name] <= place.capacity_bytes
            assert place.write_left_bytes is None or copied[place.name] <= place.write_left_bytes
    assert len({(demotion.key, demotion.source) for demotion in demotions}) == len(demotions)
    used = [by_key[demotion.key].last_used for demotion in demotions]
    assert used == sorted(used)


@given(parcel_lists(), places(), POLICIES)
def test_the_low_watermark_is_reached_or_nothing_more_can_move(
    parcels: list[Parcel], given: list[Place], policy: Policy
) -> None:
    demotions = select_demotions(parcels, given, policy, now=10.0)
    copied, left = spent(demotions, parcels)
    moved = {(demotion.key, demotion.source) for demotion in demotions}
    for index, place in enumerate(given):
        full = place.used_bytes > policy.high_watermark * place.capacity_bytes
        low = place.used_bytes - left[place.name] <= policy.low_watermark * place.capacity_bytes
        slower = [target for target in given[index + 1 :] if target.available]
        for parcel in parcels:
            old = policy.demote_after_s and 10.0 - parcel.last_used > policy.demote_after_s
            due = old or (full and not low)
            if due and place.available and place.name in parcel.places:
                movable = any(
                    target.name in parcel.places or parcel.bytes <= target.room_bytes - copied[target.name]
                    for target in slower
                )
                assert (parcel.key, place.name) in moved or not movable
            elif (parcel.key, place.name) in moved:
                assert full  # it left to reach the low watermark


@given(parcel_lists(), places(), POLICIES)
def test_what_could_be_read_still_can(parcels: list[Parcel], given: list[Place], policy: Policy) -> None:
    held = {parcel.key: set(parcel.places) for parcel in parcels}
    available = {place.name for place in given if place.available}
    readable = {key for key, names in held.items() if names & available}
    for demotion in select_demotions(parcels, given, policy, now=10.0):
        assert demotion.copy or demotion.target in held[demotion.key]
        held[demotion.key].add(demotion.target)
        held[demotion.key].remove(demotion.source)
        assert held[demotion.key] & available
    assert {key for key, names in held.items() if names & available} == readable


@given(parcel_lists(), places(), POLICIES, st.integers(0, 1000))
def test_the_order_of_parcels_does_not_matter(
    parcels: list[Parcel], given: list[Place], policy: Policy, seed: int
) -> None:
    shuffled = random.Random(seed).sample(parcels, len(parcels))
    first = select_demotions(parcels, given, policy, now=10.0)
    assert select_demotions(shuffled, given, policy, now=10.0) == first
    assert select_expired(shuffled, policy, now=10.0) == select_expired(parcels, policy, now=10.0)


@given(parcel_lists(), POLICIES)
def test_only_what_nobody_uses_expires(parcels: list[Parcel], policy: Policy) -> None:
    expired = set(select_expired(parcels, policy, now=10.0))
    for parcel in parcels:
        assert (parcel.key in expired) == (policy.ttl_s > 0 and parcel.last_used + policy.ttl_s < 10.0)


@given(SIZES, SIZES, SIZES, SIZES)
def test_a_quota_is_never_passed(used: int, replaced: int, size: int, quota: int) -> None:
    try:
        check_quota("t", used, replaced, size, quota)
    except QuotaExceeded:
        assert 0 < quota < used - replaced + size
    else:
        assert quota == 0 or used - replaced + size <= quota


@given(TEXTS, st.sampled_from(["", "/", "-/"]), st.sets(TEXTS))
def test_every_session_has_one_tenant(session: str, separator: str, prefixes: set[str]) -> None:
    rules = TenantRules(separator, 0, tuple(TenantRule(prefix, f"of {prefix}") for prefix in prefixes))
    tenant = rules.tenant_of(session)
    fitting = {prefix for prefix in prefixes if session.startswith(prefix)}
    if fitting:
        assert tenant == f"of {max(fitting, key=len)}"
    elif separator and separator in session:
        assert session.startswith(tenant + separator)
        assert separator not in tenant
    else:
        assert tenant == ""

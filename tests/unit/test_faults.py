"""The fault kit does what it says, and the same each time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from sgl_krul.errors import Corrupt, KrulError, LeaseHeld, Missing, StoreFull, StoreUnavailable
from tests.faults import (
    Backing,
    FakeSharedTier,
    FaultInjectingSharedTier,
    FaultInjectingTier,
    Faults,
    Kind,
    Script,
)

BODY = bytes(range(256)) * 4
ALL = {kind.value: 0.1 for kind in Kind}


def fake() -> FakeSharedTier:
    """A place of its own."""
    return FakeSharedTier(Backing(lambda: 100.0))


def outcome(call: Callable[[], object]) -> object:
    """What a call gives, or the kind of its error."""
    try:
        return call()
    except KrulError as error:
        return type(error).__name__, str(error)


def play(seed: int, order: int = 1) -> list[object]:
    """Sixty calls on three keys, in one of two orders; what each gave, by key and number."""
    tier = FaultInjectingTier(fake(), Faults(seed, **ALL), sleep=lambda seconds: None)
    found: list[tuple[str, int, object]] = []
    for key in ("s/a", "s/b", "s/c")[::order]:
        for number in range(20):
            buffer = bytearray(64)
            found.append((key, number, outcome(lambda key=key: tier.put(key, b"header", [BODY]))))  # type: ignore[misc]
            found.append((key, number, outcome(lambda key=key: tier.read_header(key))))  # type: ignore[misc]
            read = outcome(lambda key=key, b=buffer: tier.read_segments(key, 3, [memoryview(b)]))  # type: ignore[misc]
            found.append((key, number, (read, bytes(buffer))))
    return sorted(found, key=lambda item: item[:2])


def test_the_same_seed_gives_the_same_faults() -> None:
    assert play(7) == play(7)
    assert play(7) != play(8)


def test_other_calls_between_change_nothing() -> None:
    assert play(7) == play(7, order=-1)


def test_rates_are_about_what_they_say_and_can_be_switched_off() -> None:
    faults = Faults(3, before=0.2, after=0.3)
    tier = FaultInjectingTier(fake(), faults)
    outcomes = [outcome(lambda n=n: tier.put(f"s/k{n}", b"", [])) for n in range(1000)]  # type: ignore[misc]
    texts = [str(found) for found in outcomes]
    assert 150 < sum("out of reach" in text for text in texts) < 250
    assert 250 < sum("answer got lost" in text for text in texts) < 350
    faults.on = False
    assert [tier.put(f"s/k{n}", b"", []) for n in range(1000)] == [0] * 1000
    with pytest.raises(ValueError, match="expected parts of 1"):
        Faults(3, before=0.9, after=0.2)


@pytest.mark.parametrize("kind", Kind)
def test_what_each_kind_does_to_a_put(kind: Kind) -> None:
    naps: list[float] = []
    below = fake()
    tier = FaultInjectingTier(below, lambda call: kind, sleep=naps.append, delay_s=0.5)
    errors = {Kind.BEFORE: StoreUnavailable, Kind.AFTER: StoreUnavailable, Kind.FULL: StoreFull}
    if kind in errors:
        with pytest.raises(errors[kind], match="on purpose"):
            tier.put("s/a", b"h", [BODY])
    else:
        tier.put("s/a", b"h", [BODY])
    assert (below.read_header("s/a") is None) == (kind in (Kind.BEFORE, Kind.FULL))
    assert naps == ([0.5] if kind is Kind.DELAY else [])


@pytest.mark.parametrize("kind", Kind)
def test_what_each_kind_does_to_reads(kind: Kind) -> None:
    below = fake()
    below.put("s/a", b"header", [BODY])
    tier = FaultInjectingTier(below, lambda call: kind, sleep=lambda seconds: None)
    buffer = bytearray(len(BODY))
    errors = {Kind.BEFORE: StoreUnavailable, Kind.SHORT: Corrupt, Kind.MISSING: Missing}
    if kind in errors:
        with pytest.raises(errors[kind], match="on purpose"):
            tier.read_segments("s/a", 0, [memoryview(buffer)])
    else:
        tier.read_segments("s/a", 0, [memoryview(buffer)])
        differ = int.from_bytes(buffer) ^ int.from_bytes(BODY)
        assert differ.bit_count() == (1 if kind is Kind.WRONG else 0)
    if kind is Kind.BEFORE or kind is Kind.SHORT:
        with pytest.raises(errors[kind]):
            tier.read_header("s/a")
    elif kind is Kind.MISSING:
        assert tier.read_header("s/a") is None
    else:
        assert (tier.read_header("s/a") == b"header") == (kind is not Kind.WRONG)


def test_a_script_says_what_happens_when() -> None:
    script = Script({("put", "manifest"): [None, Kind.AFTER], ("delete", ""): Kind.BEFORE})
    tier = FaultInjectingTier(fake(), script)
    tier.put("s/manifest", b"", [])
    tier.put("s/a", b"", [])
    with pytest.raises(StoreUnavailable):
        tier.put("s/manifest", b"", [])
    tier.put("s/manifest", b"", [])
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            tier.delete("s/a")
    assert (tier.count("put"), tier.count("put", "manifest"), tier.count("delete")) == (4, 3, 3)
    assert [call.number for call in tier.calls if call.key == "s/manifest"] == [0, 1, 2]


def test_who_called_is_known() -> None:
    tier = FaultInjectingTier(fake())
    thread = threading.Thread(target=lambda: tier.read_header("s/a"))
    thread.start()
    thread.join()
    assert threading.get_ident() not in tier.threads()
    tier.delete("s/a")
    assert threading.get_ident() in tier.threads()


def test_a_shared_tier_fails_in_all_its_calls() -> None:
    below = fake()
    tier = FaultInjectingSharedTier(below, lambda call: Kind.BEFORE)
    for call in (lambda: tier.scan(""), lambda: tier.lease("s/").__enter__(), tier.refresh):
        with pytest.raises(StoreUnavailable):
            call()  # type: ignore[no-untyped-call]
    tier.touch(["s/a"])
    assert (tier.name, tier.available, tier.breaker_state) == ("redis", True, "closed")
    below.known_down = True
    assert (tier.available, tier.breaker_state) == (False, "open")
    below.known_down = False
    tier.plan = lambda call: None
    with tier.lease("s/"), pytest.raises(LeaseHeld), tier.lease("s/"):
        pass


def test_a_copy_of_a_place_goes_its_own_way() -> None:
    backing = Backing()
    tier = FakeSharedTier(backing)
    tier.put("s/a", b"h", [BODY])
    other = FakeSharedTier(backing.copy())
    other.delete("s/a")
    assert tier.read_header("s/a") == b"h"
    assert backing.keys("a") == ["s/a"]

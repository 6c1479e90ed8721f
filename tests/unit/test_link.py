"""The emulated link: how long reads take is computed, not measured; nothing here waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_krul.errors import ConfigError, Corrupt, Missing, StoreUnavailable
from sgl_krul.store.link import LinkTier
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.ssd import SsdTier
from sgl_krul.store.tier import CheckedTier
from tests.faults import Call, FaultInjectingTier, Kind
from tests.sessions import open_ssd

SPEED = 1000.0  # bytes a second: a byte takes 1 ms
BODY = 500


class Clock:
    """Time that passes only where somebody sleeps; with `frozen`, not even there: all reads ask at once."""

    def __init__(self, *, frozen: bool = False) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self._frozen = frozen

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if not self._frozen:
            self.now += seconds


def filled() -> MemoryTier:
    """A tier with one object "key" of BODY bytes and a header of 10."""
    tier = MemoryTier(1, BODY, 4 * BODY)
    tier.put("key", bytes(10), [bytes(range(250)) * 2])
    return tier


def link(clock: Clock, tier: CheckedTier | None = None, **settings: Any) -> LinkTier:
    settings = {"bytes_per_s": SPEED} | settings
    return LinkTier(tier or filled(), clock=clock, sleep=clock.sleep, **settings)


def read(tier: LinkTier, size: int = BODY) -> bytes:
    buffer = bytearray(size)
    tier.read_segments("key", 0, [memoryview(buffer)])
    return bytes(buffer)


def seconds(clock: Clock, call: Callable[[], object]) -> float:
    start = clock.now
    call()
    return clock.now - start


def test_a_read_takes_latency_and_bytes_by_bandwidth() -> None:
    clock = Clock()
    tier = link(clock, latency_s=0.2)
    assert seconds(clock, lambda: read(tier)) == pytest.approx(0.2 + 0.5)
    assert seconds(clock, lambda: read(tier, 100)) == pytest.approx(0.2 + 0.1)
    assert seconds(clock, lambda: tier.read_header("key")) == pytest.approx(0.2 + 0.01)
    assert (tier.carried_bytes, tier.reads) == (BODY + 100 + 10, 3)


def test_the_bytes_are_those_of_the_tier() -> None:
    tier = link(Clock())
    assert read(tier) == bytes(range(250)) * 2
    assert tier.read_header("key") == bytes(10)


def test_several_buffers_are_one_read() -> None:
    clock = Clock()
    tier = link(clock, latency_s=0.2)
    parts = [bytearray(100), bytearray(300)]
    taken = seconds(clock, lambda: tier.read_segments("key", 0, [memoryview(part) for part in parts]))
    assert taken == pytest.approx(0.2 + 0.4)
    assert b"".join(parts) == (bytes(range(250)) * 2)[:400]


def test_parallel_reads_share_the_link_and_their_latencies_overlap() -> None:
    clock = Clock(frozen=True)
    tier = link(clock, latency_s=0.2)
    for _ in range(4):
        read(tier)
    assert clock.slept == pytest.approx([0.7, 1.2, 1.7, 2.2])


def test_a_link_that_was_idle_gives_nothing_back() -> None:
    clock = Clock()
    tier = link(clock)
    read(tier)
    clock.now += 1000
    assert seconds(clock, lambda: read(tier)) == pytest.approx(0.5)


def test_the_time_of_the_tier_behind_is_part_of_the_reads() -> None:
    clock = Clock()

    def plan(call: Call) -> Kind | None:
        return Kind.DELAY if call.operation == "read_segments" else None

    slow = FaultInjectingTier(filled(), plan, sleep=clock.sleep, delay_s=0.3)
    assert seconds(clock, lambda: read(link(clock, slow))) == pytest.approx(0.5)
    slower = FaultInjectingTier(filled(), plan, sleep=clock.sleep, delay_s=0.8)
    assert seconds(clock, lambda: read(link(clock, slower))) == pytest.approx(0.8)


def test_what_is_not_there_costs_the_latency() -> None:
    clock = Clock()
    tier = link(clock, latency_s=0.2)
    assert seconds(clock, lambda: tier.read_header("other")) == pytest.approx(0.2)

    def miss() -> None:
        with pytest.raises(Missing):
            tier.read_segments("other", 0, [memoryview(bytearray(100))])

    def past_the_end() -> None:
        with pytest.raises(Corrupt):
            read(tier, BODY + 1)

    assert seconds(clock, miss) == pytest.approx(0.2)
    assert seconds(clock, past_the_end) == pytest.approx(0.2)
    assert (tier.carried_bytes, tier.reads) == (0, 3)


def test_everything_else_is_not_slowed() -> None:
    clock = Clock()
    tier = link(clock, latency_s=0.2)
    tier.put("other", b"", [bytes(BODY)])
    assert [entry.key for entry in tier.scan("")] == ["key", "other"]
    assert tier.usage().objects == 2
    assert tier.delete("other") is True
    assert tier.check() == []
    with pytest.raises(ValueError, match="expected"):
        tier.read_header("A")
    assert clock.slept == []
    assert tier.name == "memory"


def test_nobody_sleeps_with_the_lock() -> None:
    together = threading.Barrier(4)
    tier = LinkTier(filled(), bytes_per_s=SPEED, sleep=lambda _: together.wait(20) and None)
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda _: read(tier), range(4)))) == 1
    assert tier.carried_bytes == 4 * BODY


# -- jitter --


def test_jitter_is_the_same_for_the_same_seed() -> None:
    def slept(seed: int) -> list[float]:
        clock = Clock()
        tier = link(clock, latency_s=0.2, jitter=0.5, seed=seed)
        for _ in range(50):
            read(tier)
        return clock.slept

    assert slept(1) == slept(1) != slept(2)
    assert all(0.35 <= seconds <= 1.05 for seconds in slept(1))
    assert sum(slept(1)) / 50 == pytest.approx(0.7, rel=0.15)
    assert max(slept(1)) - min(slept(1)) > 0.3


# -- a link that changes --


def test_a_link_changes_in_the_middle_of_a_read() -> None:
    clock = Clock()
    tier = link(clock, change_after_bytes=700, change_to_bytes_per_s=100)
    assert seconds(clock, lambda: read(tier)) == pytest.approx(0.5)
    assert seconds(clock, lambda: read(tier)) == pytest.approx(0.2 + 3.0)
    assert seconds(clock, lambda: read(tier, 100)) == pytest.approx(1.0)
    assert tier.carried_bytes == 2 * BODY + 100


def test_a_link_dies() -> None:
    clock = Clock()
    tier = link(clock, change_after_bytes=BODY + 200, dead_after_s=2.0)
    assert len(read(tier)) == BODY

    def fails() -> None:
        with pytest.raises(StoreUnavailable, match="key: the emulated link is dead"):
            read(tier)

    assert seconds(clock, fails) == pytest.approx(0.2 + 2.0)  # it died under this read
    assert seconds(clock, fails) == pytest.approx(2.0)
    for call in (lambda: tier.read_header("key"), lambda: tier.read_header("other")):
        with pytest.raises(StoreUnavailable):
            call()
    with pytest.raises(StoreUnavailable):  # over a dead link nobody learns what is missing
        tier.read_segments("other", 0, [])
    assert tier.carried_bytes == BODY + 200
    tier.put("other", b"", [bytes(BODY)])


def test_the_last_bytes_before_its_death_arrive() -> None:
    clock = Clock()
    tier = link(clock, change_after_bytes=BODY, dead_after_s=2.0)
    assert seconds(clock, lambda: read(tier)) == pytest.approx(0.5)
    with pytest.raises(StoreUnavailable):
        read(tier, 1)


# -- settings --


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("bytes_per_s", 0),
        ("bytes_per_s", -1),
        ("jitter", -0.1),
        ("jitter", 1.1),
        ("latency_s", -1),
        ("change_after_bytes", -1),
        ("change_to_bytes_per_s", -1),
        ("dead_after_s", -1),
    ],
)
def test_settings_that_are_refused(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=setting):
        link(Clock(), **{setting: value})


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SsdTier]:
    with open_ssd(tmp_path) as tier:
        yield tier


def test_a_disk_behind_it_keeps_what_it_can(disk: SsdTier) -> None:
    tier = link(Clock(), disk)
    assert tier.name == "ssd"
    assert tier.write_left_bytes is None
    stored = tier.put("a/manifest", b"header", [b"body"])
    assert tier.usage() == disk.usage()
    assert [entry.bytes for entry in tier.scan("a/")] == [stored]


@given(
    sizes=st.lists(st.integers(1, BODY), min_size=1, max_size=20),
    speed=st.floats(1, 1e9),
    latency_s=st.floats(0, 10),
    gaps=st.lists(st.floats(0, 2), min_size=20, max_size=20),
)
def test_no_more_goes_through_than_the_link_carries(
    sizes: list[int], speed: float, latency_s: float, gaps: list[float]
) -> None:
    """Whoever asks when: after t seconds at most t * speed bytes are there, and none before its latency."""
    clock = Clock(frozen=True)
    tier = link(clock, bytes_per_s=speed, latency_s=latency_s)
    start, done = clock.now, []
    for size, gap in zip(sizes, gaps, strict=False):
        clock.now += gap
        before = len(clock.slept)
        read(tier, size)
        waited = clock.slept[-1] if len(clock.slept) > before else 0.0
        assert waited >= latency_s - 1e-6
        done.append((clock.now + waited, size))
    for until, _ in done:
        arrived = sum(size for moment, size in done if moment <= until)
        assert arrived <= (until - start) * speed * (1 + 1e-6) + 1e-3

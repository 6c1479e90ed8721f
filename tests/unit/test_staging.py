"""Staging: never more bytes than its bound, no buffer twice, nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sgl_krul.restore.staging import Staging, StagingBuffer

NEVER = Event()
CAPACITY = 64 << 10


@pytest.fixture
def staging() -> Iterator[Staging]:
    """64 KiB, all given back at the end."""
    staging = Staging(CAPACITY)
    yield staging
    assert staging.check() == []
    assert staging.taken_bytes == 0


def take(staging: Staging, size: int) -> StagingBuffer:
    """A buffer, which there must be room for."""
    buffer = staging.take(size, NEVER)
    assert buffer is not None
    return buffer


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 10_000, CAPACITY - 1, CAPACITY])
def test_a_buffer_has_the_bytes_asked_for(staging: Staging, size: int) -> None:
    buffer = take(staging, size)
    assert (buffer.data.shape, buffer.data.dtype) == ((size,), np.uint8)
    assert size <= staging.taken_bytes <= max(4096, size * 5 // 4)
    buffer.data[:] = 7
    buffer.give()


def test_a_buffer_is_used_again(staging: Staging) -> None:
    first = take(staging, 10_000)
    where = first.data.ctypes.data
    first.give()
    second = take(staging, 9_000)
    assert second.data.ctypes.data == where
    second.give()
    staging.trim()
    assert staging.check() == []


def test_a_small_need_does_not_take_a_large_buffer(staging: Staging) -> None:
    take(staging, 40_000).give()
    small = take(staging, 5_000)
    assert staging.taken_bytes < 10_000
    small.give()


def test_what_lies_ready_makes_room(staging: Staging) -> None:
    buffers = [take(staging, 16_000) for _ in range(4)]
    for buffer in buffers:
        buffer.give()
    take(staging, CAPACITY).give()
    assert staging.peak_bytes <= CAPACITY


@pytest.mark.parametrize("size", [-1, 0, CAPACITY + 1])
def test_sizes_that_never_fit(staging: Staging, size: int) -> None:
    with pytest.raises(ValueError, match="size_bytes"):
        staging.take(size, NEVER)


def test_a_capacity_of_nothing() -> None:
    with pytest.raises(ValueError, match="capacity_bytes 0"):
        Staging(0)


def test_a_buffer_is_given_back_once(staging: Staging) -> None:
    buffer = take(staging, 100)
    buffer.give()
    with pytest.raises(AssertionError):
        buffer.give()
    other = Staging(CAPACITY)
    stranger = take(other, 100)
    with pytest.raises(AssertionError):
        staging.give(stranger)
    stranger.give()
    assert other.check() == []


def test_over_the_bound_work_waits(staging: Staging) -> None:
    held = take(staging, CAPACITY - 4096)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take, staging, 8192)
        time.sleep(0.02)
        assert not waiting.done()
        held.give()
        waiting.result(5).give()


def test_who_waits_can_be_cancelled(staging: Staging) -> None:
    held = take(staging, CAPACITY)
    cancelled = Event()
    with ThreadPoolExecutor(2) as pool:
        gone = pool.submit(staging.take, 8192, cancelled)
        stays = pool.submit(take, staging, 8192)
        time.sleep(0.02)
        assert not gone.done()
        cancelled.set()
        staging.wake()
        assert gone.result(5) is None
        assert not stays.done()
        held.give()
        stays.result(5).give()
    assert staging.take(10, cancelled) is None


def test_a_large_one_gets_its_turn(staging: Staging) -> None:
    """Small ones that come later don't slip by."""
    held = take(staging, 20_000)
    order: list[int] = []

    def work(size: int) -> None:
        buffer = take(staging, size)
        order.append(size)
        buffer.give()

    with ThreadPoolExecutor(2) as pool:
        large = pool.submit(work, CAPACITY)
        while not staging._queue:  # noqa: SLF001 - until it stands in the queue
            time.sleep(0.001)
        small = pool.submit(work, 5_000)
        time.sleep(0.02)
        held.give()
        large.result(5)
        small.result(5)
    assert order == [CAPACITY, 5_000]


def test_an_allocation_that_fails_costs_no_room() -> None:
    calls = []

    def allocate(size: int) -> NDArray[np.uint8]:
        calls.append(size)
        if len(calls) == 1:
            raise MemoryError("no page-locked memory")
        return np.empty(size, np.uint8)

    staging = Staging(CAPACITY, allocate)
    with pytest.raises(MemoryError):
        staging.take(CAPACITY, NEVER)
    assert (staging.taken_bytes, staging.check()) == (0, [])
    take(staging, CAPACITY).give()
    assert staging.check() == []


@given(
    st.integers(1, 1 << 20),
    st.lists(st.tuples(st.booleans(), st.floats(0, 1), st.integers(0, 1 << 30)), max_size=60),
)
def test_the_bound_holds_and_buffers_never_overlap(
    capacity: int, steps: list[tuple[bool, float, int]]
) -> None:
    staging = Staging(capacity)
    held: list[tuple[StagingBuffer, int]] = []
    now = Event()
    now.set()  # who would have to wait is refused
    for number, (taking, share, pick) in enumerate(steps):
        if taking:
            size = max(1, int(share * capacity))
            free = capacity - staging.taken_bytes
            if size <= free and min(max(4096, size * 5 // 4 + 1), capacity) <= free:
                buffer = take(staging, size)
                buffer.data[:] = number
                held.append((buffer, number))
            elif size > free:
                assert staging.take(size, now) is None
        elif held:
            held.pop(pick % len(held))[0].give()
        assert staging.check() == []
        assert sum(len(buffer.data) for buffer, _ in held) <= staging.taken_bytes <= capacity
        for buffer, mark in held:
            assert (buffer.data[:: max(1, len(buffer.data) // 7)] == mark).all()
    for buffer, _ in held:
        buffer.give()
    assert (staging.taken_bytes, staging.check()) == (0, [])


def test_many_threads(staging: Staging) -> None:
    """Each writes its mark and finds it again; some are cancelled while they wait."""
    failures: list[str] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for turn in range(60):
            cancelled = Event()
            if rng.random() < 0.2:
                cancelled.set()
            buffer = staging.take(int(rng.integers(1, CAPACITY + 1)), cancelled)
            if buffer is None:
                continue
            buffer.data[:] = (number * 60 + turn) % 251
            if turn % 5 == 0:
                time.sleep(0.0005)
            if not (buffer.data == (number * 60 + turn) % 251).all():
                failures.append(f"thread {number}, turn {turn}")
            buffer.give()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert failures == []
    assert staging.peak_bytes <= CAPACITY

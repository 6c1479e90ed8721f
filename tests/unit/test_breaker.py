"""The circuit breaker, with a clock that is moved by hand."""

from __future__ import annotations

import random
import threading

import pytest

from sgl_krul.store.redis.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    """Without jitter: delays of .5, 1, 2 .. 15 s."""
    return Breaker(clock=clock, jitter=lambda: 1.0)


def admitted(breaker: Breaker) -> int:
    ticket = breaker.admit()
    assert ticket is not None
    return ticket


def fail(breaker: Breaker, times: int = 1, reason: str = "refused") -> None:
    for _ in range(times):
        breaker.failed(admitted(breaker), reason)


def test_it_opens_after_three_failures_in_a_row(breaker: Breaker) -> None:
    fail(breaker, 2)
    assert breaker.state == "closed"
    assert breaker.available
    fail(breaker)
    assert breaker.state == "open"
    assert not breaker.available
    assert breaker.admit() is None


def test_a_success_between_counts(breaker: Breaker) -> None:
    for _ in range(10):
        fail(breaker, 2)
        admitted(breaker)
        breaker.succeeded()
    assert breaker.state == "closed"


def test_one_call_tries_after_the_delay(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 0.49
    assert breaker.admit() is None
    clock.now += 0.02
    assert breaker.available
    assert breaker.state == "open"
    admitted(breaker)
    assert breaker.state == "half-open"
    assert not breaker.available
    assert breaker.admit() is None
    breaker.succeeded()
    assert breaker.state == "closed"
    assert breaker.available


def test_the_delay_doubles_up_to_its_bound_and_starts_anew(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    delays = []
    for _ in range(8):
        before = clock.now
        while (ticket := breaker.admit()) is None:
            clock.now += 0.125
        delays.append(clock.now - before)
        breaker.failed(ticket, "still refused")
    assert delays == [0.5, 1, 2, 4, 8, 15, 15, 15]
    clock.now += 15
    admitted(breaker)
    breaker.succeeded()
    fail(breaker, 3)
    clock.now += 0.5
    assert breaker.available


@pytest.mark.parametrize(("jitter", "delay"), [(0.0, 0.25), (0.5, 0.375), (1.0, 0.5)])
def test_jitter_shortens_the_delay_by_half_at_most(clock: Clock, jitter: float, delay: float) -> None:
    breaker = Breaker(clock=clock, jitter=lambda: jitter)
    fail(breaker, 3)
    clock.now += delay - 0.01
    assert not breaker.available
    clock.now += 0.02
    assert breaker.available


def test_calls_that_were_under_way_double_nothing(breaker: Breaker, clock: Clock) -> None:
    tickets = [admitted(breaker) for _ in range(8)]
    for ticket in tickets:
        breaker.failed(ticket, "gone")
    clock.now += 0.5
    late = admitted(breaker)
    for ticket in tickets:
        breaker.failed(ticket, "gone")
    assert breaker.state == "half-open"
    breaker.failed(late, "gone")
    assert breaker.state == "open"
    clock.now += 1.0
    assert breaker.available


def test_a_late_answer_shows_that_it_lives(breaker: Breaker) -> None:
    admitted(breaker)
    fail(breaker, 3)
    breaker.succeeded()
    assert breaker.state == "closed"


def test_a_call_without_a_verdict_lets_the_next_one_try(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 0.5
    breaker.abandoned(admitted(breaker))
    assert breaker.available
    admitted(breaker)
    breaker.succeeded()
    breaker.abandoned(admitted(breaker))
    assert breaker.state == "closed"


def test_the_refusal_says_why_since_when_and_until_when(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 1, "one")
    clock.now += 2
    fail(breaker, 2, "connection refused")
    clock.now += 0.2
    assert breaker.refusal() == "connection refused (for 2.2 s now; trying again in 0.3 s)"


def test_threads_get_one_probe_at_a_time(clock: Clock) -> None:
    breaker = Breaker(clock=clock, jitter=random.Random(1).random)
    fail(breaker, 3)
    clock.now += 1.0
    tickets: list[int | None] = []
    threads = [threading.Thread(target=lambda: tickets.append(breaker.admit())) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(ticket is not None for ticket in tickets) == 1

"""One worker at a time may change a session's stored copy."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sgl_krul.service.exclusive import Exclusive


def test_one_at_a_time_for_each_name() -> None:
    exclusive = Exclusive()
    inside: dict[str, int] = {"a": 0, "b": 0}
    most: dict[str, int] = {"a": 0, "b": 0}
    both = threading.Barrier(2)

    def work(name: str) -> None:
        for turn in range(200):
            with exclusive.hold(name):
                inside[name] += 1
                most[name] = max(most[name], inside[name])
                if turn == 0:
                    threading.Event().wait(0.001)
                inside[name] -= 1

    def meet(name: str) -> None:
        with exclusive.hold(name):
            both.wait(20)  # a holder of "a" does not keep out one of "b"

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, name) for name in "aabbaabb"]:
            future.result(20)
        for future in [pool.submit(meet, name) for name in "ab"]:
            future.result(20)
    assert most == {"a": 1, "b": 1}
    assert exclusive.check() == []


def test_a_holder_learns_that_somebody_waits() -> None:
    exclusive = Exclusive()
    entered = threading.Event()

    def wait_for_it() -> None:
        with exclusive.hold("a"):
            entered.set()

    with exclusive.hold("a"):
        assert not exclusive.wanted("a")
        thread = threading.Thread(target=wait_for_it)
        thread.start()
        while not exclusive.wanted("a"):
            assert thread.is_alive()
        assert not exclusive.wanted("b")
        assert not entered.is_set()
        assert exclusive.check() == ["a is still held"]
    thread.join(20)
    assert entered.is_set()
    assert not exclusive.wanted("a")
    assert exclusive.check() == []


def test_an_error_lets_go() -> None:
    exclusive = Exclusive()
    with pytest.raises(RuntimeError), exclusive.hold("a"):
        raise RuntimeError
    with exclusive.hold("a"):
        pass
    assert exclusive.check() == []


def test_nothing_is_kept_of_a_name() -> None:
    exclusive = Exclusive()
    for number in range(2000):
        with exclusive.hold(f"session-{number}"):
            pass
    assert [len(value) for value in vars(exclusive).values() if isinstance(value, set | dict)] == [0, 0]

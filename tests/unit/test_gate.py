"""Who may touch a session when: deadlines, cancellation, and nothing left over."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from sgl_krul.engine.gate import SessionGate
from sgl_krul.errors import SessionBusy

LONG_S = 20.0
SHORT_S = 0.02


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, LONG_S))


async def hold_alone(gate: SessionGate, entered: asyncio.Event, go: asyncio.Event, digest: str = "s") -> None:
    async with gate.alone(digest, "chat", LONG_S):
        entered.set()
        await go.wait()


async def hold_request(gate: SessionGate, entered: asyncio.Event, go: asyncio.Event) -> None:
    async with gate.request("s", LONG_S):
        entered.set()
        await go.wait()


def test_requests_share_a_session() -> None:
    async def main() -> None:
        gate = SessionGate()
        async with gate.request("s", LONG_S) as first, gate.request("s", LONG_S) as second:
            assert first
            assert second
            assert gate.running("s") == 2
        assert gate.running("s") == 0
        assert gate.check() == []

    run(main())


def test_a_request_waits_while_somebody_has_the_session_alone() -> None:
    async def main() -> None:
        gate, entered, go = SessionGate(), asyncio.Event(), asyncio.Event()
        owner = asyncio.create_task(hold_alone(gate, entered, go))
        await entered.wait()
        began, done = asyncio.Event(), asyncio.Event()
        done.set()
        request = asyncio.create_task(hold_request(gate, began, done))
        await asyncio.sleep(SHORT_S)
        assert not began.is_set()
        async with gate.request("other", LONG_S) as free:
            assert free
        go.set()
        await began.wait()
        await asyncio.gather(owner, request)
        assert gate.check() == []

    run(main())


def test_after_its_deadline_a_request_goes_on_beside_the_owner() -> None:
    async def main() -> None:
        gate, entered, go = SessionGate(), asyncio.Event(), asyncio.Event()
        owner = asyncio.create_task(hold_alone(gate, entered, go))
        await entered.wait()
        async with gate.request("s", SHORT_S) as free:
            assert not free
            assert gate.running("s") == 1
        go.set()
        await owner
        assert gate.check() == []
        assert gate.running("s") == 0

    run(main())


def test_alone_waits_for_running_requests_then_gives_up() -> None:
    async def main() -> None:
        gate, entered, go = SessionGate(), asyncio.Event(), asyncio.Event()
        request = asyncio.create_task(hold_request(gate, entered, go))
        await entered.wait()
        with pytest.raises(SessionBusy, match=r"'chat' is busy: 1 request\(s\) still under way after 0.02 s"):
            async with gate.alone("s", "chat", SHORT_S):
                raise AssertionError("not alone")
        with pytest.raises(SessionBusy, match="Try again, or wait longer with timeout_s"):
            async with gate.alone("s", "chat", 0):
                raise AssertionError("not alone")
        owned, done = asyncio.Event(), asyncio.Event()
        done.set()
        owner = asyncio.create_task(hold_alone(gate, owned, done))
        await asyncio.sleep(SHORT_S)
        assert not owned.is_set()
        go.set()
        await asyncio.gather(owner, request)
        assert owned.is_set()
        assert gate.check() == []

    run(main())


def test_two_owners_go_one_after_the_other() -> None:
    async def main() -> None:
        gate, entered, go = SessionGate(), asyncio.Event(), asyncio.Event()
        owner = asyncio.create_task(hold_alone(gate, entered, go))
        await entered.wait()
        with pytest.raises(SessionBusy, match="another pause, resume or delete still under way"):
            async with gate.alone("s", "chat", SHORT_S):
                raise AssertionError("not alone")
        inside = 0

        async def next_owner() -> None:
            nonlocal inside
            async with gate.alone("s", "chat", LONG_S):
                inside += 1
                assert inside == 1
                await asyncio.sleep(0)
                inside -= 1

        others = [asyncio.create_task(next_owner()) for _ in range(10)]
        await asyncio.sleep(SHORT_S)
        go.set()
        await asyncio.gather(owner, *others)
        assert gate.check() == []

    run(main())


@pytest.mark.parametrize("kind", ["request", "alone"])
def test_who_is_cancelled_while_waiting_leaves_nothing(kind: str) -> None:
    async def main() -> None:
        gate, entered, go = SessionGate(), asyncio.Event(), asyncio.Event()
        owner = asyncio.create_task(hold_alone(gate, entered, go))
        await entered.wait()
        never = asyncio.Event()
        waits = hold_request(gate, never, go) if kind == "request" else hold_alone(gate, never, go)
        waiter = asyncio.create_task(waits)
        await asyncio.sleep(SHORT_S)
        waiter.cancel()
        await asyncio.wait([waiter])
        assert waiter.cancelled()
        go.set()
        await owner
        assert not never.is_set()
        assert gate.check() == []
        assert gate.running("s") == 0
        async with gate.alone("s", "chat", 0):
            pass

    run(main())


def test_who_fails_or_is_cancelled_inside_lets_the_session_go() -> None:
    async def main() -> None:
        gate, entered, go = SessionGate(), asyncio.Event(), asyncio.Event()
        owner = asyncio.create_task(hold_alone(gate, entered, go))
        await entered.wait()
        owner.cancel()
        await asyncio.wait([owner])
        with pytest.raises(RuntimeError, match="failed"):
            async with gate.request("s", LONG_S):
                raise RuntimeError("failed")
        async with gate.alone("s", "chat", 0):
            pass
        assert gate.check() == []

    run(main())


def test_many_of_both_kinds_in_turn() -> None:
    """Never a request begins beside an owner, and nobody is forgotten."""

    async def main() -> None:
        gate = SessionGate()
        owners = requests = finished = 0

        async def request(index: int) -> None:
            nonlocal requests, finished
            async with gate.request("s", LONG_S) as free:
                assert free
                assert owners == 0
                requests += 1
                await asyncio.sleep(0.0005 * (index % 3))
                requests -= 1
            finished += 1

        async def own(index: int) -> None:
            nonlocal owners, finished
            async with gate.alone("s", "chat", LONG_S):
                assert (owners, requests) == (0, 0)
                owners += 1
                await asyncio.sleep(0.0005 * (index % 2))
                owners -= 1
            finished += 1

        await asyncio.gather(*(own(index) if index % 5 == 0 else request(index) for index in range(100)))
        assert finished == 100
        assert gate.check() == []

    run(main())

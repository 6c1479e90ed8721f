"""Requests of a session that came back lossy run under its private key, and nobody else's do."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    # SGLang and the packages under it warn while they are imported on a CPU.
    warnings.simplefilter("ignore")
    from sglang.srt.managers.io_struct import GenerateReqInput

    from sgl_krul.engine import frontend
    from sgl_krul.engine.frontend import AnswerError, FrontEnd
    from sgl_krul.engine.hooks import around_generate_request
    from sgl_krul.engine.messages import KrulControlReqInput, KrulControlReqOutput

from sgl_krul.session.private import private_key
from sgl_krul.session.record import SessionKey
from tests.sessions import make_config

KEY = SessionKey("chat")
FORGED = private_key(KEY, 1).extra_key


class World:
    """The front end between clients and a scheduler, and what SGLang sees of each request."""

    def __init__(self) -> None:
        self.front = FrontEnd(make_config(0.2), self.take, lambda: None)
        self.private: dict[str, int | None] = {}  # session_id -> number, as the scheduler knows it
        self.states: dict[str, str] = {}
        self.asked: list[str] = []
        self.deaf = False
        self.unknown = False
        self.ran: list[Any] = []  # the extra_key of each request, as SGLang reads it
        self.fails = False
        self.aborts = False

    def take(self, message: KrulControlReqInput) -> None:
        """The scheduler answers at once, or never."""
        self.asked.append(message.verb)
        if self.deaf:
            return
        status, body = (
            200,
            {
                "state": "paused"
                if message.verb == "pause"
                else self.states.get(message.session_id, "active"),
                "lossy_since": self.private.get(message.session_id),
            },
        )
        if self.unknown:
            status, body = 404, {"type": "UnknownSession", "message": "no such session"}
        answer = KrulControlReqOutput(request_id=message.request_id, status=status, body=body)
        asyncio.get_running_loop().call_soon(self.front.on_answer, answer)

    async def original(self, _manager: Any, obj: Any, _request: Any = None) -> AsyncIterator[Any]:
        """SGLang: normalizes the request, tokenizes a little later, answers."""
        obj.normalize_batch_and_arguments()
        await asyncio.sleep(0)
        self.ran.append(obj.extra_key)
        if self.fails:
            raise ValueError("too long")
        reason = {"type": "abort"} if self.aborts else None
        yield {"text": "one", "meta_info": {"cached_tokens": 0, "finish_reason": reason}}
        yield {"text": "two", "meta_info": {}}

    def request(self, obj: Any) -> AsyncIterator[Any]:
        """As the hook on SGLang passes it."""
        return around_generate_request(self.original, SimpleNamespace(krul_front_end=self.front), obj)

    async def turn(self, obj: Any = None, **fields: Any) -> list[Any]:
        """One request to its end."""
        return [out async for out in self.request(chat(**fields) if obj is None else obj)]

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        asyncio.run(asyncio.wait_for(main, 20))
        assert self.front.gate.check() == []
        assert self.front.channel.check() == []


def chat(**fields: Any) -> GenerateReqInput:
    return GenerateReqInput(**{"text": "hello", "session_id": "chat", "sampling_params": {}} | fields)


def test_what_the_hold_tells_counts_from_then_on() -> None:
    world = World()

    async def main() -> None:
        outputs = await world.turn()
        assert outputs[0]["meta_info"]["krul"]["exact"] is True
        await world.front.pause(KEY)
        world.private["chat"] = 3
        for _ in range(2):
            obj = chat()
            outputs = await world.turn(obj)
            assert [out["meta_info"]["krul"]["exact"] for out in outputs] == [False, False]
            assert "krul:" not in repr(outputs)
            assert obj.extra_key is None
        await world.turn(session_id="other")

    world.run(main())
    private = private_key(KEY, 3).extra_key
    assert world.ran == [None, private, private, None]
    assert world.asked == ["hold", "pause", "hold", "hold"]  # the second private turn asks nothing


def test_the_callers_salts_stay() -> None:
    world = World()
    key = SessionKey("chat", "salt", "theirs")
    world.private["chat"] = 9

    async def main() -> None:
        obj = chat(cache_salt="salt", extra_key="theirs")
        await world.turn(obj)
        assert (obj.cache_salt, obj.extra_key) == ("salt", "theirs")

    world.run(main())
    assert world.ran == [f"theirskrul:{key.digest}:9"]


def test_a_session_this_side_has_forgotten_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.private["chat"] = 3
    monkeypatch.setattr(frontend, "MAX_KNOWN", 1)

    async def main() -> None:
        await world.turn()
        await world.turn(session_id="other")
        await world.turn()

    world.run(main())
    private = private_key(KEY, 3).extra_key
    assert world.ran == [private, None, private]
    assert world.asked == ["hold"] * 3


def test_where_nobody_answers_the_next_request_asks_again() -> None:
    """It ran under the caller's key, so all it has is exact; the session may be private all the same."""
    world = World()
    world.private["chat"] = 3
    world.deaf = True

    async def main() -> None:
        await world.turn()
        world.deaf = False
        await world.turn()
        await world.turn()

    world.run(main())
    private = private_key(KEY, 3).extra_key
    assert world.ran == [None, private, private]
    assert world.asked == ["hold", "hold"]


def test_an_answer_that_comes_too_early_is_none() -> None:
    """A resume is under way beside the request: only at its end is known what it has brought."""
    world = World()
    world.states["chat"] = "resuming"

    async def main() -> None:
        await world.turn()
        world.states["chat"], world.private["chat"] = "active", 3
        await world.turn()

    world.run(main())
    assert world.ran == [None, private_key(KEY, 3).extra_key]


def test_nothing_that_is_answered_makes_it_exact_again() -> None:
    world = World()
    world.private["chat"] = 3

    async def main() -> None:
        await world.turn()
        world.private.clear()  # the scheduler has forgotten it
        await world.front.pause(KEY)
        await world.turn()
        world.deaf = True
        await world.turn()

    world.run(main())
    assert world.ran == [private_key(KEY, 3).extra_key] * 3


@pytest.mark.parametrize("unknown", [True, False])
def test_once_deleted_it_is_another(unknown: bool) -> None:
    world = World()
    world.private["chat"] = 3

    async def main() -> None:
        await world.turn()
        world.unknown = unknown
        if unknown:
            with pytest.raises(AnswerError, match="no such session"):
                await world.front.forget(KEY)
        else:
            await world.front.forget(KEY)
        world.unknown = False
        world.private.clear()
        await world.turn()

    world.run(main())
    assert world.ran == [private_key(KEY, 3).extra_key, None]


def test_a_rejected_request_gets_its_own_key_back() -> None:
    world = World()
    world.private["chat"] = 3

    async def main() -> None:
        obj = chat()
        world.fails = True
        with pytest.raises(ValueError, match="too long"):
            await world.turn(obj)
        assert obj.extra_key is None
        world.fails, world.aborts = False, True
        await world.turn(obj)
        assert obj.extra_key is None

    world.run(main())
    assert world.ran == [private_key(KEY, 3).extra_key] * 2


def test_so_does_one_whose_client_left_after_the_first_output() -> None:
    world = World()
    world.private["chat"] = 3

    async def main() -> None:
        obj = chat()
        async with aclosing(world.request(obj)) as outputs:
            await anext(outputs)
            assert obj.extra_key is None  # SGLang has read it by then

    world.run(main())


def test_all_of_a_batch_run_in_private() -> None:
    world = World()
    world.private["chat"] = 3
    objs = [chat(text=["a", "b"]), chat(sampling_params={"n": 2})]

    async def main() -> None:
        for obj in objs:
            await world.turn(obj)
            assert obj.extra_key is None

    world.run(main())
    assert world.ran == [[private_key(KEY, 3).extra_key] * 2] * 2


def test_items_with_salts_of_their_own_are_other_sessions() -> None:
    world = World()
    world.private["chat"] = 3

    async def main() -> None:
        await world.turn(text=["a", "b"], cache_salt=["x", "y"])
        await world.turn(text=["a", "b"], extra_key=["x", "y"])

    world.run(main())
    assert world.ran == [None, ["x", "y"]]


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_key": FORGED},
        {"extra_key": FORGED, "session_id": None},
        {"extra_key": FORGED, "session_id": "other"},
        {"text": ["a", "b"], "extra_key": ["fine", FORGED], "session_id": None},
        {"extra_key": f"mine{FORGED}"},
    ],
)
def test_nobody_else_gets_in(fields: dict[str, Any]) -> None:
    """With a session or without one: SGLang answers 400."""
    world = World()

    async def main() -> None:
        with pytest.raises(ValueError, match="ends as those of private sessions do"):
            await world.turn(**fields)

    world.run(main())
    assert world.ran == []

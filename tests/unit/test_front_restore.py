"""What the front end asks about restores: resumes with a target, holds with a prompt, plans and rates."""

from __future__ import annotations

import asyncio
import json
import warnings
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    # SGLang and the packages under it warn while they are imported on a CPU.
    warnings.simplefilter("ignore")
    from sglang.srt.managers.io_struct import GenerateReqInput

    from sgl_krul.engine.frontend import AnswerError, FrontEnd
    from sgl_krul.engine.messages import (
        KrulControlReqInput,
        KrulControlReqOutput,
        hold_argument,
        prompt_of,
    )

from sgl_krul.errors import BadRequest, SessionBusy
from sgl_krul.service.wish import Wish
from sgl_krul.session.record import SessionKey
from tests.sessions import make_config

KEY = SessionKey("chat", "salt", None)


class Line:
    """The line to a scheduler: keeps what was sent, and answers when told to."""

    def __init__(self) -> None:
        self.sent: list[KrulControlReqInput] = []
        self.answer: Callable[[KrulControlReqInput], dict[str, Any] | None] = lambda message: {"ok": True}
        self.status = 200
        self.front = FrontEnd(make_config(), self.take, lambda: None)

    def take(self, message: KrulControlReqInput) -> None:
        """Take a message; it is answered at once, or never (None)."""
        self.sent.append(message)
        body = self.answer(message)
        if body is not None:
            asyncio.get_running_loop().call_soon(self.give, message, body)

    def give(self, message: KrulControlReqInput, body: dict[str, Any]) -> None:
        """Send an answer."""
        answer = KrulControlReqOutput(request_id=message.request_id, status=self.status, body=body)
        self.front.on_answer(answer)

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run to the end; nobody waits then, and no gate is shut."""
        result = asyncio.run(asyncio.wait_for(main, 20))
        assert self.front.channel.check() == []
        assert self.front.gate.check() == []
        return result


# -- what is asked --


@pytest.mark.parametrize(
    ("asked", "argument"),
    [
        ({}, {"target": "memory", "strategy": None}),
        ({"target": "device"}, {"target": "device", "strategy": None}),
        ({"target": "device", "strategy": "paper"}, {"target": "device", "strategy": "paper"}),
    ],
)
def test_a_resume_says_where_to_and_how(asked: dict[str, str], argument: dict[str, Any]) -> None:
    line = Line()
    assert line.run(line.front.resume(KEY, timeout_s=1, **asked)) == {"ok": True}
    (message,) = line.sent
    assert (message.verb, message.session_id, message.cache_salt) == ("resume", "chat", "salt")
    assert json.loads(message.argument) == argument
    wish = Wish.read(message.argument)
    assert (wish.target, wish.strategy) == (argument["target"], argument["strategy"])


@pytest.mark.parametrize("asked", [("disk", None), ("device", "fast"), ("memory", "paper")])
def test_a_bad_choice_is_refused_before_anything_waits(asked: tuple[str, str | None]) -> None:
    line = Line()

    async def main() -> None:
        async with line.front.gate.request(KEY.digest, 1):
            with pytest.raises(BadRequest, match=asked[1] or asked[0]):
                await line.front.resume(KEY, *asked)

    line.run(main())
    assert line.sent == []


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"input_ids": list(range(150))}, 150),  # a chat: SGLang's route has rendered its template
        ({"text": "hello"}, None),
        ({"text": ["hello", "you"]}, None),
        ({"input_ids": [[1, 2], [3]]}, None),
        ({"input_ids": []}, None),
        ({"input_embeds": [[0.5]]}, None),
    ],
)
def test_a_hold_tells_what_the_prompt_is(fields: dict[str, Any], tokens: int | None) -> None:
    argument = hold_argument(GenerateReqInput(**fields))
    assert prompt_of(argument) == (None if tokens is None else array("q", range(tokens)))


@pytest.mark.parametrize("ids", [[1 << 40], [1, None], [1, "two"]])
def test_what_are_no_tokens_is_left_to_sglang(ids: list[Any]) -> None:
    assert hold_argument(SimpleNamespace(input_ids=ids)) == ""


def test_a_request_without_such_a_field() -> None:
    assert hold_argument(SimpleNamespace(text="to embed")) == ""


def test_a_held_request_sends_it(make_request: Callable[..., Any]) -> None:
    line = Line()

    async def serve(obj: Any) -> None:
        async def generate() -> AsyncIterator[Any]:
            yield {"text": "one", "meta_info": {}}

        assert [out["text"] async for out in line.front.serve(generate, obj)] == ["one"]

    line.run(serve(make_request("chat", input_ids=[1, 2, 3])))
    line.run(serve(make_request("other", text="hello")))
    assert [(message.verb, message.argument) for message in line.sent] == [
        ("hold", hold_argument(SimpleNamespace(input_ids=[1, 2, 3]))),
        ("hold", ""),
    ]


@pytest.fixture
def make_request() -> Callable[..., Any]:
    """Makes requests of SGLang's own type that name a session."""

    def make(session_id: str, **fields: Any) -> Any:
        return GenerateReqInput(session_id=session_id, sampling_params={}, **fields)

    return make


def test_plans_timelines_and_rates_are_asked_for() -> None:
    line = Line()
    for call in (line.front.plan, line.front.timeline):
        assert line.run(call(KEY)) == {"ok": True}
    assert line.run(line.front.rates()) == {"ok": True}
    assert [(each.verb, each.session_id, each.cache_salt, each.argument) for each in line.sent] == [
        ("plan", "chat", "salt", ""),
        ("timeline", "chat", "salt", ""),
        ("rates", "", None, ""),
    ]


def test_a_plan_does_not_wait_for_a_running_request() -> None:
    line = Line()

    async def main() -> None:
        async with line.front.gate.request(KEY.digest, 1):
            assert await line.front.plan(KEY) == {"ok": True}

    line.run(main())


def test_a_refusal_keeps_its_status() -> None:
    line = Line()
    line.status = 409
    line.answer = lambda message: {"type": "SessionBusy", "message": "it was not restored yet"}
    with pytest.raises(AnswerError, match="it was not restored yet") as caught:
        line.run(line.front.timeline(KEY))
    assert (caught.value.status, caught.value.kind) == (409, "SessionBusy")


def test_a_resume_beside_a_running_request_says_so() -> None:
    line = Line()

    async def main() -> Any:
        async with line.front.gate.request(KEY.digest, 1):
            return await line.front.resume(KEY, "device", "load")

    answer = line.run(main())
    assert answer == {"ok": True, "target": "device", "reason": "a request of the session is running"}
    assert [message.verb for message in line.sent] == ["show"]


# -- calibration --


def test_calibrations_at_one_time_are_one() -> None:
    line = Line()
    line.answer = lambda message: None

    async def main() -> None:
        first, second = (asyncio.create_task(line.front.calibrate()) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()  # its client leaves: the other one still gets the rates
        await asyncio.sleep(0.01)
        (message,) = line.sent
        line.give(message, {"measured": True})
        assert await second == {"measured": True}
        assert first.cancelled()
        third = asyncio.create_task(line.front.calibrate())
        await asyncio.sleep(0.01)
        line.give(line.sent[1], {"measured": False})
        assert await third == {"measured": False}

    line.run(main())
    assert [message.verb for message in line.sent] == ["calibrate", "calibrate"]


def test_a_calibration_that_never_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl_krul.engine.frontend._CALIBRATE_S", 0.02)
    line = Line()
    line.answer = lambda message: None
    with pytest.raises(SessionBusy, match=r"^calibrate took longer than 0.02 s$"):
        line.run(line.front.calibrate())


def test_a_calibration_that_fails_can_be_tried_again() -> None:
    line = Line()
    line.status = 409
    line.answer = lambda message: {"type": "SessionBusy", "message": "a restore is running"}
    with pytest.raises(AnswerError, match="a restore is running"):
        line.run(line.front.calibrate())
    line.status = 200
    line.answer = lambda message: {"measured": True}
    assert line.run(line.front.calibrate()) == {"measured": True}

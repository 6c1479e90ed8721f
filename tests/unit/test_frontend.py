"""Requests are held, verbs are asked and answered: the front end over a real service and real tiers."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    # SGLang and the packages under it warn while they are imported on a CPU.
    warnings.simplefilter("ignore")
    from sgl_krul.engine.frontend import AnswerError, FrontEnd
    from sgl_krul.engine.messages import KrulControlReqInput, KrulControlReqOutput

from sgl_krul.config import Config, SessionConfig
from sgl_krul.errors import KrulError, SessionBusy, StoreFull
from sgl_krul.session.record import SessionKey
from sgl_krul.session.registry import State
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.ssd import SsdTier
from tests.sessions import (
    PAGE,
    Chat,
    FaultyTier,
    TruePages,
    chat,
    make_config,
    make_service,
    tokens,
)

KEY = SessionKey("chat")
LONG_S = 20.0


def request_of(session_id: Any = "chat", **fields: Any) -> SimpleNamespace:
    """What the front end sees of a chat request."""
    defaults = {
        "session_id": session_id,
        "cache_salt": None,
        "extra_key": None,
        "text": "hello",
        "input_ids": None,
        "sampling_params": {"n": 1},
        "return_logprob": False,
    }
    return SimpleNamespace(**{**defaults, **fields})


class Scheduler:
    """The other side: verbs go to a real SessionService, polled as the scheduler does in every round."""

    def __init__(self, ssd: SsdTier, memory: MemoryTier, config: Config) -> None:
        self.fault: Callable[[str, str, str], None] = lambda when, operation, key: None
        tier = FaultyTier(ssd, lambda *args: self.fault(*args))
        self.service = make_service(memory, tier, config=config)
        self.front = FrontEnd(config, self.receive, lambda: None)
        self.verbs: list[str] = []
        self.deaf = False

    def receive(self, message: KrulControlReqInput) -> None:
        """Take one message, like SessionControl.handle."""
        self.verbs.append(message.verb)
        if self.deaf:
            return

        def reply(result: dict[str, Any] | KrulError) -> None:
            if isinstance(result, KrulError):
                body = {"type": type(result).__name__, "message": str(result)}
                answer = KrulControlReqOutput(request_id=message.request_id, status=result.status, body=body)
            else:
                answer = KrulControlReqOutput(request_id=message.request_id, status=200, body=result)
            self.front.on_answer(answer)

        key = SessionKey(message.session_id, message.cache_salt, message.extra_key)
        try:
            self.begin(message.verb, key, reply)
        except KrulError as error:
            reply(error)

    def begin(self, verb: str, key: SessionKey, reply: Callable[[Any], None]) -> None:
        """One verb."""
        service = self.service
        if verb == "list":
            reply(service.overview())
            return
        if verb == "hold":
            held = service.registry.find(key.digest)
            if held is None or held.state is not State.PAUSED:
                reply({"state": "unknown" if held is None else held.state.value})
            else:
                service.resume(key, hold=True, reply=reply)
            return
        session = service.registry.get(key)
        if verb == "show":
            reply(service.describe(session))
        elif verb == "resume":
            service.resume(key, hold=False, reply=reply)
        elif verb == "forget":
            service.forget(session, settle=lambda: 0, reply=reply)
        elif session.state is State.PAUSED:
            reply(service.describe(session) | {"already_paused": True})
        else:
            hashes = Chat(key, session.token_ids).hashes
            service.pause(
                session,
                hashes,
                TruePages(hashes),
                before=lambda: None,
                settle=lambda success: 0,
                reply=reply,
            )

    async def rounds(self) -> None:
        """Poll for ever."""
        while True:
            self.service.poll()
            await asyncio.sleep(0.0005)

    async def turn(self, session: Chat, pause_s: float = 0.0, **fields: Any) -> list[Any]:
        """A request that comes in through the front end and runs to its end; returns what the client got."""

        async def generate() -> AsyncIterator[Any]:
            leading = self.service.memory.leading(session.page_keys) * PAGE
            await asyncio.sleep(pause_s)
            yield {"text": "one", "meta_info": {"cached_tokens_details": {"host": leading}}}
            self.service.observe(session.key, session.token_ids)
            yield {"text": "two", "meta_info": {}}

        salts = {"cache_salt": session.key.cache_salt, "extra_key": session.key.extra_key}
        obj = request_of(session.key.session_id, **salts, **fields)
        return [out async for out in self.front.serve(generate, obj)]


@pytest.fixture
def make(ssd: SsdTier, memory: MemoryTier) -> Iterator[Callable[..., Scheduler]]:
    """Makes schedulers over the same tiers; at the end no gate has anything left."""
    made: list[Scheduler] = []

    def make(**settings: float) -> Scheduler:
        config = dataclasses.replace(make_config(), session=SessionConfig(**settings))
        made.append(Scheduler(ssd, memory, config))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.service.close()
        assert scheduler.service.check() == []
        assert scheduler.front.gate.check() == []
        assert scheduler.front.channel.check() == []  # nobody waits for ever


def run(scheduler: Scheduler, main: Coroutine[Any, Any, None]) -> None:
    async def both() -> None:
        rounds = asyncio.create_task(scheduler.rounds())
        try:
            await asyncio.wait_for(main, LONG_S)
        finally:
            rounds.cancel()
            idle = scheduler.front._idle_task  # noqa: SLF001
            if idle is not None:
                idle.cancel()
                with suppress(asyncio.CancelledError):
                    await idle

    asyncio.run(both())


async def until(ready: Callable[[], bool]) -> None:
    while not ready():
        await asyncio.sleep(0.001)


def stall(scheduler: Scheduler, operation: str) -> threading.Event:
    """The store stops at `operation` until the event is set."""
    go = threading.Event()

    def fault(when: str, done: str, key: str) -> None:
        if (when, done) == ("before", operation):
            assert go.wait(LONG_S)

    scheduler.fault = fault
    return go


# -- the hold --


def test_a_request_is_held_until_its_pages_are_there(make: Callable[..., Scheduler], ssd: SsdTier) -> None:
    chat(150).write(ssd)
    scheduler = make()
    go = stall(scheduler, "read_segments")

    async def main() -> None:
        request = asyncio.create_task(scheduler.turn(chat(150)))
        await asyncio.sleep(0.03)
        assert not request.done()
        assert scheduler.front.gate.running(KEY.digest) == 1
        go.set()
        first, last = await request
        krul = first["meta_info"]["krul"]
        assert krul["restored_tokens"] == 144
        assert krul["restored_from"] == "ssd"
        assert krul["held_ms"] >= 30
        assert krul["reason"] == ""
        assert last["text"] == "two"
        await scheduler.turn(chat(200))
        assert scheduler.verbs == ["hold"]  # an active session is not asked for again

    run(scheduler, main())


def test_a_new_session_is_not_held(make: Callable[..., Scheduler]) -> None:
    scheduler = make()

    async def main() -> None:
        first, _ = await scheduler.turn(chat(50))
        assert first["meta_info"]["krul"]["restored_tokens"] == 0
        assert first["meta_info"]["krul"]["restored_from"] == "nowhere"

    run(scheduler, main())


@pytest.mark.parametrize("how", ["slow store", "deaf scheduler"])
def test_after_the_deadline_a_request_goes_on(make: Callable[..., Scheduler], ssd: SsdTier, how: str) -> None:
    chat(150).write(ssd)
    scheduler = make(hold_deadline_s=0.2)
    go = stall(scheduler, "read_segments")
    scheduler.deaf = how == "deaf scheduler"

    async def main() -> None:
        first, last = await scheduler.turn(chat(150))
        assert last["text"] == "two"
        krul = first["meta_info"]["krul"]
        assert krul["restored_tokens"] == 0
        # On a busy machine the deadline may be over before the worker began.
        assert (
            "hold of session 'chat' took longer than 1.2 s" in krul["reason"] or krul["reason"] == "deadline"
        )
        go.set()
        await until(lambda: not scheduler.service.working)

    run(scheduler, main())


def test_a_client_that_leaves_in_the_hold_leaves_nothing(
    make: Callable[..., Scheduler], ssd: SsdTier
) -> None:
    chat(150).write(ssd)
    scheduler = make()
    go = stall(scheduler, "read_segments")

    async def main() -> None:
        request = asyncio.create_task(scheduler.turn(chat(150)))
        await until(lambda: scheduler.service.working)
        request.cancel()
        await asyncio.wait([request])
        assert request.cancelled()
        assert scheduler.front.gate.check() == []
        assert scheduler.front.gate.running(KEY.digest) == 0
        go.set()
        await until(lambda: not scheduler.service.working)
        first, _ = await scheduler.turn(chat(150))
        assert first["meta_info"]["krul"]["restored_tokens"] == 144

    run(scheduler, main())


def test_a_client_that_leaves_while_served_lets_the_session_go(
    make: Callable[..., Scheduler],
) -> None:
    scheduler = make()

    async def main() -> None:
        request = asyncio.create_task(scheduler.turn(chat(150), pause_s=LONG_S))
        await until(lambda: scheduler.front.gate.running(KEY.digest) == 1)
        await asyncio.sleep(0.01)
        request.cancel()
        await asyncio.wait([request])
        assert scheduler.front.gate.running(KEY.digest) == 0
        await scheduler.turn(chat(150))
        assert (await scheduler.front.pause(KEY))["state"] == "paused"

    run(scheduler, main())


def test_two_requests_at_once_are_both_served(make: Callable[..., Scheduler], ssd: SsdTier) -> None:
    chat(150).write(ssd)
    scheduler = make()

    async def main() -> None:
        both = await asyncio.gather(scheduler.turn(chat(150)), scheduler.turn(chat(160)))
        assert [outs[1]["text"] for outs in both] == ["two", "two"]
        assert (await scheduler.front.pause(KEY))["state"] == "paused"

    run(scheduler, main())


def test_a_request_comes_while_its_session_is_being_paused(make: Callable[..., Scheduler]) -> None:
    scheduler = make()

    async def main() -> None:
        await scheduler.turn(chat(150))
        go = stall(scheduler, "put")
        pause = asyncio.create_task(scheduler.front.pause(KEY))
        await until(lambda: scheduler.service.working)
        request = asyncio.create_task(scheduler.turn(chat(200)))
        await asyncio.sleep(0.02)
        assert not request.done()
        go.set()
        assert (await pause)["state"] == "paused"
        first, _ = await request
        assert first["meta_info"]["krul"]["restored_tokens"] == 144

    run(scheduler, main())


def test_a_damaged_chunk_is_told_in_meta_info(make: Callable[..., Scheduler], ssd: SsdTier) -> None:
    record = chat(150).write(ssd).manifest
    ssd.delete(record.chunks[1].key)
    scheduler = make()

    async def main() -> None:
        first, _ = await scheduler.turn(chat(150))
        krul = first["meta_info"]["krul"]
        assert (krul["restored_tokens"], krul["reason"]) == (64, "missing chunk")

    run(scheduler, main())


def test_two_clients_with_one_id_and_other_salts_are_two_sessions(make: Callable[..., Scheduler]) -> None:
    scheduler = make()
    salted = SessionKey("chat", "salt")

    async def main() -> None:
        await scheduler.turn(chat(150))
        await scheduler.turn(Chat(salted, tokens(100)))
        assert (await scheduler.front.pause(KEY))["tokens"] == 150
        assert (await scheduler.front.show(salted))["state"] == "active"
        assert (await scheduler.front.pause(salted))["tokens"] == 100
        await scheduler.front.forget(KEY)
        assert (await scheduler.front.resume(salted))["restored_tokens"] == 96

    run(scheduler, main())


# -- verbs --


def test_a_second_pause_says_so(make: Callable[..., Scheduler]) -> None:
    scheduler = make()

    async def main() -> None:
        await scheduler.turn(chat(150))
        assert (await scheduler.front.pause(KEY))["already_paused"] is False
        assert (await scheduler.front.pause(KEY))["already_paused"] is True
        both = await asyncio.gather(scheduler.front.pause(KEY), scheduler.front.pause(KEY))
        assert [answer["already_paused"] for answer in both] == [True, True]

    run(scheduler, main())


def test_a_pause_waits_for_a_running_turn_then_says_409(make: Callable[..., Scheduler]) -> None:
    scheduler = make(busy_timeout_s=0.03)

    async def main() -> None:
        request = asyncio.create_task(scheduler.turn(chat(150), pause_s=0.15))
        await until(lambda: scheduler.front.gate.running(KEY.digest) == 1)
        with pytest.raises(SessionBusy, match=r"1 request\(s\) still under way after 0.03 s") as caught:
            await scheduler.front.pause(KEY)
        assert caught.value.status == 409
        with pytest.raises(SessionBusy, match="after 0 s"):
            await scheduler.front.forget(KEY, timeout_s=0)
        assert (await scheduler.front.pause(KEY, timeout_s=LONG_S))["state"] == "paused"
        assert request.done()

    run(scheduler, main())


def test_verbs_on_an_unknown_session(make: Callable[..., Scheduler]) -> None:
    scheduler = make()

    async def main() -> None:
        for verb in (
            scheduler.front.pause,
            scheduler.front.resume,
            scheduler.front.forget,
            scheduler.front.show,
        ):
            with pytest.raises(AnswerError, match="no session 'chat' is known") as caught:
                await verb(KEY)
            assert (caught.value.status, caught.value.kind) == (404, "UnknownSession")

    run(scheduler, main())


def test_an_error_of_the_store_keeps_its_status(make: Callable[..., Scheduler]) -> None:
    scheduler = make()

    def refuse(when: str, operation: str, key: str) -> None:
        if operation == "put":
            raise StoreFull("no room: delete sessions")

    async def main() -> None:
        await scheduler.turn(chat(150))
        scheduler.fault = refuse
        with pytest.raises(AnswerError, match="no room: delete sessions") as caught:
            await scheduler.front.pause(KEY)
        assert (caught.value.status, caught.value.kind) == (507, "StoreFull")
        await scheduler.turn(chat(200))  # and the chat goes on
        assert (await scheduler.front.show(KEY))["state"] == "active"

    run(scheduler, main())


def test_resume_while_a_request_runs_changes_nothing(make: Callable[..., Scheduler]) -> None:
    scheduler = make()

    async def main() -> None:
        await scheduler.turn(chat(150))
        request = asyncio.create_task(scheduler.turn(chat(200), pause_s=0.05))
        await until(lambda: scheduler.front.gate.running(KEY.digest) == 1)
        answer = await scheduler.front.resume(KEY)
        assert (answer["state"], answer["reason"]) == ("active", "a request of the session is running")
        await request

    run(scheduler, main())


def test_a_forgotten_session_begins_anew(make: Callable[..., Scheduler]) -> None:
    scheduler = make()

    async def main() -> None:
        await scheduler.turn(chat(150))
        await scheduler.front.pause(KEY)
        assert (await scheduler.front.forget(KEY))["deleted"] is True
        assert (await scheduler.front.overview())["sessions"] == []
        await scheduler.turn(chat(40, first=500))
        (row,) = (await scheduler.front.overview())["sessions"]
        assert (row["tokens"], row["stored_tokens"]) == (40, 0)

    run(scheduler, main())


def test_answers_nobody_waits_for_are_dropped(make: Callable[..., Scheduler]) -> None:
    scheduler = make()
    scheduler.front.on_answer(KrulControlReqOutput(request_id="nobody", status=200, body={}))


# -- what cannot be paused --


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sampling_params": {"n": 2}}, "n > 1"),
        ({"sampling_params": [{"n": 1}]}, "a batch of prompts"),
        ({"text": ["a", "b"]}, "a batch of prompts"),
        ({"text": None, "input_ids": [[1], [2]]}, "a batch of prompts"),
        ({"image_data": ["x"]}, "images"),
        ({"input_embeds": [[0.5]]}, "embeddings"),
    ],
)
def test_other_requests_are_served_and_mark_the_session(
    make: Callable[..., Scheduler], fields: dict[str, Any], reason: str
) -> None:
    scheduler = make()

    async def main() -> None:
        await scheduler.turn(chat(150), **fields)
        with pytest.raises(SessionBusy, match=f"can't be paused: .*{reason}"):
            await scheduler.front.pause(KEY)
        await scheduler.front.forget(KEY)
        await scheduler.turn(chat(150))
        assert (await scheduler.front.pause(KEY))["state"] == "paused"

    run(scheduler, main())


@pytest.mark.parametrize("n", [None, 1])
def test_n_of_one_or_none_is_a_plain_chat(make: Callable[..., Scheduler], n: int | None) -> None:
    scheduler = make()

    async def main() -> None:
        await scheduler.turn(chat(150), sampling_params={"n": n})
        assert (await scheduler.front.pause(KEY))["state"] == "paused"

    run(scheduler, main())


@pytest.mark.parametrize(
    ("session_id", "said"),
    [
        ("", "is empty"),
        ("x" * 257, "has 257 characters"),
        ("a\0", "has the character"),
        (7, "not text"),
        (["a"], "list"),
    ],
)
def test_bad_ids_are_a_value_error_that_says_what_to_do(
    make: Callable[..., Scheduler], session_id: Any, said: str
) -> None:
    scheduler = make()

    async def generate() -> AsyncIterator[Any]:
        raise AssertionError("must not run")
        yield

    async def main() -> None:
        with pytest.raises(ValueError, match=said) as caught:
            async for _ in scheduler.front.serve(generate, request_of(session_id)):
                pass
        assert "send a session_id of 1 to 256 characters" in str(caught.value)
        assert scheduler.verbs == []

    run(scheduler, main())


@pytest.mark.parametrize("session_id", ["../x", "a/b", "naïve", "会話"])
def test_odd_ids_are_served(make: Callable[..., Scheduler], session_id: str) -> None:
    scheduler = make()

    async def main() -> None:
        session = chat(150, session_id)
        await scheduler.turn(session)
        assert (await scheduler.front.pause(session.key))["session_id"] == session_id
        assert (await scheduler.front.resume(session.key))["restored_tokens"] == 144

    run(scheduler, main())


# -- idle --


def test_idle_sessions_are_paused_by_themselves(make: Callable[..., Scheduler]) -> None:
    scheduler = make(idle_pause_s=0.05)

    async def main() -> None:
        await scheduler.turn(chat(150))
        await scheduler.turn(chat(60, "batch"), sampling_params={"n": 4})
        request = asyncio.create_task(scheduler.turn(chat(80, "long"), pause_s=0.4))
        session = scheduler.service.registry.get(KEY)
        await until(lambda: session.state is State.PAUSED)
        assert scheduler.service.registry.get(SessionKey("batch")).state is State.ACTIVE
        await request
        assert scheduler.service.registry.get(SessionKey("long")).state is State.ACTIVE
        first, _ = await scheduler.turn(chat(150))
        assert first["meta_info"]["krul"]["restored_tokens"] == 144

    run(scheduler, main())


def test_an_idle_session_that_fails_to_pause_is_tried_again(make: Callable[..., Scheduler]) -> None:
    scheduler = make(idle_pause_s=0.02)
    failures: list[str] = []

    def refuse(when: str, operation: str, key: str) -> None:
        if operation == "put" and len(failures) < 2:
            failures.append(key)
            raise StoreFull("no room")

    async def main() -> None:
        scheduler.fault = refuse
        await scheduler.turn(chat(150))
        session = scheduler.service.registry.get(KEY)
        await until(lambda: session.state is State.PAUSED)
        assert len(failures) == 2

    run(scheduler, main())


def test_an_idle_session_the_scheduler_does_not_know_is_dropped(make: Callable[..., Scheduler]) -> None:
    scheduler = make(idle_pause_s=0.02)

    async def main() -> None:
        await scheduler.turn(chat(150))
        scheduler.service.change_namespace("0" * 32)
        await until(lambda: "pause" in scheduler.verbs)
        await asyncio.sleep(0.1)
        assert scheduler.verbs.count("pause") == 1

    run(scheduler, main())


def test_requests_of_one_session_share_a_hold(make: Callable[..., Scheduler], ssd: SsdTier) -> None:
    chat(150).write(ssd)
    scheduler = make()
    go = stall(scheduler, "read_segments")

    async def main() -> None:
        requests = [asyncio.create_task(scheduler.turn(chat(150))) for _ in range(3)]
        await until(lambda: scheduler.service.working)
        await asyncio.sleep(0.02)
        go.set()
        for first, _ in await asyncio.gather(*requests):
            assert first["meta_info"]["krul"]["restored_tokens"] == 144
        assert scheduler.verbs.count("hold") == 1

    run(scheduler, main())


@pytest.mark.parametrize("verb", ["pause", "resume", "forget"])
def test_a_verb_waits_for_a_hold_whose_client_has_left(
    make: Callable[..., Scheduler], ssd: SsdTier, verb: str
) -> None:
    chat(150).write(ssd)
    scheduler = make()
    go = stall(scheduler, "read_segments")

    async def main() -> None:
        request = asyncio.create_task(scheduler.turn(chat(150)))
        await until(lambda: scheduler.service.working)
        request.cancel()
        await asyncio.wait([request])
        answer = asyncio.create_task(getattr(scheduler.front, verb)(KEY))
        await asyncio.sleep(0.02)
        assert not answer.done()
        go.set()
        assert (await answer)["session_id"] == "chat"

    run(scheduler, main())


def test_a_pause_goes_to_its_end_without_its_caller(make: Callable[..., Scheduler]) -> None:
    scheduler = make()
    go = stall(scheduler, "put")

    async def main() -> None:
        await scheduler.turn(chat(150))
        caller = asyncio.create_task(scheduler.front.pause(KEY))
        await until(lambda: scheduler.service.working)
        caller.cancel()
        await asyncio.wait([caller])
        next_turn = asyncio.create_task(scheduler.turn(chat(150)))
        await asyncio.sleep(0.02)
        assert not next_turn.done()  # it waits for the pause, and then for its KV
        go.set()
        first, _ = await next_turn
        assert first["meta_info"]["krul"]["restored_tokens"] == 144

    run(scheduler, main())


def test_only_so_many_sessions_are_remembered(
    make: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl_krul.engine.frontend.MAX_KNOWN", 2)
    scheduler = make()

    async def main() -> None:
        for name in ("a", "b", "c", "c", "b", "a"):
            await scheduler.turn(dataclasses.replace(chat(20), key=SessionKey(name)))

    run(scheduler, main())
    assert scheduler.verbs == ["hold"] * 4  # a, b, c, and a again: it was forgotten


def test_a_pause_is_repeated_when_an_abandoned_request_ends_beside_it(
    make: Callable[..., Scheduler],
) -> None:
    scheduler = make()
    go = stall(scheduler, "put")

    async def main() -> None:
        await scheduler.turn(chat(150))
        pause = asyncio.create_task(scheduler.front.pause(KEY))
        await until(lambda: scheduler.service.working)
        scheduler.service.observe(KEY, chat(170).token_ids)  # its client left, and the front end with it
        go.set()
        answer = await pause
        assert (answer["state"], answer["tokens"]) == ("paused", 170)
        assert scheduler.verbs.count("pause") == 2

    run(scheduler, main())


def test_a_rejected_request_leaves_its_session_to_be_held_again(
    make: Callable[..., Scheduler], ssd: SsdTier
) -> None:
    chat(150).write(ssd)
    scheduler = make()

    async def rejected() -> AsyncIterator[Any]:
        yield {"meta_info": {"finish_reason": {"type": "abort", "status_code": 400}}}

    async def failing() -> AsyncIterator[Any]:
        raise ValueError("too long")
        yield  # pragma: no cover

    async def main() -> None:
        outs = [out async for out in scheduler.front.serve(rejected, request_of())]
        assert outs[0]["meta_info"]["finish_reason"]["type"] == "abort"
        with pytest.raises(ValueError, match="too long"):
            await anext(scheduler.front.serve(failing, request_of()))
        await scheduler.turn(chat(150))
        await scheduler.turn(chat(150))
        assert scheduler.verbs.count("hold") == 3

    run(scheduler, main())

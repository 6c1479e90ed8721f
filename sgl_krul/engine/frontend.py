"""The front end's side: requests of paused sessions wait here until their KV is in memory; verbs come and go.

Runs in the event loop of SGLang's tokenizer manager. The scheduler's process does the work; here is only who
may go when (`SessionGate`), what has to be asked first (the hold), and how long anybody waits. A client that
goes away ends its own waiting only: a hold or a verb that was begun runs to its end.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_krul.config import Config
from sgl_krul.engine.gate import SessionGate
from sgl_krul.engine.messages import KrulControlReqInput, KrulControlReqOutput
from sgl_krul.engine.request import annotate, session_key, was_aborted, why_not_pausable
from sgl_krul.errors import SessionBusy, UnknownSession
from sgl_krul.session.record import SessionKey

__all__ = ["AnswerError", "FrontEnd"]

logger = logging.getLogger(__name__)

_WIND_DOWN_S = 1.0  # an abandoned request ends within a step or two of the scheduler
MAX_KNOWN = 50_000  # sessions remembered here; one that is forgotten is only asked for again

Answer = dict[str, Any]


class AnswerError(Exception):
    """The scheduler answered a verb with an error: its HTTP status, the name of its class, its message."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


@dataclass
class _Known:
    """What this side knows of a session. `active`: it needs no hold."""

    key: SessionKey
    active: bool = False
    last_used: float = 0.0
    not_pausable: str = ""


class FrontEnd:
    """One per tokenizer manager. `send` takes a message to the scheduler; answers come to `on_answer`."""

    def __init__(
        self, config: Config, send: Callable[[KrulControlReqInput], None], listen: Callable[[], None]
    ) -> None:
        self.gate = SessionGate()
        self._settings = config.session
        self._send = send
        self._listen = listen
        self._answers: dict[str, asyncio.Future[KrulControlReqOutput]] = {}
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._holds: dict[str, asyncio.Task[Answer]] = {}
        self._verbs: set[asyncio.Task[Answer]] = set()
        self._idle_task: asyncio.Task[None] | None = None

    # ---- requests ----

    async def serve(self, generate: Callable[[], AsyncIterator[Any]], obj: Any) -> AsyncIterator[Any]:
        """Run a request that names a session: hold it while the session's KV comes to memory, then let it go.

        Raises:
            ValueError: a bad session id; SGLang answers 400.
        """
        key = session_key(obj)
        known = self._know(key)
        known.not_pausable = why_not_pausable(obj) or known.not_pausable
        self._start_idle_pauses()
        start = time.monotonic()
        async with self.gate.request(key.digest, self._settings.hold_deadline_s):
            report = {} if known.active else await asyncio.shield(self._hold(key))
            held_ms = round(1000 * (time.monotonic() - start), 3)
            known.last_used = time.monotonic()
            try:
                async for out in generate():
                    known.active = known.active or not was_aborted(out)  # a rejected one leaves it paused
                    yield annotate(out, report, held_ms)
            finally:
                known.last_used = time.monotonic()

    def _hold(self, key: SessionKey) -> asyncio.Task[Answer]:
        """The hold of a session: one for all requests that wait for it."""
        task = self._holds.get(key.digest)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._ask_to_hold(key))
            self._holds[key.digest] = task
            task.add_done_callback(lambda _: self._holds.pop(key.digest, None))
        return task

    async def _ask_to_hold(self, key: SessionKey) -> Answer:
        try:
            return await self._ask("hold", key, self._settings.hold_deadline_s + 1.0)
        except (AnswerError, SessionBusy) as error:
            logger.warning("session %r goes on without its stored KV: %s", key.session_id, error)
            return {"reason": str(error)}

    # ---- verbs ----

    async def pause(self, key: SessionKey, timeout_s: float | None = None) -> Answer:
        """Pause the session once its running requests are done.

        Raises:
            SessionBusy, UnknownSession, AnswerError
        """
        known = self._known.get(key.digest)
        if known is not None and known.not_pausable:
            raise SessionBusy(
                f"session {key.session_id!r} can't be paused: {known.not_pausable}. Delete it, or let it age."
            )
        return await self._alone("pause", key, timeout_s)

    async def resume(self, key: SessionKey, timeout_s: float | None = None) -> Answer:
        """Bring the session to memory.

        Raises:
            SessionBusy, UnknownSession, AnswerError
        """
        if self.gate.running(key.digest):
            return await self.show(key) | {"reason": "a request of the session is running"}
        return await self._alone("resume", key, timeout_s)

    async def forget(self, key: SessionKey, timeout_s: float | None = None) -> Answer:
        """Delete the session everywhere.

        Raises:
            SessionBusy, UnknownSession, AnswerError
        """
        return await self._alone("forget", key, timeout_s)

    async def move(self, key: SessionKey, tier: str, timeout_s: float | None = None) -> Answer:
        """Put a paused session into one tier.

        Raises:
            SessionBusy, UnknownSession, AnswerError
        """
        return await self._alone("move", key, timeout_s, tier)

    async def export(self, key: SessionKey, path: Path, timeout_s: float | None = None) -> Answer:
        """Write a paused session to a file of this machine.

        Raises:
            SessionBusy, UnknownSession, AnswerError
        """
        return await self._alone("export", key, timeout_s, str(path))

    async def take_in(self, path: Path) -> Answer:
        """Store the session of an exported file. The caller removes the file when this is done.

        Raises:
            AnswerError
        """
        return await self._ask("import", SessionKey(""), None, str(path))

    async def show(self, key: SessionKey) -> Answer:
        """One session.

        Raises:
            AnswerError
        """
        return await self._ask("show", key, None)

    async def overview(self) -> Answer:
        """All sessions, the tiers and the counters."""
        return await self._ask("list", SessionKey(""), None)

    def on_answer(self, message: KrulControlReqOutput) -> None:
        """Called by SGLang's receiving loop. An answer nobody waits for any more is dropped."""
        future = self._answers.pop(message.request_id, None)
        if future is not None and not future.done():
            future.set_result(message)

    # ---- inside ----

    async def _alone(self, verb: str, key: SessionKey, timeout_s: float | None, argument: str = "") -> Answer:
        """Run a verb with the session to itself, to its end even if the caller is cancelled."""
        timeout_s = self._settings.busy_timeout_s if timeout_s is None else timeout_s
        task = asyncio.get_running_loop().create_task(self._run_verb(verb, key, timeout_s, argument))
        self._verbs.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._verb_done)
        return await asyncio.shield(task)

    async def _run_verb(self, verb: str, key: SessionKey, timeout_s: float, argument: str) -> Answer:
        async with self.gate.alone(key.digest, key.session_id, timeout_s):
            hold = self._holds.get(key.digest)
            if hold is not None:  # its request has gone; the scheduler is still at it
                await asyncio.wait([hold])
            if verb == "pause":
                return await self._pause_for_good(key, timeout_s)
            answer = await self._ask(verb, key, None, argument)
            if verb == "forget":
                self._known.pop(key.digest, None)
            return answer

    async def _pause_for_good(self, key: SessionKey, timeout_s: float) -> Answer:
        """Pause, and again if a request ended beside it: one without its client ends a little later."""
        give_up = time.monotonic() + max(timeout_s, _WIND_DOWN_S)
        while True:
            answer = await self._ask("pause", key, None)
            if answer["state"] != "active":
                break
            if time.monotonic() > give_up:
                raise SessionBusy(f"session {key.session_id!r} is busy: a request goes on ending. Try again.")
            await asyncio.sleep(_WIND_DOWN_S / 20)
        if key.digest in self._known:
            self._known[key.digest].active = False
        return answer

    def _verb_done(self, task: asyncio.Task[Answer]) -> None:
        self._verbs.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has it; if nobody did, it is no unhandled error either

    async def _ask(self, verb: str, key: SessionKey, timeout_s: float | None, argument: str = "") -> Answer:
        request_id = uuid.uuid4().hex
        future: asyncio.Future[KrulControlReqOutput] = asyncio.get_running_loop().create_future()
        self._answers[request_id] = future
        self._listen()
        self._send(
            KrulControlReqInput(
                request_id=request_id,
                verb=verb,
                session_id=key.session_id,
                cache_salt=key.cache_salt,
                extra_key=key.extra_key,
                argument=argument,
            )
        )
        try:
            answer = await asyncio.wait_for(future, timeout_s)
        except TimeoutError as error:
            raise SessionBusy(
                f"{verb} of session {key.session_id!r} took longer than {timeout_s:g} s"
            ) from error
        finally:
            self._answers.pop(request_id, None)
        if answer.status != 200:
            raise AnswerError(answer.status, answer.body["type"], answer.body["message"])
        return answer.body

    def _know(self, key: SessionKey) -> _Known:
        known = self._known.setdefault(key.digest, _Known(key))
        self._known.move_to_end(key.digest)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return known

    def _start_idle_pauses(self) -> None:
        if self._settings.idle_pause_s > 0 and self._idle_task is None:
            self._idle_task = asyncio.get_running_loop().create_task(self._pause_idle_sessions())

    async def _pause_idle_sessions(self) -> None:
        """Pause what was silent for `idle_pause_s`. One that can't be paused now is tried again later."""
        idle_s = self._settings.idle_pause_s
        while True:
            await asyncio.sleep(min(idle_s, 5.0) / 4)
            silent_since = time.monotonic() - idle_s
            for digest, known in list(self._known.items()):
                if known.active and known.last_used <= silent_since and not self.gate.running(digest):
                    await self._pause_idle(known)

    async def _pause_idle(self, known: _Known) -> None:
        if known.not_pausable:
            return
        try:
            await self.pause(known.key, timeout_s=0)
        except (AnswerError, SessionBusy) as error:
            if isinstance(error, AnswerError) and error.kind == UnknownSession.__name__:
                known.active = False
                return
            logger.warning("idle session %r was not paused: %s", known.key.session_id, error)
            known.last_used = time.monotonic()

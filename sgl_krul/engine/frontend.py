"""The front end's side: requests of paused sessions wait here until their KV is back; verbs come and go.

Runs in the event loop of SGLang's tokenizer manager. The scheduler's process does the work; here is only who
may go when (`SessionGate`), what has to be asked first (the hold), and how long anybody waits. A client that
goes away ends its own waiting only: a hold or a verb that was begun runs to its end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_krul.config import Config
from sgl_krul.engine.channel import Answer, AnswerError, Channel
from sgl_krul.engine.gate import SessionGate
from sgl_krul.engine.messages import KrulControlReqInput, KrulControlReqOutput, hold_argument, resume_argument
from sgl_krul.engine.request import (
    annotate,
    private_request,
    refuse_private_keys,
    session_key,
    was_aborted,
    why_not_pausable,
)
from sgl_krul.errors import SessionBusy, UnknownSession
from sgl_krul.service.wish import Wish
from sgl_krul.session.record import SessionKey

__all__ = ["AnswerError", "FrontEnd"]

logger = logging.getLogger(__name__)

_WIND_DOWN_S = 1.0  # an abandoned request ends within a step or two of the scheduler
_CALIBRATE_S = 180.0  # it takes up to a minute; a machine may be three times as slow as any we know
MAX_KNOWN = 50_000  # sessions remembered here; one that is forgotten is only asked for again


@dataclass
class _Known:
    """What this side knows of a session. It needs no hold if it is `active`, and the scheduler has `told` in
    which namespace it lives: the caller's, or the private one of this number.
    """

    key: SessionKey
    active: bool = False
    told: bool = False
    private: int | None = None
    last_used: float = 0.0
    not_pausable: str = ""


class FrontEnd:
    """One per tokenizer manager. `send` takes a message to the scheduler; answers come to `on_answer`."""

    def __init__(
        self, config: Config, send: Callable[[KrulControlReqInput], None], listen: Callable[[], None]
    ) -> None:
        self.gate = SessionGate()
        self._settings = config.session
        self.channel = Channel(send, listen)
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._holds: dict[str, asyncio.Task[Answer]] = {}
        self._verbs: set[asyncio.Task[Answer]] = set()
        self._calibration: asyncio.Task[Answer] | None = None
        self._idle_task: asyncio.Task[None] | None = None

    # ---- requests ----

    async def serve(self, generate: Callable[[], AsyncIterator[Any]], obj: Any) -> AsyncIterator[Any]:
        """Run a request that names a session: hold it while the session's KV comes back, then let it go.

        Raises:
            ValueError: a bad session id, or a key that no caller may use; SGLang answers 400.
        """
        refuse_private_keys(obj)
        key = session_key(obj)
        known = self._know(key)
        known.not_pausable = why_not_pausable(obj) or known.not_pausable
        self._start_idle_pauses()
        start = time.monotonic()
        async with self.gate.request(key.digest, self._settings.hold_deadline_s):
            report: Answer = {}
            if not (known.active and known.told):
                report = await asyncio.shield(self._hold(key, hold_argument(obj)))
                # Else nobody has answered, or it was too early to know: the next request asks again.
                known.told = report.get("state", "resuming") != "resuming"
                known.private = report.get("lossy_since") or known.private
            held_ms = round(1000 * (time.monotonic() - start), 3)
            known.last_used = time.monotonic()
            try:
                with ExitStack() as as_private:
                    as_private.enter_context(private_request(obj, key, known.private))
                    async for out in generate():
                        as_private.close()
                        known.active = known.active or not was_aborted(out)  # a rejected one leaves it paused
                        yield annotate(out, report, held_ms, exact=known.private is None)
            finally:
                known.last_used = time.monotonic()

    def _hold(self, key: SessionKey, argument: str) -> asyncio.Task[Answer]:
        """The hold of a session: one for all requests that wait for it. It is as long as the first needs."""
        task = self._holds.get(key.digest)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._ask_to_hold(key, argument))
            self._holds[key.digest] = task
            task.add_done_callback(lambda _: self._holds.pop(key.digest, None))
        return task

    async def _ask_to_hold(self, key: SessionKey, argument: str) -> Answer:
        try:
            return await self.channel.ask("hold", key, self._settings.hold_deadline_s + 1.0, argument)
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

    async def resume(
        self,
        key: SessionKey,
        target: str = "memory",
        strategy: str | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Bring the session to memory, or to the device by a restore.planner.Strategy (None: the best).

        Raises:
            BadRequest: a target or strategy there is not; nothing was asked.
            SessionBusy, UnknownSession, AnswerError
        """
        argument = resume_argument(target, strategy)
        Wish.read(argument)  # not after waiting for a turn
        if self.gate.running(key.digest):
            return await self.show(key) | {"target": target, "reason": "a request of the session is running"}
        return await self._alone("resume", key, timeout_s, argument)

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
        return await self.channel.ask("import", argument=str(path))

    async def show(self, key: SessionKey) -> Answer:
        """One session.

        Raises:
            AnswerError
        """
        return await self.channel.ask("show", key)

    async def plan(self, key: SessionKey) -> Answer:
        """What a resume of the session would do now. Nothing is done.

        Raises:
            AnswerError
        """
        return await self.channel.ask("plan", key)

    async def timeline(self, key: SessionKey) -> Answer:
        """What the last restore of the session did, when.

        Raises:
            AnswerError
        """
        return await self.channel.ask("timeline", key)

    async def rates(self) -> Answer:
        """What the planner counts with."""
        return await self.channel.ask("rates")

    async def calibrate(self) -> Answer:
        """Measure the rates: once for all who ask meanwhile, and to its end whoever goes.

        Raises:
            SessionBusy: it takes too long.
            AnswerError
        """
        task = self._calibration
        if task is None or task.done():
            loop = asyncio.get_running_loop()
            task = loop.create_task(self.channel.ask("calibrate", timeout_s=_CALIBRATE_S))
            task.add_done_callback(self._verb_done)
            self._calibration = task
        return await asyncio.shield(task)

    async def overview(self) -> Answer:
        """All sessions, the tiers and the counters."""
        return await self.channel.ask("list")

    def on_answer(self, message: KrulControlReqOutput) -> None:
        """Called by SGLang's receiving loop."""
        self.channel.on_answer(message)

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
            if verb == "forget":
                return await self._forget_for_good(key)
            return await self.channel.ask(verb, key, argument=argument)

    async def _forget_for_good(self, key: SessionKey) -> Answer:
        """A session that is gone lives in no private namespace: should it come again, it is a new one."""
        try:
            answer = await self.channel.ask("forget", key)
        except AnswerError as error:
            if error.kind == UnknownSession.__name__:
                self._known.pop(key.digest, None)
            raise
        self._known.pop(key.digest, None)
        return answer

    async def _pause_for_good(self, key: SessionKey, timeout_s: float) -> Answer:
        """Pause, and again if a request ended beside it: one without its client ends a little later."""
        give_up = time.monotonic() + max(timeout_s, _WIND_DOWN_S)
        while True:
            answer = await self.channel.ask("pause", key)
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

"""Questions to the scheduler, and which answer belongs to which."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from sgl_krul.engine.messages import KrulControlReqInput, KrulControlReqOutput
from sgl_krul.errors import SessionBusy
from sgl_krul.session.record import SessionKey

__all__ = ["Answer", "AnswerError", "Channel"]

Answer = dict[str, Any]


class AnswerError(Exception):
    """The scheduler answered a verb with an error: its HTTP status, the name of its class, its message."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class Channel:
    """Many questions may be under way. `send` takes a message to the scheduler, `listen` is called before."""

    def __init__(self, send: Callable[[KrulControlReqInput], None], listen: Callable[[], None]) -> None:
        self._send = send
        self._listen = listen
        self._answers: dict[str, asyncio.Future[KrulControlReqOutput]] = {}

    async def ask(
        self, verb: str, key: SessionKey | None = None, timeout_s: float | None = None, argument: str = ""
    ) -> Answer:
        """Ask for one verb, of a session or of none; wait for the answer, `timeout_s` at most.

        Raises:
            AnswerError: the scheduler refuses.
            SessionBusy: no answer came in time. It may still be at work on it.
        """
        what = verb if key is None else f"{verb} of session {key.session_id!r}"
        key = key or SessionKey("")
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
            raise SessionBusy(f"{what} took longer than {timeout_s:g} s") from error
        finally:
            self._answers.pop(request_id, None)
        if answer.status != 200:
            raise AnswerError(answer.status, answer.body["type"], answer.body["message"])
        return answer.body

    def on_answer(self, message: KrulControlReqOutput) -> None:
        """Called by SGLang's receiving loop. An answer nobody waits for any more is dropped."""
        future = self._answers.pop(message.request_id, None)
        if future is not None and not future.done():
            future.set_result(message)

    def check(self) -> list[str]:
        """Questions somebody still waits for."""
        return [f"{request_id}: not answered yet" for request_id in self._answers]

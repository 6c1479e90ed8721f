"""The front end's side: requests of paused sessions wait here until their KV is in memory; verbs come and go.

Runs in the event loop of SGLang's tokenizer manager. The scheduler's process does the work; here is only who
may go when (`SessionGate`), what has to be asked first (the hold), and how long anybody waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from sgl_krul.config import Config
from sgl_krul.engine.gate import SessionGate
from sgl_krul.engine.messages import KrulControlReqInput, KrulControlReqOutput
from sgl_krul.errors import SessionBusy, StoreUnavailable, UnknownSession
from sgl_krul.session.record import SessionKey, validate_session_id

__all__ = ["AnswerError", "FrontEnd"]

logger = logging.getLogger(__name__)

Answer = dict[str, Any]


class AnswerError(Exception):
    """The scheduler answered a verb with an error: its HTTP status, the name of its class, its message."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


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
        self._active: dict[str, tuple[SessionKey, float]] = {}
        self._not_pausable: dict[str, str] = {}
        self._idle_task: asyncio.Task[None] | None = None

    # ---- requests ----

    async def serve(self, generate: Callable[[], AsyncIterator[Any]], obj: Any) -> AsyncIterator[Any]:
        """Run a request that names a session: hold it while the session's KV comes to memory, then let it go.

        Raises:
            ValueError: a bad session id; SGLang answers 400.
        """
        key = _key_of(obj)
        reason = _why_not_pausable(obj)
        if reason:
            self._not_pausable[key.digest] = reason
        self._start_idle_pauses()
        start = time.monotonic()
        async with self.gate.request(key.digest, self._settings.hold_deadline_s):
            report = await self._hold(key)
            held_ms = round(1000 * (time.monotonic() - start), 3)
            self._active[key.digest] = (key, time.monotonic())
            try:
                async for out in generate():
                    yield _annotate(out, report, held_ms)
            finally:
                self._active[key.digest] = (key, time.monotonic())

    async def _hold(self, key: SessionKey) -> Answer:
        """Ask the scheduler to bring the session to memory; {} when it is known to be active."""
        if key.digest in self._active:
            return {}
        try:
            return await self._ask("hold", key, self._settings.hold_deadline_s + 1.0)
        except (AnswerError, SessionBusy, StoreUnavailable) as error:
            logger.warning("session %r goes on without its stored KV: %s", key.session_id, error)
            return {"reason": str(error)}

    # ---- verbs ----

    async def pause(self, key: SessionKey, timeout_s: float | None = None) -> Answer:
        """Pause the session once its running requests are done.

        Raises:
            SessionBusy, UnknownSession, AnswerError
        """
        reason = self._not_pausable.get(key.digest)
        if reason is not None:
            raise SessionBusy(
                f"session {key.session_id!r} can't be paused: {reason}. Delete it, or let it age."
            )
        async with self.gate.alone(key.digest, key.session_id, self._timeout(timeout_s)):
            answer = await self._ask("pause", key, None)
            self._active.pop(key.digest, None)
            return answer

    async def resume(self, key: SessionKey, timeout_s: float | None = None) -> Answer:
        """Bring the session to memory.

        Raises:
            SessionBusy, UnknownSession, AnswerError
        """
        if self.gate.running(key.digest):
            return await self._ask("show", key, None) | {"reason": "a request of the session is running"}
        async with self.gate.alone(key.digest, key.session_id, self._timeout(timeout_s)):
            return await self._ask("resume", key, None)

    async def forget(self, key: SessionKey, timeout_s: float | None = None) -> Answer:
        """Delete the session everywhere.

        Raises:
            SessionBusy, UnknownSession, AnswerError
        """
        async with self.gate.alone(key.digest, key.session_id, self._timeout(timeout_s)):
            answer = await self._ask("forget", key, None)
            self._active.pop(key.digest, None)
            self._not_pausable.pop(key.digest, None)
            return answer

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

    async def _ask(self, verb: str, key: SessionKey, timeout_s: float | None) -> Answer:
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

    def _timeout(self, timeout_s: float | None) -> float:
        return self._settings.busy_timeout_s if timeout_s is None else timeout_s

    def _start_idle_pauses(self) -> None:
        if self._settings.idle_pause_s > 0 and self._idle_task is None:
            self._idle_task = asyncio.get_running_loop().create_task(self._pause_idle_sessions())

    async def _pause_idle_sessions(self) -> None:
        """Pause what was silent for `idle_pause_s`. One that can't be paused now is tried again later."""
        idle_s = self._settings.idle_pause_s
        while True:
            await asyncio.sleep(min(idle_s, 5.0) / 4)
            silent_since = time.monotonic() - idle_s
            for digest, (key, last) in list(self._active.items()):
                if last > silent_since or self.gate.running(digest) or digest in self._not_pausable:
                    continue
                try:
                    await self.pause(key, timeout_s=0)
                except (AnswerError, SessionBusy) as error:
                    if isinstance(error, AnswerError) and error.kind == UnknownSession.__name__:
                        self._active.pop(digest, None)
                        continue
                    logger.warning("idle session %r was not paused: %s", key.session_id, error)
                    self._active[digest] = (key, time.monotonic())


def _key_of(obj: Any) -> SessionKey:
    """The session a request names. Salts that are lists belong to batches, which are never paused."""
    try:
        session_id = validate_session_id(obj.session_id)
    except Exception as error:
        raise ValueError(str(error)) from error
    salts = [getattr(obj, name, None) for name in ("cache_salt", "extra_key")]
    return SessionKey(session_id, *(salt if isinstance(salt, str) and salt else None for salt in salts))


def _why_not_pausable(obj: Any) -> str:
    """Empty for a plain chat request."""
    sampling = getattr(obj, "sampling_params", None)
    if isinstance(getattr(obj, "text", None), list) or isinstance(sampling, list):
        return "it was used for a batch of prompts"
    ids = getattr(obj, "input_ids", None)
    if ids and isinstance(ids[0], list):
        return "it was used for a batch of prompts"
    if isinstance(sampling, dict) and (sampling.get("n") or 1) > 1:
        return "it was used with n > 1"
    if not hasattr(obj, "return_logprob"):
        return "it was used for embeddings"
    if any(getattr(obj, name, None) for name in ("image_data", "video_data", "audio_data", "input_embeds")):
        return "it was used with images, audio, video or embeddings"
    return ""


def _annotate(out: Any, report: Answer, held_ms: float) -> Any:
    """Tell in `meta_info` how many tokens really came from the store."""
    meta = out.get("meta_info") if isinstance(out, dict) else None
    if isinstance(meta, dict):
        restored = (meta.get("cached_tokens_details") or {}).get("host", 0)
        origin = report.get("restored_from", "nowhere")
        if origin == "nowhere" and restored:
            origin = "memory"  # the write-through had kept them
        meta["krul"] = {
            "restored_tokens": restored,
            "restored_from": origin if restored else "nowhere",
            "held_ms": held_ms,
            "corrupt_chunks": report.get("corrupt_chunks", 0),
            "reason": report.get("reason", ""),
        }
    return out

"""The session routes, on SGLang's own port and under its API key."""

from __future__ import annotations

import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from sgl_krul.api.archives import read_pieces, save_body, workplace
from sgl_krul.api.plans import CalibrateResult, RatesInfo, SessionPlan, SessionTimeline
from sgl_krul.api.schemas import (
    DeleteResult,
    ErrorBody,
    ExportRequest,
    MoveRequest,
    MoveResult,
    Overview,
    PauseRequest,
    PauseResult,
    ResumeRequest,
    ResumeResult,
    SessionInfo,
)
from sgl_krul.engine.frontend import AnswerError, FrontEnd
from sgl_krul.errors import KrulError
from sgl_krul.session.record import SessionKey, validate_session_id

__all__ = ["make_router"]

_ERRORS: dict[int | str, dict[str, Any]] = {code: {"model": ErrorBody} for code in (400, 404, 409, 503, 507)}


def make_router(front: FrontEnd) -> APIRouter:
    """The routes over `front`. An id may hold slashes; send it percent-encoded."""
    router = APIRouter()
    router.include_router(_sessions(front))
    router.include_router(_restore(front))
    return router


def _sessions(front: FrontEnd) -> APIRouter:
    router = APIRouter(prefix="/v1/sessions", tags=["sessions"])

    @router.get("", response_model=Overview)
    async def list_sessions() -> Any:
        """All sessions this server knows, its tiers and counters."""
        return await _answer(front.overview(), Overview)

    @router.post("/{session_id:path}/pause", response_model=PauseResult, responses=_ERRORS)
    async def pause(session_id: str, body: PauseRequest | None = None) -> Any:
        """Store the session's KV and free its device pages. A running turn is waited for."""
        body = body or PauseRequest()
        return await _verb(session_id, body, lambda key: front.pause(key, body.timeout_s), PauseResult)

    @router.post("/{session_id:path}/resume", response_model=ResumeResult, responses=_ERRORS)
    async def resume(session_id: str, body: ResumeRequest | None = None) -> Any:
        """Bring the session to memory, or to the device. The next request does that by itself."""
        body = body or ResumeRequest()
        return await _verb(
            session_id,
            body,
            lambda key: front.resume(key, body.target, body.strategy, body.timeout_s),
            ResumeResult,
        )

    _add_reports(router, front)

    @router.get("/{session_id:path}", response_model=SessionInfo, responses=_ERRORS)
    async def show(session_id: str, cache_salt: str | None = None, extra_key: str | None = None) -> Any:
        """One session."""
        salts = PauseRequest(cache_salt=cache_salt, extra_key=extra_key)
        return await _verb(session_id, salts, front.show, SessionInfo)

    @router.delete("/{session_id:path}", response_model=DeleteResult, responses=_ERRORS)
    async def delete(session_id: str, cache_salt: str | None = None, extra_key: str | None = None) -> Any:
        """Delete the session everywhere."""
        salts = PauseRequest(cache_salt=cache_salt, extra_key=extra_key)
        return await _verb(session_id, salts, front.forget, DeleteResult)

    _add_transfers(router, front)
    return router


def _add_reports(router: APIRouter, front: FrontEnd) -> None:
    """What a restore would do, and what it did. Before the route of a session alone, which takes all."""

    @router.get("/{session_id:path}/plan", response_model=SessionPlan, responses=_ERRORS)
    async def plan(
        request: Request, session_id: str, cache_salt: str | None = None, extra_key: str | None = None
    ) -> Any:
        """What a resume would do now, and why."""
        return await _report(request, session_id, cache_salt, extra_key, front, "plan")

    @router.get("/{session_id:path}/timeline", response_model=SessionTimeline, responses=_ERRORS)
    async def timeline(
        request: Request, session_id: str, cache_salt: str | None = None, extra_key: str | None = None
    ) -> Any:
        """What the last restore of the session did, when."""
        return await _report(request, session_id, cache_salt, extra_key, front, "timeline")


async def _report(
    request: Request,
    session_id: str,
    cache_salt: str | None,
    extra_key: str | None,
    front: FrontEnd,
    name: str,
) -> Any:
    salts = PauseRequest(cache_salt=cache_salt, extra_key=extra_key)
    # The path is decoded already. Whether its last slash was one of the id (%2F) only the raw one tells.
    raw: bytes | None = request.scope.get("raw_path")
    if raw is not None and not raw.partition(b"?")[0].endswith(f"/{name}".encode()):
        session = await _verb(f"{session_id}/{name}", salts, front.show, SessionInfo)
        return session if isinstance(session, JSONResponse) else JSONResponse(session.model_dump(mode="json"))
    if name == "plan":
        return await _verb(session_id, salts, front.plan, SessionPlan)
    return await _verb(session_id, salts, front.timeline, SessionTimeline)


def _restore(front: FrontEnd) -> APIRouter:
    """What belongs to no session: the rates that plans are made from."""
    router = APIRouter(prefix="/v1/restore", tags=["restore"])

    @router.post("/calibrate", response_model=CalibrateResult, responses=_ERRORS)
    async def calibrate() -> Any:
        """Measure the rates on this server; takes up to a minute. Who asks meanwhile gets the same answer."""
        return await _answer(front.calibrate(), CalibrateResult)

    @router.get("/rates", response_model=RatesInfo, responses=_ERRORS)
    async def rates() -> Any:
        """The rates of recomputing and loading, and whether they were measured."""
        return await _answer(front.rates(), RatesInfo)

    return router


def _add_transfers(router: APIRouter, front: FrontEnd) -> None:
    """The routes that take a stored session elsewhere."""

    @router.post("/{session_id:path}/move", response_model=MoveResult, responses=_ERRORS)
    async def move(session_id: str, body: MoveRequest) -> Any:
        """Put a paused session into one tier, and nowhere else."""
        return await _verb(session_id, body, lambda key: front.move(key, body.to, body.timeout_s), MoveResult)

    @router.post("/{session_id:path}/export", response_class=StreamingResponse, responses=_ERRORS)
    async def export(session_id: str, body: ExportRequest | None = None) -> Any:
        """A paused session as one file, checksummed. Import it where the same model is served."""
        body = body or ExportRequest()
        try:
            with workplace() as place:
                path = place / "session.krul"
                answer = await _verb(
                    session_id, body, lambda key: front.export(key, path, body.timeout_s), SessionInfo
                )
                if isinstance(answer, JSONResponse):
                    return answer
                file = path.open("rb")  # which outlives its name: nothing stays, however the sending ends
        except OSError as error:
            return _no_place(error)
        length = {"Content-Length": str(os.fstat(file.fileno()).st_size)}
        return StreamingResponse(read_pieces(file), media_type="application/octet-stream", headers=length)

    @router.post("/import", response_model=SessionInfo, responses=_ERRORS)
    async def take_in(request: Request) -> Any:
        """Store the session of an exported file, which is the body. It is a paused session then."""
        try:
            with workplace() as place:
                path = place / "session.krul"
                await save_body(request.stream(), path)
                return await _answer(front.take_in(path), SessionInfo, file=path)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it
        except OSError as error:
            return _no_place(error)


async def _verb(session_id: str, body: Any, call: Any, model: type[BaseModel]) -> Any:
    try:
        key = SessionKey(validate_session_id(session_id), body.cache_salt or None, body.extra_key or None)
    except KrulError as error:
        return _error(error.status, type(error).__name__, str(error))
    return await _answer(call(key), model)


async def _answer(
    call: Awaitable[dict[str, Any]], model: type[BaseModel], *, file: Path | None = None
) -> Any:
    """The answer, or the error; where that one names `file`, the caller knows it by another name."""
    try:
        return model.model_validate(await call)
    except AnswerError as error:
        message = str(error) if file is None else str(error).replace(str(file), "the file")
        return _error(error.status, error.kind, message)
    except KrulError as error:
        return _error(error.status, type(error).__name__, str(error))


def _no_place(error: OSError) -> JSONResponse:
    return _error(
        507, "StoreFull", f"no room for the session's file ({error}): free some space in the cache directory"
    )


def _error(status: int, kind: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"type": kind, "message": message}}, status_code=status)

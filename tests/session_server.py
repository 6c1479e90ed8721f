"""A real HTTP server with the real session routes; behind them a small front end in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from sgl_krul.api.routes import make_router
from sgl_krul.engine.frontend import AnswerError, FrontEnd
from sgl_krul.engine.messages import resume_argument
from sgl_krul.service.wish import Wish
from sgl_krul.session.record import SessionKey

KEY = "secret"


@dataclass
class MemoryFront:
    """Sessions in a dict. It answers as FrontEnd does, and raises AnswerError or `failure`."""

    sessions: dict[SessionKey, dict[str, Any]] = field(default_factory=dict)
    failure: Exception | None = None
    timeouts: list[float | None] = field(default_factory=list)
    content: bytes = b""  # of every exported session
    imported: bytes = b""
    restores: dict[str, dict[str, Any]] = field(default_factory=dict)  # answers of plan, timeline, rates, ...
    load: dict[str, Any] = field(default_factory=dict)
    resumed: list[tuple[str, str | None]] = field(default_factory=list)

    def add(self, key: SessionKey) -> None:
        self.sessions[key] = {
            "session_id": key.session_id,
            "salted": key[1:] != (None, None),
            "state": "active",
            "tokens": 100,
            "stored_tokens": 0,
            "bytes_raw": 0,
            "bytes_stored": 0,
            "tier": "device",
            "exact": True,
            "corrupt_chunks": 0,
            "last_used": 1.0,
        }

    def _find(self, key: SessionKey) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        if key not in self.sessions:
            raise AnswerError(404, "UnknownSession", f"no session {key.session_id!r}: list them")
        return self.sessions[key]

    async def overview(self) -> dict[str, Any]:
        tiers = {"memory": {"bytes": 1, "objects": 1, "capacity_bytes": 10}}
        sessions = list(self.sessions.values())
        rest = {"counters": {"pauses": 1}, "load": self.load, "namespace": "n"}
        return {"sessions": sessions, "tiers": tiers} | rest

    async def show(self, key: SessionKey) -> dict[str, Any]:
        return self._find(key)

    async def pause(self, key: SessionKey, timeout_s: float | None = None) -> dict[str, Any]:
        self.timeouts.append(timeout_s)
        session = self._find(key)
        before = session["state"] == "paused"
        session |= {"state": "paused", "tier": "ssd", "stored_tokens": 96}
        return session | {"already_paused": before}

    async def resume(
        self,
        key: SessionKey,
        target: str = "memory",
        strategy: str | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        Wish.read(resume_argument(target, strategy))
        self.resumed.append((target, strategy))
        restored = {"restored_tokens": 96, "recompute_tokens": 4, "restored_from": "ssd"}
        return self._find(key) | restored | self.restores.get("resume", {})

    async def plan(self, key: SessionKey) -> dict[str, Any]:
        return {"session_id": self._find(key)["session_id"]} | self.restores["plan"]

    async def timeline(self, key: SessionKey) -> dict[str, Any]:
        return {"session_id": self._find(key)["session_id"]} | self.restores["timeline"]

    async def rates(self) -> dict[str, Any]:
        return self.restores["rates"]

    async def calibrate(self) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        return self.restores["rates"] | self.restores["calibrate"]

    async def forget(self, key: SessionKey, timeout_s: float | None = None) -> dict[str, Any]:
        self._find(key)
        del self.sessions[key]
        freed = {"bytes_freed": 7, "device_tokens_freed": 0}
        return {"session_id": key.session_id, "deleted": True} | freed

    async def move(self, key: SessionKey, tier: str, timeout_s: float | None = None) -> dict[str, Any]:
        paused = {"state": "paused", "tier": tier, "tiers": [tier], "stored_tokens": 96, "bytes_stored": 9}
        return self._find(key) | paused

    async def export(self, key: SessionKey, path: Path, timeout_s: float | None = None) -> dict[str, Any]:
        session = self._find(key)
        path.write_bytes(self.content)
        return session

    async def take_in(self, path: Path) -> dict[str, Any]:
        self.imported = path.read_bytes()
        if self.imported == b"bad":
            raise AnswerError(400, "BadArchive", f"{path} is damaged: export the session again")
        return self._find(SessionKey("chat")) | {"state": "paused"}


def make_app(front: MemoryFront) -> FastAPI:
    """The server, without what generates. All but /health asks for KEY."""
    app = FastAPI()

    @app.middleware("http")
    async def key(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}" and request.url.path != "/health":
            return JSONResponse({"error": "Unauthorized"}, status_code=401)  # SGLang's words
        return await proceed(request)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": "demo", "object": "model", "created": 1, "owned_by": "us"}
        return {"object": "list", "data": [model]}

    app.include_router(make_router(cast(FrontEnd, front)))
    return app


def serve(app: FastAPI) -> Iterator[str]:
    """Run it while the caller uses the URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()

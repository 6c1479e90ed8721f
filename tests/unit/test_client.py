"""KrulClient against a real HTTP server with the real routes; behind them a small front end in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from sgl_krul.api.client import KrulClient
from sgl_krul.api.routes import make_router
from sgl_krul.engine.frontend import AnswerError, FrontEnd
from sgl_krul.errors import (
    InvalidSessionId,
    KrulError,
    SessionBusy,
    StoreFull,
    StoreUnavailable,
    UnknownSession,
)
from sgl_krul.session.record import SessionKey

KEY = "secret"
IDS = [
    "plain",
    "a/b/c",
    "../x",
    "..",
    ".",
    "a b",
    "ü€漢",
    "x/pause",
    "x%2Fy",
    "?q=1#f",
    "v1.2",
    "a//b",
    "/",
    "+&=",
]


@dataclass
class MemoryFront:
    """Sessions in a dict. It answers as FrontEnd does, and raises AnswerError or `failure`."""

    sessions: dict[SessionKey, dict[str, Any]] = field(default_factory=dict)
    failure: Exception | None = None
    timeouts: list[float | None] = field(default_factory=list)

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
        return {"sessions": sessions, "tiers": tiers, "counters": {"pauses": 1}, "load": {}, "namespace": "n"}

    async def show(self, key: SessionKey) -> dict[str, Any]:
        return self._find(key)

    async def pause(self, key: SessionKey, timeout_s: float | None = None) -> dict[str, Any]:
        self.timeouts.append(timeout_s)
        session = self._find(key)
        before = session["state"] == "paused"
        session |= {"state": "paused", "tier": "ssd", "stored_tokens": 96}
        return session | {"already_paused": before}

    async def resume(self, key: SessionKey, timeout_s: float | None = None) -> dict[str, Any]:
        return self._find(key) | {"restored_tokens": 96, "recompute_tokens": 4, "restored_from": "ssd"}

    async def forget(self, key: SessionKey, timeout_s: float | None = None) -> dict[str, Any]:
        self._find(key)
        del self.sessions[key]
        freed = {"bytes_freed": 7, "device_tokens_freed": 0}
        return {"session_id": key.session_id, "deleted": True} | freed


@dataclass
class Server:
    url: str
    front: MemoryFront


def make_app(front: MemoryFront) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def key(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}" and request.url.path != "/health":
            return JSONResponse({"error": "Unauthorized"}, status_code=401)  # SGLang's words
        return await proceed(request)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    app.include_router(make_router(cast(FrontEnd, front)))
    return app


def serve(app: FastAPI) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    front = MemoryFront()
    for url in serve(make_app(front)):
        yield Server(url, front)


@pytest.fixture
def server(running: Server) -> Server:
    running.front.sessions.clear()
    running.front.timeouts.clear()
    running.front.failure = None
    return running


@pytest.fixture
def krul(server: Server) -> Iterator[KrulClient]:
    with KrulClient(server.url, KEY, timeout_s=10) as client:
        yield client


@pytest.fixture(scope="module")
def plain_server() -> Iterator[str]:
    """A server without our routes."""
    yield from serve(FastAPI())


@pytest.mark.parametrize("session_id", IDS)
def test_every_verb_reaches_the_session_of_that_id(krul: KrulClient, server: Server, session_id: str) -> None:
    server.front.add(SessionKey(session_id))
    server.front.add(SessionKey("another"))
    assert krul.session(session_id).session_id == session_id
    assert not krul.pause(session_id).already_paused
    assert krul.pause(session_id).already_paused
    resumed = krul.resume(session_id)
    assert (resumed.session_id, resumed.restored_tokens, resumed.restored_from) == (session_id, 96, "ssd")
    assert krul.delete(session_id).bytes_freed == 7
    assert [session.session_id for session in krul.sessions().sessions] == ["another"]
    with pytest.raises(UnknownSession):
        krul.session(session_id)


def test_salts_and_timeout_are_sent(krul: KrulClient, server: Server) -> None:
    server.front.add(SessionKey("a", "salt", "extra"))
    assert krul.pause("a", timeout_s=1.5, cache_salt="salt", extra_key="extra").salted
    assert server.front.timeouts == [1.5]
    assert krul.session("a", cache_salt="salt", extra_key="extra").state == "paused"
    assert krul.resume("a", cache_salt="salt", extra_key="extra").restored_tokens == 96
    with pytest.raises(UnknownSession):
        krul.delete("a", cache_salt="other")
    assert krul.delete("a", cache_salt="salt", extra_key="extra").deleted


@pytest.mark.parametrize("session_id", ["", "x" * 257, "a\0b", "a\nb", "\ud800"])
def test_bad_ids(krul: KrulClient, session_id: str) -> None:
    with pytest.raises(InvalidSessionId, match="1 to 256 characters"):
        krul.pause(session_id)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (AnswerError(404, "UnknownSession", "no such thing"), UnknownSession),
        (SessionBusy("a turn is running"), SessionBusy),
        (AnswerError(409, "SessionBusy", "pausing right now"), SessionBusy),
        (AnswerError(507, "StoreFull", "/data is full"), StoreFull),
        (StoreUnavailable("/data: EIO"), StoreUnavailable),
        (AnswerError(500, "KrulError", "internal error"), KrulError),
    ],
)
def test_errors_of_the_server(
    krul: KrulClient, server: Server, failure: Exception, expected: type[KrulError]
) -> None:
    server.front.failure = failure
    with pytest.raises(KrulError) as caught:
        krul.pause("a")
    assert type(caught.value) is expected
    assert str(caught.value) == str(failure)


def test_a_timeout_that_the_server_refuses(krul: KrulClient) -> None:
    with pytest.raises(KrulError, match="HTTP 422"):
        krul.pause("a", timeout_s=-1)


@pytest.mark.parametrize("key", [None, "wrong"])
def test_wrong_key(server: Server, key: str | None) -> None:
    with KrulClient(server.url, key) as client:
        assert client.health()
        with pytest.raises(KrulError, match=r"refuses the API key \(HTTP 401\).*KRUL_API_KEY"):
            client.sessions()


def test_a_server_without_our_routes(plain_server: str) -> None:
    with KrulClient(plain_server) as client:
        assert not client.health()
        for call in (client.sessions, lambda: client.pause("a"), lambda: client.session("a")):
            with pytest.raises(KrulError, match=r"has no session routes .*--radix-cache-backend krul"):
                call()


def test_no_server(server: Server) -> None:
    with KrulClient("http://127.0.0.1:9", timeout_s=2) as client:
        assert not client.health()
        with pytest.raises(KrulError, match=r"no server can be reached at http://127.0.0.1:9 .*krul serve"):
            client.sessions()


@pytest.mark.parametrize("url", ["", "localhost:30000", "ftp://x", "http://", "http://a:b"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(KrulError, match="give one such as"):
        KrulClient(url)


def test_a_url_of_the_openai_kind(server: Server) -> None:
    with KrulClient(f"{server.url}/v1/", KEY) as client:
        assert client.base_url == server.url
        assert client.sessions().namespace == "n"


def test_close_twice(server: Server) -> None:
    client = KrulClient(server.url, KEY)
    client.close()
    client.close()

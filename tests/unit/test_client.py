"""KrulClient against a real HTTP server with the real routes; behind them a small front end in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from fastapi import FastAPI

from sgl_krul import errors
from sgl_krul.api.client import KrulClient
from sgl_krul.engine.frontend import AnswerError
from sgl_krul.errors import (
    Corrupt,
    InvalidSessionId,
    KrulError,
    SessionBusy,
    StoreFull,
    StoreUnavailable,
    UnknownSession,
)
from sgl_krul.session.record import SessionKey
from tests.session_server import KEY, MemoryFront, make_app, serve

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
class Server:
    url: str
    front: MemoryFront


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


OURS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KrulError)]


@pytest.mark.parametrize("kind", OURS)
def test_every_error_arrives_as_what_it_was(krul: KrulClient, server: Server, kind: type[KrulError]) -> None:
    raised = Corrupt("length", "chunk 7 is cut off") if kind is Corrupt else kind("'a': 2 found, give 1")
    server.front.failure = raised
    with pytest.raises(KrulError) as caught:
        krul.pause("a")
    assert (type(caught.value), str(caught.value)) == (kind, str(raised))


def test_every_error_can_be_told_apart() -> None:
    assert len(OURS) > 12
    assert {kind.__name__ for kind in OURS} <= set(errors.__all__)


@pytest.mark.parametrize(
    ("status", "expected"),
    [(409, SessionBusy), (507, StoreFull), (400, KrulError), (500, KrulError), (503, KrulError)],
)
def test_errors_of_a_class_that_is_not_known_here(
    krul: KrulClient, server: Server, status: int, expected: type[KrulError]
) -> None:
    server.front.failure = AnswerError(status, "ErrorOfTomorrow", "what it says")
    with pytest.raises(KrulError, match=rf"/v1/sessions/a/pause with HTTP {status}: what it says") as caught:
        krul.pause("a")
    assert type(caught.value) is expected


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

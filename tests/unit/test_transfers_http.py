"""Sessions that travel by HTTP and by the `krul` command: move, export, import; over the real routes."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from sgl_krul.api.archives import save_body, workplace
from sgl_krul.api.client import KrulClient
from sgl_krul.cli import main
from sgl_krul.engine.frontend import AnswerError
from sgl_krul.errors import BadArchive, Corrupt, KrulError, Missing, SessionBusy, UnknownSession, UnknownTier
from sgl_krul.session.record import SessionKey
from tests.session_server import KEY, MemoryFront, make_app, serve

CONTENT = bytes(range(256)) * 5000


@pytest.fixture(scope="module")
def front() -> MemoryFront:
    return MemoryFront()


@pytest.fixture(scope="module")
def url(front: MemoryFront) -> Iterator[str]:
    yield from serve(make_app(front))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory, where files lie on their way through the server."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sgl-krul" / "transfers"


@pytest.fixture
def krul(url: str, front: MemoryFront, cache: Path) -> Iterator[KrulClient]:
    front.sessions.clear()
    front.failure = None
    front.add(SessionKey("chat"))
    with KrulClient(url, KEY) as client:
        yield client
    assert not cache.exists() or list(cache.iterdir()) == []  # nothing stays on the server


def test_export_and_import(krul: KrulClient, front: MemoryFront, tmp_path: Path) -> None:
    front.content = CONTENT
    file = tmp_path / "chat.krul"
    file.write_bytes(b"older")
    assert krul.export_session("chat", file) == len(CONTENT)
    assert file.read_bytes() == CONTENT
    assert krul.import_session(file).session_id == "chat"
    assert front.imported == CONTENT


def test_a_failed_export_leaves_the_file_as_it_was(
    krul: KrulClient, front: MemoryFront, tmp_path: Path
) -> None:
    file = tmp_path / "chat.krul"
    file.write_bytes(b"older")
    with pytest.raises(UnknownSession, match="'other'"):
        krul.export_session("other", file)
    front.failure = SessionBusy("session 'chat' can't be exported: it is active")
    with pytest.raises(SessionBusy, match="it is active"):
        krul.export_session("chat", file)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["chat.krul"]
    assert file.read_bytes() == b"older"


def test_an_import_that_is_refused_does_not_name_the_servers_path(
    krul: KrulClient, front: MemoryFront, tmp_path: Path
) -> None:
    file = tmp_path / "bad"
    file.write_bytes(b"bad")
    with pytest.raises(BadArchive, match=r"^the file is damaged"):
        krul.import_session(file)


def test_move(krul: KrulClient, front: MemoryFront) -> None:
    assert krul.move("chat", "redis").tiers == ["redis"]
    front.failure = UnknownTier("there is no tier 'tape' here: expected one of ssd, redis")
    with pytest.raises(UnknownTier, match="no tier 'tape'"):
        krul.move("chat", "tape")


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (UnknownTier("there is no tier 'tape' here"), 400, "UnknownTier"),
        (AnswerError(400, "UnknownTier", "there is no tier 'tape' here"), 400, "UnknownTier"),
        (SessionBusy("session 'chat' is active"), 409, "SessionBusy"),
        (Missing("chunk 3 of session 'chat' has gone"), 500, "Missing"),
        (Corrupt("checksum", "chunk 3 of session 'chat'"), 500, "Corrupt"),
        (AnswerError(500, "KrulError", "internal error"), 500, "KrulError"),
    ],
)
@pytest.mark.parametrize("verb", ["move", "export"])
def test_what_fails_is_answered_in_json(
    krul: KrulClient, front: MemoryFront, url: str, verb: str, failure: Exception, status: int, kind: str
) -> None:
    front.failure = failure
    answer = httpx.post(
        f"{url}/v1/sessions/chat/{verb}",
        json={"to": "tape"} if verb == "move" else None,
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=30,
    )
    assert (answer.status_code, answer.headers["Content-Type"]) == (status, "application/json")
    assert answer.json() == {"error": {"type": kind, "message": str(failure)}}


def test_a_move_must_say_where_to(krul: KrulClient, url: str) -> None:
    answer = httpx.post(
        f"{url}/v1/sessions/chat/move", json={}, headers={"Authorization": f"Bearer {KEY}"}, timeout=30
    )
    assert answer.status_code == 422
    assert "to" in answer.text


def test_what_a_killed_server_left_goes_after_a_day(cache: Path) -> None:
    cache.mkdir(parents=True)
    old, new = cache / "old", cache / "new"
    for place in (old, new):
        place.mkdir()
        (place / "session.krul").write_bytes(b"x")
    os.utime(old, (1, 1))
    with workplace() as place:
        assert place.parent == cache
        assert (new / "session.krul").exists()
        assert not old.exists()
    assert not place.exists()


def test_workplaces_that_come_and_go_do_not_disturb_each_other(cache: Path) -> None:
    def work() -> None:
        for _ in range(50):
            with workplace() as place:
                (place / "session.krul").write_bytes(b"x")

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work) for _ in range(6)]:
            done.result()
    assert list(cache.iterdir()) == []


def test_a_client_that_goes_away_in_an_upload(cache: Path) -> None:
    front = MemoryFront()
    held: list[list[Path]] = []  # what lay on the server when the client went
    parts: Iterator[dict[str, Any]] = iter([{"type": "http.request", "body": CONTENT, "more_body": True}])

    async def receive() -> dict[str, Any]:
        part = next(parts, {"type": "http.disconnect"})
        if part["type"] == "http.disconnect":
            held.append([path for path in cache.rglob("*") if path.is_file()])
        return part

    async def send(message: dict[str, Any]) -> None:
        """To nobody."""

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/sessions/import",
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {KEY}".encode())],
    }
    asyncio.run(make_app(front)(scope, receive, send))
    assert len(held[0]) == 1
    assert list(cache.iterdir()) == []
    assert front.imported == b""


def test_no_room_for_an_upload(tmp_path: Path) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"x" * 10

    with pytest.raises(OSError, match="No space left") as caught:
        asyncio.run(save_body(body(), tmp_path / "upload", free_floor_bytes=1 << 60))
    assert caught.value.errno == errno.ENOSPC


def test_a_cache_directory_that_cannot_be_used(
    krul: KrulClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(KrulError, match=r"no room for the session's file .*cache directory"):
        krul.export_session("chat", tmp_path / "out")


def test_the_command(
    krul: KrulClient, front: MemoryFront, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    front.content = CONTENT
    where = ["--url", url, "--api-key", KEY]
    file = tmp_path / "chat.krul"

    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["sessions", *arguments, *where])
        return int(ended.value.code or 0)

    assert run("export", "chat", str(file)) == 0
    assert f"'chat' is in {file}: 1.2MiB" in capsys.readouterr().out
    assert run("import", str(file)) == 0
    assert "'chat' is paused" in capsys.readouterr().out
    assert run("move", "chat", "--to", "redis") == 0
    assert "in redis" in capsys.readouterr().out
    assert run("import", str(tmp_path / "none")) == 1
    assert f"{tmp_path / 'none'}: No such file or directory: give a file" in capsys.readouterr().err
    assert run("export", "chat", str(tmp_path / "no" / "file")) == 1
    assert "give a file that can be read or written" in capsys.readouterr().err

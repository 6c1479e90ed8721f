"""`krul chat` at its start: a session that the server knows is never replaced unasked."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from sgl_krul.cli.chat import Chat
from sgl_krul.config import ClientSettings
from sgl_krul.errors import KrulError
from sgl_krul.session.record import SessionKey
from tests.session_server import KEY, MemoryFront, make_app, serve


@pytest.fixture(scope="module")
def settings() -> Iterator[ClientSettings]:
    front = MemoryFront()
    front.add(SessionKey("trip"))
    front.add(SessionKey("salted", "salt"))
    for url in serve(make_app(front)):
        yield ClientSettings(url, KEY)


def begin(settings: ClientSettings, session_id: str | None, *, new: bool = False) -> None:
    with Chat(settings, None, session_id, new=new, max_tokens=1, temperature=0.0) as chat:
        chat.run(io.StringIO("/quit\n"))


def test_a_session_that_is_there_is_not_replaced(settings: ClientSettings) -> None:
    with pytest.raises(
        KrulError, match=r"'trip' already \(100 tokens, active\).*another id.*--new"
    ) as caught:
        begin(settings, "trip")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("session_id", "new", "shown"),
    [
        ("trip", True, "session 'trip'"),
        ("other", False, "session 'other'"),
        ("salted", False, "session 'salted'"),  # the one that is there has a salt, and stays as it is
        (None, False, "session 'chat-"),
    ],
)
def test_a_chat_begins(
    settings: ClientSettings,
    session_id: str | None,
    new: bool,
    shown: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    begin(settings, session_id, new=new)
    assert shown in capsys.readouterr().out

"""A client of the session routes: the same verbs, typed answers, the errors of sgl_krul.errors.

with KrulClient("http://127.0.0.1:30000") as krul:
    krul.pause("chat-17")
    print(krul.session("chat-17").tier)
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from sgl_krul.api.connection import Connection
from sgl_krul.api.plans import CalibrateResult, RatesInfo, SessionPlan, SessionTimeline
from sgl_krul.api.schemas import (
    DeleteResult,
    MoveResult,
    Overview,
    PauseResult,
    ResumeResult,
    SessionInfo,
)
from sgl_krul.session.record import validate_session_id

__all__ = ["KrulClient"]

_ROUTE = "/v1/sessions"
_RESTORE = "/v1/restore"
# A pause writes gigabytes: the server's own timeouts are the ones that matter.
_DEFAULT_TIMEOUT_S = 600.0


class KrulClient:
    """Talks to one server. Closed by `close()` or the end of a `with` block; threads may share it.

    `timeout_s` bounds the wait for one answer. Every method raises KrulError (or the class of it that the
    server names): also when there is no server, no krul in it, or a wrong key.
    """

    def __init__(
        self, base_url: str, api_key: str | None = None, timeout_s: float = _DEFAULT_TIMEOUT_S
    ) -> None:
        self._server = Connection(base_url, api_key, timeout_s)
        self.base_url = self._server.base_url

    def sessions(self) -> Overview:
        """All sessions, the tiers and counters."""
        return self._server.call("GET", _ROUTE, Overview)

    def session(
        self, session_id: str, *, cache_salt: str | None = None, extra_key: str | None = None
    ) -> SessionInfo:
        """One session. Salts are those the chat's requests carry."""
        return self._server.call("GET", _path(session_id), SessionInfo, params=_given(cache_salt, extra_key))

    def pause(
        self,
        session_id: str,
        *,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
        extra_key: str | None = None,
    ) -> PauseResult:
        """Store the session's KV and free its device pages.

        A running turn is waited for, `timeout_s` at most (the server's default without it), then SessionBusy.
        """
        body = _given(cache_salt, extra_key, timeout_s)
        return self._server.call("POST", f"{_path(session_id)}/pause", PauseResult, body=body)

    def resume(
        self,
        session_id: str,
        *,
        target: str | None = None,
        strategy: str | None = None,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
        extra_key: str | None = None,
    ) -> ResumeResult:
        """Bring the session back ahead of its next request, which would do it by itself.

        `target` is "memory" (what the server takes without it) or "device"; for the device `strategy` says
        how: "optimal", "load", "recompute", "half" or "paper".
        """
        body = _given(cache_salt, extra_key, timeout_s, target=target, strategy=strategy)
        return self._server.call("POST", f"{_path(session_id)}/resume", ResumeResult, body=body)

    def plan(
        self, session_id: str, *, cache_salt: str | None = None, extra_key: str | None = None
    ) -> SessionPlan:
        """What a resume would do now, and why. Nothing is done."""
        params = _given(cache_salt, extra_key)
        return self._server.call("GET", f"{_path(session_id)}/plan", SessionPlan, params=params)

    def timeline(
        self, session_id: str, *, cache_salt: str | None = None, extra_key: str | None = None
    ) -> SessionTimeline:
        """What the session's last restore did, when."""
        params = _given(cache_salt, extra_key)
        return self._server.call("GET", f"{_path(session_id)}/timeline", SessionTimeline, params=params)

    def rates(self) -> RatesInfo:
        """What the server's planner counts with."""
        return self._server.call("GET", f"{_RESTORE}/rates", RatesInfo)

    def calibrate(self) -> CalibrateResult:
        """Measure the rates of recomputing and loading; takes up to a minute."""
        return self._server.call("POST", f"{_RESTORE}/calibrate", CalibrateResult)

    def delete(
        self, session_id: str, *, cache_salt: str | None = None, extra_key: str | None = None
    ) -> DeleteResult:
        """Delete the session everywhere."""
        return self._server.call(
            "DELETE", _path(session_id), DeleteResult, params=_given(cache_salt, extra_key)
        )

    def move(
        self, session_id: str, to: str, *, cache_salt: str | None = None, extra_key: str | None = None
    ) -> MoveResult:
        """Put a paused session into one tier, "ssd" or "redis", and nowhere else."""
        body = _given(cache_salt, extra_key) | {"to": to}
        return self._server.call("POST", f"{_path(session_id)}/move", MoveResult, body=body)

    def export_session(
        self, session_id: str, file: Path, *, cache_salt: str | None = None, extra_key: str | None = None
    ) -> int:
        """Write a paused session to `file`; returns its bytes. A file that is there is replaced at the end.

        Raises OSError where the file can't be written.
        """
        path = f"{_path(session_id)}/export"
        partial = file.with_name(f".{file.name}.part")
        try:
            with self._server.stream("POST", path, json=_given(cache_salt, extra_key)) as response:
                if not response.is_success:
                    response.read()
                    self._server.refuse(response, path)
                with partial.open("wb") as out:
                    for piece in response.iter_bytes():
                        out.write(piece)
            size = partial.stat().st_size
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
        return size

    def import_session(self, file: Path) -> SessionInfo:
        """Store the session of an exported file; it is a paused session of this server then.

        Raises OSError where the file can't be read.
        """
        path = f"{_ROUTE}/import"
        with file.open("rb") as body, self._server.stream("POST", path, content=body) as response:
            response.read()
            if not response.is_success:
                self._server.refuse(response, path)
            return self._server.read(response, path, SessionInfo)

    def health(self) -> bool:
        """True when the server answers and is ready. Raises nothing but for a base URL that can't be used."""
        return self._server.health()

    def close(self) -> None:
        """Close the connections. A second time does nothing."""
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _path(session_id: str) -> str:
    """The route of a session; its id is one path segment, slashes encoded.

    Raises:
        InvalidSessionId: as the server would.
    """
    encoded = quote(validate_session_id(session_id), safe="")
    # These two would be resolved away on their way to the server.
    return f"{_ROUTE}/{encoded.replace('.', '%2E') if encoded in ('.', '..') else encoded}"


def _given(
    cache_salt: str | None, extra_key: str | None, timeout_s: float | None = None, **more: str | None
) -> dict[str, Any]:
    given = {"cache_salt": cache_salt, "extra_key": extra_key, "timeout_s": timeout_s, **more}
    return {name: value for name, value in given.items() if value is not None}

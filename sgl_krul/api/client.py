"""A client of the session routes: the same verbs, typed answers, the errors of sgl_krul.errors.

with KrulClient("http://127.0.0.1:30000") as krul:
    krul.pause("chat-17")
    print(krul.session("chat-17").tier)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, cast
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from sgl_krul import errors
from sgl_krul.api.schemas import (
    DeleteResult,
    MoveResult,
    Overview,
    PauseResult,
    ResumeResult,
    SessionInfo,
)
from sgl_krul.errors import Corrupt, CorruptReason, KrulError, SessionBusy, StoreFull
from sgl_krul.session.record import validate_session_id

__all__ = ["KrulClient"]

_M = TypeVar("_M", bound=BaseModel)

_ROUTE = "/v1/sessions"
_EXAMPLE = "http://127.0.0.1:30000"
_ERRORS: dict[str, type[KrulError]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, KrulError)
}
# For a class that only a newer server knows. SGLang and proxies answer with other statuses, too: those tell
# too little.
_BY_STATUS: dict[int, type[KrulError]] = {error.status: error for error in (SessionBusy, StoreFull)}
# A pause writes gigabytes: the server's own timeouts are the ones that matter.
_DEFAULT_TIMEOUT_S = 600.0
_CONNECT_TIMEOUT_S = 5.0


class KrulClient:
    """Talks to one server. Closed by `close()` or the end of a `with` block; threads may share it.

    `timeout_s` bounds the wait for one answer. Every method raises KrulError (or the class of it that the
    server names): also when there is no server, no krul in it, or a wrong key.
    """

    def __init__(
        self, base_url: str, api_key: str | None = None, timeout_s: float = _DEFAULT_TIMEOUT_S
    ) -> None:
        self.base_url = _checked(base_url)
        self._http = httpx.Client(
            base_url=self.base_url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S)),
            trust_env=False,  # a proxy of the environment does not lead to a server on this machine
        )

    def sessions(self) -> Overview:
        """All sessions, the tiers and counters."""
        return self._call("GET", _ROUTE, Overview)

    def session(
        self, session_id: str, *, cache_salt: str | None = None, extra_key: str | None = None
    ) -> SessionInfo:
        """One session. Salts are those the chat's requests carry."""
        return self._call("GET", _path(session_id), SessionInfo, params=_given(cache_salt, extra_key))

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
        return self._call("POST", f"{_path(session_id)}/pause", PauseResult, body=body)

    def resume(
        self,
        session_id: str,
        *,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
        extra_key: str | None = None,
    ) -> ResumeResult:
        """Bring the session to memory ahead of its next request, which would do it by itself."""
        body = _given(cache_salt, extra_key, timeout_s)
        return self._call("POST", f"{_path(session_id)}/resume", ResumeResult, body=body)

    def delete(
        self, session_id: str, *, cache_salt: str | None = None, extra_key: str | None = None
    ) -> DeleteResult:
        """Delete the session everywhere."""
        return self._call("DELETE", _path(session_id), DeleteResult, params=_given(cache_salt, extra_key))

    def move(
        self, session_id: str, to: str, *, cache_salt: str | None = None, extra_key: str | None = None
    ) -> MoveResult:
        """Put a paused session into one tier, "ssd" or "redis", and nowhere else."""
        body = _given(cache_salt, extra_key) | {"to": to}
        return self._call("POST", f"{_path(session_id)}/move", MoveResult, body=body)

    def export_session(
        self, session_id: str, file: Path, *, cache_salt: str | None = None, extra_key: str | None = None
    ) -> int:
        """Write a paused session to `file`; returns its bytes. A file that is there is replaced at the end.

        Raises OSError where the file can't be written.
        """
        path = f"{_path(session_id)}/export"
        partial = file.with_name(f".{file.name}.part")
        try:
            with self._stream("POST", path, json=_given(cache_salt, extra_key)) as response:
                if not response.is_success:
                    response.read()
                    self._raise(response, path)
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
        with file.open("rb") as body, self._stream("POST", path, content=body) as response:
            response.read()
            if not response.is_success:
                self._raise(response, path)
            return self._read(response, path, SessionInfo)

    def health(self) -> bool:
        """True when the server answers and is ready. Raises nothing but for a base URL that can't be used."""
        try:
            return self._http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        """Close the connections. A second time does nothing."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(
        self,
        method: str,
        path: str,
        model: type[_M],
        *,
        body: dict[str, Any] | None = None,
        params: dict[str, Any] | None = None,
    ) -> _M:
        with self._mapped(method, path):
            response = self._http.request(method, path, json=body, params=params or None)
        if not response.is_success:
            self._raise(response, path)
        return self._read(response, path, model)

    @contextmanager
    def _stream(self, method: str, path: str, **body: Any) -> Iterator[httpx.Response]:
        with self._mapped(method, path), self._http.stream(method, path, **body) as response:
            yield response

    @contextmanager
    def _mapped(self, method: str, path: str) -> Iterator[None]:
        """What httpx raises leaves as a KrulError that says what to do."""
        try:
            yield
        except httpx.TimeoutException as error:
            raise KrulError(
                f"{self.base_url} did not answer {method} {path} in time ({type(error).__name__}): is it "
                "busy, or still starting? Try again, or allow more with timeout_s"
            ) from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise KrulError(
                f"no server can be reached at {self.base_url} ({error}): start one with `krul serve`, or "
                "name another with --url or $KRUL_URL"
            ) from error

    def _read(self, response: httpx.Response, path: str, model: type[_M]) -> _M:
        try:
            return model.model_validate_json(response.content)
        except ValidationError as error:
            raise self._no_krul(path, f"a {model.__name__} was expected, and something else came") from error

    def _raise(self, response: httpx.Response, path: str) -> NoReturn:
        status = response.status_code
        name, message = _error_of(response)
        if name in _ERRORS:
            raise _rebuilt(_ERRORS[name], message)
        if status in (401, 403):
            raise KrulError(
                f"{self.base_url} refuses the API key (HTTP {status}): give the one the server was started "
                "with, by --api-key or $KRUL_API_KEY"
            )
        if status in (404, 405) or 300 <= status < 400:
            raise self._no_krul(path, f"HTTP {status}")
        raise _BY_STATUS.get(status, KrulError)(
            f"{self.base_url} answered {path} with HTTP {status}: {message}"
        )

    def _no_krul(self, path: str, what: str) -> KrulError:
        return KrulError(
            f"the server at {self.base_url} has no session routes ({path}: {what}): start it with "
            "`krul serve`, or with --radix-cache-backend krul"
        )


def _checked(base_url: str) -> str:
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise KrulError(
            f"{base_url!r} is no URL ({error}): give one such as http://127.0.0.1:30000"
        ) from error
    if url.scheme not in ("http", "https") or not url.host:
        raise KrulError(f"{base_url!r} is no URL of a server: give one such as {_EXAMPLE}")
    return base_url.rstrip("/").removesuffix("/v1")


def _path(session_id: str) -> str:
    """The route of a session; its id is one path segment, slashes encoded.

    Raises:
        InvalidSessionId: as the server would.
    """
    encoded = quote(validate_session_id(session_id), safe="")
    # These two would be resolved away on their way to the server.
    return f"{_ROUTE}/{encoded.replace('.', '%2E') if encoded in ('.', '..') else encoded}"


def _given(cache_salt: str | None, extra_key: str | None, timeout_s: float | None = None) -> dict[str, Any]:
    given = {"cache_salt": cache_salt, "extra_key": extra_key, "timeout_s": timeout_s}
    return {name: value for name, value in given.items() if value is not None}


def _error_of(response: httpx.Response) -> tuple[str, str]:
    """The name of the error class and the message; ("", text) for an answer of another form.

    SGLang's own errors have that form, too: their names are none of ours.
    """
    text = response.text.strip()[:500]
    try:
        error = response.json()["error"]
        name, message = error["type"], error["message"]
    except (ValueError, KeyError, TypeError):
        return "", text
    return (name, message) if isinstance(name, str) and isinstance(message, str) else ("", text)


def _rebuilt(kind: type[KrulError], message: str) -> KrulError:
    """The server's error, here."""
    if kind is Corrupt:  # it prints as "reason: detail"
        reason, _, detail = message.partition(": ")
        return Corrupt(cast(CorruptReason, reason), detail)
    return kind(message)

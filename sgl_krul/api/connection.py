"""A server over HTTP: what comes back is of a known type, what fails is an error of sgl_krul.errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar, cast

import httpx
from pydantic import BaseModel, ValidationError

from sgl_krul import errors
from sgl_krul.errors import Corrupt, CorruptReason, KrulError, SessionBusy, StoreFull

__all__ = ["Connection"]

_M = TypeVar("_M", bound=BaseModel)

_EXAMPLE = "http://127.0.0.1:30000"
_ERRORS: dict[str, type[KrulError]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, KrulError)
}
# For a class that only a newer server knows. SGLang and proxies answer with other statuses, too: those tell
# too little.
_BY_STATUS: dict[int, type[KrulError]] = {error.status: error for error in (SessionBusy, StoreFull)}
_CONNECT_TIMEOUT_S = 5.0


class Connection:
    """Closed by `close()`; threads may share it. `timeout_s` bounds the wait for one answer.

    Every method raises KrulError (or the class of it that the server names): also when there is no server, no
    krul in it, or a wrong key.
    """

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float) -> None:
        self.base_url = _checked(base_url)
        self._http = httpx.Client(
            base_url=self.base_url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S)),
            trust_env=False,  # a proxy of the environment does not lead to a server on this machine
        )

    def health(self) -> bool:
        """True when the server answers and is ready. Raises nothing."""
        try:
            return self._http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        """Close the connections. A second time does nothing."""
        self._http.close()

    def call(
        self,
        method: str,
        path: str,
        model: type[_M],
        *,
        body: dict[str, Any] | None = None,
        params: dict[str, Any] | None = None,
    ) -> _M:
        """Ask once, and read the answer as a `model`."""
        with self._mapped(method, path):
            response = self._http.request(method, path, json=body, params=params or None)
        if not response.is_success:
            self.refuse(response, path)
        return self.read(response, path, model)

    @contextmanager
    def stream(self, method: str, path: str, **body: Any) -> Iterator[httpx.Response]:
        """An answer whose body is read piece by piece; not checked yet."""
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

    def read(self, response: httpx.Response, path: str, model: type[_M]) -> _M:
        """The body of an answer that is a success."""
        try:
            return model.model_validate_json(response.content)
        except ValidationError as error:
            raise self._no_krul(path, f"a {model.__name__} was expected, and something else came") from error

    def refuse(self, response: httpx.Response, path: str) -> NoReturn:
        """Raise what an answer that is no success says."""
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

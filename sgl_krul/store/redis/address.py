"""The URL of a Redis: which servers, spoken to how. Passwords are kept out of every message and repr."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, NoReturn, TypeAlias
from urllib.parse import unquote

from sgl_krul.errors import ConfigError

__all__ = ["Endpoint", "RedisUrl", "parse_redis_url"]

Kind: TypeAlias = Literal["single", "cluster", "sentinel"]

_KINDS: dict[str, Kind] = {"": "single", "+cluster": "cluster", "+sentinel": "sentinel"}
_SCHEME = re.compile(r"redis(s?)(|\+cluster|\+sentinel)|unix")
_SCHEMES = (
    "redis://host:port/db, rediss:// (TLS), unix:///path, redis+cluster://host:port,host:port or "
    "redis+sentinel://host:port,host:port/service"
)
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%]+\]")
_SERVICE = re.compile(r"[A-Za-z0-9._-]+")
_MAX_DATABASE = 1_000_000


@dataclass(frozen=True)
class Endpoint:
    """Where one server listens: host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.path or f"{host}:{self.port}"


@dataclass(frozen=True)
class RedisUrl:
    """A parsed URL. `endpoints`: the server, some nodes of the cluster, or the sentinels."""

    kind: Kind
    endpoints: tuple[Endpoint, ...]
    tls: bool = False
    database: int = 0
    service: str = ""
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"redis {self.service or ','.join(map(str, self.endpoints))}"


def parse_redis_url(url: str, *, username: str | None = None, password: str | None = None) -> RedisUrl:
    """Read a URL; `username` and `password` are those given beside it.

    Messages show the scheme, and the hosts once they are known to be some: any other part may be a password
    that somebody wrote in the wrong place.

    Raises:
        ConfigError: it is none, or says something else than the other settings.
    """
    scheme, separator, rest = url.partition("://")
    userinfo, _, place = rest.rpartition("@")
    if not separator:
        raise ConfigError(f"this is no Redis URL (no '://' in it): expected {_SCHEMES}")
    match = _SCHEME.fullmatch(scheme)
    if match is None:
        shown = f"{scheme!r} " if re.fullmatch("[a-z][a-z+.-]{0,30}", scheme) else ""
        raise ConfigError(f"Redis URL: its scheme {shown}is not known; expected {_SCHEMES}")
    user = _user(f"{scheme}://", userinfo, username, password)
    if scheme == "unix":
        return _unix(place, *user)
    if "?" in place or "#" in place:
        _refuse(f"{scheme}://", "options after '?' are not read; each has its setting below redis:")
    return _over_tcp(scheme, _KINDS[match[2] or ""], match[1] == "s", place, user)


def _over_tcp(
    scheme: str, kind: Kind, tls: bool, place: str, user: tuple[str | None, str | None]
) -> RedisUrl:
    hosts, _, path = place.partition("/")
    default_port = 26379 if kind == "sentinel" else 6379
    endpoints = tuple(
        _endpoint(f"{scheme}://", number, part, default_port)
        for number, part in enumerate(hosts.split(","), 1)
    )
    shown = f"{scheme}://{','.join(map(str, endpoints))}"
    if kind == "cluster":
        if path not in ("", "0"):
            _refuse(shown, "another database than 0 after the '/': a cluster has that only; leave it out")
        return RedisUrl("cluster", endpoints, tls, username=user[0], password=user[1])
    if kind == "sentinel":
        service, _, path = path.partition("/")
        if _SERVICE.fullmatch(service) is None:
            _refuse(shown, "no service: expected the name the sentinels give the master, /mymaster")
        return RedisUrl("sentinel", endpoints, tls, _database(shown, path), service, *user)
    if len(endpoints) > 1:
        _refuse(shown, f"{len(endpoints)} hosts: use redis+cluster:// or redis+sentinel:// for several")
    return RedisUrl("single", endpoints, tls, _database(shown, path), "", *user)


def _refuse(shown: str, what: str) -> NoReturn:
    raise ConfigError(f"Redis URL {shown}: {what}")


def _user(
    shown: str, userinfo: str, username: str | None, password: str | None
) -> tuple[str | None, str | None]:
    """User and password: of the URL or given beside it."""
    if re.search("[@,?#]", userinfo):
        _refuse(
            shown,
            "an '@', ',', '?' or '#' before the last '@'. User and password go there once, before the first "
            "host; in them write %40, %2C, %3F and %23. Options after '?' are not read",
        )
    name, colon, secret = userinfo.partition(":")
    in_url = (unquote(name) or None, unquote(secret) if colon else None)
    for what, first, second in (("user", in_url[0], username), ("password", in_url[1], password)):
        if first is not None and second is not None and first != second:
            _refuse(shown, f"another {what} than redis.{what if what == 'password' else 'username'} says")
    if userinfo and not colon:
        _refuse(shown, "a user without a password; write user:password@, or :password@ without a user")
    found = in_url[0] or username, in_url[1] if in_url[1] is not None else password
    if found[0] is not None and found[1] is None:
        _refuse(shown, f"user {found[0]!r} without a password; set redis.password")
    return found


def _unix(place: str, username: str | None, password: str | None) -> RedisUrl:
    path, _, query = place.partition("?")
    if not path.startswith("/") or len(path) < 2:
        _refuse("unix://", "expected the absolute path of a socket, as in unix:///run/redis.sock")
    if "#" in place:
        _refuse("unix://", "a '#'; write %23 for one in the path")
    shown = f"unix://{path}"
    if query and not query.startswith("db="):
        _refuse(shown, "expected nothing or db=N after the '?'")
    endpoint = Endpoint(path=unquote(path))
    database = _database(shown, query.removeprefix("db="))
    return RedisUrl("single", (endpoint,), database=database, username=username, password=password)


def _database(shown: str, text: str) -> int:
    if text == "":
        return 0
    if not re.fullmatch("[0-9]{1,7}", text) or int(text) > _MAX_DATABASE:
        _refuse(shown, f"the database: expected a number from 0 to {_MAX_DATABASE}")
    return int(text)


def _endpoint(shown: str, number: int, text: str, default_port: int) -> Endpoint:
    match = re.fullmatch(rf"({_HOST.pattern})(?::([0-9]{{1,5}}))?", text)
    port = int(match[2]) if match and match[2] else default_port
    if match is None or not 1 <= port <= 65535:
        _refuse(
            shown,
            f"host number {number}: expected host or host:port (IPv6 in brackets, ports from 1 to 65535); "
            "user and password go before it, as in user:password@host",
        )
    return Endpoint(match[1].strip("[]"), port)

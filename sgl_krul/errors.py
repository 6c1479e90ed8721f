"""The one exception tree of sgl-krul.

    KrulError
      ConfigError (also ValueError)    a setting that cannot be used
      UnsupportedServer                this SGLang, or one of its flags, cannot be served
      SessionError
        InvalidSessionId   400
        UnknownTier        400
        UnknownSession     404
        NoTimeline         404
        SessionBusy        409
        NoDeviceRoom       503
      BadRequest           400    a field of a request that is not one of the values it may have
      NotServed            501    not under tensor parallelism, so far
      BadArchive           400    a file that is no export of a session, or not one for this server
      StoreError
        StoreFull          507
          QuotaExceeded    507
        StoreUnavailable   503
        LeaseHeld          409
        Missing            500
        Corrupt            500

Every message names the value, what was expected and what to do about it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

__all__ = [
    "BadArchive",
    "BadRequest",
    "ConfigError",
    "Corrupt",
    "CorruptReason",
    "InvalidSessionId",
    "KrulError",
    "LeaseHeld",
    "Missing",
    "NoDeviceRoom",
    "NoTimeline",
    "NotServed",
    "QuotaExceeded",
    "SessionBusy",
    "SessionError",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "UnknownSession",
    "UnknownTier",
    "UnsupportedServer",
]

CorruptReason = Literal["checksum", "length", "version", "identity"]


class KrulError(Exception):
    """Whatever sgl-krul raises on purpose. `status` is the HTTP status the API answers with."""

    status: ClassVar[int] = 500


class ConfigError(KrulError, ValueError):
    """A setting that cannot be used: unknown, of the wrong type or out of range."""


class UnsupportedServer(KrulError):
    """Wrong SGLang version, a flag that cannot be served, or a hook that was not applied."""


class SessionError(KrulError):
    """What was asked of a session cannot be done."""


class InvalidSessionId(SessionError):
    """The session id is not one that may be used."""

    status: ClassVar[int] = 400


class UnknownTier(SessionError):
    """This server has no tier of that name."""

    status: ClassVar[int] = 400


class UnknownSession(SessionError):
    """There is no such session."""

    status: ClassVar[int] = 404


class SessionBusy(SessionError):
    """The session is in the middle of something else; ask again later."""

    status: ClassVar[int] = 409


class NoTimeline(SessionError):
    """The session was not restored to the device in this server's life."""

    status: ClassVar[int] = 404


class NoDeviceRoom(SessionError):
    """Running requests use so much of the KV pool that the session does not fit beside them."""

    status: ClassVar[int] = 503


class BadRequest(KrulError):
    """A field has a value it may not have; nothing was done."""

    status: ClassVar[int] = 400


class NotServed(KrulError):
    """This server can't do that; the message says which flag or setting is the reason."""

    status: ClassVar[int] = 501


class BadArchive(KrulError):
    """The file is no export of a session, is damaged, or was made under another namespace."""

    status: ClassVar[int] = 400


class StoreError(KrulError):
    """A tier could not do what was asked."""


class StoreFull(StoreError):
    """Byte cap, free-space floor or ENOSPC. Nothing was written."""

    status: ClassVar[int] = 507


class QuotaExceeded(StoreFull):
    """The tenant would pass its quota. Nothing was written, and nothing of its older sessions was touched."""


class StoreUnavailable(StoreError):
    """The place cannot be read or written now; the message names the path and the errno."""

    status: ClassVar[int] = 503


class LeaseHeld(StoreError):
    """Another server is writing this session now; the message names it. Reading is always allowed."""

    status: ClassVar[int] = 409


class Missing(StoreError):
    """The object was there and has gone."""


class Corrupt(StoreError):
    """Stored bytes that cannot be trusted. An error inside the house, a miss outside.

    `reason` says what failed; only "checksum", "length" and "version" allow deleting the object.
    """

    def __init__(self, reason: CorruptReason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason: CorruptReason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason

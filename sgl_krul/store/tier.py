"""What every tier is: a place for named objects, each a header and a body of bytes.

The body is the segments one after another; a tier knows bytes, not tensors. All methods of a tier are thread
safe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

__all__ = [
    "MAX_HEADER_BYTES",
    "MAX_KEY_CHARS",
    "BudgetedTier",
    "Buffer",
    "CheckedTier",
    "Entry",
    "SharedTier",
    "Tier",
    "TierUsage",
    "byte_view",
    "check_header",
    "check_key",
    "is_key",
    "writable_view",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_HEADER_BYTES = 16 << 20  # a manifest carries about 6 bytes a token
MAX_KEY_CHARS = 512
MAX_KEY_PART_CHARS = 200  # a file name holds 255 bytes; some room is left for suffixes
_KEY = re.compile(r"[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)*")


class Entry(NamedTuple):
    """One complete object: its key, the bytes it takes in the tier, when it was put (unix seconds)."""

    key: str
    bytes: int
    modified: float


class TierUsage(NamedTuple):
    """What a tier holds now and may hold at most."""

    bytes: int
    objects: int
    capacity_bytes: int


class Tier(Protocol):
    """Named objects. Keys match `^[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)*$`, else ValueError."""

    @property
    def name(self) -> str:
        """A short word for logs and metrics: "memory", "ssd"."""
        ...

    def put(self, key: str, header: bytes, segments: Sequence[Buffer]) -> int:
        """Store an object, replacing one of the same key. Returns the bytes it takes in the tier.

        All or nothing: after any error the old object (or none) is there, unchanged.

        Raises:
            ValueError: bad key, header over MAX_HEADER_BYTES, segments that are not contiguous.
            StoreFull: no room.
            StoreUnavailable: the place cannot be written now.
        """
        ...

    def read_header(self, key: str) -> bytes | None:
        """The header given to `put`; None when there is no such object.

        Raises:
            Corrupt: "version", "length" or "checksum".
            StoreUnavailable: the place cannot be read now.
        """
        ...

    def read_segments(self, key: str, offset: int, into: Sequence[memoryview]) -> None:
        """Fill the buffers of `into`, one after another and to the last byte, from body byte `offset` on.

        After an error the buffers hold anything. The bytes are not verified: that is the reader's part.

        Raises:
            ValueError: negative offset, buffers that are read-only or not contiguous.
            Missing: no such object.
            Corrupt: "length": the body ends before the last buffer is full.
            StoreUnavailable: the place cannot be read now.
        """
        ...

    def delete(self, key: str) -> bool:
        """Remove an object; True when there was one."""
        ...

    def scan(self, prefix: str) -> Iterator[Entry]:
        """The complete objects whose key starts with `prefix` ("": all), by key, as they are at the call."""
        ...

    def usage(self) -> TierUsage:
        """Answered from memory; never waits for I/O."""
        ...


class CheckedTier(Tier, Protocol):
    """A tier that can look itself over."""

    def check(self) -> list[str]:
        """Problems found; empty when sound."""
        ...


@runtime_checkable
class BudgetedTier(CheckedTier, Protocol):
    """A tier that takes only so many bytes a day."""

    @property
    def write_left_bytes(self) -> int | None:
        """What may still be written today; None without a daily budget. Never waits for I/O."""
        ...


class SharedTier(CheckedTier, Protocol):
    """A tier that other servers write too, and where objects vanish by themselves after a while."""

    @property
    def available(self) -> bool:
        """False while the place is known to be out of reach: calls fail at once. Never waits."""
        ...

    @property
    def breaker_state(self) -> str:
        """ "closed", "half-open" or "open": whether calls go through, one as a trial, or none."""
        ...

    def lease(self, prefix: str) -> AbstractContextManager[None]:
        """Be the only server that writes below `prefix` (which ends in a slash) while the `with` lasts.

        A put below it whose lease was lost meanwhile (the process was stopped for longer than the lease)
        raises LeaseHeld or StoreUnavailable and changes nothing. Puts without a lease fail while another
        server has it. Reading is always allowed.

        Raises:
            LeaseHeld: another server has it; the message names that one.
            StoreUnavailable
        """
        ...

    def touch(self, keys: Sequence[str]) -> None:
        """Start the life time of these objects anew. Best effort: raises nothing but ValueError."""
        ...

    def refresh(self) -> None:
        """Count anew what is there, for `usage`. Waits for I/O.

        Raises:
            StoreUnavailable
        """
        ...


def check_key(key: str) -> str:
    """Return `key`, or raise ValueError when it is not one a tier takes."""
    if not is_key(key):
        raise ValueError(
            f"key {key[:80]!r}: expected {_KEY.pattern}, at most {MAX_KEY_CHARS} chars, "
            f"{MAX_KEY_PART_CHARS} between slashes"
        )
    return key


def is_key(key: str) -> bool:
    """Whether a tier takes `key`."""
    if len(key) > MAX_KEY_CHARS or _KEY.fullmatch(key) is None:
        return False
    return len(key) <= MAX_KEY_PART_CHARS or max(map(len, key.split("/"))) <= MAX_KEY_PART_CHARS


def check_header(header: bytes) -> bytes:
    """Return `header`, or raise ValueError when it is longer than a tier takes."""
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"header of {len(header)} bytes: expected at most {MAX_HEADER_BYTES}")
    return header


def byte_view(buffer: Buffer) -> memoryview:
    """The bytes of `buffer` as a flat view, no copy. ValueError when it is not C-contiguous."""
    view = memoryview(buffer)
    if view.ndim == 1 and view.format == "B" and view.c_contiguous:
        return view
    if not view.c_contiguous:
        raise ValueError(f"buffer of shape {view.shape}, strides {view.strides}: expected C-contiguous")
    if view.nbytes == 0:
        return memoryview(b"")  # cast() refuses shapes with a zero in them
    return view.cast("B")


def writable_view(buffer: memoryview) -> memoryview:
    """Like byte_view, and ValueError when the buffer is read-only."""
    view = byte_view(buffer)
    if buffer.readonly:
        raise ValueError(f"read-only buffer of {view.nbytes} bytes: expected one that can be written")
    return view

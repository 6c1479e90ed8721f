"""One object in one file: the bytes on the disk, and vectored reads and writes.

    8 bytes   magic b"KRULOBJ\\0"
    u32       version, 1
    u32       header length
    u64       body length
    u64       xxh3_64 of the fields above and the header
    ...       header, then zeros up to a multiple of 4096
    ...       body

Integers are little-endian. The body has no checksum here: its segments have theirs in the chunk header.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

from sgl_krul.errors import Corrupt
from sgl_krul.store.tier import MAX_HEADER_BYTES

__all__ = ["ALIGNMENT", "ObjectHead", "head_bytes", "object_bytes", "read_at", "read_head", "write_all"]

MAGIC = b"KRULOBJ\0"
VERSION = 1
ALIGNMENT = 4096
_FIELDS = struct.Struct("<8sIIQ")
_CHECKSUM = struct.Struct("<Q")
_FIXED = _FIELDS.size + _CHECKSUM.size
_IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX"))
_FIRST_READ_BYTES = 64 << 10
_LARGEST_READ_BYTES = 1 << 20


class ObjectHead(NamedTuple):
    """A verified head: the header, and where the body lies in the file."""

    header: bytes
    body_start: int
    body_length: int


def _body_start(header_length: int) -> int:
    return -(-(_FIXED + header_length) // ALIGNMENT) * ALIGNMENT


def object_bytes(header_length: int, body_length: int) -> int:
    """The length of the whole file."""
    return _body_start(header_length) + body_length


def head_bytes(header: bytes, body_length: int) -> bytes:
    """Everything before the body, padded."""
    fields = _FIELDS.pack(MAGIC, VERSION, len(header), body_length)
    checksum = xxhash.xxh3_64_intdigest(fields + header)
    return (fields + _CHECKSUM.pack(checksum) + header).ljust(_body_start(len(header)), b"\0")


def read_head(fd: int, name: str) -> ObjectHead:
    """Read and verify the head of an open file.

    Raises:
        Corrupt: "version" (magic, version), "length" (head or file shorter or longer than it says),
            "checksum".
        OSError: the file cannot be read.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise Corrupt("version", f"{name}: not a regular file")
    start = os.pread(fd, ALIGNMENT, 0)
    if start[: len(MAGIC)] != MAGIC[: len(start)]:
        raise Corrupt("version", f"{name}: starts with {start[:8]!r}, expected {MAGIC!r}")
    if len(start) < _FIXED:
        raise Corrupt("length", f"{name}: {len(start)} bytes, the head alone takes {_FIXED}")
    _, version, header_length, body_length = _FIELDS.unpack_from(start)
    (checksum,) = _CHECKSUM.unpack_from(start, _FIELDS.size)
    if version != VERSION:
        raise Corrupt("version", f"{name}: version {version}, expected {VERSION}")
    if header_length > MAX_HEADER_BYTES or status.st_size != object_bytes(header_length, body_length):
        raise Corrupt("length", f"{name}: {status.st_size} bytes, header {header_length}, body {body_length}")
    header = start[_FIXED : _FIXED + header_length]
    if len(header) < header_length:
        rest = bytearray(header_length - len(header))
        read_at(fd, [memoryview(rest)], _FIXED + len(header), name)
        header += rest
    found = xxhash.xxh3_64_intdigest(start[: _FIELDS.size] + header)
    if found != checksum:
        raise Corrupt("checksum", f"{name}: head has {found:016x}, expected {checksum:016x}")
    return ObjectHead(header, _body_start(header_length), body_length)


def _groups(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The non-empty views in groups one system call takes."""
    full = [view for view in views if view.nbytes]
    for first in range(0, len(full), _IOV_MAX):
        yield full[first : first + _IOV_MAX]


def _growing(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The views in pieces of 64 KiB, 128 KiB, .. 1 MiB: what one read asks for.

    While a piece is copied the kernel reads ahead, twice as far each time. Asked for many megabytes at once
    it brings the first of them, and only then copies: one after the other instead of both at once.
    """
    limit, size = _FIRST_READ_BYTES, 0
    piece: list[memoryview] = []
    for view in views:
        done = 0
        while done < view.nbytes:
            part = view[done : done + limit - size]
            piece.append(part)
            size += part.nbytes
            done += part.nbytes
            if size == limit or len(piece) == _IOV_MAX:
                yield piece
                limit, size, piece = min(2 * limit, _LARGEST_READ_BYTES), 0, []
    if piece:
        yield piece


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the views when their first `done` bytes are dealt with."""
    for index, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[index + 1 :]]
        done -= view.nbytes
    return []


def write_all(fd: int, views: Sequence[memoryview]) -> None:
    """Write flat byte views one after another, going on after short writes."""
    for group in _groups(views):
        left = group
        while left:
            left = _after(left, os.writev(fd, left))


def read_at(fd: int, views: Sequence[memoryview], offset: int, name: str) -> None:
    """Fill flat byte views from `offset` on, going on after short reads; Corrupt("length") at the end."""
    for piece in _growing(views):
        left = piece
        while left:
            done = os.preadv(fd, left, offset)
            if done == 0:
                raise Corrupt("length", f"{name}: the file ends at byte {offset}")
            offset += done
            left = _after(left, done)

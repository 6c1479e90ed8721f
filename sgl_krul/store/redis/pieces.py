"""How an object lies in a Redis hash: field "h" the header, "m" the shape, "0", "1", .. pieces of the body.

A piece has at most MAX_PIECE_BYTES. It is one segment or a part of one, or a few small neighbours together,
so that the bytes of one layer can be fetched without those of the others. The shape says how long the pieces
are. It carries a token that no other put has, so a reader that gets it with every few pieces knows that they
all belong to one object, and checksums over itself, the key and the header.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgpack
import xxhash

from sgl_krul.errors import Corrupt
from sgl_krul.store.tier import MAX_HEADER_BYTES

__all__ = [
    "MAX_PIECES",
    "MAX_PIECE_BYTES",
    "Part",
    "Shape",
    "check_stored_header",
    "copy_parts",
    "cut",
    "decode_shape",
    "encode_shape",
    "plan_read",
]

MAX_PIECE_BYTES = 1 << 20
GROUP_BYTES = 256 << 10  # small neighbours share a piece up to this
MAX_PIECES = 1 << 16
_VERSION = 1
_TOKEN_BYTES = 16
_DIGEST_BYTES = 8
_MAX_SHAPE_BYTES = 64 + 5 * MAX_PIECES


class Shape(NamedTuple):
    """The shape of one object: `raw` as stored, where each piece starts in the body (and the end)."""

    raw: bytes
    header_digest: bytes
    starts: tuple[int, ...]

    @property
    def body_bytes(self) -> int:
        """Length of the body."""
        return self.starts[-1]

    def piece_bytes(self, index: int) -> int:
        """Length of a piece."""
        return self.starts[index + 1] - self.starts[index]


class Part(NamedTuple):
    """What to take of one piece: from byte `start` of it, as much as the targets hold."""

    piece: int
    start: int
    targets: list[memoryview]


def cut(segments: Sequence[memoryview]) -> list[list[memoryview]]:
    """The pieces of a body, each as the views that make it up. No bytes are copied.

    Raises:
        ValueError: more than MAX_PIECES.
    """
    pieces: list[list[memoryview]] = []
    group_bytes = GROUP_BYTES  # of the last piece; full: nothing joins it
    for segment in segments:
        if segment.nbytes == 0:
            continue
        if group_bytes + segment.nbytes <= GROUP_BYTES:
            pieces[-1].append(segment)
            group_bytes += segment.nbytes
            continue
        for start in range(0, segment.nbytes, MAX_PIECE_BYTES):
            pieces.append([segment[start : start + MAX_PIECE_BYTES]])
        group_bytes = segment.nbytes if segment.nbytes <= GROUP_BYTES else GROUP_BYTES
    if len(pieces) > MAX_PIECES:
        raise ValueError(
            f"a body of {len(pieces)} pieces: expected at most {MAX_PIECES}; put smaller objects"
        )
    return pieces


def encode_shape(key: str, token: bytes, lengths: Sequence[int], header: bytes) -> bytes:
    """The field "m": msgpack of version, token, digest of the header, piece lengths; then its own digest."""
    packed: bytes = msgpack.packb([_VERSION, token, xxhash.xxh3_64_digest(header), list(lengths)])
    return packed + _digest(key, packed)


def decode_shape(key: str, raw: bytes) -> Shape:
    """Read the field "m" of the object `key`.

    Raises:
        Corrupt: "length", "checksum" or "version".
    """
    if not _DIGEST_BYTES < len(raw) <= _MAX_SHAPE_BYTES:
        raise Corrupt("length", f"{key}: a shape of {len(raw)} bytes")
    packed = raw[:-_DIGEST_BYTES]
    if raw[-_DIGEST_BYTES:] != _digest(key, packed):
        raise Corrupt("checksum", f"{key}: the shape differs from what was stored, or is another object's")
    try:
        fields: Any = msgpack.unpackb(packed, strict_map_key=True, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise Corrupt("length", f"{key}: the shape is not msgpack: {error}") from error
    if type(fields) is not list or not fields or fields[0] != _VERSION:
        raise Corrupt("version", f"{key}: expected a shape of version {_VERSION}")
    if (
        len(fields) != 4
        or not _is_digest(fields[1], _TOKEN_BYTES)
        or not _is_digest(fields[2], _DIGEST_BYTES)
    ):
        raise Corrupt("length", f"{key}: a shape of {len(fields)} fields: expected token, digest, lengths")
    lengths = fields[3]
    if (
        type(lengths) is not list
        or len(lengths) > MAX_PIECES
        or not all(type(length) is int and 1 <= length <= MAX_PIECE_BYTES for length in lengths)
    ):
        raise Corrupt("length", f"{key}: expected pieces of 1 to {MAX_PIECE_BYTES} bytes")
    return Shape(raw, fields[2], tuple(accumulate(lengths, initial=0)))


def check_stored_header(key: str, shape: Shape, header: bytes) -> bytes:
    """Return `header`, or raise Corrupt when it is not the one that was put."""
    if len(header) > MAX_HEADER_BYTES:
        raise Corrupt("length", f"{key}: a header of {len(header)} bytes")
    if xxhash.xxh3_64_digest(header) != shape.header_digest:
        raise Corrupt("checksum", f"{key}: the header differs from what was stored")
    return header


def plan_read(shape: Shape, offset: int, views: Sequence[memoryview]) -> Iterator[Part]:
    """Which pieces hold the bytes from `offset` on that fill `views`, and where they go.

    The range must lie inside the body.
    """
    position = offset
    part: Part | None = None
    for view in views:
        done = 0
        while done < view.nbytes:
            piece = bisect_right(shape.starts, position) - 1
            count = min(view.nbytes - done, shape.starts[piece + 1] - position)
            if part is not None and part.piece != piece:
                yield part
                part = None
            if part is None:
                part = Part(piece, position - shape.starts[piece], [])
            part.targets.append(view[done : done + count])
            done += count
            position += count
    if part is not None:
        yield part


def copy_parts(key: str, shape: Shape, parts: Sequence[Part], values: Sequence[object]) -> None:
    """Copy fetched pieces to where they go.

    Raises:
        Corrupt: "length": a piece is missing or has another length than the shape says.
    """
    for part, value in zip(parts, values, strict=True):
        expected = shape.piece_bytes(part.piece)
        if not isinstance(value, bytes) or len(value) != expected:
            found = len(value) if isinstance(value, bytes) else "no"
            raise Corrupt("length", f"{key}: piece {part.piece} has {found} bytes: expected {expected}")
        source = memoryview(value)
        start = part.start
        for target in part.targets:
            target[:] = source[start : start + target.nbytes]
            start += target.nbytes


def _digest(key: str, packed: bytes) -> bytes:
    return xxhash.xxh3_64_digest(key.encode("ascii") + b"\0" + packed)


def _is_digest(value: object, length: int) -> bool:
    return type(value) is bytes and len(value) == length

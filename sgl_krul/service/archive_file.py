"""The file of an exported session: its frames, written and read one after another.

    8 bytes   magic b"KRULSESS"
    u32       version, 1
    frame     "MANI", the manifest as tiers keep it
    for each chunk, in order:
      frame   "CHNK", the chunk's header as tiers keep it
      ...     the body: its segments one after another (the header has their lengths and checksums)
    frame     "END ", u64 count of chunks, 32 bytes HMAC-SHA-256 of everything before this frame: the seal

The key of the seal is the servers' own: without it anybody who may import could give others' prompts a KV of
his making, since exact pages are shared.

A frame is 4 bytes kind, u64 length, u64 xxh3_64 of kind, length and payload, then the payload. Integers are
little-endian. The manifest may name more chunks than follow: an export ends where the session is damaged.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import xxhash

from sgl_krul.codec.frame import ChunkHeader, verify_segment
from sgl_krul.errors import Corrupt
from sgl_krul.service.mover import segment_buffers
from sgl_krul.store.object_file import read_at, write_all
from sgl_krul.store.tier import MAX_HEADER_BYTES

__all__ = ["MAGIC", "VERSION", "ArchiveReader", "ArchiveWriter", "Frame", "Kind"]

MAGIC = b"KRULSESS"
VERSION = 1
_START = struct.Struct("<8sI")
_FRAME = struct.Struct("<4sQ")
_CHECKSUM = struct.Struct("<Q")
_END = struct.Struct("<Q32s")


class Kind(bytes, Enum):
    """What a frame holds."""

    manifest = b"MANI"
    chunk = b"CHNK"
    end = b"END "


class Frame(NamedTuple):
    """A frame whose checksum is right. `digest` is the seal of everything before it."""

    kind: bytes
    payload: bytes
    digest: bytes


def _checksum(head: bytes, payload: bytes) -> int:
    state = xxhash.xxh3_64(head)
    state.update(payload)
    return state.intdigest()


class ArchiveWriter:
    """Writes the start of a file, then what it is given. Methods raise OSError."""

    def __init__(self, fd: int, key: bytes) -> None:
        self.written = 0
        self._fd = fd
        self._seal = hmac.new(key, digestmod="sha256")
        self.body([memoryview(_START.pack(MAGIC, VERSION))])

    def frame(self, kind: Kind, payload: bytes) -> None:
        """Write a frame."""
        head = _FRAME.pack(kind.value, len(payload))
        self.body([memoryview(data) for data in (head, _CHECKSUM.pack(_checksum(head, payload)), payload)])

    def body(self, segments: Sequence[memoryview]) -> None:
        """Write flat byte views as they are."""
        write_all(self._fd, segments)
        for segment in segments:
            self._seal.update(segment)
            self.written += segment.nbytes

    def end(self, chunks: int) -> None:
        """Write the last frame."""
        self.frame(Kind.end, _END.pack(chunks, self._seal.digest()))


class ArchiveReader:
    """Reads a file of `size` bytes from its beginning; no more room is made than the file has bytes left.

    Methods raise Corrupt ("length" or "checksum") for whatever is not as it should be, and OSError.
    """

    def __init__(self, fd: int, name: str, size: int, key: bytes) -> None:
        self.name = name
        self._key = key
        self._fd = fd
        self._size = size
        self.rewind()

    def rewind(self) -> None:
        """Begin again."""
        self._offset = 0
        self._seal = hmac.new(self._key, digestmod="sha256")

    def start(self) -> tuple[bytes, int]:
        """The first bytes, and the version, 0 when those are not the magic ones."""
        magic = self._take(min(len(MAGIC), self._size))
        return magic, int.from_bytes(self._take(4), "little") if magic == MAGIC else 0

    def frame(self) -> Frame:
        """The next frame, verified."""
        digest, start = self._seal.digest(), self._offset
        head = self._take(_FRAME.size)
        kind, length = _FRAME.unpack(head)
        (checksum,) = _CHECKSUM.unpack(self._take(_CHECKSUM.size))
        if length > MAX_HEADER_BYTES:
            raise Corrupt("length", f"frame of {length} bytes at byte {start}: over {MAX_HEADER_BYTES}")
        payload = self._take(length)
        found = _checksum(head, payload)
        if found != checksum:
            raise Corrupt("checksum", f"frame at byte {start} has {found:016x}, expected {checksum:016x}")
        return Frame(kind, payload, digest)

    def body(self, header: ChunkHeader) -> list[memoryview]:
        """The segments of a chunk, verified."""
        self._need(sum(entry.length for entry in header.segments))
        segments = segment_buffers(header)
        self._fill(segments)
        for entry, segment in zip(header.segments, segments, strict=True):
            verify_segment(entry, [segment])
        return segments

    def end(self, frame: Frame, chunks: int) -> None:
        """Check that `frame` is the last one, of a file with so many chunks, and that nothing follows."""
        if frame.kind != Kind.end or len(frame.payload) != _END.size:
            raise Corrupt("length", f"frame {frame.kind!r} where a chunk or the end is expected")
        expected, digest = _END.unpack(frame.payload)
        if expected != chunks:
            raise Corrupt("length", f"{chunks} chunks, {expected} expected")
        if not hmac.compare_digest(digest, frame.digest):
            raise Corrupt(
                "checksum",
                "its seal does not fit: it was changed, or comes from a server with another "
                "session.archive_key (set the same at both)",
            )
        if self._offset != self._size:
            raise Corrupt("length", f"{self._size - self._offset} bytes after its end")

    def _need(self, length: int) -> None:
        left = self._size - self._offset
        if length > left:
            raise Corrupt("length", f"{length} bytes expected at byte {self._offset}, {left} are left")

    def _take(self, length: int) -> bytes:
        self._need(length)
        data = bytearray(length)
        self._fill([memoryview(data)])
        return bytes(data)

    def _fill(self, views: Sequence[memoryview]) -> None:
        read_at(self._fd, views, self._offset, self.name)
        for view in views:
            self._offset += view.nbytes
            self._seal.update(view)

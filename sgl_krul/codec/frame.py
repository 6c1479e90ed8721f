"""The chunk header, and the checks that make doubtful bytes a miss.

On the wire a header is msgpack: [version, xxh3_64 of the payload, payload]. The payload is msgpack itself, a
map of the fields of ChunkHeader in their order, a segment being [mode, offset, length, checksum].
Only the one encoding that `encode_header` gives is accepted.

A layer in mode `recompute` is not stored: its segment has no bytes, and it is one of the first layers, since
what is recomputed at resume runs through the model from layer 0 on.

The header names the layer plan and does not hold it. Of a coded plan ("k1-" and a digest) only what is true
of all such plans is checked here; `ChunkCoder.check_header` has the rest.
"""

from __future__ import annotations

import array
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from sgl_krul.codec.base import Mode
from sgl_krul.errors import Corrupt
from sgl_krul.store import Buffer
from sgl_krul.store.tier import MAX_HEADER_BYTES, byte_view

__all__ = [
    "CODED_PLANS",
    "FORMAT_VERSION",
    "MAX_SEGMENTS",
    "MAX_TOKENS",
    "PAPER_PLAN",
    "RAW_PLAN",
    "ChunkHeader",
    "SegmentEntry",
    "build_segments",
    "decode_header",
    "encode_header",
    "expect",
    "token_digest",
    "verify_segment",
]

FORMAT_VERSION = 1
MAX_SEGMENTS = 4096
MAX_TOKENS = 1 << 20
MAX_BODY_BYTES = 1 << 40
RAW_PLAN = "raw"  # layer plan: every layer is stored
PAPER_PLAN = "paper"  # layer plan: the first layers of the chunk are not stored
CODED_PLANS = "k1-"  # what the ids of layer plans with codecs begin with (`LayerPlan.plan_id`)
_MAX_TEXT = 128
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TEXT = re.compile(r"[\x21-\x7e]+")
_FIELDS = ("namespace", "last_page_hash", "token_digest", "tokens", "plan_id", "segments")
_MODES = {mode.value: mode for mode in Mode}
_CODED_MODES = frozenset({Mode.recompute, Mode.raw, Mode.quantized, Mode.shared})
_NOTHING = xxhash.xxh3_64_intdigest(b"")  # the checksum of a segment without bytes


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """One layer of a chunk: its mode, where it lies in the body (bytes), and its xxh3_64."""

    mode: Mode
    offset: int
    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What a chunk is. `segments` are in layer order and follow each other from body byte 0 on.

    `namespace`, `last_page_hash` and `plan_id` are 1 to 128 printable ASCII characters, no blanks;
    `token_digest` is what `token_digest()` gives for the chunk's `tokens` (1 to 2^20) token ids.
    """

    namespace: str
    last_page_hash: str
    token_digest: str
    tokens: int
    plan_id: str
    segments: tuple[SegmentEntry, ...]

    @property
    def depth(self) -> int:
        """How many leading layers are not stored."""
        return sum(entry.mode is Mode.recompute for entry in self.segments)


def encode_header(header: ChunkHeader) -> bytes:
    """The wire form. ValueError naming the field that `decode_header` would refuse."""
    segments = [[str(entry.mode), entry.offset, entry.length, entry.checksum] for entry in header.segments]
    raw = {field: getattr(header, field) for field in _FIELDS[:-1]} | {"segments": segments}
    problem = _field_problem(raw)
    if problem:
        raise ValueError(f"chunk header: {problem}")
    return _seal(msgpack.packb(raw))


def decode_header(data: bytes) -> ChunkHeader:
    """The header of bytes from a store.

    Raises:
        Corrupt: "version": another format version; "checksum": changed bytes; "length": anything else that is
            not exactly what `encode_header` gives.
    """
    if len(data) > MAX_HEADER_BYTES:
        raise Corrupt("length", f"chunk header of {len(data)} bytes, at most {MAX_HEADER_BYTES} expected")
    match _unpack(data):
        case [int(version), *_] if type(version) is int and version != FORMAT_VERSION:
            raise Corrupt("version", f"chunk header version {version}, expected {FORMAT_VERSION}")
        case [_, int(checksum), bytes(payload)]:
            found = xxhash.xxh3_64_intdigest(payload)
            if checksum != found:
                raise Corrupt("checksum", f"chunk header has {found:016x}, expected {checksum:016x}")
        case _:
            raise Corrupt("length", "chunk header is not [version, checksum, payload]")
    raw = _unpack(payload)
    problem = _field_problem(raw)
    if problem:
        raise Corrupt("length", f"chunk header: {problem}")
    # The strictest check last: it refuses every other msgpack form of the same values, or repeated keys.
    if _seal(msgpack.packb(raw)) != data:
        raise Corrupt("length", "chunk header is not in the one form that is written")
    entries = tuple(SegmentEntry(_MODES[mode], *numbers) for mode, *numbers in raw["segments"])
    return ChunkHeader(**{**raw, "segments": entries})


def _seal(payload: bytes) -> bytes:
    packed: bytes = msgpack.packb([FORMAT_VERSION, xxhash.xxh3_64_intdigest(payload), payload])
    return packed


def _unpack(data: bytes) -> Any:
    """msgpack without extensions; Corrupt("length") for bytes that are none."""
    try:
        return msgpack.unpackb(data, strict_map_key=True, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise Corrupt("length", f"chunk header is not msgpack: {error or type(error).__name__}") from error


def _field_problem(raw: Any) -> str | None:
    """What is wrong with the fields of a payload: every type, length, count and bound."""
    if type(raw) is not dict or tuple(raw) != _FIELDS:
        return f"expected the fields {', '.join(_FIELDS)}"
    for field in ("namespace", "last_page_hash", "plan_id"):
        text = raw[field]
        if type(text) is not str or len(text) > _MAX_TEXT or not _TEXT.fullmatch(text):
            return f"{field} {str(text)[:80]!r}: expected 1 to {_MAX_TEXT} printable ASCII characters"
    digest = raw["token_digest"]
    if type(digest) is not str or not _DIGEST.fullmatch(digest):
        return f"token_digest {str(digest)[:80]!r}: expected 64 hex characters"
    if not _is_int(raw["tokens"], 1, MAX_TOKENS):
        return f"tokens {str(raw['tokens'])[:80]}: expected 1 to {MAX_TOKENS}"
    problem = _segments_problem(raw["segments"])
    return problem or _plan_problem(raw["plan_id"], raw["segments"])


def _plan_problem(plan_id: str, segments: list[list[Any]]) -> str | None:
    """What the segments, each good by itself, have that no chunk of this plan can have."""
    if plan_id == RAW_PLAN and segments[0][0] == Mode.recompute:
        return f"segment 0: mode recompute under the plan {RAW_PLAN}, which stores every layer"
    if not plan_id.startswith(CODED_PLANS):
        return None
    for index, (mode, _, length, _) in enumerate(segments):
        if mode not in _CODED_MODES:
            return f"segment {index}: mode {mode} under a coded plan"
        if mode != Mode.recompute and not length:
            return f"segment {index}: mode {mode} without bytes"
    stored = [mode for mode, *_ in segments if mode != Mode.recompute]
    # A partner has an owner: one that stands alone, or the other one of a merged pair.
    if stored == [Mode.shared]:
        return f"segment {len(segments) - 1}: mode shared, and no other layer is stored"
    return None


def _segments_problem(segments: Any) -> str | None:
    if type(segments) is not list or not 1 <= len(segments) <= MAX_SEGMENTS:
        return f"segments: expected a list of 1 to {MAX_SEGMENTS}"
    end = 0
    leading = True  # nothing but `recompute` so far
    for index, segment in enumerate(segments):
        if type(segment) is not list or len(segment) != 4:
            return f"segment {index}: expected [mode, offset, length, checksum]"
        mode, offset, length, checksum = segment
        if type(mode) is not str or mode not in _MODES:
            return f"segment {index}: mode {str(mode)[:80]!r}, expected one of {', '.join(_MODES)}"
        if not _is_int(offset, end, end):
            return f"segment {index}: offset {str(offset)[:80]}, expected {end}"
        if not _is_int(length, 0, MAX_BODY_BYTES - end):
            return f"segment {index}: length {str(length)[:80]}, expected 0 to {MAX_BODY_BYTES - end}"
        if not _is_int(checksum, 0, (1 << 64) - 1):
            return f"segment {index}: checksum {str(checksum)[:80]}, expected 64 bits"
        problem = _mode_problem(mode, length, checksum, leading)
        if problem:
            return f"segment {index}: mode {mode} {problem}"
        leading = leading and mode == Mode.recompute
        end += length
    return None


def _mode_problem(mode: str, length: int, checksum: int, leading: bool) -> str | None:
    """What is wrong with a segment of this mode; `leading`: all layers before it are recomputed."""
    if mode == Mode.raw and not length:
        return "without bytes"
    if mode != Mode.recompute:
        return None
    if length or checksum != _NOTHING:
        return f"with {length} bytes and checksum {checksum:016x}, expected none and {_NOTHING:016x}"
    return None if leading else "after a layer that is stored"


def _is_int(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high  # bool is an int, and not one here


# For larger pieces xxhash lets go of the interpreter, and gets it back milliseconds later when another thread
# of Python runs. A piece takes 5 microseconds, so nobody waits for long either.
_PIECE = 64 << 10


def _digest(buffers: Iterable[Buffer]) -> tuple[int, int]:
    """Length and xxh3_64 of the buffers one after another."""
    length = 0
    state = xxhash.xxh3_64()
    for buffer in buffers:
        view = byte_view(buffer)
        length += view.nbytes
        for start in range(0, view.nbytes, _PIECE):
            state.update(view[start : start + _PIECE])
    return length, state.intdigest()


def build_segments(
    per_layer_buffers: Sequence[Sequence[Buffer]], mode: Mode | Sequence[Mode], *, depth: int = 0
) -> tuple[SegmentEntry, ...]:
    """The entries of a chunk: layer l is stored as the buffers `per_layer_buffers[l]` one after another.

    `mode`: of all stored layers, or of each layer. The first `depth` layers are not stored; their buffers and
    modes are not looked at.

    Raises:
        ValueError: not as many modes as layers.
    """
    modes = [mode] * len(per_layer_buffers) if isinstance(mode, Mode) else mode
    if len(modes) != len(per_layer_buffers):
        raise ValueError(f"{len(modes)} modes: expected {len(per_layer_buffers)}, one a layer")
    entries = [SegmentEntry(Mode.recompute, 0, 0, _NOTHING)] * depth
    offset = 0
    for buffers, stored in zip(per_layer_buffers[depth:], modes[depth:], strict=True):
        length, checksum = _digest(buffers)
        entries.append(SegmentEntry(stored, offset, length, checksum))
        offset += length
    return tuple(entries)


def verify_segment(entry: SegmentEntry, buffers: Sequence[Buffer]) -> None:
    """Corrupt("length" or "checksum") unless the buffers, one after another, are the segment stored."""
    expected = sum(byte_view(buffer).nbytes for buffer in buffers)
    if expected != entry.length:
        raise Corrupt("length", f"segment of {entry.length} bytes, read into {expected}")
    _, checksum = _digest(buffers)
    if checksum != entry.checksum:
        raise Corrupt("checksum", f"segment has {checksum:016x}, expected {entry.checksum:016x}")


def expect(
    header: ChunkHeader, *, namespace: str, last_page_hash: str, token_digest: str, tokens: int
) -> None:
    """Corrupt("identity") naming the field, unless the chunk is the one that was asked for."""
    wanted = {
        "namespace": namespace,
        "last_page_hash": last_page_hash,
        "token_digest": token_digest,
        "tokens": tokens,
    }
    for field, value in wanted.items():
        found = getattr(header, field)
        if found != value:
            raise Corrupt("identity", f"{field} {found!r}, expected {value!r}")


def token_digest(token_ids: Sequence[int] | array.array[int] | NDArray[np.integer[Any]]) -> str:
    """Hex SHA-256 of token ids as little-endian int32. ValueError for an id that is none (0 to 2^31 - 1)."""
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"token ids of shape {ids.shape}, dtype {ids.dtype}: expected integers [n]")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < 1 << 31:
        raise ValueError(f"token ids from {ids.min()} to {ids.max()}: expected 0 to 2^31 - 1")
    return hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()

"""Page segments to stored segments and back, and the header that tells what a chunk is."""

from __future__ import annotations

from sgl_krul.codec.base import Mode, SegmentCodec
from sgl_krul.codec.frame import (
    ChunkHeader,
    SegmentEntry,
    build_segments,
    decode_header,
    encode_header,
    expect,
    token_digest,
    verify_segment,
)
from sgl_krul.codec.raw import RawCodec, page_rows

__all__ = [
    "ChunkHeader",
    "Mode",
    "RawCodec",
    "SegmentCodec",
    "SegmentEntry",
    "build_segments",
    "decode_header",
    "encode_header",
    "expect",
    "page_rows",
    "token_digest",
    "verify_segment",
]

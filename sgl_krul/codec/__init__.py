"""Page segments to stored segments and back, and the header that tells what a chunk is."""

from __future__ import annotations

from sgl_krul.codec.base import Mode, SegmentCodec
from sgl_krul.codec.block import KvBlock, from_pages, to_pages
from sgl_krul.codec.coder import ChunkCoder, EncodedChunk
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
from sgl_krul.codec.layer_codec import LayerCodec, PairCodec
from sgl_krul.codec.quantized import CastCodec, GroupCodec
from sgl_krul.codec.raw import RawCodec, page_rows

__all__ = [
    "CastCodec",
    "ChunkCoder",
    "ChunkHeader",
    "EncodedChunk",
    "GroupCodec",
    "KvBlock",
    "LayerCodec",
    "Mode",
    "PairCodec",
    "RawCodec",
    "SegmentCodec",
    "SegmentEntry",
    "build_segments",
    "decode_header",
    "encode_header",
    "expect",
    "from_pages",
    "page_rows",
    "to_pages",
    "token_digest",
    "verify_segment",
]

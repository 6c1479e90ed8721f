"""Segments of a coded chunk: written for a layer or a pair at a time, read back one layer at a time.

A coded segment is the variant's byte (`registry`), the session's first tokens (`sinks`; in the chunk that
begins with token 0 alone), and what the layer's codec made of the rest. A raw one is the layer's pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from sgl_krul.codec.base import Mode
from sgl_krul.codec.block import KvBlock, from_pages, join_blocks, to_pages
from sgl_krul.codec.frame import ChunkHeader
from sgl_krul.codec.raw import RawCodec
from sgl_krul.codec.registry import MERGED_OWNER, MERGED_PARTNER, PLAIN, VARIANT_BYTES, Coding, PlanCodecs
from sgl_krul.codec.sinks import decode_sinks, encode_sinks, sink_tokens, split_sinks
from sgl_krul.errors import Corrupt
from sgl_krul.layout import KvLayout
from sgl_krul.store import Buffer
from sgl_krul.store.tier import byte_view, writable_view

__all__ = ["ChunkReading", "Stored", "encode_unit"]

Pages: TypeAlias = Sequence[Buffer]
"""One layer's page segments: buffers of one or more whole ones, in token order."""


class Stored(NamedTuple):
    """A segment as it is written: its mode, and its bytes as buffers one after another."""

    mode: Mode
    buffers: Sequence[Buffer]

    @property
    def bytes(self) -> int:
        """How long it is."""
        return sum(byte_view(buffer).nbytes for buffer in self.buffers)


def encode_unit(
    codecs: PlanCodecs, unit: Sequence[int], pages: Sequence[Pages], first_token: int
) -> list[Stored]:
    """The segments of a layer, or of an owner and its partner: `unit`, and the pages of each.

    A partner without its owner is stored raw. What else is stored raw: see `ChunkCoder`.
    """
    codings = [codecs.codings[layer] for layer in unit]
    raw_codec = RawCodec(codecs.layout.page_segment_bytes)
    raw = [Stored(Mode.raw, raw_codec.encode(part)) for part in pages]
    if codings == [PLAIN] or (len(unit) == 1 and unit[0] in codecs.owners):
        return raw
    blocks = [split_sinks(from_pages(part, codecs.layout), first_token) for part in pages]
    if codings[0] == MERGED_OWNER:
        return _encode_merged(codecs, blocks, raw)
    owner, base = _encode_layer(codecs, unit[0], blocks[0], None, raw[0])
    if len(unit) == 1:
        return [owner]
    # The loop is closed: a partner is coded against what its owner will be decoded to.
    partner, _ = _encode_layer(codecs, unit[1], blocks[1], base, raw[1])
    return [owner, partner]


def _encode_layer(
    codecs: PlanCodecs, layer: int, block: tuple[KvBlock, KvBlock], base: KvBlock | None, raw: Stored
) -> tuple[Stored, KvBlock]:
    """A layer that stands alone, or that has a base; and its block without the first tokens as decoded."""
    sinks, rest = block
    codec = codecs.codec(layer)
    if codec is None:
        return raw, rest
    try:
        data = codec.encode(rest, base) if rest.tokens else b""
    except ValueError:  # numbers that this codec can't hold
        return raw, rest
    sealed = Stored(codec.mode, [_seal(codecs.codings[layer], sinks, data, codecs.layout)])
    if sealed.bytes >= raw.bytes:
        return raw, rest
    if layer not in codecs.partners or not rest.tokens:
        return sealed, rest
    return sealed, codec.decode(memoryview(data), rest.tokens, base)


def _encode_merged(
    codecs: PlanCodecs, blocks: Sequence[tuple[KvBlock, KvBlock]], raw: list[Stored]
) -> list[Stored]:
    """The two of a merged pair."""
    (owner_sinks, owner), (partner_sinks, partner) = blocks
    try:
        data = codecs.pair.encode(owner, partner) if owner.tokens else (b"", b"")
    except ValueError:  # numbers that the codec can't hold
        return raw
    sealed = [
        Stored(codecs.pair.mode, [_seal(MERGED_OWNER, owner_sinks, data[0], codecs.layout)]),
        Stored(codecs.pair.mode, [_seal(MERGED_PARTNER, partner_sinks, data[1], codecs.layout)]),
    ]
    return sealed if sum(part.bytes for part in sealed) < sum(part.bytes for part in raw) else raw


def _seal(coding: Coding, sinks: KvBlock, data: bytes, layout: KvLayout) -> bytes:
    return bytes([VARIANT_BYTES[coding]]) + encode_sinks(sinks, layout) + data


class ChunkReading:
    """Layers of one chunk, decoded. Header and checksums are right: `ChunkCoder` has seen to that.

    The owner decoded last is kept for its partner.
    """

    def __init__(
        self, codecs: PlanCodecs, header: ChunkHeader, segments: Mapping[int, memoryview], first_token: int
    ) -> None:
        self._codecs = codecs
        self._header = header
        self._segments = segments
        self._first_token = first_token
        self._rest_tokens = header.tokens - sink_tokens(header.tokens, first_token)
        self._owner: tuple[int, KvBlock] | None = None

    def write(self, layer: int, out: Sequence[memoryview]) -> None:
        """Fill the page segments `out` with a layer.

        Raises:
            Corrupt: "length"
            ValueError: `out` not the pages of this chunk, or read-only.
        """
        if self._header.segments[layer].mode is Mode.raw:
            self._copy(layer, out)
            return
        sinks, _ = self._opened(layer)
        rest = self._rest(layer)
        to_pages(join_blocks([sinks, rest] if sinks.tokens else [rest]), self._codecs.layout, out)

    def _copy(self, layer: int, out: Sequence[memoryview]) -> None:
        data = byte_view(self._segments[layer])
        views = [writable_view(buffer) for buffer in out]
        size = sum(view.nbytes for view in views)
        if size != data.nbytes:
            raise ValueError(f"pages of {size} bytes: expected room for {data.nbytes}")
        start = 0
        for view in views:
            view[:] = data[start : start + view.nbytes]
            start += view.nbytes

    def _opened(self, layer: int) -> tuple[KvBlock, memoryview]:
        """The first tokens and the codec's bytes of a coded segment."""
        data = byte_view(self._segments[layer])
        expected = VARIANT_BYTES[self._codecs.codings[layer]]
        if not data.nbytes or data[0] != expected:
            found = data[0] if data.nbytes else "none"
            raise Corrupt("length", f"layer {layer}: variant {found}, expected {expected}")
        return decode_sinks(data[1:], self._header.tokens, self._first_token, self._codecs.layout)

    def _rest(self, layer: int) -> KvBlock:
        """The layer's block without the first tokens."""
        if self._owner is not None and self._owner[0] == layer:
            return self._owner[1]
        rest = self._decoded(layer)
        if layer in self._codecs.partners:
            self._owner = layer, rest
        return rest

    def _decoded(self, layer: int) -> KvBlock:
        if self._header.segments[layer].mode is Mode.raw:
            block = from_pages([self._segments[layer]], self._codecs.layout)
            return split_sinks(block, self._first_token)[1]
        sinks, data = self._opened(layer)
        if not self._rest_tokens:
            if data.nbytes:
                raise Corrupt("length", f"layer {layer}: {data.nbytes} bytes after its last token")
            return sinks.rows(sinks.tokens, sinks.tokens)
        owner = self._codecs.owners.get(layer)
        codec = self._codecs.codec(layer)
        if codec is not None:
            base = None if owner is None else self._rest(owner)
            return codec.decode(data, self._rest_tokens, base)
        if owner is None:
            return self._codecs.pair.decode_owner(data, self._rest_tokens)
        return self._codecs.pair.decode_partner(data, self._opened(owner)[1], self._rest_tokens)

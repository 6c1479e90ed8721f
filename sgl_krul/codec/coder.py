"""A chunk under a layer plan: page segments of all layers to stored segments, and single layers back.

Whatever the plan says, a layer is stored raw where its codec can't hold its numbers (inf, NaN), where its
coded form would not be smaller than its pages, and where its owner's bytes are not stored; of a merged pair
both are. So the plan says what a segment may be, and the header what it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from sgl_krul.codec.base import Mode
from sgl_krul.codec.frame import ChunkHeader, SegmentEntry, build_segments, verify_segment
from sgl_krul.codec.registry import MERGED_OWNER, MERGED_PARTNER, PLAIN, PlanCodecs
from sgl_krul.codec.segments import ChunkReading, Pages, Stored, encode_unit
from sgl_krul.codec.sinks import sink_bytes, sink_tokens
from sgl_krul.errors import Corrupt
from sgl_krul.layout import KvLayout
from sgl_krul.store import Buffer
from sgl_krul.store.tier import byte_view
from sgl_krul.strategy.layer_plan import LayerPlan

__all__ = ["ChunkCoder", "EncodedChunk"]

# Pages may hold signalling NaN, and damaged segments any numbers: codecs look at what comes out of those.
_ANY_NUMBERS = partial(np.errstate, invalid="ignore", over="ignore")


class EncodedChunk(NamedTuple):
    """The entries of a chunk's header, and its body as buffers to be written one after another.

    Buffers of raw layers are the pages given, and no copies.
    """

    entries: tuple[SegmentEntry, ...]
    buffers: list[Buffer]


class ChunkCoder:
    """Codes and decodes the chunks of one session. Keeps nothing between calls; thread safe.

    `first_token`: the position of a chunk's first token in the session. A chunk may have any number of whole
    pages. Headers of its chunks carry `plan_id`.

    Raises:
        ValueError: a plan for another number of layers.
    """

    def __init__(self, layout: KvLayout, plan: LayerPlan) -> None:
        self.layout = layout
        self.plan = plan
        self._codecs = PlanCodecs(layout, plan)

    @property
    def plan_id(self) -> str:
        """The plan's name in headers."""
        return self._codecs.plan_id

    def encode(self, pages: Sequence[Pages], first_token: int, *, depth: int = 0) -> EncodedChunk:
        """All layers of one chunk: `pages` by layer. The first `depth` of them are neither read nor stored.

        Raises:
            ValueError: another number of layers, other than whole pages, or not as many pages of each layer.
        """
        self._check_pages(pages, depth)
        stored = {layer: Stored(Mode.recompute, ()) for layer in range(depth)}
        for layer in range(depth, self.layout.layers):
            if layer in stored:  # a partner, stored with its owner
                continue
            partner = self._codecs.partners.get(layer)
            unit = (layer,) if partner is None else (layer, partner)
            with _ANY_NUMBERS():
                found = encode_unit(self._codecs, unit, [pages[member] for member in unit], first_token)
            stored.update(zip(unit, found, strict=True))
        order = [stored[layer] for layer in range(self.layout.layers)]
        body = [layer.buffers for layer in order]
        entries = build_segments(body, [layer.mode for layer in order], depth=depth)
        return EncodedChunk(entries, [buffer for buffers in body for buffer in buffers])

    def length(self, layer: int, tokens: int, first_token: int) -> int | None:
        """Bytes of the layer's segment in a chunk of `tokens` tokens, where it is coded as the plan says.

        None where they depend on the numbers: in a merged pair.
        """
        codec = self._codecs.codec(layer)
        if codec is None:
            return self._raw_bytes(tokens) if self._codecs.codings[layer] == PLAIN else None
        rest = tokens - sink_tokens(tokens, first_token)
        inner = codec.length(rest) if rest else 0
        return None if inner is None else 1 + sink_bytes(tokens, first_token, self.layout) + inner

    def needs(self, layer: int, header: ChunkHeader | None = None) -> tuple[int, ...]:
        """The layers whose segments it takes to decode `layer`, ascending: itself, and its owner before it.

        With a chunk's header: in that chunk, where what is stored raw needs no owner.
        """
        owner = self._codecs.owners.get(layer)
        if owner is None or (header is not None and header.segments[layer].mode is Mode.raw):
            return (layer,)
        return owner, layer

    def check_header(self, header: ChunkHeader, first_token: int) -> None:
        """Every segment of the header against the plan.

        Raises:
            Corrupt: "identity": another plan's, or a mode that the plan does not give this layer; "length": a
                length that no such segment has, or one of a pair whose other one is not stored with it.
        """
        self._check_shape(header)
        for layer in range(self.layout.layers):
            self._check_entry(layer, header, first_token)

    def decode_layer(
        self,
        layer: int,
        header: ChunkHeader,
        segments: Mapping[int, memoryview],
        first_token: int,
        out: Sequence[memoryview],
    ) -> None:
        """Fill the page segments `out` of one layer. `segments`: those that `needs` names, and any others.

        Nothing of a segment is looked at before its checksum is right. After an error `out` holds anything.

        Raises:
            Corrupt: "checksum", and as `check_header` for the layers it takes; "identity" too for a layer
                that is not stored.
            ValueError: a segment that is missing; `out` not the pages of this chunk, or read-only.
        """
        self.decode_group((layer,), header, segments, first_token, {layer: out})

    def decode_group(
        self,
        layers: Sequence[int],
        header: ChunkHeader,
        segments: Mapping[int, memoryview],
        first_token: int,
        out: Mapping[int, Sequence[memoryview]],
    ) -> None:
        """As `decode_layer` for each of `layers`: what two of them need is verified and decoded once.

        All segments are verified before anything is written.
        """
        self._check_shape(header)
        needed = sorted({member for layer in layers for member in self.needs(layer, header)})
        for member in needed:
            self._check_entry(member, header, first_token)
        for member in needed:
            entry = header.segments[member]
            if entry.mode is Mode.recompute:
                raise Corrupt("identity", f"layer {member} is wanted, and not stored here")
            if member not in segments:
                raise ValueError(f"segments of layers {sorted(segments)}: expected layer {member} too")
            verify_segment(entry, [segments[member]])
        reading = ChunkReading(self._codecs, header, segments, first_token)
        # A partner comes right after its owner, which the reading keeps so long.
        for layer in sorted(set(layers), key=lambda layer: (self._codecs.owners.get(layer, layer), layer)):
            with _ANY_NUMBERS():
                reading.write(layer, out[layer])

    def _check_pages(self, pages: Sequence[Pages], depth: int) -> None:
        if len(pages) != self.layout.layers or not 0 <= depth <= self.layout.layers:
            raise ValueError(
                f"pages of {len(pages)} layers, depth {depth}: expected {self.layout.layers}, and no deeper"
            )
        sizes = {sum(byte_view(buffer).nbytes for buffer in layer) for layer in pages[depth:]}
        if len(sizes) > 1 or 0 in sizes:
            raise ValueError(
                f"layers of {sorted(sizes)} bytes: expected as many pages of each, and at least one"
            )

    def _check_shape(self, header: ChunkHeader) -> None:
        if header.plan_id != self.plan_id:
            raise Corrupt("identity", f"plan {header.plan_id!r}, expected {self.plan_id!r}")
        if len(header.segments) != self.layout.layers:
            raise Corrupt(
                "identity", f"{len(header.segments)} segments, this model has {self.layout.layers} layers"
            )
        if header.tokens % self.layout.page_size:
            raise Corrupt("length", f"{header.tokens} tokens, in pages of {self.layout.page_size}")

    def _check_entry(self, layer: int, header: ChunkHeader, first_token: int) -> None:
        entry = header.segments[layer]
        raw_bytes = self._raw_bytes(header.tokens)
        if entry.mode is Mode.recompute:
            return  # without bytes, and before all others: the frame has checked that
        if entry.mode is Mode.raw:
            if entry.length != raw_bytes:
                raise Corrupt("length", f"layer {layer}: {entry.length} bytes raw, expected {raw_bytes}")
            return
        coding = self._codecs.codings[layer]
        if entry.mode.value != coding[0]:
            raise Corrupt("identity", f"layer {layer}: mode {entry.mode.value}, the plan says {coding[0]}")
        length = self.length(layer, header.tokens, first_token)
        # What depends on the numbers is smaller than both layers' pages, or it would have been stored raw.
        if entry.length != length if length is not None else not 0 < entry.length < 2 * raw_bytes:
            raise Corrupt("length", f"layer {layer}: {entry.length} bytes of {'/'.join(coding)}")
        other = self._codecs.partners[layer] if coding == MERGED_OWNER else self._codecs.owners.get(layer)
        if other is None:
            return
        mode = header.segments[other].mode
        merged = coding in (MERGED_OWNER, MERGED_PARTNER)
        if merged and entry.length + header.segments[other].length >= 2 * raw_bytes:
            raise Corrupt("length", f"layers {layer} and {other}: a merged pair of more bytes than raw")
        if mode is Mode.recompute or (merged and mode is not Mode.shared):
            raise Corrupt("length", f"layer {layer}: {'/'.join(coding)}, and layer {other} is {mode.value}")

    def _raw_bytes(self, tokens: int) -> int:
        return tokens // self.layout.page_size * self.layout.page_segment_bytes

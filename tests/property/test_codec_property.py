"""Coded chunks of any plan and shape: what comes back, and what damage does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_krul.codec import (
    ChunkCoder,
    ChunkHeader,
    KvBlock,
    Mode,
    SegmentEntry,
    build_segments,
    decode_header,
    encode_header,
    from_pages,
    to_pages,
    token_digest,
)
from sgl_krul.codec.quantized import GroupCodec
from sgl_krul.errors import Corrupt
from sgl_krul.layout import KvLayout
from sgl_krul.strategy import LayerChoice, LayerPlan
from tests.blocks import DTYPES, same

ALONE = [LayerChoice("raw"), *(LayerChoice("quantized", variant) for variant in ("bf16", "int8", "int4"))]


@st.composite
def plans(draw: st.DrawFn) -> LayerPlan:
    """Any legal plan of 1 to 6 layers."""
    layers = draw(st.integers(1, 6))
    choices = [draw(st.sampled_from(ALONE)) for _ in range(layers)]
    order = draw(st.permutations(range(layers)))
    for at in range(draw(st.integers(0, layers // 2))):
        owner, partner = sorted(order[2 * at : 2 * at + 2])
        if draw(st.booleans()):
            choices[partner] = LayerChoice("shared", "raw", owner)
        else:
            choices[owner] = LayerChoice("shared", "merged-owner")
            choices[partner] = LayerChoice("shared", "merged", owner)
    return LayerPlan(tuple(choices))


@st.composite
def layouts(draw: st.DrawFn, layers: int = 1) -> KvLayout:
    return KvLayout(
        layers=layers,
        kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([1, 2, 7, 16])),
        v_head_dim=draw(st.sampled_from([1, 3, 8, 16])),
        dtype=draw(st.sampled_from(DTYPES)),
        page_size=draw(st.sampled_from([1, 4, 16])),
        rope="for tests",
    )


def any_pages(draw: st.DrawFn, layout: KvLayout, pages: int) -> bytes:
    """Numbers of a model, or any bytes at all: NaN, infinities, subnormals."""
    seed = draw(st.integers(0, 1 << 32))
    rng = np.random.default_rng(seed)
    if draw(st.integers(0, 5)) == 0:
        return rng.bytes(pages * layout.page_segment_bytes)
    tokens = pages * layout.page_size
    scale = np.float32(10.0 ** draw(st.integers(-6, 3)))
    k = scale * rng.standard_normal((tokens, layout.kv_heads, layout.head_dim), np.float32)
    v = scale * rng.standard_normal((tokens, layout.kv_heads, layout.v_head_dim), np.float32)
    data = bytearray(pages * layout.page_segment_bytes)
    to_pages(KvBlock(k, v), layout, [memoryview(data)])
    return bytes(data)


class Stored:
    """A chunk of any plan, coded."""

    def __init__(self, draw: st.DrawFn) -> None:
        plan = draw(plans())
        self.layout = draw(layouts(len(plan.choices)))
        self.layers = self.layout.layers
        pages = draw(st.integers(1, 5))
        self.tokens = pages * self.layout.page_size
        self.first_token = draw(st.sampled_from([0, self.layout.page_size, 1 << 18]))
        self.pages = [any_pages(draw, self.layout, pages) for _ in range(self.layers)]
        self.coder = ChunkCoder(self.layout, plan)
        self.depth = draw(st.integers(0, self.layers)) if draw(st.booleans()) else 0
        entries, buffers = self.coder.encode(
            [[layer] for layer in self.pages], self.first_token, depth=self.depth
        )
        body = b"".join(buffers)
        self.segments = [body[entry.offset : entry.offset + entry.length] for entry in entries]
        self.header = self.header_of(entries)

    def header_of(self, entries: tuple[SegmentEntry, ...]) -> ChunkHeader:
        digest = token_digest(range(self.tokens))
        return ChunkHeader("n", "h", digest, self.tokens, self.coder.plan_id, entries)

    def views(self) -> dict[int, memoryview]:
        return {layer: memoryview(segment) for layer, segment in enumerate(self.segments)}

    def decoded(self, layer: int) -> bytes:
        out = bytearray(len(self.pages[0]))
        self.coder.decode_layer(layer, self.header, self.views(), self.first_token, [memoryview(out)])
        return bytes(out)


@st.composite
def chunks(draw: st.DrawFn) -> Stored:
    return Stored(draw)


@given(chunks())
@settings(max_examples=150)
def test_a_chunk_comes_back(chunk: Stored) -> None:
    """Alone or with others, raw layers bit for bit, finite numbers as finite ones; its header is legal."""
    header = decode_header(encode_header(chunk.header))
    assert header == chunk.header
    chunk.coder.check_header(header, chunk.first_token)
    layers = range(chunk.depth, chunk.layers)
    out = {layer: [memoryview(bytearray(len(chunk.pages[0])))] for layer in layers}
    chunk.coder.decode_group(layers, header, chunk.views(), chunk.first_token, out)
    for layer in layers:
        entry = header.segments[layer]
        assert bytes(out[layer][0]) == chunk.decoded(layer)
        exact, found = (from_pages([data], chunk.layout) for data in (chunk.pages[layer], out[layer][0]))
        if entry.mode is Mode.raw:
            assert out[layer][0] == chunk.pages[layer]
        else:
            assert np.isfinite(found.v).all() or not np.isfinite(exact.v).all()
            if entry.mode is Mode.quantized:
                assert entry.length == chunk.coder.length(layer, chunk.tokens, chunk.first_token)
        assert set(chunk.coder.needs(layer, header)) <= set(chunk.coder.needs(layer))
    total = sum(entry.length for entry in header.segments)
    assert total <= sum(len(chunk.pages[layer]) for layer in layers)


@given(chunks())
@settings(max_examples=40)
def test_the_same_pages_give_the_same_chunk(chunk: Stored) -> None:
    pages = [[layer] for layer in chunk.pages]
    again = ChunkCoder(chunk.layout, LayerPlan.decode(chunk.coder.plan.encode()))
    entries, buffers = again.encode(pages, chunk.first_token, depth=chunk.depth)
    assert entries == chunk.header.segments
    assert b"".join(buffers) == b"".join(chunk.segments)


@given(chunks(), st.data())
@settings(max_examples=100)
def test_well_sealed_nonsense_is_corrupt_or_a_layer(chunk: Stored, data: st.DataObject) -> None:
    """Other bytes under their own good checksum: Corrupt, or pages of the right size, and no other error."""
    if chunk.depth == chunk.layers:
        return
    layer = data.draw(st.integers(chunk.depth, chunk.layers - 1))
    good = chunk.segments[layer]
    kind = data.draw(st.sampled_from(["random", "changed", "short", "long", "any"]))
    if kind == "random":
        bad = np.random.default_rng(data.draw(st.integers(0, 1 << 32))).bytes(len(good))
        bad = good[:1] + bad[1:]
    elif kind == "changed":
        at = data.draw(st.integers(0, len(good) - 1))
        bad = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    elif kind == "short":
        bad = good[: data.draw(st.integers(0, len(good) - 1))]
    else:
        bad = (good if kind == "long" else b"") + data.draw(st.binary(min_size=1, max_size=40))
    chunk.segments[layer] = bad
    modes = [entry.mode for entry in chunk.header.segments]
    entries = build_segments([[each] for each in chunk.segments], modes, depth=chunk.depth)
    chunk.header = chunk.header_of(entries)
    for member in range(chunk.depth, chunk.layers):
        try:
            chunk.decoded(member)
        except Corrupt:
            continue


@given(chunks(), st.data())
@settings(max_examples=100)
def test_a_changed_header_is_corrupt_or_decodes_as_before(chunk: Stored, data: st.DataObject) -> None:
    """Any mode, length or checksum in the place of another: what is let through gives the very same pages."""
    layer = data.draw(st.integers(0, chunk.layers - 1))
    entry = chunk.header.segments[layer]
    other = replace(
        entry,
        mode=data.draw(st.sampled_from(Mode)),
        length=data.draw(st.sampled_from([entry.length, 0, 1, entry.length + 1])),
        checksum=data.draw(st.sampled_from([entry.checksum, 0])),
    )
    entries = list(chunk.header.segments)
    entries[layer] = other
    header = replace(chunk.header, segments=tuple(entries))
    for member in range(chunk.depth, chunk.layers):
        out = bytearray(len(chunk.pages[0]))
        try:
            chunk.coder.decode_layer(member, header, chunk.views(), chunk.first_token, [memoryview(out)])
        except Corrupt:
            continue
        assert bytes(out) == chunk.decoded(member)


@given(st.data())
@settings(max_examples=100)
def test_groups_of_any_numbers(data: st.DataObject) -> None:
    """Within half a step of their span, wherever the numbers lie and however small their differences."""
    layout = data.draw(layouts())
    tokens = data.draw(st.integers(1, 70))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    level = np.float32(data.draw(st.floats(-3e4, 3e4, width=32)))
    scale = np.float32(10.0 ** data.draw(st.integers(-9, 4)))
    arrays = [
        level + scale * rng.uniform(-1, 1, (tokens, layout.kv_heads, width)).astype(np.float32)
        for width in (layout.head_dim, layout.v_head_dim)
    ]
    block = KvBlock(*arrays)
    bits = data.draw(st.sampled_from([4, 8]))
    codec = GroupCodec(layout, bits)
    coded = codec.encode(block, None)
    assert len(coded) == codec.length(tokens)
    read = codec.decode(memoryview(coded), tokens, None)
    largest = max(float(np.abs(array).max()) for array in arrays)
    span = max(float(np.ptp(array)) for array in arrays)
    step = 1.001 * (span + float(np.spacing(np.float16(largest)))) / ((1 << bits) - 1) + 2**-24
    for found, exact in ((read.k, block.k), (read.v, block.v)):
        assert np.abs(found - exact).max() <= step / 2 + 4e-7 * (largest + span)
    assert same(read, codec.decode(memoryview(coded), tokens, None))

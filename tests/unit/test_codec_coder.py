"""Chunks under a layer plan: what is stored, what it takes to read it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from sgl_krul.codec import (
    ChunkCoder,
    ChunkHeader,
    GroupCodec,
    KvBlock,
    LayerCodec,
    Mode,
    SegmentEntry,
    build_segments,
    decode_header,
    encode_header,
    from_pages,
    token_digest,
)
from sgl_krul.codec.registry import VARIANT_BYTES, PlanCodecs, layer_codec
from sgl_krul.codec.segments import ChunkReading, encode_unit
from sgl_krul.errors import Corrupt
from sgl_krul.layout import KvLayout
from sgl_krul.strategy import LayerChoice, LayerPlan
from tests.blocks import DTYPES, block_of, layout_of, pages_of_block, same

INT4 = LayerChoice("quantized", "int4")
INT8 = LayerChoice("quantized", "int8")
BF16 = LayerChoice("quantized", "bf16")
RAW = LayerChoice("raw")
MERGED_OWNER = LayerChoice("shared", "merged-owner")


def shares(owner: int) -> LayerChoice:
    return LayerChoice("shared", "raw", owner)


def merges(owner: int) -> LayerChoice:
    return LayerChoice("shared", "merged", owner)


# Every coding, owners that are neighbours and owners that are not.
PLAN = LayerPlan((RAW, INT4, MERGED_OWNER, BF16, shares(1), INT8, merges(2), shares(3), shares(0)))
LAYERS = len(PLAN.choices)
TOKENS = 48
Rows = dict[int, bytes]


class Chunk(NamedTuple):
    """A chunk as it is stored: its coder, header, and the bytes of each segment."""

    coder: ChunkCoder
    header: ChunkHeader
    segments: dict[int, memoryview]
    first_token: int
    pages: list[bytearray]

    def out(self) -> list[memoryview]:
        return [memoryview(bytearray(len(self.pages[-1])))]

    def layer(self, layer: int) -> bytes:
        """The pages of one layer, decoded from no more than it needs."""
        out = self.out()
        needed = {member: self.segments[member] for member in self.coder.needs(layer, self.header)}
        self.coder.decode_layer(layer, self.header, needed, self.first_token, out)
        return bytes(out[0])

    def block(self, layer: int) -> KvBlock:
        return from_pages([self.layer(layer)], self.coder.layout)

    def modes(self) -> str:
        """The first letter of each layer's mode."""
        return "".join("-" if e.mode is Mode.recompute else e.mode.value[0] for e in self.header.segments)


def layout(dtype: str = "float32", layers: int = LAYERS, page: int = 16) -> KvLayout:
    return layout_of(dtype, layers=layers, heads=3, k=10, v=7, page=page)


def pages_of(shape: KvLayout, tokens: int = TOKENS, spoil: dict[int, float] | None = None) -> list[bytearray]:
    """Random pages by layer; `spoil`: a number to be put into the last token of some layers."""
    pages = []
    for layer in range(shape.layers):
        block = block_of(shape, tokens, layer)
        if spoil and layer in spoil:
            block.v[-1, -1, -1] = spoil[layer]
        pages.append(pages_of_block(block, shape))
    return pages


def header_of(coder: ChunkCoder, entries: tuple[SegmentEntry, ...], tokens: int) -> ChunkHeader:
    return ChunkHeader("n", "ab" * 32, token_digest(range(tokens)), tokens, coder.plan_id, entries)


def store(
    plan: LayerPlan,
    pages: list[bytearray],
    shape: KvLayout,
    first_token: int = 0,
    depth: int = 0,
) -> Chunk:
    """Coded, through header and body as a tier keeps them."""
    coder = ChunkCoder(shape, plan)
    entries, buffers = coder.encode([[layer] for layer in pages], first_token, depth=depth)
    body = memoryview(b"".join(buffers))
    tokens = len(pages[-1]) // shape.page_segment_bytes * shape.page_size
    header = decode_header(encode_header(header_of(coder, entries, tokens)))
    coder.check_header(header, first_token)
    segments = {
        layer: body[entry.offset : entry.offset + entry.length] for layer, entry in enumerate(header.segments)
    }
    return Chunk(coder, header, segments, first_token, pages)


def stored(first_token: int = 0, dtype: str = "float32") -> Chunk:
    shape = layout(dtype)
    return store(PLAN, pages_of(shape), shape, first_token)


def error(found: KvBlock, exact: KvBlock) -> float:
    return float(max(np.abs(found.k - exact.k).max(), np.abs(found.v - exact.v).max()))


@pytest.mark.parametrize("first_token", [0, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layer_comes_back_as_its_coding_says(dtype: str, first_token: int) -> None:
    chunk = stored(first_token, dtype)
    assert chunk.modes() == ("rqsqsqsss" if dtype == "float32" else "rqsrsqsss")
    exact = [from_pages([layer], chunk.coder.layout) for layer in chunk.pages]
    assert chunk.layer(0) == chunk.pages[0]
    assert error(chunk.block(1), exact[1]) < 1.2
    assert error(chunk.block(3), exact[3]) < 0.13
    assert error(chunk.block(5), exact[5]) < 0.15
    begin = 4 if first_token == 0 else 0
    for partner, owner in ((4, 1), (7, 3), (8, 0)):
        found, base = chunk.block(partner), chunk.block(owner)
        assert same(found.rows(begin, TOKENS), base.rows(begin, TOKENS))
        if begin:
            assert error(found.rows(0, begin), exact[partner].rows(0, begin)) < 0.13


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_tokens_of_a_session_are_exact_in_every_layer(dtype: str) -> None:
    """In 16 bits, and in the chunk that begins with token 0 alone."""
    chunk = stored(0, dtype)
    later = stored(TOKENS, dtype)
    for layer in range(LAYERS):
        exact = from_pages([chunk.pages[layer]], chunk.coder.layout)
        found = chunk.block(layer)
        assert np.allclose(found.k[:4], exact.k[:4], rtol=2**-8 if dtype == "float32" else 0, atol=0)
        assert np.allclose(found.v[:4], exact.v[:4], rtol=2**-8 if dtype == "float32" else 0, atol=0)
    assert error(later.block(4).rows(0, 4), from_pages([later.pages[4]], later.coder.layout).rows(0, 4)) > 1


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 41, 123])
@pytest.mark.parametrize("first_token", [0, 123])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_any_number_of_tokens(dtype: str, first_token: int, tokens: int) -> None:
    shape = layout(dtype, page=1)
    chunk = store(PLAN, pages_of(shape, tokens), shape, first_token)
    for layer, entry in enumerate(chunk.header.segments):
        found = chunk.block(layer)
        assert found.tokens == tokens
        assert np.isfinite(found.k).all()
        expected = chunk.coder.length(layer, tokens, first_token)
        if entry.mode is Mode.raw:
            assert chunk.layer(layer) == chunk.pages[layer]
            assert expected is None or expected >= len(chunk.pages[layer])
        else:
            assert expected in (None, entry.length)


def test_a_segment_begins_with_its_variant() -> None:
    chunk = stored()
    for layer, choice in enumerate(PLAN.choices):
        if choice.mode != "raw":
            assert chunk.segments[layer][0] == VARIANT_BYTES[choice.coding]
    assert len(set(VARIANT_BYTES.values())) == len(VARIANT_BYTES)


def test_bytes_of_raw_sharing_are_one_and_the_first_tokens() -> None:
    assert len(stored(256).segments[4]) == 1
    assert len(stored(0).segments[4]) == 1 + 4 * 2 * 3 * 17


class WatchedCodec:
    """A codec that notes the bases it is given, and how often it decodes."""

    def __init__(self, codec: LayerCodec) -> None:
        self.codec = codec
        self.mode = codec.mode
        self.encoded: list[KvBlock | None] = []
        self.decoded: list[KvBlock | None] = []

    def length(self, tokens: int) -> int | None:
        return self.codec.length(tokens)

    def encode(self, block: KvBlock, base: KvBlock | None) -> bytes:
        self.encoded.append(base)
        return self.codec.encode(block, base)

    def decode(self, data: memoryview, tokens: int, base: KvBlock | None) -> KvBlock:
        self.decoded.append(base)
        return self.codec.decode(data, tokens, base)


class WatchedCodecs(PlanCodecs):
    """A plan whose codecs are watched."""

    def __init__(self, shape: KvLayout, plan: LayerPlan) -> None:
        super().__init__(shape, plan)
        self.watched: dict[int, WatchedCodec] = {}

    def codec(self, layer: int) -> LayerCodec | None:
        codec = super().codec(layer)
        if codec is None:
            return None
        return self.watched.setdefault(layer, WatchedCodec(codec))


def test_a_partner_is_coded_against_its_owner_as_decoded() -> None:
    """The loop is closed: the base is what the decoder will have, bit for bit, and not the exact owner."""
    shape = layout("bfloat16", layers=2)
    plan = LayerPlan((INT4, shares(0)))
    pages = pages_of(shape)
    codecs = WatchedCodecs(shape, plan)
    encode_unit(codecs, (0, 1), [[layer] for layer in pages], 0)
    chunk = store(plan, pages, shape)
    reading = ChunkReading(codecs, chunk.header, chunk.segments, 0)
    reading.write(1, chunk.out())
    (encoded,), (decoded,) = codecs.watched[1].encoded, codecs.watched[1].decoded
    assert encoded is not None
    assert decoded is not None
    assert same(encoded, decoded)
    exact = from_pages([pages[0]], shape).rows(4, TOKENS)
    assert not same(encoded, exact)
    codec = GroupCodec(shape, 4)
    assert same(encoded, codec.decode(memoryview(codec.encode(exact, None)), TOKENS - 4, None))


def test_an_owner_is_decoded_once_for_itself_and_its_partner() -> None:
    chunk = stored()
    codecs = WatchedCodecs(chunk.coder.layout, PLAN)
    reading = ChunkReading(codecs, chunk.header, chunk.segments, 0)
    for layer in (1, 4, 3, 7):
        reading.write(layer, chunk.out())
    assert {layer: len(codec.decoded) for layer, codec in codecs.watched.items()} == {1: 1, 4: 1, 3: 1, 7: 1}


def test_what_a_layer_needs() -> None:
    chunk = stored()
    needs = [chunk.coder.needs(layer) for layer in range(LAYERS)]
    assert needs == [(0,), (1,), (2,), (3,), (1, 4), (5,), (2, 6), (3, 7), (0, 8)]
    for layer in range(LAYERS):
        assert chunk.coder.needs(layer, chunk.header) == needs[layer]
        for absent in needs[layer]:
            rest = {member: chunk.segments[member] for member in needs[layer] if member != absent}
            with pytest.raises(ValueError, match=f"expected layer {absent} too"):
                chunk.coder.decode_layer(layer, chunk.header, rest, 0, chunk.out())


def test_a_group_is_what_its_layers_are_one_by_one() -> None:
    chunk = stored()
    out = {layer: chunk.out() for layer in range(LAYERS)}
    chunk.coder.decode_group([8, 6, 7, 0, 1, 2, 3, 4, 5, 1], chunk.header, chunk.segments, 0, out)
    for layer in range(LAYERS):
        assert bytes(out[layer][0]) == chunk.layer(layer)


def test_pages_may_be_given_in_pieces() -> None:
    chunk = stored()
    size = chunk.coder.layout.page_segment_bytes
    pieces = [[layer[:size], layer[size:]] for layer in chunk.pages]
    entries, buffers = chunk.coder.encode(pieces, 0)
    assert entries == chunk.header.segments
    assert b"".join(buffers) == b"".join(chunk.segments[layer] for layer in range(LAYERS))
    for layer in range(LAYERS):
        out = [memoryview(bytearray(2 * size)), memoryview(bytearray(size))]
        chunk.coder.decode_layer(layer, chunk.header, chunk.segments, 0, out)
        assert b"".join(out) == chunk.layer(layer)


def test_raw_layers_are_not_copied() -> None:
    shape = layout()
    pages = pages_of(shape)
    _, buffers = ChunkCoder(shape, LayerPlan.uniform(LAYERS)).encode([[layer] for layer in pages], 0)
    assert [memoryview(buffer).obj for buffer in buffers] == pages


# -- what can't be coded --


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize(
    ("layer", "modes"),
    [
        (0, "rqsqsqss?"),
        (1, "rrsq?qsss"),
        (2, "rq?qsq?ss"),
        (3, "rqsqsqs?s"),
        (4, "rqsq?qsss"),
        (5, "rqsqsrsss"),
        (6, "rq?qsq?ss"),
        (8, "rqsqsqss?"),
    ],
)
def test_numbers_that_a_codec_can_not_hold_are_stored_raw(layer: int, modes: str, number: float) -> None:
    """With whoever would be decoded from them: a large number may be shared, an infinite one not."""
    shape = layout()
    pages = pages_of(shape, spoil={layer: number})
    chunk = store(PLAN, pages, shape)
    assert chunk.modes() == modes.replace("?", "s" if np.isfinite(number) else "r")
    for index, entry in enumerate(chunk.header.segments):
        if entry.mode is Mode.raw:
            assert chunk.coder.needs(index, chunk.header) == (index,)
            assert chunk.layer(index) == pages[index]


def test_nothing_is_stored_that_is_not_smaller_than_its_pages() -> None:
    """16 bits in a pool of 16 bits, and groups of a single token."""
    shape = layout("bfloat16", layers=4, page=1)
    plan = LayerPlan((BF16, MERGED_OWNER, merges(1), INT8))
    chunk = store(plan, pages_of(shape, 1), shape, 256)
    raw = shape.page_segment_bytes
    assert chunk.modes()[0] == "r"
    assert sum(entry.length for entry in chunk.header.segments[1:3]) <= 2 * raw
    assert chunk.header.segments[3].length == raw


def test_a_merged_pair_that_is_not_smaller_than_its_pages_is_stored_raw() -> None:
    """Opposite vectors have no direction between them: all of them are kept, in both layers."""
    shape = layout("bfloat16", layers=2)
    block = from_pages([pages_of(shape)[0]], shape)
    pages = [pages_of_block(each, shape) for each in (block, KvBlock(-block.k, -block.v))]
    chunk = store(LayerPlan((MERGED_OWNER, merges(0))), pages, shape, 256)
    assert chunk.modes() == "rr"
    assert [chunk.layer(layer) for layer in (0, 1)] == pages


# -- leading layers that are recomputed --


@pytest.mark.parametrize(
    ("depth", "modes"), [(0, "rqsqsqsss"), (1, "-qsqsqssr"), (2, "--sqrqssr"), (3, "---qrqrsr"), (9, "-" * 9)]
)
def test_layers_that_are_not_stored(depth: int, modes: str) -> None:
    """Partners whose owner is not there are stored raw."""
    shape = layout()
    pages = [bytearray()] * depth + pages_of(shape)[depth:]
    coder = ChunkCoder(shape, PLAN)
    if depth < LAYERS:
        chunk = store(PLAN, pages, shape, 0, depth)
        assert chunk.modes() == modes
        for layer in range(depth, LAYERS):
            chunk.layer(layer)
        for layer in range(depth):
            with pytest.raises(Corrupt, match=r"identity: layer \d is wanted, and not stored"):
                chunk.layer(layer)
        return
    entries, buffers = coder.encode([()] * LAYERS, 0, depth=depth)
    assert [entry.mode for entry in entries] == [Mode.recompute] * LAYERS
    assert buffers == []


@pytest.mark.parametrize("tokens", [3, 4, 5])
def test_a_partner_of_few_tokens_without_its_owner(tokens: int) -> None:
    """There is nothing to share but the owner's first tokens, and those it doesn't need."""
    shape = layout(layers=2, page=1)
    chunk = store(LayerPlan((INT4, shares(0))), pages_of(shape, tokens), shape, 0, depth=1)
    assert chunk.modes() == "-r"
    assert chunk.layer(1) == chunk.pages[1]


# -- headers and segments that no encoder writes --


def changed(header: ChunkHeader, layer: int, **fields: object) -> ChunkHeader:
    """The header with another segment; those after it move."""
    entries = list(header.segments)
    entries[layer] = replace(entries[layer], **fields)  # type: ignore[arg-type]
    offset = 0
    for index, entry in enumerate(entries):
        entries[index] = replace(entry, offset=offset)
        offset += entry.length
    return replace(header, segments=tuple(entries))


@pytest.mark.parametrize(
    ("layer", "fields", "said"),
    [
        (0, {"mode": Mode.quantized}, "identity: layer 0: mode quantized, the plan says raw"),
        (1, {"mode": Mode.shared}, "identity: layer 1: mode shared, the plan says quantized"),
        (4, {"mode": Mode.quantized}, "identity: layer 4: mode quantized, the plan says shared"),
        (5, {"mode": Mode.lowrank}, "identity: layer 5: mode lowrank"),
        (1, {"length": 7}, "length: layer 1: 7 bytes of quantized/int4"),
        (1, {"mode": Mode.raw}, "length: layer 1: .* bytes raw"),
        (0, {"length": 16}, "length: layer 0: 16 bytes raw"),
        (4, {"length": 2}, "length: layer 4: 2 bytes of shared/raw"),
        (2, {"length": 0}, "length: layer 2: 0 bytes of shared/merged-owner"),
        (6, {"length": 1 << 40}, "length: layers 2 and 6: a merged pair of more bytes than raw"),
        (
            2,
            {"mode": Mode.raw, "length": 3 * 16 * 51 * 4},
            "length: layer 6: shared/merged, and layer 2 is raw",
        ),
        (
            6,
            {"mode": Mode.raw, "length": 3 * 16 * 51 * 4},
            "length: layer 2: shared/merged-owner, and layer 6",
        ),
        (
            2,
            {"mode": Mode.recompute, "length": 0},
            "length: layer 6: shared/merged, and layer 2 is recompute",
        ),
        (1, {"mode": Mode.recompute, "length": 0}, "length: layer 4: shared/raw, and layer 1 is recompute"),
        (0, {"mode": Mode.recompute, "length": 0}, "length: layer 8: shared/raw, and layer 0 is recompute"),
    ],
)
def test_segments_that_the_plan_does_not_allow(layer: int, fields: dict[str, object], said: str) -> None:
    chunk = stored()
    header = changed(chunk.header, layer, **fields)
    with pytest.raises(Corrupt, match=said):
        chunk.coder.check_header(header, 0)
    out = {index: chunk.out() for index in range(LAYERS)}
    with pytest.raises(Corrupt, match=said):
        chunk.coder.decode_group(range(LAYERS), header, chunk.segments, 0, out)


def test_headers_of_another_plan_shape_or_place() -> None:
    chunk = stored()
    for header, said in (
        (replace(chunk.header, plan_id="raw"), "identity: plan 'raw'"),
        (replace(chunk.header, plan_id=LayerPlan.uniform(LAYERS).plan_id), "identity: plan 'k1-"),
        (replace(chunk.header, segments=chunk.header.segments[:-1]), "identity: 8 segments"),
        (replace(chunk.header, tokens=TOKENS - 1), "length: 47 tokens, in pages of 16"),
        (replace(chunk.header, tokens=TOKENS + 16), "length: layer 0"),
    ):
        with pytest.raises(Corrupt, match=said):
            chunk.coder.check_header(header, 0)
        with pytest.raises(Corrupt, match=said):
            chunk.coder.decode_layer(0, header, chunk.segments, 0, chunk.out())
    for layer in (1, 4, 5):  # the first tokens are looked for where they are not
        with pytest.raises(Corrupt, match="length"):
            chunk.coder.decode_layer(layer, chunk.header, chunk.segments, 16, chunk.out())


@pytest.mark.parametrize("layer", range(LAYERS))
def test_nothing_is_decoded_before_its_checksum_is_right(layer: int) -> None:
    """A flipped bit in any segment it takes, or one of another length: Corrupt, and no byte is written."""
    chunk = stored()
    for member in chunk.coder.needs(layer):
        good = bytes(chunk.segments[member])
        flipped = bytearray(good)
        flipped[-1] ^= 1
        for bad, reason in ((bytes(flipped), "checksum"), (good[:-1], "length"), (good + b"\0", "length")):
            out = chunk.out()
            with pytest.raises(Corrupt) as caught:
                chunk.coder.decode_layer(
                    layer, chunk.header, {**chunk.segments, member: memoryview(bad)}, 0, out
                )
            assert caught.value.reason == reason
            assert not any(out[0])


def resealed(chunk: Chunk, layer: int, data: bytes) -> Chunk:
    """The chunk with other bytes for a layer, under their own good checksum."""
    body = [bytes(chunk.segments[index]) for index in range(LAYERS)]
    body[layer] = data
    modes = [entry.mode for entry in chunk.header.segments]
    header = replace(chunk.header, segments=build_segments([[each] for each in body], modes))
    return chunk._replace(header=header, segments={**chunk.segments, layer: memoryview(data)})


@pytest.mark.parametrize("layer", [layer for layer in range(LAYERS) if layer != 0])
@pytest.mark.parametrize("change", [lambda byte: byte ^ 1, lambda byte: 0, lambda byte: 255])
def test_another_variant_is_corrupt(layer: int, change: Callable[[int], int]) -> None:
    chunk = stored()
    data = bytearray(chunk.segments[layer])
    data[0] = change(data[0])
    with pytest.raises(Corrupt, match=f"length: layer {layer}: variant"):
        resealed(chunk, layer, bytes(data)).layer(layer)


def test_a_merged_segment_cut_into_its_first_tokens() -> None:
    chunk = stored()
    for layer in (2, 6):
        for length in (1, 2, 100, 1 + 4 * 2 * 51, len(chunk.segments[layer]) - 1):
            with pytest.raises(Corrupt, match="length"):
                resealed(chunk, layer, bytes(chunk.segments[layer][:length])).layer(layer)


def test_a_chunk_of_first_tokens_alone_has_nothing_more() -> None:
    shape = layout(layers=2, page=1)
    chunk = store(LayerPlan((MERGED_OWNER, merges(0))), pages_of(shape, 3), shape)
    body = [bytes(chunk.segments[0]) + b"\0", bytes(chunk.segments[1])]
    header = replace(chunk.header, segments=build_segments([[each] for each in body], Mode.shared))
    longer = chunk._replace(header=header, segments={0: memoryview(body[0]), 1: memoryview(body[1])})
    with pytest.raises(Corrupt, match="length: layer 0: 1 bytes after its last token"):
        longer.layer(0)


# -- arguments --


def test_what_does_not_fit_the_layout_is_refused() -> None:
    shape = layout()
    coder = ChunkCoder(shape, PLAN)
    pages: Sequence[Sequence[bytearray]] = [[layer] for layer in pages_of(shape)]
    size = shape.page_segment_bytes
    with pytest.raises(ValueError, match="plan for 9 layers: expected 3"):
        ChunkCoder(layout(layers=3), PLAN)
    with pytest.raises(ValueError, match="pages of 8 layers"):
        coder.encode(pages[:-1], 0)
    with pytest.raises(ValueError, match="depth 10"):
        coder.encode(pages, 0, depth=10)
    with pytest.raises(ValueError, match="as many pages of each"):
        coder.encode([*pages[:-1], [bytearray(size)]], 0)
    with pytest.raises(ValueError, match="at least one"):
        coder.encode([[]] * LAYERS, 0)
    with pytest.raises(ValueError, match="multiple of"):
        coder.encode([[bytearray(size + 1)]] * LAYERS, 0)
    with pytest.raises(ValueError, match="expected raw or one of quantized/bf16"):
        layer_codec(("quantized", "int3"), shape)


@pytest.mark.parametrize("layer", [0, 1, 4, 6])
def test_pages_that_do_not_fit_the_chunk(layer: int) -> None:
    chunk = stored()
    size = len(chunk.pages[0])
    page = chunk.coder.layout.page_segment_bytes
    for out in ([memoryview(bytes(size))], [memoryview(bytearray(size + 1))]):
        with pytest.raises(ValueError, match="expected"):
            chunk.coder.decode_layer(layer, chunk.header, chunk.segments, 0, out)
    for length in (size + page, size - page):
        with pytest.raises(ValueError, match="expected room for"):
            chunk.coder.decode_layer(layer, chunk.header, chunk.segments, 0, [memoryview(bytearray(length))])

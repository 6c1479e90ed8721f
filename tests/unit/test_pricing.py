"""The table of prices against a session that is really stored under each plan, and time running out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from sgl_krul.codec import ChunkHeader, encode_header
from sgl_krul.codec.block import KvBlock, from_pages, join_blocks, to_pages
from sgl_krul.codec.coder import ChunkCoder
from sgl_krul.codec.loss import LossMeter, Queries
from sgl_krul.codec.pricing import Chunks, Prices, price
from sgl_krul.layout import KvLayout
from sgl_krul.strategy import RAW, LayerChoice, LayerPlan, Offer, Pair, Sharing, Wish, plan_layers

LAYERS = 4
CHUNK_TOKENS = (64, 64, 16)
INT4, INT8, BF16 = (LayerChoice("quantized", variant) for variant in ("int4", "int8", "bf16"))
PAIR = Pair(1, 3)
RAW_PARTNER = LayerChoice("shared", "raw", 1)
MERGED = (LayerChoice("shared", "merged-owner"), LayerChoice("shared", "merged", 1))


def layout(dtype: str = "float32") -> KvLayout:
    return KvLayout(LAYERS, 2, 16, 8, dtype, 8, "none")


def session(shape: KvLayout, seed: int = 0) -> Chunks:
    """The pages of a session, its layers alike. By chunk, then by layer."""
    rng = np.random.default_rng(seed)
    chunks = []
    for tokens in CHUNK_TOKENS:
        common = [rng.normal(size=(tokens, 2, width)) for width in (16, 8)]
        layers = []
        for _ in range(LAYERS):
            k, v = (part + 0.3 * rng.normal(size=part.shape) for part in common)
            pages = bytearray(tokens // shape.page_size * shape.page_segment_bytes)
            to_pages(KvBlock(k.astype(np.float32), v.astype(np.float32)), shape, [memoryview(pages)])
            layers.append([pages])
        chunks.append(layers)
    return chunks


def queries(rows: int = 20) -> list[Queries]:
    rng = np.random.default_rng(9)
    positions = np.sort(rng.permutation(sum(CHUNK_TOKENS))[:rows])
    return [
        Queries(rng.normal(size=(rows, 6, 16)).astype(np.float32), positions, 0.25) for _ in range(LAYERS)
    ]


def stored(
    shape: KvLayout, chunks: Chunks, choices: Sequence[LayerChoice]
) -> tuple[list[int], list[KvBlock]]:
    """Bytes of each layer's segments, and each layer as it comes back, of a session under a plan."""
    coder = ChunkCoder(shape, LayerPlan(tuple(choices)))
    sizes = np.zeros(LAYERS, np.int64)
    layers: list[list[KvBlock]] = [[] for _ in range(LAYERS)]
    first = 0
    for pages, tokens in zip(chunks, CHUNK_TOKENS, strict=True):
        entries, buffers = coder.encode(pages, first)
        header = ChunkHeader("n", "h", "0" * 64, tokens, coder.plan_id, entries)
        encode_header(header)  # it can be written
        body = memoryview(b"".join(buffers))
        segments = {i: body[e.offset : e.offset + e.length] for i, e in enumerate(entries)}
        for layer in range(LAYERS):
            out = bytearray(len(pages[layer][0]))
            coder.decode_layer(layer, header, segments, first, [memoryview(out)])
            layers[layer].append(from_pages([out], shape))
            sizes[layer] += entries[layer].length
        first += tokens
    return sizes.tolist(), [join_blocks(parts) for parts in layers]


def measured(shape: KvLayout, chunks: Chunks, choices: Sequence[LayerChoice]) -> list[Offer]:
    """What each layer comes to under a plan."""
    sizes, layers = stored(shape, chunks, choices)
    _, exact = stored(shape, chunks, [RAW] * LAYERS)
    meter = LossMeter()
    losses = [
        meter.measure(asked, one, [other]).losses[0]
        for asked, one, other in zip(queries(), exact, layers, strict=True)
    ]
    return [Offer(*each) for each in zip(choices, sizes, losses, strict=True)]


def priced(
    shape: KvLayout, chunks: Chunks, wish: Wish, pairs: Sequence[Pair] = ()
) -> list[dict[LayerChoice, Offer]]:
    found = price(chunks, shape, queries(), wish, pairs, meter=LossMeter())
    assert found.rows == ((20,) * LAYERS if wish.method != "exact" else (0,) * LAYERS)
    return [{offer.choice: offer for offer in row} for row in found.table]


def with_pair(owner: LayerChoice, partner: LayerChoice) -> list[LayerChoice]:
    return [RAW, owner, RAW, partner]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_prices_are_those_of_the_stored_session(dtype: str) -> None:
    shape = layout(dtype)
    chunks = session(shape)
    table = priced(shape, chunks, Wish("int4"))
    for choice in (RAW, BF16, INT8, INT4):
        assert [row[choice] for row in table] == measured(shape, chunks, [choice] * LAYERS)
    assert all(len(row) == 4 for row in table)
    assert all(0 < row[INT8].loss < row[INT4].loss < 0.1 for row in table)
    assert all((row[BF16].loss == 0) == (dtype != "float32") for row in table)


def test_what_is_not_wished_for_is_not_offered() -> None:
    shape = layout()
    chunks = session(shape)
    assert [set(row) for row in priced(shape, chunks, Wish("exact"))] == [{RAW}] * LAYERS
    assert [set(row) for row in priced(shape, chunks, Wish("int8"))] == [{RAW, BF16, INT8}] * LAYERS
    table = priced(shape, chunks, Wish("krul", sharing=Sharing.raw, alone="bf16"), [PAIR])
    alone = {RAW, BF16}
    assert [set(row) for row in table] == [alone, alone, alone, alone | {RAW_PARTNER}]
    table = priced(shape, chunks, Wish("fixed", sharing=Sharing.merged, alone="bf16"), [PAIR])
    assert [set(row) for row in table] == [alone, alone | {MERGED[0]}, alone, alone | {MERGED[1]}]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_partner_of_a_raw_pair_is_priced_against_its_decoded_owner(dtype: str) -> None:
    """At the worst of all ways in which the owner may be stored; the owner by itself."""
    shape = layout(dtype)
    chunks = session(shape)
    table = priced(shape, chunks, Wish("auto"), [PAIR])
    owners = [measured(shape, chunks, with_pair(owner, RAW_PARTNER)) for owner in (RAW, BF16, INT8, INT4)]
    offer = table[3][RAW_PARTNER]
    assert offer.loss == max(plan[3].loss for plan in owners)
    assert len({plan[3].loss for plan in owners}) > 2  # so it does matter how the owner is stored
    assert {offer.bytes} == {plan[3].bytes for plan in owners}
    for plan in owners:
        assert table[1][plan[1].choice] == plan[1]


def test_a_merged_pair_is_priced_as_a_pair() -> None:
    shape = layout()
    chunks = session(shape)
    table = priced(shape, chunks, Wish("auto"), [PAIR])
    plan = measured(shape, chunks, with_pair(*MERGED))
    assert [table[1][MERGED[0]], table[3][MERGED[1]]] == [plan[1], plan[3]]
    assert [table[layer][INT4] for layer in range(LAYERS)] == measured(shape, chunks, [INT4] * LAYERS)


@pytest.mark.parametrize("budget", [1e-5, 1e-3, 0.05, math.inf])
@pytest.mark.parametrize("wish", [Wish("auto"), Wish("krul", sharing=Sharing.raw, alone="int4")])
def test_a_plan_comes_to_what_it_promised(budget: float, wish: Wish) -> None:
    """Stored, read again and measured: within the budget, and the bytes to the last one."""
    shape = layout()
    chunks = session(shape)
    table = price(chunks, shape, queries(), wish, [PAIR], meter=LossMeter()).table
    plan = plan_layers(table, budget, wish)
    offers = measured(shape, chunks, plan.layer_plan.choices)
    assert sum(offer.bytes for offer in offers) == plan.bytes
    assert sum(offer.loss for offer in offers) / LAYERS <= plan.loss * (1 + 1e-12) <= budget * (1 + 1e-12)


def test_a_layer_without_numbers_stays_raw() -> None:
    shape = layout()
    chunks = session(shape)
    np.frombuffer(chunks[1][2][0], np.float32)[5] = np.nan
    wish = Wish("auto")
    found = price(chunks, shape, queries(), wish, [Pair(1, 2)], meter=LossMeter())
    plan = plan_layers(found.table, 0.5, wish).layer_plan
    assert plan.choices[2] == RAW
    assert plan.choices[0] != RAW


class Clock:
    """Each look costs a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def timed(deadline_s: float, pairs: Sequence[Pair] = ()) -> tuple[Prices, float]:
    """The prices, and when they were ready."""
    shape = layout()
    clock = Clock()
    meter = LossMeter(clock=clock)
    found = price(session(shape), shape, queries(), Wish("auto"), pairs, meter=meter, deadline_s=deadline_s)
    return found, clock.now


def test_time_that_is_up_leaves_layers_raw() -> None:
    late, _ = timed(0.0)
    assert late.rows == (0,) * LAYERS
    assert all([offer.choice for offer in row] == [RAW] for row in late.table)
    some, _ = timed(12.0)
    assert some.rows[0] == 8
    assert some.rows[-1] == 0
    plan_layers(some.table, 0.01, Wish("auto"))  # such a table is one


@pytest.mark.parametrize("pairs", [[], [PAIR]])
def test_short_time_takes_rows_first(pairs: list[Pair]) -> None:
    unhurried, _ = timed(math.inf, pairs)
    assert unhurried.rows == (20,) * LAYERS
    assert timed(1e6, pairs)[0] == unhurried
    short, ended = timed(43.5, pairs)
    assert all(8 <= rows < 20 for rows in short.rows)
    assert ended <= 43.5


def test_what_does_not_fit() -> None:
    shape = layout()
    chunks = session(shape)
    meter = LossMeter()
    for these, asked in (([], queries()), (chunks, queries()[1:]), ([chunks[0][1:]], queries())):
        with pytest.raises(ValueError, match="of 4 layers each"):
            price(these, shape, asked, Wish("auto"), [], meter=meter)
    with pytest.raises(ValueError, match="each layer in one of them"):
        price(chunks, shape, queries(), Wish("auto"), [Pair(0, 1), Pair(1, 2)], meter=meter)

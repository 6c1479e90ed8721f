"""What each way to store a layer costs in bytes and in loss: the table from which a layer plan is chosen.

Nothing is estimated. A layer, or a pair, goes through the very coder that stores it, chunk by chunk, first
tokens and all; bytes are those of its segments, and the loss is that of what the decoder gave back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from sgl_krul.codec.block import KvBlock, from_pages, join_blocks
from sgl_krul.codec.coder import ChunkCoder
from sgl_krul.codec.frame import ChunkHeader
from sgl_krul.codec.loss import LossMeter, Probe, Queries
from sgl_krul.codec.segments import Pages
from sgl_krul.layout import KvLayout
from sgl_krul.store.tier import byte_view
from sgl_krul.strategy import RAW, LayerChoice, LayerPlan, Offer, Pair, Wish, priced_choices

__all__ = ["Chunks", "Prices", "price"]

Chunks: TypeAlias = Sequence[Sequence[Pages]]
"""The pages of a session: by chunk, then by layer, as `ChunkCoder.encode` takes them."""

_MERGED_OWNER = LayerChoice("shared", "merged-owner")


class Prices(NamedTuple):
    """What layers are offered: `table`, for `plan_layers`. `rows`: over how many query rows the losses of a
    layer are means; 0 where nothing was to be measured, or time was up: then `raw` is all that is offered."""

    table: tuple[tuple[Offer, ...], ...]
    rows: tuple[int, ...]


def price(
    chunks: Chunks,
    layout: KvLayout,
    queries: Sequence[Queries],
    wish: Wish,
    pairs: Sequence[Pair],
    *,
    meter: LossMeter,
    deadline_s: float = math.inf,
) -> Prices:
    """Every way that `wish` allows to store each layer, and `pairs` (those of `choose_pairs`) as pairs.

    `chunks` is the whole history from token 0 on, `queries` by layer. The partner of a raw pair loses more or
    less by how its owner is stored: it is offered at the largest loss over all ways in which that may be.

    Time: until `deadline_s` of the meter's clock, plus one layer or pair at most. As it grows short fewer
    rows are measured, though never less than 8; then layers are left out. Memory: the numbers of about five
    layers. In the calling thread only.

    Raises:
        ValueError: no chunks, or not as many layers everywhere; a layer in two pairs.
    """
    count = layout.layers
    if not chunks or len(queries) != count or any(len(chunk) != count for chunk in chunks):
        raise ValueError(f"chunks and queries: expected some, of {count} layers each")
    paired = [layer for pair in pairs for layer in (pair.owner, pair.partner)]
    if len(set(paired)) < len(paired):
        raise ValueError(f"pairs {list(pairs)}: expected each layer in one of them at most")
    pricing = _Pricing(chunks, layout, queries, wish, meter)
    units: list[tuple[int, ...]] = [(layer,) for layer in range(count) if layer not in paired]
    units = sorted(units + [(pair.owner, pair.partner) for pair in pairs])
    costs = [pricing.cost(unit) for unit in units]
    for index, unit in enumerate(units):
        now = meter.clock()
        if now >= deadline_s:
            break
        if costs[index]:
            pricing.price(unit, now + (deadline_s - now) * costs[index] / sum(costs[index:]))
    return pricing.prices()


class _Trial(NamedTuple):
    """Layers that are stored together, how, and which of them that says something new about (by place)."""

    layers: tuple[int, ...]
    choices: tuple[LayerChoice, ...]
    told: tuple[int, ...]


class _Pricing:
    """The table while it is made."""

    def __init__(
        self, chunks: Chunks, layout: KvLayout, queries: Sequence[Queries], wish: Wish, meter: LossMeter
    ) -> None:
        self._chunks = chunks
        self._layout = layout
        self._queries = queries
        self._meter = meter
        sizes = [sum(byte_view(page).nbytes for page in chunk[0]) for chunk in chunks]
        self._tokens = [size // layout.page_segment_bytes * layout.page_size for size in sizes]
        (alone,) = priced_choices(wish, 1, ())
        # In a pool of 16 bit numbers a cast to 16 bits changes nothing: the coder leaves such a layer raw.
        given = [RAW] + [choice for choice in alone if choice.variant == "bf16" and layout.itemsize == 2]
        self._own = [choice for choice in alone if choice not in given]
        self._shares = ("shared", "raw") in wish.codings
        self._merges = _MERGED_OWNER.coding in wish.codings
        self._table = [
            {choice: Offer(choice, sum(sizes), 0.0) for choice in given} for _ in range(layout.layers)
        ]
        self._rows = [0] * layout.layers
        self._codec_s = 0.0  # the longest trial so far, without its losses

    def prices(self) -> Prices:
        """What was priced."""
        return Prices(tuple(tuple(row.values()) for row in self._table), tuple(self._rows))

    def cost(self, unit: tuple[int, ...]) -> int:
        """How many attention outputs it takes to price a layer, or an owner and its partner."""
        told = sum(len(trial.told) for trial in self._trials(unit))
        return told + len(unit) if told else 0

    def price(self, unit: tuple[int, ...], deadline_s: float) -> None:
        """Fill the rows of a layer, or of an owner and its partner."""
        trials = self._trials(unit)
        probes = self._probes(trials, deadline_s - self._codec_s * len(trials))
        for trial in trials:
            began = self._meter.clock()
            decoded = self._round_trip(trial)
            self._codec_s = max(self._codec_s, self._meter.clock() - began)
            for place in trial.told:
                block, size = decoded[place]
                layer, choice = trial.layers[place], trial.choices[place]
                if choice.owner is not None:
                    choice = replace(choice, owner=trial.layers[choice.owner])
                loss = probes[layer].loss(block)
                before = self._table[layer].get(choice, Offer(choice, 0, 0.0))
                self._table[layer][choice] = Offer(choice, max(size, before.bytes), max(loss, before.loss))

    def _trials(self, unit: tuple[int, ...]) -> list[_Trial]:
        """What is stored and read again to price a unit. Owners in choices are places in the unit."""
        alone = [_Trial((layer,), (choice,), (0,)) for layer in unit for choice in self._own]
        if len(unit) == 1:
            return alone
        trials = alone
        if self._shares:  # these tell of the owner what it is by itself too
            partner = LayerChoice("shared", "raw", 0)
            trials = [trial for trial in alone if trial.layers != unit[:1]]
            trials += [_Trial(unit, (choice, partner), (0, 1)) for choice in self._own]
            trials.append(_Trial(unit, (RAW, partner), (1,)))
        if self._merges:
            trials.append(_Trial(unit, (_MERGED_OWNER, LayerChoice("shared", "merged", 0)), (0, 1)))
        return trials

    def _probes(self, trials: Sequence[_Trial], deadline_s: float) -> dict[int, Probe]:
        """A probe for each layer, each with its part of the time."""
        told = [trial.layers[place] for trial in trials for place in trial.told]
        layers = sorted(set(told))
        left = len(told) + len(layers)
        probes = {}
        for layer in layers:
            exact = join_blocks([from_pages(chunk[layer], self._layout) for chunk in self._chunks])
            codings = told.count(layer)
            now = self._meter.clock()
            end = now + (deadline_s - now) * (codings + 1) / left
            left -= codings + 1
            probes[layer] = self._meter.probe(self._queries[layer], exact, codings, end)
            self._rows[layer] = probes[layer].rows
        return probes

    def _round_trip(self, trial: _Trial) -> list[tuple[KvBlock, int]]:
        """Each layer of a trial as it is read again, and the bytes of its segments."""
        layout = replace(self._layout, layers=len(trial.layers))
        coder = ChunkCoder(layout, LayerPlan(trial.choices))
        blocks: list[list[KvBlock]] = [[] for _ in trial.layers]
        sizes = [0] * len(trial.layers)
        first = 0
        for chunk, tokens in zip(self._chunks, self._tokens, strict=True):
            pages = [chunk[layer] for layer in trial.layers]
            header, segments = _encoded(coder, pages, tokens, first)
            out = [memoryview(bytearray(sum(byte_view(page).nbytes for page in part))) for part in pages]
            coder.decode_group(
                range(len(out)), header, segments, first, {i: [view] for i, view in enumerate(out)}
            )
            for place, view in enumerate(out):
                blocks[place].append(from_pages([view], layout))
                sizes[place] += header.segments[place].length
            first += tokens
        return [(join_blocks(parts), size) for parts, size in zip(blocks, sizes, strict=True)]


def _encoded(
    coder: ChunkCoder, pages: Sequence[Pages], tokens: int, first_token: int
) -> tuple[ChunkHeader, dict[int, memoryview]]:
    """A chunk as it is stored: its header (of a nameless session) and its segments."""
    encoded = coder.encode(pages, first_token)
    body = memoryview(b"".join(encoded.buffers))
    segments = {
        place: body[entry.offset : entry.offset + entry.length] for place, entry in enumerate(encoded.entries)
    }
    return ChunkHeader("-", "-", "-", tokens, coder.plan_id, encoded.entries), segments

"""Depths of stored sessions: whatever servers of both kinds do in turn, they never rise."""

from __future__ import annotations

import tempfile
from itertools import accumulate, pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_krul.codec.frame import decode_header
from sgl_krul.pause.paper import paper_depths, settle_depths
from sgl_krul.pause.pipeline import write_session
from sgl_krul.service.mover import read_chunk
from sgl_krul.session.catalog import read_manifest
from tests.sessions import CHUNK_TOKENS, LAYOUT, NAMESPACE, NOW, PAGE, TruePages, chat, open_ssd, true_kv

LAYERS = LAYOUT.layers


@given(st.lists(st.integers(1, 300), max_size=12), st.lists(st.integers(0, 2000), min_size=1, max_size=8))
def test_a_layer_left_out_lies_below_its_stair(chunk_tokens: list[int], stairs: list[int]) -> None:
    staircase = sorted(stairs, reverse=True)
    depths = paper_depths(chunk_tokens, staircase)
    assert all(one >= other for one, other in pairwise(depths))
    for end, depth in zip(accumulate(chunk_tokens), depths, strict=True):
        left_out = [layer == 0 or stair >= end for layer, stair in enumerate(staircase)]
        assert left_out == [layer < depth for layer in range(len(staircase))]


@given(st.data(), st.integers(0, 12))
def test_settled_depths_never_rise_and_fix_what_is_kept(data: st.DataObject, count: int) -> None:
    falling = st.lists(st.integers(0, 8), min_size=count, max_size=count).map(
        lambda values: sorted(values, reverse=True)
    )
    wanted, old = data.draw(falling), data.draw(falling)
    stays = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    kept = [depth if stay else None for depth, stay in zip(old, stays, strict=True)]
    settled = settle_depths(wanted, kept)
    assert all(one >= other for one, other in pairwise(settled))
    assert all(depth in (None, found) for depth, found in zip(kept, settled, strict=True))
    if not any(stays):
        assert settled == tuple(wanted)


PAUSES = st.tuples(
    st.integers(0, 400),  # tokens
    st.sampled_from([0, 0, 7000]),  # where they diverge from the others
    st.none() | st.lists(st.integers(0, 400), min_size=LAYERS, max_size=LAYERS),  # staircase; None: raw
    st.none() | st.integers(0, 25),  # pages at hand; None: all
)


@settings(max_examples=60)
@given(st.lists(PAUSES, min_size=1, max_size=6))
def test_raw_and_paper_servers_take_turns(
    pauses: list[tuple[int, int, list[int] | None, int | None]],
) -> None:
    """After each pause: depths never rise, none of a raw server, and all that is stored is true KV."""
    with tempfile.TemporaryDirectory() as directory, open_ssd(Path(directory)) as tier:
        for count, first, stairs, available in pauses:
            session = chat(count, first=first)
            staircase = None if stairs is None else sorted(stairs, reverse=True)
            write_session(
                session.snapshot(),
                TruePages(session.hashes, available),
                tier,
                chunk_tokens=CHUNK_TOKENS,
                now=lambda: NOW,
                depths=staircase
                and (lambda chunk_tokens, stairs=staircase: paper_depths(chunk_tokens, stairs)),
            )
            record = read_manifest(tier, NAMESPACE, session.digest)
            assert record is not None
            depths, page = [], 0
            for ref in record.chunks:
                data, segments = read_chunk(tier, NAMESPACE, ref)
                depth = decode_header(data).depth
                assert depth == ref.depth
                for layer in range(depth, LAYERS):
                    hashes = session.hashes[page : page + ref.pages]
                    assert segments[layer] == b"".join(true_kv(name, layer) for name in hashes)
                depths.append(depth)
                page += ref.pages
            assert depths == sorted(depths, reverse=True)
            assert staircase is not None or not any(depths)
            assert available is not None or page == count // PAGE
            assert len(list(tier.scan(""))) == 1 + len(record.chunks)
            assert tier.check() == []

"""The two streams: what each gets next, where they meet, and that nothing is done twice or left out."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_krul.restore.streams import Claim, Course, Grid, Slice, Streams
from sgl_krul.restore.timeline import Span, Timeline

CHUNK = 256
LAYERS = 4


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(
    chunks: int = 6,
    *,
    layers: int = LAYERS,
    start: int = 0,
    lost: tuple[int, ...] = (),
    depths: list[int] | None = None,
    clock: Time | None = None,
    whole: frozenset[int] = frozenset(),
    **course: bool,
) -> Streams:
    sizes = np.full((chunks, layers), 1000, np.int64)
    for chunk in lost:
        sizes[chunk] = 0
    grid = Grid([CHUNK * (n + 1) for n in range(chunks)], layers, start, sizes, whole)
    plan = Course(depths or [0] * chunks, **course)
    return Streams(grid, plan, max_slice_tokens=512, clock=clock or Time())


def land(streams: Streams, claim: Claim) -> None:
    for layer in reversed(range(claim.first_layer, claim.first_layer + claim.layers)):
        if streams.may_write(claim.chunk, layer):
            streams.loaded(claim.chunk, layer)


def load_all(streams: Streams, max_bytes: int = 10**9) -> list[Claim]:
    claims = []
    while (claim := streams.claim(max_bytes)) is not None:
        claims.append(claim)
        land(streams, claim)
    return claims


def fall_behind(streams: Streams, clock: Time) -> None:
    """One claim, over a slow link."""
    claim = streams.claim(1)
    assert claim is not None
    clock.now += 2.0
    land(streams, claim)


def compute(streams: Streams, clock: Time, slices: int, *, each_s: float) -> None:
    """So many slices."""
    for _ in range(slices):
        piece = streams.next_slice(streams.view())
        assert piece is not None
        clock.now += each_s
        streams.computed(piece)


def compute_all(streams: Streams) -> list[Slice]:
    slices = []
    while (piece := streams.next_slice(streams.view())) is not None:
        slices.append(piece)
        streams.computed(piece)
    return slices


def test_loads_go_from_the_end_backwards_deepest_layers_first() -> None:
    claims = load_all(make(3), 2000)
    cells = [(c.chunk, c.first_layer + n) for c in claims for n in reversed(range(c.layers))]
    assert cells == [(c, layer) for c in (2, 1, 0) for layer in (3, 2, 1, 0)]
    assert claims[0] == Claim(2, 3, 1)  # an eighth of what is left at most


def test_compute_goes_block_by_block_and_the_last_layer_is_k_and_v_only() -> None:
    streams = make(3)
    slices = compute_all(streams)
    assert slices == [
        *(Slice(0, 2, 0, 512, layer, layer == LAYERS - 1) for layer in range(LAYERS)),
        *(Slice(2, 1, 512, 768, layer, layer == LAYERS - 1) for layer in range(LAYERS)),
    ]
    assert streams.finished(streams.view())
    assert streams.staircase == (768,) * LAYERS
    assert streams.check() == []


def test_they_meet_inside_a_chunk_and_the_stairs_fall_with_depth() -> None:
    streams = make(2)
    land(streams, Claim(*streams.claim(1000)))  # layer 3 of the last chunk
    land(streams, Claim(*streams.claim(1000)))
    slices = compute_all(streams)
    assert slices[0] == Slice(0, 2, 0, 512, 0, False)
    assert slices[2] == Slice(0, 1, 0, 256, 2, False)  # narrowed: the other chunk's deeper layers are loaded
    assert streams.staircase == (512, 512, 256, 256)
    assert streams.finished(streams.view())


def test_what_is_on_the_device_is_neither_loaded_nor_computed() -> None:
    streams = make(3, start=256 + 64)
    assert compute_all(streams)[0] == Slice(1, 2, 320, 768, 0, False)
    assert {claim.chunk for claim in load_all(make(3, start=256 + 64))} == {1, 2}


def test_layer_0_of_what_the_plan_loads_is_computed_first_and_not_loaded() -> None:
    streams = make(4, depths=[4, 1, 1, 1])
    first = streams.next_slice(streams.view())
    assert first == Slice(1, 2, 256, 768, 0, True)
    assert all(claim.first_layer >= 1 for claim in load_all(streams) if claim.chunk)


def test_a_hole_is_computed_when_all_before_it_is_in_place() -> None:
    streams = make(5, lost=(2,), computes=False)
    claims = load_all(streams)
    assert [c.chunk for c in claims if c.first_layer + c.layers == LAYERS] == [1, 0, 4, 3]
    assert [piece.start for piece in compute_all(streams)] == [512] * LAYERS
    assert streams.finished(streams.view())


def test_compute_waits_before_a_hole_for_loads_under_way() -> None:
    streams = make(3, lost=(1,), computes=False, whole=frozenset({0}))
    claim = streams.claim(10**9)
    assert claim == Claim(0, 0, LAYERS)
    assert streams.next_slice(streams.view()) is None
    land(streams, claim)
    assert streams.next_slice(streams.view()) == Slice(1, 2, 256, 768, 0, False)


def test_a_chunk_lost_on_the_way_is_computed() -> None:
    streams = make(3, computes=False)
    claim = streams.claim(1)
    assert claim is not None
    assert claim.chunk == 2
    assert streams.next_slice(streams.view()) is None
    streams.lost(2)
    assert not streams.may_write(2, 3)
    load_all(streams)
    assert [piece.start for piece in compute_all(streams)] == [512] * LAYERS
    assert streams.finished(streams.view())


def test_without_compute_loads_go_forwards_and_end_at_a_hole() -> None:
    streams = make(4, lost=(2,), can_compute=False)
    assert {claim.chunk for claim in load_all(streams)} == {0, 1}
    assert streams.next_slice(streams.view()) is None
    assert streams.finished(streams.view())
    assert streams.placed_tokens(streams.view()) == 512
    streams = make(3, can_compute=False)
    assert next(claim.chunk for claim in load_all(streams)) == 0


def test_a_claim_that_takes_long_may_be_computed_and_its_bytes_are_dropped() -> None:
    clock = Time()
    streams = make(1, clock=clock, whole=frozenset({0}))
    claim = streams.claim(10**9)
    assert claim is not None
    assert streams.next_slice(streams.view()) is None
    clock.now += 1.0
    assert len(compute_all(streams)) == LAYERS
    assert not streams.may_write(0, 0)
    assert streams.finished(streams.view())


def test_fixed_courses_divide_the_cells_and_wait_for_each_other() -> None:
    streams = make(4, depths=[4, 3, 1, 1], adaptive=False)
    slices = compute_all(streams)
    assert sum(piece.chunks for piece in slices) == 4 + 3 + 2
    assert not streams.finished(streams.view())
    claims = load_all(streams)
    assert sum(claim.layers for claim in claims) == 16 - 9
    assert streams.staircase == (1024, 512, 512, 256)
    assert streams.finished(streams.view())


def test_compute_can_join_later() -> None:
    streams = make(2, computes=False)
    assert streams.next_slice(streams.view()) is None
    streams.start_computing()
    assert streams.next_slice(streams.view()) is not None


def test_when_compute_fails_loads_bring_the_rest() -> None:
    streams = make(3, depths=[4, 1, 1])
    piece = streams.next_slice(streams.view())
    assert piece is not None
    streams.compute_failed()
    load_all(streams)
    assert streams.finished(streams.view())
    assert streams.placed_tokens(streams.view()) == 768


def test_nothing_begins_after_stop() -> None:
    streams = make()
    claim = streams.claim(1)
    assert claim is not None
    streams.stop()
    assert streams.claim(1) is None
    assert not streams.may_write(claim.chunk, claim.first_layer)
    assert streams.next_slice(streams.view()) is None
    assert streams.check() == []


def test_a_claim_left_behind_is_found() -> None:
    streams = make()
    streams.claim(1)
    assert streams.check() == ["1 cells are claimed"]


def test_shapes_must_agree() -> None:
    grid = Grid([256], 2, 0, np.ones((1, 3), np.int64))
    with pytest.raises(ValueError, match=r"segment_bytes of shape \(1, 3\) and 1 depths: expected \(1, 2\)"):
        Streams(grid, Course([0]), max_slice_tokens=512, clock=Time())


def test_what_a_failed_slice_overwrote_is_loaded_again() -> None:
    streams = Streams(
        Grid([64, 128], 3, 0, np.array([[10] * 3, [0] * 3], np.int64)),
        Course([0, 0], computes=True),
        max_slice_tokens=512,
        clock=lambda: 0.0,
    )
    view = streams.view()
    claim = streams.claim(10**6)  # a loader takes and lands a cell after the scheduler looked
    assert claim is not None
    for layer in range(claim.first_layer, claim.first_layer + claim.layers):
        assert streams.may_write(claim.chunk, layer)
        streams.loaded(claim.chunk, layer)
    piece = None
    while piece is None or piece.layer < claim.first_layer:
        piece = streams.next_slice(view)
        assert piece is not None
        if piece.layer < claim.first_layer:
            streams.computed(piece)
    streams.compute_failed()  # of `piece`, whose slots hold anything now
    after = streams.view()
    assert (after[piece.first_chunk : piece.first_chunk + piece.chunks, piece.layer] != 2).all()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_cell_is_placed_once_in_an_order_that_attention_allows(data: st.DataObject) -> None:
    chunks, layers = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 5))
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    clock = Time()
    start = 16 * rng.randrange(0, 16 * chunks)
    depths = sorted((rng.randrange(0, layers + 1) for _ in range(chunks)), reverse=True)
    lost = tuple(n for n in range(chunks) if rng.random() < 0.15)
    streams = make(
        chunks,
        layers=layers,
        start=start,
        lost=lost,
        depths=depths,
        clock=clock,
        adaptive=rng.random() < 0.7,
        computes=rng.random() < 0.8,
    )
    claims: list[Claim] = []
    loader_done = False
    for _ in range(10_000):
        view = streams.view()
        if streams.finished(view):
            break
        turn = rng.random()
        if turn < 0.4:
            claim = streams.claim(rng.randrange(1, 5000))
            loader_done = claim is None
            claims += [claim] if claim is not None else []
        elif turn < 0.7 and claims:
            claim = claims.pop(rng.randrange(len(claims)))
            if rng.random() < 0.1:
                streams.lost(claim.chunk)
            else:
                land(streams, claim)
        elif turn < 0.75:
            clock.now += rng.random()
        elif (piece := streams.next_slice(view)) is not None:
            if piece.layer or not piece.kv_only:
                before = view[: piece.first_chunk]
                assert (before == 2).all() or layers == 1, "a block begins when all before it is in place"
            assert piece.start >= start
            streams.computed(piece)
    else:
        raise AssertionError(f"the streams did not finish; loaders done: {loader_done}")
    for claim in claims:
        land(streams, claim)
    view = streams.view()
    assert streams.placed_tokens(view) == max(start, CHUNK * chunks)
    assert list(streams.staircase) == sorted(streams.staircase, reverse=True)
    assert streams.check() == []


def test_idle_time_is_what_no_span_of_the_stream_covers() -> None:
    timeline = Timeline()
    timeline.add(Span("compute", 0.0, 0.5, 0, 512, 0, 1))
    timeline.add(Span("load", 0.0, 0.4, 512, 256, 0, 4, 4000, "ssd"))
    timeline.add(Span("load", 0.2, 0.9, 768, 256, 0, 4, 4000, "ssd"))
    timeline.close(1.0, (512, 512))
    assert timeline.idle() == pytest.approx({"compute": 0.5, "load": 0.1})
    assert timeline.bubble() == pytest.approx(0.5)
    shown = timeline.as_dict()
    assert shown["staircase"] == [512, 512]
    assert shown["spans"][0] == ["compute", 0.0, 0.5, 0, 512, 0, 1, 0, ""]


@pytest.mark.parametrize(("adaptive", "claimed"), [(True, False), (False, True)])
def test_no_claim_is_begun_that_compute_would_wait_for(adaptive: bool, claimed: bool) -> None:
    clock = Time()
    streams = make(2, clock=clock, depths=[LAYERS - 1] * 2, adaptive=adaptive)
    fall_behind(streams, clock)
    compute(streams, clock, 3, each_s=0.1)  # both chunks, layer by layer
    claim = streams.claim(1)
    assert claim is not None
    assert (claim.layers > 0) == claimed
    if not claimed:
        clock.now += 3.0  # compute has stopped: somebody keeps it
        claim = streams.claim(1)
        assert claim is not None
        assert claim.layers > 0


def test_what_memory_has_is_claimed_whatever_compute_does() -> None:
    clock = Time()
    streams = make(3, clock=clock, whole=frozenset({0, 1}))
    fall_behind(streams, clock)
    compute(streams, clock, 2, each_s=0.01)
    claim = streams.claim(1)
    assert claim is not None
    assert (claim.chunk, claim.layers > 0) == (1, True)


def test_loads_go_on_when_compute_fails() -> None:
    clock = Time()
    streams = make(2, clock=clock)
    fall_behind(streams, clock)
    compute(streams, clock, 2, each_s=0.01)
    claim = streams.claim(1)
    assert claim is not None
    assert not claim.layers
    streams.compute_failed()
    load_all(streams)
    assert streams.finished(streams.view())


def test_where_loads_are_sooner_they_go_on_to_the_last_cell() -> None:
    clock = Time()
    streams = make(2, clock=clock)
    compute(streams, clock, 2, each_s=0.1)
    claims = 0
    while (claim := streams.claim(1)) is not None:
        claims += 1
        clock.now += 0.001
        land(streams, claim)
    assert claims == 2 * (LAYERS - 2)
    assert streams.finished(streams.view())

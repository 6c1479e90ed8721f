"""Sessions under a layer plan, from the pause to device slots: what is stored, and what comes back."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sgl_krul.codec.coder import ChunkCoder
from sgl_krul.codec.frame import PAPER_PLAN, RAW_PLAN, decode_header
from sgl_krul.errors import Corrupt
from sgl_krul.pause.pipeline import PauseReport, write_session
from sgl_krul.restore.coded_bytes import charged_bytes, staged_bytes
from sgl_krul.restore.loader import ChunkSource, SegmentLoader
from sgl_krul.restore.pipeline import Restorer
from sgl_krul.restore.staging import Staging
from sgl_krul.restore.streams import PLACED, Course, Grid, Streams
from sgl_krul.restore.timeline import Timeline
from sgl_krul.service.mover import copy_session, leading
from sgl_krul.session.catalog import read_manifest
from sgl_krul.session.record import ChunkRef, Manifest, decode_manifest, encode_manifest
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.ssd import SsdTier
from sgl_krul.store.tier import Tier
from sgl_krul.store.workers import Workers
from sgl_krul.strategy.layer_plan import LayerPlan
from tests.coded import (
    LAYERS,
    LAYOUT,
    NAMESPACE,
    PLANS,
    NumberPages,
    decoded,
    exact_kv,
    random_plan,
    snapshot,
)
from tests.sessions import CHUNK_TOKENS, Chat, chat, open_ssd

COUNT = 150  # 9 full pages: chunks of 4, 4 and 1
BODY = 4096  # where the body of a chunk's file begins


def pause(
    session: Chat,
    tier: Tier,
    plan: LayerPlan | None,
    *,
    exact: bool = True,
    source: NumberPages | None = None,
    coded: bool = False,
    loss: float = 0.0,
) -> PauseReport:
    return write_session(
        snapshot(session, exact=exact),
        NumberPages(session.hashes) if source is None else source,
        tier,
        chunk_tokens=CHUNK_TOKENS,
        now=lambda: 1e9,
        plan=plan,
        loss=loss,
        coded=coded,
    )


class Slots:
    """Where loaders write."""

    def __init__(self, pages: int) -> None:
        self.bytes = np.zeros((LAYERS, pages, LAYOUT.page_segment_bytes), np.uint8)
        self.writes = np.zeros((LAYERS, pages), np.int64)

    def write(self, layer: int, first_page: int, rows: NDArray[np.uint8]) -> None:
        self.bytes[layer, first_page : first_page + len(rows)] = rows
        self.writes[layer, first_page : first_page + len(rows)] += 1


class Load:
    """One restore's load stream over `tiers`."""

    def __init__(self, tiers: Sequence[Tier], manifest: Manifest, *, loaders: int, can_compute: bool) -> None:
        self.manifest = manifest
        self.coders = {name: ChunkCoder(LAYOUT, plan) for name, plan in manifest.layer_plans.items()}
        self.slots = Slots(manifest.stored_tokens // LAYOUT.page_size)
        self.memory = MemoryTier(LAYERS, LAYOUT.page_segment_bytes, LAYOUT.page_bytes)
        self.staging = Staging(1 << 20)
        self.workers = Workers("load", loaders)
        began = time.monotonic()

        def clock() -> float:
            return time.monotonic() - began

        ends = np.cumsum([ref.tokens for ref in manifest.chunks]).tolist()
        grid = Grid(ends, LAYERS, 0, self.sizes())
        course = Course([LAYERS] * len(ends), computes=can_compute, can_compute=can_compute)
        self.streams = Streams(grid, course, max_slice_tokens=128, clock=clock)
        self.loader = SegmentLoader(
            self.streams,
            self.sources(),
            tiers,
            self.memory,
            self.slots,
            LAYOUT,
            NAMESPACE,
            self.workers,
            staging=self.staging,
            timeline=Timeline(),
            clock=clock,
            loaders=loaders,
            coders=self.coders,
        )

    def sources(self) -> list[ChunkSource]:
        first, sources = 0, []
        for ref in self.manifest.chunks:
            sources.append(ChunkSource(ref, first, {}))
            first += ref.pages
        return sources

    def sizes(self) -> NDArray[np.int64]:
        rows = [
            charged_bytes(self.coders[source.ref.plan_id], source.ref, source.first_page * LAYOUT.page_size)
            if source.ref.plan_id
            else np.full(LAYERS, source.ref.pages * LAYOUT.page_segment_bytes)
            for source in self.sources()
        ]
        return np.array(rows, np.int64).reshape(len(rows), LAYERS)

    def compute(self, slices: int) -> None:
        """So many slices, of which the device knows nothing."""
        for _ in range(slices):
            piece = self.streams.next_slice(self.streams.view())
            if piece is None:
                return
            self.streams.computed(piece)

    def run(self) -> None:
        self.loader.start()
        self.loader.done.result(timeout=20)

    def placed(self) -> NDArray[np.bool_]:
        """Cells that loads brought, [layers, pages]."""
        return self.slots.writes > 0


@contextmanager
def loading(
    tiers: Sequence[Tier], manifest: Manifest, *, loaders: int = 2, can_compute: bool = False
) -> Iterator[Load]:
    load = Load(tiers, manifest, loaders=loaders, can_compute=can_compute)
    try:
        yield load
    finally:
        load.workers.close()
    problems = [*load.loader.check(), *load.streams.check(), *load.staging.check(), *load.memory.check()]
    assert problems == []
    assert load.staging.taken_bytes == 0


@pytest.mark.parametrize("name", PLANS)
def test_what_was_coded_comes_back_as_it_decodes(ssd: SsdTier, name: str) -> None:
    session = chat(COUNT)
    report = pause(session, ssd, PLANS[name])
    manifest = read_manifest(ssd, NAMESPACE, session.digest)
    assert manifest == report.manifest
    assert manifest is not None
    assert not manifest.exact
    assert manifest.layer_plan == PLANS[name].plan_id
    assert manifest.stored_bytes < manifest.raw_bytes
    expected = decoded(ssd, manifest)
    with loading([ssd], manifest) as load:
        load.run()
        assert (load.streams.view() == PLACED).all()
        np.testing.assert_array_equal(load.slots.bytes, expected)
        assert (load.slots.writes == 1).all()


def test_bf16_is_a_rounding(ssd: SsdTier) -> None:
    session = chat(COUNT)
    manifest = pause(session, ssd, PLANS["bf16"]).manifest
    found, exact = decoded(ssd, manifest).view("<f4"), exact_kv(session).view("<f4")
    assert np.abs(found - exact).max() <= np.abs(exact).max() / 256


@pytest.mark.parametrize("name", ["raw pairs", "a raw owner", "merged pairs"])
def test_the_bytes_of_a_pair_are_fetched_once(ssd: SsdTier, name: str) -> None:
    session = chat(COUNT)
    manifest = pause(session, ssd, PLANS[name]).manifest
    with loading([ssd], manifest, loaders=1) as load:
        load.run()
        bodies = sum(ref.bytes - BODY for ref in manifest.chunks)
        # A file is padded; what was read can't be more than what is stored, were all of it read once.
        assert 0 < load.loader.report.bytes_read["ssd"] <= bodies


@pytest.mark.parametrize("slices", [1, 2, 3, 5])
def test_a_partner_is_decoded_whatever_became_of_its_owner(ssd: SsdTier, slices: int) -> None:
    session = chat(COUNT)
    manifest = pause(session, ssd, PLANS["merged pairs"]).manifest
    expected = decoded(ssd, manifest)
    with loading([ssd], manifest, can_compute=True) as load:
        load.compute(slices)
        load.run()
        there = load.placed()
        assert 0 < there.sum() < there.size
        np.testing.assert_array_equal(load.slots.bytes[there], expected[there])


def flip(tier_root: Path, key: str, at: int) -> None:
    (path,) = [path for path in tier_root.rglob("*") if path.is_file() and path.name == key.split("/")[-1]]
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("layer", [0, 3])  # an owner, and its partner
def test_a_damaged_segment_of_a_pair_is_a_hole(ssd: SsdTier, store: Path, layer: int) -> None:
    session = chat(COUNT)
    manifest = pause(session, ssd, PLANS["merged pairs"]).manifest
    expected = decoded(ssd, manifest)
    key = manifest.chunks[1].key
    header = ssd.read_header(key)
    assert header is not None
    flip(store, key, BODY + decode_header(header).segments[layer].offset + 3)
    with loading([ssd], manifest, can_compute=True) as load:
        load.run()
        assert load.loader.report.lost == [1]
        assert load.loader.report.corrupt_chunks == 1
        there = load.placed()
        np.testing.assert_array_equal(load.slots.bytes[there], expected[there])
        assert there[:, :4].all()
        assert there[:, 8:].all()


def test_a_damaged_copy_is_replaced_by_the_next_tiers(ssd: SsdTier, store: Path, tmp_path: Path) -> None:
    session = chat(COUNT)
    manifest = pause(session, ssd, PLANS["raw pairs"]).manifest
    with open_ssd(tmp_path / "second") as second:
        copied = copy_session(manifest, ssd, second, stopped=lambda: False).manifest
        assert copied.layer_plans == manifest.layer_plans
        expected = decoded(second, copied)
        flip(store, manifest.chunks[0].key, BODY + 5)
        with loading([ssd, second], manifest) as load:
            load.run()
            np.testing.assert_array_equal(load.slots.bytes, expected)


def test_what_was_coded_is_not_coded_again(ssd: SsdTier) -> None:
    session = chat(COUNT)
    first = pause(session, ssd, PLANS["int4"]).manifest
    longer = chat(COUNT + 40)
    source = NumberPages(longer.hashes)
    second = pause(longer, ssd, PLANS["int8"], source=source).manifest
    assert second.chunks[:2] == first.chunks[:2]
    assert source.asked == [(8, 3)]
    assert set(second.layer_plans) == {PLANS["int4"].plan_id, PLANS["int8"].plan_id}
    # With another plan for all of it, the plan of chunks that are gone goes too.
    other = chat(COUNT + 40, first=5000)
    third = pause(other, ssd, PLANS["int8"]).manifest
    assert set(third.layer_plans) == {PLANS["int8"].plan_id}


def test_an_exact_pause_keeps_nothing_that_was_coded(ssd: SsdTier) -> None:
    session = chat(COUNT)
    pause(session, ssd, PLANS["int4"])
    manifest = pause(session, ssd, None).manifest
    assert manifest.exact
    assert manifest.plans == ()
    assert {ref.plan_name for ref in manifest.chunks} == {RAW_PLAN}
    np.testing.assert_array_equal(decoded(ssd, manifest), exact_kv(session))


def test_without_a_plan_what_was_coded_stays_and_new_chunks_are_coded_alike(ssd: SsdTier) -> None:
    first = pause(chat(COUNT), ssd, PLANS["int4"], loss=0.02).manifest
    source = NumberPages(chat(COUNT + 40).hashes)
    second = pause(chat(COUNT + 40), ssd, None, source=source, coded=True).manifest
    assert second.chunks[:2] == first.chunks[:2]
    assert source.asked == [(8, 3)]
    assert set(second.layer_plans) == {PLANS["int4"].plan_id}
    assert second.loss == 0.02


def test_the_loss_is_that_of_the_worst_chunks(ssd: SsdTier) -> None:
    pause(chat(COUNT), ssd, PLANS["int4"], loss=0.02)
    assert pause(chat(COUNT + 40), ssd, PLANS["int8"], loss=0.001).manifest.loss == 0.02
    assert pause(chat(COUNT + 80), ssd, PLANS["int8"], loss=1e30).manifest.loss == 1e9
    assert pause(chat(COUNT + 80), ssd, None).manifest.loss == 0.0


@pytest.mark.parametrize("coded", [True, False])
def test_what_was_coded_is_kept_where_nothing_else_is_left(ssd: SsdTier, coded: bool) -> None:
    first = pause(chat(COUNT), ssd, PLANS["int4"]).manifest
    longer = chat(COUNT + 40)
    gone = Gone(longer.hashes)
    second = pause(longer, ssd, None, source=gone, coded=coded).manifest
    assert second.chunks[:2] == first.chunks[:2]
    assert second.stored_tokens == 128
    assert not second.exact


class Gone(NumberPages):
    """A PageSource that has lost all pages."""

    @contextmanager
    def segments(self, first_page: int, pages: int) -> Iterator[None]:
        yield None


def test_a_lossy_session_keeps_what_is_stored_of_it(ssd: SsdTier) -> None:
    session = chat(COUNT)
    first = pause(session, ssd, PLANS["int4"]).manifest
    second = pause(session, ssd, None, exact=False).manifest
    assert second.chunks == first.chunks
    assert not second.exact


def test_a_lossy_session_is_never_exact_again(ssd: SsdTier) -> None:
    assert not pause(chat(COUNT), ssd, None, exact=False).manifest.exact


def test_a_plan_of_raw_layers_is_exact(ssd: SsdTier) -> None:
    session = chat(COUNT)
    manifest = pause(session, ssd, LayerPlan.uniform(LAYERS)).manifest
    assert manifest.exact
    np.testing.assert_array_equal(decoded(ssd, manifest), exact_kv(session))


def test_a_plan_and_paper_mode_are_refused_together(ssd: SsdTier) -> None:
    session = chat(COUNT)
    with pytest.raises(
        ValueError, match="depths and a layer plan: what is coded is stored in all layers, give one"
    ):
        write_session(
            snapshot(session),
            NumberPages(session.hashes),
            ssd,
            chunk_tokens=CHUNK_TOKENS,
            now=lambda: 1e9,
            plan=PLANS["int8"],
            depths=lambda chunks: [1] * len(chunks),
        )
    assert ssd.usage().objects == 0


def test_memory_is_not_given_what_was_coded(ssd: SsdTier) -> None:
    session = chat(COUNT)
    manifest = pause(session, ssd, PLANS["int8"]).manifest
    memory = MemoryTier(LAYERS, LAYOUT.page_segment_bytes, 64 * LAYOUT.page_bytes)
    workers = Workers("load", 1)
    try:
        restorer = Restorer([ssd], memory, LAYOUT, workers, ahead=2)
        report = restorer.run(manifest, deadline=1e9, clock=time.monotonic, cancelled=Event())
    finally:
        workers.close()
    assert (report.tokens, report.miss, report.corrupt_chunks) == (0, "coded", 0)
    assert report.cut == "stored under a layer plan, which is decoded for the device only: resume it there"
    assert memory.usage().objects == 0


def test_a_shortened_manifest_names_the_plans_it_needs(ssd: SsdTier) -> None:
    pause(chat(COUNT), ssd, PLANS["int4"])
    manifest = pause(chat(COUNT + 40), ssd, PLANS["int8"]).manifest
    short = leading(manifest, manifest.chunks[:1])
    assert list(short.layer_plans) == [PLANS["int4"].plan_id]
    read = decode_manifest(encode_manifest(short), namespace=NAMESPACE, digest=chat(1).digest)
    assert read == short


def test_a_chunk_under_another_plan_is_another_chunk(ssd: SsdTier) -> None:
    session = chat(COUNT)
    manifest = pause(session, ssd, PLANS["int8"]).manifest
    plan = PLANS["int4"]
    chunks = tuple(msgspec.structs.replace(ref, plan_id=plan.plan_id) for ref in manifest.chunks)
    with loading(
        [ssd], msgspec.structs.replace(manifest, chunks=chunks, plans=(plan.encode(),)), can_compute=True
    ) as load:
        load.run()
        assert len(load.loader.report.lost) == 3
        assert "stored under the plan" in load.loader.report.cut
        assert not load.placed().any()
    # It was no damage: whoever the chunks belong to still has them.
    assert all(ssd.read_header(ref.key) is not None for ref in manifest.chunks)


def coded_ref(ref: ChunkRef, **changes: object) -> ChunkRef:
    return msgspec.structs.replace(ref, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plans": ()}, "0 layer plans, its chunks name 1"),
        ({"plans": (PLANS["int8"].encode(),) * 2}, "2 layer plans, its chunks name 1"),
        ({"plans": (PLANS["int4"].encode(),)}, "1 layer plans, its chunks name 1"),
        ({"plans": (PLANS["int8"].encode()[:-1] + b"?",)}, "a layer plan that can't be read"),
        ({"plans": (PLANS["int8"].encode()[:-1],)}, "a layer plan that can't be read"),
        ({"exact": True}, "a chunk that is not exact, and says it were"),
    ],
)
def test_doubtful_plans_make_a_doubtful_manifest(
    ssd: SsdTier, changes: dict[str, object], message: str
) -> None:
    session = chat(COUNT)
    manifest = pause(session, ssd, PLANS["int8"]).manifest
    data = encode_manifest(msgspec.structs.replace(manifest, **changes))
    with pytest.raises(Corrupt, match=message):
        decode_manifest(data, namespace=NAMESPACE, digest=session.digest)


def test_a_plan_of_a_newer_server_is_no_damage(ssd: SsdTier) -> None:
    session = chat(COUNT)
    manifest = pause(session, ssd, PLANS["int8"]).manifest
    data = encode_manifest(msgspec.structs.replace(manifest, plans=(b"\x02" + PLANS["int8"].encode()[1:],)))
    with pytest.raises(Corrupt) as caught:
        decode_manifest(data, namespace=NAMESPACE, digest=session.digest)
    assert caught.value.reason == "version"


def test_a_coded_chunk_leaves_out_no_layers(ssd: SsdTier) -> None:
    session = chat(COUNT)
    manifest = pause(session, ssd, PLANS["int8"]).manifest
    chunks = tuple(coded_ref(ref, depth=1) for ref in manifest.chunks)
    data = encode_manifest(msgspec.structs.replace(manifest, chunks=chunks))
    with pytest.raises(Corrupt, match="a coded chunk of which layers are left out"):
        decode_manifest(data, namespace=NAMESPACE, digest=session.digest)


def test_a_coded_chunk_has_not_the_key_of_an_exact_one(ssd: SsdTier) -> None:
    session = chat(COUNT)
    manifest = pause(session, ssd, PLANS["int8"]).manifest
    chunks = tuple(coded_ref(ref, key=ref.key.replace("-l", "-c")) for ref in manifest.chunks)
    data = encode_manifest(msgspec.structs.replace(manifest, chunks=chunks))
    with pytest.raises(Corrupt, match="a coded chunk under the key of an exact one"):
        decode_manifest(data, namespace=NAMESPACE, digest=session.digest)


def test_plan_names_are_those_of_the_headers() -> None:
    ref = ChunkRef("", 1, 16, "", "", 0)
    names = [ref.plan_name, coded_ref(ref, depth=2).plan_name, coded_ref(ref, plan_id="k1-x").plan_name]
    assert names == [RAW_PLAN, PAPER_PLAN, "k1-x"]


@pytest.mark.parametrize("name", PLANS)
def test_a_pair_is_charged_to_its_partner(ssd: SsdTier, name: str) -> None:
    manifest = pause(chat(COUNT), ssd, PLANS[name]).manifest
    plan = PLANS[name]
    for number, ref in enumerate(manifest.chunks):
        sizes = charged_bytes(ChunkCoder(LAYOUT, plan), ref, number * CHUNK_TOKENS)
        assert (sizes > 0).all()
        assert all(sizes[owner] == 1 for owner in plan.owners.values())
        assert sizes.sum() <= ref.bytes + LAYERS
        assert sizes.max() < 2 * ref.pages * LAYOUT.page_segment_bytes
    coded = staged_bytes(manifest.chunks[0], LAYOUT.page_segment_bytes)
    assert coded == 4 * manifest.chunks[0].pages * LAYOUT.page_segment_bytes


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(16, 200), loaders=st.integers(1, 3))
def test_any_plan_any_length_beside_compute(seed: int, count: int, loaders: int) -> None:
    rng = random.Random(seed)
    session = chat(count)
    with tempfile.TemporaryDirectory() as root, open_ssd(Path(root)) as tier:
        manifest = pause(session, tier, random_plan(rng)).manifest
        expected = decoded(tier, manifest)
        with loading([tier], manifest, loaders=loaders, can_compute=True) as load:
            load.compute(rng.randint(0, 4))
            load.run()
            load.compute(1000)  # what loads left to it
            assert (load.streams.view() == PLACED).all()
            there = load.placed()
            np.testing.assert_array_equal(load.slots.bytes[there], expected[there])

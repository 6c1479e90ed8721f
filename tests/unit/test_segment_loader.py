"""The load stream: every cell that is said to be in place has exactly the stored bytes, whatever happens."""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sgl_krul.errors import StoreUnavailable
from sgl_krul.restore.loader import ChunkSource, SegmentLoader
from sgl_krul.restore.pace import Pace
from sgl_krul.restore.pipeline import RestoreReport
from sgl_krul.restore.staging import Staging
from sgl_krul.restore.streams import LOST, PLACED, Course, Grid, Slice, Streams
from sgl_krul.restore.task_group import TaskGroup
from sgl_krul.restore.timeline import Timeline
from sgl_krul.session.record import Manifest
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.ssd import SsdTier
from sgl_krul.store.tier import CheckedTier, Tier
from sgl_krul.store.workers import Workers
from tests.faults import Backing, Call, FakeSharedTier, FaultInjectingTier, Faults, Kind
from tests.sessions import (
    CHUNK_TOKENS,
    LAYOUT,
    NAMESPACE,
    PAGE,
    Chat,
    chat,
    free_slots,
    open_ssd,
    true_kv,
)
from tests.unit.test_chunk_reader import stored_without

COUNT = 150  # 9 full pages: chunks of 4, 4 and 1
BODY = 4096  # where the body of a chunk's file begins
SEGMENT = 4 * LAYOUT.page_segment_bytes
MEMORY_PAGES = 64
LAYERS = LAYOUT.layers


class Slots:
    """Reserved device slots of `pages` pages, and how often each cell of a page was written."""

    def __init__(self, pages: int, before: Callable[[int, int], None] = lambda layer, page: None) -> None:
        self.bytes = np.zeros((LAYERS, pages, LAYOUT.page_segment_bytes), np.uint8)
        self.writes = np.zeros((LAYERS, pages), np.int64)
        self.before = before
        self.open = True

    def write(self, layer: int, first_page: int, rows: NDArray[np.uint8]) -> None:
        """See Target."""
        assert self.open, "a write after the loader was done"
        assert rows.shape[1] == LAYOUT.page_segment_bytes
        self.before(layer, first_page)
        self.bytes[layer, first_page : first_page + len(rows)] = rows
        self.writes[layer, first_page : first_page + len(rows)] += 1


@dataclass
class Bench:
    """A stored session, and all it takes to load it."""

    tiers: Sequence[Tier]
    memory: MemoryTier
    workers: Workers
    session: Chat
    manifest: Manifest
    staging: Staging = field(default_factory=lambda: Staging(1 << 20))
    timeline: Timeline = field(default_factory=Timeline)
    can_compute: bool = False
    pinned: frozenset[int] = frozenset()
    start: int = 0
    depths: dict[int, int] = field(default_factory=dict)  # chunk -> layers not stored
    slots: Slots = field(init=False)
    streams: Streams = field(init=False)

    def __post_init__(self) -> None:
        self.slots = Slots(len(self.session.hashes))
        self.began = time.monotonic()

    def clock(self) -> float:
        """Seconds since the test began."""
        return time.monotonic() - self.began

    def loader(self, loaders: int = 2) -> SegmentLoader:
        """A loader and fresh streams."""
        chunks = self.manifest.chunks
        ends = np.cumsum([ref.tokens for ref in chunks]).tolist()
        sizes = np.array([[ref.pages * LAYOUT.page_segment_bytes] * LAYERS for ref in chunks], np.int64)
        sizes = sizes.reshape(len(chunks), LAYERS)
        for number, depth in self.depths.items():
            sizes[number, :depth] = 0
        course = Course([LAYERS] * len(chunks), computes=self.can_compute, can_compute=self.can_compute)
        self.streams = Streams(
            Grid(ends, LAYERS, self.start, sizes, self.pinned), course, max_slice_tokens=128, clock=self.clock
        )
        return SegmentLoader(
            self.streams,
            self.sources(),
            self.tiers,
            self.memory,
            self.slots,
            LAYOUT,
            NAMESPACE,
            self.workers,
            staging=self.staging,
            timeline=self.timeline,
            clock=self.clock,
            loaders=loaders,
        )

    def sources(self) -> list[ChunkSource]:
        """The chunks; those in `pinned` are put into memory."""
        sources, page = [], 0
        for number, ref in enumerate(self.manifest.chunks):
            keys = self.session.page_keys[page : page + ref.pages]
            pinned = None
            if number in self.pinned:
                for key in reversed(keys):  # slots that are no run
                    segments = [true_kv(key.split("/")[1], layer) for layer in range(LAYERS)]
                    self.memory.put(key, b"", segments)
                pinned = self.memory.pin(keys)
                assert pinned is not None
            sources.append(ChunkSource(ref, page, {}, pinned))
            page += ref.pages
        return sources

    def load(self, loaders: int = 2) -> SegmentLoader:
        """Load until nothing is left, and look everything over."""
        loader = self.loader(loaders)
        loader.start()
        loader.done.result(20)
        self.look_over(loader)
        return loader

    def look_over(self, loader: SegmentLoader) -> None:
        """Every cell in place is true, none was written twice, and nothing is held."""
        self.slots.open = False
        view = self.streams.view()
        page = 0
        for number, ref in enumerate(self.manifest.chunks):
            for layer in range(LAYERS):
                for at in range(page, page + ref.pages):
                    if view[number, layer] == PLACED and page * PAGE >= self.start:
                        truth = true_kv(self.session.hashes[at], layer)
                        assert self.slots.bytes[layer, at].tobytes() == truth
                    assert self.slots.writes[layer, at] <= 1
            page += ref.pages
        assert loader.check() == []
        assert (self.staging.check(), self.staging.taken_bytes) == ([], 0)
        assert self.memory.check() == []
        settle(self.workers)
        cells = int((self.slots.writes > 0).sum())
        assert cells * LAYOUT.page_segment_bytes == sum(self.spans("ssd", "redis", "memory").values())
        assert loader.report.wasted_bytes == sum(self.spans("wasted", "failed").values())

    def spans(self, *notes: str) -> Counter[str]:
        """Bytes of the timeline's spans by note."""
        found: Counter[str] = Counter()
        for span in self.timeline.spans:
            assert span.stream in ("load", "compute")
            assert span.end_s >= span.start_s >= 0
            assert span.layers >= 1
            assert span.tokens % PAGE == 0
            if span.note in notes:
                found[span.note] += span.bytes
        return found


def settle(workers: Workers) -> None:
    """`done` is set by the last task's callback; the count of the workers follows it."""
    deadline = time.monotonic() + 5
    while workers.pending:
        assert time.monotonic() < deadline
        time.sleep(0.0005)


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Three threads."""
    workers = Workers("test", 3)
    yield workers
    workers.close()
    assert workers.pending == 0


@pytest.fixture
def shared() -> FakeSharedTier:
    """A second tier."""
    return FakeSharedTier(Backing())


@pytest.fixture
def bench(ssd: SsdTier, shared: FakeSharedTier, memory: MemoryTier, workers: Workers) -> Iterator[Bench]:
    session = chat(COUNT)
    session.write(shared)
    manifest = session.write(ssd).manifest
    bench = Bench([ssd, shared], memory, workers, session, manifest)
    yield bench
    assert bench.staging.taken_bytes == 0


def damage(bench: Bench, store: Path, chunk: int, layer: int) -> None:
    """Flip a byte of one segment of a chunk's file."""
    path = store / bench.manifest.chunks[chunk].key
    data = bytearray(path.read_bytes())
    data[BODY + layer * bench.manifest.chunks[chunk].pages * LAYOUT.page_segment_bytes] ^= 1
    path.write_bytes(data)


# -- all goes well --


@pytest.mark.parametrize("loaders", [1, 3])
@pytest.mark.parametrize("staging_bytes", [SEGMENT, 2 * SEGMENT + 1, 1 << 20])
def test_a_session_is_loaded(bench: Bench, loaders: int, staging_bytes: int) -> None:
    bench.staging = Staging(staging_bytes)
    loader = bench.load(loaders)
    assert (bench.streams.view() == PLACED).all()
    assert (bench.slots.writes == 1).all()
    report = loader.report
    assert report.bytes_read == {"ssd": 9 * LAYOUT.page_bytes}
    assert (report.cells, report.wasted_bytes, report.miss, report.cut) == (9, 0, "", "")
    assert bench.staging.peak_bytes <= staging_bytes


def test_the_end_comes_first(bench: Bench) -> None:
    """The last chunk first, in each chunk the deepest layers first: compute comes from the other side."""
    order: list[tuple[int, int]] = []
    bench.slots.before = lambda layer, page: order.append((page, layer))
    bench.can_compute = True
    loader = bench.loader(1)
    bench.streams.start_computing()
    loader.start()
    loader.done.result(20)
    bench.look_over(loader)
    assert order == sorted(order, reverse=True)
    assert len(order) == 9


def test_pages_in_memory_come_from_there(bench: Bench) -> None:
    bench.pinned = frozenset({0, 2})
    loader = bench.load()
    assert (bench.streams.view() == PLACED).all()
    assert loader.report.bytes_read == {"memory": 5 * LAYOUT.page_bytes, "ssd": 4 * LAYOUT.page_bytes}
    assert {sample.tier for sample in loader.samples} == {"memory", "ssd"}


def test_tokens_on_the_device_are_not_loaded(bench: Bench) -> None:
    bench.start = CHUNK_TOKENS
    loader = bench.load()
    assert (bench.streams.view() == PLACED).all()
    assert (bench.slots.writes[:, :4] == 0).all()
    assert loader.report.bytes_read == {"ssd": 5 * LAYOUT.page_bytes}


def test_layers_that_are_not_stored_are_not_asked_for(bench: Bench, ssd: SsdTier) -> None:
    for number, depth in ((0, 2), (1, 1)):
        first = 4 * number
        stored_without(ssd, bench.manifest.chunks[number], depth, bench.session.hashes[first : first + 4])
    bench.depths = {0: 2, 1: 1}
    chunks = [
        msgspec.structs.replace(ref, depth=bench.depths.get(number, 0))
        for number, ref in enumerate(bench.manifest.chunks)
    ]
    bench.manifest = msgspec.structs.replace(bench.manifest, chunks=tuple(chunks))
    bench.can_compute = True
    loader = bench.load()
    assert loader.report.miss == ""
    assert bench.streams.view().tolist() == [[LOST, LOST, PLACED], [LOST, PLACED, PLACED], [PLACED] * 3]


def test_a_copy_without_a_layer_that_is_wanted(bench: Bench, ssd: SsdTier) -> None:
    """The manifest promises more than this tier's copy has: the next tier is asked, the copy stays."""
    stored_without(ssd, bench.manifest.chunks[1], 2, bench.session.hashes[4:8])
    loader = bench.load()
    assert (bench.streams.view() == PLACED).all()
    assert loader.report.bytes_read["redis"] > 0
    assert ssd.read_header(bench.manifest.chunks[1].key) is not None


def test_samples_are_what_reads_took(bench: Bench) -> None:
    tier = FaultInjectingTier(bench.tiers[0], lambda call: Kind.DELAY, delay_s=0.02)  # type: ignore[arg-type]
    bench.tiers = [tier]
    loader = bench.load(3)
    samples = [sample for sample in loader.samples if sample.tier == "ssd"]
    assert sum(sample.bytes for sample in samples) == 9 * LAYOUT.page_bytes
    assert all(0.02 <= sample.seconds < 5 and 1 <= sample.in_flight <= 3 for sample in samples)
    assert sum(sample.bytes for sample in loader.land_samples) == 9 * LAYOUT.page_bytes
    assert tier.count("read_header") == 3


def test_two_sessions_take_turns(bench: Bench) -> None:
    """One worker: the second does not wait until the first is through."""
    turns: list[int] = []
    both = threading.Event()
    workers = Workers("one", 1)

    def write(number: int) -> None:
        both.wait(10)
        turns.append(number)

    bench.workers = workers
    other = Bench(bench.tiers, bench.memory, workers, bench.session, bench.manifest, bench.staging)
    loaders = []
    for number, one in enumerate((bench, other)):
        one.slots.before = lambda layer, page, number=number: write(number)  # type: ignore[misc]
        one.staging = bench.staging
        loaders.append(one.loader(1))
    for loader in loaders:
        loader.start()
    both.set()
    for loader in loaders:
        loader.done.result(20)
    workers.close()
    for one, loader in zip((bench, other), loaders, strict=True):
        one.look_over(loader)
    assert turns != sorted(turns)


# -- chunks that are damaged or gone --


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("chunk", range(3))
def test_a_damaged_segment_comes_from_the_next_tier(
    bench: Bench, store: Path, chunk: int, layer: int
) -> None:
    damage(bench, store, chunk, layer)
    loader = bench.load()
    assert (bench.streams.view() == PLACED).all()
    assert (loader.report.corrupt_chunks, loader.report.lost, loader.report.cut) == (1, [], "")
    assert loader.report.bytes_read["redis"] > 0
    assert loader.report.wasted_bytes > 0
    assert not (store / bench.manifest.chunks[chunk].key).exists()


@pytest.mark.parametrize("chunk", range(3))
def test_a_chunk_that_no_tier_has_is_lost(
    bench: Bench, store: Path, shared: FakeSharedTier, chunk: int
) -> None:
    damage(bench, store, chunk, 0)
    shared.delete(bench.manifest.chunks[chunk].key)
    bench.can_compute = True
    loader = bench.load()
    report = loader.report
    assert report.lost == [chunk]
    assert (report.miss, report.corrupt_chunks, report.missing_chunks) == ("corrupt", 1, 0)
    assert "corrupt chunk (checksum" in report.cut
    view = bench.streams.view()
    assert view[chunk, 0] == LOST
    assert (np.delete(view, chunk, axis=0) == PLACED).all()
    assert "hole" in {span.note for span in bench.timeline.spans}
    entered = RestoreReport()
    loader.enter(entered)
    assert (entered.miss, entered.corrupt_chunks) == ("corrupt", 1)
    assert entered.origin == "ssd"


def test_a_hole_that_was_computed_is_no_cut(bench: Bench, ssd: SsdTier, shared: FakeSharedTier) -> None:
    ssd.delete(bench.manifest.chunks[0].key)
    shared.delete(bench.manifest.chunks[0].key)
    bench.can_compute = True
    loader = bench.load()
    entered = RestoreReport()
    compute(bench, lambda: False)
    loader.enter(entered)
    assert (entered.miss, entered.cut, entered.missing_chunks) == ("", "", 1)


def test_without_computing_loads_end_at_the_hole(bench: Bench, ssd: SsdTier, shared: FakeSharedTier) -> None:
    ssd.delete(bench.manifest.chunks[1].key)
    shared.delete(bench.manifest.chunks[1].key)
    loader = bench.load(1)
    assert bench.streams.placed_tokens(bench.streams.view()) == CHUNK_TOKENS
    assert (loader.report.miss, loader.report.cut) == ("missing", "missing chunk")
    assert (bench.slots.writes[:, 4:] == 0).all()


def test_a_dead_tier_is_not_asked_for_every_chunk(bench: Bench, shared: FakeSharedTier) -> None:
    session = chat(20 * CHUNK_TOKENS)
    session.write(shared)
    manifest = session.write(bench.tiers[0]).manifest
    dead = FaultInjectingTier(bench.tiers[0], lambda call: Kind.BEFORE)  # type: ignore[arg-type]
    bench = Bench([dead, shared], bench.memory, bench.workers, session, manifest)
    loader = bench.load()
    assert (bench.streams.view() == PLACED).all()
    assert len(dead.calls) <= 5
    assert loader.report.bytes_read == {"redis": 80 * LAYOUT.page_bytes}
    bench.timeline, bench.slots = Timeline(), Slots(80)
    shared.down = True
    loader = bench.load()
    assert loader.report.miss == "unavailable"
    assert loader.report.unavailable_chunks == len(loader.report.lost) > 0


# -- what was computed meanwhile --


def compute(bench: Bench, stop: Callable[[], bool]) -> None:
    """The other stream: the KV is a function of the tokens."""
    while not stop():
        view = bench.streams.view()
        piece = bench.streams.next_slice(view)
        if piece is None:
            if bench.streams.finished(view):
                return
            time.sleep(0.0005)
            continue
        fill(bench, piece)
        bench.streams.computed(piece)


def fill(bench: Bench, piece: Slice) -> None:
    for page in range(piece.start // PAGE, piece.end // PAGE):
        segment = np.frombuffer(true_kv(bench.session.hashes[page], piece.layer), np.uint8)
        bench.slots.bytes[piece.layer, page] = segment


def test_what_was_computed_meanwhile_is_dropped(bench: Bench) -> None:
    """A claim that takes long is computed instead; its bytes never touch the slots."""
    computed = threading.Event()

    def slow(call: Call) -> Kind | None:
        if call.operation == "read_segments":
            computed.wait(10)
        return None

    bench.tiers = [FaultInjectingTier(bench.tiers[0], slow)]  # type: ignore[arg-type]
    bench.can_compute = True
    loader = bench.loader()
    loader.start()
    compute(bench, lambda: False)
    computed.set()
    loader.done.result(20)
    bench.look_over(loader)
    assert (bench.slots.writes == 0).all()
    assert loader.report.wasted_bytes == loader.report.bytes_read["ssd"] > 0
    assert "wasted" in {span.note for span in bench.timeline.spans}


# -- the end --


def test_a_bug_of_a_tier_surfaces(bench: Bench) -> None:
    def bug(call: Call) -> Kind | None:
        if call.operation == "read_segments":
            raise RuntimeError("a bug")
        return None

    bench.tiers = [FaultInjectingTier(bench.tiers[0], bug)]  # type: ignore[arg-type]
    bench.pinned = frozenset({1})
    loader = bench.loader()
    loader.start()
    with pytest.raises(RuntimeError, match="a bug"):
        loader.done.result(20)
    bench.look_over(loader)
    assert bench.streams.claim(1 << 20) is None  # stopped
    assert loader.report.miss == "cancelled"


def test_a_bug_of_the_target_surfaces(bench: Bench) -> None:
    def bug(layer: int, page: int) -> None:
        raise RuntimeError("a bug")

    bench.slots.before = bug
    bench.pinned = frozenset({2})
    loader = bench.loader()
    loader.start()
    with pytest.raises(RuntimeError, match="a bug"):
        loader.done.result(20)
    bench.slots.open = False
    assert loader.check() == []
    assert bench.streams.check() == []


def test_cancelled_before_it_began(bench: Bench) -> None:
    bench.pinned = frozenset({0, 1, 2})
    loader = bench.loader()
    loader.cancel()
    loader.done.result(0)
    loader.cancel()
    loader.start()
    assert (bench.slots.writes == 0).all()
    bench.look_over(loader)


def test_a_read_under_way_ends_first(bench: Bench) -> None:
    reading, go = threading.Event(), threading.Event()

    def slow(call: Call) -> Kind | None:
        if call.operation == "read_segments":
            reading.set()
            go.wait(10)
        return None

    bench.tiers = [FaultInjectingTier(bench.tiers[0], slow)]  # type: ignore[arg-type]
    loader = bench.loader()
    loader.start()
    assert reading.wait(10)
    loader.cancel()
    assert not loader.done.done()
    assert bench.staging.taken_bytes > 0
    go.set()
    loader.done.result(20)
    bench.look_over(loader)
    assert (bench.slots.writes == 0).all()
    assert loader.report.miss == "cancelled"


def test_cancelled_while_it_waits_for_staging(bench: Bench) -> None:
    held = bench.staging.take(bench.staging.capacity_bytes, threading.Event())
    assert held is not None
    loader = bench.loader(3)
    loader.start()
    time.sleep(0.02)
    loader.cancel()
    loader.done.result(5)
    held.give()
    bench.look_over(loader)
    assert loader.report.bytes_read == {}


def test_workers_that_are_closed(bench: Bench) -> None:
    """The server stops: what runs ends, what waits does not begin."""
    workers = Workers("closed", 1)
    go = threading.Event()

    def slow(call: Call) -> Kind | None:
        go.wait(10)
        return None

    bench.tiers = [FaultInjectingTier(bench.tiers[0], slow)]  # type: ignore[arg-type]
    bench.pinned = frozenset({0})
    bench.workers = workers
    loader = bench.loader()
    loader.start()
    closing = threading.Thread(target=workers.close)
    closing.start()
    time.sleep(0.02)
    go.set()
    closing.join(10)
    loader.done.result(10)
    assert loader.check() == []
    assert loader.report.miss == "cancelled"
    assert bench.staging.taken_bytes == 0


def test_sizes_that_cannot_be(bench: Bench) -> None:
    bench.staging = Staging(SEGMENT - 1)
    with pytest.raises(ValueError, match="give more"):
        bench.loader()


# -- how much at once --


def test_the_pace_is_50_ms_of_the_link() -> None:
    pace = Pace(100_000)
    assert pace.claim_bytes == 100_000
    pace.answered(0.01)
    pace.fetched(100_000, 0.02)  # 10 MB/s behind 10 ms
    assert pace.claim_bytes == pytest.approx(500_000, abs=1)
    for _ in range(12):
        pace.fetched(500_000, 0.26)  # 2 MB/s by now
    assert pace.claim_bytes == pytest.approx(100_000, rel=0.1)
    for _ in range(12):
        pace.fetched(100_000, 1.0)
    assert pace.claim_bytes == 100_000


@pytest.mark.parametrize("least", [1, 1 << 20, 8 << 20])
def test_the_pace_is_bounded(least: int) -> None:
    pace = Pace(least)
    pace.fetched(1 << 30, 0.0)
    assert pace.claim_bytes == max(least, 4 << 20)
    pace.answered(0.0)
    pace.fetched(1, 1e12)
    assert pace.claim_bytes == least


def test_latency_is_not_taken_for_a_slow_link() -> None:
    """100 ms before the first byte, then 20 MB/s: a request is to bring more than it waits for."""
    pace = Pace(100_000)
    pace.answered(0.1)
    for _ in range(8):
        size = pace.claim_bytes
        pace.fetched(size, 0.1 + size / 20e6)
    assert pace.claim_bytes == pytest.approx(4_000_000, rel=0.01)


# -- tasks --


def test_a_group_without_tasks_ends(workers: Workers) -> None:
    ended: list[bool] = []
    group = TaskGroup(workers, on_stop=lambda why, bug: None, on_end=lambda: ended.append(True))
    group.start(0, lambda: None)
    group.done.result(0)
    assert (ended, group.check()) == ([True], [])
    with pytest.raises(AssertionError):
        group.start(1, lambda: None)


def test_tasks_that_begin_others_end_together(workers: Workers) -> None:
    lock, left, ended = threading.Lock(), [40], []

    def job() -> None:
        with lock:
            left[0] -= 1
            more = left[0] > 0
        assert not ended
        if more:
            group.spawn(job)
            group.spawn(lambda: None)

    group = TaskGroup(workers, on_stop=lambda why, bug: None, on_end=lambda: ended.append(True))
    group.start(3, job)
    group.done.result(10)
    assert ended == [True]
    assert group.check() == []


def test_nobody_else_ends_a_group(workers: Workers) -> None:
    group = TaskGroup(workers, on_stop=lambda why, bug: None, on_end=lambda: None)
    assert not group.done.cancel()
    group.stop("cancelled")
    group.done.result(0)


# -- anything --


@dataclass(frozen=True)
class Case:
    """A session, what is wrong with its copies, and when it is cancelled."""

    tokens: int
    seed: int
    loaders: int
    staging: int
    rates: dict[str, float]
    pinned: frozenset[int]
    start: int
    computes: bool
    cancel_after: int | None


CASES = st.builds(
    Case,
    tokens=st.integers(0, 500),
    seed=st.integers(0, 1 << 30),
    loaders=st.integers(1, 4),
    staging=st.integers(SEGMENT, 8 * SEGMENT),
    rates=st.dictionaries(
        st.sampled_from(["delay", "before", "short", "wrong", "missing"]), st.floats(0, 0.2), max_size=5
    ),
    pinned=st.frozensets(st.integers(0, 7), max_size=4),
    start=st.integers(0, 12).map(lambda page: page * PAGE),
    computes=st.booleans(),
    cancel_after=st.none() | st.integers(0, 30),
)


def run_case(case: Case, tier: CheckedTier, shared: FakeSharedTier, workers: Workers) -> None:
    session = chat(case.tokens)
    session.write(shared)
    manifest = session.write(tier).manifest
    memory = MemoryTier(LAYERS, LAYOUT.page_segment_bytes, MEMORY_PAGES * LAYOUT.page_bytes)
    bench = Bench(
        [
            FaultInjectingTier(tier, Faults(case.seed, **case.rates), delay_s=0.002),
            FaultInjectingTier(shared, Faults(case.seed + 1, **case.rates), delay_s=0.001),
        ],
        memory,
        workers,
        session,
        manifest,
        Staging(case.staging),
        can_compute=case.computes,
        pinned=case.pinned,
        start=min(case.start, case.tokens // PAGE * PAGE),
    )
    loader = bench.loader(case.loaders)
    left = [case.cancel_after]

    def count(layer: int, page: int) -> None:
        if left[0] is not None:
            left[0] -= 1
            if left[0] < 0:
                loader.cancel()

    bench.slots.before = count
    loader.start()
    if case.cancel_after == 0:
        loader.cancel()
    if case.computes:
        compute(bench, lambda: loader.done.done() and case.cancel_after is not None)
    loader.done.result(20)
    bench.look_over(loader)
    assert free_slots(memory) == MEMORY_PAGES
    view = bench.streams.view()
    if case.cancel_after is None:
        assert bench.streams.finished(view)
        assert bench.streams.check() == []
        assert (view == PLACED).all() or not case.computes
        lost = (view == LOST).any(axis=1).nonzero()[0].tolist()
        assert set(lost) <= set(loader.report.lost)
        assert set(loader.report.lost).isdisjoint(case.pinned)


@settings(max_examples=150)
@given(CASES)
def test_whatever_happens_every_cell_is_true_and_nothing_is_left(case: Case) -> None:
    workers = Workers("any", 3)
    try:
        with tempfile.TemporaryDirectory() as directory, open_ssd(Path(directory)) as tier:
            run_case(case, tier, FakeSharedTier(Backing()), workers)
    finally:
        workers.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("krul-any")]


def test_a_dead_link_does_not_hold_up_a_cancel(bench: Bench) -> None:
    """All loaders are in a call that times out; the deadline of the tier bounds it."""

    def dead(call: Call) -> Kind | None:
        time.sleep(0.1)
        raise StoreUnavailable("timed out")

    bench.tiers = [FaultInjectingTier(bench.tiers[0], dead)]  # type: ignore[arg-type]
    loader = bench.loader(3)
    loader.start()
    time.sleep(0.02)
    loader.cancel()
    loader.done.result(2)
    bench.look_over(loader)

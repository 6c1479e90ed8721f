"""The estimates of sessions: from the rows of requests to what a manifest gets, against the naive sums."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch

from sgl_krul.engine.estimates import SessionEstimates
from sgl_krul.engine.forward_rows import QueryShape, Span
from sgl_krul.engine.page_keys import MemoryKeys
from sgl_krul.engine.probe import RowProbe
from sgl_krul.layout import KvLayout
from sgl_krul.metrics import NoMetrics
from sgl_krul.pause.pipeline import write_session
from sgl_krul.session.record import Manifest, SessionKey, page_key
from sgl_krul.similarity import Estimator, Similarity, Windows, attention_rows, sampled_positions
from sgl_krul.store.memory import MemoryTier
from tests.sessions import (
    CHUNK_TOKENS,
    LAYOUT,
    NAMESPACE,
    NOW,
    PAGE,
    Chat,
    TruePages,
    free_slots,
    hash_pages,
    open_ssd,
    tokens,
)

HEADS = 4
SCALE = 0.3
SHAPE = QueryShape(LAYOUT.layers, HEADS, LAYOUT.head_dim, torch.float32)
RATE = 100
KEY = SessionKey("chat")


def vectors(token_ids: array[int], layer: int, heads: int, kind: int) -> torch.Tensor:
    """float32 [n, heads, head_dim]: of every token a function of its id, its position, layer and kind."""
    rows = [
        np.random.default_rng((kind, layer, position, token)).standard_normal((heads, LAYOUT.head_dim))
        for position, token in enumerate(token_ids)
    ]
    return torch.from_numpy(np.stack(rows).astype(np.float32)) * (1 + layer)


@dataclass
class Request:
    """What the probe looks at."""

    rid: str
    session_id: str = KEY.session_id
    cache_salt: None = None
    extra_key: None = None


class Counting(NoMetrics):
    """Rows by outcome."""

    def __init__(self) -> None:
        self.rows = {"seen": 0, "dropped": 0}

    def estimated(self, outcome: str, rows: int) -> None:
        """See MetricsSink."""
        self.rows[outcome] += rows


@dataclass
class World:
    """A memory tier, the estimator over it, and an engine that computes turns."""

    memory: MemoryTier = field(
        default_factory=lambda: MemoryTier(LAYOUT.layers, LAYOUT.page_segment_bytes, 1 << 22)
    )
    budget_bytes: int = 1 << 26
    windows: Windows = Windows.relative
    metrics: Counting = field(default_factory=Counting)
    hold: Event = field(default_factory=Event)
    turns: int = 0

    def __post_init__(self) -> None:
        self.hold.set()
        self.probe = RowProbe(
            lambda digest, start, end: sampled_positions(NAMESPACE, digest, start, end, RATE),
            SHAPE,
            torch.device("cpu"),
            self.budget_bytes,
            100,
        )
        self.estimator = Estimator(self.budget_bytes, windows=self.windows)
        self.estimates = SessionEstimates(
            self.estimator,
            self.probe,
            self.open_keys,
            self.metrics,
            layers=LAYOUT.layers,
            scale=SCALE,
            page_size=PAGE,
            gamma=0.5,
        )

    def open_keys(self, key: SessionKey, token_ids: array[int]) -> MemoryKeys:
        """K of the session's pages, once `hold` is set."""
        names = [page_key(NAMESPACE, page_hash) for page_hash in hash_pages(key, token_ids)]
        return MemoryKeys(self.memory, LAYOUT, names, self._arrived)

    def _arrived(self) -> None:
        assert self.hold.wait(20)

    def turn(self, token_ids: array[int], cached: int, *, forwards: int = 1, stored: bool = True) -> None:
        """A request with these tokens, of which `cached` came from the tree, runs and ends."""
        self.turns += 1
        request = Request(f"r{self.turns}")
        cuts = np.linspace(cached, len(token_ids), forwards + 1).astype(int).tolist()
        for start, end in pairwise(cuts):
            rows = self.probe.plan(iter([Span(request, start, end, 0)]))
            if rows is not None:
                for layer in range(LAYOUT.layers):
                    rows.take(layer, vectors(token_ids, layer, HEADS, 1)[start:end])
        if stored:
            self.store(token_ids)
        self.estimates.finished(request.rid, KEY, token_ids)

    def store(self, token_ids: array[int]) -> None:
        """Put all whole pages into memory, K as `vectors` has them."""
        keys = [vectors(token_ids, layer, LAYOUT.kv_heads, 2).numpy() for layer in range(LAYOUT.layers)]
        values = np.zeros((PAGE, LAYOUT.kv_heads, LAYOUT.v_head_dim), np.float32)
        for index, page_hash in enumerate(hash_pages(KEY, token_ids)):
            at = slice(index * PAGE, (index + 1) * PAGE)
            self.memory.put(
                page_key(NAMESPACE, page_hash), b"", [k[at].tobytes() + values.tobytes() for k in keys]
            )

    def drain(self) -> None:
        """Wait until no row is under way."""
        assert self.estimator.drain(20)

    def similarity(self) -> Similarity:
        """What a manifest would get."""
        self.drain()
        return Similarity.decode(self.estimates.statistics(KEY.digest))


def naive(token_ids: array[int], *ranges: tuple[int, int], history: int | None = None) -> Similarity:
    """The sums of all sampled rows of these ranges, at once."""
    sums = Similarity(LAYOUT.layers, Windows.relative if history is None else Windows.absolute)
    for start, end in ranges:
        positions = torch.from_numpy(sampled_positions(NAMESPACE, KEY.digest, start, end, RATE))
        rows = [
            attention_rows(
                vectors(token_ids, layer, HEADS, 1)[positions],
                vectors(token_ids, layer, LAYOUT.kv_heads, 2),
                positions,
                SCALE,
            )
            for layer in range(LAYOUT.layers)
        ]
        sums.add(torch.stack(rows), positions, history=history)
    return sums


def assert_same(found: Similarity, expected: Similarity) -> None:
    assert found.rows == expected.rows
    np.testing.assert_allclose(found.gram, expected.gram, rtol=1e-6)
    np.testing.assert_allclose(found.mass(), expected.mass(), rtol=1e-6)


@pytest.fixture
def world() -> Iterator[World]:
    with opened(World()) as opened_world:
        yield opened_world


@contextmanager
def opened(world: World) -> Iterator[World]:
    """A world that is sound at the end."""
    yield world
    world.hold.set()
    world.drain()
    assert world.estimates.check() == []
    world.estimates.close()


@pytest.mark.parametrize("forwards", [1, 3, 40])
def test_one_turn_is_the_sum_of_its_sampled_rows(world: World, forwards: int) -> None:
    world.turn(tokens(320), 0, forwards=forwards)
    assert_same(world.similarity(), naive(tokens(320), (0, 320)))
    assert world.metrics.rows == {"seen": 32, "dropped": 0}


def test_turns_go_on_and_a_broken_page_comes_with_the_next(world: World) -> None:
    """The tree keeps whole pages: the tokens behind them are computed again by the next turn."""
    world.turn(tokens(200), 0)
    world.drain()
    assert_same(world.similarity(), naive(tokens(200), (0, 192)))
    world.turn(tokens(333), 192, forwards=2)
    world.turn(tokens(400), 320)
    assert_same(world.similarity(), naive(tokens(400), (0, 400)))
    assert world.similarity().dropped == 0


def test_absolute_windows_are_those_of_the_history() -> None:
    with opened(World(windows=Windows.absolute)) as absolute:
        absolute.turn(tokens(320), 0)
        assert_same(absolute.similarity(), naive(tokens(320), (0, 320), history=320))
        assert absolute.similarity().windows is Windows.absolute


def test_rows_of_a_suffix_alone_are_an_estimate(world: World) -> None:
    """A prefix came from another session's pages: nobody computed it here. Keys are all there."""
    world.turn(tokens(320), 160)
    assert_same(world.similarity(), naive(tokens(320), (160, 320)))
    assert world.similarity().dropped == 0


def test_a_prefix_that_is_computed_again_does_not_count_twice(world: World) -> None:
    world.turn(tokens(320), 0)
    world.turn(tokens(400), 0)
    assert_same(world.similarity(), naive(tokens(400), (0, 400)))


def test_rows_of_a_dropped_branch_stay_and_those_of_the_new_one_are_added(world: World) -> None:
    first = tokens(320)
    second = tokens(160) + tokens(200, first=5000)
    world.turn(first, 0)
    world.turn(second, 160)
    expected = naive(first, (0, 320))
    expected.merge(naive(second, (160, 352)))
    assert_same(world.similarity(), expected)


def test_a_request_that_got_less_far_changes_nothing(world: World) -> None:
    world.turn(tokens(320), 0)
    world.turn(tokens(100), 96)
    world.turn(tokens(400), 320)
    assert_same(world.similarity(), naive(tokens(400), (0, 400)))


def test_pages_that_memory_has_not_are_dropped_rows(world: World) -> None:
    world.turn(tokens(320), 0, stored=False)
    world.drain()
    assert world.estimates.statistics(KEY.digest) == b""
    shown = world.estimates.describe(KEY.digest)
    assert shown is not None
    assert (shown["rows"], shown["dropped"], shown["dropped_share"]) == (0, 32, 1.0)
    assert shown["ir_layers"] == []
    assert world.metrics.rows == {"seen": 0, "dropped": 32}
    world.turn(tokens(400), 320)
    assert world.similarity().rows == 8
    assert world.similarity().dropped == 32


def test_more_than_the_budget_is_dropped_and_counted() -> None:
    with opened(World(budget_bytes=4 * SHAPE.row_bytes)) as small:
        small.turn(tokens(320), 0, forwards=40)
        small.drain()
        shown = small.estimates.describe(KEY.digest)
        assert shown is not None
        assert shown["rows"] + shown["dropped"] == 32
        assert shown["dropped"] >= 28
        assert small.estimator.counts.planned == 32


def test_finishing_never_waits_for_the_rows(world: World) -> None:
    world.hold.clear()
    start = time.monotonic()
    world.turn(tokens(320), 0)
    assert world.estimates.working
    assert world.estimates.statistics(KEY.digest) == b"", "a pause waits for no row"
    shown = world.estimates.describe(KEY.digest)
    assert shown is not None
    assert (shown["rows"], shown["waiting"]) == (0, 32)
    assert time.monotonic() - start < 10
    world.hold.set()
    assert_same(world.similarity(), naive(tokens(320), (0, 320)))
    assert not world.estimates.working


def test_a_forgotten_session_starts_anew(world: World) -> None:
    world.hold.clear()
    world.turn(tokens(320), 0)
    world.estimates.forget(KEY.digest)
    world.hold.set()
    world.drain()
    assert world.estimates.describe(KEY.digest) is None
    world.turn(tokens(320, first=9000), 0)
    assert_same(world.similarity(), naive(tokens(320, first=9000), (0, 320)))


def test_new_weights_start_over(world: World) -> None:
    world.turn(tokens(320), 0)
    world.estimates.start_over()
    assert world.estimates.describe(KEY.digest) is None
    assert world.probe.held_bytes == 0


def test_a_rejected_request_leaves_no_rows(world: World) -> None:
    rows = world.probe.plan(iter([Span(Request("bad"), 0, 100, 0)]))
    assert rows is not None
    world.estimates.discard("bad")
    assert world.probe.held_bytes == 0
    assert world.estimates.describe(KEY.digest) is None


def saved(world: World, token_ids: array[int], place: Path, statistics: bytes | None = None) -> Manifest:
    """The manifest of a pause now."""
    world.drain()
    chat = Chat(KEY, token_ids)
    if statistics is None:
        statistics = world.estimates.statistics(KEY.digest)
    snapshot = replace(chat.snapshot(), statistics=statistics)
    source, tier = TruePages(chat.hashes), open_ssd(place / "store")
    report = write_session(snapshot, source, tier, chunk_tokens=CHUNK_TOKENS, now=lambda: NOW)
    tier.close()
    return report.manifest


def test_another_server_goes_on_where_the_manifest_left_it(world: World, tmp_path: Path) -> None:
    world.turn(tokens(200), 0)
    manifest = saved(world, tokens(200), tmp_path)
    with opened(World()) as other:
        other.estimates.goes_on(manifest)
        assert_same(other.similarity(), naive(tokens(200), (0, 192)))
        other.turn(tokens(400), 192)
        assert_same(other.similarity(), naive(tokens(400), (0, 400)))


def test_what_is_known_of_the_same_tokens_counts_more(world: World, tmp_path: Path) -> None:
    """Rows that ended after the pause are not lost by the resume."""
    world.hold.clear()
    world.turn(tokens(160), 0)
    early = world.estimates.statistics(KEY.digest)
    assert early == b""
    world.hold.set()
    world.turn(tokens(320), 160)
    manifest = saved(world, tokens(320), tmp_path, statistics=naive(tokens(320), (0, 160)).encode())
    world.estimates.goes_on(manifest)
    assert_same(world.similarity(), naive(tokens(320), (0, 320)))


def test_a_session_that_went_on_elsewhere_brings_its_estimate(world: World, tmp_path: Path) -> None:
    world.turn(tokens(160), 0)
    elsewhere = naive(tokens(320), (0, 320))
    world.estimates.goes_on(saved(world, tokens(320), tmp_path, statistics=elsewhere.encode()))
    assert_same(world.similarity(), elsewhere)


@pytest.mark.parametrize(
    "statistics",
    [
        b"",
        b"no estimate",
        naive(tokens(32), (0, 32)).encode()[:-1] + b"?",
        naive(tokens(32), (0, 32), history=32).encode(),
        Similarity(LAYOUT.layers + 1).encode(),
    ],
    ids=["none", "nonsense", "damaged", "other windows", "other layers"],
)
def test_statistics_that_cannot_be_used_are_as_good_as_none(
    world: World, tmp_path: Path, statistics: bytes
) -> None:
    world.turn(tokens(160), 0)
    manifest = saved(world, tokens(160), tmp_path, statistics=statistics)
    if not statistics:
        assert manifest.statistics == b""
    with opened(World()) as other:
        other.estimates.goes_on(manifest)
        assert other.estimates.describe(KEY.digest) is None
        other.turn(tokens(160), 0)
        assert_same(other.similarity(), naive(tokens(160), (0, 160)))


def test_what_is_shown(world: World) -> None:
    world.turn(tokens(320), 0)
    sums = world.similarity()
    mass = sums.mass()
    assert world.estimates.describe(KEY.digest) == {
        "rows": 32,
        "dropped": 0,
        "dropped_share": 0.0,
        "waiting": 0,
        "ir_mass": [round(value, 4) for value in mass.tolist()],
        "ir_layers": [layer for layer in range(LAYOUT.layers) if mass[layer] >= 0.5],
    }


def test_estimates_are_bounded_in_number(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl_krul.engine.estimates.MAX_ESTIMATES", 3)
    for number in range(6):
        world.estimates.finished("none", SessionKey(f"s{number}"), tokens(16))
    known = [number for number in range(6) if world.estimates.describe(SessionKey(f"s{number}").digest)]
    assert known == [3, 4, 5]


def test_keys_of_half_precision_pools(world: World) -> None:
    layout = KvLayout(2, 2, 8, 4, "bfloat16", PAGE, "for tests")
    memory = MemoryTier(2, layout.page_segment_bytes, 1 << 20)
    k = torch.randn(3 * PAGE, 2, 8).to(torch.bfloat16)
    page_bytes = k.view(torch.uint8).numpy().reshape(3, layout.k_page_bytes)
    for index in (2, 0, 1):  # slots in another order than pages
        page = page_bytes[index].tobytes() + bytes(layout.v_page_bytes)
        memory.put(f"n/{index}", b"", [page, page])
    source = MemoryKeys(memory, layout, ["n/0", "n/1", "n/2"], lambda: None)
    for layer in range(2):
        with source.keys(layer) as found:
            assert found is not None
            assert torch.equal(found, k)
    memory.delete("n/1")
    with source.keys(0) as found:
        assert found is None
    assert free_slots(memory) == memory.slots, "nothing stays pinned"

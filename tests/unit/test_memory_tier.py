"""The page interface of the memory tier: pins, reservations, eviction, clear."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sgl_krul.errors import ConfigError, StoreFull
from sgl_krul.store import MemoryTier, PageReservation, Slots, runs

LAYERS = 3
SEGMENT = 16
SLOTS = 6
PAGE = LAYERS * SEGMENT


@pytest.fixture
def tier() -> Iterator[MemoryTier]:
    tier = MemoryTier(LAYERS, SEGMENT, SLOTS * PAGE + PAGE - 1, clock=lambda: 1234.5)
    yield tier
    assert tier.check() == []


def reserve(tier: MemoryTier, keys: Sequence[str]) -> PageReservation:
    reservation = tier.reserve(keys)
    assert reservation is not None
    return reservation


def add(tier: MemoryTier, *keys: str) -> list[int]:
    reservation = reserve(tier, keys)
    assert tier.publish(reservation) is None
    return reservation.slots.tolist()


def present(tier: MemoryTier) -> str:
    return "".join(entry.key for entry in tier.scan(""))


def test_the_arena_is_layers_by_slots_by_segment(tier: MemoryTier) -> None:
    assert tier.slots == SLOTS
    assert tier.layer(2).shape == (SLOTS, SEGMENT)
    assert tier.layer(0).dtype == np.uint8
    tier.layer(1)[3] = 7
    assert np.shares_memory(tier.layer(1), tier.layer(1))
    for layer in (-1, LAYERS):
        with pytest.raises(ValueError, match=f"layer {layer}: expected 0 to 2"):
            tier.layer(layer)


@pytest.mark.parametrize("sizes", [(0, 16, 1000), (3, 0, 1000), (3, 16, 47), (3, 16, -1), (3, 16, 1 << 62)])
def test_sizes_out_of_range(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"expected|takes|refuses"):
        MemoryTier(*sizes)


def test_pages_and_objects_are_the_same_things(tier: MemoryTier) -> None:
    reservation = reserve(tier, ["a"])
    for layer in range(LAYERS):
        tier.layer(layer)[reservation.slots[0]] = layer + 1
    tier.publish(reservation, b"header")
    assert tier.read_header("a") == b"header"
    buffer = bytearray(2 * SEGMENT)
    tier.read_segments("a", SEGMENT, [memoryview(buffer)])
    assert buffer == b"\2" * SEGMENT + b"\3" * SEGMENT
    tier.put("b", b"", [b"\5" * SEGMENT, b"\6" * SEGMENT, b"\7" * SEGMENT])
    pinned = tier.pin(["b"])
    assert pinned is not None
    with pinned:
        assert tier.layer(1)[pinned.slots[0]].tobytes() == b"\6" * SEGMENT
    assert next(tier.scan("a")).modified == 1234.5


@pytest.mark.parametrize("segments", [[], [b"x" * 16] * 2, [b"x" * 16] * 4, [b"x" * 15] * 3, [b"x" * 17] * 3])
def test_objects_of_another_size_are_refused(tier: MemoryTier, segments: list[bytes]) -> None:
    with pytest.raises(ValueError, match="expected 3 of 16"):
        tier.put("key", b"", segments)
    assert tier.usage().bytes == 0


def test_reads_begin_at_segments(tier: MemoryTier) -> None:
    tier.put("key", b"", [b"x" * 16] * 3)
    with pytest.raises(ValueError, match="offset 5: expected a multiple of 16"):
        tier.read_segments("key", 5, [])


def test_leading_and_contains(tier: MemoryTier) -> None:
    add(tier, "a", "b", "d")
    assert tier.leading(["a", "b", "c", "d"]) == 2
    assert tier.leading(["c", "a"]) == 0
    assert tier.leading(["a", "b"]) == 2
    assert tier.leading([]) == 0
    assert tier.contains(["a", "c", "d"]).tolist() == [True, False, True]
    assert tier.contains([]).dtype == np.bool_


def test_pin_is_all_or_nothing(tier: MemoryTier) -> None:
    slots = add(tier, "a", "b")
    assert tier.pin(["a", "x", "b"]) is None
    pinned = tier.pin(["b", "a"])
    assert pinned is not None
    assert pinned.keys == ("b", "a")
    assert pinned.slots.dtype == np.int64
    assert pinned.slots.tolist() == slots[::-1]
    pinned.release()
    pinned.release()


def test_the_last_page_is_evicted_first(tier: MemoryTier) -> None:
    add(tier, *"abc")
    add(tier, *"def")
    add(tier, "g")
    assert present(tier) == "abdefg"
    pinned = tier.pin(["a", "b"])
    assert pinned is not None
    add(tier, "h")
    assert present(tier) == "abdegh"
    pinned.release()  # used later than d, e, g and h now
    add(tier, *"ijkl")
    assert present(tier) == "abijkl"
    add(tier, "m")
    assert present(tier) == "aijklm"
    assert tier.evictions == 7


def test_pinned_pages_stay(tier: MemoryTier) -> None:
    add(tier, *"abcdef")
    first, second = tier.pin(["a", "b", "c"]), tier.pin(["c", "d"])
    assert first is not None
    assert second is not None
    assert tier.reserve(["x", "y", "z"]) is None
    assert present(tier) == "abcdef"
    assert tier.evictions == 0
    first.release()
    assert tier.reserve([*"vwxyz"]) is None  # c is pinned still
    add(tier, *"wxyz")
    assert present(tier) == "cdwxyz"
    second.release()


def test_put_with_everything_pinned_is_refused(tier: MemoryTier) -> None:
    add(tier, *"abcdef")
    pinned = tier.pin([*"abcdef"])
    assert pinned is not None
    for key in ("g", "a"):
        with pytest.raises(StoreFull, match="all 6 slots"):
            tier.put(key, b"", [b"x" * 16] * 3)
    pinned.release()
    tier.put("a", b"new", [b"x" * 16] * 3)
    assert present(tier) == "abcdef"  # a full tier replaces in place
    assert tier.evictions == 0


def test_replacing_a_pinned_page_leaves_it_to_its_readers(tier: MemoryTier) -> None:
    tier.put("a", b"old", [b"o" * 16] * 3)
    pinned = tier.pin(["a"])
    assert pinned is not None
    tier.put("a", b"new", [b"n" * 16] * 3)
    assert tier.layer(0)[pinned.slots[0]].tobytes() == b"o" * 16
    assert tier.read_header("a") == b"new"
    assert tier.usage()[:2] == (2 * PAGE, 1)
    pinned.release()
    assert tier.usage()[:2] == (PAGE, 1)


def test_reserve_leaves_out_what_is_there_and_repeats(tier: MemoryTier) -> None:
    add(tier, "b")
    reservation = reserve(tier, ["a", "b", "c", "a"])
    assert reservation.keys == ("a", "c")
    assert tier.contains(["a", "c"]).tolist() == [False, False]
    assert tier.usage()[:2] == (3 * PAGE, 1)
    tier.abandon(reservation)
    assert tier.usage()[:2] == (PAGE, 1)
    nothing = reserve(tier, ["b"])
    assert nothing.keys == ()
    assert nothing.slots.shape == (0,)
    assert tier.publish(nothing) is None
    with pytest.raises(ValueError, match="key 'A'"):
        tier.reserve(["a", "A"])


def test_reserve_evicts_none_of_the_keys_it_was_asked_for(tier: MemoryTier) -> None:
    add(tier, *"abc")
    add(tier, *"def")
    reservation = reserve(tier, [*"abcxyz"])
    assert reservation.keys == ("x", "y", "z")
    assert present(tier) == "abc"
    tier.publish(reservation)
    assert tier.reserve([*"abcdxyz"]) is None


def test_a_reservation_is_used_once(tier: MemoryTier) -> None:
    for first in (tier.publish, tier.abandon):
        for second in (tier.publish, tier.abandon):
            reservation = reserve(tier, ["a", "b"])
            first(reservation)
            with pytest.raises(AssertionError, match="already"):
                second(reservation)
            tier.clear()


def test_slots_are_neighbours_if_there_are_any() -> None:
    tier = MemoryTier(1, 1, 10)
    for key, slot in zip("abcdefghij", range(10), strict=True):
        assert add(tier, key) == [slot]
    for key in "bdefhj":
        tier.delete(key)
    assert reserve(tier, ["x", "y"]).slots.tolist() == [3, 4]
    assert reserve(tier, ["u", "v", "w"]).slots.tolist() == [5, 7, 9]  # closer together than 1, 5, 7
    assert tier.check() == []


def test_publish_keeps_what_somebody_else_published(tier: MemoryTier) -> None:
    ours, theirs = reserve(tier, ["a", "b"]), reserve(tier, ["b", "c"])
    tier.publish(theirs, b"theirs")
    pinned = tier.publish(ours, b"ours", pin=True)
    assert pinned is not None
    assert pinned.keys == ("a", "b")
    assert pinned.slots.tolist() == [ours.slots[0], theirs.slots[0]]
    assert [tier.read_header(key) for key in "abc"] == [b"ours", b"theirs", b"theirs"]
    assert tier.usage()[:2] == (3 * PAGE, 3)
    pinned.release()


def test_publish_counts_as_a_use_of_what_was_there(tier: MemoryTier) -> None:
    ours, theirs = reserve(tier, ["a"]), reserve(tier, ["a"])
    tier.publish(theirs)
    add(tier, *"bcde")
    tier.publish(ours)
    add(tier, "f", "g")
    assert present(tier) == "abcdfg"


def test_clear_drops_all_and_pinned_slots_return_at_unpin(tier: MemoryTier) -> None:
    add(tier, *"abc")
    twice = tier.pin(["a"]), tier.pin(["a", "b"])
    waiting = reserve(tier, ["d", "e"])
    tier.clear()
    assert present(tier) == ""
    assert tier.usage()[:2] == (4 * PAGE, 0)
    fresh = add(tier, "a")
    assert twice[0] is not None
    assert twice[1] is not None
    assert fresh != twice[0].slots.tolist()
    twice[1].release()
    assert tier.usage()[:2] == (4 * PAGE, 1)
    twice[0].release()
    assert tier.usage()[:2] == (3 * PAGE, 1)
    assert tier.publish(waiting, b"", pin=True) is None  # made before the clear: not to be seen after it
    assert present(tier) == "a"
    assert tier.usage()[:2] == (PAGE, 1)


def test_a_deleted_pinned_page_stays_readable(tier: MemoryTier) -> None:
    add(tier, "a")
    pinned = tier.pin(["a", "a"])
    assert pinned is not None
    assert tier.delete("a") is True
    assert tier.pin(["a"]) is None
    assert tier.usage()[:2] == (PAGE, 0)
    pinned.release()
    assert tier.usage()[:2] == (0, 0)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([], [], []),
        ([4], [9], [(4, 9, 1)]),
        ([0, 1, 2], [5, 6, 7], [(0, 5, 3)]),
        ([0, 1, 2, 3], [5, 6, 8, 9], [(0, 5, 2), (2, 8, 2)]),
        ([3, 2, 1], [1, 2, 3], [(3, 1, 1), (2, 2, 1), (1, 3, 1)]),
        ([0, 0, 1], [0, 1, 2], [(0, 0, 1), (0, 1, 2)]),
    ],
)
def test_runs(a: list[int], b: list[int], expected: list[tuple[int, int, int]]) -> None:
    found = runs(np.array(a, dtype=np.int64), np.array(b, dtype=np.int64))
    assert found == expected
    assert all(type(number) is int for run in found for number in run)


def test_runs_of_unequal_arrays() -> None:
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\)"):
        runs(np.arange(2), np.arange(3))


def fill(tier: MemoryTier, reservation: PageReservation) -> None:
    for layer in range(LAYERS):
        numbers = [int(key[1:]) for key in reservation.keys]
        tier.layer(layer)[reservation.slots] = np.array(numbers, dtype=np.uint8)[:, None]


def assert_filled(tier: MemoryTier, keys: Sequence[str], slots: Slots) -> None:
    expected = np.array([int(key[1:]) for key in keys], dtype=np.uint8)[:, None]
    for layer in range(LAYERS):
        assert (tier.layer(layer)[slots] == expected).all()


def test_threads_on_pages() -> None:
    """Each page holds the number its key names; whoever pins one finds that in every layer."""
    tier = MemoryTier(LAYERS, SEGMENT, 24 * PAGE)
    names = [f"p{number:02d}" for number in range(60)]

    def work(seed: int) -> int:
        rng = random.Random(seed)
        checked = 0
        for _ in range(400):
            start = rng.randrange(len(names) - 8)
            keys = names[start : start + rng.randrange(1, 8)]
            reservation = tier.reserve(keys)
            if reservation is not None:
                fill(tier, reservation)
                rng.choice([tier.abandon, *[tier.publish] * 7])(reservation)
            rng.choice([tier.clear, lambda: tier.delete(keys[0]), *[lambda: None] * 6])()  # noqa: B023
            pinned = tier.pin(keys)
            if pinned is not None:
                assert_filled(tier, keys, pinned.slots)
                pinned.release()
                checked += 1
        return checked

    with ThreadPoolExecutor(4) as pool:
        assert all(count > 0 for count in pool.map(work, range(4), timeout=20))
    assert tier.check() == []
    tier.clear()
    assert tier.usage().bytes == 0


def test_prefault_backs_the_first_slots_and_harms_nothing() -> None:
    tier = MemoryTier(3, 4096, 40 * 3 * 4096)
    tier.put("a", b"h", [bytes([layer]) * 4096 for layer in range(3)])
    assert tier.prefault(0) == 0
    assert tier.prefault(10 * 3 * 4096 + 5) in (0, 10 * 3 * 4096)  # 0: a system that can't
    assert tier.prefault(1 << 40) in (0, 40 * 3 * 4096)
    read = bytearray(3 * 4096)
    tier.read_segments("a", 0, [memoryview(read)])
    assert read == b"".join(bytes([layer]) * 4096 for layer in range(3))
    assert tier.check() == []

"""The daily write budget: what it lets pass, what it remembers, and what it does with a damaged file."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sgl_krul.errors import ConfigError, StoreFull, StoreUnavailable
from sgl_krul.store import SsdTier
from sgl_krul.store.root import RootDirectory
from sgl_krul.store.write_budget import WRITES_FILE, WriteBudget

DAY = 86_400
NOON = 20_787 * DAY + DAY // 2  # 2026-11-30 12:00 UTC
MIB = 1 << 20


class Clock:
    """Unix seconds that stand still until they are set."""

    def __init__(self) -> None:
        self.now = float(NOON)

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RootDirectory]:
    directory = RootDirectory(tmp_path / "root", 0.0)
    yield directory
    directory.close()


def loaded(daily_bytes: int, directory: RootDirectory, clock: Clock) -> WriteBudget:
    budget = WriteBudget(daily_bytes, str(directory.path), clock)
    budget.load(directory)
    return budget


def saved(directory: RootDirectory) -> str:
    return (directory.path / WRITES_FILE).read_text()


def test_a_day_has_a_budget(clock: Clock) -> None:
    budget = WriteBudget(100, "/ssd", clock)
    budget.claim(60)
    budget.claim(40)
    assert budget.left_bytes == 0
    budget.claim(0)
    with pytest.raises(
        StoreFull,
        match=r"^/ssd: 1 bytes on top of 100 written today pass the daily write budget of 100; "
        r"wait for the new day at 2026-12-01 00:00 UTC, or raise ssd\.daily_write_bytes$",
    ):
        budget.claim(1)
    clock.now = (NOON // DAY + 1) * DAY - 0.001
    with pytest.raises(StoreFull):
        budget.claim(1)
    clock.now += 0.001
    assert budget.left_bytes == 100
    budget.claim(100)


def test_what_is_refused_does_not_count(clock: Clock) -> None:
    budget = WriteBudget(100, "/ssd", clock)
    budget.claim(60)
    with pytest.raises(StoreFull):
        budget.claim(41)
    assert budget.left_bytes == 40
    budget.give_back(60)
    budget.claim(100)


def test_a_clock_set_back_over_midnight_makes_no_second_day(clock: Clock) -> None:
    budget = WriteBudget(100, "/ssd", clock)
    clock.now = (NOON // DAY + 1) * DAY
    budget.claim(100)
    clock.now -= 2
    assert budget.left_bytes == 0
    clock.now += 4
    assert budget.left_bytes == 0
    clock.now -= 7 * DAY  # it was wrong before: that must not last a week
    assert budget.left_bytes == 100


def test_no_budget(clock: Clock, directory: RootDirectory) -> None:
    budget = loaded(0, directory, clock)
    budget.claim(1 << 60)
    budget.give_back(1 << 60)
    budget.save()
    assert budget.left_bytes is None
    assert not (directory.path / WRITES_FILE).exists()


def test_a_negative_budget(clock: Clock, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="daily_write_bytes -1: expected 0"):
        WriteBudget(-1, "/ssd", clock)
    with pytest.raises(ConfigError, match="daily_write_bytes -1: expected 0"):
        SsdTier(
            tmp_path / "root",
            capacity_bytes=1,
            free_space_floor_bytes=0,
            fsync="never",
            daily_write_bytes=-1,
        )
    assert not (tmp_path / "root").exists()


def test_the_count_survives_a_restart(clock: Clock, directory: RootDirectory) -> None:
    budget = loaded(100, directory, clock)
    budget.claim(30)
    budget.claim(1)
    budget.save()
    assert saved(directory) == "2026-11-30 31 bytes\n"
    assert loaded(100, directory, clock).left_bytes == 69
    assert loaded(20, directory, clock).left_bytes == 0  # the budget was lowered
    clock.now += DAY
    again = loaded(100, directory, clock)
    assert again.left_bytes == 100
    again.claim(7)
    assert saved(directory) == "2026-12-01 7 bytes\n"


def test_it_is_saved_seldom(clock: Clock, directory: RootDirectory) -> None:
    budget = loaded(1000 * MIB, directory, clock)
    path = directory.path / WRITES_FILE
    budget.claim(10 * MIB)
    assert not path.exists()  # within 1 % of the budget
    budget.claim(1)
    assert path.exists()
    path.unlink()
    clock.now += 4.9
    budget.claim(1)
    assert not path.exists()
    clock.now += 0.2
    budget.claim(1)
    assert saved(directory) == f"2026-11-30 {10 * MIB + 3} bytes\n"
    assert sorted(os.listdir(directory.path)) == [".lock", WRITES_FILE]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"2026-11-30 99 bytes",
        b"2026-11-30 99 bytes\nmore",
        b"2026-13-30 99 bytes\n",
        b"0000-00-00 99 bytes\n",
        b"2026-11-30 -9 bytes\n",
        b"2026-11-30 " + b"9" * 5000 + b" bytes\n",
        "2026-11-30 ٩ bytes\n".encode(),
        bytes(range(256)),
    ],
)
def test_a_damaged_file_counts_as_none(
    clock: Clock, directory: RootDirectory, caplog: pytest.LogCaptureFixture, text: bytes
) -> None:
    (directory.path / WRITES_FILE).write_bytes(text)
    with caplog.at_level(logging.WARNING):
        budget = loaded(100, directory, clock)
    (record,) = caplog.records
    assert record.getMessage().endswith("today's writes count from 0")
    assert budget.left_bytes == 100
    budget.claim(1)
    assert saved(directory) == "2026-11-30 1 bytes\n"


def test_a_file_of_another_kind(
    clock: Clock, directory: RootDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    """It can neither be read nor replaced: the budget holds as long as the server runs, and a log says so."""
    (directory.path / WRITES_FILE).mkdir()
    (directory.path / WRITES_FILE / "mine").touch()
    with caplog.at_level(logging.WARNING):
        budget = loaded(100, directory, clock)
        budget.claim(50)
        budget.claim(50)
        budget.save()
    assert len(caplog.records) == 1  # once is enough
    with pytest.raises(StoreFull):
        budget.claim(1)


def test_a_count_that_could_not_be_saved_is_saved_with_the_next_claim(
    clock: Clock, directory: RootDirectory
) -> None:
    budget = loaded(1000, directory, clock)
    (directory.path / f"{WRITES_FILE}.new").mkdir()
    budget.claim(50)
    assert not (directory.path / WRITES_FILE).exists()
    (directory.path / f"{WRITES_FILE}.new").rmdir()
    budget.claim(1)
    assert saved(directory) == "2026-11-30 51 bytes\n"


def test_threads_never_pass_it_together(clock: Clock, directory: RootDirectory) -> None:
    budget = loaded(1000, directory, clock)
    start = threading.Barrier(4)

    def write() -> int:
        start.wait(10)
        for count in range(1000):
            try:
                budget.claim(1)
            except StoreFull:
                return count
        return 1000

    with ThreadPoolExecutor(4) as pool:
        assert sum(future.result(20) for future in [pool.submit(write) for _ in range(4)]) == 1000
    budget.save()
    assert saved(directory) == "2026-11-30 1000 bytes\n"


# -- in the SSD tier --


def open_tier(root: Path, clock: Clock, daily_bytes: int) -> SsdTier:
    return SsdTier(
        root,
        capacity_bytes=1 << 30,
        free_space_floor_bytes=0,
        fsync="never",
        lock_wait_s=0.0,
        daily_write_bytes=daily_bytes,
        now=clock,
    )


def test_whole_files_count_also_replaced_and_deleted_ones(tmp_path: Path, clock: Clock) -> None:
    with open_tier(tmp_path, clock, 3 * 4096 + 2) as tier:
        assert tier.write_left_bytes == 3 * 4096 + 2
        tier.put("a", b"h", [b"x"])
        tier.put("a", b"h", [b"x"])
        tier.delete("a")
        assert tier.write_left_bytes == 4096
        with pytest.raises(StoreFull, match="daily write budget"):
            tier.put("b/c", b"h", [b"x"])
        assert sorted(os.listdir(tmp_path)) == [".lock", WRITES_FILE]
        tier.put("b/c", b"h", [])
        assert tier.check() == []
    with open_tier(tmp_path, clock, 3 * 4096 + 2) as tier:
        assert tier.write_left_bytes == 0
        assert [entry.key for entry in tier.scan("")] == ["b/c"]
        with pytest.raises(StoreFull, match="2026-12-01 00:00 UTC"):
            tier.put("a", b"h", [])
        clock.now += DAY
        tier.put("a", b"h", [])
        assert tier.check() == []


def test_a_small_put_is_remembered_over_a_restart_too(tmp_path: Path, clock: Clock) -> None:
    for restarts in range(3):
        with open_tier(tmp_path, clock, 1000 * 4096) as tier:
            assert tier.write_left_bytes == (1000 - restarts) * 4096
            tier.put("a", b"h", [])


def test_what_was_never_written_does_not_count(tmp_path: Path, clock: Clock) -> None:
    with open_tier(tmp_path, clock, 10 * 4096) as tier:
        tier.put("a", b"h", [])
        with pytest.raises(StoreUnavailable, match="ENOTDIR"):
            tier.put("a/b", b"h", [])
        assert tier.write_left_bytes == 9 * 4096


def test_a_tier_without_a_budget(tmp_path: Path, clock: Clock) -> None:
    with open_tier(tmp_path, clock, 0) as tier:
        tier.put("a", b"h", [])
        assert tier.write_left_bytes is None
    assert sorted(os.listdir(tmp_path)) == [".lock", "a"]

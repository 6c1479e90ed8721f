"""Several ranks, a service each: whatever disks and workers do, they go the same way in the same round."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sgl_krul.config import TenantsConfig
from sgl_krul.errors import QuotaExceeded, StoreUnavailable
from sgl_krul.restore.pipeline import RestoreReport
from sgl_krul.service.agreed import Agreed, agreed, common_chunks, ready, trim
from sgl_krul.service.agreement import Alone
from sgl_krul.service.jobs import Job, Jobs
from sgl_krul.session.record import SessionKey, chunk_key, manifest_key
from sgl_krul.session.registry import State
from tests.conftest import MEMORY_PAGES
from tests.rank_site import KEY, NAMESPACES, RANKS, Fault, Site, no_fault
from tests.ranks import Meeting
from tests.sessions import (
    CHUNK_TOKENS,
    LAYOUT,
    chat,
    files,
    free_slots,
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    site.start()
    yield site
    site.faults = [no_fault] * RANKS
    site.stop()
    for ssd in site.ssds:
        assert ssd.check() == []
        ssd.close()


def broken(operation: str) -> Fault:
    """A disk on which one operation fails."""

    def fault(when: str, name: str, key: str) -> None:
        if name == operation:
            raise StoreUnavailable("no disk")

    return fault


# -- outcomes --


def test_one_rank_asks_nobody() -> None:
    future: Future[int] = Future()
    assert agreed(future, Alone()) is future
    assert ready([future], Alone()) == [False]
    meeting = Meeting(2)
    assert meeting.everywhere(lambda rank: ready([], meeting.ranks[rank])) == [[], []]
    assert [rank.calls for rank in meeting.ranks] == [0, 0]


def test_jobs_end_in_the_same_poll_and_order_on_all_ranks() -> None:
    meeting = Meeting(3)
    rounds = 200
    local: list[list[Future[int]]] = [[Future() for _ in range(12)] for _ in range(3)]

    def rank_runs(rank: int) -> list[tuple[int, int]]:
        jobs = Jobs(meeting.ranks[rank])
        ended: list[tuple[int, int]] = []
        now = 0
        for number, future in enumerate(local[rank]):
            outcome = agreed(future, meeting.ranks[rank])

            def complete(number: int = number, outcome: Future[int] = outcome) -> None:
                ended.append((now, number * outcome.result()))

            jobs.begin(Job("", outcome, complete, lambda _: None))
        order = random.Random(rank).sample(range(12), 12)
        for now in range(rounds):
            if now % (rank + 2) == 0 and order:
                local[rank][order.pop()].set_result(1)
            jobs.poll()
        assert not jobs
        return ended

    first, *others = meeting.everywhere(rank_runs)
    assert len(first) == 12
    assert others == [first, first]


def test_of_several_failures_the_lowest_rank_is_told_of() -> None:
    meeting = Meeting(3)
    discarded: list[int] = []
    errors = [None, StoreUnavailable("no disk"), RuntimeError("a bug")]

    def rank_runs(rank: int) -> BaseException | None:
        local: Future[int] = Future()
        future = agreed(local, meeting.ranks[rank], discarded.append)
        error = errors[rank]
        local.set_result(7) if error is None else local.set_exception(error)
        assert isinstance(future, Agreed)
        future.settle(meeting.ranks[rank])
        return future.exception()

    answers = meeting.everywhere(rank_runs)
    assert [type(answer) for answer in answers] == [StoreUnavailable] * 3
    told = "rank 1 failed: no disk"
    assert [str(answer) for answer in answers] == [told, "no disk", told]
    assert discarded == [7]


def test_chunks_that_all_ranks_cut_alike(site: Site) -> None:
    """One rank has the session of an older pause: its last chunk is shorter."""
    older, newer = (chat(count).write(site.ssds[0]).manifest.chunks for count in (150, 300))
    shared = CHUNK_TOKENS * 2
    assert sum(chunk.tokens for chunk in older[:2]) == shared < 150
    brought = [older, newer]
    meeting = site.meeting
    assert meeting.everywhere(lambda rank: common_chunks(brought[rank], meeting.ranks[rank])) == [2, 2]
    assert meeting.everywhere(lambda rank: common_chunks(newer, meeting.ranks[rank])) == [5, 5]
    assert common_chunks(newer, Alone()) == 5


def test_jobs_wake_the_waiting_thread_when_the_own_worker_is_done() -> None:
    jobs = Jobs(Meeting(2).ranks[0])
    local: Future[int] = Future()
    jobs.begin(Job("", agreed(local, Meeting(2).ranks[0]), lambda: None, lambda _: None))
    threading.Timer(0.05, local.set_result, [1]).start()
    start = time.monotonic()
    jobs.wait(20)
    assert time.monotonic() - start < 10


# -- the verbs --


def test_pause_and_resume(site: Site) -> None:
    for answer in site.pause(chat(150)):
        assert (answer["state"], answer["stored_tokens"]) == ("paused", 144)
    assert site.settled == [[True], [True]]
    site.start()
    for answer in site.resume():
        assert (answer["restored_tokens"], answer["restored_from"], answer["reason"]) == (144, "ssd", "")
    for rank in range(RANKS):  # each under its own name
        assert all(NAMESPACES[rank] in name for name in files(site.root / f"rank{rank}"))


def test_a_pause_that_fails_on_one_rank_is_none(site: Site) -> None:
    site.faults[1] = broken("put")
    first, second = site.pause(chat(150))
    assert isinstance(first, StoreUnavailable)
    assert str(first).startswith("rank 1 failed: ")
    assert isinstance(second, StoreUnavailable)
    assert site.settled == [[False], [False]]
    assert site.states() == [State.ACTIVE] * 2
    site.faults[1] = no_fault
    assert [answer["state"] for answer in site.pause(chat(160))] == ["paused"] * 2
    site.start()
    assert [answer["restored_tokens"] for answer in site.resume()] == [160] * 2


def test_after_a_crash_in_a_second_pause_the_older_state_is_what_all_have(site: Site) -> None:
    site.pause(chat(150))
    site.faults[0] = broken("put")
    site.pause(chat(300))
    site.faults[0] = no_fault
    site.start()
    assert [answer["restored_tokens"] for answer in site.resume()] == [144] * 2
    assert [answer["state"] for answer in site.pause(chat(300))] == ["paused"] * 2


def test_a_lost_chunk_shortens_the_restore_on_all_ranks(site: Site) -> None:
    site.pause(chat(300))
    site.start()
    lost = chunk_key(NAMESPACES[1], KEY.digest, 1, 2)
    site.ssds[1].delete(lost)
    first, second = site.resume(hold=True)
    for answer in (first, second):
        assert answer["restored_tokens"] == 2 * CHUNK_TOKENS
        assert answer["missing_chunks"] == 1
    assert first["reason"].startswith("rank 1: ")
    pages = 2 * CHUNK_TOKENS // LAYOUT.page_size
    assert [free_slots(memory) for memory in site.memories] == [MEMORY_PAGES - pages] * 2  # no pin beyond


def test_a_session_that_one_rank_lost_is_lost(site: Site) -> None:
    site.pause(chat(150))
    site.ssds[0].delete(manifest_key(NAMESPACES[0], KEY.digest))
    assert [answer["restored_tokens"] for answer in site.resume()] == [0, 0]
    assert site.states() == [None, None]


def test_a_restore_that_fails_on_one_rank_pins_nothing_on_the_others(site: Site) -> None:
    site.pause(chat(150))
    site.start()

    def bug(when: str, operation: str, key: str) -> None:
        if operation == "read_segments":
            raise RuntimeError("a bug")

    site.faults[1] = bug
    first, _ = site.resume(hold=True)
    assert "rank 1 failed" in str(first)
    assert site.states() == [State.PAUSED] * 2
    assert [free_slots(memory) for memory in site.memories] == [MEMORY_PAGES] * 2


def test_what_only_some_ranks_found_at_start_is_deleted(site: Site) -> None:
    site.pause(chat(150))
    site.pause(chat(90, "other"))
    site.ssds[1].delete(manifest_key(NAMESPACES[1], KEY.digest))
    site.start()
    assert site.states() == [None, None]
    for rank in range(RANKS):
        left = files(site.root / f"rank{rank}")
        assert left
        assert not any(KEY.digest in path for path in left)


def test_where_a_rank_found_nothing_its_disk_may_be_away_and_nothing_is_deleted(site: Site) -> None:
    site.pause(chat(150))
    site.ssds[1].delete(manifest_key(NAMESPACES[1], KEY.digest))
    site.start()
    assert site.states() == [None, None]
    assert any("manifest" in path for path in files(site.root / "rank0"))


def test_a_delete_that_fails_on_one_rank_can_be_repeated(site: Site) -> None:
    site.pause(chat(150))
    site.settled = [[], []]
    site.faults[0] = broken("delete")
    first, second = site.forget()
    assert isinstance(first, StoreUnavailable)
    assert str(second).startswith("rank 0 failed: ")
    assert site.settled == [[], []]
    assert site.states() == [State.PAUSED] * 2
    site.faults[0] = no_fault
    assert [answer["deleted"] for answer in site.forget()] == [True, True]
    assert site.states() == [None, None]


def test_a_quota_that_one_rank_has_used_up_counts_for_all(site: Site) -> None:
    site.start(TenantsConfig(quota_bytes=30 * LAYOUT.page_bytes))
    site.pause(chat(300, "other"))
    other = site.services[0].registry.get(SessionKey("other"))
    assert other.paused is not None
    other.paused = replace(other.paused, stored_bytes=0)  # this rank counts less
    for answer in site.pause(chat(300)):
        assert isinstance(answer, QuotaExceeded)
    assert site.states() == [State.ACTIVE] * 2


def test_a_session_the_ranks_know_differently_is_forgotten(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.pause(chat(150))
    site.services[1].registry.remove(KEY.digest)

    def verb(rank: int, reply: Callable[[Any], None]) -> None:
        reply(site.services[rank].registry.find(KEY.digest))

    assert site.run(verb) == [None, None]
    assert "know session" in caplog.text


def test_trim_lets_go_of_what_lies_beyond(site: Site) -> None:
    memory = site.memories[0]
    report = RestoreReport()
    for chunk in range(3):
        keys = [f"n/{chunk}-{page}" for page in range(4)]
        reservation = memory.reserve(keys)
        assert reservation is not None
        memory.publish(reservation)
        pinned = memory.pin(keys)
        assert pinned is not None
        report.pins.append(pinned)
    for pages, left in ((12, 3), (9, 3), (8, 2), (5, 2), (0, 0)):
        trim(report, pages)
        assert len(report.pins) == left
    memory.clear()

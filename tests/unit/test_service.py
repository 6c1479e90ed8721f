"""The verbs and the states: who is answered what, and where a session stands afterwards."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sgl_krul.errors import KrulError, SessionBusy, StoreFull, StoreUnavailable
from sgl_krul.service import SessionService
from sgl_krul.session.record import SessionKey, manifest_key
from sgl_krul.session.registry import Session, State
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.ssd import SsdTier
from tests.sessions import (
    LAYOUT,
    NAMESPACE,
    NOW,
    OTHER_NAMESPACE,
    Chat,
    FaultyTier,
    TruePages,
    chat,
    drive,
    files,
    make_service,
    tokens,
    wrong_pages,
)

KEY = SessionKey("chat")


@dataclass
class Bench:
    """A service over real tiers, a clock that stands still, and what it answered."""

    ssd: SsdTier | None
    memory: MemoryTier
    fault: Callable[[str, str, str], None] = lambda when, operation, key: None
    time_s: float = 100.0
    services: list[SessionService] = field(default_factory=list)

    def start(self, namespace: str = NAMESPACE) -> SessionService:
        """A new server over the same store."""
        tier = None if self.ssd is None else FaultyTier(self.ssd, lambda *args: self.fault(*args))
        service = make_service(
            self.memory, tier, namespace=namespace, clock=lambda: self.time_s, now=lambda: NOW
        )
        self.services.append(service)
        return service

    def turn(self, service: SessionService, session: Chat) -> Session:
        """A request of the session finished."""
        service.observe(session.key, session.token_ids)
        return service.registry.get(session.key)

    def begin_pause(
        self,
        service: SessionService,
        session: Chat,
        before: Callable[[], None] = lambda: None,
        settle: Callable[[bool], int] = lambda success: 0,
    ) -> list[Any]:
        """Ask for a pause; the list gets the answer."""
        answers: list[Any] = []
        session.namespace = service.namespace
        service.pause(
            service.registry.get(session.key),
            session.hashes,
            TruePages(session.hashes),
            before=before,
            settle=settle,
            reply=answers.append,
        )
        return answers

    def pause(self, service: SessionService, session: Chat, **steps: Any) -> Any:
        """A turn and a pause; returns the answer."""
        self.turn(service, session)
        answers = self.begin_pause(service, session, **steps)
        drive(service)
        (answer,) = answers
        return answer

    def resume(self, service: SessionService, key: SessionKey = KEY, hold: bool = False) -> Any:
        """Resume; returns the answer."""
        answers: list[Any] = []
        service.resume(key, hold=hold, reply=answers.append)
        drive(service)
        (answer,) = answers
        return answer

    def forget(self, service: SessionService, key: SessionKey = KEY) -> Any:
        """Delete; returns the answer."""
        answers: list[Any] = []
        service.forget(service.registry.get(key), settle=lambda: 7, reply=answers.append)
        drive(service)
        (answer,) = answers
        return answer


@pytest.fixture
def bench(ssd: SsdTier, memory: MemoryTier) -> Iterator[Bench]:
    bench = Bench(ssd, memory)
    yield bench
    finish(bench)


@pytest.fixture
def memory_only(memory: MemoryTier) -> Iterator[Bench]:
    bench = Bench(None, memory)
    yield bench
    finish(bench)


def finish(bench: Bench) -> None:
    """No service may be left with problems or wrong pages."""
    bench.fault = lambda when, operation, key: None
    for service in bench.services:
        service.close()
        assert service.check() == []
    assert wrong_pages(bench.memory) == []


# -- pause and resume --


def test_a_session_is_paused_and_resumed(bench: Bench) -> None:
    service = bench.start()
    session = bench.turn(service, chat(150))
    assert session.state is State.ACTIVE
    assert service.describe(session)["tier"] == "device"
    settled: list[bool] = []

    def settle(success: bool) -> int:
        settled.append(success)
        return 96

    answers = bench.begin_pause(service, chat(150), settle=settle)
    assert session.state is State.PAUSING
    assert answers == []
    drive(service)
    assert session.state is State.PAUSED
    assert settled == [True]
    (answer,) = answers
    assert answer | {"elapsed_ms": 0.0} == {
        "session_id": "chat",
        "salted": False,
        "state": "paused",
        "tokens": 150,
        "stored_tokens": 144,
        "bytes_raw": 9 * LAYOUT.page_bytes,
        "bytes_stored": 9 * LAYOUT.page_bytes + 3 * 4096,
        "tier": "ssd",
        "tiers": ["ssd"],
        "exact": True,
        "lossy_since": None,
        "corrupt_chunks": 0,
        "last_used": NOW,
        "already_paused": False,
        "device_tokens_freed": 96,
        "chunks_written": 3,
        "chunks_kept": 0,
        "layer_plan": "raw",
        "layer_modes": [],
        "expected_loss": 0.0,
        "not_written": {},
        "similarity": None,
        "elapsed_ms": 0.0,
    }
    answer = bench.resume(service)
    assert session.state is State.PAUSED  # until a request has run
    assert answer["restored_tokens"] == 144
    assert answer["recompute_tokens"] == 6
    assert answer["bytes_read"] == 9 * LAYOUT.page_bytes
    assert answer["restored_from"] == "ssd"
    assert answer["reason"] == ""
    assert bench.resume(service)["restored_from"] == "memory"
    assert bench.turn(service, chat(200)).state is State.ACTIVE
    assert service.counters.pauses == 1
    assert (service.counters.resumes, service.counters.restored_tokens) == (2, 288)


def test_sessions_are_there_after_a_restart(bench: Bench) -> None:
    bench.pause(bench.start(), chat(150))
    service = bench.start()
    session = service.registry.get(KEY)
    assert session.state is State.PAUSED
    assert session.tokens == 150
    assert bench.resume(service)["restored_tokens"] == 144
    (row,) = service.overview()["sessions"]
    assert (row["session_id"], row["tier"], row["state"]) == ("chat", "memory", "paused")
    assert row["tiers"] == ["memory", "ssd"]
    assert service.overview()["tiers"]["ssd"]["objects"] == 4
    assert service.overview()["namespace"] == NAMESPACE


def test_a_second_job_of_a_session_is_refused_saying_why(bench: Bench) -> None:
    service = bench.start()
    session = bench.turn(service, chat(150))
    go = threading.Event()
    answers = bench.begin_pause(service, chat(150), before=lambda: _wait(go))
    for verb in (
        lambda: bench.begin_pause(service, chat(150)),
        lambda: service.resume(KEY, hold=True, reply=answers.append),
        lambda: service.forget(session, settle=lambda: 0, reply=answers.append),
    ):
        with pytest.raises(SessionBusy, match=r"'chat' is busy right now \(pausing\): try again") as caught:
            verb()
        assert caught.value.status == 409
    other = bench.turn(service, chat(20, "other"))
    assert other.state is State.ACTIVE  # nobody else waits
    go.set()
    drive(service)
    assert len(answers) == 1
    assert bench.pause(service, chat(160))["state"] == "paused"


def _wait(event: threading.Event) -> None:
    assert event.wait(20)


def test_nothing_waits_for_the_worker(bench: Bench) -> None:
    service = bench.start()
    bench.turn(service, chat(150))
    go = threading.Event()
    answers = bench.begin_pause(service, chat(150), before=lambda: _wait(go))
    for _ in range(3):
        service.poll()
        assert service.working
        assert answers == []
    go.set()
    drive(service)
    assert not service.working


def test_a_request_that_goes_on_beside_its_pause_stays_active(bench: Bench) -> None:
    """Its copy is older than it is: the device pages must stay, and so must its branches."""
    service = bench.start()
    session = bench.turn(service, chat(150))
    go = threading.Event()
    settled: list[bool] = []

    def settle(success: bool) -> int:
        settled.append(success)
        return 0

    answers = bench.begin_pause(service, chat(150), before=lambda: _wait(go), settle=settle)
    bench.turn(service, chat(30, first=7000))
    go.set()
    drive(service)
    assert settled == [False]
    assert session.state is State.ACTIVE
    assert session.branches == [tokens(150)]
    assert answers[0]["state"] == "active"
    assert answers[0]["stored_tokens"] == 144


# -- failures --


@pytest.mark.parametrize("error", [StoreFull("no room"), StoreUnavailable("no disk")])
def test_a_pause_that_fails_leaves_the_session_active(bench: Bench, error: KrulError) -> None:
    service = bench.start()
    session = bench.turn(service, chat(150))
    settled: list[bool] = []

    def refuse(when: str, operation: str, key: str) -> None:
        if operation == "put":
            raise error

    def settle(success: bool) -> int:
        settled.append(success)
        return 0

    bench.fault = refuse
    answers = bench.begin_pause(service, chat(150), settle=settle)
    drive(service)
    assert answers == [error]
    assert settled == [False]
    assert session.state is State.ACTIVE
    assert session.paused is None
    assert service.counters.pauses_failed == 1
    bench.fault = lambda when, operation, key: None
    assert bench.pause(service, chat(150))["state"] == "paused"


def test_a_failed_second_pause_keeps_the_first_copy(bench: Bench) -> None:
    service = bench.start()
    bench.pause(service, chat(150))
    copy = service.registry.get(KEY).paused

    def refuse(when: str, operation: str, key: str) -> None:
        if operation == "put":
            raise StoreFull("no room")

    bench.fault = refuse
    assert isinstance(bench.pause(service, chat(300)), StoreFull)
    session = service.registry.get(KEY)
    assert session.state is State.ACTIVE
    assert session.paused == copy
    assert bench.resume(bench.start())["restored_tokens"] == 144


def test_a_bug_in_a_job_is_answered_and_the_service_goes_on(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    service = bench.start()

    def fail() -> None:
        raise RuntimeError("a bug")

    answer = bench.pause(service, chat(150), before=fail)
    assert isinstance(answer, KrulError)
    assert "internal error: RuntimeError('a bug')" in str(answer)
    assert answer.status == 500
    assert "a job of session" in caplog.text
    assert service.registry.get(KEY).state is State.ACTIVE
    assert bench.pause(service, chat(150))["state"] == "paused"

    def fault(when: str, operation: str, key: str) -> None:
        if operation == "read_segments":
            raise RuntimeError("another bug")

    bench.fault = fault
    assert "another bug" in str(bench.resume(service))
    assert service.registry.get(KEY).state is State.PAUSED
    bench.fault = lambda when, operation, key: None
    assert bench.resume(service)["restored_tokens"] == 144


def test_a_bug_in_settle_is_answered_and_the_copy_counts(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    service = bench.start()

    def fail(success: bool) -> int:
        raise RuntimeError("the tree is wrong")

    assert "the tree is wrong" in str(bench.pause(service, chat(150), settle=fail))
    assert service.check() == []
    assert bench.resume(service)["restored_tokens"] == 144
    assert "the tree is wrong" in caplog.text


def test_damage_is_counted_and_told(bench: Bench, store: Path) -> None:
    service = bench.start()
    bench.pause(service, chat(150))
    chunks = sorted(store.rglob("g*"))
    data = bytearray(chunks[1].read_bytes())
    data[5000] ^= 1
    chunks[1].write_bytes(data)
    answer = bench.resume(service)
    assert (answer["restored_tokens"], answer["recompute_tokens"]) == (64, 86)
    assert answer["corrupt_chunks"] == 1
    assert answer["reason"].startswith("corrupt chunk (checksum")
    answer = bench.resume(service)
    assert (answer["missing_chunks"], answer["corrupt_chunks"]) == (1, 1)
    assert (service.counters.corrupt_chunks, service.counters.missing_chunks) == (1, 1)


@pytest.mark.parametrize("damage", ["cut", "gone", "unreadable"])
def test_a_manifest_that_cannot_be_read_is_a_miss(bench: Bench, store: Path, damage: str) -> None:
    service = bench.start()
    bench.pause(service, chat(150))
    path = store / manifest_key(NAMESPACE, KEY.digest)

    def refuse(when: str, operation: str, key: str) -> None:
        raise StoreUnavailable("EIO")

    if damage == "cut":
        path.write_bytes(path.read_bytes()[:100])
    elif damage == "gone":
        path.unlink()
    else:
        bench.fault = refuse
    answer = bench.resume(service)
    assert (answer["restored_tokens"], answer["restored_from"]) == (0, "nowhere")
    assert {"cut": "corrupt manifest (length", "gone": "gone", "unreadable": "EIO"}[damage] in answer[
        "reason"
    ]
    listed = service.registry.find(KEY.digest)
    assert (listed is None) == (damage == "gone")  # what is listed as paused must be there
    assert listed is None or listed.state is State.PAUSED
    bench.fault = lambda when, operation, key: None
    assert bench.pause(service, chat(160))["state"] == "paused"
    assert bench.resume(service)["restored_tokens"] == 160


# -- leases --


def pinned(bench: Bench) -> bool:
    """Whether the session's pages survive a flood."""
    for index in range(2 * bench.memory.slots):
        bench.memory.put(f"flood/{index}", b"", [bytes(LAYOUT.page_segment_bytes)] * LAYOUT.layers)
    held = bench.memory.leading(chat(150).page_keys) == 9
    for index in range(2 * bench.memory.slots):
        bench.memory.delete(f"flood/{index}")
    return held


def test_a_held_request_finds_its_pages_until_it_has_run(bench: Bench) -> None:
    service = bench.start()
    bench.pause(service, chat(150))
    bench.resume(service, hold=True)
    assert pinned(bench)
    bench.turn(service, chat(160))
    assert not pinned(bench)


def test_leases_expire(bench: Bench) -> None:
    service = bench.start()
    bench.pause(service, chat(150))
    bench.resume(service, hold=True)
    bench.time_s += 30.0
    service.poll()
    assert pinned(bench)
    bench.time_s += 0.1
    service.poll()
    assert not pinned(bench)


def test_a_second_hold_replaces_the_first(bench: Bench) -> None:
    service = bench.start()
    bench.pause(service, chat(150))
    for _ in range(3):
        bench.resume(service, hold=True)
    bench.turn(service, chat(160))
    assert not pinned(bench)


def test_without_hold_nothing_stays_pinned(bench: Bench) -> None:
    service = bench.start()
    bench.pause(service, chat(150))
    bench.resume(service)
    assert not pinned(bench)


def test_close_ends_leases(bench: Bench) -> None:
    service = bench.start()
    bench.pause(service, chat(150))
    bench.resume(service, hold=True)
    service.close()
    assert not pinned(bench)


# -- forget --


def test_forget_removes_everything(bench: Bench, store: Path) -> None:
    service = bench.start()
    bench.pause(service, chat(100, "other"))
    before = files(store)
    bench.pause(service, chat(150))
    size = sum(len(data) for data in files(store).values()) - sum(len(data) for data in before.values())
    answer = bench.forget(service)
    assert answer == {
        "session_id": "chat",
        "deleted": True,
        "bytes_freed": size,
        "device_tokens_freed": 7,
    }
    assert files(store) == before
    assert service.registry.find(KEY.digest) is None
    assert bench.start().registry.find(KEY.digest) is None
    answer = bench.pause(service, chat(50))  # the same id begins anew
    assert (answer["stored_tokens"], answer["chunks_kept"]) == (48, 0)


def test_forget_takes_copies_under_other_weights_along(bench: Bench, store: Path) -> None:
    for namespace in (OTHER_NAMESPACE, NAMESPACE):
        session = chat(150)
        session.namespace = namespace
        assert bench.ssd is not None
        session.write(bench.ssd)
    service = bench.start()
    bench.forget(service)
    assert files(store) == {}


def test_forget_takes_the_remains_of_a_failed_pause_along(bench: Bench, store: Path) -> None:
    service = bench.start()

    def fault(when: str, operation: str, key: str) -> None:
        if operation == "delete" or (operation == "put" and key.endswith("manifest")):
            raise StoreUnavailable("EIO")

    bench.fault = fault
    assert isinstance(bench.pause(service, chat(150)), StoreUnavailable)
    bench.fault = lambda when, operation, key: None
    assert files(store) != {}
    bench.forget(service)
    assert files(store) == {}


def test_a_forget_that_fails_can_be_asked_again(bench: Bench, store: Path) -> None:
    service = bench.start()
    bench.pause(service, chat(150))

    def fault(when: str, operation: str, key: str) -> None:
        if (when, operation) == ("before", "delete") and "-c" in key:
            raise StoreUnavailable("EIO")

    bench.fault = fault
    assert isinstance(bench.forget(service), StoreUnavailable)
    assert service.registry.find(KEY.digest) is not None
    bench.fault = lambda when, operation, key: None
    assert bench.forget(service)["deleted"]
    assert files(store) == {}


# -- weights --


def test_other_weights_make_stored_sessions_stale(bench: Bench, store: Path) -> None:
    service = bench.start()
    bench.pause(service, chat(150))
    bench.turn(service, chat(50, "active"))
    bench.resume(service)
    service.change_namespace(OTHER_NAMESPACE)
    assert bench.memory.leading(chat(150).page_keys) == 0
    session = service.registry.get(KEY)
    assert session.state is State.STALE
    assert service.registry.find(SessionKey("active").digest) is None
    answer = bench.resume(service)
    assert (answer["restored_tokens"], answer["state"]) == (0, "stale")
    assert "weight version" in answer["reason"]
    answer = bench.pause(service, chat(160))
    assert (answer["state"], answer["chunks_kept"]) == ("paused", 0)
    assert {name.split("/")[1] for name in files(store)} == {OTHER_NAMESPACE}


def test_the_old_weights_back_again_make_them_readable_again(bench: Bench) -> None:
    service = bench.start()
    bench.pause(service, chat(150))
    service.change_namespace(OTHER_NAMESPACE)
    service.change_namespace(NAMESPACE)
    assert service.registry.get(KEY).state is State.PAUSED
    assert bench.resume(service)["restored_tokens"] == 144


def test_another_models_sessions_are_listed_as_stale(bench: Bench) -> None:
    bench.pause(bench.start(), chat(150))
    service = bench.start(OTHER_NAMESPACE)
    (row,) = service.overview()["sessions"]
    assert (row["state"], row["tier"], row["stored_tokens"]) == ("stale", "ssd", 144)
    assert bench.resume(service)["restored_tokens"] == 0


def test_weights_that_change_during_a_pause(bench: Bench) -> None:
    """What was begun under the old ones is stored under their name, and stale when it is done."""
    service = bench.start()
    session = bench.turn(service, chat(150))
    go = threading.Event()
    answers = bench.begin_pause(service, chat(150), before=lambda: _wait(go))
    service.change_namespace(OTHER_NAMESPACE)
    go.set()
    drive(service)
    assert answers[0]["state"] == "stale"
    assert service.registry.find(KEY.digest) is session
    assert service.check() == []
    assert bench.forget(service)["deleted"]


def test_weights_that_change_during_a_pause_that_fails(bench: Bench) -> None:
    service = bench.start()
    bench.turn(service, chat(150))
    go = threading.Event()

    def fail() -> None:
        _wait(go)
        raise StoreFull("no room")

    answers = bench.begin_pause(service, chat(150), before=fail)
    service.change_namespace(OTHER_NAMESPACE)
    go.set()
    drive(service)
    assert isinstance(answers[0], StoreFull)
    assert service.registry.find(KEY.digest) is None


def test_weights_that_change_during_a_resume(bench: Bench) -> None:
    service = bench.start()
    bench.pause(service, chat(150))
    go = threading.Event()

    def stall(when: str, operation: str, key: str) -> None:
        if (when, operation) == ("after", "read_segments"):
            _wait(go)

    bench.fault = stall
    answers: list[Any] = []
    service.resume(KEY, hold=True, reply=answers.append)
    assert service.registry.get(KEY).state is State.RESUMING
    service.change_namespace(OTHER_NAMESPACE)
    go.set()
    drive(service)
    assert answers[0]["state"] == "stale"
    assert bench.memory.leading(chat(150).page_keys) * 16 == answers[0]["restored_tokens"]
    bench.time_s += 100
    service.poll()


# -- memory only --


def test_without_a_disk_sessions_rest_in_memory(memory_only: Bench) -> None:
    service = memory_only.start()
    answer = memory_only.pause(service, chat(150))
    assert (answer["state"], answer["tier"], answer["stored_tokens"]) == ("paused", "memory", 144)
    assert answer["chunks_written"] == 0
    answer = memory_only.resume(service)
    assert (answer["restored_tokens"], answer["reason"]) == (144, "")
    memory_only.memory.delete(chat(150).page_keys[5])
    answer = memory_only.resume(service)
    assert (answer["restored_tokens"], answer["missing_chunks"]) == (80, 0)
    assert answer["reason"] == "64 tokens have left memory, where the session rested"
    assert list(service.overview()["tiers"]) == ["memory"]
    service.change_namespace(OTHER_NAMESPACE)
    assert len(service.registry) == 0
    memory_only.pause(service, chat(150))
    assert memory_only.forget(service)["bytes_freed"] == 0


# -- many --


def test_fifty_sessions_with_a_memory_for_five(ssd: SsdTier) -> None:
    """In a fixed random order: all exact, whatever was evicted between."""
    memory = MemoryTier(LAYOUT.layers, LAYOUT.page_segment_bytes, 5 * 9 * LAYOUT.page_bytes)
    bench = Bench(ssd, memory)
    service = bench.start()
    rng = random.Random(50)
    sessions = [chat(rng.randrange(100, 155), f"s{index}", first=1000 * index) for index in range(50)]
    order = [session for session in sessions for _ in range(2)]
    rng.shuffle(order)
    for session in order:
        found = service.registry.find(session.digest)
        if found is not None:
            answer = bench.resume(service, session.key, hold=True)
            assert answer["restored_tokens"] == len(session.token_ids) // 16 * 16
            assert memory.leading(session.page_keys) == len(session.page_keys)
            session.token_ids += array("q", rng.choices(range(100, 999), k=rng.randrange(40)))
            session.token_ids = session.token_ids[:154]
        assert bench.pause(service, session)["state"] == "paused"
    finish(bench)
    assert memory.evictions > 100


def test_an_aborted_request_that_got_less_far_changes_nothing(bench: Bench) -> None:
    service = bench.start()
    session = bench.turn(service, chat(150))
    bench.pause(service, chat(150))
    service.observe(session.key or SessionKey("chat"), chat(40).token_ids, None, aborted=True)
    assert (session.state, session.tokens) == (State.PAUSED, 150)
    service.observe(session.key or SessionKey("chat"), chat(170).token_ids, None, aborted=True)
    assert (session.state, session.tokens) == (State.ACTIVE, 170)

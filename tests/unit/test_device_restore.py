"""Restores to the device through the service: both streams, every fault, and nothing left behind."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_krul.errors import BadRequest, KrulError, NoDeviceRoom, NoTimeline, SessionBusy, StoreUnavailable
from sgl_krul.restore.planner import Strategy
from sgl_krul.service import SessionService
from sgl_krul.service.wish import TargetPlace, Wish
from sgl_krul.session.registry import State
from sgl_krul.store.memory import MemoryTier
from tests.fake_device import FakeDevice, teach
from tests.sessions import (
    CHUNK_TOKENS,
    LAYOUT,
    Chat,
    FaultyTier,
    TruePages,
    chat,
    drive,
    free_slots,
    make_config,
    make_service,
    open_ssd,
    tokens,
)

DEVICE = Wish(target=TargetPlace.DEVICE)


@dataclass
class Site:
    """A service with a disk that can fail, a memory of nothing, and a fake device."""

    service: SessionService
    device: FakeDevice
    memory: MemoryTier
    fault: Any = None
    answers: list[Any] = field(default_factory=list)

    def pause(self, session: Chat) -> None:
        self.service.observe(session.key, session.token_ids)
        known = self.service.registry.get(session.key)
        self.service.pause(
            known,
            session.hashes,
            TruePages(session.hashes),
            before=lambda: None,
            settle=lambda _: 0,
            reply=self.answers.append,
        )
        drive(self.service)
        assert self.answers[-1]["state"] == "paused"
        self.memory.clear()

    def resume(self, session: Chat, wish: Wish = DEVICE, *, hold: bool = False) -> Any:
        """The answer, or the error."""
        self.answers.clear()
        self.service.resume(session.key, hold=hold, reply=self.answers.append, wish=wish)
        drive(self.service)
        (answer,) = self.answers
        return answer

    def restored(self, session: Chat, wish: Wish = DEVICE) -> Any:
        """The answer to a resume that brought all of it."""
        answer = self.resume(session, wish)
        assert not isinstance(answer, KrulError), answer
        assert answer["restored_tokens"] == len(session.token_ids) // 16 * 16, answer
        return answer


@contextmanager
def open_site(
    root: Path, device: FakeDevice | None = None, *, hold_deadline_s: float = 30.0, **restore: Any
) -> Iterator[Site]:
    site: Site

    def fault(when: str, operation: str, key: str) -> None:
        if site.fault is not None:
            site.fault(when, operation, key)

    memory = MemoryTier(LAYOUT.layers, LAYOUT.page_segment_bytes, 64 * LAYOUT.page_bytes)
    config = make_config(hold_deadline_s)
    config = replace(config, restore=replace(config.restore, **restore))
    service = make_service(memory, FaultyTier(open_ssd(root), fault), config=config)
    device = FakeDevice() if device is None else device
    service.resumes.plans.device = device
    site = Site(service, device, memory)
    try:
        yield site
    finally:
        for session in service.registry:
            service.resumes.holds.end(session.digest)
        service.close()
        assert service.check() == []
        assert device.check() == []


def learn(site: Site, *, bytes_per_s: float, s_per_token: float) -> None:
    """Give the service rates."""
    teach(site.service.resumes.plans.book, bytes_per_s=bytes_per_s, s_per_token=s_per_token)


def test_both_streams_bring_a_session_to_the_device(tmp_path: Path) -> None:
    session = chat(6 * CHUNK_TOKENS + 16)
    with open_site(tmp_path, FakeDevice(slice_s=0.002)) as site:
        site.pause(session)
        learn(site, bytes_per_s=1e6, s_per_token=1e-5)
        site.fault = lambda when, operation, _: time.sleep(0.005) if operation == "read_segments" else None
        answer = site.restored(session)
        assert answer["path"] == "device"
        assert answer["restored_to"] == "device"
        assert answer["restored_from"] == "ssd"
        assert answer["strategy"] == "optimal"
        assert 0 < answer["recomputed_tokens"] < len(session.token_ids)
        assert 0 < answer["loaded_bytes"] < len(session.hashes) * LAYOUT.page_bytes
        timeline = site.service.resumes.plans.timeline(session.key)["timeline"]
        assert {span[0] for span in timeline["spans"]} == {"compute", "load"}
        assert timeline["staircase"] == sorted(timeline["staircase"], reverse=True)


@pytest.mark.parametrize("strategy", ["load", "half", "optimal"])
def test_each_strategy_brings_the_same_bytes(tmp_path: Path, strategy: str) -> None:
    session = chat(5 * CHUNK_TOKENS)
    with open_site(tmp_path) as site:
        site.pause(session)
        learn(site, bytes_per_s=1e7, s_per_token=1e-4)
        answer = site.restored(session, Wish(TargetPlace.DEVICE, Strategy(strategy)))
        assert (answer["recomputed_tokens"] > 0) == (strategy == "half") or strategy == "optimal"


def test_a_chunk_longer_than_a_slice_is_computed_in_parts(tmp_path: Path) -> None:
    session = chat(8 * CHUNK_TOKENS)
    with open_site(tmp_path, max_slice_tokens=48) as site:
        site.pause(session)
        learn(site, bytes_per_s=1e6, s_per_token=1e-4)
        answer = site.restored(session, Wish(TargetPlace.DEVICE, Strategy.half))
        assert answer["recomputed_tokens"] > 0
        assert site.device.longest == 48


def test_recompute_all_is_no_restore(tmp_path: Path) -> None:
    session = chat(4 * CHUNK_TOKENS)
    with open_site(tmp_path) as site:
        site.pause(session)
        learn(site, bytes_per_s=1e7, s_per_token=1e-4)
        answer = site.resume(session, Wish(TargetPlace.DEVICE, Strategy.recompute))
        assert answer["restored_tokens"] == 0
        assert answer["path"] == "none"
        assert answer["reason"]
        assert site.service.registry.get(session.key).state is State.PAUSED


def test_without_rates_all_is_loaded(tmp_path: Path) -> None:
    session = chat(4 * CHUNK_TOKENS)
    with open_site(tmp_path) as site:
        site.pause(session)
        answer = site.restored(session)
        assert answer["strategy"] == "load"
        plan = site.service.resumes.plans.timeline(session.key)["plan"]
        assert plan["staircase"] == [0] * LAYOUT.layers
        assert not plan["measured"]


def test_what_is_on_the_device_is_left_there(tmp_path: Path) -> None:
    short, long = chat(2 * CHUNK_TOKENS + 16, "short"), chat(5 * CHUNK_TOKENS, "long")
    with open_site(tmp_path) as site:
        site.pause(short)
        site.pause(long)
        site.restored(short)
        answer = site.restored(long)
        assert answer["loaded_bytes"] < len(long.hashes) * LAYOUT.page_bytes
        assert site.restored(long)["loaded_bytes"] == 0


def test_a_request_that_waits_gets_its_session_pinned(tmp_path: Path) -> None:
    session = chat(4 * CHUNK_TOKENS)
    with open_site(tmp_path) as site:
        site.pause(session)
        answer = site.resume(session, Wish(prompt=session.token_ids + tokens(20, 9000)), hold=True)
        assert answer["path"] == "device"
        assert sum(site.device.pinned.values()) == len(session.hashes)
        site.service.observe(session.key, session.token_ids)
        assert sum(site.device.pinned.values()) == 0


@pytest.mark.parametrize(("shared", "chunks"), [(3, 0), (CHUNK_TOKENS + 3, 1), (CHUNK_TOKENS + 16, 2)])
def test_no_more_is_restored_than_the_prompt_shares(tmp_path: Path, shared: int, chunks: int) -> None:
    session = chat(6 * CHUNK_TOKENS)
    with open_site(tmp_path) as site:
        site.pause(session)
        prompt = session.token_ids[:shared] + tokens(500, 9000)
        answer = site.resume(session, Wish(prompt=prompt), hold=True)
        assert answer["restored_tokens"] == chunks * CHUNK_TOKENS


def test_a_session_in_memory_goes_by_memory_when_a_request_waits(tmp_path: Path) -> None:
    session = chat(4 * CHUNK_TOKENS)
    with open_site(tmp_path) as site:
        site.pause(session)
        assert site.resume(session, Wish(target=TargetPlace.MEMORY))["restored_to"] == "memory"
        answer = site.resume(session, Wish(), hold=True)
        assert answer["path"] == "memory"
        assert answer["bytes_read"] == 0
        answer = site.restored(session)
        assert answer["path"] == "device"
        assert answer["restored_from"] == "memory"


def test_it_can_be_resumed_again_and_again_each_way(tmp_path: Path) -> None:
    session = chat(4 * CHUNK_TOKENS)
    with open_site(tmp_path) as site:
        site.pause(session)
        wishes = [
            (DEVICE, False),
            (Wish(prompt=session.token_ids + tokens(9, 9000)), True),
            (Wish(TargetPlace.MEMORY), False),
        ]
        for wish, hold in wishes * 3:
            answer = site.resume(session, wish, hold=hold)
            assert answer["restored_tokens"] == 256, (wish, answer)
            assert site.service.registry.get(session.key).paused.tiers == ("ssd",)


def test_a_full_device_sends_a_request_by_memory_and_refuses_a_caller(tmp_path: Path) -> None:
    session = chat(4 * CHUNK_TOKENS)
    with open_site(tmp_path, FakeDevice(pages=8)) as site:
        site.pause(session)
        error = site.resume(session)
        assert isinstance(error, NoDeviceRoom)
        assert "session 'chat' can't come to the device, where it needs 256 tokens" in str(error)
        assert "running requests leave too little of it: try again later" in str(error)
        assert 'resume to "memory"' in str(error)
        assert site.service.registry.get(session.key).state is State.PAUSED
        answer = site.resume(session, Wish(), hold=True)
        assert answer["path"] == "memory"
        assert answer["restored_tokens"] == 256


def test_a_hole_is_computed_through(tmp_path: Path) -> None:
    session = chat(6 * CHUNK_TOKENS)
    with open_site(tmp_path) as site:
        site.pause(session)
        learn(site, bytes_per_s=1e9, s_per_token=1e-4)
        (victim,) = tmp_path.rglob("*c000002")
        victim.unlink()
        answer = site.restored(session)
        assert answer["missing_chunks"] == 1
        assert answer["reason"] == ""
        assert site.device.slices > 0


def test_a_flipped_bit_is_computed_through(tmp_path: Path) -> None:
    session = chat(6 * CHUNK_TOKENS)
    with open_site(tmp_path) as site:
        site.pause(session)
        (victim,) = tmp_path.rglob("*c000003")
        data = bytearray(victim.read_bytes())
        data[-5] ^= 1
        victim.write_bytes(data)
        answer = site.restored(session)
        assert answer["corrupt_chunks"] == 1


def test_where_recompute_is_refused_a_hole_cuts_the_restore(tmp_path: Path) -> None:
    session = chat(6 * CHUNK_TOKENS)
    with open_site(tmp_path, FakeDevice(refuses="a model of another kind")) as site:
        site.pause(session)
        (victim,) = tmp_path.rglob("*c000002")
        victim.unlink()
        answer = site.resume(session)
        assert answer["restored_tokens"] == 2 * CHUNK_TOKENS
        assert answer["reason"] == "missing chunk"
        assert site.device.slices == 0
        assert site.service.resumes.plans.recompute == {
            "available": False,
            "reason": "a model of another kind",
        }


def test_compute_that_fails_leaves_it_to_the_loads(tmp_path: Path) -> None:
    session = chat(6 * CHUNK_TOKENS)
    with open_site(tmp_path) as site:
        site.pause(session)
        learn(site, bytes_per_s=1e6, s_per_token=1e-6)
        site.device.fails_at = 1
        site.fault = lambda when, operation, _: time.sleep(0.01) if operation == "read_segments" else None
        site.restored(session)


def test_a_link_that_dies_in_the_middle_costs_a_recompute(tmp_path: Path) -> None:
    session = chat(8 * CHUNK_TOKENS)
    reads = 0

    def dies(when: str, operation: str, key: str) -> None:
        nonlocal reads
        reads += operation == "read_segments" and when == "before"
        if reads > 2 and operation.startswith("read"):
            raise StoreUnavailable("the disk has gone")

    with open_site(tmp_path) as site:
        site.pause(session)
        site.fault = dies
        site.restored(session)


def test_a_link_that_gets_slow_is_joined_by_compute(tmp_path: Path) -> None:
    session = chat(8 * CHUNK_TOKENS)
    with open_site(tmp_path) as site:
        site.pause(session)
        learn(site, bytes_per_s=1e9, s_per_token=1e-4)
        reads = 0

        def slow(when: str, operation: str, key: str) -> None:
            nonlocal reads
            if operation == "read_segments" and when == "before":
                reads += 1
                time.sleep(0.3 if reads > 1 else 0)

        site.fault = slow
        begun = time.monotonic()
        site.restored(session)
        assert site.device.slices > 0
        assert time.monotonic() - begun < 0.3 * 8


def test_the_deadline_cuts_a_restore(tmp_path: Path) -> None:
    session = chat(6 * CHUNK_TOKENS)
    with open_site(tmp_path, hold_deadline_s=0.2, recompute=False) as site:
        site.pause(session)
        site.fault = lambda when, operation, _: time.sleep(0.1) if operation == "read_segments" else None
        answer = site.resume(session)
        assert answer["reason"] == "deadline"
        assert answer["restored_tokens"] < len(session.token_ids)


@pytest.mark.parametrize("how", ["flush", "weights", "close"])
def test_a_restore_that_is_given_up_gives_every_slot_back(tmp_path: Path, how: str) -> None:
    session = chat(6 * CHUNK_TOKENS)
    with open_site(tmp_path) as site:
        site.pause(session)
        site.fault = lambda when, operation, _: time.sleep(0.05) if operation == "read_segments" else None
        site.answers.clear()
        site.service.resume(session.key, hold=False, reply=site.answers.append, wish=DEVICE)
        while not site.device.reserved:
            site.service.poll()
        if how == "flush":
            site.device.flush()
        elif how == "weights":
            site.service.change_namespace("another")
        else:
            site.service.resumes.cancel_all("the server stops")
        drive(site.service)
        (answer,) = site.answers
        assert answer["restored_tokens"] == 0
        assert "flushed" in answer["reason"] or "weights" in answer["reason"] or "stops" in answer["reason"]


def test_two_sessions_are_restored_side_by_side(tmp_path: Path) -> None:
    one, other = chat(5 * CHUNK_TOKENS, "one"), chat(6 * CHUNK_TOKENS, "other", 5000)
    with open_site(tmp_path) as site:
        site.pause(one)
        site.pause(other)
        learn(site, bytes_per_s=1e6, s_per_token=1e-5)
        site.answers.clear()
        for session in (one, other):
            site.service.resume(session.key, hold=False, reply=site.answers.append, wish=DEVICE)
        with pytest.raises(SessionBusy, match="busy"):
            site.service.resume(one.key, hold=False, reply=site.answers.append, wish=DEVICE)
        drive(site.service)
        assert sorted(answer["restored_tokens"] for answer in site.answers) == [320, 384]


def test_paper_mode_stores_no_pyramid_and_comes_back_whole(tmp_path: Path) -> None:
    session = chat(8 * CHUNK_TOKENS)
    with open_site(tmp_path, strategy="paper") as site:
        learn(site, bytes_per_s=1e6, s_per_token=2e-3)
        site.pause(session)
        paused = site.service.registry.get(session.key).paused
        assert paused is not None
        assert paused.stored_bytes < 0.95 * paused.raw_bytes
        answer = site.restored(session)
        assert answer["recomputed_tokens"] > 0
        assert answer["strategy"] == "paper"
        answer = site.resume(session, Wish(target=TargetPlace.MEMORY))
        assert answer["restored_tokens"] == 0
        assert "paper" in answer["reason"]


def test_paper_mode_where_recompute_is_refused_is_a_miss(tmp_path: Path) -> None:
    session = chat(8 * CHUNK_TOKENS)
    with open_site(tmp_path, strategy="paper") as site:
        learn(site, bytes_per_s=1e6, s_per_token=2e-3)
        site.pause(session)
        site.device.refuses_recompute = "a model of another kind"
        answer = site.resume(session)
        assert answer["restored_tokens"] == 0
        assert answer["reason"]


def test_a_plan_is_explained_without_doing_it(tmp_path: Path) -> None:
    session = chat(6 * CHUNK_TOKENS)
    with open_site(tmp_path) as site:
        site.pause(session)
        learn(site, bytes_per_s=1e6, s_per_token=1e-4)
        site.answers.clear()
        known = site.service.registry.get(session.key)
        site.service.resumes.explain(known, session.key, site.answers.append)
        drive(site.service)
        (body,) = site.answers
        assert body["tokens"] == 384
        assert body["path"] == "device"
        assert body["tiers"] == {"ssd": 384}
        assert body["plan"]["ttft_s"] <= min(body["load_all"]["ttft_s"], body["recompute_all"]["ttft_s"])
        assert body["rates"]["compute"] is not None
        assert site.device.slices == 0
        with pytest.raises(NoTimeline, match="session 'chat' was not restored to the device"):
            site.service.resumes.plans.timeline(session.key)


def test_calibration_measures_tiers_and_slices_and_leaves_nothing(tmp_path: Path) -> None:
    with open_site(tmp_path) as site:
        site.answers.clear()
        site.service.calibration.begin(site.answers.append)
        with pytest.raises(SessionBusy, match="a calibration is under way"):
            site.service.calibration.begin(site.answers.append)
        drive(site.service)
        (body,) = site.answers
        assert body["compute"] is not None
        assert body["tiers"]["ssd"]["bytes_per_s"] > 1e6
        assert body["problems"] == []
        assert [path for path in tmp_path.rglob("*") if "c0000" in path.name] == []


def test_calibration_says_which_tier_it_could_not_measure(tmp_path: Path) -> None:
    def fault(when: str, operation: str, key: str) -> None:
        if operation == "put":
            raise StoreUnavailable("the disk has gone")

    with open_site(tmp_path) as site:
        site.fault = fault
        site.answers.clear()
        site.service.calibration.begin(site.answers.append)
        drive(site.service)
        (body,) = site.answers
        assert body["problems"] == ["ssd was not measured: the disk has gone"]


def test_a_plan_that_fails_gives_the_slots_back(tmp_path: Path) -> None:
    session = chat(6 * CHUNK_TOKENS)
    with open_site(tmp_path) as site:
        site.pause(session)
        site.service.resumes.plans.make = lambda *_: 1 / 0  # type: ignore[assignment]
        site.resume(session)
        assert site.device.reserved == 0


def test_staging_smaller_than_a_segment_leaks_nothing(tmp_path: Path) -> None:
    session = chat(6 * CHUNK_TOKENS)
    with open_site(tmp_path, staging_bytes=4096) as site:
        site.pause(session)
        learn(site, bytes_per_s=1e4, s_per_token=1e-6)
        site.resume(session)
        deadline = time.monotonic() + 3
        while site.service.resumes.working and time.monotonic() < deadline:
            site.service.poll()
        assert not site.service.resumes.working
        assert sum(site.device.pinned.values()) == 0, "pages pinned for an answer nobody gets"


def test_memory_pins_of_a_restore_that_never_began(tmp_path: Path) -> None:
    session = chat(6 * CHUNK_TOKENS)
    with open_site(tmp_path, staging_bytes=4096) as site:
        site.pause(session)
        site.resume(session, Wish(target=TargetPlace.MEMORY))
        before = free_slots(site.memory)
        site.resume(session, Wish(target=TargetPlace.MEMORY))
        site.resume(session)
        while site.service.resumes.working:
            site.service.poll()
        assert free_slots(site.memory) == before


def test_a_younger_restore_that_is_loaded_does_not_wait_for_the_older(tmp_path: Path) -> None:
    old, young = chat(8 * CHUNK_TOKENS, "old"), chat(CHUNK_TOKENS, "young", 9000)
    with open_site(tmp_path, FakeDevice(slice_s=0.05), workers=8) as site:
        site.pause(old)
        site.pause(young)
        learn(site, bytes_per_s=1e5, s_per_token=1e-5)
        site.fault = lambda when, op, key: (
            time.sleep(0.4) if op == "read_segments" and old.digest in key else None
        )
        done: dict[str, float] = {}
        begun = time.monotonic()
        site.service.resume(
            old.key,
            hold=False,
            wish=Wish(TargetPlace.DEVICE, Strategy.optimal),
            reply=lambda body: done.setdefault("old", time.monotonic() - begun),
        )
        while not site.device.slices:
            site.service.poll()
        site.service.resume(
            young.key,
            hold=False,
            wish=Wish(TargetPlace.DEVICE, Strategy.load),
            reply=lambda body: done.setdefault("young", time.monotonic() - begun),
        )
        drive(site.service)
        assert done["young"] < done["old"]


def test_pages_of_old_weights_do_not_reach_the_device(tmp_path: Path) -> None:
    session = chat(6 * CHUNK_TOKENS)
    with open_site(tmp_path) as site:
        site.pause(session)
        site.resume(session, Wish(target=TargetPlace.MEMORY))
        site.answers.clear()
        site.service.resume(session.key, hold=False, reply=site.answers.append, wish=DEVICE)
        time.sleep(0.2)  # the worker has pinned them; the scheduler has not polled yet
        site.service.change_namespace("of other weights")
        drive(site.service)
        (answer,) = site.answers
        assert answer["restored_tokens"] == 0, (answer["restored_from"], answer["restored_to"])


def test_an_error_in_the_last_layer_costs_a_load(tmp_path: Path) -> None:
    session = chat(6 * CHUNK_TOKENS)
    with open_site(tmp_path) as site:
        site.pause(session)
        learn(site, bytes_per_s=1e6, s_per_token=1e-6)
        site.device.fails_at = LAYOUT.layers - 1
        site.fault = lambda when, operation, _: time.sleep(0.01) if operation == "read_segments" else None
        site.restored(session)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ('{"target": "disk"}', "target 'disk': expected one of memory, device"),
        ('{"target": "device", "strategy": "fast"}', "strategy 'fast': expected one of optimal, load"),
        (
            '{"strategy": "load"}',
            "strategy 'load' with target 'memory': a strategy chooses what is recomputed",
        ),
    ],
)
def test_a_wish_that_cannot_be_read_is_refused(argument: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        Wish.read(argument)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_the_right_pages_come_and_nothing_stays_behind(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    rng = random.Random(seed)
    session = chat(16 * rng.randrange(1, 30) + rng.randrange(16))
    device = FakeDevice(pages=40, slice_s=rng.choice([0, 0.0005]))
    strategy = rng.choice(["optimal", "optimal", "half", "load", "paper"])
    with open_site(tmp_path_factory.mktemp("any"), device, strategy=strategy) as site:
        if rng.random() < 0.8:
            learn(site, bytes_per_s=10 ** rng.uniform(5, 9), s_per_token=10 ** rng.uniform(-6, -3))
        site.pause(session)
        if rng.random() < 0.3:
            short = chat(16 * rng.randrange(1, 10), "other")  # the same tokens: they are on the device then
            site.pause(short)
            site.resume(short)
        bad = rng.choice([0, 0, 0.02, 0.2])

        def fault(when: str, operation: str, key: str) -> None:
            if when == "before" and operation.startswith("read"):
                time.sleep(rng.choice([0, 0.001]))
                if "manifest" not in key and rng.random() < bad:
                    raise StoreUnavailable("now and then")

        site.fault = fault
        if rng.random() < 0.1:
            device.fails_at = rng.randrange(LAYOUT.layers)
        site.answers.clear()
        site.service.resume(session.key, hold=rng.random() < 0.5, reply=site.answers.append, wish=DEVICE)
        flush_at = time.monotonic() + rng.choice([9, 9, 0.002])
        while site.service.working:
            site.service.poll()
            if time.monotonic() > flush_at:
                device.flush()
                flush_at += 9
        (answer,) = site.answers
        whole = answer["restored_tokens"] == len(session.hashes) * 16
        assert whole or answer["reason"], answer


def test_a_bug_in_a_step_ends_that_restore_alone(tmp_path: Path) -> None:
    session = chat(4 * CHUNK_TOKENS)
    with open_site(tmp_path, FakeDevice(slice_s=0.001)) as site:
        site.pause(session)
        learn(site, bytes_per_s=1e5, s_per_token=1e-6)
        site.device.bug = True
        answer = site.resume(session, Wish(target=TargetPlace.DEVICE, strategy=Strategy.half))
        assert "internal error: RuntimeError('a bug of the engine')" in answer["reason"]
        assert answer["restored_tokens"] == 0
        site.device.bug = False
        site.restored(session)

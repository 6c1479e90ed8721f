"""Restores to the device on two ranks: the same slices, the same tokens, whatever happens on one of them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from sgl_krul.restore.cost import ComputeSample, LoadSample
from sgl_krul.restore.planner import Strategy
from sgl_krul.service.wish import TargetPlace, Wish
from sgl_krul.store.memory import MemoryTier
from tests.fake_device import FakeDevice
from tests.ranks import Meeting
from tests.sessions import (
    CHUNK_TOKENS,
    LAYOUT,
    FaultyTier,
    TruePages,
    chat,
    make_config,
    make_service,
    open_ssd,
)

DEVICE = Wish(target=TargetPlace.DEVICE)
RANKS = 2


class Site:
    def __init__(self, root: Path, **restore: Any) -> None:
        self.meeting = Meeting(RANKS)
        self.faults: list[Any] = [lambda *_: None] * RANKS
        config = make_config(5.0)
        config = replace(config, restore=replace(config.restore, **restore))
        self.devices = [FakeDevice() for _ in range(RANKS)]
        self.memories = [
            MemoryTier(LAYOUT.layers, LAYOUT.page_segment_bytes, 64 * LAYOUT.page_bytes) for _ in range(RANKS)
        ]

        def make(rank: int) -> Any:
            service = make_service(
                self.memories[rank],
                FaultyTier(open_ssd(root / f"rank{rank}"), lambda *a: self.faults[rank](*a)),
                config=config,
                ranks=self.meeting.ranks[rank],
            )
            service.resumes.plans.device = self.devices[rank]
            return service

        self.services = self.meeting.everywhere(make)

    def run(self, key: Any, verb: Any) -> list[Any]:
        def rank_runs(rank: int) -> Any:
            answers: list[Any] = []
            service = self.services[rank]
            service.agree_on(key)
            verb(rank, answers.append)
            while not self.meeting.ranks[rank].agree_min([len(answers)])[0]:
                service.poll()
                time.sleep(0.0005)
            return answers[0]

        return self.meeting.everywhere(rank_runs)

    def pause(self, session: Any) -> None:
        def verb(rank: int, reply: Any) -> None:
            service = self.services[rank]
            service.observe(session.key, session.token_ids)
            service.pause(
                service.registry.get(session.key),
                session.hashes,
                TruePages(session.hashes),
                before=lambda: None,
                settle=lambda _: 0,
                reply=reply,
            )

        answers = self.run(session.key, verb)
        assert [a["state"] for a in answers] == ["paused"] * RANKS
        for memory in self.memories:
            memory.clear()

    def resume(self, session: Any, wish: Wish = DEVICE) -> list[Any]:
        return self.run(
            session.key,
            lambda rank, reply: self.services[rank].resume(session.key, hold=False, reply=reply, wish=wish),
        )


def test_a_rank_that_has_loaded_all_waits_for_the_others(tmp_path: Path) -> None:
    site = Site(tmp_path)
    session = chat(6 * CHUNK_TOKENS)
    site.pause(session)
    site.faults[1] = lambda when, op, key: (
        time.sleep(0.02) if op == "read_segments" and when == "before" else None
    )
    answers = site.resume(session, Wish(TargetPlace.DEVICE, Strategy.load))
    assert [a["restored_tokens"] for a in answers] == [6 * CHUNK_TOKENS] * 2


def test_compute_that_fails_on_one_rank_stops_on_all(tmp_path: Path) -> None:
    site = Site(tmp_path)
    session = chat(6 * CHUNK_TOKENS)
    site.pause(session)
    site.devices[1].fails_at = 1
    answers = site.resume(session, Wish(TargetPlace.DEVICE, Strategy.half))
    for service in site.services:
        book = service.resumes.plans.book
        book.observe_compute(
            [
                ComputeSample(f, t, k, 1e-5 * t * (0.1 if k else 1.0))
                for f in (0, 256, 512, 1024)
                for t in (64, 128, 256, 512)
                for k in (False, True)
            ]
        )
        book.observe_load([LoadSample("ssd", s, s / 1e6, 1) for s in (4096, 65536, 1 << 20) * 4])
    for device in site.devices:
        device.flush()
        device.slices = 0
    for fault in range(RANKS):
        site.faults[fault] = lambda when, op, key: (
            time.sleep(0.01) if op == "read_segments" and when == "before" else None
        )
    answers = site.resume(session, Wish(TargetPlace.DEVICE, Strategy.half))
    assert site.devices[0].slices == site.devices[1].slices, "ranks ran other slices: their collectives part"
    assert [a["restored_tokens"] for a in answers] == [6 * CHUNK_TOKENS] * 2

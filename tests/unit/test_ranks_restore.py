"""Restores to the device on two ranks: the same slices, the same tokens, whatever happens on one of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_krul.config import TenantsConfig
from sgl_krul.restore.planner import Strategy
from sgl_krul.service.wish import TargetPlace, Wish
from tests.fake_device import FakeDevice, teach
from tests.rank_site import KEY, RANKS, Site
from tests.sessions import CHUNK_TOKENS, Chat, chat, make_config


class DeviceSite(Site):
    """Ranks with a device each; what is paused lies on the disks only."""

    def start(self, tenants: TenantsConfig | None = None) -> None:
        super().start(tenants)
        self.devices = [FakeDevice() for _ in range(RANKS)]
        for service, device in zip(self.services, self.devices, strict=True):
            service.resumes.plans.device = device

    def pause(self, session: Chat) -> list[Any]:
        answers = super().pause(session)
        assert [answer["state"] for answer in answers] == ["paused"] * RANKS
        for memory in self.memories:
            memory.clear()
        return answers

    def resume_by(self, strategy: Strategy) -> list[Any]:
        wish = Wish(TargetPlace.DEVICE, strategy)
        return self.run(
            lambda rank, reply: self.services[rank].resume(KEY, hold=False, reply=reply, wish=wish)
        )


@pytest.fixture
def site(tmp_path: Path) -> Iterator[DeviceSite]:
    site = DeviceSite(tmp_path, make_config(5.0))
    site.start()
    yield site
    site.stop()
    for device in site.devices:
        assert device.check() == []


def test_a_rank_that_has_loaded_all_waits_for_the_others(site: DeviceSite) -> None:
    session = chat(6 * CHUNK_TOKENS)
    site.pause(session)
    site.faults[1] = lambda when, op, key: (
        time.sleep(0.02) if op == "read_segments" and when == "before" else None
    )
    answers = site.resume_by(Strategy.load)
    assert [a["restored_tokens"] for a in answers] == [6 * CHUNK_TOKENS] * 2


def test_compute_that_fails_on_one_rank_stops_on_all(site: DeviceSite) -> None:
    session = chat(6 * CHUNK_TOKENS)
    site.pause(session)
    site.devices[1].fails_at = 1
    answers = site.resume_by(Strategy.half)
    for service in site.services:
        teach(service.resumes.plans.book, bytes_per_s=1e6, s_per_token=1e-5)
    for device in site.devices:
        device.flush()
        device.slices = 0
    for fault in range(RANKS):
        site.faults[fault] = lambda when, op, key: (
            time.sleep(0.01) if op == "read_segments" and when == "before" else None
        )
    answers = site.resume_by(Strategy.half)
    assert site.devices[0].slices == site.devices[1].slices, "ranks ran other slices: their collectives part"
    assert [a["restored_tokens"] for a in answers] == [6 * CHUNK_TOKENS] * 2

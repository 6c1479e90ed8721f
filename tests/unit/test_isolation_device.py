"""Lossy KV on its way to the device, on one rank and on two: under the session's private names only.

`FakeDevice.check` looks at the end whether each page in its tree holds what its name says.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_krul.service.wish import TargetPlace, Wish
from sgl_krul.session.record import page_key
from sgl_krul.store.memory import MemoryTier
from tests.fake_device import FakeDevice
from tests.lossy import keep, names, pause_lossy, write_lossy
from tests.rank_site import KEY, NAMESPACES, RANKS, Site
from tests.sessions import (
    CHUNK_TOKENS,
    LAYOUT,
    Chat,
    chat,
    drive,
    free_slots,
    make_config,
    make_service,
    open_ssd,
    tokens,
)

SESSION = chat(6 * CHUNK_TOKENS)
ALL = 6 * CHUNK_TOKENS
DEVICE = Wish(target=TargetPlace.DEVICE)
HOLD = Wish()


class Alone:
    """A service with a disk on which SESSION rests, lossy, and a fake device."""

    def __init__(self, root: Path) -> None:
        tier = open_ssd(root)
        write_lossy(SESSION, tier)
        self.memory = MemoryTier(LAYOUT.layers, LAYOUT.page_segment_bytes, 64 * LAYOUT.page_bytes)
        self.service = make_service(self.memory, tier)
        self.device = FakeDevice()
        self.service.resumes.plans.device = self.device

    def resume(self, session: Chat = SESSION, *, hold: bool = False, wish: Wish = DEVICE) -> Any:
        answers: list[Any] = []
        self.service.resume(session.key, hold=hold, reply=answers.append, wish=wish)
        drive(self.service)
        (answer,) = answers
        return answer


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    site = Alone(tmp_path)
    yield site
    site.service.resumes.holds.close()
    site.service.close()
    assert site.service.check() == []
    assert site.device.check() == []
    assert free_slots(site.memory) == 64


def test_the_tree_gets_it_under_its_private_names(alone: Alone) -> None:
    answer = alone.resume()
    assert (answer["restored_tokens"], answer["restored_to"], answer["lossy_since"]) == (ALL, "device", 1)
    assert set(alone.device.tree) == set(names(SESSION))
    again = alone.resume()
    assert (again["on_device_tokens"], again["loaded_bytes"]) == (ALL, 0)


@pytest.mark.parametrize("first", ["exact", "lossy"])
def test_the_same_text_lies_there_twice(alone: Alone, first: str) -> None:
    other = Chat(chat(0, "other").key, SESSION.token_ids)
    store = alone.service.store.tiers[0]
    other.write(store)
    if first == "lossy":
        assert alone.resume()["restored_tokens"] == ALL
    alone.service.registry.add(stored(alone, other))
    assert alone.resume(other)["restored_tokens"] == ALL
    assert alone.resume()["restored_tokens"] == ALL
    assert set(alone.device.tree) == set(names(SESSION)) | set(SESSION.hashes)
    assert alone.service.registry.get(other.key).private is None


def stored(alone: Alone, session: Chat) -> Any:
    from sgl_krul.session.catalog import as_session, read_manifest

    tier = alone.service.store.tiers[0]
    manifest = read_manifest(tier, alone.service.namespace, session.digest)
    assert manifest is not None
    return as_session(manifest, tier.name)


def test_a_request_that_waits_is_told(alone: Alone) -> None:
    answer = alone.resume(hold=True, wish=Wish(prompt=tokens(ALL + 20)))
    assert (answer["restored_tokens"], answer["path"], answer["lossy_since"]) == (ALL, "device", 1)


def test_a_request_that_shares_nothing_makes_nothing_private(alone: Alone) -> None:
    answer = alone.resume(hold=True, wish=Wish(prompt=tokens(50, first=9000)))
    assert (answer["restored_tokens"], answer["lossy_since"]) == (0, None)


def test_what_memory_has_exactly_comes_exactly(alone: Alone) -> None:
    keep(alone.memory, SESSION)
    known = alone.service.registry.get(SESSION.key)
    known.token_ids = SESSION.token_ids  # it ran here, exactly
    answer = alone.resume()
    assert (answer["restored_tokens"], answer["lossy_since"]) == (ALL, None)
    assert set(alone.device.tree) == set(SESSION.hashes)
    alone.memory.delete(page_key(alone.service.namespace, SESSION.hashes[0]))
    alone.device.flush()
    assert alone.resume()["lossy_since"] == 1
    assert set(alone.device.tree) == set(names(SESSION))
    assert alone.service.counters.duplicated_tokens == 0  # the first page is not there


def test_after_a_flush_it_comes_again(alone: Alone) -> None:
    assert alone.resume()["restored_tokens"] == ALL
    alone.device.flush()
    assert alone.resume()["lossy_since"] == 1
    assert set(alone.device.tree) == set(names(SESSION))


def test_what_it_goes_on_with_is_stored_as_lossy(alone: Alone) -> None:
    alone.resume(hold=True, wish=HOLD)
    answers: list[Any] = []
    longer = chat(ALL + 48)
    pause_lossy(alone.service, longer, answers.append)
    drive(alone.service)
    assert (answers[0]["exact"], answers[0]["chunks_kept"], answers[0]["chunks_written"]) == (False, 6, 1)
    alone.memory.clear()
    alone.device.flush()
    assert alone.resume(longer)["restored_tokens"] == ALL + 48
    assert set(alone.device.tree) == set(names(longer))


# -- ranks --


class Ranks(Site):
    """Ranks with a device each."""

    def start(self, tenants: Any = None) -> None:
        super().start(tenants)
        self.devices = [FakeDevice() for _ in range(RANKS)]
        for service, device in zip(self.services, self.devices, strict=True):
            service.resumes.plans.device = device

    def put(self, lossy: list[bool], generations: list[int]) -> None:
        """What is on the disk of each rank."""
        for rank in range(RANKS):
            session = Chat(KEY, SESSION.token_ids, NAMESPACES[rank])
            if lossy[rank]:
                write_lossy(session, self.ssds[rank], generation=generations[rank])
            else:
                session.write(self.ssds[rank])

    def bring(self, wish: Wish, *, hold: bool = False) -> list[Any]:
        return self.run(
            lambda rank, reply: self.services[rank].resume(KEY, hold=hold, reply=reply, wish=wish)
        )


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    site = Ranks(tmp_path, make_config(5.0))
    yield site
    for service in site.services:
        service.resumes.holds.close()
    site.stop()
    for device in site.devices:
        assert device.check() == []


TO_MEMORY = Wish(target=TargetPlace.MEMORY)


@pytest.mark.parametrize("wish", [DEVICE, TO_MEMORY, HOLD], ids=["device", "memory", "hold"])
def test_ranks_are_private_alike(ranks: Ranks, wish: Wish) -> None:
    ranks.put([True, True], [1, 1])
    ranks.start()
    answers = ranks.bring(wish, hold=wish is HOLD)
    assert [(a["restored_tokens"], a["lossy_since"]) for a in answers] == [(ALL, 1)] * RANKS


def test_ranks_that_counted_apart_agree_on_the_number(ranks: Ranks) -> None:
    ranks.put([True, True], [4, 7])
    ranks.start()
    answers = ranks.bring(TO_MEMORY)
    assert [(a["restored_tokens"], a["lossy_since"]) for a in answers] == [(ALL, 7)] * RANKS
    for memory in ranks.memories:
        memory.clear()  # pages of number 7, whose right bytes the tests do not know


@pytest.mark.parametrize("wish", [DEVICE, TO_MEMORY], ids=["device", "memory"])
@pytest.mark.parametrize("lossy", [[True, False], [False, True]])
def test_an_exact_and_a_lossy_copy_make_no_session(ranks: Ranks, lossy: list[bool], wish: Wish) -> None:
    """One rank's pause failed, so its disk has an older one: their trees would part."""
    ranks.put(lossy, [1, 1])
    ranks.start()
    answers = ranks.bring(wish)
    assert [(a["restored_tokens"], a["lossy_since"]) for a in answers] == [(0, None)] * RANKS
    assert all("another pause" in a["reason"] for a in answers)
    assert not any(device.tree for device in ranks.devices)


def test_memory_of_one_rank_does_not_decide(ranks: Ranks) -> None:
    ranks.put([True, True], [1, 1])
    ranks.start()
    keep(ranks.memories[0], Chat(KEY, SESSION.token_ids, NAMESPACES[0]))
    for service in ranks.services:
        service.registry.get(KEY).token_ids = SESSION.token_ids  # it ran here, exactly
    answers = ranks.bring(DEVICE)
    assert [(a["restored_tokens"], a["lossy_since"]) for a in answers] == [(ALL, 1)] * RANKS
    assert [set(device.tree) for device in ranks.devices] == [set(names(SESSION))] * RANKS


def test_ranks_that_know_it_differently_forget_it(ranks: Ranks) -> None:
    ranks.put([True, True], [1, 1])
    ranks.start()
    ranks.bring(TO_MEMORY)
    ranks.services[1].registry.get(KEY).private = 5
    ranks.meeting.everywhere(lambda rank: ranks.services[rank].agree_on(KEY))
    assert ranks.states() == [None, None]

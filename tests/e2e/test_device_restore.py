"""Restores to the device on a real server behind a slow link: the same words as never paused, whatever is."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.harness import Answer, Chatter, ServerFactory, prompt
from tests.e2e.told import LINK, SMALL_MEMORY, FreshId, Told


@pytest.fixture(scope="module")
def chatter(servers: ServerFactory) -> Chatter:
    """The module's server, calibrated."""
    running = servers.start(config=servers.config(memory=SMALL_MEMORY, more=LINK))
    answer = running.http.post("/v1/restore/calibrate")
    assert answer.status_code == 200, answer.text
    assert answer.json()["problems"] == []
    assert answer.json()["compute"] is not None
    return running


@pytest.fixture(autouse=True)
def _still_sound(chatter: Chatter) -> Iterator[None]:
    """An idle SGLang counts its slots, and ends if one is missing: it must still be there afterwards."""
    yield
    time.sleep(0.2)
    load = chatter.http.get("/v1/sessions").json()["load"]
    assert load["problems"] == []
    assert chatter.http.get("/health").status_code == 200
    assert chatter.process.running


@pytest.mark.parametrize(("seed", "strategy"), list(enumerate(["optimal", "load", "half", "paper"])))
def test_every_strategy_brings_the_same_chat(
    chatter: Chatter, fresh_id: FreshId, seed: int, strategy: str
) -> None:
    chat = Told(chatter, fresh_id(), seed=10 + seed, tokens=800)
    body = chat.resume(strategy)
    assert body["restored_tokens"] == 800
    assert body["restored_to"] == "device"
    assert body["restored_from"] == "ssd"
    if strategy in ("load", "half"):  # of the others a measured plan decides
        assert (body["recomputed_tokens"] == 0) == (strategy == "load")
    assert chat.go_on().cached == 800


def test_a_request_that_waits_is_restored_by_both_streams(chatter: Chatter, fresh_id: FreshId) -> None:
    chat = Told(chatter, fresh_id(), seed=21, tokens=1000)
    answer = chat.go_on()
    assert answer.krul["restored_tokens"] == 992
    assert answer.krul["restored_from"] == "ssd"
    assert answer.krul["recomputed_tokens"] < 992
    told = chatter.http.get(f"/v1/sessions/{chat.session}/timeline").json()
    timeline = told["timeline"]
    if told["plan"]["strategy"] == "optimal":  # a machine that computes very slowly would rather load all
        assert {span[0] for span in timeline["spans"]} == {"compute", "load"}
        assert answer.krul["recomputed_tokens"] > 0
    stairs = timeline["staircase"]
    assert stairs == sorted(stairs, reverse=True)


@pytest.mark.parametrize("seed", range(6))
def test_any_length_any_holes_any_way(
    chatter: Chatter, servers: ServerFactory, fresh_id: FreshId, seed: int
) -> None:
    rng = random.Random(seed)
    chat = Told(chatter, fresh_id(), seed=100 + seed, tokens=rng.randrange(300, 1300))
    lost = [path for path in chat.chunk_files(servers.store) if rng.random() < 0.3]
    for path in lost:
        if rng.random() < 0.5:
            path.unlink()
        else:
            data = bytearray(path.read_bytes())
            data[rng.randrange(5000, len(data))] ^= 1
            path.write_bytes(data)
    if rng.random() < 0.5:
        body = chat.resume(rng.choice(["optimal", "half"]))
        assert body["restored_tokens"] == body["stored_tokens"]
        assert body["missing_chunks"] + body["corrupt_chunks"] <= len(lost)  # compute may get there before
    chat.go_on()


def test_what_another_chat_has_on_the_device_is_used(chatter: Chatter, fresh_id: FreshId) -> None:
    chat = Told(chatter, fresh_id(), seed=41, tokens=800)
    chatter.ask([*chat.ids[:500], 77])  # without a session: its pages are in the tree
    body = chat.resume()
    assert 496 <= body["on_device_tokens"] < 800
    chat.go_on()


def test_two_chats_come_back_side_by_side(chatter: Chatter, fresh_id: FreshId) -> None:
    chats = [Told(chatter, fresh_id(), seed=51 + n, tokens=700) for n in range(2)]
    answers: list[Answer] = []
    threads = [threading.Thread(target=lambda chat=chat: answers.append(chat.go_on())) for chat in chats]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.krul["restored_from"] for answer in answers] == ["ssd", "ssd"]


def test_others_go_on_during_a_restore(chatter: Chatter, fresh_id: FreshId) -> None:
    chat = Told(chatter, fresh_id(), seed=61, tokens=1000)
    other = prompt(62, 60)
    expected = chatter.ask(other, new=60, cache_salt="alone")
    beside: list[Answer] = []
    thread = threading.Thread(target=lambda: beside.append(chatter.ask(other, new=60, cache_salt="beside")))
    thread.start()
    chat.go_on()
    thread.join()
    assert beside[0].same_as(expected)


def test_a_client_that_leaves_costs_nothing(chatter: Chatter, fresh_id: FreshId) -> None:
    chat = Told(chatter, fresh_id(), seed=71, tokens=1000)
    body = {"input_ids": chat.history, "session_id": chat.session, "sampling_params": {"max_new_tokens": 4}}
    with pytest.raises(httpx.ReadTimeout):
        chatter.http.post("/generate", json=body, timeout=0.3)
    chat.go_on()


def test_a_flush_in_the_middle_leaves_a_chat_that_can_be_resumed(chatter: Chatter, fresh_id: FreshId) -> None:
    chat = Told(chatter, fresh_id(), seed=81, tokens=1000)
    bodies: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: bodies.append(chat.resume()))
    thread.start()
    time.sleep(0.4)
    assert chatter.http.post("/flush_cache").status_code == 200
    thread.join()
    assert bodies[0]["restored_tokens"] in (0, 992)  # it may have been faster than the flush
    chat.go_on()


def test_a_plan_is_explained_and_the_truth_shown_afterwards(chatter: Chatter, fresh_id: FreshId) -> None:
    chat = Told(chatter, fresh_id(), seed=91, tokens=1000)
    answer = chatter.http.get(f"/v1/sessions/{chat.session}/timeline")
    assert answer.status_code == 404
    assert "was not restored to the device since this server started" in answer.text
    plan = chatter.http.get(f"/v1/sessions/{chat.session}/plan").json()
    assert plan["path"] == "device"
    assert plan["tiers"] == {"ssd": 992}
    assert plan["plan"]["ttft_s"] <= min(plan["load_all"]["ttft_s"], plan["recompute_all"]["ttft_s"])
    body = chat.resume()
    assert body["predicted_s"] > 0
    assert chatter.http.get(f"/v1/sessions/{chat.session}/timeline").json()["timeline"]["seconds"] > 0
    chat.go_on()


def test_a_chat_is_paused_right_after_it_was_restored(chatter: Chatter, fresh_id: FreshId) -> None:
    chat = Told(chatter, fresh_id(), seed=95, tokens=600)
    for _ in range(3):
        chat.resume("half")
        assert chat.pause()["already_paused"]
    chat.go_on()
    assert chat.pause()["stored_tokens"] >= 600
    answer = chatter.ask([*chat.history, *chat.expected.tokens, 5], chat.session)
    again = chatter.ask([*chat.history, *chat.expected.tokens, 5], cache_salt=f"never paused {chat.session}")
    assert answer.same_as(again)

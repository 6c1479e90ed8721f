"""A restore beside a running chat in a pool that can't hold both: the chat that runs comes first."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from tests.e2e.harness import ServerFactory, prompt
from tests.e2e.told import SMALL_MEMORY, FreshId

SLOW = "link: {bytes_per_s: 4MB, latency_s: 1ms}"


@pytest.fixture(scope="module")
def small(servers: ServerFactory) -> ServerFactory:
    """A server with 2,048 slots."""
    servers.start("--max-total-tokens", "2048", config=servers.config(memory=SMALL_MEMORY, more=SLOW))
    return servers


@pytest.mark.parametrize("new", [60, 400], ids=["a short answer", "a long answer"])
@pytest.mark.parametrize("hold", [False, True], ids=["resume", "hold"])
def test_a_running_chat_is_not_ended_by_a_restore(
    small: ServerFactory, fresh_id: FreshId, hold: bool, new: int
) -> None:
    chatter, session = small.running, fresh_id()
    seed = new + hold
    ids = prompt(seed, 1980)
    first = chatter.ask(ids, session, new=2)
    chatter.sessions.pause(session)
    chatter.http.post("/flush_cache")
    answers: list[httpx.Response] = []
    body = {
        "input_ids": prompt(seed + 1, 40),
        "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
    }
    running = threading.Thread(target=lambda: answers.append(chatter.http.post("/generate", json=body)))
    running.start()
    time.sleep(1.0)  # it runs; a restore would take nearly all other slots
    if hold:
        chatter.ask([*ids, *first.tokens, 7, 8, 9], session)
    else:
        chatter.http.post(f"/v1/sessions/{session}/resume", json={"target": "device"})
    running.join()
    assert answers[0].status_code == 200, answers[0].text
    assert len(answers[0].json()["output_ids"]) == new
    time.sleep(0.2)
    load = chatter.http.get("/v1/sessions").json()["load"]
    assert load["problems"] == []
    assert chatter.process.running

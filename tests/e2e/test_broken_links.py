"""Links that break in the middle of a restore, and servers that restore in another way: a server for each."""

from __future__ import annotations

import pytest

from tests.e2e.harness import ServerFactory
from tests.e2e.told import LINK, SMALL_MEMORY, FreshId, Told


@pytest.mark.parametrize(
    "change",
    [
        "change_after_bytes: 12MB, change_to_bytes_per_s: 1_800_000",
        "change_after_bytes: 12MB, change_to_bytes_per_s: 0, dead_after_s: 0.5",
    ],
    ids=["ten times slower", "dead"],
)
def test_a_link_that_breaks_in_the_middle_costs_a_recompute(
    servers: ServerFactory, fresh_id: FreshId, change: str
) -> None:
    link = f"link: {{bytes_per_s: 30MB, {change}}}"
    running = servers.start(config=servers.config(memory=SMALL_MEMORY, more=link))
    chat = Told(running, fresh_id(), seed=200, tokens=1200)
    answer = chat.go_on()
    assert answer.krul["restored_tokens"] == 1200
    assert answer.krul["recomputed_tokens"] > 0


def test_where_recompute_is_off_all_is_loaded(servers: ServerFactory, fresh_id: FreshId) -> None:
    more = "restore: {recompute: false}\n" + LINK
    running = servers.start(config=servers.config(memory=SMALL_MEMORY, more=more))
    overview = running.http.get("/v1/sessions").json()
    assert overview["load"]["recompute"]["available"] is False
    assert "restore.recompute is false" in overview["load"]["recompute"]["reason"]
    chat = Told(running, fresh_id(), seed=300, tokens=600)
    assert chat.resume("half")["recomputed_tokens"] == 0
    chat.go_on()


def test_paper_mode_stores_less_and_says_the_same(servers: ServerFactory, fresh_id: FreshId) -> None:
    more = "restore: {strategy: paper}\n" + LINK
    running = servers.start(config=servers.config(memory=SMALL_MEMORY, more=more))
    assert running.http.post("/v1/restore/calibrate").status_code == 200
    chat = Told(running, fresh_id(), seed=400, tokens=1000)
    info = running.sessions.session(chat.session)
    assert info.layer_plan == "paper"
    assert info.bytes_stored < 0.98 * info.bytes_raw  # layer 0 at least
    answer = chat.go_on()
    assert answer.krul["restored_tokens"] == 992
    assert answer.krul["recomputed_tokens"] >= 992 // 30

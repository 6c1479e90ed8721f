"""The session routes and what happens to sessions between turns, on one server with an API key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from sgl_krul.api.client import KrulClient
from sgl_krul.errors import InvalidSessionId, KrulError, SessionBusy, UnknownSession
from tests.e2e.harness import Answer, Chatter, ServerFactory, prompt

KEY = "secret-of-the-test"
LONG_S = 300  # for waits that end by themselves: longer than any machine needs
NewId = Callable[[], str]


@pytest.fixture(scope="module")
def chatter(servers: ServerFactory) -> Chatter:
    return servers.start(api_key=KEY)


def state_of(chatter: Chatter, name: str) -> str:
    return chatter.sessions.session(name).state


def test_a_session_goes_round(chatter: Chatter, fresh_id: NewId) -> None:
    name, first, second = fresh_id(), prompt(1, 200), prompt(2, 30)
    reference = chatter.reference([first, second], "round")
    begun = chatter.ask(first, name)
    assert begun.same_as(reference[0])
    assert state_of(chatter, name) == "active"
    paused = chatter.sessions.pause(name)
    assert (paused.state, paused.tier, paused.exact, paused.already_paused) == ("paused", "ssd", True, False)
    assert (paused.tokens, paused.stored_tokens, paused.device_tokens_freed) == (207, 192, 192)
    assert paused.bytes_raw == 192 * 30 * 2 * 3 * 64 * 4
    assert paused.bytes_raw < paused.bytes_stored < 1.1 * paused.bytes_raw
    again = chatter.sessions.pause(name)
    assert again.already_paused
    assert (again.chunks_written, again.device_tokens_freed) == (0, 0)
    resumed = chatter.sessions.resume(name)
    assert (resumed.restored_tokens, resumed.recompute_tokens, resumed.reason) == (192, 15, "")
    answer = chatter.ask(first + begun.tokens + second, name)
    assert answer.same_as(reference[1])
    assert answer.restored == 192
    assert state_of(chatter, name) == "active"
    gone = chatter.sessions.delete(name)
    assert gone.deleted
    assert gone.bytes_freed >= paused.bytes_stored
    with pytest.raises(UnknownSession, match=name):
        chatter.sessions.session(name)


def test_the_key_guards_the_routes(chatter: Chatter) -> None:
    for method, path in (
        ("GET", ""),
        ("POST", "/a/pause"),
        ("POST", "/a/resume"),
        ("GET", "/a"),
        ("DELETE", "/a"),
    ):
        answer = httpx.request(method, f"{chatter.process.base_url}/v1/sessions{path}")
        assert answer.status_code == 401, (method, path)
    with (
        KrulClient(chatter.process.base_url, api_key="wrong") as client,
        pytest.raises(KrulError, match="key"),
    ):
        client.sessions()


def test_unknown_and_bad_ids(chatter: Chatter) -> None:
    for verb in (
        chatter.sessions.pause,
        chatter.sessions.resume,
        chatter.sessions.delete,
        chatter.sessions.session,
    ):
        with pytest.raises(UnknownSession, match="nobody"):
            verb("nobody")
    with pytest.raises(InvalidSessionId, match="256"):
        chatter.sessions.pause("x" * 257)
    with pytest.raises(InvalidSessionId, match="character"):
        chatter.sessions.pause("a\x00b")
    for bad, words in (("", "empty"), ("x" * 257, "256"), ("a\x00b", "character"), ("a\nb", "character")):
        answer = chatter.http.post(
            "/generate",
            json={"input_ids": [1, 2, 3], "session_id": bad, "sampling_params": {"max_new_tokens": 1}},
        )
        assert answer.status_code == 400, bad
        assert words in answer.text
    body = {"timeout_s": -1}
    assert chatter.http.post("/v1/sessions/a/pause", json=body).status_code == 400  # as SGLang answers
    assert chatter.http.post("/v1/sessions/a/pause", json={"timeout": 1}).status_code == 400


@pytest.mark.parametrize(
    "name", ["../x", "a/b/pause", "..", "ü-日本語-🙂", "per%2Fcent", "white space", "x" * 256]
)
def test_odd_ids_are_safe(chatter: Chatter, place: Path, name: str) -> None:
    before = {path.relative_to(place).parts[0] for path in place.rglob("*")}
    first = prompt(hash_of(name), 40)
    reference = chatter.reference([first, [7, 8, 9]], f"salt-{hash_of(name)}")
    begun = chatter.ask(first, name)
    assert chatter.sessions.pause(name).session_id == name
    assert chatter.ask([*first, *begun.tokens, 7, 8, 9], name).same_as(reference[1])
    assert chatter.sessions.delete(name).deleted
    assert {path.relative_to(place).parts[0] for path in place.rglob("*")} == before


def hash_of(name: str) -> int:
    return sum(ord(c) * (i + 1) for i, c in enumerate(name)) + 5000


def test_shared_prefix(chatter: Chatter, fresh_id: NewId) -> None:
    trunk, a, b = prompt(20, 160), prompt(21, 50), prompt(22, 60)
    one, two = fresh_id(), fresh_id()
    reference = chatter.reference([trunk + b, [5] * 20], "shared")
    chatter.ask(trunk + a, one)
    begun = chatter.ask(trunk + b, two)
    paused = chatter.sessions.pause(one)
    assert paused.device_tokens_freed == paused.stored_tokens - 160  # the trunk stays for the other
    answer = chatter.ask(trunk + b + begun.tokens + [5] * 20, two)
    assert answer.same_as(reference[1])
    assert answer.restored == 0
    assert chatter.ask(trunk + a + [6] * 3, one).restored == paused.stored_tokens - 160


def test_same_tokens_in_two_sessions(chatter: Chatter, fresh_id: NewId) -> None:
    one, two, ids = fresh_id(), fresh_id(), prompt(25, 130)
    begun = chatter.ask(ids, one)
    chatter.ask(ids, two)
    assert chatter.sessions.pause(one).device_tokens_freed == 0
    goes_on = chatter.ask(ids + begun.tokens + [4] * 5, two)
    assert goes_on.restored == 0
    chatter.sessions.delete(two)
    assert chatter.ask(ids + begun.tokens + [4] * 5, one).same_as(goes_on)


def test_edited_and_regenerated(chatter: Chatter, fresh_id: NewId) -> None:
    name, head, old, new = fresh_id(), prompt(30, 96), prompt(31, 80), prompt(32, 70)
    reference = chatter.reference([head + new, [9] * 10], "edited")
    chatter.ask(head + old, name)
    chatter.sessions.pause(name)
    edited = chatter.ask(head + new, name)
    assert edited.same_as(reference[0])
    assert edited.restored == 96  # the common prefix, in whole pages
    again = chatter.ask(head + new, name)  # regenerate: the same prompt once more
    assert again.same_as(reference[0])
    paused = chatter.sessions.pause(name)
    assert paused.tokens == len(head + new) + 7
    answer = chatter.ask(head + new + edited.tokens + [9] * 10, name)
    assert answer.same_as(reference[1])


def test_salts_keep_sessions_apart(chatter: Chatter, fresh_id: NewId) -> None:
    name, ids = fresh_id(), prompt(40, 120)
    plain = chatter.ask(ids, name)
    red = chatter.ask(ids, name, cache_salt="red")
    blue = chatter.ask(ids, name, extra_key="blue")
    assert plain.tokens == red.tokens == blue.tokens
    assert red.cached == blue.cached == 0
    listed = [s for s in chatter.sessions.sessions().sessions if s.session_id == name]
    assert sorted(s.salted for s in listed) == [False, True, True]
    chatter.sessions.pause(name, cache_salt="red")
    states = {(s.salted, s.state) for s in chatter.sessions.sessions().sessions if s.session_id == name}
    assert states == {(False, "active"), (True, "active"), (True, "paused")}
    tail = [*ids, *plain.tokens, 3, 3, 3]
    assert chatter.ask(tail, name, cache_salt="red").restored == 112
    chatter.sessions.delete(name)
    with pytest.raises(UnknownSession, match="cache_salt"):
        chatter.sessions.session(name)
    assert chatter.sessions.delete(name, extra_key="blue").deleted


def test_same_id_after_delete(chatter: Chatter, fresh_id: NewId) -> None:
    name, ids = fresh_id(), prompt(50, 150)
    first = chatter.ask(ids, name)
    chatter.sessions.pause(name)
    chatter.sessions.delete(name)
    again = chatter.ask(ids, name)
    assert again.same_as(first)
    assert again.cached == 0
    assert chatter.sessions.pause(name).stored_tokens == 144


def test_flush_between(chatter: Chatter, fresh_id: NewId) -> None:
    name, ids = fresh_id(), prompt(60, 220)
    reference = chatter.reference([ids, [8] * 12], "flush")
    begun = chatter.ask(ids, name)
    chatter.sessions.pause(name)
    assert chatter.http.post("/flush_cache").status_code == 200
    answer = chatter.ask(ids + begun.tokens + [8] * 12, name)
    assert answer.same_as(reference[1])
    assert answer.restored == 224
    assert (
        chatter.http.post("/flush_cache").status_code == 200
    )  # active: memory has its pages, the device none
    paused = chatter.sessions.pause(name)
    assert paused.stored_tokens == (220 + 8 + 12 + 7) // 16 * 16


def together(*jobs: Callable[[], object]) -> list[object]:
    """Run jobs at once; an exception of one is its result."""
    results: list[object] = [None] * len(jobs)

    def run(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except KrulError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_two_requests_at_once(chatter: Chatter, fresh_id: NewId) -> None:
    name, ids = fresh_id(), prompt(70, 260)
    begun = chatter.ask(ids, name)
    chatter.sessions.pause(name)
    tails = [ids + begun.tokens + [11] * 9, ids + begun.tokens + [12] * 9]
    alone = [chatter.ask(tail, cache_salt="at-once") for tail in tails]
    both = together(*(lambda t=tail: chatter.ask(t, name) for tail in tails))
    assert all(isinstance(a, Answer) and a.same_as(b) for a, b in zip(both, alone, strict=True))


def test_a_request_while_it_is_paused(chatter: Chatter, fresh_id: NewId) -> None:
    name, ids = fresh_id(), prompt(80, 400)
    begun = chatter.ask(ids, name)
    tail = ids + begun.tokens + [13] * 9
    alone = chatter.ask(tail, cache_salt="while")
    for delay_s in (0.0, 0.02, 0.1):
        pause, answer = together(
            lambda: chatter.sessions.pause(name),
            lambda d=delay_s: (time.sleep(d), chatter.ask(tail, name))[1],
        )
        assert not isinstance(pause, KrulError), pause
        assert isinstance(answer, Answer)
        assert answer.same_as(alone)
        resume, answer = together(lambda: chatter.sessions.resume(name), lambda: chatter.ask(tail, name))
        assert not isinstance(resume, KrulError), resume
        assert isinstance(answer, Answer)
        assert answer.same_as(alone)


def test_a_running_turn_is_waited_for(chatter: Chatter, fresh_id: NewId) -> None:
    name, ids = fresh_id(), prompt(90, 64)
    chatter.ask(ids, name)
    body = {
        "input_ids": ids,
        "session_id": name,
        "sampling_params": {"temperature": 0, "max_new_tokens": 120, "ignore_eos": True},
        "stream": True,
    }
    with chatter.http.stream("POST", "/generate", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data:")  # the first token is there: the turn is running
        with pytest.raises(SessionBusy, match="timeout_s"):
            chatter.sessions.pause(name, timeout_s=0.1)
        paused = chatter.sessions.pause(name, timeout_s=LONG_S)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert paused.tokens == 64 + 119


def test_a_client_that_goes_away(chatter: Chatter, fresh_id: NewId) -> None:
    name, ids = fresh_id(), prompt(100, 500)
    begun = chatter.ask(ids, name)
    tail = ids + begun.tokens + [14] * 9
    alone = chatter.ask(tail, cache_salt="gone")
    body = {
        "input_ids": tail,
        "session_id": name,
        "sampling_params": {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True},
    }
    for wait_s in (0.0, 0.01, 0.05, 0.3):
        chatter.sessions.pause(name, timeout_s=LONG_S)
        with (
            pytest.raises(httpx.ReadTimeout),
            httpx.Client(timeout=httpx.Timeout(LONG_S, read=0.001 + wait_s)) as client,
        ):
            client.post(
                chatter.process.base_url + "/generate", json=body, headers={"Authorization": f"Bearer {KEY}"}
            )
    assert chatter.ask(tail, name).same_as(alone)
    assert chatter.sessions.pause(name, timeout_s=LONG_S).state == "paused"


def test_what_cannot_be_paused_says_so(chatter: Chatter, fresh_id: NewId) -> None:
    name = fresh_id()
    fields = {"sampling_params": {"temperature": 1, "n": 2, "max_new_tokens": 2}}
    body = {"input_ids": prompt(110, 20), "session_id": name, **fields}
    assert chatter.http.post("/generate", json=body).status_code == 200
    with pytest.raises(SessionBusy, match="n > 1"):
        chatter.sessions.pause(name)


@pytest.mark.parametrize(
    "fields",
    [
        {"input_ids": prompt(130, 9000)},
        {"sampling_params": {"temperature": -5}},
        {"sampling_params": {"regex": "((("}},
        {"sampling_params": {"json_schema": '{"type": 5'}},
    ],
    ids=["too-long", "temperature", "regex", "schema"],
)
def test_a_rejected_request_leaves_the_session_as_it_was(
    chatter: Chatter, fresh_id: NewId, fields: dict[str, Any]
) -> None:
    name, ids = fresh_id(), prompt(131, 150)
    begun = chatter.ask(ids, name)
    before = chatter.sessions.pause(name)
    body = {"input_ids": [*ids, 7], "session_id": name, **fields}
    assert chatter.http.post("/generate", json=body).status_code == 400
    after = chatter.sessions.pause(name)
    assert (after.already_paused, after.tokens, after.stored_tokens) == (True, 157, before.stored_tokens)
    assert chatter.http.post("/flush_cache").status_code == 200
    assert chatter.ask([*ids, *begun.tokens, 5], name).restored == 144


def test_a_pause_is_answered_while_generation_is_paused(chatter: Chatter, fresh_id: NewId) -> None:
    name, ids = fresh_id(), prompt(140, 150)
    begun = chatter.ask(ids, name)
    assert chatter.http.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    try:
        assert chatter.sessions.pause(name, timeout_s=LONG_S).state == "paused"
        assert chatter.sessions.resume(name, timeout_s=LONG_S).restored_tokens == 144
    finally:
        assert chatter.http.post("/continue_generation", json={}).status_code == 200
    assert chatter.ask([*ids, *begun.tokens, 5], name).restored == 144


def test_openai_chat_reports_restored_tokens(chatter: Chatter, fresh_id: NewId) -> None:
    name = fresh_id()
    words = "The harbour master writes down every ship: " + "one brig, two barges, three sloops. " * 12
    messages = [{"role": "user", "content": words}]
    body = {"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0, "session_id": name}
    first = chatter.http.post("/v1/chat/completions", json=body).json()
    chatter.sessions.pause(name)
    assert chatter.http.post("/flush_cache").status_code == 200
    messages += [first["choices"][0]["message"], {"role": "user", "content": "How many sloops?"}]
    answer = chatter.http.post("/v1/chat/completions", json={**body, "messages": messages}).json()
    usage = answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] // 16 * 16 - 16


def test_new_weight_version_makes_sessions_stale(chatter: Chatter, fresh_id: NewId) -> None:
    name, ids = fresh_id(), prompt(120, 100)
    begun = chatter.ask(ids, name)
    chatter.sessions.pause(name)
    model = chatter.http.get("/model_info").json()["model_path"]

    def update(version: str) -> None:
        body = {"model_path": model, "weight_version": version}
        assert chatter.http.post("/update_weights_from_disk", json=body).json()["success"]

    update("v2")
    assert state_of(chatter, name) == "stale"
    update("default")  # the weights that made it are back
    assert state_of(chatter, name) == "paused"
    assert chatter.ask(ids + begun.tokens + [15] * 4, name).restored == 96
    chatter.sessions.pause(name)
    for path, body in (
        ("/update_weight_version", {"new_version": "v3"}),
        ("/weights_checker", {"action": "snapshot"}),
    ):
        assert chatter.http.post(path, json=body).status_code == 200, path
    chatter.ask(ids + begun.tokens + [15] * 5, name)
    with pytest.raises(SessionBusy, match="POST /flush_cache first"):  # whose KV the tree holds is unknown
        chatter.sessions.pause(name)
    assert chatter.http.post("/flush_cache").status_code == 200
    update("v2")
    answer = chatter.ask(ids + begun.tokens + [15] * 5, name)
    assert answer.cached == 0
    assert chatter.sessions.pause(name).state == "paused"
    assert chatter.ask(ids + begun.tokens + [15] * 6, name).restored == 112

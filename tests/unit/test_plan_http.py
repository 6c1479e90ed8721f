"""Plans, timelines and rates by HTTP, and a resume with a target: over the real routes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from sgl_krul.api.client import KrulClient
from sgl_krul.api.plans import RecomputeInfo
from sgl_krul.api.schemas import STRATEGIES, TARGETS
from sgl_krul.engine.frontend import AnswerError
from sgl_krul.errors import BadRequest, KrulError, NoTimeline, SessionBusy, UnknownSession
from sgl_krul.restore.planner import Strategy
from sgl_krul.restore.timeline import Span
from sgl_krul.service.wish import TargetPlace
from sgl_krul.session.record import SessionKey
from tests.restores import DEFAULT_RATES, PLAN, RATES, SPANS, TIMELINE, plan_answer
from tests.session_server import KEY, MemoryFront, make_app, serve


@pytest.fixture(scope="module")
def front() -> MemoryFront:
    return MemoryFront()


@pytest.fixture(scope="module")
def app(front: MemoryFront) -> FastAPI:
    return make_app(front)


@pytest.fixture(scope="module")
def url(app: FastAPI) -> Iterator[str]:
    yield from serve(app)


@pytest.fixture
def krul(url: str, front: MemoryFront) -> Iterator[KrulClient]:
    front.sessions.clear()
    front.resumed.clear()
    front.failure = None
    front.add(SessionKey("chat"))
    front.restores = {
        "plan": plan_answer(),
        "timeline": TIMELINE,
        "rates": RATES,
        "calibrate": {"samples": 41, "problems": []},
    }
    with KrulClient(url, KEY, timeout_s=10) as client:
        yield client


def ask(url: str, method: str, path: str, json: Any = None) -> httpx.Response:
    return httpx.request(
        method, url + path, json=json, headers={"Authorization": f"Bearer {KEY}"}, timeout=10
    )


# -- plans --


def test_a_plan_arrives_as_it_was_made(krul: KrulClient, url: str) -> None:
    plan = krul.plan("chat")
    assert (plan.session_id, plan.path, plan.tiers) == ("chat", "device", {"ssd": 1024})
    assert plan.plan is not None
    assert plan.plan.staircase == PLAN["staircase"]
    assert plan.rates.compute is not None
    assert plan.rates.compute.attention_s_per_pair == 1.2e-8
    shown = ask(url, "GET", "/v1/sessions/chat/plan").json()
    assert {name: shown[name] for name in ("plan", "load_all", "recompute_all", "recompute")} == {
        name: plan_answer()[name] for name in ("plan", "load_all", "recompute_all", "recompute")
    }


def test_what_cannot_be_predicted_is_null(krul: KrulClient, front: MemoryFront, url: str) -> None:
    """Without rates of recompute the planner has no finite time for it, and JSON no infinity."""
    endless = PLAN | {"compute_s": float("inf"), "forward_s": float("nan"), "ttft_s": float("inf")}
    front.restores["plan"] = plan_answer(rates=DEFAULT_RATES, recompute_all=endless)
    answer = ask(url, "GET", "/v1/sessions/chat/plan")
    assert answer.status_code == 200
    assert answer.json()["recompute_all"]["ttft_s"] is None
    plan = krul.plan("chat")
    assert plan.recompute_all is not None
    assert (plan.recompute_all.compute_s, plan.recompute_all.forward_s) == (None, None)
    assert plan.rates.compute is None


def test_nothing_stored_has_no_plan(krul: KrulClient, front: MemoryFront) -> None:
    bare = {name: value for name, value in plan_answer(path="none", tiers={}).items() if "all" not in name}
    del bare["plan"]
    front.restores["plan"] = bare | {"state": "active", "reason": "missing"}
    plan = krul.plan("chat")
    assert (plan.plan, plan.load_all, plan.recompute_all, plan.reason) == (None, None, None, "missing")


@pytest.mark.parametrize("verb", ["plan", "timeline"])
def test_salts_choose_the_session(krul: KrulClient, front: MemoryFront, verb: str) -> None:
    front.add(SessionKey("salted", "salt", "extra"))
    call = getattr(krul, verb)
    assert call("salted", cache_salt="salt", extra_key="extra").session_id == "salted"
    with pytest.raises(UnknownSession, match="'salted'"):
        call("salted")


@pytest.mark.parametrize("verb", ["plan", "timeline"])
@pytest.mark.parametrize(
    "session_id", ["x/plan", "x/timeline", "plan", "a/b", "..", "?q=/plan", "ü/漢", "/", "a//"]
)
def test_ids_that_look_like_a_route(krul: KrulClient, front: MemoryFront, session_id: str, verb: str) -> None:
    """The slash before the verb is one of the path; one of the id comes as %2F."""
    front.add(SessionKey("x"))
    front.add(SessionKey(session_id))
    assert krul.session(session_id).session_id == session_id
    assert getattr(krul, verb)(session_id).session_id == session_id
    with pytest.raises(UnknownSession, match=f"'{session_id}/{verb}'".replace("?", r"\?")):
        krul.session(f"{session_id}/{verb}")


def test_an_id_with_the_name_of_a_route_and_salts(krul: KrulClient, front: MemoryFront) -> None:
    front.add(SessionKey("x/plan", "salt"))
    assert krul.session("x/plan", cache_salt="salt").salted
    with pytest.raises(UnknownSession):
        krul.session("x/plan")


# -- timelines --


def test_a_timeline_arrives_span_by_span(krul: KrulClient, url: str) -> None:
    measured = krul.timeline("chat")
    assert measured.timeline.spans == SPANS
    assert isinstance(measured.timeline.spans[0], Span)
    assert measured.timeline.staircase == PLAN["staircase"]
    assert set(measured.timeline.idle) == {"compute", "load"}
    shown = ask(url, "GET", "/v1/sessions/chat/timeline").json()
    assert shown == {"session_id": "chat"} | TIMELINE
    assert shown["timeline"]["spans"][0] == list(SPANS[0])


def test_no_restore_yet(krul: KrulClient, front: MemoryFront) -> None:
    front.failure = AnswerError(404, "NoTimeline", "session 'chat' was not restored yet: resume it first")
    with pytest.raises(NoTimeline, match="was not restored yet: resume it first"):
        krul.timeline("chat")


# -- rates --


def test_rates(krul: KrulClient, front: MemoryFront) -> None:
    rates = krul.rates()
    assert (rates.measured, rates.tiers["ssd"].in_flight) == (True, 4)
    front.restores["rates"] = DEFAULT_RATES
    assert (krul.rates().measured, krul.rates().compute) == (False, None)


def test_calibrate(krul: KrulClient, front: MemoryFront) -> None:
    measured = krul.calibrate()
    assert (measured.samples, measured.measured, measured.problems) == (41, True, [])
    front.failure = AnswerError(409, "SessionBusy", "a restore is running: try again")
    with pytest.raises(SessionBusy, match="a restore is running"):
        krul.calibrate()


def test_an_overview_says_whether_recompute_may_be_used(krul: KrulClient, front: MemoryFront) -> None:
    assert krul.sessions().recompute is None  # an older server
    front.load = {"slow_steps": 2, "recompute": {"available": False, "reason": "GptOss is no known class"}}
    overview = krul.sessions()
    front.load = {}
    assert overview.load["slow_steps"] == 2
    assert overview.recompute == RecomputeInfo(available=False, reason="GptOss is no known class")


# -- a resume with a target --


def test_target_and_strategy_are_handed_on(krul: KrulClient, front: MemoryFront) -> None:
    krul.resume("chat")
    for strategy in (None, *STRATEGIES):
        krul.resume("chat", target="device", strategy=strategy)
    assert front.resumed == [("memory", None), *(("device", each) for each in (None, *STRATEGIES))]


def test_the_choices_are_those_of_the_planner_and_the_service() -> None:
    assert tuple(Strategy) == STRATEGIES
    assert tuple(TargetPlace) == TARGETS


def test_what_a_restore_to_the_device_took(krul: KrulClient, front: MemoryFront) -> None:
    took: dict[str, Any] = {"target": "device", "strategy": "optimal", "path": "device"}
    took |= {"restored_to": "device"}
    numbers = {
        "recomputed_tokens": 575.5,
        "loaded_bytes": 3,
        "seconds": 1.5,
        "predicted_s": 1.4,
        "bubble": 0.04,
    }
    front.restores["resume"] = took | numbers
    answer = krul.resume("chat", target="device").model_dump()
    assert {name: answer[name] for name in took | numbers} == took | numbers
    front.restores["resume"] = took | {"predicted_s": None, "bubble": None, "strategy": None}
    assert krul.resume("chat", target="device").predicted_s is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"target": "disk"}, ["target 'disk'", "expected one of memory, device"]),
        (
            {"target": "device", "strategy": "fast"},
            ["strategy 'fast'", "expected one of optimal, load, recompute, half, paper"],
        ),
        (
            {"strategy": "paper"},
            ["strategy 'paper' with target 'memory'", 'Send target "device", or no strategy'],
        ),
    ],
)
def test_bad_choices_say_what_to_do(
    krul: KrulClient, front: MemoryFront, url: str, body: dict[str, str], words: list[str]
) -> None:
    answer = ask(url, "POST", "/v1/sessions/chat/resume", body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "BadRequest"
    assert [word for word in words if word not in error["message"]] == []
    with pytest.raises(BadRequest) as caught:
        krul.resume("chat", **body)  # type: ignore[arg-type]
    assert str(caught.value) == error["message"]
    assert front.resumed == []


@pytest.mark.parametrize(
    ("body", "word"),
    [({"target": 5}, "target"), ({"aim": "device"}, "aim"), ({"timeout_s": -1}, "timeout_s")],
)
def test_bad_types_and_names(krul: KrulClient, url: str, body: dict[str, Any], word: str) -> None:
    answer = ask(url, "POST", "/v1/sessions/chat/resume", body)
    assert answer.status_code == 422
    assert word in answer.text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/sessions/chat/plan"),
        ("GET", "/v1/sessions/chat/timeline"),
        ("GET", "/v1/restore/rates"),
        ("POST", "/v1/restore/calibrate"),
    ],
)
def test_they_are_documented_and_guarded(app: FastAPI, url: str, method: str, path: str) -> None:
    documented = app.openapi()["paths"][path.replace("chat", "{session_id}")]
    assert "description" in documented[method.lower()]
    assert httpx.request(method, url + path, timeout=10).status_code == 401


def test_the_choices_are_documented(app: FastAPI) -> None:
    fields = app.openapi()["components"]["schemas"]["ResumeRequest"]["properties"]
    assert fields["target"]["enum"] == ["memory", "device"]
    assert fields["strategy"]["enum"] == [*STRATEGIES, None]


def test_a_server_without_the_routes(url: str) -> None:
    for bare in serve(FastAPI()):
        with KrulClient(bare) as client:
            for call in (client.rates, client.calibrate, lambda: client.plan("chat")):
                with pytest.raises(KrulError, match="has no session routes"):
                    call()

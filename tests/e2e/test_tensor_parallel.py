"""Three ranks, a third of the heads each: what was paused comes back on all of them, or on none.

One thread a rank: with more, ranks that share cores take turns at every collective, and a token takes 2 s.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sgl_krul.errors import NotServed, StoreError
from sgl_krul.session.record import SessionKey
from tests.e2e.harness import START_S, Answer, Chatter, ServerFactory, prompt

RANKS = 3
NEW = 3
FIRST = 109  # with its answer 112 tokens less one, so 6 pages in 3 chunks of 32 tokens, and a rest
CHUNK = 32
STORED = 96
TURNS = {name: [prompt(number, FIRST), prompt(number + 1, 9)] for number, name in enumerate("abc")}
CORES = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(RANKS))


def start(servers: ServerFactory) -> Chatter:
    """A server of three ranks on this machine's cores."""
    config = servers.config(more=f"chunk: {{tokens: {CHUNK}}}")
    environ = os.environ | {"SGLANG_CPU_OMP_THREADS_BIND": CORES, "OMP_NUM_THREADS": "1"}
    servers.launch("--tp", str(RANKS), config=config, environ=environ).wait_ready(START_S)
    return servers.running


def files(servers: ServerFactory, rank: int, name: str) -> dict[str, Path]:
    """What a rank keeps of a session, by name."""
    found = (servers.store / f"rank{rank}").glob(f"v1/*/{SessionKey(name).digest}/*")
    return {path.name: path for path in found}


def second_turn(name: str, first: Answer) -> list[int]:
    return [*TURNS[name][0], *first.tokens, *TURNS[name][1]]


@pytest.mark.timeout(2400)
def test_ranks_agree(servers: ServerFactory) -> None:
    server = start(servers)
    references = {name: server.reference(TURNS[name], f"never-paused-{name}", new=NEW) for name in "ab"}
    for name in "abc":
        first = server.ask(TURNS[name][0], name, new=NEW)
        assert name == "c" or first.same_as(references[name][0])
        paused = server.sessions.pause(name)
        assert (paused.state, paused.stored_tokens) == ("paused", STORED)
    refuse_what_is_not_served(server)
    fail_on_one_rank(server, servers)
    for rank in range(RANKS):
        stored = files(servers, rank, "b")
        del stored["manifest"]
        assert len(stored) == STORED // CHUNK
        assert len({path.stat().st_size for path in stored.values()}) == 1
    server.kill()

    files(servers, 1, "b")["g00000001-c000001"].unlink()
    files(servers, 2, "c")["manifest"].unlink()
    server = start(servers)
    listed = {session.session_id for session in server.sessions.sessions().sessions}
    assert listed == {"a", "b"}  # one rank has lost c
    assert not files(servers, 0, "c")
    a = server.ask(second_turn("a", references["a"][0]), "a", new=NEW)
    assert a.same_as(references["a"][1])
    assert (a.restored, a.krul["restored_from"]) == (STORED, "ssd")
    b = server.ask(second_turn("b", references["b"][0]), "b", new=NEW)
    assert b.same_as(references["b"][1])
    assert (b.restored, b.krul["restored_from"]) == (STORED, "ssd")
    assert b.krul["recomputed_tokens"] >= CHUNK  # what one rank has lost is computed on all
    server.sessions.delete("b")
    assert not any(files(servers, rank, "b") for rank in range(RANKS))


@pytest.mark.timeout(2400)
def test_chats_at_once(servers: ServerFactory) -> None:
    """Their verbs and requests cross each other; the ranks still take them one way."""
    server = servers.running
    turns = {
        name: [prompt(40 + 3 * number + turn, 40) for turn in range(3)] for number, name in enumerate("efg")
    }
    references = {name: server.reference(turns[name], f"never-paused-{name}", new=NEW) for name in turns}

    def run(name: str) -> list[list[int]]:
        history: list[int] = []
        answers = []
        for turn in turns[name]:
            history += turn
            answers.append(server.ask(history, name, new=NEW).tokens)
            history += answers[-1]
            assert server.sessions.pause(name).state == "paused"
            if name != "e":
                server.sessions.resume(name)
            server.sessions.sessions()
        server.sessions.delete(name)
        return answers

    with ThreadPoolExecutor(len(turns)) as pool:
        answers = dict(zip(turns, pool.map(run, turns), strict=True))
    assert answers == {name: [answer.tokens for answer in references[name]] for name in turns}


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("strategy", ["half", "optimal"])
def test_both_streams_on_all_ranks(servers: ServerFactory, strategy: str) -> None:
    server = servers.running
    rates = server.http.post("/v1/restore/calibrate").json()
    assert rates["compute"] is not None
    turns = [prompt(70, 200), prompt(71, 9)]
    references = server.reference(turns, f"never-paused-{strategy}", new=NEW)
    first = server.ask(turns[0], strategy, new=NEW)
    assert server.sessions.pause(strategy).state == "paused"
    server.http.post("/flush_cache")
    resumed = server.sessions.resume(strategy, target="device", strategy=strategy)
    assert resumed.restored_tokens == resumed.stored_tokens
    assert (resumed.recomputed_tokens > 0) or strategy == "optimal"
    again = server.ask([*turns[0], *first.tokens, *turns[1]], strategy, new=NEW)
    assert again.same_as(references[1])
    server.sessions.delete(strategy)


def refuse_what_is_not_served(server: Chatter) -> None:
    with pytest.raises(NotServed, match="tp-size 3"):
        server.sessions.move("a", "ssd")


def fail_on_one_rank(server: Chatter, servers: ServerFactory) -> None:
    """A pause that one rank can't write is none on any, and the chat goes on."""
    blocked = files(servers, 2, "a")["manifest"].parent.with_name(SessionKey("d").digest)
    blocked.touch()  # where a directory is to be made
    ids = TURNS["a"][0][:40]
    first = server.ask(ids, "d", new=NEW)
    with pytest.raises(StoreError, match="rank 2 failed"):
        server.sessions.pause("d")
    assert server.sessions.session("d").state == "active"
    blocked.unlink()
    assert server.sessions.pause("d").state == "paused"
    assert server.sessions.resume("d").restored_tokens == CHUNK
    again = server.ask([*ids, *first.tokens, 5, 6], "d", new=NEW)
    assert (again.restored, again.krul["restored_from"]) == (CHUNK, "memory")
    server.sessions.delete("d")

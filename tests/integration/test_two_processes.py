"""Server processes over one Redis: two that pause the same session at once, and one that is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sgl_krul.session.catalog import read_manifest
from tests.integration.redis_child import LEASE_S, LOOPED, duelled, looped
from tests.integration.redis_site import Site, open_site, raw_key, raw_keys
from tests.integration.test_kill_during_pause import progress
from tests.redis_servers import ValkeyServer, wait_until
from tests.sessions import NAMESPACE, Chat

PROJECT = Path(__file__).parents[2]
ROUNDS = 40
KILLS = 12


@contextmanager
def child(url: str, name: str, *mode: str, hash_seed: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A server process; killed at the end."""
    arguments = [sys.executable, "-m", "tests.integration.redis_child", url, name, *mode]
    environ = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, cwd=PROJECT, env=environ, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(process: subprocess.Popen[str], line: str) -> None:
    """Send a line."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    """The next line; the end of the process is an error."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the process has ended"
    return line.strip()


@contextmanager
def two(url: str, lease_s: float = 10.0) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """Servers A and B, ready."""
    mode = ("duel", str(lease_s))
    with child(url, "A", *mode, hash_seed=1) as a, child(url, "B", *mode, hash_seed=2) as b:
        assert hear(a) == hear(b) == "ready"
        yield a, b


def is_whole(site: Site, client: Any, session: Chat) -> None:
    """It is there as this, restores exactly, and nothing else of it is there."""
    manifest = read_manifest(site.redis, NAMESPACE, session.digest)
    assert manifest is not None
    assert manifest.token_array == session.token_ids
    assert manifest.hashes == session.hashes
    site.resumes(session, origin="redis")
    named = [chunk.key.rpartition("/")[2] for chunk in manifest.chunks]
    assert [name for name in raw_keys(client, session) if name != ".lease"] == [*named, "manifest"]


def test_two_servers_pause_one_session_at_the_same_moment(redis: ValkeyServer) -> None:
    client = redis.client()
    beaten = 0
    with two(redis.url) as servers, open_site(redis.url) as site:
        for number in range(ROUNDS):
            for server in servers:
                ask(server, f"chat {number}")
            answers = [json.loads(hear(server)) for server in servers]
            sides = {name: duelled(name, "chat", number) for name in "AB"}
            won = [name for name, answer in zip("AB", answers, strict=True) if "error" not in answer]
            for name, answer in zip("AB", answers, strict=True):
                if name not in won:
                    beaten += 1
                    assert answer["error"] == "LeaseHeld"
                    assert f"is being written by '{'BA'['AB'.index(name)]}:" in answer["text"]
            assert won
            manifest = read_manifest(site.redis, NAMESPACE, sides["A"].digest)
            assert manifest is not None
            last = next((name for name in won if sides[name].hashes == manifest.hashes), None)
            assert last is not None, "what is there is neither of the two"
            is_whole(site, client, sides[last])
            assert ".lease" not in raw_keys(client, sides[last])
        assert site.redis.check() == []
    assert beaten > 0  # they did meet


def test_two_servers_give_the_same_names(redis: ValkeyServer) -> None:
    """Processes with other hash seeds: the same keys, the same bytes; what one wrote the other need not."""
    client = redis.client()
    found: list[dict[bytes, bytes | None]] = []
    session = duelled("", "same", 0)
    chunks = len(session.hashes) // 4 + 1
    with two(redis.url) as servers, open_site(redis.url) as site:
        for server in servers:
            client.flushall()
            ask(server, "same 0")
            answer = json.loads(hear(server))
            assert (answer["chunks_written"], answer["chunks_kept"]) == (chunks, 0)
            found.append(
                {key: client.hget(key, "0") for key in client.keys("*") if b"/directories" not in key}
            )
            is_whole(site, client, session)
        assert found[0] == found[1]
        assert sorted(found[0])[0] == raw_key(session, "").encode()
        ask(servers[0], "same 0")
        answer = json.loads(hear(servers[0]))
        assert (answer["chunks_written"], answer["chunks_kept"]) == (0, chunks)
        is_whole(site, client, session)


def test_a_server_stands_still_for_longer_than_its_lease(redis: ValkeyServer) -> None:
    """A stops in the middle of a pause; B pauses the session; A goes on, and must not touch what B wrote."""
    client = redis.client()
    lease = raw_key(duelled("A", "long", 0), ".lease")
    late = 0
    with two(redis.url, LEASE_S) as (a, b), open_site(redis.url) as site:
        for number in range(4):
            wait_until(lambda: not client.exists(lease))
            ask(a, f"long {number}")
            wait_until(lambda: client.exists(lease))
            a.send_signal(signal.SIGSTOP)
            wait_until(lambda: not client.exists(lease))
            ask(b, f"long {number}")
            answer = json.loads(hear(b))
            assert answer["tiers"] == ["redis"], answer
            if number % 2:  # B goes on, and keeps the chunks it wrote
                ask(b, f"long {number}")
                assert json.loads(hear(b))["chunks_written"] == 0
            a.send_signal(signal.SIGCONT)
            answer = json.loads(hear(a))
            if "error" in answer:  # else it was done before it could be stopped
                late += 1
                assert answer["error"] in ("StoreUnavailable", "LeaseHeld"), answer
                assert "lease" in answer["text"]
            is_whole(site, client, duelled("B", "long", number))
    assert late >= 2


def test_a_server_is_killed_in_the_middle_of_pauses(redis: ValkeyServer) -> None:
    rng = random.Random("kill during pause to redis")
    client = redis.client()
    middle = 0
    expected = dict.fromkeys(range(LOOPED), 0)
    with open_site(redis.url) as site:
        for kill in range(KILLS):
            with child(redis.url, f"child{kill}", "loop", str(kill), hash_seed=kill) as process:
                lines = [hear(process)]
                assert [int(word) for word in lines[0].split()] == list(expected.values())
                while not lines[-1].startswith("end"):
                    lines.append(hear(process))
                time.sleep(rng.uniform(0.0, 0.1))
                process.kill()
                assert process.stdout is not None
                ended, begun = progress("\n".join(lines) + "\n" + process.stdout.read())
            middle += ended != begun
            for index in range(LOOPED):
                manifest = read_manifest(site.redis, NAMESPACE, looped(index, 0).digest)
                expected[index] = 0 if manifest is None else int(manifest.paused_at)
                assert expected[index] in (ended[index], begun[index])
                if manifest is not None:
                    session = looped(index, expected[index])
                    assert manifest.hashes == session.hashes
                    site.resumes(session, origin="redis")
        assert middle >= KILLS // 2
        assert min(expected.values()) > 0
        wait_until(lambda: b".lease" not in b"".join(client.keys("*")), within_s=20 + LEASE_S)
        for index in range(LOOPED):
            session = looped(index, expected[index] + 1)
            assert site.pause(session)["tiers"] == ["redis"]
            is_whole(site, client, session)  # also what the killed ones left has gone
        assert all(
            client.pttl(key) > 0 for key in client.keys("*")
        )  # and what is half written goes by itself
        assert site.redis.check() == []

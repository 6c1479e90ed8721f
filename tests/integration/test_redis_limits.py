"""A Redis that evicts, refuses, is full or lacks a node: what it can't keep is elsewhere, or a miss."""

from __future__ import annotations

import json
import logging
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sgl_krul.errors import KrulError, StoreFull
from sgl_krul.session.record import session_prefix
from sgl_krul.session.registry import State
from sgl_krul.store.redis.routes import slot_of
from sgl_krul.store.redis.scripts import DIRECTORIES
from tests.integration.redis_site import Site, chunk_names, open_site, raw_key, raw_keys, session_of
from tests.redis_servers import ValkeyServer, cluster, replica_of
from tests.sessions import CHUNK_TOKENS, Chat, files

PASSWORD = "correct-horse-battery-staple"


@contextmanager
def small_disk(path: Path, size: str = "400k") -> Iterator[Path]:
    """A small tmpfs: a disk that can be filled. It takes the right to mount."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def tiers_of(site: Site, session: Chat) -> tuple[str, ...]:
    """Where a paused session lies."""
    paused = site.find(session).paused
    return () if paused is None else paused.tiers


# -- eviction --


def leading_chunks(client: Any, session: Chat, chunks: int) -> int | None:
    """How many leading chunks of a session Redis has; None without a manifest."""
    if not client.exists(raw_key(session, "manifest")):
        return None
    names = chunk_names(chunks)
    return next((n for n, name in enumerate(names) if not client.exists(raw_key(session, name))), chunks)


def evict_half(client: Any) -> None:
    """Give the server half of what it has now over what it had empty; wait until it has let go."""
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("maxmemory-samples", 1)  # nearly at random: holes are anywhere
    memory = client.info("memory")
    before, empty = client.dbsize(), memory["used_memory_startup"]
    client.config_set("maxmemory", empty + (memory["used_memory"] - empty) // 2)
    client.ping()
    assert before // 4 < client.dbsize() < 3 * before // 4
    client.config_set("maxmemory", 0)


def test_half_of_the_chunks_are_evicted(redis: ValkeyServer) -> None:
    chunks = 6
    sessions = [session_of(chunks, f"s{number}", 1000 * number) for number in range(60)]
    client = redis.client()
    with open_site(redis.url) as site:
        for session in sessions:
            assert site.pause(session)["tiers"] == ["redis"]
        evict_half(client)
        whole = {session.digest: leading_chunks(client, session, chunks) for session in sessions}
        assert (
            len({count for count in whole.values() if count is not None}) > 1
        )  # which ones is Redis' choice
        for session in sessions:
            found = whole[session.digest]
            answer = site.resumes(session, tokens=(found or 0) * CHUNK_TOKENS)
            assert site.knows(session) == (found is not None)
            if found is None:
                assert answer["reason"] == "the manifest has gone"
            elif found < chunks:
                assert answer["reason"] == "missing chunk"
                assert answer["missing_chunks"] >= 1  # chunks are asked for ahead
        assert site.service.counters.missing_chunks >= sum(found != chunks for found in whole.values())
        for session in sessions:
            site.memory.clear()
            answer = site.pause(session)
            assert answer["tiers"] == ["redis"]
            assert answer["chunks_written"] + answer["chunks_kept"] == chunks
            site.resumes(session, origin="redis")
        for session in sessions:
            site.forget(session)
        client.config_set("maxmemory", 0)


def test_sessions_come_and_go_while_redis_evicts_all_the_time(redis: ValkeyServer) -> None:
    rng = random.Random("evicted")
    sessions = [session_of(rng.randrange(1, 8), f"s{number}", 1000 * number) for number in range(30)]
    client = redis.client()
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("maxmemory-samples", 1)
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 1_500_000)
    holes = 0
    with open_site(redis.url) as site:
        for _ in range(300):
            session = rng.choice(sessions)
            if site.knows(session) and rng.random() < 0.6:
                site.memory.clear()
                answer = site.resume(session)
                assert answer["restored_tokens"] % CHUNK_TOKENS == 0
                site.exact(session, answer, answer["restored_tokens"])
                holes += answer["reason"] != ""
                continue
            answer = site.pause(session)
            # An object half written may be evicted, or the server may have no room for anything for a moment.
            assert isinstance(answer, KrulError) or answer["tiers"] == ["redis"]
    assert holes > 10
    assert client.info("stats")["evicted_keys"] > 100


# -- refusals --


@pytest.mark.parametrize("where", ["argument", "url"])
def test_wrong_password(tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str) -> None:
    caplog.set_level(logging.DEBUG)
    there, mine = session_of(3, "there"), session_of(3, "mine", 5000)
    wrong = "hunter2-hunter2"
    with ValkeyServer(tmp_path / "valkey", password=PASSWORD) as server:
        with open_site(server.url, redis={"password": PASSWORD}) as site:
            assert site.pause(there)["tiers"] == ["redis"]
        url = server.url if where == "argument" else f"redis://:{wrong}@{server.address}"
        settings = {"password": wrong} if where == "argument" else {}
        with open_site(url, ssd=tmp_path / "ssd", redis=settings) as site:
            shown = [repr(site.redis)]
            answers = [site.pause(mine)]
            assert (answers[0]["state"], answers[0]["tiers"]) == ("paused", ["ssd"])
            assert "WRONGPASS" in answers[0]["not_written"]["redis"]
            for _ in range(5):
                answers.append(site.resume(there))
                assert answers[-1]["restored_tokens"] == 0
                assert answers[-1]["reason"].startswith("store unavailable")
                assert "WRONGPASS" in answers[-1]["reason"]
            site.resumes(mine, origin="ssd")
            answers += [site.service.overview(), site.move(mine, "redis")]
            assert isinstance(answers[-1], KrulError)
            shown += [str(answer) for answer in answers]
            site.resumes(mine, origin="ssd")
        text = "\n".join(shown) + caplog.text
        assert wrong not in text
        assert PASSWORD not in text
        assert server.password == PASSWORD
        assert json.dumps(answers[0])


def test_a_replica_is_read_and_not_written(redis: ValkeyServer, tmp_path: Path) -> None:
    there, mine = session_of(5, "there"), session_of(3, "mine", 5000)
    with open_site(redis.url) as site:
        site.pause(there)
    with replica_of(redis, tmp_path / "replica") as replica:
        with open_site(replica.url, ssd=tmp_path / "ssd") as site:
            site.resumes(there, origin="redis")
            site.look()
            answer = site.pause(mine)
            assert (answer["tiers"], list(answer["not_written"])) == (["ssd"], ["redis"])
            assert "READONLY" in answer["not_written"]["redis"]
            there.token_ids.extend(range(9000, 9100))
            assert site.pause(there)["tiers"] == ["ssd"]  # the older one in Redis can't be deleted
            site.resumes(there, origin="ssd")
            site.look()
            site.resumes(there, origin="ssd")
        with open_site(replica.url) as site:  # and without a disk
            answer = site.pause(mine)
            assert isinstance(answer, KrulError)
            assert "READONLY" in str(answer)
            assert site.find(mine).state is State.ACTIVE


# -- full --


def test_a_full_disk_leaves_sessions_in_memory(tmp_path: Path) -> None:
    """Demotion memory -> SSD: what fits goes, the rest stays where it is and can be read."""
    sessions = [session_of(4, f"s{number}", 1000 * number) for number in range(6)]
    placement = {"memory_max_bytes": 1 << 30, "memory_age_s": 0.0, "interval_s": 0.1}
    with small_disk(tmp_path / "disk") as disk:
        with open_site(None, ssd=disk / "store", replicate="ssd", placement=placement) as site:
            for session in sessions:
                assert site.pause(session)["tiers"] == ["memory"]
            site.poll_until(lambda: site.service.counters.demotions_failed >= 6)
            tiers = [tuple(site.service.describe(site.find(session))["tiers"]) for session in sessions]
            assert 1 <= sum("ssd" in row for row in tiers) <= 4
            assert all("memory" in row for row in tiers)
            assert all(site.memory.leading(session.page_keys) == 16 for session in sessions)
            there = {name.split("/")[2] for name in files(disk / "store")}
            digests = {s.digest for s, row in zip(sessions, tiers, strict=True) if "ssd" in row}
            assert there == digests  # nothing of a session that is not whole
            for session in sessions:
                if session.digest in digests:
                    site.forget(session)
            rest = [session for session in sessions if site.knows(session)]
            site.poll_until(lambda: any(tiers_of(site, session) == ("ssd",) for session in rest))


@contextmanager
def room(client: Any, extra_bytes: int) -> Iterator[None]:
    """Inside the server takes so many bytes more, and evicts nothing."""
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", client.info("memory")["used_memory"] + extra_bytes)
    yield
    client.config_set("maxmemory", 0)


def test_a_full_redis_leaves_sessions_on_the_disk(redis: ValkeyServer, tmp_path: Path) -> None:
    """Demotion SSD -> Redis, where half a session fits."""
    session = session_of(40, "big")  # 1 MB
    client = redis.client()
    time_s = [1_700_000_000.0]
    with open_site(
        redis.url,
        ssd=tmp_path,
        replicate="ssd",
        placement={"interval_s": 0.1},
        rules={"demote_after_s": 60.0},
        now=lambda: time_s[0],
    ) as site:
        assert site.pause(session)["tiers"] == ["ssd"]
        before = files(tmp_path)
        with room(client, 600_000):
            time_s[0] += 61
            site.poll_until(lambda: site.service.counters.demotions_failed >= 2)
            assert tiers_of(site, session) == ("ssd",)
            site.resumes(session, origin="ssd")
            site.poll_until(lambda: not site.service.working)
            assert set(raw_keys(client, session)) <= {".lease"}
            assert files(tmp_path) == before
            answer = site.move(session, "redis")
            assert isinstance(answer, StoreFull)
            assert "maxmemory" in str(answer)
            site.resumes(session, origin="ssd")
        time_s[0] += 61  # a resume is a use
        site.poll_until(lambda: site.service.counters.demotions == 1)
        site.resumes(session, origin="redis")
        assert files(tmp_path) == {}


def test_a_full_redis_takes_no_pause(redis: ValkeyServer, tmp_path: Path) -> None:
    old, new = session_of(10, "chat"), session_of(40, "chat")
    client = redis.client()
    with open_site(redis.url, ssd=tmp_path / "a") as site:
        site.pause(old)
        names = raw_keys(client, old)
        with room(client, 400_000):
            answer = site.pause(new)
            assert (answer["tiers"], list(answer["not_written"])) == (["ssd"], ["redis"])
            assert "OOM" in answer["not_written"]["redis"]
            site.resumes(new, origin="ssd")
    with open_site(redis.url) as site:
        client.flushall()
        site.pause(old)
        with room(client, 400_000):
            assert isinstance(site.pause(new), StoreFull)
            assert raw_keys(client, old) == names  # the old one is whole, and nothing else is there
            site.resumes(new, tokens=10 * CHUNK_TOKENS, origin="redis")


def test_a_full_disk_leaves_sessions_in_redis(redis: ValkeyServer, tmp_path: Path) -> None:
    session = session_of(40, "big")
    with small_disk(tmp_path / "disk") as disk:
        with open_site(redis.url, ssd=disk / "store", replicate="redis") as site:
            site.pause(session)
            names = raw_keys(redis.client(), session)
            assert isinstance(site.move(session, "ssd"), StoreFull)
            assert files(disk / "store") == {}
            assert raw_keys(redis.client(), session) == names
            assert tiers_of(site, session) == ("redis",)
            site.resumes(session, origin="redis")


# -- cluster --


def owner(session: Chat) -> int:
    """Which of the three nodes has the session."""
    return owner_of_tag(session_prefix(session.namespace, session.digest)[:-1])


def owner_of_tag(tag: str) -> int:
    """Which of the three nodes has the keys of this hash tag."""
    return sum(slot_of(tag) >= bound for bound in (5461, 10923))


def check_cluster(site: Site, sessions: list[Chat], new: list[Chat], dead: int) -> None:
    """What lies on nodes that live works; the rest is a miss, and its pauses go to the disk."""
    for session in sessions:
        if owner(session) != dead:
            site.resumes(session, origin="redis")
            continue
        answer = site.resumes(session, tokens=0)
        assert answer["reason"].startswith("store unavailable (redis")
    for session in [*sessions, *new]:
        session.token_ids.extend(range(9000, 9100))
        answer = site.pause(session)
        if owner(session) != dead:
            assert (answer["tiers"], answer["not_written"]) == (["redis"], {})
            site.resumes(session, origin="redis")
        else:
            assert (answer["tiers"], list(answer["not_written"])) == (["ssd"], ["redis"])
            site.resumes(session, origin="ssd")


@pytest.mark.parametrize("lists_too", [False, True])
def test_a_node_of_a_cluster_dies(tmp_path: Path, lists_too: bool) -> None:
    """With the node that has the list of directories, and with another."""
    sessions = [session_of(3, f"s{number}", 1000 * number) for number in range(12)]
    new = [session_of(2, f"new{number}", 1000 * number) for number in range(6)]
    lists = owner_of_tag(DIRECTORIES)
    dead = lists if lists_too else (lists + 1) % 3
    assert {owner(session) for session in sessions} == {owner(session) for session in new} == {0, 1, 2}
    with cluster(tmp_path / "cluster") as nodes:
        url = "redis+cluster://" + ",".join(node.address for node in nodes)
        with open_site(url, ssd=tmp_path / "ssd") as site:
            for session in sessions:
                assert site.pause(session)["tiers"] == ["redis"]
            for session in sessions:
                site.resumes(session, origin="redis")
            nodes[dead].kill()
            check_cluster(site, sessions, new, dead)
            assert site.redis.breaker_state in ("open", "half-open")
            assert site.redis.available

"""Two servers, a disk each and a shared tier between them, in any order of verbs, faults, damage and deaths.

Whatever happens, a page in memory is the true KV of its hash, and what a resume says it restored is the
leading part of a state that the session was in, under its own salt. Nothing hangs, leaks, or outlives a
forget.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from array import array
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sgl_krul.errors import Corrupt, KrulError
from sgl_krul.session.record import (
    SessionKey,
    decode_manifest,
    encode_manifest,
    manifest_key,
    page_key,
    session_prefix,
)
from sgl_krul.session.registry import MEMORY, State
from tests.faults import Call, Faults, Kind, Plan, nothing
from tests.sessions import LAYOUT, NAMESPACE, OTHER_NAMESPACE, PAGE, Chat, TruePages, page_hashes, wrong_pages
from tests.two_servers import Server, World

KEYS = (SessionKey("one"), SessionKey("two"), SessionKey("one", "salt"))
NAMES = ("a", "b")
MEMORY_PAGES = 64
MAX_TOKENS = 400

servers = st.sampled_from(NAMES)
keys = st.sampled_from((KEYS[0], *KEYS))
seeds = st.integers(0, 1 << 30)
turns = {
    "kind": st.sampled_from(["append", "append", "edit", "regenerate"]),
    "length": st.integers(1, 120),
    "where": st.floats(0, 1),
}


@lru_cache(maxsize=1024)
def hashes_of(salt: str, tokens: bytes) -> tuple[str, ...]:
    """Page hashes of a state: they are asked for in every step."""
    return page_hashes(array("q", tokens), salt)


def state_hashes(key: SessionKey, state: array[int]) -> tuple[str, ...]:
    """Page hashes of a state of this session."""
    return hashes_of(key.cache_salt or "", state.tobytes())


class Killed(Exception):
    """The process is dead from here on: nothing else it tries happens."""


class TiersMachine(RuleBasedStateMachine):
    """Model: what each session's tokens are, all the states it was in, and what each server promised last."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.world = World(self.root)
        self.truth: dict[SessionKey, array[int]] = {key: array("q") for key in KEYS}
        self.states: dict[SessionKey, list[array[int]]] = {key: [] for key in KEYS}
        self.promised: dict[SessionKey, tuple[str, array[int]]] = {}  # who paused it last, whole
        self.plan: Plan = nothing
        self.unsound = False  # files were damaged behind a server's back
        self.serial = 0
        self.seen: Counter[str] = Counter()

    @initialize(
        replicate=st.sampled_from(["ssd", "redis", "both"]),
        memory_max_pages=st.sampled_from([0, 6]),
        ttl_s=st.sampled_from([0.0, 3000.0]),
        demote_after_s=st.sampled_from([0.0, 200.0]),
        harmed=st.booleans(),
    )
    def start(
        self, replicate: Any, memory_max_pages: int, ttl_s: float, demote_after_s: float, harmed: bool
    ) -> None:
        self.harmed = harmed
        self.servers: dict[str, Server] = {
            name: self.world.server(
                name,
                replicate=replicate,
                memory_pages=MEMORY_PAGES,
                memory_max_bytes=memory_max_pages * LAYOUT.page_bytes,
                memory_age_s=100.0,
                ttl_s=ttl_s,
                demote_after_s=demote_after_s,
                high_watermark=0.9,
                low_watermark=0.5,
                ssd_bytes=60 * LAYOUT.page_bytes,
            )
            for name in NAMES
        }

    # -- what is asked of a server --

    def chat(self, server: Server, key: SessionKey) -> Chat:
        return Chat(key, self.truth[key], server.service.namespace)

    def state_of(self, server: Server, key: SessionKey) -> State | None:
        session = server.session(key)
        return session.state if session is not None else None

    def check_restored(self, server: Server, key: SessionKey, answer: Any) -> None:
        """What a hold or a resume claims: only of states of this session, and all that was promised."""
        assert isinstance(answer, dict | KrulError), answer
        if isinstance(answer, KrulError):
            assert answer.status in (404, 409, 503, 507), repr(answer)
            assert not str(answer).startswith("internal error"), answer
            return
        if "restored_tokens" not in answer:
            return
        restored = answer["restored_tokens"]
        assert restored % PAGE == 0
        assert answer["exact"] is True
        pages = restored // PAGE
        found = [server.memory.leading(self.page_keys(server, key, state)) for state in self.states[key]]
        assert restored == 0 or max(found, default=0) >= pages, (restored, found)
        self.seen[f"restored {restored > 0}"] += 1
        who, tokens = self.promised.get(key, ("", array("q")))
        if who == server.name and answer["reason"] != "memory tier full":
            assert restored == len(tokens) // PAGE * PAGE, answer
            self.seen["whole"] += 1

    def page_keys(self, server: Server, key: SessionKey, state: array[int]) -> list[str]:
        namespace = server.service.namespace
        return [page_key(namespace, page_hash) for page_hash in state_hashes(key, state)]

    # -- turns and verbs --

    @rule(name=servers, key=keys, **turns)
    def turn(self, name: str, key: SessionKey, kind: str, length: int, where: float) -> None:
        """A request: it is held if the session is not active here, runs, and is observed."""
        server = self.servers[name]
        self.world.time_s += 0.001  # no two pauses of a session are at the same moment
        if self.state_of(server, key) is not State.ACTIVE:
            self.check_restored(server, key, server.hold(key))
        self.serial += 1
        new = array("q", random.Random(self.serial).choices(range(50_000), k=length))
        old = self.truth[key]
        cut = int(where * len(old)) if kind == "edit" else max(0, len(old) - length)
        tokens = old + new if kind == "append" else old[:cut] + new
        self.truth[key] = tokens[-MAX_TOKENS:]
        self.states[key].append(self.truth[key])
        self.promised.pop(key, None)
        server.turn(self.chat(server, key))

    @rule(name=servers, key=keys, part=st.sampled_from([1.0, 1.0, 0.5]))
    def pause(self, name: str, key: SessionKey, part: float) -> None:
        """Of an active session; some of its pages may be had nowhere."""
        server = self.servers[name]
        if self.state_of(server, key) is not State.ACTIVE:
            return
        chat = self.chat(server, key)
        session = server.session(key)
        assert session is not None
        if session.token_ids != chat.token_ids:
            return  # the session went on at the other server: this one's state is an old one
        source = TruePages(chat.hashes, int(part * len(chat.hashes)))
        answer = server.ask(lambda reply: server.begin_pause(chat, reply, source=source))
        self.promised.pop(key, None)
        if isinstance(answer, KrulError):
            assert self.plan is not nothing or self.world_is_full() or answer.status == 507, repr(answer)
            assert self.state_of(server, key) is State.ACTIVE
            return
        self.seen["paused"] += 1
        assert answer["state"] == "paused"
        if part == 1.0 and answer["tiers"] != [MEMORY]:
            assert answer["stored_tokens"] == len(chat.token_ids) // PAGE * PAGE
            if self.plan is nothing and not self.harmed:  # a damaged chunk may be kept
                self.promised[key] = (name, chat.token_ids)

    def world_is_full(self) -> bool:
        return any(server.view.down for server in self.servers.values())

    @rule(name=servers, key=keys, **turns)
    def turn_and_pause(self, name: str, key: SessionKey, kind: str, length: int, where: float) -> None:
        """What most sessions do."""
        self.turn(name, key, kind, length, where)
        self.pause(name, key, 1.0)

    @rule(name=servers, key=keys, more=st.integers(1, 40))
    def goes_on_beside_its_pause(self, name: str, key: SessionKey, more: int) -> None:
        """A request of the session ends while its pause is written: it stays active."""
        server = self.servers[name]
        chat = self.chat(server, key)
        session = server.session(key)
        if session is None or session.state is not State.ACTIVE or session.token_ids != chat.token_ids:
            return
        answers: list[Any] = []
        server.begin_pause(chat, answers.append)
        self.serial += 1
        self.truth[key] = chat.token_ids + array("q", random.Random(self.serial).choices(range(999), k=more))
        self.states[key].append(self.truth[key])
        self.promised.pop(key, None)
        server.turn(self.chat(server, key))
        server.drive()
        assert self.state_of(server, key) is State.ACTIVE
        assert session.token_ids == self.truth[key]

    @rule(name=servers, key=keys)
    def resume(self, name: str, key: SessionKey) -> None:
        server = self.servers[name]
        if self.state_of(server, key) is not State.ACTIVE:
            self.check_restored(server, key, server.resume(key))

    @rule(key=keys, others=keys)
    def at_once(self, key: SessionKey, others: SessionKey) -> None:
        """Both servers hold, and pause what they can, at the same time."""
        answers: list[tuple[Server, SessionKey, Any]] = []
        for server in self.servers.values():
            for each in {key, others}:

                def reply(body: Any, server: Server = server, each: SessionKey = each) -> None:
                    answers.append((server, each, body))

                try:
                    if self.state_of(server, each) is State.ACTIVE:
                        chat = self.chat(server, each)
                        session = server.session(each)
                        if session is not None and session.token_ids == chat.token_ids:
                            self.promised.pop(each, None)
                            server.begin_pause(chat, reply)
                    else:
                        server.service.resume(each, hold=True, reply=reply)
                except KrulError as error:
                    answers.append((server, each, error))
        for server in self.servers.values():
            server.drive()
        for server, each, answer in answers:
            self.promised.pop(each, None)
            self.check_restored(server, each, answer)

    def forget(self, name: str, key: SessionKey) -> None:
        server = self.servers[name]
        drop = [k for state in self.states[key] for k in self.page_keys(server, key, state)]

        def drop_pages() -> None:
            for page in drop:
                server.memory.delete(page)

        answer = server.forget(key, drop_pages)
        self.promised.pop(key, None)
        if isinstance(answer, KrulError):
            assert answer.status in (404, 409, 503), repr(answer)
            return
        self.seen["forgotten"] += 1
        assert server.session(key) is None
        assert server.disk is not None
        assert [entry.key for entry in server.disk.scan("") if key.digest in entry.key] == []
        if not server.view.down and self.plan is nothing:
            assert self.world.backing.keys(session_prefix(server.service.namespace, key.digest)) == []

    def move(self, name: str, key: SessionKey, tier: str) -> None:
        self.pause(name, key, 1.0)
        server = self.servers[name]
        answer = server.move(tier, key)
        if self.promised.get(key, (name,))[0] != name:
            del self.promised[key]  # it may be on a disk now that the other server can't read
        self.keep_promises()
        if isinstance(answer, KrulError):
            assert not str(answer).startswith("internal error"), answer
            return
        self.seen["moved"] += 1
        assert tier in answer["tiers"]

    def travel(self, name: str, key: SessionKey, other: str) -> None:
        """Export here, import there."""
        self.pause(name, key, 1.0)
        server, there = self.servers[name], self.servers[other]
        session = server.session(key)
        if session is None:
            return
        path = self.root / "travel.krul"
        answer = server.ask(lambda reply: server.service.exchange.export(session, path, reply))
        if isinstance(answer, KrulError):
            return
        self.promised.pop(key, None)
        answer = there.ask(lambda reply: there.service.exchange.take_in(path, reply))
        assert not str(answer).startswith("internal error"), answer
        self.seen["travelled"] += isinstance(answer, dict)

    def listing(self, name: str) -> None:
        answer = self.servers[name].list()
        assert isinstance(answer, dict), answer

    # -- time, memory, deaths --

    @rule(seconds=st.sampled_from([1.0, 31.0, 120.0, 120.0, 1000.0]))
    def time_passes(self, seconds: float) -> None:
        """Each server does what is due."""
        ttl_s = next(iter(self.servers.values())).settings.ttl_s
        for server in self.servers.values():
            server.upkeep(seconds)
        if ttl_s and seconds >= 1000:
            self.promised.clear()
        self.keep_promises()

    def keep_promises(self) -> None:
        """What was paused whole comes back whole, from where it lies now."""
        for key, (name, _) in list(self.promised.items()):
            server = self.servers[name]
            if self.state_of(server, key) is not State.ACTIVE:
                self.memory_goes(name)
                self.check_restored(server, key, server.resume(key))

    def look_at_all(self) -> None:
        """Every session at every server, from where it lies."""
        for name, server in self.servers.items():
            self.memory_goes(name)
            for key in KEYS:
                if self.state_of(server, key) is not State.ACTIVE:
                    self.check_restored(server, key, server.resume(key))

    def memory_goes(self, name: str) -> None:
        """Whatever is not pinned is evicted."""
        server = self.servers[name]
        keys = [entry.key for entry in server.memory.scan("")]
        for key in keys:
            server.memory.delete(key)

    def restart(self, name: str) -> None:
        server = self.servers[name]
        server.restart()
        self.install(server)

    def dies_in_a_pause(self, name: str, key: SessionKey, moment: int) -> None:
        """Killed between any two operations on its tiers, and started again; its lease runs out."""
        server = self.servers[name]
        session = server.session(key)
        if self.state_of(server, key) is not State.ACTIVE or session is None:
            return
        chat = self.chat(server, key)
        if session.token_ids != chat.token_ids:
            return
        left = [moment]

        def dying(call: Call) -> Kind | None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return None

        server.ssd.plan = server.redis.plan = dying
        answers: list[Any] = []
        server.begin_pause(chat, answers.append)
        server.drive()
        assert answers
        self.promised.pop(key, None)
        self.restart(name)
        self.world.backing.leases.clear()
        self.seen["died"] += left[0] < 0

    def weights_change(self, name: str) -> None:
        """There, or back again."""
        server = self.servers[name]
        other = OTHER_NAMESPACE if server.service.namespace == NAMESPACE else NAMESPACE
        server.settings.namespace = other
        server.service.change_namespace(other)
        server.drive()
        self.promised = {key: kept for key, kept in self.promised.items() if kept[0] != name}

    # -- faults --

    def install(self, server: Server) -> None:
        server.ssd.plan = server.redis.plan = self.plan

    def faults_begin(self, seed: int, rate: float) -> None:
        kinds = ("before", "after", "short", "wrong", "missing", "full")
        self.plan = Faults(seed, **dict.fromkeys(kinds, rate / len(kinds) * 2))
        self.promised.clear()
        for server in self.servers.values():
            self.install(server)

    def faults_end(self) -> None:
        self.plan = nothing
        for server in self.servers.values():
            self.install(server)

    def shared_tier(self, name: str, down: str) -> None:
        view = self.servers[name].view
        view.down, view.known_down = down != "up", down == "known"
        self.promised.clear()

    def damage(self, where: str, kind: str, seed: int) -> None:
        """Something happens to an object of one tier."""
        rng = random.Random(seed)
        done = self.damage_shared(kind, rng) if where == "shared" else self.damage_disk(where, kind, rng)
        if done:
            self.seen[f"damage {kind}"] += 1
            self.unsound |= where != "shared"
            self.promised.clear()

    def pick(self, names: list[str], rng: random.Random) -> str:
        """One of them, mostly a chunk."""
        chunks = [name for name in names if "-c" in name]
        return rng.choice(chunks if chunks and rng.random() < 0.8 else names)

    def damage_shared(self, kind: str, rng: random.Random) -> bool:
        objects = self.world.backing.objects
        if not objects:
            return False
        key = self.pick(sorted(objects), rng)
        found = objects[key]
        alike = [k for k in sorted(objects) if k != key and len(objects[k].body) == len(found.body)]
        other = rng.choice(alike or [key])
        if kind == "lose":
            del objects[key]
        elif kind == "swap":
            objects[key], objects[other] = objects[other], found
        else:
            part = "body" if found.body else "header"
            data = bytearray(getattr(found, part))
            if kind == "cut":
                del data[rng.randrange(len(data)) :]
            else:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            changed = {"header": found.header, "body": found.body} | {part: bytes(data)}
            objects[key] = type(found)(**changed, modified=found.modified)
        return True

    def damage_disk(self, name: str, kind: str, rng: random.Random) -> bool:
        root = self.servers[name].root
        paths = sorted(p for p in root.rglob("*") if p.is_file() and not p.name.startswith("."))
        if not paths:
            return False
        path = root / self.pick([str(path.relative_to(root)) for path in paths], rng)
        alike = [p for p in paths if p != path and p.stat().st_size == path.stat().st_size]
        other = rng.choice(alike or [path])
        data = bytearray(path.read_bytes())
        if kind == "lose":
            path.unlink()
        elif kind == "swap":
            path.write_bytes(other.read_bytes())
            other.write_bytes(data)
        elif kind == "cut":
            path.write_bytes(data[: rng.randrange(len(data))])
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        return True

    def forge(self, source: SessionKey, victim: SessionKey, *, verbatim: bool) -> None:
        """Somebody who can write the shared tier gives one session's KV out for that of another salt; or
        its manifest, as it is, for any other's.
        """
        objects = self.world.backing.objects
        found = objects.get(manifest_key(NAMESPACE, source.digest))
        if found is None or source == victim:
            return
        self.world.backing.last += 1e-3
        if verbatim:
            self.promised.pop(victim, None)
            objects[manifest_key(NAMESPACE, victim.digest)] = found
            return
        if source.cache_salt == victim.cache_salt:
            return
        try:
            manifest = decode_manifest(found.header, namespace=NAMESPACE, digest=source.digest)
        except Corrupt:
            return
        if manifest.hashes != page_hashes(manifest.token_array, source.cache_salt or ""):
            return  # forged itself
        old, new = session_prefix(NAMESPACE, source.digest), session_prefix(NAMESPACE, victim.digest)
        chunks = []
        for ref in manifest.chunks:
            key = ref.key.replace(old, new)
            if ref.key in objects:
                objects[key] = objects[ref.key]
            chunks.append(msgspec.structs.replace(ref, key=key))
        forged = msgspec.structs.replace(
            manifest,
            digest=victim.digest,
            session_id=victim.session_id,
            salted=victim.salted,
            chunks=tuple(chunks),
            paused_at=self.world.time_s,
        )
        objects[new + "manifest"] = type(found)(encode_manifest(forged), b"", self.world.backing.last)
        self.promised.pop(victim, None)
        self.seen["forged"] += 1

    # -- rules are drawn evenly: the rarer ones are together in one --

    @rule(
        verb=st.sampled_from(["forget", "move", "move", "travel", "list"]),
        name=servers,
        other=servers,
        key=keys,
        tier=st.sampled_from(["ssd", "redis"]),
    )
    def verb(self, verb: str, name: str, other: str, key: SessionKey, tier: str) -> None:
        if verb == "forget":
            self.forget(name, key)
        elif verb == "move":
            self.move(name, key, tier)
        elif verb == "travel":
            self.travel(name, key, other)
        else:
            self.listing(name)

    @rule(
        kind=st.sampled_from(["memory", "memory", "restart", "die", "weights", "reach", "faults"]),
        name=servers,
        key=keys,
        seed=seeds,
        level=st.integers(0, 25),
    )
    def trouble(self, kind: str, name: str, key: SessionKey, seed: int, level: int) -> None:
        if kind == "memory":
            self.memory_goes(name)
        elif kind == "restart":
            self.restart(name)
        elif kind == "die":
            self.turn(name, key, "append", 100, 0.0)
            self.dies_in_a_pause(name, key, level)
        elif kind == "weights":
            self.weights_change(name)
        elif kind == "reach":
            self.shared_tier(name, ("up", "down", "known")[level % 3])
        elif self.plan is nothing:
            self.faults_begin(seed, (0.02, 0.1, 0.3)[level % 3])
        else:
            self.faults_end()

    @rule(
        where=st.sampled_from(["a", "b", "shared", "forge", "forge"]),
        kind=st.sampled_from(["lose", "flip", "flip", "swap", "swap", "cut"]),
        seed=seeds,
        source=keys,
        victim=keys,
    )
    def harm(self, where: str, kind: str, seed: int, source: SessionKey, victim: SessionKey) -> None:
        if not self.harmed:
            return
        name = "b" if where == "b" else "a"
        self.turn(name, source, "append", 130, 0.0)  # so that there is something
        self.pause(name, source, 1.0)
        if where in ("shared", "forge"):
            self.move(name, source, "redis")
        if where == "forge":
            if source.cache_salt == victim.cache_salt and kind != "swap":
                victim = KEYS[0] if source.cache_salt else KEYS[2]
            for each in NAMES:
                self.pause(each, victim, 1.0)
            self.forge(source, victim, verbatim=kind == "swap")
        else:
            self.damage(where, kind, seed)
        self.look_at_all()

    # -- what must be true, always --

    @invariant()
    def memory_is_true(self) -> None:
        known = {
            page_hash
            for key, states in self.states.items()
            for state in states
            for page_hash in state_hashes(key, state)
        }
        for server in getattr(self, "servers", {}).values():
            assert wrong_pages(server.memory) == []
            assert {entry.key.split("/")[1] for entry in server.memory.scan("")} <= known

    @invariant()
    def nothing_is_under_way_and_all_is_sound(self) -> None:
        for server in getattr(self, "servers", {}).values():
            server.drive()
            assert not server.service.working
            problems = server.service.check()
            if self.unsound:  # what a server's own disk finds there was put there by this test
                problems = [problem for problem in problems if "session " in problem or "held" in problem]
            assert problems == []

    def teardown(self) -> None:
        try:
            for server in getattr(self, "servers", {}).values():
                server.ssd.plan = server.redis.plan = nothing
                server.upkeep(100)  # holds end
                server.finish()
        finally:
            shutil.rmtree(self.root)


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=100, stateful_step_count=40)

"""Whatever happens to a store, what is restored is the true KV of the current or the previous pause."""

from __future__ import annotations

import random
import tempfile
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_krul.errors import KrulError
from sgl_krul.service import SessionService
from sgl_krul.session.record import SessionKey
from sgl_krul.session.registry import State
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.ssd import SsdTier
from sgl_krul.store.tier import CheckedTier
from tests.sessions import (
    LAYOUT,
    NAMESPACE,
    PAGE,
    Chat,
    FaultyTier,
    TruePages,
    drive,
    free_slots,
    make_service,
    open_ssd,
    page_hashes,
    wrong_pages,
)

KEYS = (SessionKey("one"), SessionKey("two"), SessionKey("one", "salt"))
MEMORY_PAGES = 80


class Killed(Exception):
    """The process is dead from here on: nothing else it tries happens."""


@dataclass
class Clock:
    """Kills at the n-th moment between tier operations; counts them when n is None."""

    kill_at: int | None = None
    moments: int = 0

    def __call__(self, when: str, operation: str, key: str) -> None:
        self.moments += 1
        if self.kill_at is not None and self.moments > self.kill_at:
            raise Killed


@dataclass
class World:
    """A store, and what each session's committed states were: the last one may be in doubt after a kill."""

    root: Path
    truth: dict[SessionKey, array[int]] = field(default_factory=dict)
    committed: dict[SessionKey, list[array[int]]] = field(default_factory=dict)
    damaged: bool = False

    def serve(self, tier: CheckedTier) -> SessionService:
        """A new server over the store."""
        memory = MemoryTier(LAYOUT.layers, LAYOUT.page_segment_bytes, MEMORY_PAGES * LAYOUT.page_bytes)
        return make_service(memory, tier)


TURNS = st.tuples(
    st.sampled_from(KEYS),
    st.sampled_from(["append", "edit", "regenerate", "shorten"]),
    st.integers(1, 200),
    st.floats(0, 1),
    st.none() | st.integers(0, 30),
)
FAULTS = st.tuples(
    st.sampled_from(["delete", "flip", "truncate", "swap", "none", "none"]), st.integers(0, 1 << 30)
)


def next_turn(old: array[int], kind: str, length: int, where: float, seed: int) -> array[int]:
    """The session's tokens after another turn."""
    new = array("q", random.Random(seed).choices(range(50_000), k=length))
    cut = int(where * len(old))
    if kind == "append":
        return old + new
    if kind == "edit":
        return old[:cut] + new + old[cut + length :]
    if kind == "regenerate":
        return old[: max(0, len(old) - length)] + new
    return old[:cut]


def pause(service: SessionService, key: SessionKey, token_ids: array[int]) -> bool:
    """One turn and a pause; True when it was answered well."""
    answers: list[object] = []
    service.observe(key, token_ids)
    session = Chat(key, token_ids)
    service.pause(
        service.registry.get(key),
        session.hashes,
        TruePages(session.hashes),
        before=lambda: None,
        settle=lambda success: 0,
        reply=answers.append,
    )
    drive(service)
    return not isinstance(answers[0], KrulError)


def damage(root: Path, kind: str, seed: int) -> bool:
    """Do something to a file; True when there was one."""
    paths = sorted(path for path in root.rglob("*") if path.is_file() and path.name != ".lock")
    if not paths or kind == "none":
        return False
    rng = random.Random(seed)
    path = rng.choice(paths)
    data = path.read_bytes()
    if kind == "delete":
        path.unlink()
    elif kind == "truncate":
        path.write_bytes(data[: rng.randrange(len(data) or 1)])
    elif kind == "flip" and data:
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
    elif kind == "swap":
        other = rng.choice(paths)
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
    return True


def restore_all(world: World, tier: SsdTier) -> dict[SessionKey, int]:
    """A new server finds and resumes every session: only true pages, and of a state that was committed."""
    service = world.serve(tier)
    restored = {}
    for key in KEYS:
        session = service.registry.find(key.digest)
        if session is None:
            restored[key] = 0
            continue
        assert session.state is State.PAUSED
        answers: list[object] = []
        service.resume(key, hold=False, reply=answers.append)
        drive(service)
        (answer,) = answers
        assert isinstance(answer, dict), answer
        restored[key] = answer["restored_tokens"]
        salt = key.cache_salt or ""
        keys = [
            [f"{NAMESPACE}/{page_hash}" for page_hash in page_hashes(state, salt)]
            for state in world.committed[key]
        ]
        assert restored[key] % PAGE == 0
        assert max(service.memory.leading(state) for state in keys) >= restored[key] // PAGE
        assert {entry.key for entry in service.memory.scan("")} <= {k for state in keys for k in state}
        assert wrong_pages(service.memory) == []
        service.memory.clear()
    assert service.memory.check() == []
    assert free_slots(service.memory) == MEMORY_PAGES
    service.close()
    return restored


@settings(max_examples=120)
@given(st.lists(st.tuples(TURNS, FAULTS), min_size=1, max_size=6))
def test_what_is_restored_is_true_and_was_committed(
    steps: list[tuple[tuple[SessionKey, str, int, float, int | None], tuple[str, int]]],
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory))
        for number, ((key, kind, length, where, kill_at), (fault, seed)) in enumerate(steps):
            world.truth[key] = next_turn(world.truth.get(key, array("q")), kind, length, where, number)
            with open_ssd(world.root) as tier:
                clock = Clock()
                service = world.serve(FaultyTier(tier, clock))
                clock.moments, clock.kill_at = 0, kill_at
                done = pause(service, key, world.truth[key])
                assert done or kill_at is not None
                service.close()
            # Killed: it may have happened or not, and what came before may be the state still.
            states = world.committed.setdefault(key, [array("q")])
            world.committed[key] = [world.truth[key]] if done else [world.truth[key], *states]
            world.damaged |= damage(world.root, fault, seed)
            with open_ssd(world.root) as tier:
                restored = restore_all(world, tier)
                assert tier.check() == [] or world.damaged
            if not world.damaged:
                for other, states in world.committed.items():
                    assert restored[other] in {len(state) // PAGE * PAGE for state in states}


def test_a_kill_at_every_moment_leaves_the_old_or_the_new_session(tmp_path: Path) -> None:
    """Append, edit and shorten, killed between any two operations of the tier."""
    old = array("q", range(300))
    for new in (array("q", range(500)), old[:100] + array("q", range(9000, 9300)), old[:200]):
        kill_at, done = 0, False
        while not done:
            root = tmp_path / f"{len(new)}-{kill_at}"
            with open_ssd(root) as tier:
                service = World(root).serve(tier)
                assert pause(service, KEYS[0], old)
                service.close()
            with open_ssd(root) as tier:
                clock = Clock()
                service = World(root).serve(FaultyTier(tier, clock))
                clock.moments, clock.kill_at = 0, kill_at
                done = pause(service, KEYS[0], new)
                service.close()
            with open_ssd(root) as tier:
                restored = restore_all(World(root, committed={KEYS[0]: [new, old]}), tier)
                assert restored[KEYS[0]] in {len(state) // PAGE * PAGE for state in (old, new)}
                assert tier.check() == []
                (found,) = [session for session in World(root).serve(tier).registry]
                assert found.paused is not None
                count = -(-found.paused.stored_tokens // 64)
                assert tier.usage().objects == count + 1  # no orphan is left
            kill_at += 1
        assert kill_at > 8

"""The fault kit: tiers that fail on purpose, the same way each time; and a shared tier in memory.

`FaultInjectingTier` stands before a tier and asks a plan what goes wrong with each call. A plan is any
function of a `Call`: `Faults` draws from a seed, `Script` lists what happens to whom, `nothing` lets all
calls through.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from sgl_krul.errors import Corrupt, LeaseHeld, Missing, StoreFull, StoreUnavailable
from sgl_krul.store.tier import (
    Buffer,
    CheckedTier,
    Entry,
    SharedTier,
    TierUsage,
    byte_view,
    check_header,
    check_key,
    is_key,
    writable_view,
)


class Kind(StrEnum):
    """What goes wrong. A kind that has no meaning for an operation lets it through."""

    DELAY = "delay"  # it happens, later
    BEFORE = "before"  # StoreUnavailable, and it did not happen
    AFTER = "after"  # StoreUnavailable, and it did happen: put, delete
    SHORT = "short"  # Corrupt("length"): reads
    WRONG = "wrong"  # one bit is another: reads
    MISSING = "missing"  # as if there were no such object: reads
    FULL = "full"  # StoreFull: put


class Call(NamedTuple):
    """One call of a tier: the how many-th of this operation on this key (from 0), and from which thread."""

    operation: str
    key: str
    number: int
    thread: int


Plan = Callable[[Call], Kind | None]


def nothing(call: Call) -> Kind | None:
    """The plan in which nothing goes wrong."""
    return None


class Faults:
    """Faults by seed and rate. What happens to a call is a function of the seed, its operation, its key and
    its number alone: threads that change their order change nothing. `on` switches all of them.
    """

    def __init__(self, seed: int, **rates: float) -> None:
        self.on = True
        self._seed = seed
        self._rates = [(Kind(name), rate) for name, rate in rates.items()]
        if min((rate for _, rate in self._rates), default=0) < 0 or sum(r for _, r in self._rates) > 1:
            raise ValueError(
                f"rates {rates}: expected parts of 1, which they exceed together, or less than 0"
            )

    def __call__(self, call: Call) -> Kind | None:
        if not self.on:
            return None
        draw = self._draw(call)
        for kind, rate in self._rates:
            if draw < rate:
                return kind
            draw -= rate
        return None

    def _draw(self, call: Call) -> float:
        text = f"{self._seed}/{call.operation}/{call.key}/{call.number}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") / 2**56


class Script:
    """Faults as they are listed: `{("put", "manifest"): [None, Kind.AFTER]}` fails the second put of a key
    that ends so. A single kind happens every time.
    """

    def __init__(self, steps: Mapping[tuple[str, str], Kind | Sequence[Kind | None]]) -> None:
        self._steps = steps

    def __call__(self, call: Call) -> Kind | None:
        for (operation, suffix), kinds in self._steps.items():
            if call.operation == operation and call.key.endswith(suffix):
                if isinstance(kinds, Kind):
                    return kinds
                return kinds[call.number] if call.number < len(kinds) else None
        return None


class FaultInjectingTier:
    """A tier before which stands a plan, which may be changed at any time.

    `calls` are all calls so far (`usage` and `check` are none: they never fail); `sleep` is for delays, which
    last `delay_s`.
    """

    def __init__(
        self,
        tier: CheckedTier,
        plan: Plan = nothing,
        *,
        sleep: Callable[[float], None] = time.sleep,
        delay_s: float = 0.01,
    ) -> None:
        self.plan = plan
        self.calls: list[Call] = []
        self._tier = tier
        self._sleep = sleep
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._numbers: Counter[tuple[str, str]] = Counter()

    @property
    def name(self) -> str:
        """See Tier."""
        return self._tier.name

    def forget_calls(self) -> None:
        """As if nobody had called."""
        with self._lock:
            self.calls.clear()
            self._numbers.clear()

    def threads(self) -> set[int]:
        """Who called."""
        return {call.thread for call in self.calls}

    def count(self, operation: str, suffix: str = "") -> int:
        """How often an operation was called, on keys that end so."""
        return sum(call.operation == operation and call.key.endswith(suffix) for call in self.calls)

    def put(self, key: str, header: bytes, segments: Sequence[Buffer]) -> int:
        """See Tier."""
        kind = self._begin("put", key)
        if kind is Kind.FULL:
            raise StoreFull(f"{self.name}: {key}: full on purpose")
        stored = self._tier.put(key, header, segments)
        self._end(kind, "put", key)
        return stored

    def read_header(self, key: str) -> bytes | None:
        """See Tier."""
        kind = self._begin("read_header", key)
        if kind is Kind.SHORT:
            raise Corrupt("length", f"{key}: short on purpose")
        header = None if kind is Kind.MISSING else self._tier.read_header(key)
        if kind is Kind.WRONG and header:
            flipped = bytearray(header)
            _flip(flipped, key)
            return bytes(flipped)
        return header

    def read_segments(self, key: str, offset: int, into: Sequence[memoryview]) -> None:
        """See Tier."""
        kind = self._begin("read_segments", key)
        if kind is Kind.MISSING:
            raise Missing(f"{key} has gone on purpose")
        self._tier.read_segments(key, offset, into)
        views = [view for buffer in into if (view := writable_view(buffer)).nbytes]
        if kind is Kind.SHORT and views:
            views[-1][len(views[-1]) // 2 :] = bytes(len(views[-1]) - len(views[-1]) // 2)
            raise Corrupt("length", f"{key}: short on purpose")
        if kind is Kind.WRONG and views:
            _flip(views[len(views) // 2], key)

    def delete(self, key: str) -> bool:
        """See Tier."""
        kind = self._begin("delete", key)
        existed = self._tier.delete(key)
        self._end(kind, "delete", key)
        return existed

    def scan(self, prefix: str) -> Iterator[Entry]:
        """See Tier. A server's own disk is scanned in memory; only that of a shared tier fails."""
        return self._tier.scan(prefix)

    def usage(self) -> TierUsage:
        """See Tier."""
        return self._tier.usage()

    def check(self) -> list[str]:
        """Problems of the tier behind."""
        return self._tier.check()

    def _begin(self, operation: str, key: str) -> Kind | None:
        with self._lock:
            number = self._numbers[operation, key]
            self._numbers[operation, key] += 1
            call = Call(operation, key, number, threading.get_ident())
            self.calls.append(call)
        kind = self.plan(call)
        if kind is Kind.DELAY:
            self._sleep(self._delay_s)
        if kind is Kind.BEFORE:
            raise StoreUnavailable(f"{self.name}: {operation} {key}: out of reach on purpose")
        return kind

    def _end(self, kind: Kind | None, operation: str, key: str) -> None:
        if kind is Kind.AFTER:
            raise StoreUnavailable(f"{self.name}: {operation} {key}: the answer got lost on purpose")


class FaultInjectingSharedTier(FaultInjectingTier):
    """The same for a shared tier: `scan`, `lease` and `refresh` are calls that fail too."""

    def __init__(
        self,
        tier: SharedTier,
        plan: Plan = nothing,
        *,
        sleep: Callable[[float], None] = time.sleep,
        delay_s: float = 0.01,
    ) -> None:
        super().__init__(tier, plan, sleep=sleep, delay_s=delay_s)
        self._shared = tier

    @property
    def available(self) -> bool:
        """See SharedTier."""
        return self._shared.available

    @property
    def breaker_state(self) -> str:
        """See SharedTier."""
        return self._shared.breaker_state

    def scan(self, prefix: str) -> Iterator[Entry]:
        """See Tier."""
        self._begin("scan", prefix)
        return super().scan(prefix)

    @contextmanager
    def lease(self, prefix: str) -> Iterator[None]:
        """See SharedTier."""
        self._begin("lease", prefix)
        with self._shared.lease(prefix):
            yield

    def touch(self, keys: Sequence[str]) -> None:
        """See SharedTier. Best effort: what goes wrong is not told."""
        for key in keys:
            try:
                self._begin("touch", key)
            except StoreUnavailable:
                return
        self._shared.touch(keys)

    def refresh(self) -> None:
        """See SharedTier."""
        self._begin("refresh", "")
        self._shared.refresh()


def _flip(data: bytearray | memoryview, key: str) -> None:
    """Change one bit, at a place that depends on the key."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    place = int.from_bytes(digest, "big") % (8 * len(data))
    data[place // 8] ^= 1 << place % 8


# -- a shared tier in memory --


@dataclass
class _Object:
    header: bytes
    body: bytes
    modified: float

    @property
    def size(self) -> int:
        return len(self.header) + len(self.body)


@dataclass
class _Lease:
    token: object
    owner: str
    until: float


@dataclass
class Backing:
    """The place that several FakeSharedTiers share. `now` is its clock (unix seconds), and that of leases."""

    now: Callable[[], float] = time.time
    objects: dict[str, _Object] = field(default_factory=dict)
    leases: dict[str, _Lease] = field(default_factory=dict)
    touched: Counter[str] = field(default_factory=Counter)
    lock: threading.RLock = field(default_factory=threading.RLock)
    last: float = 0.0

    def moment(self) -> float:
        """Now, and later than every moment before: no two puts have the same."""
        self.last = max(self.now(), self.last + 1e-6)
        return self.last

    def keys(self, part: str = "") -> list[str]:
        """Keys with that part."""
        with self.lock:
            return sorted(key for key in self.objects if part in key)

    def copy(self) -> Backing:
        """Another place with the same objects: the state at this moment."""
        with self.lock:
            return Backing(self.now, dict(self.objects), last=self.last)


class FakeSharedTier:
    """A SharedTier as one server sees it: the objects are those of `backing`, the count is its own.

    `down`: every call fails. `known_down`: this server knows (its breaker is open).
    """

    def __init__(
        self,
        backing: Backing,
        *,
        owner: str = "alpha:1",
        capacity_bytes: int = 1 << 26,
        lease_s: float = 30.0,
        name: str = "redis",
    ) -> None:
        self.name = name
        self.owner = owner
        self.capacity_bytes = capacity_bytes
        self.down = False
        self.known_down = False
        self._backing = backing
        self._lease_s = lease_s
        self._tokens: dict[str, object] = {}  # of the leases this server has
        self._bytes = 0
        self._objects = 0

    # -- Tier --

    def put(self, key: str, header: bytes, segments: Sequence[Buffer]) -> int:
        """See Tier."""
        check_key(key)
        body = b"".join(byte_view(segment) for segment in segments)
        size = len(check_header(header)) + len(body)
        with self._reached() as backing:
            self._check_lease(key)
            if self._bytes + size > self.capacity_bytes:
                raise StoreFull(f"{self.name}: {size} bytes on top of {self._bytes}: no room")
            old = backing.objects.get(key)
            backing.objects[key] = _Object(bytes(header), body, backing.moment())
            self._count(size - (old.size if old else 0), 0 if old else 1)
        return size

    def read_header(self, key: str) -> bytes | None:
        """See Tier."""
        check_key(key)
        with self._reached() as backing:
            found = backing.objects.get(key)
            return found.header if found else None

    def read_segments(self, key: str, offset: int, into: Sequence[memoryview]) -> None:
        """See Tier."""
        check_key(key)
        if offset < 0:
            raise ValueError(f"offset {offset}: expected 0 or more")
        views = [writable_view(buffer) for buffer in into]
        with self._reached() as backing:
            found = backing.objects.get(key)
        if found is None:
            raise Missing(f"{self.name}: {key} has gone")
        end = offset + sum(view.nbytes for view in views)
        if end > len(found.body):
            raise Corrupt("length", f"{key}: byte {end} asked for, the body has {len(found.body)}")
        for view in views:
            view[:] = found.body[offset : offset + view.nbytes]
            offset += view.nbytes

    def delete(self, key: str) -> bool:
        """See Tier."""
        check_key(key)
        with self._reached() as backing:
            self._check_lease(key)
            old = backing.objects.pop(key, None)
            if old is not None:
                self._count(-old.size, -1)
            return old is not None

    def scan(self, prefix: str) -> Iterator[Entry]:
        """See Tier."""
        with self._reached() as backing:
            return iter(
                [
                    Entry(key, found.size, found.modified)
                    for key, found in sorted(backing.objects.items())
                    if key.startswith(prefix)
                ]
            )

    def usage(self) -> TierUsage:
        """See Tier."""
        return TierUsage(self._bytes, self._objects, self.capacity_bytes)

    def check(self) -> list[str]:
        """Problems found."""
        with self._backing.lock:
            return [f"{key}: no key of a tier" for key in self._backing.objects if not is_key(key)]

    # -- SharedTier --

    @property
    def available(self) -> bool:
        """See SharedTier."""
        return not self.known_down

    @property
    def breaker_state(self) -> str:
        """See SharedTier."""
        return "open" if self.known_down else "closed"

    def lease(self, prefix: str) -> AbstractContextManager[None]:
        """See SharedTier."""
        if not prefix.endswith("/") or not is_key(prefix[:-1]):
            raise ValueError(f"prefix {prefix[:80]!r}: expected the key of a directory and a slash")
        return self._leased(prefix)

    @contextmanager
    def _leased(self, prefix: str) -> Iterator[None]:
        token = object()
        with self._reached() as backing:
            if prefix in self._tokens:
                raise LeaseHeld(f"{prefix}: this server ({self.owner}) is writing it already")
            held = backing.leases.get(prefix)
            if held is not None and held.until > backing.now():
                raise self._taken(prefix, held)
            backing.leases[prefix] = _Lease(token, self.owner, backing.now() + self._lease_s)
            self._tokens[prefix] = token
        try:
            yield
        finally:
            with self._backing.lock:
                del self._tokens[prefix]
                held = self._backing.leases.get(prefix)
                if held is not None and held.token is token:
                    del self._backing.leases[prefix]

    def touch(self, keys: Sequence[str]) -> None:
        """See SharedTier."""
        for key in keys:
            check_key(key)
        self._backing.touched.update(keys)

    def refresh(self) -> None:
        """See SharedTier."""
        with self._reached() as backing:
            self._bytes = sum(found.size for found in backing.objects.values())
            self._objects = len(backing.objects)

    # -- inside --

    @contextmanager
    def _reached(self) -> Iterator[Backing]:
        if self.down or self.known_down:
            raise StoreUnavailable(f"{self.name}: out of reach")
        with self._backing.lock:
            yield self._backing

    def _check_lease(self, key: str) -> None:
        """Refuse to change what another server has; keep a lease of our own alive."""
        prefix = key.rpartition("/")[0] + "/"
        held = self._backing.leases.get(prefix)
        alive = held is not None and held.until > self._backing.now()
        mine = self._tokens.get(prefix)
        if mine is None:
            if alive and held is not None:
                raise self._taken(prefix, held)
            return
        if held is not None and alive and held.token is mine:
            held.until = self._backing.now() + self._lease_s
        elif held is not None and alive:
            raise self._taken(prefix, held)
        else:
            raise StoreUnavailable(f"{self.name}: the lease of {prefix} has run out meanwhile")

    def _taken(self, prefix: str, held: _Lease) -> LeaseHeld:
        return LeaseHeld(f"{self.name}: {prefix} is being written by {held.owner!r}, nothing was changed")

    def _count(self, size: int, objects: int) -> None:
        self._bytes = max(0, self._bytes + size)
        self._objects = max(0, self._objects + objects)

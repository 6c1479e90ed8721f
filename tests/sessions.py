"""Sessions without a model: their KV is a function of the token prefix, so that any wrong page is seen."""

from __future__ import annotations

import hashlib
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sgl_krul.config import ChunkConfig, Config, MemoryConfig, Replicate, SessionConfig
from sgl_krul.layout import KvLayout, namespace
from sgl_krul.pause.pipeline import PauseReport, Snapshot, write_session
from sgl_krul.service import SessionService
from sgl_krul.service.agreement import Agreement
from sgl_krul.service.estimates import Estimates
from sgl_krul.session.record import SessionKey, page_key
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.placement import Policy
from sgl_krul.store.ssd import SsdTier
from sgl_krul.store.tier import Buffer, CheckedTier, Entry, SharedTier, Tier, TierUsage
from sgl_krul.store.tiered import TieredStore

LAYOUT = KvLayout(
    layers=3, kv_heads=2, head_dim=8, v_head_dim=8, dtype="float32", page_size=16, rope="for tests"
)
NAMESPACE = namespace(LAYOUT, "weights", "", 0, 1)
OTHER_NAMESPACE = namespace(LAYOUT, "other weights", "", 0, 1)
PAGE = LAYOUT.page_size
CHUNK_TOKENS = 64  # 4 pages
NOW = 1_700_000_000.0


def tokens(count: int, first: int = 0) -> array[int]:
    """`count` token ids, counting up from `first`."""
    return array("q", range(first, first + count))


def page_hashes(token_ids: Sequence[int], salt: str = "") -> tuple[str, ...]:
    """Chained hashes (hex) of the full pages, as SGLang makes them: each commits to all tokens before."""
    hashes = []
    previous = salt.encode()
    for start in range(0, len(token_ids) // PAGE * PAGE, PAGE):
        page = struct.pack(f"<{PAGE}q", *token_ids[start : start + PAGE])
        previous = hashlib.sha256(previous + page).digest()
        hashes.append(previous.hex())
    return tuple(hashes)


def true_kv(page_hash: str, layer: int, layout: KvLayout = LAYOUT) -> bytes:
    """The page segment that the tokens up to this page make in one layer."""
    return hashlib.shake_256(f"{page_hash}/{layer}".encode()).digest(layout.page_segment_bytes)


class TruePages:
    """A PageSource that has the first `available` pages. `on_read` is called before each answer."""

    def __init__(
        self,
        hashes: Sequence[str],
        available: int | None = None,
        on_read: Callable[[int], None] = lambda first_page: None,
    ) -> None:
        self.hashes = hashes
        self.available = len(hashes) if available is None else available
        self.on_read = on_read
        self.asked: list[tuple[int, int]] = []

    @contextmanager
    def segments(self, first_page: int, pages: int) -> Iterator[Sequence[Sequence[memoryview]] | None]:
        """Each page is a buffer of its own; they are wiped when the `with` ends."""
        self.asked.append((first_page, pages))
        self.on_read(first_page)
        if first_page + pages > self.available:
            yield None
            return
        wanted = self.hashes[first_page : first_page + pages]
        buffers = [[bytearray(true_kv(h, layer)) for h in wanted] for layer in range(LAYOUT.layers)]
        yield [[memoryview(page) for page in layer] for layer in buffers]
        for layer in buffers:
            for page in layer:
                page[:] = bytes(len(page))


@dataclass
class Chat:
    """A session and where it stands."""

    key: SessionKey = field(default_factory=lambda: SessionKey("chat"))
    token_ids: array[int] = field(default_factory=lambda: array("q"))
    namespace: str = NAMESPACE

    @property
    def digest(self) -> str:
        """The name of the session in stores."""
        return self.key.digest

    @property
    def hashes(self) -> tuple[str, ...]:
        """Page hashes of all full pages."""
        return hash_pages(self.key, self.token_ids)

    @property
    def page_keys(self) -> list[str]:
        """Keys of all full pages in the memory tier."""
        return [page_key(self.namespace, page_hash) for page_hash in self.hashes]

    def snapshot(self) -> Snapshot:
        """What is to be paused."""
        return Snapshot(
            namespace=self.namespace,
            digest=self.digest,
            session_id=self.key.session_id,
            salted=self.key.salted,
            layout=LAYOUT,
            token_ids=self.token_ids,
            page_hashes=self.hashes,
        )

    def write(self, tier: Tier, source: TruePages | None = None, now: float = NOW) -> PauseReport:
        """Pause it into `tier`."""
        return write_session(
            self.snapshot(),
            TruePages(self.hashes) if source is None else source,
            tier,
            chunk_tokens=CHUNK_TOKENS,
            now=lambda: now,
        )


def chat(count: int, session_id: str = "chat", first: int = 0) -> Chat:
    """A session of `count` tokens."""
    return Chat(SessionKey(session_id), tokens(count, first))


def open_ssd(root: Path, capacity_bytes: int = 1 << 26) -> SsdTier:
    """An SSD tier that does not wait for the disk."""
    return SsdTier(root, capacity_bytes=capacity_bytes, free_space_floor_bytes=0, fsync="never")


def files(root: Path) -> dict[str, bytes]:
    """Every file below `root` but the lock, by its path."""
    found = [path for path in root.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def free_slots(memory: MemoryTier) -> int:
    """Slots that can be had now: those neither pinned nor reserved. Evicts everything."""
    reservations = []
    for index in range(memory.slots):
        reservation = memory.reserve([f"probe/{index}"])
        if reservation is None:
            break
        reservations.append(reservation)
    for reservation in reservations:
        memory.abandon(reservation)
    return len(reservations)


def wrong_pages(memory: MemoryTier) -> list[str]:
    """Keys of pages in memory whose bytes are not the KV of their tokens. Must be empty, always."""
    wrong = []
    for entry in memory.scan(""):
        found = [bytearray(LAYOUT.page_segment_bytes) for _ in range(LAYOUT.layers)]
        memory.read_segments(entry.key, 0, [memoryview(segment) for segment in found])
        page_hash = entry.key.split("/")[1]
        if [bytes(segment) for segment in found] != [true_kv(page_hash, n) for n in range(LAYOUT.layers)]:
            wrong.append(entry.key)
    return wrong


class FaultyTier:
    """A tier that calls `fault(when, operation, key)` around each operation; what it raises is raised.

    `when` is "before" (the operation does not happen) or "after" (it did, and the caller does not learn it).
    """

    def __init__(self, tier: CheckedTier, fault: Callable[[str, str, str], None]) -> None:
        self._tier = tier
        self._fault = fault

    @property
    def name(self) -> str:
        """See Tier."""
        return self._tier.name

    @contextmanager
    def _around(self, operation: str, key: str) -> Iterator[None]:
        self._fault("before", operation, key)
        yield
        self._fault("after", operation, key)

    def put(self, key: str, header: bytes, segments: Sequence[Buffer]) -> int:
        """See Tier."""
        with self._around("put", key):
            return self._tier.put(key, header, segments)

    def read_header(self, key: str) -> bytes | None:
        """See Tier."""
        with self._around("read_header", key):
            return self._tier.read_header(key)

    def read_segments(self, key: str, offset: int, into: Sequence[memoryview]) -> None:
        """See Tier."""
        with self._around("read_segments", key):
            self._tier.read_segments(key, offset, into)

    def delete(self, key: str) -> bool:
        """See Tier."""
        with self._around("delete", key):
            return self._tier.delete(key)

    def scan(self, prefix: str) -> Iterator[Entry]:
        """See Tier."""
        return self._tier.scan(prefix)

    def usage(self) -> TierUsage:
        """See Tier."""
        return self._tier.usage()

    def check(self) -> list[str]:
        """Problems of the tier below."""
        return self._tier.check()


def hash_pages(key: SessionKey, token_ids: Sequence[int]) -> tuple[str, ...]:
    """What the engine gives a service: the names of all full pages."""
    return page_hashes(token_ids, (key.cache_salt or "") + (key.extra_key or ""))


def policy(replicate: Replicate = "ssd", **values: float) -> Policy:
    """Nothing moves by itself."""
    return Policy(
        **{"replicate": replicate, "demote_after_s": 0, "high_watermark": 1, "low_watermark": 1, "ttl_s": 0}
        | values
    )


def make_service(
    memory: MemoryTier,
    tier: CheckedTier | None,
    *,
    shared: SharedTier | None = None,
    config: Config | None = None,
    namespace: str = NAMESPACE,
    rules: Policy | None = None,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], float] = time.time,
    ranks: Agreement | None = None,
    estimates: Estimates | None = None,
) -> SessionService:
    """A service over the test's own tiers."""
    store = TieredStore(tier, shared, policy=rules or policy())
    config = config or make_config()
    return SessionService(
        config,
        LAYOUT,
        namespace,
        memory,
        store,
        hash_pages,
        b"key",
        clock=clock,
        now=now,
        ranks=ranks,
        estimates=estimates,
    )


def make_config(hold_deadline_s: float = 30.0) -> Config:
    """A configuration with chunks of CHUNK_TOKENS. The tiers are the test's own."""
    return Config(
        memory=MemoryConfig(1 << 20),
        ssd=None,
        chunk=ChunkConfig(CHUNK_TOKENS),
        session=SessionConfig(hold_deadline_s=hold_deadline_s),
    )


def drive(service: SessionService, timeout_s: float = 20.0) -> None:
    """Poll until every job is answered."""
    deadline = time.monotonic() + timeout_s
    while service.working:
        assert time.monotonic() < deadline, "a job does not end"
        service.poll()
        time.sleep(0.0005)

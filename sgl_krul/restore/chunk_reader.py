"""Reading one stored chunk from whichever tier has it intact. What every way of restoring shares.

Nothing from a store is trusted: a chunk's header must be the one the manifest promises (namespace, chained
page hash, a digest of the manifest's own tokens, counts). Its segments are the reader's to verify. A copy
that turns out bad (`failed`) is deleted where it can never be read again, and the next tier is asked.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

import msgspec

from sgl_krul.codec.base import Mode
from sgl_krul.codec.frame import PAPER_PLAN, RAW_PLAN, ChunkHeader, decode_header, expect
from sgl_krul.errors import Corrupt, LeaseHeld, Missing, StoreError, StoreUnavailable
from sgl_krul.layout import KvLayout
from sgl_krul.session.record import ChunkRef, Manifest
from sgl_krul.store.tier import Tier

__all__ = [
    "READ_ERRORS",
    "ChunkCopies",
    "ChunkCopy",
    "ChunkReader",
    "Ending",
    "Names",
    "Reach",
    "keys_of",
    "names_in",
    "read_chunk_header",
    "why_lost",
]

READ_ERRORS = (Corrupt, Missing, StoreUnavailable)
"""What reading a copy may raise; the next tier may have a better one."""

Names = Mapping[str, Mapping[tuple[str, int], str]]  # tier -> (last page hash, pages) -> key of the chunk

_PATIENCE_S = 0.2
_PATIENCE_FAILURES = 3


def names_in(copies: Mapping[str, Manifest]) -> Names:
    """What the chunks of a session are called in each tier, by the manifest that lies there."""
    return {
        tier: {(ref.last_page_hash, ref.pages): ref.key for ref in copy.chunks}
        for tier, copy in copies.items()
    }


def keys_of(ref: ChunkRef, names: Names) -> dict[str, str]:
    """Tier name -> the chunk's key there, where a manifest says so; in other tiers it is `ref.key`."""
    identity = (ref.last_page_hash, ref.pages)
    return {tier: keys[identity] for tier, keys in names.items() if identity in keys}


@dataclass
class Ending:
    """Why a restore, or its loading, ended early: `cut` as a text, `miss` in one word. Empty: it did not."""

    miss: str = ""
    cut: str = ""

    def end(self, miss: str, cut: str) -> None:
        """Nothing more comes, for this reason; the first one counts."""
        if not self.cut:
            self.miss, self.cut = miss, cut


def why_lost(error: StoreError) -> tuple[str, str]:
    """Why a chunk is not to be had: in one word (missing, corrupt, unavailable), and as a text."""
    if isinstance(error, Corrupt):
        return "corrupt", f"corrupt chunk ({error})"
    if isinstance(error, StoreUnavailable):
        return "unavailable", f"store unavailable ({error})"
    return "missing", "missing chunk"


def read_chunk_header(
    tier: Tier, ref: ChunkRef, layout: KvLayout, namespace: str, modes: frozenset[Mode]
) -> ChunkHeader:
    """The header of the chunk `ref` in `tier` (`ref.key` is its key there), if it is the one promised.

    Raises:
        Missing: there is none.
        Corrupt: damaged, another chunk's, of another shape, or with a segment in none of `modes`.
        StoreUnavailable: the tier can't be read now.
    """
    data = tier.read_header(ref.key)
    if data is None:
        raise Missing(f"chunk {ref.key} has gone")
    header = decode_header(data)
    expect(
        header,
        namespace=namespace,
        last_page_hash=ref.last_page_hash,
        token_digest=ref.token_digest,
        tokens=ref.tokens,
    )
    if len(header.segments) != layout.layers:
        raise Corrupt("identity", f"{len(header.segments)} segments, this model has {layout.layers} layers")
    # Raw where a chunk without its first layers was promised is no harm: more is stored than that.
    if header.plan_id != ref.plan_name and {header.plan_id, ref.plan_name} != {RAW_PLAN, PAPER_PLAN}:
        raise Corrupt("identity", f"stored under the plan {header.plan_id}, expected {ref.plan_name}")
    if header.depth > ref.depth:
        raise Corrupt("identity", f"{header.depth} layers are not stored, expected {ref.depth}")
    lengths = {Mode.raw: ref.pages * layout.page_segment_bytes, Mode.recompute: 0}
    for segment in header.segments:
        if segment.mode not in modes or segment.length != lengths.get(segment.mode, segment.length):
            raise Corrupt("identity", f"segment of {segment.length} bytes in mode {segment.mode.value}")
    return header


class Reach:
    """Which tiers are out of reach, as found in one restore: those are not asked for every chunk again.

    A tier is given up after 3 failures one after another, or once such failures took 0.2 s together: one bad
    sector is no dead disk, and a time-out is not to be waited for twice.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._failures: dict[str, tuple[int, float]] = {}

    def lost(self, tier: str) -> bool:
        """Whether it is no use to ask this tier."""
        with self._lock:
            count, seconds = self._failures.get(tier, (0, 0.0))
            return count >= _PATIENCE_FAILURES or (count > 0 and seconds >= _PATIENCE_S)

    def failed(self, tier: str, seconds: float) -> None:
        """The tier was out of reach for a call that took `seconds`."""
        with self._lock:
            count, before = self._failures.get(tier, (0, 0.0))
            self._failures[tier] = count + 1, before + seconds

    def answered(self, tier: str) -> None:
        """The tier answered, well or not. One that was given up stays so."""
        with self._lock:
            count, seconds = self._failures.get(tier, (0, 0.0))
            if count < _PATIENCE_FAILURES and seconds < _PATIENCE_S:
                self._failures.pop(tier, None)


@dataclass(frozen=True, eq=False)
class ChunkCopy:
    """A chunk as one tier has it: the header is the right one, the segments are not read yet.

    `ref.key` is its key there. `header_s`: the seconds that reading the header took.
    """

    tier: Tier
    ref: ChunkRef
    header: ChunkHeader
    header_s: float


class ChunkReader:
    """What is the same for all chunks of a restore. Tiers are asked in the order given.

    `modes`: of the segments that the caller can make use of. `reach`: None asks every tier each time.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        layout: KvLayout,
        namespace: str,
        *,
        modes: frozenset[Mode] = frozenset({Mode.raw}),
        reach: Reach | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tiers = tuple(tiers)
        self.reach = reach
        self.clock = clock
        self._layout = layout
        self._namespace = namespace
        self._modes = modes

    def copies(self, ref: ChunkRef, keys: Mapping[str, str]) -> ChunkCopies:
        """The copies of one chunk. `keys`: its key by tier, where it is not `ref.key`."""
        return ChunkCopies(self, ref, keys)

    def read(self, tier: Tier, ref: ChunkRef) -> ChunkCopy:
        """The copy in one tier.

        Raises:
            Missing, Corrupt, StoreUnavailable
        """
        if self.reach is not None and self.reach.lost(tier.name):
            raise StoreUnavailable(f"{tier.name} is out of reach: it is not asked again in this restore")
        began = self.clock()
        try:
            header = read_chunk_header(tier, ref, self._layout, self._namespace, self._modes)
        except READ_ERRORS as error:
            self.outcome(tier, error, began)
            raise
        self.outcome(tier, None, began)
        return ChunkCopy(tier, ref, header, self.clock() - began)

    def outcome(self, tier: Tier, error: StoreError | None, began: float) -> None:
        """Remember how a call to the tier ended that began at `began`."""
        if self.reach is None:
            return
        if isinstance(error, StoreUnavailable):
            self.reach.failed(tier.name, self.clock() - began)
        else:
            self.reach.answered(tier.name)


class ChunkCopies:
    """The copies of one chunk, first tier first; one that turned out bad is not used again. Thread safe.

    Those who come while the header is being read wait for it: it is read once.
    """

    def __init__(self, reader: ChunkReader, ref: ChunkRef, keys: Mapping[str, str]) -> None:
        self.ref = ref
        self._reader = reader
        self._left = deque(
            (tier, msgspec.structs.replace(ref, key=keys.get(tier.name, ref.key))) for tier in reader.tiers
        )
        self._lock = Lock()
        self._copy: ChunkCopy | None = None
        self._errors: list[StoreError] = []

    @property
    def damaged(self) -> int:
        """Copies that were corrupt."""
        return sum(isinstance(error, Corrupt) for error in self._errors)

    @property
    def error(self) -> StoreError:
        """Once `open` said None: what is wrong with the first copy that is not just missing."""
        errors = self._errors or [Missing(f"chunk {self.ref.key}: there is no tier to ask")]
        return next((error for error in errors if not isinstance(error, Missing)), errors[0])

    def open(self) -> ChunkCopy | None:
        """The copy to read from; None when no tier has it intact. Waits for I/O the first time."""
        with self._lock:
            while self._copy is None and self._left:
                tier, ref = self._left.popleft()
                try:
                    self._copy = self._reader.read(tier, ref)
                except READ_ERRORS as error:
                    self._bad(tier, ref, error)
            return self._copy

    def failed(self, copy: ChunkCopy, error: StoreError) -> None:
        """The copy's segments were no good; `open` gives the next. Where others said so before, nothing."""
        with self._lock:
            if self._copy is copy:
                self._copy = None
                self._bad(copy.tier, copy.ref, error)

    def _bad(self, tier: Tier, ref: ChunkRef, error: StoreError) -> None:
        """Delete what can never be read again. Another version or identity stays: it may be wanted."""
        self._errors.append(error)
        if isinstance(error, Corrupt) and error.reason in ("checksum", "length"):
            try:
                tier.delete(ref.key)
            except (StoreUnavailable, LeaseHeld):
                return  # it stays, and stays a miss

"""A link emulator: a tier whose reads take as long as over a link. For tests and benchmarks only.

The link is a queue in virtual time. A read asks, waits for the latency (those of parallel reads overlap),
then its bytes go over the link behind those that asked before: n parallel reads of b bytes take
n * b / bandwidth together, whatever the threads do. What the tier behind needs itself is part of that time,
not on top of it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from sgl_krul.errors import ConfigError, StoreError, StoreUnavailable
from sgl_krul.store.tier import BudgetedTier, Buffer, CheckedTier, Entry, TierUsage

__all__ = ["LinkTier"]


class LinkTier:
    """The tier behind a link of `bytes_per_s` and `latency_s` (of each read). Writes are not slowed.

    `jitter`: a part of 1 by which each latency and each transfer is longer or shorter, evenly spread and
    drawn from `seed`. After `change_after_bytes` (0: never) the link goes on with `change_to_bytes_per_s`;
    0 is a dead one: a read raises StoreUnavailable `dead_after_s` after it began or the link died, whichever
    was later. `clock` gives seconds, `sleep` waits so many.

    Raises:
        ConfigError: a setting out of range.
    """

    def __init__(
        self,
        tier: CheckedTier,
        *,
        bytes_per_s: float,
        latency_s: float = 0.0,
        jitter: float = 0.0,
        seed: int = 1,
        change_after_bytes: int = 0,
        change_to_bytes_per_s: float = 0.0,
        dead_after_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if bytes_per_s <= 0:
            raise ConfigError(f"bytes_per_s {bytes_per_s}: expected more than 0")
        if not 0 <= jitter <= 1:
            raise ConfigError(f"jitter {jitter}: expected 0 to 1")
        if min(latency_s, change_after_bytes, change_to_bytes_per_s, dead_after_s) < 0:
            raise ConfigError(
                f"latency_s {latency_s}, change_after_bytes {change_after_bytes}, change_to_bytes_per_s "
                f"{change_to_bytes_per_s}, dead_after_s {dead_after_s}: expected 0 or more"
            )
        self._tier = tier
        self._latency_s = latency_s
        self._jitter = jitter
        self._dead_after_s = dead_after_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()  # never held over I/O or a sleep
        self._random = random.Random(seed)
        # What is still to come: how many bytes (None: no end) at which speed. The last part never ends.
        changes = change_after_bytes > 0
        self._parts: list[tuple[int | None, float]] = [(change_after_bytes if changes else None, bytes_per_s)]
        if changes:
            self._parts.append((None, change_to_bytes_per_s))
        self._free_at = float("-inf")  # when all bytes asked for so far will be through
        self._carried_bytes = 0
        self._reads = 0

    @property
    def name(self) -> str:
        """That of the tier behind."""
        return self._tier.name

    @property
    def carried_bytes(self) -> int:
        """Bytes that reads brought over the link so far, headers included."""
        return self._carried_bytes

    @property
    def reads(self) -> int:
        """Reads that asked the link so far, those of what is not there included."""
        return self._reads

    @property
    def write_left_bytes(self) -> int | None:
        """See BudgetedTier; None where the tier behind has no budget."""
        return self._tier.write_left_bytes if isinstance(self._tier, BudgetedTier) else None

    # -- Tier --

    def put(self, key: str, header: bytes, segments: Sequence[Buffer]) -> int:
        """See Tier. Not slowed."""
        return self._tier.put(key, header, segments)

    def read_header(self, key: str) -> bytes | None:
        """See Tier."""
        asked_at = self._clock()
        try:
            header = self._tier.read_header(key)
        except StoreError:
            self._carry(key, 0, asked_at)
            raise
        self._carry(key, len(header or b""), asked_at)
        return header

    def read_segments(self, key: str, offset: int, into: Sequence[memoryview]) -> None:
        """See Tier."""
        asked_at = self._clock()
        try:
            self._tier.read_segments(key, offset, into)
        except StoreError:
            self._carry(key, 0, asked_at)
            raise
        self._carry(key, sum(buffer.nbytes for buffer in into), asked_at)

    def delete(self, key: str) -> bool:
        """See Tier. Not slowed."""
        return self._tier.delete(key)

    def scan(self, prefix: str) -> Iterator[Entry]:
        """See Tier. Not slowed."""
        return self._tier.scan(prefix)

    def usage(self) -> TierUsage:
        """See Tier."""
        return self._tier.usage()

    def check(self) -> list[str]:
        """Problems of the tier behind."""
        return self._tier.check()

    # -- inside --

    def _carry(self, key: str, size: int, asked_at: float) -> None:
        """Wait until an answer of `size` bytes is through.

        Raises:
            StoreUnavailable: the link is dead.
        """
        with self._lock:
            self._reads += 1
            start = max(asked_at + self._latency_s * self._drawn(), self._free_at)
            dead, until = self._queue(size, start)
            if dead:
                until = max(asked_at, self._free_at) + self._dead_after_s
        left = until - self._clock()
        if left > 0:
            self._sleep(left)
        if dead:
            raise StoreUnavailable(f"{self.name}: {key}: the emulated link is dead")

    def _queue(self, size: int, now: float) -> tuple[bool, float]:
        """Put an answer on the link at `now`; returns whether it is dead, and when the answer is through.

        One without bytes takes no time of the link.
        """
        drawn = self._drawn()
        dead = self._parts[0][1] == 0
        while size and not dead:
            left, speed = self._parts[0]
            part = size if left is None else min(size, left)
            size -= part
            now += part / speed * drawn
            self._carried_bytes += part
            self._free_at = now
            if left is not None:
                self._parts[0] = (left - part, speed)
            if part == left:
                del self._parts[0]
                dead = size > 0 and self._parts[0][1] == 0
        return dead, now

    def _drawn(self) -> float:
        return 1 + self._jitter * (2 * self._random.random() - 1)

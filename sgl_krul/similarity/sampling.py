"""Which positions of a session are sampled: a function of namespace, session and position alone.

Position p lies in a stratum of 1000 / per_thousand tokens, and one position of every stratum is sampled,
chosen by a keyed hash of the stratum's number. So every part of the history has its share of rows, any split
of a range into turns, chunks or batches samples the same positions, and a restart does too (no `hash()`, no
seed).
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

__all__ = ["sampled_positions"]

_MAX_POSITION = 1 << 40  # keeps stratum * 1000 far inside int64


def sampled_positions(
    namespace: str, session_digest: str, start: int, end: int, per_thousand: int
) -> NDArray[np.int64]:
    """The sampled positions of [start, end), int64 [n], ascending.

    Raises:
        ValueError: a range that is none, or per_thousand outside 1 to 1000.
    """
    if not 0 <= start <= end <= _MAX_POSITION:
        raise ValueError(f"positions {start} to {end}: expected 0 <= start <= end <= 2^40")
    if not 1 <= per_thousand <= 1000:
        raise ValueError(f"per_thousand {per_thousand}: expected 1 to 1000 rows per 1,000 tokens")
    # Stratum j is [1000 j // per_thousand, 1000 (j + 1) // per_thousand); one more on each side, then cut.
    first = max(start * per_thousand // 1000 - 1, 0)
    strata = np.arange(first, end * per_thousand // 1000 + 2, dtype=np.int64)
    low = strata * 1000 // per_thousand
    width = (strata + 1) * 1000 // per_thousand - low
    hashed = _mixed(strata.astype(np.uint64), _key(namespace, session_digest)) >> np.uint64(32)
    offsets = (hashed * width.astype(np.uint64)) >> np.uint64(32)  # hash / 2^32 of the width, rounded down
    positions = low + offsets.astype(np.int64)
    chosen: NDArray[np.int64] = positions[(start <= positions) & (positions < end)]
    return chosen


def _key(namespace: str, session_digest: str) -> int:
    """64 bits of SHA-256 of both texts, each with its length before it."""
    digest = hashlib.sha256(b"krul-rows-1")
    for text in (namespace, session_digest):
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return int.from_bytes(digest.digest()[:8], "little")


def _mixed(numbers: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea and Flood 2014) of key + number, number by number. uint64 wraps around."""
    z = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))

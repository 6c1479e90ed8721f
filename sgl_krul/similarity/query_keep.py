"""Sampled queries of sessions, kept so that a pause can see what coding a session's KV does to its attention.

Of each session the first rows: those at positions below `tokens`, whose whole context is among the tokens
that a pause looks at. In 16 bits, as K and V of most pools are.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["KeptQueries", "QueryKeep"]


class KeptQueries(NamedTuple):
    """Rows of one session, RoPE applied. positions: int64 [r], ascending; q: float32 [L, r, H, D]."""

    positions: NDArray[np.int64]
    q: NDArray[np.float32]


class QueryKeep:
    """By session digest. The session not heard of for longest goes first. Thread safe.

    `budget_bytes`: of all rows together; `tokens`: positions below are kept; `rows`: of a session at most.
    """

    def __init__(self, budget_bytes: int, tokens: int, rows: int) -> None:
        if min(budget_bytes, tokens, rows) < 1:
            raise ValueError(f"{budget_bytes} bytes, {tokens} tokens, {rows} rows: expected at least 1 each")
        self._budget_bytes = budget_bytes
        self._tokens = tokens
        self._rows = rows
        self._lock = Lock()
        self._kept: OrderedDict[str, dict[int, NDArray[np.float16]]] = OrderedDict()
        self._bytes = 0

    def add(self, digest: str, positions: NDArray[np.int64], q: torch.Tensor) -> None:
        """Rows of the session: q [L, r, H, D], any float dtype, on the CPU.

        A position seen again is replaced: an edited turn has other queries there. What is no finite number in
        16 bits is left out.
        """
        wanted = [index for index, position in enumerate(positions.tolist()) if position < self._tokens]
        rows = {int(positions[index]): q[:, index].to(torch.float16).numpy() for index in wanted}
        rows = {position: row for position, row in rows.items() if np.isfinite(row).all()}
        if not rows:
            return
        with self._lock:
            kept = self._kept.setdefault(digest, {})
            self._kept.move_to_end(digest)
            for position, row in rows.items():
                if position not in kept and len(kept) >= self._rows:
                    continue
                self._bytes += row.nbytes - (kept[position].nbytes if position in kept else 0)
                kept[position] = row.copy()  # and not a view that holds all of the request's rows
            while self._bytes > self._budget_bytes:
                self._drop(next(iter(self._kept)))

    def get(self, digest: str, tokens: int) -> KeptQueries | None:
        """Rows of the session at positions below `tokens`; None when there are none."""
        with self._lock:
            kept = self._kept.get(digest)
            if kept is not None:
                self._kept.move_to_end(digest)
            rows = {} if kept is None else {position: kept[position] for position in sorted(kept)}
        positions = [position for position in rows if position < tokens]
        if not positions:
            return None
        q: Any = np.stack([rows[position] for position in positions], axis=1)
        return KeptQueries(np.array(positions, np.int64), q.astype(np.float32))

    def forget(self, digest: str) -> None:
        """The session is deleted."""
        with self._lock:
            if digest in self._kept:
                self._drop(digest)

    def clear(self) -> None:
        """The weights changed."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0

    def check(self) -> list[str]:
        """Problems found; empty when sound."""
        with self._lock:
            held = sum(row.nbytes for kept in self._kept.values() for row in kept.values())
            if held != self._bytes or held > self._budget_bytes or not all(self._kept.values()):
                return [f"queries: {held} bytes, counted {self._bytes}, of {self._budget_bytes} at most"]
            return []

    def _drop(self, digest: str) -> None:
        self._bytes -= sum(row.nbytes for row in self._kept.pop(digest).values())

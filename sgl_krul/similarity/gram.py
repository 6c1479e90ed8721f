"""What a session's attention rows say of its layers: an L x L Gram matrix and two vectors of mass.

Krul (arXiv 2507.08045) compares layers by the Euclidean distance of their flattened attention matrices, and
calls a layer I-R when its attention lies on the first and the last 10% of the tokens. A matrix has a row for
every query, and both measures are sums over rows; so no matrix is kept, and any split of the rows gives the
same sums. With R [L, p + 1] the rows of all layers for the query at position p:

    G += R R^T                                     Gram matrix of the stacked rows, float64 [L, L]
    ||A_i - A_j||_F = sqrt(G_ii + G_jj - 2 G_ij)   distance of layers i and j
    first += R[:, :m].sum(1)   last += R[:, -m:].sum(1)   m = max(1, ceil(.1 (p + 1)))

Everything is summed in float64: a distance is a small difference of large sums. What is left of it is exact
to about 1e-8 of the layers' own norms, below which a distance is noise.

On the wire the state is little-endian: magic "KRSM", version u16, windows u16, layers u32, rows u64,
dropped u64, the upper triangle of the Gram row by row, first, last (float64 each), xxh3_64 of all before it.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from sgl_krul.errors import Corrupt

__all__ = ["MAX_LAYERS", "Floats", "Similarity", "Windows", "encoded_bytes"]

Floats = NDArray[np.float64]

MAX_LAYERS = 4096
_MAGIC = b"KRSM"
_VERSION = 1
_HEADER = struct.Struct("<4sHHIQQ")
_CHECKSUM = struct.Struct("<Q")
_MAX_ROWS = 1 << 48
# A row comes from a softmax in float32, so its sum is 1 to about 1e-6. A state past this slack is damaged.
_SLACK = 1e-4
# Keys of all layers that are widened to float64 at once: 480 KiB for 30 layers, inside a core's L2.
_COLUMNS = 2048


class Windows(StrEnum):
    """Which keys count as the first and the last 10%: of the row's own context, or of the whole history."""

    relative = "relative"
    absolute = "absolute"


_WINDOWS = tuple(Windows)


class Similarity:
    """Sums over the attention rows of one session. One thread at a time; small: 8 (L^2 + 2 L) bytes.

    `gram` float64 [L, L], symmetric; `first`, `last` float64 [L]; `rows`: how many are in the sums;
    `dropped`: how many were planned and never seen; `windows`: what `first` and `last` are measured on.

    Raises:
        ValueError: layers out of range.
    """

    def __init__(self, layers: int, windows: Windows = Windows.relative) -> None:
        if not 1 <= layers <= MAX_LAYERS:
            raise ValueError(f"layers {layers}: expected 1 to {MAX_LAYERS}")
        self.windows = Windows(windows)
        self.gram: Floats = np.zeros((layers, layers))
        self.first: Floats = np.zeros(layers)
        self.last: Floats = np.zeros(layers)
        self.rows = 0
        self.dropped = 0

    @property
    def layers(self) -> int:
        """L."""
        return len(self.first)

    @property
    def dropped_share(self) -> float:
        """Dropped rows of all planned ones; 0 when none was planned."""
        planned = self.rows + self.dropped
        return self.dropped / planned if planned else 0.0

    def add(self, rows: torch.Tensor, positions: torch.Tensor, *, history: int | None = None) -> None:
        """Add queries that all layers saw.

        rows: float32 [L, r, n], each over the keys 0..n-1; of a row at position p only the first p + 1 are
        read. positions: int64 [r], below n. `history`: tokens of the session by now, at least n; only
        absolute windows ask for it. A row keeps the window of the history as it was when the row was added.

        Raises:
            ValueError: shapes that do not fit, a position outside its row, no history where it is needed, a
                value that is not finite (one NaN would spoil the session for good). Nothing was added.
        """
        at = self._positions(rows, positions)
        length = self._history(rows.shape[2], history)
        total = torch.zeros((self.layers, self.layers), dtype=torch.float64, device=rows.device)
        first, last = torch.zeros((2, self.layers), dtype=torch.float64, device=rows.device)
        for index, position in enumerate(at):
            row = rows[:, index]
            for start in range(0, position + 1, _COLUMNS):
                part = row[:, start : min(start + _COLUMNS, position + 1)].double()
                total.addmm_(part, part.T)
            head, tail = _window(position, length)
            first += row[:, :head].sum(1, dtype=torch.float64)
            last += row[:, tail : position + 1].sum(1, dtype=torch.float64)
        upper = np.triu(total.cpu().numpy())
        if not np.isfinite(upper).all():
            raise ValueError("rows have values that are not finite")
        self.gram += (
            upper + np.triu(upper, 1).T
        )  # bitwise symmetric, whatever order the product was summed in
        self.first += first.cpu().numpy()
        self.last += last.cpu().numpy()
        self.rows += len(at)

    def drop(self, rows: int) -> None:
        """Count planned rows that will never be seen. ValueError for less than 0."""
        if rows < 0:
            raise ValueError(f"{rows} dropped rows: expected 0 or more")
        self.dropped += rows

    def merge(self, other: Similarity) -> None:
        """Add the sums of other rows. ValueError unless both have the same layers and windows."""
        if (other.layers, other.windows) != (self.layers, self.windows):
            raise ValueError(
                f"sums of {other.layers} layers with {other.windows} windows: expected {self.layers} layers "
                f"with {self.windows} windows"
            )
        self.gram += other.gram
        self.first += other.first
        self.last += other.last
        self.rows += other.rows
        self.dropped += other.dropped

    def distances(self) -> Floats:
        """||A_i - A_j||_F of every two layers over the rows seen: float64 [L, L], symmetric, diagonal 0.

        Raises:
            ValueError: no rows yet; all layers would look alike.
        """
        self._expect_rows()
        norms = np.diag(self.gram)
        squares = norms[:, None] + norms[None, :] - 2 * self.gram
        np.fill_diagonal(squares, 0.0)
        # Rounding may take the square of a distance that is 0 a little below it.
        distances: Floats = np.sqrt(np.maximum(squares, 0.0))
        return distances

    def mass(self) -> Floats:
        """I-R mass of every layer: mean over the rows of the mass on the two windows, float64 [L], 0 to 1.

        Raises:
            ValueError: no rows yet.
        """
        self._expect_rows()
        mass: Floats = (self.first + self.last) / self.rows
        return mass

    def encode(self) -> bytes:
        """The wire form, `encoded_bytes(layers)` long. ValueError for a state that `decode` would refuse."""
        problem = self._problem()
        if problem:
            raise ValueError(f"similarity: {problem}")
        head = _HEADER.pack(
            _MAGIC, _VERSION, _WINDOWS.index(self.windows), self.layers, self.rows, self.dropped
        )
        numbers = (self.gram[np.triu_indices(self.layers)], self.first, self.last)
        body = head + b"".join(part.astype("<f8").tobytes() for part in numbers)
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def decode(cls, data: bytes) -> Similarity:
        """The state of bytes from a store.

        Raises:
            Corrupt: "version": another format version; "checksum": changed bytes; "length": anything else
                that is not exactly what `encode` gives for some rows of attention.
        """
        if len(data) < _HEADER.size:
            raise Corrupt("length", f"similarity of {len(data)} bytes, at least {_HEADER.size} expected")
        magic, version, windows, layers, rows, dropped = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            raise Corrupt("length", f"similarity begins with {magic!r}, expected {_MAGIC!r}")
        if version != _VERSION:
            raise Corrupt("version", f"similarity version {version}, expected {_VERSION}")
        if not 1 <= layers <= MAX_LAYERS or windows >= len(_WINDOWS):
            raise Corrupt("length", f"similarity of {layers} layers, windows {windows}")
        if len(data) != encoded_bytes(layers):
            raise Corrupt(
                "length",
                f"similarity of {layers} layers in {len(data)} bytes, expected {encoded_bytes(layers)}",
            )
        body = memoryview(data)[: -_CHECKSUM.size]
        (checksum,) = _CHECKSUM.unpack_from(data, len(body))
        found = xxhash.xxh3_64_intdigest(body)
        if checksum != found:
            raise Corrupt("checksum", f"similarity has {found:016x}, expected {checksum:016x}")
        state = cls(layers, _WINDOWS[windows])
        state._fill(np.frombuffer(body, dtype="<f8", offset=_HEADER.size), rows, dropped)
        problem = state._problem()
        if problem:
            raise Corrupt("length", f"similarity: {problem}")
        return state

    def check(self) -> list[str]:
        """Problems found; empty when sound."""
        problem = self._problem()
        return [problem] if problem else []

    # -- inside --

    def _fill(self, numbers: NDArray[Any], rows: int, dropped: int) -> None:
        upper = numbers.size - 2 * self.layers
        self.gram[np.triu_indices(self.layers)] = numbers[:upper]
        self.gram += np.triu(self.gram, 1).T
        self.first[:] = numbers[upper : upper + self.layers]
        self.last[:] = numbers[upper + self.layers :]
        self.rows, self.dropped = rows, dropped

    def _positions(self, rows: torch.Tensor, positions: torch.Tensor) -> list[int]:
        if rows.dtype != torch.float32 or rows.ndim != 3 or rows.shape[0] != self.layers:
            raise ValueError(
                f"rows {rows.dtype} {tuple(rows.shape)}: expected float32 [{self.layers}, rows, keys]"
            )
        if positions.dtype != torch.int64 or tuple(positions.shape) != (rows.shape[1],):
            raise ValueError(
                f"positions {positions.dtype} {tuple(positions.shape)}: expected int64 [{rows.shape[1]}]"
            )
        at: list[int] = positions.tolist()
        if at and not 0 <= min(at) <= max(at) < rows.shape[2]:
            raise ValueError(f"positions {min(at)} to {max(at)}: expected 0 to {rows.shape[2] - 1}")
        return at

    def _history(self, keys: int, history: int | None) -> int | None:
        if self.windows is Windows.relative:
            return None
        if history is None or history < keys:
            raise ValueError(f"history {history}: absolute windows need its tokens, at least {keys}")
        return history

    def _expect_rows(self) -> None:
        if self.rows < 1:
            raise ValueError("no rows seen yet: look at `rows` first")

    def _problem(self) -> str | None:
        """What is wrong with the numbers: sums of rows of attention obey all of this."""
        if not (0 <= self.rows <= _MAX_ROWS and 0 <= self.dropped <= _MAX_ROWS):
            return f"{self.rows} rows, {self.dropped} dropped: expected 0 to 2^48"
        for name, values in (("gram", self.gram), ("first", self.first), ("last", self.last)):
            if not np.isfinite(values).all():
                return f"{name} has a value that is not finite"
            if (values < 0).any():
                return f"{name} has a negative value"
        most = self.rows * (1 + _SLACK)
        if max(self.gram.max(), (self.first + self.last).max()) > most:
            return f"a sum is larger than {self.rows} rows can give"
        if not np.array_equal(self.gram, self.gram.T):
            return "gram is not symmetric"
        norms = np.sqrt(np.diag(self.gram))
        if (self.gram > np.outer(norms, norms) * (1 + 1e-9)).any():  # Cauchy-Schwarz
            return "gram has two layers closer than a layer is to itself"
        return None


def encoded_bytes(layers: int) -> int:
    """Bytes of the wire form."""
    return _HEADER.size + 8 * (layers * (layers + 1) // 2 + 2 * layers) + _CHECKSUM.size


def _window(position: int, history: int | None) -> tuple[int, int]:
    """Keys [0, head) and [tail, position] of a row. No key counts twice; either may be empty of keys.

    Relative (history None): 10% of the row's context, rounded up, on each side. Absolute: 10% of the history,
    as far as the row reaches.
    """
    length = position + 1 if history is None else history
    size = (length + 9) // 10  # ceil(.1 length) in integers: .1 * 30 is above 3 in floating point
    head = min(size, position + 1)
    return head, min(max(size, length - size), position + 1)

"""The two streams of a restore, and where they meet: which cell is computed, which is loaded, and by whom.

A session is a grid of cells (chunk, layer). Compute goes from the front: block by block, each through layers
0, 1, 2, ...; causality lets it, whatever has been loaded. Loads go from the end: the last chunk first, in it
the deepest layers first. So neither needs to know how fast the other is: they meet, and in the chunk where
they do, the layers above were computed and those below loaded (the staircase of Krul's bubble-free scheduler,
found as it happens and not frozen in advance). A link that dies is the case in which compute gets to the end.

Fixed courses (Krul's pyramid, half and half) take the same road: their cells are reserved for one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Claim", "Course", "Grid", "Slice", "Streams", "View"]

View = NDArray[np.int8]  # [chunks, layers] of LOST, FREE, COMING or PLACED

LOST, FREE, COMING, PLACED = -1, 0, 1, 2  # what a view shows; the smaller, the further from done
_WRITING, _COMPUTING = 3, 4  # inside only; a view shows COMING

_PATIENCE_S = 0.1  # a claim that takes longer than this, and than others took, may be computed instead
_PATIENCE_FACTOR = 4.0
_WEIGHT = 0.3  # of the newest in the averages of claims and slices
_GUIDED = 8  # a claim takes at most this part of what is left: small claims at the end, where streams meet


class Slice(NamedTuple):
    """Tokens [start, end) through one layer. `kv_only`: no token of them goes on to the next."""

    first_chunk: int
    chunks: int
    start: int
    end: int
    layer: int
    kv_only: bool


class Claim(NamedTuple):
    """Layers [first_layer, first_layer + layers) of a chunk, for one loader."""

    chunk: int
    first_layer: int
    layers: int


@dataclass(frozen=True)
class Grid:
    """What is to be restored. `ends`: the token behind each chunk. `start`: tokens before it are in place.

    `segment_bytes` [chunks, layers]; 0: it lies nowhere and must be computed. `whole`: chunks that cost a
    loader next to nothing, claimed in one piece.
    """

    ends: Sequence[int]
    layers: int
    start: int
    segment_bytes: NDArray[np.int64]
    whole: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Course:
    """What compute takes part in. `depths` [chunks]: the leading layers of each that the plan gives to it.

    `adaptive`: the plan is a guess, the streams meet where they meet; else it is the law. `computes`: from
    the start, not only when there is a hole.
    """

    depths: Sequence[int]
    adaptive: bool = True
    computes: bool = True
    can_compute: bool = True


class Streams:
    """The state of every cell. Loaders call `claim`, `may_write`, `loaded`, `lost` from their threads; the
    scheduler's thread calls `view`, `next_slice` and `computed`. Nothing here waits.

    Where several ranks restore together, `next_slice`, `finished` and `placed_tokens` are given the minimum
    of their views, so all of them take the same slice: what it is follows from that view, the grid and the
    course alone. A loader that is writing a cell while it is computed writes K and V of the same
    tokens: equal but for rounding, so either will do.
    """

    def __init__(
        self, grid: Grid, course: Course, *, max_slice_tokens: int, clock: Callable[[], float]
    ) -> None:
        chunks = len(grid.ends)
        if grid.segment_bytes.shape != (chunks, grid.layers) or len(course.depths) != chunks:
            raise ValueError(
                f"segment_bytes of shape {grid.segment_bytes.shape} and {len(course.depths)} depths: "
                f"expected ({chunks}, {grid.layers}) and {chunks}"
            )
        self.grid = grid
        self._clock = clock
        self._max_slice_tokens = max_slice_tokens
        self._can_compute = course.can_compute
        self._computes = course.computes and course.can_compute
        self._lock = Lock()
        self._stopped = False
        self._running: Slice | None = None
        self._block: tuple[int, int, int] | None = None  # first chunk, chunks, next layer
        self._begins = np.array([0, *grid.ends[:-1]], np.int64)
        self._state = np.where(grid.segment_bytes > 0, FREE, LOST).astype(np.int8)
        self._state[np.asarray(grid.ends) <= grid.start] = PLACED
        self._made = np.zeros(self._state.shape, np.bool_)  # by compute
        self._claimed_at = np.zeros(self._state.shape)
        self._claim_s = _PATIENCE_S
        self._landed = False
        self._computed_at: float | None = None
        self._cell_s = 0.0  # of compute; 0: not known yet
        planned = np.arange(grid.layers) < np.asarray(course.depths)[:, None]
        if course.adaptive:  # of the plan only this is taken: layer 0 costs compute next to nothing
            planned &= np.asarray(course.depths)[:, None] == 1
        self._reserved = planned & (self._state != PLACED) if self._computes else np.zeros_like(planned)
        self._adaptive = course.adaptive

    # ---- loaders ----

    def claim(self, max_bytes: int) -> Claim | None:
        """The next segments for a loader: contiguous layers of one chunk, of at most `max_bytes`, at least
        one. None: nothing is left that a loader may bring. A claim of no layers: nothing now, ask again.
        """
        with self._lock:
            if self._stopped:
                return None
            claimable = (self._state == FREE) & ~self._reserved
            if claimable.any() and self._compute_is_sooner():
                claimable[[chunk not in self.grid.whole for chunk in range(len(claimable))]] = False
                if not claimable.any():
                    return Claim(0, 0, 0)
            left = int(self.grid.segment_bytes[claimable].sum())
            budget = min(max_bytes, max(1, left // _GUIDED))
            for chunk in self._load_order():
                (layers,) = np.nonzero(claimable[chunk])
                if len(layers):
                    first = self._run_down(chunk, claimable[chunk], int(layers[-1]), budget)
                    run = slice(first, int(layers[-1]) + 1)
                    self._state[chunk, run] = COMING
                    self._claimed_at[chunk, run] = self._clock()
                    return Claim(chunk, first, run.stop - first)
            return None

    def join(self, chunk: int, layers: Sequence[int]) -> list[int]:
        """Of these layers, those that a loader may bring beside its claim: they are claimed from now on.

        Others have them, or will. For layers whose bytes are needed anyway, to decode claimed ones.
        """
        with self._lock:
            free = [n for n in layers if self._state[chunk, n] == FREE and not self._reserved[chunk, n]]
            if self._stopped or not free:
                return []
            self._state[chunk, free] = COMING
            self._claimed_at[chunk, free] = self._clock()
            return free

    def may_write(self, chunk: int, layer: int) -> bool:
        """Asked right before a claimed cell is written. True: `loaded` must follow. False: drop the bytes."""
        with self._lock:
            if self._stopped or self._state[chunk, layer] != COMING:
                return False
            self._state[chunk, layer] = _WRITING
            return True

    def loaded(self, chunk: int, layer: int) -> None:
        """The cell's bytes have landed."""
        with self._lock:
            if self._state[chunk, layer] == _WRITING:
                self._state[chunk, layer] = PLACED
            self._claim_s += _WEIGHT * (self._clock() - self._claimed_at[chunk, layer] - self._claim_s)
            self._landed = True

    def lost(self, chunk: int) -> None:
        """No tier has the chunk intact: what is not in place of it must be computed."""
        with self._lock:
            cells = self._state[chunk]
            cells[(cells == FREE) | (cells == COMING)] = LOST

    # ---- the scheduler's thread ----

    def view(self) -> View:
        """The cells as they are. A claim that takes much longer than others did counts as free."""
        with self._lock:
            stale = self._claimed_at < self._clock() - max(_PATIENCE_S, _PATIENCE_FACTOR * self._claim_s)
            view = np.minimum(self._state, PLACED)
            view[(self._state == COMING) & stale] = FREE
            view[self._state > PLACED] = COMING
            return view

    def start_computing(self) -> None:
        """Let compute take part from now on, if it can."""
        with self._lock:
            self._computes = self._can_compute

    @property
    def can_compute(self) -> bool:
        """False once computing has failed, or where it is refused."""
        return self._can_compute

    def may_compute(self, agreed: View) -> bool:
        """Whether compute has anything left to do when nobody loads any more."""
        return (
            self._can_compute and bool((agreed != PLACED).any()) and (self._adaptive or self._wants(agreed))
        )

    def _wants(self, agreed: View) -> bool:
        return bool(((agreed == LOST) | (agreed != PLACED) & self._reserved).any())

    def next_slice(self, agreed: View) -> Slice | None:
        """The next piece for compute, now its own; `computed` must follow. None: nothing to compute now."""
        with self._lock:
            if self._stopped or not self._can_compute:
                return None
            if not self._computes and not (agreed == LOST).any():
                return None
            wanted = (agreed == LOST) | (agreed == FREE) & (self._adaptive | self._reserved)
            piece = (
                self._sweep(wanted & self._reserved)
                or self._advance(wanted, agreed)
                or self._begin(wanted, agreed)
            )
            if piece is not None:
                cells = self._state[_cells_of(piece)]
                cells[cells != _WRITING] = _COMPUTING
            self._running = piece
            return piece

    def computed(self, piece: Slice) -> None:
        """The slice is in place."""
        with self._lock:
            cells = self._state[_cells_of(piece)]
            self._made[_cells_of(piece)] |= cells == _COMPUTING
            cells[cells == _COMPUTING] = PLACED
            self._running = None
            self._learn_pace(piece)

    def compute_failed(self) -> None:
        """There will be no more computing: loads have to bring what is left, up to the first hole.

        The cells of a slice under way hold anything now, whoever wrote them.
        """
        with self._lock:
            self._can_compute = self._computes = False
            self._reserved[:] = False
            if self._running is not None:
                cells = _cells_of(self._running)
                self._state[cells] = np.where(self.grid.segment_bytes[cells] > 0, FREE, LOST)
                self._running = None

    def stop(self) -> None:
        """No further claim, write or slice. A write that was begun ends."""
        with self._lock:
            self._stopped = True

    def finished(self, agreed: View) -> bool:
        """Whether all is in place that can be."""
        return bool((agreed[: self._target(agreed)] == PLACED).all())

    def placed_tokens(self, agreed: View) -> int:
        """Leading tokens that are in place in all layers, those before `start` included."""
        done = (agreed == PLACED).all(axis=1)
        chunks = len(done) if done.all() else int(np.argmin(done))
        return max(self.grid.start, int(self.grid.ends[chunks - 1]) if chunks else 0)

    @property
    def staircase(self) -> tuple[int, ...]:
        """R_l, the tokens before which layer l was computed: the end of the last chunk that went so deep."""
        ends = np.asarray(self.grid.ends)
        widths = [max(ends[column], default=self.grid.start) for column in self._made.T]
        return tuple(np.maximum.accumulate(widths[::-1])[::-1].tolist())

    def check(self) -> list[str]:
        """Problems found once loaders and scheduler are done with it: empty when sound."""
        names = {COMING: "claimed", _WRITING: "being written", _COMPUTING: "being computed"}
        with self._lock:
            return [
                f"{count} cells are {name}"
                for state, name in names.items()
                if (count := int((self._state == state).sum())) and not self._stopped
            ]

    # ---- inside, with the lock ----

    def _target(self, agreed: View) -> int:
        """Chunks to bring: all, or those before the first hole where nothing can be computed."""
        (holes,) = np.nonzero((agreed == LOST).any(axis=1))
        return len(self.grid.ends) if self._can_compute or not len(holes) else int(holes[0])

    def _learn_pace(self, piece: Slice) -> None:
        """From one slice to the next: what else the scheduler does between them slows compute, too."""
        now, before = self._clock(), self._computed_at
        self._computed_at = now
        if before is not None and not piece.kv_only:
            cell_s = (now - before) / piece.chunks
            self._cell_s += (_WEIGHT if self._cell_s else 1.0) * (cell_s - self._cell_s)

    def _compute_is_sooner(self) -> bool:
        """Whether compute makes all that is left in less time than a claim takes, and would wait for it.

        Not if it has made nothing for so long: something keeps it.
        """
        if not (self._adaptive and self._computes and self._landed and self._cell_s):
            return False
        if self._computed_at is None or self._clock() - self._computed_at > self._claim_s:
            return False
        left = int(((self._state == FREE) | (self._state == LOST)).sum())
        return left * self._cell_s < self._claim_s

    def _load_order(self) -> Sequence[int]:
        """Backwards; but what lies before a hole first, since computing through it needs that.

        Where nothing can be computed, forwards: then whatever is there when time is up can be used.
        """
        if not self._can_compute:
            return range(self._target(self._state))
        order: list[int] = []
        (holes,) = np.nonzero((self._state == LOST).all(axis=1))
        begin = 0
        for end in [*holes.tolist(), len(self.grid.ends)]:
            order += range(end - 1, begin - 1, -1)
            begin = end
        return order

    def _run_down(self, chunk: int, claimable: NDArray[np.bool_], last: int, budget: int) -> int:
        """First layer of the run that ends at `last` and stays within the budget."""
        first = last
        size = int(self.grid.segment_bytes[chunk, last])
        while first > 0 and claimable[first - 1]:
            size += int(self.grid.segment_bytes[chunk, first - 1])
            if size > budget and chunk not in self.grid.whole:
                break
            first -= 1
        return first

    def _sweep(self, wanted: NDArray[np.bool_]) -> Slice | None:
        """Chunks of which compute is to make layer 0 alone: a function of the token ids, cheap to make."""
        alone = wanted[:, 0] & ~wanted[:, 1:].any(axis=1)
        (chunks,) = np.nonzero(alone)
        if not len(chunks) or self._block is not None:
            return None
        first = int(chunks[0])
        return self._slice(first, self._span(first, alone), 0, kv_only=True)

    def _advance(self, wanted: NDArray[np.bool_], agreed: View) -> Slice | None:
        """The current block through its next layer: without the chunks whose deeper layers others have."""
        if self._block is None:
            return None
        first, chunks, layer = self._block
        needing = [n for n in range(chunks) if wanted[first + n, layer:].any()]
        if layer == self.grid.layers or not needing:
            self._block = None
            coming = layer < self.grid.layers and bool(
                (agreed[first : first + chunks, layer] == COMING).any()
            )
            # The last cell of all that loads are about to bring: K and V alone are made sooner than it comes.
            if coming and self._adaptive and not wanted.any():
                return self._slice(first, chunks, layer, kv_only=True)
            return None
        chunks = needing[-1] + 1
        deeper = bool(wanted[first : first + chunks, layer + 1 :].any())
        self._block = (first, chunks, layer + 1) if deeper else None  # of K and V alone nothing can go on
        return self._slice(first, chunks, layer, kv_only=not deeper)

    def _begin(self, wanted: NDArray[np.bool_], agreed: View) -> Slice | None:
        """A new block at the first chunk that is not complete, if compute has anything to do there."""
        (incomplete,) = np.nonzero(~(agreed == PLACED).all(axis=1))
        if not len(incomplete):
            return None
        first = int(incomplete[0])
        needing: Any = wanted.any(axis=1)
        if not needing[first]:
            return None
        self._block = (first, self._span(first, needing), 0)
        return self._advance(wanted, agreed)

    def _span(self, first: int, among: NDArray[np.bool_]) -> int:
        """How many consecutive chunks from `first` on are in `among` and fit one slice; at least one."""
        begin = max(int(self._begins[first]), self.grid.start)
        count = 1
        while (
            first + count < len(among)
            and among[first + count]
            and self.grid.ends[first + count] - begin <= self._max_slice_tokens
        ):
            count += 1
        return count

    def _slice(self, first: int, chunks: int, layer: int, *, kv_only: bool) -> Slice:
        start = max(int(self._begins[first]), self.grid.start)
        return Slice(first, chunks, start, int(self.grid.ends[first + chunks - 1]), layer, kv_only)


def _cells_of(piece: Slice) -> tuple[slice, int]:
    """The chunks of a slice, in its layer."""
    return slice(piece.first_chunk, piece.first_chunk + piece.chunks), piece.layer

"""Restores to the device: slots are reserved, two streams fill them, the pages go into the radix tree.

Everything here runs in the thread that calls (the scheduler's) and returns at once, but for the loaders,
which have threads of their own. A round of the scheduler computes one slice, or several short ones within
`max_step_s`: other chats wait no longer than that.
With several ranks, what a step does follows from the least of what they all see (`Agreement`): the same
slices in the same order, the same tokens in the tree.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from sgl_krul.restore.cost import ComputeSample, LandSample, LoadSample
from sgl_krul.restore.loader import SegmentLoader, Target
from sgl_krul.restore.pipeline import Pin, RestoreReport
from sgl_krul.restore.planner import RestorePlan
from sgl_krul.restore.streams import COMING, Course, Grid, Slice, Streams, View
from sgl_krul.restore.timeline import Span, Timeline
from sgl_krul.service.agreement import Agreement
from sgl_krul.service.prepared import Prepared

__all__ = ["Device", "DeviceRestore", "DeviceRestores", "Reservation"]

logger = logging.getLogger(__name__)

_LATE_FACTOR = 1.5  # a plan that loads only and takes so much longer is given up for both streams
_LATE_S = 0.05


class Reservation(Protocol):
    """Device slots for the leading tokens of a session, of which the first `start` are there already."""

    @property
    def start(self) -> int:
        """Leading tokens that need neither loading nor computing."""
        ...

    @property
    def target(self) -> Target:
        """Where loaders write."""
        ...

    @property
    def revoked(self) -> bool:
        """True once the device was flushed: the slots are not ours any more."""
        ...

    def compute(self, start: int, end: int, layer: int, *, kv_only: bool) -> None:
        """Run the tokens [start, end) through one layer; layer l > 0 goes on from l - 1 of the same start.

        Whatever it raises, the slots hold anything then.
        """
        ...

    def drop_blocks(self) -> None:
        """Blocks that are under way go no further."""
        ...

    def keep(self, tokens: int) -> Pin:
        """Put the first `tokens` into the tree, give the other slots back, and pin what is there."""
        ...

    def give_back(self) -> None:
        """Give all slots back. Writes under way end first."""
        ...


class Device(Protocol):
    """Where slots come from: the engine."""

    @property
    def refuses_recompute(self) -> str:
        """Why this model can't be recomputed; "" if it can."""
        ...

    def calibration(self) -> Iterator[ComputeSample]:
        """Run slices of all sizes, one each time it is asked."""
        ...

    def on_device(self, prepared: Prepared) -> int:
        """Leading tokens of the session that are on the device now."""
        ...

    def reserve(self, prepared: Prepared) -> Reservation | None:
        """Slots for all tokens of `prepared.chunks`; None when there is no room."""
        ...


@dataclass(frozen=True)
class Settings:
    """Bounds of a restore. `max_step_s`: how long one step may compute, if other slices follow at once."""

    max_slice_tokens: int
    max_step_s: float
    clock: Callable[[], float]
    ranks: Agreement


class DeviceRestore:
    """One session on its way to the device. `future` gets the report: it is there, or as far as it came.

    `adaptive`: the plan is where the streams should meet; else it is the law.
    """

    def __init__(
        self,
        prepared: Prepared,
        reservation: Reservation,
        plan: RestorePlan,
        settings: Settings,
        *,
        deadline: float,
        can_compute: bool,
        adaptive: bool,
    ) -> None:
        self.prepared = prepared
        self.plan = plan
        self.timeline = Timeline()
        self.future: Future[RestoreReport] = Future()
        self.compute_samples: list[ComputeSample] = []
        self.computed_cells = 0  # tokens times layers
        self._reservation = reservation
        self._settings = settings
        self._deadline = deadline
        self._began = settings.clock()
        self._loader: SegmentLoader | None = None
        self._compute_failed = False
        self._parts: deque[_Part] = deque()  # of the slice under way, which a large chunk makes too long
        ends = np.cumsum([source.ref.tokens for source in prepared.chunks]).tolist()
        stairs = np.asarray(plan.staircase)
        grid = Grid(
            ends,
            prepared.layout.layers,
            reservation.start,
            prepared.segment_bytes(),
            frozenset(n for n, source in enumerate(prepared.chunks) if source.pinned is not None),
        )
        course = Course(
            [int((stairs >= end).sum()) for end in ends],
            adaptive=adaptive,
            computes=plan.recomputes,
            can_compute=can_compute,
        )
        self._joins = adaptive and can_compute and not plan.recomputes
        self.streams = Streams(grid, course, max_slice_tokens=settings.max_slice_tokens, clock=settings.clock)

    def clock(self) -> float:
        """Seconds since the restore began."""
        return self._settings.clock() - self._began

    def start(self, make_loader: Callable[[DeviceRestore, Target], SegmentLoader]) -> None:
        """Begin to load."""
        self._loader = make_loader(self, self._reservation.target)
        self._loader.start()

    @property
    def load_samples(self) -> list[LoadSample]:
        """What loading took."""
        return [] if self._loader is None else self._loader.samples

    @property
    def land_samples(self) -> list[LandSample]:
        """What landing took."""
        return [] if self._loader is None else self._loader.land_samples

    def step(self, *, may_compute: bool = True) -> bool:
        """Compute a slice if there is one to compute; end if all is done. True if it computed."""
        if self._reservation.revoked:
            self._end(0, ("cancelled", "the device was flushed meanwhile"))
            return False
        view, in_time, loads_over = self._agreed()
        finished = self.streams.finished(view)
        if in_time and not finished and may_compute and self._next_part(view):
            return self._compute(self._parts.popleft())
        if finished or not in_time or (loads_over and not self._more_to_compute(view)):
            why = ("", "") if in_time else ("deadline", "deadline")
            self._end(self.streams.placed_tokens(view), why)
        return False

    def _next_part(self, view: View) -> bool:
        """Whether there is something to compute."""
        if not self._parts:
            piece = self.streams.next_slice(view)
            self._parts = _parts(piece, self._settings.max_slice_tokens)
            if piece is not None and piece.layer == 0:
                self._reservation.drop_blocks()
        return bool(self._parts)

    def _more_to_compute(self, view: View) -> bool:
        """Nobody loads any more: whether compute has something, now or once a claim counts as given up."""
        return bool(self._parts) or self.streams.may_compute(view)

    def cancel(self, why: str) -> None:
        """Give every slot back; the report has no tokens."""
        self._end(0, ("cancelled", why))

    def _agreed(self) -> tuple[View, bool, bool]:
        """What all ranks see: the cells, whether there is time, whether no rank loads any more.

        A load that is late on one, or compute that failed on one, is so on all.
        """
        now = self._settings.clock()
        loads_over = self._loader is None or self._loader.done.done()
        late = self._joins and now - self._began > _LATE_FACTOR * self.plan.load_s + _LATE_S
        view = self.streams.view()
        flags = [now <= self._deadline, loads_over, not late, not self._compute_failed]
        if self._settings.ranks.size > 1:
            agreed = self._settings.ranks.agree_min([*view.reshape(-1).tolist(), *map(int, flags)])
            view = np.array(agreed[:-4], np.int8).reshape(view.shape)
            flags = list(map(bool, agreed[-4:]))
        in_time, loads_over, early, sound = flags
        if not early:
            self.streams.start_computing()
        if not sound and self.streams.can_compute:
            self._parts.clear()
            self.streams.compute_failed()
            return np.minimum(view, COMING), True, False  # the next round sees what that has changed
        return view, in_time, loads_over

    def _compute(self, part: _Part) -> bool:
        piece, start, end = part
        begun = self._settings.clock()
        try:
            self._reservation.compute(start, end, piece.layer, kv_only=piece.kv_only)
        except Exception:  # the model's own code: whatever it was, the session is loaded instead
            logger.exception("krul: recompute failed in layer %d; the rest is loaded", piece.layer)
            self._compute_failed = True  # the next step tells the other ranks, and the streams
            return False
        if not self._parts:
            self.streams.computed(piece)
        ended, tokens = self._settings.clock(), end - start
        self.computed_cells += tokens
        self.compute_samples.append(ComputeSample(start, tokens, piece.kv_only, ended - begun))
        self.timeline.add(
            Span("compute", begun - self._began, ended - self._began, start, tokens, piece.layer, 1)
        )
        return True

    def _end(self, tokens: int, why: tuple[str, str]) -> None:
        """The report; slots that are not kept are given back."""
        if self.future.done():
            return
        self.streams.stop()
        report = self.prepared.report
        if self._loader is not None:
            self._loader.cancel()
            self._loader.enter(report)
        if why[0]:
            report.end(*why)
        elif tokens < self.streams.grid.ends[-1]:  # and the loader knows of no lost chunk
            report.end("recompute", "recompute is refused or failed; the server's log says why")
        self.timeline.close(self._settings.clock() - self._began, self.streams.staircase)
        try:
            if tokens > 0:
                report.pins.append(self._reservation.keep(tokens))
                report.tokens = tokens
            else:
                self._reservation.give_back()
        except Exception as error:  # a bug; it must not end the scheduler, and whoever asked must hear of it
            logger.exception("krul: a restore could not be ended")
            self.future.set_exception(error)
            return
        self.future.set_result(report)


class _Part(NamedTuple):
    """Tokens [start, end) of a slice."""

    piece: Slice
    start: int
    end: int


def _parts(piece: Slice | None, max_tokens: int) -> deque[_Part]:
    """A slice in parts of at most `max_tokens`, in order: each needs those before it in its layer."""
    if piece is None:
        return deque()
    starts = range(piece.start, piece.end, max_tokens)
    return deque(_Part(piece, start, min(start + max_tokens, piece.end)) for start in starts)


class DeviceRestores:
    """The restores under way, oldest first."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.others_run: Callable[[], bool] = lambda: False  # the engine knows whether anybody else computes
        self._running: list[DeviceRestore] = []
        self.computing = False  # the last step computed: another slice may follow at once

    def __bool__(self) -> bool:
        return bool(self._running)

    def begin(self, restore: DeviceRestore) -> None:
        """Watch it."""
        self._running.append(restore)

    def step(self) -> None:
        """One slice, so that no other chat waits longer; where none runs, several if they take no more than
        `max_step_s` together (on one rank: ranks have clocks of their own).
        """
        begun = before = self.settings.clock()
        while True:
            self.computing = False
            for restore in self._running:  # all may end, one may compute: the oldest that has something to
                self.computing |= self._step(restore)
            self._running = [restore for restore in self._running if not restore.future.done()]
            now = self.settings.clock()
            over = now + (now - before) - begun > self.settings.max_step_s
            if not self.computing or over or self.settings.ranks.size > 1 or self.others_run():
                return
            before = now

    def _step(self, restore: DeviceRestore) -> bool:
        try:
            return restore.step(may_compute=not self.computing)
        except Exception as error:  # a bug; it must not end the scheduler, nor the other restores
            logger.exception("krul: a restore failed")
            restore.cancel(f"internal error: {error!r}; the server's log has the trace")
            return False

    def give_room(self) -> bool:
        """Running requests need the slots more: give up the youngest restore. False when there is none."""
        if not self._running:
            return False
        self._running.pop().cancel("running requests needed its place on the device")
        return True

    def cancel_all(self, why: str) -> None:
        """Every slot is given back."""
        for restore in self._running:
            restore.cancel(why)
        self._running.clear()

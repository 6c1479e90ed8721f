"""`krul calibrate restore`: measure what a restore would be planned with, on the running server.

Tiers are read by a worker, from scratch objects that go afterwards; the model's slices run in the scheduler's
thread, one a step, so other chats go on meanwhile (and make the figures worse: calibrate a quiet server).
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import xxhash

from sgl_krul.errors import KrulError, SessionBusy
from sgl_krul.restore.cost import ComputeSample, LandSample, LoadSample
from sgl_krul.service.agreed import agreed
from sgl_krul.service.agreement import Agreement
from sgl_krul.service.jobs import Body, Job, Jobs, Reply
from sgl_krul.service.plans import Plans
from sgl_krul.session.record import chunk_key
from sgl_krul.store.tier import Tier
from sgl_krul.store.workers import Workers

__all__ = ["Calibration", "measure_landing", "measure_tier", "quietest"]

logger = logging.getLogger(__name__)

_SMALL_BYTES = 4 << 10
_LARGE_BYTES = 1 << 20
_OBJECTS = 8  # of a large segment each: 8 MiB written a tier
_ROUNDS = 3
_LANDINGS = 16


class Calibration:
    """One calibration at a time. Called by the scheduler's thread."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        plans: Plans,
        jobs: Jobs,
        namespace: Callable[[], str],
        in_flight: int,
        ranks: Agreement,
    ) -> None:
        self._tiers = tiers
        self._ranks = ranks
        self._plans = plans
        self._jobs = jobs
        self._namespace = namespace
        self._in_flight = in_flight
        self._worker = Workers("calibrate", 1)
        self._slices: Iterator[ComputeSample] | None = None
        self._samples: list[ComputeSample] = []
        self._computed: Future[None] | None = None

    def begin(self, reply: Reply) -> None:
        """Measure tiers, then slices; the answer has the new rates.

        Raises:
            SessionBusy: one is under way.
        """
        if self.working:
            raise SessionBusy("a calibration is under way: wait for it, it takes less than a minute")
        loads = agreed(self._worker.submit(self._measure_tiers, self._namespace()), self._ranks)
        self._computed = Future()
        problems: list[str] = []

        def loaded() -> None:
            problems.extend(loads.result())
            self._start_slices()

        def computed() -> None:
            assert self._computed is not None
            self._computed.result()
            if self._plans.can_compute and not self._samples:
                problems.append("recompute was not measured: running requests leave no room on the device")
            kept = agreed(self._worker.submit(self._keep, quietest(self._samples)), self._ranks)
            self._jobs.begin(Job("", kept, complete, reply))

        def complete() -> Body:
            self._computed = None
            return self._plans.rates() | {"problems": problems, "samples": len(self._samples)}

        self._jobs.begin(Job("", loads, self._guarded(loaded), reply))
        self._jobs.begin(Job("", agreed(self._computed, self._ranks), self._ending(computed), reply))

    def _guarded(self, step: Callable[[], None]) -> Callable[[], None]:
        """A step that fails ends the calibration: the answer is its error."""

        def run() -> None:
            try:
                step()
            except Exception as error:  # whatever it was, the caller hears it
                assert self._computed is not None
                self._computed.set_exception(error)

        return run

    def _ending(self, step: Callable[[], None]) -> Callable[[], None]:
        """A last step that fails: another calibration may begin, and the caller hears why."""

        def run() -> None:
            try:
                step()
            except BaseException:
                self._computed = None
                raise

        return run

    def _start_slices(self) -> None:
        assert self._computed is not None
        device = self._plans.device
        self._samples = []
        self._slices = None if device is None or not self._plans.can_compute else device.calibration()
        if self._slices is None:
            self._computed.set_result(None)

    def step(self) -> None:
        """One slice, if slices are due."""
        if self._slices is None or self._computed is None:
            return
        try:
            self._samples.append(next(self._slices))
        except StopIteration:
            self._slices = None
            self._computed.set_result(None)
        except Exception as error:
            self._slices = None
            self._computed.set_exception(error)

    @property
    def working(self) -> bool:
        """True from `begin` to the answer."""
        return self._computed is not None

    @property
    def computing(self) -> bool:
        """True while there is a slice to run at once."""
        return self._slices is not None

    def _keep(self, slices: Sequence[ComputeSample]) -> None:
        if slices:
            self._plans.book.forget(compute=True)
            self._plans.book.observe_compute(slices)

    def _measure_tiers(self, namespace: str) -> list[str]:
        """The problems there were. What was known of what is measured is forgotten: it counts alone."""
        samples: list[LoadSample] = []
        problems: list[str] = []
        for tier in self._tiers:
            try:
                samples += measure_tier(tier, namespace, self._in_flight)
            except KrulError as error:
                problems.append(f"{tier.name} was not measured: {error}")
        self._plans.book.forget({sample.tier for sample in samples})
        self._plans.book.observe_load(samples)
        self._plans.book.observe_land([measure_landing() for _ in range(_LANDINGS)])
        return problems

    def close(self) -> None:
        """Stop; the generator of slices gives its slots back."""
        self._slices = None
        self._worker.close()


def measure_tier(
    tier: Tier, namespace: str, in_flight: int, clock: Callable[[], float] = time.perf_counter
) -> list[LoadSample]:
    """Read small and large segments of scratch objects, alone and `in_flight` at once.

    Raises:
        StoreError: the tier can't be written or read now.
    """
    digest = hashlib.sha256(b"krul calibrate " + uuid.uuid4().bytes).hexdigest()
    keys = [chunk_key(namespace, digest, 1, index) for index in range(_OBJECTS)]
    samples: list[LoadSample] = []

    def read(key: str, size: int, together: int) -> LoadSample:
        into = memoryview(bytearray(size))
        begun = clock()
        tier.read_segments(key, 0, [into])
        return LoadSample(tier.name, size, clock() - begun, together)

    try:
        for key in keys:
            tier.put(key, b"calibrate", [os.urandom(_LARGE_BYTES)])
        for _ in range(_ROUNDS):
            samples += [read(key, _SMALL_BYTES, 1) for key in keys]
            samples += [read(key, _LARGE_BYTES, 1) for key in keys[:4]]
        if in_flight > 1:
            with ThreadPoolExecutor(in_flight) as pool:
                for _ in range(_ROUNDS):
                    samples += pool.map(lambda key: read(key, _LARGE_BYTES, in_flight), keys)
    finally:
        for key in keys:
            _delete(tier, key)
    return samples


def quietest(samples: Sequence[ComputeSample]) -> list[ComputeSample]:
    """Of slices of one kind the fastest: whatever else runs on the machine only makes them slower."""
    best: dict[tuple[int, int, bool], ComputeSample] = {}
    for sample in samples:
        kind = (sample.first, sample.tokens, sample.kv_only)
        if kind not in best or sample.seconds < best[kind].seconds:
            best[kind] = sample
    return list(best.values())


def measure_landing(clock: Callable[[], float] = time.perf_counter) -> LandSample:
    """Check a segment's checksum, and copy it to where it has not been before."""
    source = np.frombuffer(os.urandom(_LARGE_BYTES), np.uint8)
    target = np.zeros(_LARGE_BYTES, np.uint8)
    begun = clock()
    xxhash.xxh3_64_intdigest(source.data)
    np.copyto(target, source)
    return LandSample(_LARGE_BYTES, clock() - begun)


def _delete(tier: Tier, key: str) -> None:
    try:
        tier.delete(key)
    except KrulError as error:
        logger.warning(
            "krul: scratch object %s stays in %s until its time is over: %s", key, tier.name, error
        )

"""The estimates of sessions: which of a request's sampled rows are new, and what they come to.

A request of a session ends: its rows are at hand (`probe`), its pages are in the memory tier or on their way
there (the write-through). The rows that are new go to the background thread, and what comes back is added to
the estimate of the session.

What is new. `through` is how many leading tokens an estimate has accounted for; rows below it were counted
before (a prefix that was computed again after its pages had gone). Rows behind the last whole page are not
taken: the tree keeps whole pages only, so the next turn computes those tokens again, and their rows come with
it. Where a turn was edited, `through` falls back to what both have in common: rows of the dropped branch stay
in the sums (they are of this chat, and of this reader's questions to it), those of the new one are added.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import torch

from sgl_krul.engine.probe import RowProbe, Sampled
from sgl_krul.errors import Corrupt
from sgl_krul.metrics import MetricsSink
from sgl_krul.service.estimates import Evidence
from sgl_krul.service.jobs import Body
from sgl_krul.session.private import caller_key
from sgl_krul.session.record import Manifest, SessionKey, common_tokens
from sgl_krul.similarity import Estimator, KeySource, QueryKeep, RowJob, Similarity
from sgl_krul.strategy import ir_layers

__all__ = ["MAX_ESTIMATES", "OpenKeys", "SessionEstimates"]

logger = logging.getLogger(__name__)

MAX_ESTIMATES = 4096
"""Sessions whose estimate is kept in this process. The one not heard of for longest goes first; a paused one
comes back with its manifest."""

OpenKeys = Callable[[SessionKey, "array[int]"], KeySource]
"""The keys of all whole pages of a session's tokens."""


@dataclass
class _Estimate:
    """One session. `token_ids`: those of the last request; `waiting`: rows the thread has."""

    similarity: Similarity
    token_ids: array[int] = field(default_factory=lambda: array("q"))
    through: int = 0
    waiting: int = 0

    def advance(self, token_ids: array[int], whole: int) -> tuple[int, int]:
        """A request ended with these tokens, `whole` of them in whole pages: the range whose rows are new."""
        common = common_tokens(self.token_ids, token_ids)
        if common == len(token_ids) < len(self.token_ids):
            return self.through, self.through  # it got less far, on the same way
        start = min(self.through, common)
        self.token_ids = token_ids
        self.through = max(start, whole)
        return start, self.through


class SessionEstimates:
    """`service.Estimates`, and what the cache tells: `finished` is for the scheduler's thread."""

    def __init__(
        self,
        estimator: Estimator,
        probe: RowProbe,
        open_keys: OpenKeys,
        metrics: MetricsSink,
        *,
        layers: int,
        scale: float,
        page_size: int,
        gamma: float,
        kept: QueryKeep | None = None,
    ) -> None:
        """`scale`: of q.k before the softmax, in every layer. `kept`: where queries stay for pauses to judge
        codings by; None: nothing is coded.
        """
        self._kept = kept
        self._estimator = estimator
        self._probe = probe
        self._open_keys = open_keys
        self._metrics = metrics
        self._layers = layers
        self._scale = scale
        self._page_size = page_size
        self._gamma = gamma
        self._lock = Lock()  # guards what follows, and every _Estimate
        self._estimates: OrderedDict[str, _Estimate] = OrderedDict()

    # ---- what the engine tells ----

    def finished(self, rid: str, key: SessionKey, token_ids: array[int]) -> None:
        """A request of the session ended with these tokens, and its pages were given to the write-through.

        `key`: as its pages are named, in its private namespace if it has one.
        """
        sampled = self._probe.collect(rid)
        try:
            self._take(key, token_ids, sampled)
        except Exception:  # a bug; the scheduler's thread goes on, without these rows
            logger.exception("krul: sampled rows of session %r are lost", key.session_id)

    def discard(self, rid: str) -> None:
        """A request that SGLang rejected: what ran in its place was not its tokens."""
        self._probe.collect(rid)

    # ---- Estimates ----

    @property
    def working(self) -> bool:
        """See Estimates."""
        return self._estimator.pending_rows > 0

    def statistics(self, digest: str) -> bytes:
        """See Estimates. A pause goes on without an estimate rather than fail for it."""
        with self._lock:
            estimate = self._estimates.get(digest)
            if estimate is None or not estimate.similarity.rows:
                return b""
            try:
                return estimate.similarity.encode()
            except ValueError as error:
                logger.error("krul: the estimate of session %s is not saved: %s", digest[:12], error)
                del self._estimates[digest]
                return b""

    def evidence(self, digest: str, tokens: int) -> Evidence | None:
        """See Estimates."""
        queries = None if self._kept is None else self._kept.get(digest, tokens)
        if queries is None:
            return None
        with self._lock:
            estimate = self._estimates.get(digest)
            sums = None if estimate is None or not estimate.similarity.rows else deepcopy(estimate.similarity)
        return Evidence(queries, self._scale, sums)

    def goes_on(self, manifest: Manifest) -> None:
        """See Estimates. Statistics that can't be read, or that are of another kind, are as good as none."""
        if not manifest.statistics:
            return
        try:
            similarity = Similarity.decode(manifest.statistics)
        except Corrupt as error:
            logger.warning("krul: session %s: its estimate starts anew: %s", manifest.digest[:12], error)
            return
        if similarity.layers != self._layers or similarity.windows is not self._estimator.windows:
            return
        token_ids = manifest.token_array
        whole = len(token_ids) // self._page_size * self._page_size
        with self._lock:
            known = self._estimates.get(manifest.digest)
            if known is None or known.token_ids != token_ids:
                self._keep(manifest.digest, _Estimate(similarity, token_ids, whole))

    def describe(self, digest: str) -> Body | None:
        """See Estimates."""
        with self._lock:
            estimate = self._estimates.get(digest)
            if estimate is None:
                return None
            sums, waiting = estimate.similarity, estimate.waiting
            rows, dropped, share = sums.rows, sums.dropped, sums.dropped_share
            mass = sums.mass() if rows else None
        return {
            "rows": rows,
            "dropped": dropped,
            "dropped_share": round(share, 4),
            "waiting": waiting,
            "ir_mass": [] if mass is None else [round(value, 4) for value in mass.tolist()],
            "ir_layers": [] if mass is None else list(ir_layers(mass, self._gamma)),
        }

    def forget(self, digest: str) -> None:
        """See Estimates."""
        if self._kept is not None:
            self._kept.forget(digest)
        with self._lock:
            self._estimates.pop(digest, None)

    def start_over(self) -> None:
        """See Estimates. Called by the scheduler's thread."""
        self._probe.clear()
        if self._kept is not None:
            self._kept.clear()
        with self._lock:
            self._estimates.clear()

    def close(self) -> None:
        """See Estimates."""
        self._estimator.close()

    def check(self) -> list[str]:
        """Problems found; empty when sound."""
        kept = [] if self._kept is None else self._kept.check()
        return self._probe.check() + self._estimator.check() + kept

    # ---- inside ----

    def _take(self, key: SessionKey, token_ids: array[int], sampled: Sampled | None) -> None:
        """Enter what a request gave: queries for pauses, rows for the thread."""
        digest = caller_key(key)[0].digest
        with self._lock:
            estimate = self._open(digest)
            whole = len(token_ids) // self._page_size * self._page_size
            start, end = estimate.advance(token_ids, whole)
        if sampled is None or start == end:
            return
        sampled = sampled.between(start, end)
        if self._kept is not None and sampled.q is not None:
            self._kept.add(digest, sampled.positions, sampled.q)
        dropped = len(sampled.missed)
        self._estimator.drop(dropped)
        if not self._submit(estimate, key, token_ids, sampled):
            dropped += len(sampled.positions)
        if dropped:
            with self._lock:
                estimate.similarity.drop(dropped)
            self._metrics.estimated("dropped", dropped)

    def _submit(self, estimate: _Estimate, key: SessionKey, token_ids: array[int], sampled: Sampled) -> bool:
        """Give the rows to the thread; False when it has no room for them."""
        if sampled.q is None:
            return True
        with self._lock:
            estimate.waiting += len(sampled.positions)
        job = RowJob(
            q=sampled.q,
            positions=torch.from_numpy(sampled.positions),
            scale=self._scale,
            history=len(token_ids),
            keys=self._open_keys(key, token_ids),
            done=partial(self._done, estimate, len(sampled.positions)),
        )
        if self._estimator.submit(job):
            return True
        with self._lock:
            estimate.waiting -= len(sampled.positions)
        return False

    def _done(self, estimate: _Estimate, rows: int, sums: Similarity) -> None:
        """The thread is done with them. One of a session that was forgotten is in no table."""
        with self._lock:
            estimate.waiting -= rows
            estimate.similarity.merge(sums)
        self._metrics.estimated("seen", sums.rows)
        self._metrics.estimated("dropped", sums.dropped)

    def _open(self, digest: str) -> _Estimate:
        estimate = self._estimates.get(digest)
        if estimate is None:
            return self._keep(digest, _Estimate(Similarity(self._layers, self._estimator.windows)))
        self._estimates.move_to_end(digest)
        return estimate

    def _keep(self, digest: str, estimate: _Estimate) -> _Estimate:
        self._estimates[digest] = estimate
        self._estimates.move_to_end(digest)
        while len(self._estimates) > MAX_ESTIMATES:
            self._estimates.popitem(last=False)
        return estimate

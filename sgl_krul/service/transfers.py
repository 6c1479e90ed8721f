"""Sessions to the tiers and back to memory: what the workers do for a pause and a resume. Blocks on I/O."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from threading import Event
from typing import NamedTuple

from sgl_krul.config import Config
from sgl_krul.errors import LeaseHeld, StoreError, StoreFull
from sgl_krul.layout import KvLayout
from sgl_krul.metrics import MetricsSink
from sgl_krul.pause.memory_only import keep_in_memory
from sgl_krul.pause.pipeline import Depths, PageSource, PauseReport, Snapshot, write_session
from sgl_krul.restore.pipeline import Restorer, RestoreReport, own_chunks
from sgl_krul.service.copies import Found, StoredCopies, goes_on
from sgl_krul.service.estimates import Estimates
from sgl_krul.service.isolation import Isolation, under_names
from sgl_krul.service.mover import Stopped
from sgl_krul.service.prepared import Prepared
from sgl_krul.service.quality import QualityPlanner
from sgl_krul.session.record import SessionKey, manifest_key, pack_tokens, page_key, session_prefix
from sgl_krul.session.registry import MEMORY, PausedCopy
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.tier import Tier
from sgl_krul.store.workers import Workers
from sgl_krul.strategy import Plan

__all__ = ["HashPages", "Sought", "Transfers", "Written"]

logger = logging.getLogger(__name__)

HashPages = Callable[[SessionKey, "array[int]"], tuple[str, ...]]
PlanDepths = Callable[[str, KvLayout], Depths | None]
_TICK_S = 1e-6
_REMOTE_LOADERS = 8  # they wait for a network most of the time
_REMOTE_AHEAD = 4


@dataclass(frozen=True)
class Written:
    """What a pause left: the copy, what was done for it, and the tiers that failed, with why.

    `left_in`: tiers in which an older copy may still be.
    """

    copy: PausedCopy
    report: PauseReport | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    left_in: frozenset[str] = frozenset()


class Sought(NamedTuple):
    """A session that is to come back, as it stands when that begins: stored under `namespace`, or not.

    `token_ids` are its tokens as far as this server knows: one that rests in memory has no manifest.
    """

    key: SessionKey
    token_ids: array[int]
    paused: PausedCopy | None
    namespace: str
    isolation: Isolation


class Transfers:
    """Sessions to and from the tiers. `stop` ends restores and background moves early, at shutdown.

    `hash_pages(key, token_ids)` gives the chained hashes of all full pages, as the server itself names them.
    `estimates`: from whom pauses have statistics, and what they judge codings by.
    """

    def __init__(
        self,
        config: Config,
        layout: KvLayout,
        memory: MemoryTier,
        copies: StoredCopies,
        hash_pages: HashPages,
        metrics: MetricsSink,
        clock: Callable[[], float],
        now: Callable[[], float],
        estimates: Estimates,
    ) -> None:
        self.stop = Event()
        self.depths: PlanDepths = lambda _tier, _layout: None  # every layer is stored
        self._config = config
        self._layout = layout
        self.memory = memory
        self.copies = copies
        self.store = copies.store
        self._hash_pages = hash_pages
        self._metrics = metrics
        self._clock = clock
        self._now = now
        self._estimates = estimates
        self._quality = QualityPlanner(config.quality, layout, estimates, clock)
        # Twice what one session uses: one that waits for a slow disk does not stop the next.
        self._loaders = Workers("load", 2 * config.restore.workers)
        # Apart, so that sessions of the own disk don't queue behind those that wait for a network.
        self._remote_loaders = Workers("load-shared", max(2 * config.restore.workers, _REMOTE_LOADERS))

    # ---- pause ----

    def write(
        self,
        snapshot: Snapshot,
        source: PageSource,
        replaced: PausedCopy | None,
        before: Callable[[], None],
        *,
        to_memory: bool = False,
        paused_at: float | None = None,
        unless: Callable[[], bool] = lambda: False,
    ) -> Written:
        """Pause: chunks, then the manifest; then older copies elsewhere go.

        `paused_at`: when the session came to rest, in unix seconds (None: now).
        `unless()` is asked when nobody else changes the session any more: True, and nothing is written.

        Raises:
            StoreFull, StoreUnavailable, LeaseHeld, Stopped: nothing changed.
        """
        before()
        with self.copies.exclusive.hold(snapshot.digest):
            if unless():
                raise Stopped(f"session {snapshot.session_id!r} went on meanwhile: nothing was written")
            stored = self.copies.find_in(self.store.others(()), snapshot.digest, snapshot.namespace)
            written = _newer(snapshot, stored, replaced, paused_at)
            if written is None and (to_memory or not self.store):
                written = self._keep(snapshot, source, optional=to_memory and bool(self.store))
            if written is None:
                moment = _moment(self._now(), stored) if paused_at is None else paused_at
                written = self._write_to_tiers(snapshot, source, replaced, moment)
            if written.copy.tiers == (MEMORY,):  # which may lose it: an older copy is better than none
                return written
            return replace(written, left_in=self._drop_older(snapshot, replaced, written.copy))

    def _keep(self, snapshot: Snapshot, source: PageSource, *, optional: bool) -> Written | None:
        """Pause to memory. If `optional`, None when memory hasn't room for the whole session."""
        try:
            stored = keep_in_memory(snapshot, source, self.memory, self._config.chunk.tokens)
        except StoreFull:
            if optional:
                return None
            raise
        if optional and stored < len(snapshot.page_hashes) * self._layout.page_size:
            return None
        return Written(
            PausedCopy.in_memory(
                snapshot.namespace,
                snapshot.layout,
                snapshot.token_ids,
                stored,
                self._now(),
                exact=snapshot.exact,
            )
        )

    def _write_to_tiers(
        self, snapshot: Snapshot, source: PageSource, replaced: PausedCopy | None, moment: float
    ) -> Written:
        # As late as may be, and once for all tiers: rows of the last turn may have ended meanwhile.
        snapshot = replace(snapshot, statistics=self._estimates.statistics(snapshot.digest))
        plan = self._plan(snapshot, source)
        size = len(snapshot.page_hashes) * self._layout.page_bytes
        kept = replaced if replaced is not None and replaced.namespace == snapshot.namespace else None
        held = {} if kept is None else dict.fromkeys(kept.tiers, kept.stored_bytes)
        targets = self.store.targets(size, held)
        generation = 1 if kept is None else kept.generation + 1
        reports: dict[str, PauseReport] = {}
        failed: dict[str, StoreError] = {}
        for tier in (*targets, *self.store.others(targets)):
            if reports and tier not in targets:
                break  # those are for when all targets failed
            start = self._clock()
            try:
                with self.store.leased(session_prefix(snapshot.namespace, snapshot.digest), tier):
                    report = write_session(
                        snapshot,
                        source,
                        tier,
                        chunk_tokens=self._config.chunk.tokens,
                        now=lambda: moment,
                        generation=generation,
                        depths=self.depths(tier.name, self._layout),
                        plan=None if plan is None else plan.layer_plan,
                        loss=0.0 if plan is None else plan.loss,
                        coded=self._config.quality.codes,
                    )
            except StoreError as error:
                failed[tier.name] = error
                self._metrics.put_failed(tier.name)
                if isinstance(error, LeaseHeld):
                    break  # another server pauses this very session: whoever asked should know
                continue
            reports[tier.name] = report
            self._metrics.paused(tier.name, self._clock() - start, report.bytes_written)
            generation = report.manifest.generation
        if not reports:
            raise _worst(failed)
        first = next(iter(reports.values()))
        return Written(
            PausedCopy.of(first.manifest, *reports),
            first,
            self.store.passed_over(targets) | {name: str(error) for name, error in failed.items()},
        )

    def _plan(self, snapshot: Snapshot, source: PageSource) -> Plan | None:
        """How to code what is new. A pause goes on without a plan rather than fail for it."""
        try:
            return self._quality.plan(snapshot, source, self._config.chunk.tokens)
        except Exception:
            logger.exception("krul: session %r is stored without a new layer plan", snapshot.session_id)
            return None

    def _drop_older(
        self, snapshot: Snapshot, replaced: PausedCopy | None, written: PausedCopy
    ) -> frozenset[str]:
        """Delete what the new copy replaces and did not overwrite; returns the tiers where that failed.

        Of other namespaces only what lies on the own disk: in the shared tier others may want it still.
        """
        if replaced is not None and replaced.namespace != snapshot.namespace:
            for tier in self.store.choose(replaced.tiers):
                if not self.store.is_shared(tier):
                    self.copies.delete_quietly(tier, replaced.namespace, snapshot.digest, written.paused_at)
        left = {
            tier.name
            for tier in self.store.others(self.store.choose(written.tiers))
            if not self.copies.delete_quietly(tier, snapshot.namespace, snapshot.digest, written.paused_at)
        }
        if replaced is not None:  # what can't be asked now
            left |= {
                tier.name for tier in self.store.choose(replaced.tiers) if not self.store.available(tier)
            }
        return frozenset(left - set(written.tiers))

    # ---- restore ----

    def restore(self, sought: Sought, deadline: float) -> RestoreReport:
        """Bring the session to memory. What is wrong shortens the restore."""
        here, found, report = self._find(sought)
        if here is None:
            return self._restore(sought, found, report, deadline)
        here.pin_in(here.report)
        return here.report

    def prepare(self, sought: Sought) -> Prepared:
        """Find what there is of the session, for a restore to the device. Its pages in memory are pinned.

        Nothing is read but the manifest. What is wrong with it the report says; there are no chunks then.
        """
        here, found, report = self._find(sought)
        if here is not None:
            return here
        self._settle_tiers(sought, report, found)
        in_cache = sought.isolation.key(sought.key, exact=report.private is None)
        return Prepared.of(in_cache, report, found, self.memory, self.store, self._layout, sought.namespace)

    def _find(self, sought: Sought) -> tuple[Prepared | None, Found, RestoreReport]:
        """What memory has whole, pinned; else where the stored copies are, and what is to be restored."""
        resting, found = self._locate(sought)
        if resting is not None:
            return resting, found, resting.report
        report, isolation = self._examine(sought, found), sought.isolation
        manifest = report.manifest
        if manifest is None or (manifest.exact and not isolation.private):
            return None, found, report
        own = own_chunks(manifest)
        there = list(takewhile(lambda c: self.memory.leading(c.keys) == c.ref.pages, own))
        report.duplicated_tokens = sum(chunk.ref.tokens for chunk in there)
        if isolation.may_be_exact and there and len(there) == len(own):
            exactly = RestoreReport(manifest=manifest)  # memory has it as it was before the lossy pause
            kept = Prepared.of(
                sought.key, exactly, found, self.memory, self.store, self._layout, sought.namespace
            )
            if kept.all_in_memory:
                self._settle_tiers(sought, exactly, found)
                return kept, found, exactly
            kept.release()  # one of its pages went meanwhile
        names = self._hash_pages(isolation.key(sought.key, exact=False), manifest.token_array)
        report.private, report.manifest = isolation.number, under_names(manifest, names)
        return None, found, report

    def _locate(self, sought: Sought) -> tuple[Prepared | None, Found]:
        """What memory keeps of a session that rests there, pinned; else where its stored copies are."""
        key, token_ids, paused, namespace, isolation = sought
        if paused is None or paused.tiers != (MEMORY,):
            return None, self.copies.find(key.digest, paused, namespace)
        in_cache = isolation.key(key, exact=True)
        hashes = self._hash_pages(in_cache, token_ids) if paused.namespace == namespace else ()
        keys = [page_key(namespace, page_hash) for page_hash in hashes]
        resting = Prepared.in_memory_only(
            in_cache,
            self.memory,
            keys[: paused.stored_tokens // self._layout.page_size],
            self._layout,
            namespace,
            token_ids,
            self._config.chunk.tokens,
        )
        resting.report.private = isolation.number if isolation.private else None
        lost = paused.stored_tokens - resting.tokens
        if lost:
            resting.report.end("missing", f"{lost} tokens have left memory, where the session rested")
        older = self.copies.find_in(self.store.others(()) if lost else (), key.digest, namespace)
        if older.manifest is None or older.manifest.stored_tokens <= resting.tokens:
            return resting, older
        resting.release()  # an earlier pause left more of it than memory kept
        return None, older

    def _restore(
        self, sought: Sought, found: Found, examined: RestoreReport, deadline: float
    ) -> RestoreReport:
        if examined.manifest is None:
            return examined
        tiers = found.sources(self.store)
        workers, ahead = self.loaders(tiers)
        restorer = Restorer(tiers, self.memory, self._layout, workers, ahead=ahead)
        report = restorer.run(
            examined.manifest, copies=found.copies, deadline=deadline, clock=self._clock, cancelled=self.stop
        )
        report.private, report.duplicated_tokens = examined.private, examined.duplicated_tokens
        self._settle_tiers(sought, report, found)
        return report

    def _examine(self, sought: Sought, found: Found) -> RestoreReport:
        """A report with the manifest to restore from; without one where there is none that can be trusted."""
        report = RestoreReport()
        if found.manifest is None:
            report.end(*found.why)
            report.corrupt_chunks = int(report.miss == "corrupt")
            report.missing_chunks = int(report.miss == "missing" and sought.paused is not None)
            if report.missing_chunks:
                self.copies.sweep(sought.key.digest, sought.namespace, sought.paused)
        elif found.manifest.hashes != self._hash_pages(sought.key, found.manifest.token_array):
            report.corrupt_chunks = 1
            report.end("corrupt", "corrupt manifest (identity: its page hashes are not those of its tokens)")
        elif any(len(plan.choices) != self._layout.layers for plan in found.manifest.layer_plans.values()):
            report.corrupt_chunks = 1
            report.end("corrupt", "corrupt manifest (identity: a layer plan of another number of layers)")
        else:
            report.manifest = found.manifest
            self._estimates.goes_on(found.manifest)
        return report

    def _settle_tiers(self, sought: Sought, report: RestoreReport, found: Found) -> None:
        """Where the session lies, as this restore has seen it; and what it used in a shared tier lives on."""
        manifest, paused = report.manifest, sought.paused
        if manifest is None:
            return
        report.tiers = tuple(tier.name for tier in found.tiers)
        if paused is not None and paused.paused_at == manifest.paused_at:  # out of reach is not gone
            report.tiers += tuple(name for name in found.unread if name in paused.tiers)
        if any(map(self.store.is_shared, found.tiers)):  # nobody waits for it
            keys = [
                manifest_key(manifest.namespace, sought.key.digest),
                *(chunk.key for chunk in manifest.chunks),
            ]
            self._remote_loaders.submit(self.store.touch, keys)

    def loaders(self, tiers: Sequence[Tier]) -> tuple[Workers, int]:
        """The threads that read sessions whose fastest copy is in `tiers[0]`, and how many one session uses.

        Apart for those that wait for a network.
        """
        if tiers and tiers[0] is self.store.shared:
            return self._remote_loaders, max(self._config.restore.workers, _REMOTE_AHEAD)
        return self._loaders, self._config.restore.workers

    def close(self) -> None:
        """Stop the loaders."""
        self.stop.set()
        self._loaders.close()
        self._remote_loaders.close()


def _newer(
    snapshot: Snapshot, stored: Found, replaced: PausedCopy | None, paused_at: float | None
) -> Written | None:
    """What another server made of this session meanwhile, if that is the newer: it went on from these very
    tokens, or paused later than the pause that is only now written out. None: nothing of the kind.
    """
    manifest = stored.manifest
    if manifest is None or (replaced is not None and manifest.paused_at == replaced.paused_at):
        return None
    later = paused_at is not None and manifest.paused_at > paused_at
    if later or goes_on(manifest.token_ids, pack_tokens(snapshot.token_ids)):
        return Written(PausedCopy.of(manifest, *(tier.name for tier in stored.tiers)))
    return None


def _moment(now: float, stored: Found) -> float:
    """Now, and after whatever a pause replaces: another server's clock may be ahead of ours."""
    return max(now, *(manifest.paused_at + _TICK_S for manifest in stored.copies.values()), 0.0)


def _worst(failed: Mapping[str, StoreError]) -> StoreError:
    """The one failure to tell of: a lease first, a full tier before one that is out of reach."""
    for kind in (LeaseHeld, StoreFull, StoreError):
        for error in failed.values():
            if isinstance(error, kind):
                return error
    raise AssertionError("nothing failed")

"""What the workers do for a verb: write, restore, move, delete. Blocks on I/O; knows tiers, not states.

Whatever changes a session's stored copy runs alone for that session (`Exclusive`), and in a shared tier under
a lease; reading is always allowed.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from sgl_krul.config import Config
from sgl_krul.errors import Corrupt, LeaseHeld, StoreError, StoreFull, StoreUnavailable
from sgl_krul.layout import KvLayout
from sgl_krul.metrics import MetricsSink
from sgl_krul.pause.memory_only import keep_in_memory
from sgl_krul.pause.pipeline import PageSource, PauseReport, Snapshot, write_session
from sgl_krul.restore.pipeline import Restorer, RestoreReport
from sgl_krul.service.archive import export_session, import_session
from sgl_krul.service.exclusive import Exclusive
from sgl_krul.service.mover import Stopped, copy_session
from sgl_krul.session.catalog import (
    Catalog,
    delete_everywhere,
    delete_session,
    find_shared,
    read_manifest,
)
from sgl_krul.session.record import Manifest, SessionKey, manifest_key, session_prefix
from sgl_krul.session.registry import MEMORY, PausedCopy
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.tier import CheckedTier
from sgl_krul.store.tiered import TieredStore
from sgl_krul.store.workers import Workers

__all__ = ["HashPages", "Transfers", "Written"]

logger = logging.getLogger(__name__)

HashPages = Callable[[SessionKey, "array[int]"], tuple[str, ...]]
_REMOTE_LOADERS = 8  # they wait for a network most of the time
_REMOTE_AHEAD = 4


@dataclass(frozen=True)
class Written:
    """What a pause left: the copy, what was done for it, and the tiers that failed, with why."""

    copy: PausedCopy
    report: PauseReport | None = None
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Found:
    """The newest manifest of a session, and the tiers that have it; else `why` there is none: (word, text).

    `copies`: what each tier has, an older one too. `unread`: tiers that could not be asked.
    """

    why: tuple[str, str]
    manifest: Manifest | None = None
    tiers: list[CheckedTier] = field(default_factory=list)
    copies: Mapping[str, Manifest] = field(default_factory=dict)
    unread: Sequence[str] = ()


class Transfers:
    """Sessions to and from the tiers. `stop` ends restores and background moves early, at shutdown.

    `hash_pages(key, token_ids)` gives the chained hashes of all full pages, as the server itself names them.
    """

    def __init__(
        self,
        config: Config,
        layout: KvLayout,
        memory: MemoryTier,
        store: TieredStore,
        hash_pages: HashPages,
        metrics: MetricsSink,
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self.stop = Event()
        self.exclusive = Exclusive()
        self._config = config
        self._layout = layout
        self.memory = memory
        self.store = store
        self._hash_pages = hash_pages
        self._metrics = metrics
        self._clock = clock
        self._now = now
        self._loaders = Workers("load", config.restore.workers)
        # Apart, so that sessions of the own disk don't queue behind those that wait for a network.
        self._remote_loaders = Workers("load-shared", max(config.restore.workers, _REMOTE_LOADERS))
        self._shared_seen: dict[str, float] = {}

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
        with self.exclusive.hold(snapshot.digest):
            if unless():
                raise Stopped(f"session {snapshot.session_id!r} went on meanwhile: nothing was written")
            written = None
            if to_memory or not self.store:
                written = self._keep(snapshot, source, optional=to_memory and bool(self.store))
            if written is None:
                moment = self._now() if paused_at is None else paused_at
                written = self._write_to_tiers(snapshot, source, replaced, moment)
            self._drop_older(snapshot, replaced, written.copy)
            return written

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
            PausedCopy.in_memory(snapshot.namespace, snapshot.layout, snapshot.token_ids, stored, self._now())
        )

    def _write_to_tiers(
        self, snapshot: Snapshot, source: PageSource, replaced: PausedCopy | None, moment: float
    ) -> Written:
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
                    )
            except (StoreFull, StoreUnavailable, LeaseHeld) as error:
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

    def _drop_older(self, snapshot: Snapshot, replaced: PausedCopy | None, written: PausedCopy) -> None:
        """Delete what the new copy replaces and did not overwrite, in every tier within reach.

        Of other namespaces only what lies on the own disk: in the shared tier others may want it still.
        """
        if replaced is not None and replaced.namespace != snapshot.namespace:
            for tier in self.store.choose(replaced.tiers):
                if not self.store.is_shared(tier):
                    self._delete_quietly(tier, replaced.namespace, snapshot.digest, written.paused_at)
        for tier in self.store.others(self.store.choose(written.tiers)):
            self._delete_quietly(tier, snapshot.namespace, snapshot.digest, written.paused_at)

    def _delete_quietly(self, tier: CheckedTier, namespace: str, digest: str, up_to: float) -> None:
        try:
            self._delete_older(tier, namespace, digest, up_to)
        except StoreError as error:  # what matters is committed; the old copy goes by its TTL
            logger.warning("krul: an older copy of %s stays in %s: %s", digest[:12], tier.name, error)

    def _delete_older(self, tier: CheckedTier, namespace: str, digest: str, up_to: float) -> bool:
        """Delete the tier's copy unless it was paused after `up_to`, by another server then; False if it was.

        Raises:
            StoreUnavailable, LeaseHeld
        """
        prefix = session_prefix(namespace, digest)
        if not any(tier.scan(prefix)):
            return True
        with self.store.leased(prefix, tier):
            try:
                manifest = read_manifest(tier, namespace, digest)
            except Corrupt:
                manifest = None
            if manifest is not None and manifest.paused_at > up_to:
                return False
            delete_session(tier, namespace, digest)
            return True

    # ---- restore ----

    def restore(
        self, key: SessionKey, paused: PausedCopy | None, namespace: str, deadline: float
    ) -> RestoreReport:
        """Bring the session to memory, if stored under `namespace`. What is wrong shortens the restore."""
        report = RestoreReport()
        found = self._look_up(key.digest, paused, namespace)
        manifest, tiers = found.manifest, found.tiers
        if manifest is None:
            report.end(*found.why)
            report.corrupt_chunks = int(report.miss == "corrupt")
            report.missing_chunks = int(report.miss == "missing" and paused is not None)
            if report.missing_chunks:
                self._sweep(key.digest, namespace, paused)
            return report
        if manifest.hashes != self._hash_pages(key, manifest.token_array):
            report.corrupt_chunks = 1
            report.end("corrupt", "corrupt manifest (identity: its page hashes are not those of its tokens)")
            return report
        remote = self.store.is_shared(tiers[0])
        restorer = Restorer(
            [*tiers, *self.store.others(tiers)],
            self.memory,
            self._layout,
            self._remote_loaders if remote else self._loaders,
            ahead=max(self._config.restore.workers, _REMOTE_AHEAD if remote else 1),
        )
        report = restorer.run(
            manifest, copies=found.copies, deadline=deadline, clock=self._clock, cancelled=self.stop
        )
        report.tiers = tuple(tier.name for tier in tiers)
        if paused is not None and paused.paused_at == manifest.paused_at:  # out of reach is not gone
            report.tiers += tuple(name for name in found.unread if name in paused.tiers)
        if any(map(self.store.is_shared, tiers)):  # nobody waits for it
            keys = [manifest_key(namespace, key.digest), *(chunk.key for chunk in manifest.chunks)]
            self._remote_loaders.submit(self.store.touch, keys)
        return report

    def _sweep(self, digest: str, namespace: str, paused: PausedCopy | None) -> None:
        """Without its manifest a session is only orphans; those of the shared tier end by themselves."""
        if paused is None:
            return
        with self.exclusive.hold(digest):
            for tier in self.store.choose(paused.tiers):
                if not self.store.is_shared(tier):
                    self._delete_quietly(tier, namespace, digest, paused.paused_at)

    def find(
        self, digest: str, paused: PausedCopy | None, namespace: str
    ) -> tuple[Manifest | None, list[CheckedTier], tuple[str, str]]:
        """The newest manifest of a session, the tiers that have it, and (word, sentence) why there is none.

        Of a session this server does not know (`paused` None) the shared tier is asked.
        """
        found = self._look_up(digest, paused, namespace)
        return found.manifest, found.tiers, found.why

    def _look_up(self, digest: str, paused: PausedCopy | None, namespace: str) -> _Found:
        if paused is not None and paused.tiers == (MEMORY,):
            return _Found(("missing", "nothing is stored outside memory"))
        places = self._places_of(paused, namespace)
        found = self._read_manifests(places, digest, namespace)
        if found.manifest is None and paused is not None:
            if paused.namespace != namespace:
                return _Found(("stale", "stored for another model, dtype, page size or weight version"))
            elsewhere = self._read_manifests(self.store.others(places), digest, namespace)
            if elsewhere.manifest is not None:  # moved there since this was asked for
                return elsewhere
        return found

    def _read_manifests(self, places: Sequence[CheckedTier], digest: str, namespace: str) -> _Found:
        why = ("missing", "the manifest has gone" if self.store else "nothing is stored outside memory")
        copies: dict[str, Manifest] = {}
        unread: list[str] = []
        for tier in places:
            try:
                manifest = read_manifest(tier, namespace, digest)
            except Corrupt as error:
                why = ("corrupt", f"corrupt manifest ({error})")
                continue
            except StoreError as error:
                why = why if why[0] == "corrupt" else ("unavailable", f"store unavailable ({error})")
                unread.append(tier.name)
                continue
            if manifest is not None:
                copies[tier.name] = manifest
        if not copies:
            return _Found(why, unread=unread)
        newest = max(copies.values(), key=lambda manifest: (manifest.paused_at, manifest.stored_tokens))
        tiers = [tier for tier in places if tier.name in copies and _same(copies[tier.name], newest)]
        return _Found(("", ""), newest, tiers, copies, unread)

    def asks_shared(self, paused: PausedCopy | None, namespace: str) -> bool:
        """Whether a restore looks into the shared tier, and may wait for a network."""
        return any(map(self.store.is_shared, self._places_of(paused, namespace)))

    def _places_of(self, paused: PausedCopy | None, namespace: str) -> tuple[CheckedTier, ...]:
        """Where to look: where it was put; the shared tier for what another server may have put there."""
        if paused is None or paused.namespace != namespace:
            return () if self.store.shared is None else (self.store.shared,)
        return self.store.choose(paused.tiers)

    # ---- moves ----

    def move(self, digest: str, namespace: str, sources: Sequence[str], target: str) -> PausedCopy:
        """Copy a paused session to `target`, then delete it from `sources`. Stops when a verb wants it.

        Raises:
            Missing, Corrupt: nothing (whole) is left of it in `sources`.
            StoreFull, StoreUnavailable, LeaseHeld, Stopped: it is where it was.
        """
        destination = self.store.tier(target)
        tiers = [tier for tier in self.store.choose(sources) if tier is not destination]
        with self.exclusive.hold(digest):
            manifest, holders, why = self._find_in([*tiers, destination], digest, namespace)
            if manifest is None:
                raise StoreUnavailable(f"session {digest[:12]} can't be read: {why[1]}")
            if destination not in holders:
                with self.store.leased(session_prefix(namespace, digest), destination):
                    manifest = copy_session(
                        manifest,
                        holders[0],
                        destination,
                        stopped=lambda: self.stop.is_set() or self.exclusive.wanted(digest),
                    ).manifest
            for tier in tiers:
                self._delete_quietly(tier, namespace, digest, manifest.paused_at)
        return PausedCopy.of(manifest, target)

    def _find_in(
        self, tiers: Sequence[CheckedTier], digest: str, namespace: str
    ) -> tuple[Manifest | None, list[CheckedTier], tuple[str, str]]:
        names = tuple(tier.name for tier in tiers)
        known = PausedCopy(names, namespace, 1, 0, 0, 0, 0, True, 0.0)
        return self.find(digest, known, namespace)

    def export(self, digest: str, paused: PausedCopy, namespace: str, path: Path) -> Manifest:
        """Write a paused session to a file.

        Raises:
            StoreUnavailable, Missing, Corrupt: no file was left.
        """
        manifest, tiers, why = self.find(digest, paused, namespace)
        if manifest is None:
            raise StoreUnavailable(f"session {digest[:12]} can't be exported: {why[1]}")
        sources = [*tiers, *self.store.others(tiers)]
        return export_session(manifest, sources, path, stopped=self.stop.is_set).manifest

    def take_in(self, path: Path, namespace: str, admit: Callable[[Manifest], None]) -> tuple[Manifest, str]:
        """Store the session of an exported file; returns its manifest and the tier that took it.

        `admit(manifest)` may raise to refuse it, before anything is written.

        Raises:
            BadArchive, StoreFull, StoreUnavailable, LeaseHeld: nothing changed.
        """
        if not self.store:
            raise StoreUnavailable("this server has no tier outside memory: configure ssd or redis to import")
        tier = self.store.targets(path.stat().st_size if path.is_file() else 0, {})[0]

        @contextmanager
        def alone(digest: str) -> Iterator[None]:
            with self.exclusive.hold(digest), self.store.leased(session_prefix(namespace, digest), tier):
                yield

        manifest = import_session(
            path,
            tier,
            namespace=namespace,
            now=self._now,
            stopped=self.stop.is_set,
            admit=admit,
            hold=alone,
        )
        return manifest, tier.name

    # ---- the rest ----

    def discover(self, namespace: str) -> tuple[Catalog, frozenset[str], str]:
        """What is new in the shared tier, the digests of all that is there, and the tier's name.

        Raises:
            StoreUnavailable
        """
        shared = self.store.shared
        if shared is None:
            return Catalog(), frozenset(), ""
        self.store.refresh()
        catalog, self._shared_seen = find_shared(shared, namespace, self._shared_seen)
        return catalog, frozenset(self._shared_seen), shared.name

    def forget_seen(self) -> None:
        """The namespace changed: manifests of the shared tier are read anew."""
        self._shared_seen = {}

    def delete(self, digest: str, namespace: str, paused: PausedCopy | None, drop: Callable[[], None]) -> int:
        """Delete a session, then `drop()`; returns the bytes freed.

        On the server's own disk also what no manifest names, and copies under other namespaces; in the shared
        tier those of this namespace only: others belong to servers of other models.

        Raises:
            StoreUnavailable, LeaseHeld: what is left is found by the next call.
        """
        freed = 0
        with self.exclusive.hold(digest):
            for tier in reversed(self.store.tiers):  # the shared one may refuse: then nothing has changed
                try:
                    freed += self._delete_from(tier, digest, namespace)
                except StoreUnavailable as error:
                    expected = paused is None or tier.name in paused.tiers
                    if expected or not self.store.is_shared(tier):
                        raise
                    logger.warning("krul: %s was not asked to delete %s: %s", tier.name, digest[:12], error)
            drop()
        return freed

    def expire(self, digest: str, namespace: str, paused: PausedCopy) -> bool:
        """Delete a session nobody used for long, unless it was paused anew since `paused`; False if it was.

        Raises:
            StoreUnavailable, LeaseHeld: what is left is found by the next call.
        """
        with self.exclusive.hold(digest):
            tiers = {*self.store.choose(paused.tiers), *self.store.others(())}
            return all([self._delete_older(tier, namespace, digest, paused.paused_at) for tier in tiers])

    def _delete_from(self, tier: CheckedTier, digest: str, namespace: str) -> int:
        if not self.store.is_shared(tier):
            return delete_everywhere(tier, digest)[1]
        prefix = session_prefix(namespace, digest)
        with self.store.leased(prefix, tier):
            return delete_session(tier, namespace, digest)[1]

    def close(self) -> None:
        """Stop the loaders."""
        self.stop.set()
        self._loaders.close()
        self._remote_loaders.close()


def _same(one: Manifest, other: Manifest) -> bool:
    """Whether both tell of the same state. Names, sizes and generations of chunks are those of each tier."""
    return (one.paused_at, one.stored_tokens, one.token_ids) == (
        other.paused_at,
        other.stored_tokens,
        other.token_ids,
    )


def _worst(failed: Mapping[str, StoreError]) -> StoreError:
    """The one failure to tell of: a lease first, a full tier before one that is out of reach."""
    for kind in (LeaseHeld, StoreFull, StoreError):
        for error in failed.values():
            if isinstance(error, kind):
                return error
    raise AssertionError("nothing failed")

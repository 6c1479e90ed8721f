"""What the workers do for a verb: write, restore, delete. Blocks on I/O; knows tiers, not states."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event

from sgl_krul.config import Config
from sgl_krul.errors import Corrupt, StoreError
from sgl_krul.layout import KvLayout
from sgl_krul.pause.memory_only import keep_in_memory
from sgl_krul.pause.pipeline import PageSource, PauseReport, Snapshot, write_session
from sgl_krul.restore.pipeline import Restorer, RestoreReport
from sgl_krul.session.catalog import delete_everywhere, delete_session, read_manifest
from sgl_krul.session.registry import PausedCopy
from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.tier import CheckedTier
from sgl_krul.store.workers import Workers

__all__ = ["Transfers"]

logger = logging.getLogger(__name__)


class Transfers:
    """Sessions to and from the tiers. `stop` ends restores early, when the server goes down."""

    def __init__(
        self,
        config: Config,
        layout: KvLayout,
        memory: MemoryTier,
        ssd: CheckedTier | None,
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self.stop = Event()
        self._config = config
        self._layout = layout
        self._memory = memory
        self._ssd = ssd
        self._clock = clock
        self._now = now
        self._loaders = Workers("load", config.restore.workers)

    def write(
        self, snapshot: Snapshot, source: PageSource, replaced: PausedCopy | None, before: Callable[[], None]
    ) -> tuple[PausedCopy, PauseReport | None]:
        """Pause: chunks, then the manifest; then a copy under an older namespace goes.

        Raises:
            StoreFull, StoreUnavailable: nothing changed.
        """
        before()
        if self._ssd is None:
            stored = keep_in_memory(snapshot, source, self._memory, self._config.chunk.tokens)
            return PausedCopy.in_memory(
                snapshot.namespace, snapshot.layout, snapshot.token_ids, stored, self._now()
            ), None
        report = write_session(
            snapshot, source, self._ssd, chunk_tokens=self._config.chunk.tokens, now=self._now
        )
        if replaced is not None and replaced.namespace != snapshot.namespace:
            try:
                delete_session(self._ssd, replaced.namespace, snapshot.digest)
            except StoreError as error:  # the new copy is committed; the old one goes by its TTL
                logger.warning("krul: an older copy of %s stays: %s", snapshot.digest[:12], error)
        return PausedCopy.of(report.manifest, self._ssd.name), report

    def restore(
        self, digest: str, paused: PausedCopy | None, namespace: str, deadline: float
    ) -> RestoreReport:
        """Bring what `paused` names to memory, if of `namespace`. What is wrong shortens the restore."""
        if self._ssd is None or paused is None or paused.tier != self._ssd.name:
            return RestoreReport(cut="nothing is stored outside memory")
        if paused.namespace != namespace:
            return RestoreReport(cut="stored for another model, dtype, page size or weight version")
        try:
            manifest = read_manifest(self._ssd, paused.namespace, digest)
        except Corrupt as error:
            return RestoreReport(corrupt_chunks=1, cut=f"corrupt manifest ({error})")
        except StoreError as error:
            return RestoreReport(cut=f"store unavailable ({error})")
        if manifest is None:
            return RestoreReport(missing_chunks=1, cut="the manifest has gone")
        ahead = self._config.restore.workers
        restorer = Restorer(self._ssd, self._memory, self._layout, self._loaders, ahead=ahead)
        return restorer.run(manifest, deadline=deadline, clock=self._clock, cancelled=self.stop)

    def delete(self, digest: str, drop: Callable[[], None]) -> int:
        """Bytes freed. Also what no manifest names (a failed pause), and copies under other namespaces."""
        freed = 0 if self._ssd is None else delete_everywhere(self._ssd, digest)[1]
        drop()
        return freed

    def close(self) -> None:
        """Stop the loaders."""
        self.stop.set()
        self._loaders.close()

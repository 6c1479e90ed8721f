"""A stored session taken elsewhere: to another tier, to a file, from a file. Blocks on I/O: for workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from sgl_krul.errors import Missing, QuotaExceeded, StoreError, StoreFull, StoreUnavailable
from sgl_krul.pause.pipeline import still_there
from sgl_krul.service.archive import export_session, import_session
from sgl_krul.service.copies import Found, StoredCopies, goes_on
from sgl_krul.service.mover import copy_session
from sgl_krul.session.record import Manifest, session_prefix
from sgl_krul.session.registry import PausedCopy
from sgl_krul.store.tier import CheckedTier

__all__ = ["Moves"]


class Moves:
    """`stop` ends what is under way, when the server goes down; `now` gives unix seconds; `archive_key` seals
    exported files."""

    def __init__(
        self, copies: StoredCopies, stop: Event, now: Callable[[], float], archive_key: bytes
    ) -> None:
        self._copies = copies
        self._store = copies.store
        self._stop = stop
        self._now = now
        self._archive_key = archive_key

    def move(
        self,
        digest: str,
        namespace: str,
        paused: PausedCopy,
        sources: Sequence[str],
        target: str,
        *,
        give_way: bool,
    ) -> PausedCopy:
        """Copy a paused session to `target`, then delete it from `sources`. With `give_way` it stops when
        somebody else wants the session.

        Raises:
            Missing, Corrupt: nothing (whole) is left of it in `sources`.
            StoreFull, StoreUnavailable, LeaseHeld, Stopped: it is where it was.
        """
        destination = self._store.tier(target)
        tiers = [tier for tier in self._store.choose(sources) if tier is not destination]
        with self._copies.exclusive.hold(digest):
            found = self._copies.find_in([*tiers, destination], digest, namespace)
            if found.manifest is None or (found.unread and found.manifest.paused_at < paused.paused_at):
                why = (
                    found.why[1]
                    or f"{' and '.join(found.unread)} can't be asked, and may have the newest copy"
                )
                raise StoreUnavailable(f"session {digest[:12]} can't be moved: {why}")
            there = found.copies.get(destination.name)
            if there is not None and goes_on(there.token_ids, found.manifest.token_ids):
                manifest = there  # another server went on with it; its clock may be behind ours
            elif destination in found.tiers and self._has_whole(destination, there):
                manifest = found.copies[destination.name]
            else:
                manifest = self._copy(found, destination, namespace, give_way)
            for tier in tiers:
                newest = max(manifest.paused_at, found.manifest.paused_at)
                self._copies.delete_quietly(tier, namespace, digest, newest)
        return PausedCopy.of(manifest, target)

    def _copy(self, found: Found, destination: CheckedTier, namespace: str, give_way: bool) -> Manifest:
        """From the first tier that has the session whole; else from any but the destination itself."""
        others = [tier for tier in found.tiers if tier is not destination]
        if not others:
            return found.copies[destination.name]
        whole = (tier for tier in others if self._has_whole(tier, found.copies[tier.name]))
        source = next(whole, others[0])
        manifest = found.copies[source.name]

        def stopped() -> bool:
            return self._stop.is_set() or (give_way and self._copies.exclusive.wanted(manifest.digest))

        with self._store.leased(session_prefix(namespace, manifest.digest), destination):
            return copy_session(manifest, source, destination, stopped=stopped).manifest

    @staticmethod
    def _has_whole(tier: CheckedTier, manifest: Manifest | None) -> bool:
        """Whether the chunks are there, by their headers."""
        return manifest is not None and all(
            still_there(tier, ref, manifest.namespace) for ref in manifest.chunks
        )

    def export(self, digest: str, paused: PausedCopy, namespace: str, path: Path) -> Manifest:
        """Write a paused session to a file, whole.

        Raises:
            StoreUnavailable, Missing, Corrupt: no file was left.
        """
        found = self._copies.find(digest, paused, namespace)
        if found.manifest is None:
            raise StoreUnavailable(f"session {digest[:12]} can't be exported: {found.why[1]}")
        sources = found.sources(self._store)
        report = export_session(
            found.manifest, sources, path, key=self._archive_key, stopped=self._stop.is_set
        )
        if report.cut:
            path.unlink()
            raise Missing(
                f"only {report.manifest.stored_tokens} of {found.manifest.stored_tokens} stored tokens could "
                f"be exported ({report.cut}): send the chat's next request and pause it again, then export"
            )
        return report.manifest

    def take_in(
        self, path: Path, namespace: str, admit: Callable[[Manifest, int], None]
    ) -> tuple[Manifest, str]:
        """Store the session of an exported file; returns its manifest and the tier that took it.

        `admit(manifest, bytes)` may raise to refuse it, before anything is written.

        Raises:
            BadArchive, StoreFull, StoreUnavailable, LeaseHeld: nothing changed.
        """
        if not self._store:
            raise StoreUnavailable("this server has no tier outside memory: configure ssd or redis to import")
        size = path.stat().st_size if path.is_file() else 0
        targets = self._store.targets(size, {})
        failed: StoreError | None = None
        for tier in (*targets[:1], *self._store.others(targets[:1])):
            try:
                return self._take_in(path, tier, namespace, lambda manifest: admit(manifest, size)), tier.name
            except QuotaExceeded:
                raise
            except (StoreFull, StoreUnavailable) as error:
                failed = failed or error
        assert failed is not None
        raise failed

    def _take_in(
        self, path: Path, tier: CheckedTier, namespace: str, admit: Callable[[Manifest], None]
    ) -> Manifest:
        @contextmanager
        def alone(digest: str) -> Iterator[None]:
            with self._copies.exclusive.hold(digest):
                with self._store.leased(session_prefix(namespace, digest), tier):
                    yield

        return import_session(
            path,
            tier,
            key=self._archive_key,
            namespace=namespace,
            now=self._now,
            stopped=self._stop.is_set,
            admit=admit,
            hold=alone,
        )

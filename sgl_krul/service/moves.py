"""A stored session taken elsewhere: to another tier, to a file, from a file. Blocks on I/O: for workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from sgl_krul.errors import StoreUnavailable
from sgl_krul.service.archive import export_session, import_session
from sgl_krul.service.copies import StoredCopies
from sgl_krul.service.mover import copy_session
from sgl_krul.session.record import Manifest, session_prefix
from sgl_krul.session.registry import PausedCopy

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

    def move(self, digest: str, namespace: str, sources: Sequence[str], target: str) -> PausedCopy:
        """Copy a paused session to `target`, then delete it from `sources`. Stops when a verb wants it.

        Raises:
            Missing, Corrupt: nothing (whole) is left of it in `sources`.
            StoreFull, StoreUnavailable, LeaseHeld, Stopped: it is where it was.
        """
        destination = self._store.tier(target)
        tiers = [tier for tier in self._store.choose(sources) if tier is not destination]
        with self._copies.exclusive.hold(digest):
            found = self._copies.find_in([*tiers, destination], digest, namespace)
            manifest = found.manifest
            if manifest is None:
                raise StoreUnavailable(f"session {digest[:12]} can't be read: {found.why[1]}")
            if destination not in found.tiers:
                with self._store.leased(session_prefix(namespace, digest), destination):
                    manifest = copy_session(
                        manifest,
                        found.tiers[0],
                        destination,
                        stopped=lambda: self._stop.is_set() or self._copies.exclusive.wanted(digest),
                    ).manifest
            for tier in tiers:
                self._copies.delete_quietly(tier, namespace, digest, manifest.paused_at)
        return PausedCopy.of(manifest, target)

    def export(self, digest: str, paused: PausedCopy, namespace: str, path: Path) -> Manifest:
        """Write a paused session to a file.

        Raises:
            StoreUnavailable, Missing, Corrupt: no file was left.
        """
        found = self._copies.find(digest, paused, namespace)
        if found.manifest is None:
            raise StoreUnavailable(f"session {digest[:12]} can't be exported: {found.why[1]}")
        sources = [*found.tiers, *self._store.others(found.tiers)]
        return export_session(
            found.manifest, sources, path, key=self._archive_key, stopped=self._stop.is_set
        ).manifest

    def take_in(self, path: Path, namespace: str, admit: Callable[[Manifest], None]) -> tuple[Manifest, str]:
        """Store the session of an exported file; returns its manifest and the tier that took it.

        `admit(manifest)` may raise to refuse it, before anything is written.

        Raises:
            BadArchive, StoreFull, StoreUnavailable, LeaseHeld: nothing changed.
        """
        if not self._store:
            raise StoreUnavailable("this server has no tier outside memory: configure ssd or redis to import")
        tier = self._store.targets(path.stat().st_size if path.is_file() else 0, {})[0]

        @contextmanager
        def alone(digest: str) -> Iterator[None]:
            with (
                self._copies.exclusive.hold(digest),
                self._store.leased(session_prefix(namespace, digest), tier),
            ):
                yield

        manifest = import_session(
            path,
            tier,
            key=self._archive_key,
            namespace=namespace,
            now=self._now,
            stopped=self._stop.is_set,
            admit=admit,
            hold=alone,
        )
        return manifest, tier.name

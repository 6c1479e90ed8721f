"""The stored copies of sessions, over all tiers: found, listed, deleted. Blocks on I/O: for workers.

Whatever changes a session's copies runs alone for that session (`exclusive`), and in a shared tier under a
lease; reading is always allowed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from sgl_krul.errors import Corrupt, StoreError, StoreUnavailable
from sgl_krul.service.exclusive import Exclusive
from sgl_krul.session.catalog import (
    Catalog,
    delete_everywhere,
    delete_session,
    find_shared,
    read_manifest,
)
from sgl_krul.session.record import FORMAT_VERSION, Manifest, parse_key, session_prefix
from sgl_krul.session.registry import MEMORY, PausedCopy
from sgl_krul.store.tier import CheckedTier
from sgl_krul.store.tiered import TieredStore

__all__ = ["Found", "StoredCopies", "goes_on"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """The newest manifest of a session, and the tiers that have it; else `why` there is none: (word, text).

    `copies`: what each tier has, an older one too. `unread`: tiers that could not be asked.
    """

    why: tuple[str, str]
    manifest: Manifest | None = None
    tiers: list[CheckedTier] = field(default_factory=list)
    copies: Mapping[str, Manifest] = field(default_factory=dict)
    unread: Sequence[str] = ()

    def sources(self, store: TieredStore) -> list[CheckedTier]:
        """The tiers to read its chunks from: those that have the manifest, then the others. Of exact KV none
        that has a lossy copy: the chunks of the same tokens are found by what they are called there.
        """
        others = store.others(self.tiers)
        if self.manifest is not None and self.manifest.exact:
            others = [tier for tier in others if self._exact_in(tier.name)]
        return [*self.tiers, *others]

    def _exact_in(self, tier: str) -> bool:
        copy = self.copies.get(tier)
        return copy is None or copy.exact


class StoredCopies:
    """What lies in the tiers of a store."""

    def __init__(self, store: TieredStore) -> None:
        self.store = store
        self.exclusive = Exclusive()
        self._shared_seen: dict[str, float] = {}

    # ---- find ----

    def find(self, digest: str, paused: PausedCopy | None, namespace: str) -> Found:
        """The newest copy of a session. Of one this server does not know (`paused` None) the shared tier is
        asked.
        """
        if paused is not None and paused.tiers == (MEMORY,):
            return Found(("missing", "nothing is stored outside memory"))
        places = self._places_of(paused, namespace)
        found = self.find_in(places, digest, namespace)
        if found.manifest is None and paused is not None:
            if paused.namespace != namespace:
                return Found(("stale", "stored for another model, dtype, page size or weight version"))
            elsewhere = self.find_in(self.store.others(places), digest, namespace)
            if elsewhere.manifest is not None:  # moved there since this was asked for
                return elsewhere
        return found

    def find_in(self, places: Sequence[CheckedTier], digest: str, namespace: str) -> Found:
        """The newest copy in these tiers."""
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
            return Found(why, unread=unread)
        newest = max(copies.values(), key=lambda copy: (copy.paused_at, copy.stored_tokens, copy.exact))
        tiers = [tier for tier in places if tier.name in copies and _same(copies[tier.name], newest)]
        return Found(("", ""), newest, tiers, copies, unread)

    def asks_shared(self, paused: PausedCopy | None, namespace: str) -> bool:
        """Whether a restore looks into the shared tier, and may wait for a network."""
        return any(map(self.store.is_shared, self._places_of(paused, namespace)))

    def _places_of(self, paused: PausedCopy | None, namespace: str) -> tuple[CheckedTier, ...]:
        """Where to look: where it was put; the shared tier for what another server may have put there."""
        if paused is None or paused.namespace != namespace:
            return () if self.store.shared is None else (self.store.shared,)
        return self.store.choose(paused.tiers)

    # ---- list ----

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

    # ---- delete ----

    def delete(
        self, digest: str, namespace: str, may_lie_in: Collection[str], drop: Callable[[], None]
    ) -> int:
        """Delete a session, then `drop()`; returns the bytes freed.

        A shared tier that is out of reach matters only if it is among those the session `may_lie_in`.

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
                    if tier.name in may_lie_in or not self.store.is_shared(tier):
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
            return all([self.delete_older(tier, namespace, digest, paused.paused_at) for tier in tiers])

    def _delete_from(self, tier: CheckedTier, digest: str, namespace: str) -> int:
        if not self.store.is_shared(tier):
            return delete_everywhere(tier, digest)[1]
        prefix = session_prefix(namespace, digest)
        with self.store.leased(prefix, tier):
            return delete_session(tier, namespace, digest)[1]

    def delete_quietly(self, tier: CheckedTier, namespace: str, digest: str, up_to: float) -> bool:
        """As `delete_older`; what can't be deleted now goes by its life time. False if that is so."""
        try:
            self.delete_older(tier, namespace, digest, up_to)
            return True
        except StoreError as error:  # what matters is committed; the old copy goes by its TTL
            logger.warning("krul: an older copy of %s stays in %s: %s", digest[:12], tier.name, error)
            return False

    def delete_older(self, tier: CheckedTier, namespace: str, digest: str, up_to: float) -> bool:
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

    def drop_superseded(self, resting: Mapping[str, PausedCopy], namespace: str) -> int:
        """Delete from the own disk the copies of `resting` sessions (by digest) that lie elsewhere now, and
        newer: another server went on with them. Returns how many there were.
        """
        dropped = 0
        for tier in self.store.tiers:
            if self.store.is_shared(tier):
                continue
            for entry in tier.scan(f"v{FORMAT_VERSION}/{namespace}/"):
                _, digest, name = parse_key(entry.key) or ("", "", "")
                paused = resting.get(digest)
                if name != "manifest" or paused is None or tier.name in paused.tiers:
                    continue
                with self.exclusive.hold(digest):
                    dropped += self.delete_quietly(tier, namespace, digest, paused.paused_at)
        return dropped

    def drop_unagreed(self, digest: str) -> int:
        """Delete from the own disk a session that other ranks do not have; returns how many objects went."""
        own = [tier for tier in self.store.tiers if not self.store.is_shared(tier)]
        with self.exclusive.hold(digest):
            try:
                return sum(delete_everywhere(tier, digest)[0] for tier in own)
            except StoreError as error:  # it stays unlisted, and is found again by the next start
                logger.warning("krul: %s, which other ranks do not have, stays: %s", digest[:12], error)
                return 0

    def sweep(self, digest: str, namespace: str, paused: PausedCopy | None) -> None:
        """Without its manifest a session is only orphans; those of the shared tier end by themselves."""
        if paused is None:
            return
        with self.exclusive.hold(digest):
            for tier in self.store.choose(paused.tiers):
                if not self.store.is_shared(tier):
                    self.delete_quietly(tier, namespace, digest, paused.paused_at)


def goes_on(theirs: bytes, ours: bytes) -> bool:
    """Whether the packed tokens of one state are those of another and more."""
    return len(theirs) > len(ours) and theirs.startswith(ours)


def _same(one: Manifest, other: Manifest) -> bool:
    """Whether both tell of the same state. Names, sizes and generations of chunks are those of each tier."""
    return (one.paused_at, one.stored_tokens, one.token_ids, one.exact) == (
        other.paused_at,
        other.stored_tokens,
        other.token_ids,
        other.exact,
    )

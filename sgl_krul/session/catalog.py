"""Sessions as a tier holds them: read a manifest, list what is there, sweep, delete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sgl_krul.errors import Corrupt, StoreError, StoreUnavailable
from sgl_krul.session.record import (
    FORMAT_VERSION,
    Manifest,
    decode_manifest,
    manifest_key,
    parse_key,
    session_prefix,
)
from sgl_krul.session.registry import PausedCopy, Session, State
from sgl_krul.store.tier import Tier

__all__ = [
    "Catalog",
    "as_session",
    "delete_everywhere",
    "delete_quietly",
    "delete_session",
    "find_sessions",
    "find_shared",
    "read_manifest",
    "sweep_session",
]


@dataclass
class Catalog:
    """What a tier holds. `corrupt` counts manifests that could not be read."""

    sessions: list[Session] = field(default_factory=list)
    corrupt: int = 0
    expired: int = 0
    orphans: int = 0


def read_manifest(tier: Tier, namespace: str, digest: str) -> Manifest | None:
    """The session's manifest in `tier`, or None.

    Raises:
        Corrupt, StoreUnavailable
    """
    header = tier.read_header(manifest_key(namespace, digest))
    return None if header is None else decode_manifest(header, namespace=namespace, digest=digest)


def find_sessions(tier: Tier, namespace: str, *, now: float, stale_ttl_s: float) -> Catalog:
    """All sessions of `tier`; those of another namespace are STALE, and deleted after `stale_ttl_s` seconds.

    Chunks that no manifest names are removed, and so is a session whose manifest is damaged beyond reading.
    One that a newer version wrote is left alone. What can't be deleted now is tried again at the next start.
    """
    catalog = Catalog()
    keys: dict[tuple[str, str], list[str]] = {}
    for entry in tier.scan(f"v{FORMAT_VERSION}/"):
        if (parsed := parse_key(entry.key)) is not None:
            found, digest, name = parsed
            keys.setdefault((found, digest), []).append(name)
    for (found, digest), names in sorted(keys.items(), key=lambda item: item[0][0] != namespace):
        if "manifest" not in names:
            catalog.orphans += _discard(tier, found, digest)
            continue
        _enter(catalog, tier, found, digest, own=found == namespace, expired_before=now - stale_ttl_s)
    return catalog


def _enter(
    catalog: Catalog, tier: Tier, namespace: str, digest: str, *, own: bool, expired_before: float
) -> None:
    try:
        manifest = read_manifest(tier, namespace, digest)
    except Corrupt as error:
        catalog.corrupt += 1
        if error.reason in ("checksum", "length"):
            _discard(tier, namespace, digest)
        return
    except StoreError:
        catalog.corrupt += 1  # unreadable now: a miss; it stays where it is
        return
    if manifest is None:
        return
    if not own and manifest.paused_at < expired_before:
        _discard(tier, namespace, digest)
        catalog.expired += 1
        return
    if own:
        catalog.orphans += sweep_session(tier, manifest)
    catalog.sessions.append(as_session(manifest, tier.name, State.PAUSED if own else State.STALE))


def as_session(manifest: Manifest, tier: str, state: State = State.PAUSED) -> Session:
    """The session that `manifest`, found in `tier`, tells of."""
    return Session(
        digest=manifest.digest,
        session_id=manifest.session_id,
        salted=manifest.salted,
        state=state,
        paused=PausedCopy.of(manifest, tier),
        last_used=manifest.paused_at,
    )


def find_shared(tier: Tier, namespace: str, seen: Mapping[str, float]) -> tuple[Catalog, dict[str, float]]:
    """The sessions that any server has paused into a shared tier under this namespace.

    `seen` (digest -> time of the manifest) is what an earlier call found: manifests that did not change are
    not read again. Returns those that did, and the new `seen`. Nothing is swept here: what looks like an
    orphan may be a pause of another server under way; and other namespaces are other servers' affair.

    Raises:
        StoreUnavailable
    """
    catalog, now_seen = Catalog(), {}
    for entry in tier.scan(f"v{FORMAT_VERSION}/{namespace}/"):
        _, digest, name = parse_key(entry.key) or ("", "", "")
        if name != "manifest":
            continue
        now_seen[digest] = entry.modified
        if seen.get(digest) == entry.modified:
            continue
        try:
            manifest = read_manifest(tier, namespace, digest)
        except Corrupt:
            catalog.corrupt += 1  # left alone: the next pause replaces it, or its life time ends
            continue
        if manifest is not None:
            catalog.sessions.append(as_session(manifest, tier.name))
    return catalog, now_seen


def sweep_session(tier: Tier, manifest: Manifest) -> int:
    """Remove the session's objects that its manifest does not name; returns how many. Safe at any time.

    Best effort: what an unreachable store keeps is only orphans, and the next sweep takes them.
    """
    keep = {chunk.key for chunk in manifest.chunks}
    keep.add(manifest_key(manifest.namespace, manifest.digest))
    try:
        found = list(tier.scan(session_prefix(manifest.namespace, manifest.digest)))
    except StoreUnavailable:
        return 0
    orphans = [entry.key for entry in found if entry.key not in keep]
    return sum(delete_quietly(tier, key) for key in orphans)


def delete_session(tier: Tier, namespace: str, digest: str) -> tuple[int, int]:
    """Delete the manifest, then the chunks; returns (objects, bytes) that went.

    Raises:
        StoreUnavailable: what is left is unreachable (no manifest) or as before.
    """
    objects = list(tier.scan(session_prefix(namespace, digest)))
    tier.delete(manifest_key(namespace, digest))  # first: without it the chunks are only orphans
    for entry in objects:
        tier.delete(entry.key)
    return len(objects), sum(entry.bytes for entry in objects)


def delete_everywhere(tier: Tier, digest: str) -> tuple[int, int]:
    """Delete a session under every namespace it was ever stored under; returns (objects, bytes) that went.

    Raises:
        StoreUnavailable: as for `delete_session`; what is left is found by the next call.
    """
    parsed = (parse_key(entry.key) for entry in tier.scan(f"v{FORMAT_VERSION}/"))
    namespaces = sorted({parts[0] for parts in parsed if parts is not None and parts[1] == digest})
    gone = [delete_session(tier, namespace, digest) for namespace in namespaces]
    return sum(objects for objects, _ in gone), sum(size for _, size in gone)


def _discard(tier: Tier, namespace: str, digest: str) -> int:
    """`delete_session` for what nobody asks for any more: an unreachable store is no reason to fail."""
    try:
        return delete_session(tier, namespace, digest)[0]
    except StoreError:
        return 0


def delete_quietly(tier: Tier, key: str) -> bool:
    """Delete; an unreachable store only leaves an orphan behind, which is no reason to fail."""
    try:
        return tier.delete(key)
    except StoreError:
        return False

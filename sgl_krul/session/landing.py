"""A session on its way into a tier, in the order that is the promise of invariant 2: chunks, manifest, sweep.

A crash before the manifest leaves the old session, a crash after it the new one; chunks of neither are
orphans for a sweep to remove. Pauses, moves and imports write through here.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import msgspec

from sgl_krul.errors import Corrupt, LeaseHeld, Missing, StoreError
from sgl_krul.session.catalog import delete_quietly, read_manifest, sweep_session
from sgl_krul.session.record import ChunkRef, Manifest, encode_manifest, manifest_key
from sgl_krul.store.tier import Buffer, Tier

__all__ = ["Landing"]


class Landing:
    """A session on its way into a tier: its chunks, then `commit`. A `with` left by an error takes them back.

    `previous` is the session's manifest in the tier before (None: there is none, or a damaged one).

    Raises:
        StoreUnavailable: by the constructor; nothing was changed.
    """

    def __init__(self, tier: Tier, namespace: str, digest: str) -> None:
        self._tier = tier
        self._namespace = namespace
        self._digest = digest
        self._written: list[str] = []
        self.bytes_written = 0
        self.previous = self._current()

    def __enter__(self) -> Landing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, LeaseHeld):  # then all of it is the other server's
            self._withdraw()

    @property
    def puts(self) -> int:
        """Chunks put so far."""
        return len(self._written)

    def find(self, key: str, header: bytes) -> int | None:
        """The bytes of the chunk under `key` if the tier has it with this very header."""
        try:
            if self._tier.read_header(key) != header:
                return None
        except (Missing, Corrupt):
            return None
        known = () if self.previous is None else self.previous.chunks
        for ref in known:
            if ref.key == key:
                return ref.bytes
        # Left by a copy that was killed before its manifest.
        return next((entry.bytes for entry in self._tier.scan(key) if entry.key == key), None)

    def put(self, ref: ChunkRef, header: bytes, segments: Sequence[Buffer]) -> ChunkRef:
        """Store a chunk under the key of `ref`; returns it with the bytes it takes in this tier."""
        self._written.append(ref.key)  # first: a put may fail and the object be there all the same
        stored = self._tier.put(ref.key, header, segments)
        self.bytes_written += stored
        return msgspec.structs.replace(ref, bytes=stored)

    def commit(self, manifest: Manifest) -> None:
        """Make it true: the manifest, then the session's other objects go."""
        key = manifest_key(self._namespace, self._digest)
        self.bytes_written += self._tier.put(key, encode_manifest(manifest), [])
        sweep_session(self._tier, manifest)

    def _current(self) -> Manifest | None:
        try:
            return read_manifest(self._tier, self._namespace, self._digest)
        except Corrupt:
            return None

    def _withdraw(self) -> None:
        """Delete what was put. Best effort: what stays is an orphan, and a sweep takes it.

        Except what the manifest now in place names: a tier may fail after it took the new one, and a chunk
        may have been put in the place of a damaged one of the old session.
        """
        try:
            current = self._current()
        except StoreError:
            return
        named = set() if current is None else {ref.key for ref in current.chunks}
        for key in self._written:
            if key not in named:
                delete_quietly(self._tier, key)

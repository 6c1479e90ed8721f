"""Where the pages of a resume may go: under the caller's key if they are exact, else under a private one."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sgl_krul.service.agreement import Agreement
from sgl_krul.session.private import private_key
from sgl_krul.session.record import Manifest, SessionKey
from sgl_krul.session.registry import Registry, Session

__all__ = ["Isolation", "isolate", "under_names"]


@dataclass(frozen=True)
class Isolation:
    """What a worker has to know of a session's private namespace. `number` is that of the namespace.

    `private`: the session lives there already. `may_be_exact`: it ran exactly in this server until its lossy
    pause, and memory may have it as it was. (Of one found in a store nobody knows how it ran before; and with
    several ranks one may have pages that another has not.)
    """

    number: int
    private: bool
    may_be_exact: bool

    def key(self, key: SessionKey, *, exact: bool) -> SessionKey:
        """The key of pages that are `exact`, or not; `key` is the caller's."""
        return private_key(key, self.number) if self.private or not exact else key


def isolate(session: Session, registry: Registry, ranks: Agreement) -> Isolation:
    """For a resume that begins. Ranks may have counted the generations of their disks apart."""
    (number,) = ranks.agree_min([-registry.private_number(session)])
    private = session.private is not None
    ran_here = len(session.token_ids) > 0
    return Isolation(-number, private, may_be_exact=ran_here and not private and ranks.size == 1)


def under_names(manifest: Manifest, page_hashes: tuple[str, ...]) -> Manifest:
    """`manifest` with the names that its pages have in memory. Its chunks are called as before."""
    return msgspec.structs.replace(manifest, page_hashes=b"".join(map(bytes.fromhex, page_hashes)))

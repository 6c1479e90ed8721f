"""What the service asks of whoever keeps the estimates of sessions, and a keeper that estimates nothing.

An estimate says how alike the layers attend in one session (`sgl_krul.similarity`). It is a help for choosing
how a session is stored and never a condition for storing it: a pause saves what there is by then.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from sgl_krul.service.jobs import Body
from sgl_krul.session.record import Manifest
from sgl_krul.similarity import KeptQueries, Similarity

__all__ = ["Estimates", "Evidence", "NoEstimates"]


class Evidence(NamedTuple):
    """What codings of a session are judged by: sampled queries, the scale of their scores, and how alike its
    layers attend (None: no row has been computed yet).
    """

    queries: KeptQueries
    scale: float
    similarity: Similarity | None


class Estimates(Protocol):
    """The estimates of this process, by session digest. Every method may be called by any thread."""

    @property
    def working(self) -> bool:
        """True while rows are computed in the background."""
        ...

    def statistics(self, digest: str) -> bytes:
        """The estimate as it stands, for the manifest of a pause; b"" when there is none."""
        ...

    def evidence(self, digest: str, tokens: int) -> Evidence | None:
        """Of the session, with queries at positions below `tokens`; None when none are kept."""
        ...

    def goes_on(self, manifest: Manifest) -> None:
        """A stored session comes back: its estimate goes on where the manifest left it.

        What this process knows of the same tokens counts more: it may hold rows that ended after the pause.
        """
        ...

    def describe(self, digest: str) -> Body | None:
        """The estimate as the API shows it; None when there is none."""
        ...

    def forget(self, digest: str) -> None:
        """The session is deleted. Rows of it that are under way come to nothing."""
        ...

    def start_over(self) -> None:
        """The weights changed: no estimate holds any more."""
        ...

    def close(self) -> None:
        """Stop computing; rows under way are dropped."""
        ...


class NoEstimates:
    """Estimates of a server with `estimator.enabled: false`."""

    working = False

    def statistics(self, digest: str) -> bytes:
        return b""

    def evidence(self, digest: str, tokens: int) -> Evidence | None:
        return None

    def goes_on(self, manifest: Manifest) -> None:
        pass

    def describe(self, digest: str) -> Body | None:
        return None

    def forget(self, digest: str) -> None:
        pass

    def start_over(self) -> None:
        pass

    def close(self) -> None:
        pass

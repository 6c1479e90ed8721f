"""What was brought back for a request that waits stays where it is until that request has run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sgl_krul.restore.cost import ForwardSample
from sgl_krul.restore.pipeline import RestoreReport
from sgl_krul.service.agreement import Agreement

__all__ = ["Holds"]


@dataclass
class _Hold:
    until: float
    report: RestoreReport
    released: float
    prompt_tokens: int | None  # of the request, if a restore to the device was made for it


class Holds:
    """The holds of one rank, by the digest of their session. For one thread."""

    def __init__(self, hold_s: float, layers: int, ranks: Agreement, clock: Callable[[], float]) -> None:
        self._hold_s = hold_s
        self._layers = layers
        self._ranks = ranks
        self._clock = clock
        self._holds: dict[str, _Hold] = {}

    def begin(self, digest: str, report: RestoreReport, prompt_tokens: int | None) -> None:
        """The request is let go now. An older hold of the session ends."""
        self.end(digest)
        now = self._clock()
        self._holds[digest] = _Hold(now + self._hold_s, report, now, prompt_tokens)

    def end(self, digest: str) -> None:
        """The request has run, or never came."""
        hold = self._holds.pop(digest, None)
        if hold is not None:
            hold.report.release()

    def end_youngest(self) -> bool:
        """What it pinned may be evicted from now on. False when there is none."""
        if not self._holds:
            return False
        self.end(next(reversed(self._holds)))
        return True

    def first_token(self, digest: str) -> ForwardSample | None:
        """The request has its first token: what that took after a restore to the device. Once."""
        hold = self._holds.get(digest)
        if hold is None or hold.prompt_tokens is None or hold.prompt_tokens <= hold.report.tokens:
            return None
        new, hold.prompt_tokens = hold.prompt_tokens - hold.report.tokens, None
        return ForwardSample(hold.report.tokens, new, self._layers, self._clock() - hold.released)

    def end_old(self) -> None:
        """Nobody waits for ever. A hold may lock pages in the tree: it ends on all ranks at once."""
        if not self._holds:
            return
        now = self._clock()
        over = self._ranks.agree_min([hold.until < now for hold in self._holds.values()])
        for digest in [digest for digest, is_over in zip(self._holds, over, strict=True) if is_over]:
            self.end(digest)

    def close(self) -> None:
        """End all."""
        for digest in list(self._holds):
            self.end(digest)

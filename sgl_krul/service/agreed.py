"""Agreed outcomes: a job is done when it is done on every rank, and failed when it failed on any.

With one rank everything here hands back what it was given.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import takewhile
from typing import Any, TypeVar

from sgl_krul.errors import (
    KrulError,
    LeaseHeld,
    Missing,
    SessionBusy,
    StoreFull,
    StoreUnavailable,
)
from sgl_krul.restore.pipeline import RestoreReport
from sgl_krul.service.agreement import Agreement
from sgl_krul.session.record import ChunkRef
from sgl_krul.session.registry import Registry, Session, State
from sgl_krul.store.memory import PinnedPages

__all__ = [
    "Agreed",
    "agree_on_known",
    "agree_on_report",
    "agree_on_session",
    "agreed",
    "common_chunks",
    "ready",
    "trim",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_KINDS: dict[str, type[KrulError]] = {
    kind.__name__: kind for kind in (StoreFull, StoreUnavailable, LeaseHeld, Missing, SessionBusy)
}


class Agreed(Future[T]):
    """The outcome of `local` once all ranks have theirs; `settle` brings it.

    `discard` gets what `local` brought when another rank failed.
    """

    def __init__(self, local: Future[T], discard: Callable[[T], None]) -> None:
        super().__init__()
        self.local = local
        self._discard = discard

    def settle(self, ranks: Agreement) -> None:
        """`local` is done on every rank: take the outcome they agree on. Of several errors the one of the
        lowest rank counts.
        """
        error = self.local.exception()
        told = ranks.gather("" if error is None else f"{type(error).__name__}\n{error}")
        failed = [rank for rank, text in enumerate(told) if text]
        if not failed:
            self.set_result(self.local.result())
            return
        if error is None:
            self._discard(self.local.result())
        if error is not None and failed[0] == ranks.rank:
            self.set_exception(error)
            return
        kind, _, text = told[failed[0]].partition("\n")
        self.set_exception(_KINDS.get(kind, KrulError)(f"rank {failed[0]} failed: {text}"))


def agreed(future: Future[T], ranks: Agreement, discard: Callable[[T], None] = lambda _: None) -> Future[T]:
    """`future` as the ranks will agree on it."""
    return future if ranks.size == 1 else Agreed(future, discard)


def ready(futures: Sequence[Future[Any]], ranks: Agreement) -> list[bool]:
    """Which of `futures` are done on every rank; those made by `agreed` have their outcome then.

    Every rank has as many, in the same order. Without any nothing is asked.
    """
    if not futures:
        return []
    local = [future.local if isinstance(future, Agreed) else future for future in futures]
    done = [bool(flag) for flag in ranks.agree_min([int(future.done()) for future in local])]
    for future, is_done in zip(futures, done, strict=True):
        if is_done and isinstance(future, Agreed):
            future.settle(ranks)
    return done


def agree_on_report(report: RestoreReport, page_size: int, ranks: Agreement) -> bool:
    """Shorten a restore to what every rank has, and let go of the pages beyond.

    A session that one rank has lost is lost. Damage is that of the rank with the most. Returns whether all
    ranks would put the session under the same key. They do, unless their disks have different pauses of it,
    one lossy and one exact: then nothing of it can be used.
    """
    if ranks.size == 1:
        return True
    number = report.private or 0
    least_number, most = ranks.agree_min([number, -number])
    alike = least_number == -most
    if not alike:
        report.end("missing", "another rank has another pause of the session")
        report.release()
        report.tokens = report.from_memory_tokens = 0
    lost = report.manifest is None and report.miss == "missing"
    mine = [report.tokens, report.from_memory_tokens, -report.corrupt_chunks, -report.missing_chunks, -lost]
    least = ranks.agree_min(mine)
    told = ranks.gather(json.dumps([report.tokens, report.miss, report.cut]))
    tokens, miss, cut, rank = min(
        (*json.loads(text), rank) for rank, text in enumerate(told) if json.loads(text)[0] == least[0]
    )
    if cut and rank != ranks.rank:
        report.miss, report.cut = miss, f"rank {rank}: {cut}"
    report.tokens, report.from_memory_tokens = tokens, least[1]
    report.corrupt_chunks, report.missing_chunks = -least[2], -least[3]
    if least[4]:
        report.manifest = None
        report.miss = "missing"
    trim(report, tokens // page_size)
    return alike


def trim(report: RestoreReport, pages: int) -> None:
    """Let go of what a restore pinned wholly beyond the first `pages` pages."""
    end = kept = 0
    while kept < len(report.pins) and end < pages:
        pinned = report.pins[kept]
        assert isinstance(pinned, PinnedPages), "what is on the device was agreed before it was kept"
        end += len(pinned.slots)
        kept += 1
    for pinned in reversed(report.pins[kept:]):
        pinned.release()
    del report.pins[kept:]


def common_chunks(chunks: Sequence[ChunkRef], ranks: Agreement) -> int:
    """How many leading chunks every rank has cut alike: those of an older pause may end elsewhere."""
    if ranks.size == 1:
        return len(chunks)
    mine = [[chunk.last_page_hash, chunk.pages] for chunk in chunks]  # chained: it names all tokens before
    told = [json.loads(text) for text in ranks.gather(json.dumps(mine))]
    alike = (all(chunk == same[0] for chunk in same) for same in zip(*told, strict=False))
    return sum(1 for _ in takewhile(bool, alike))


def agree_on_known(registry: Registry, ranks: Agreement) -> list[Session]:
    """Keep of the sessions found at start those that every rank found; returns those to delete.

    A pause is committed when every rank has its manifest: what only some have was under way when the server
    ended. A session that is stale on one rank is stale. Where a rank has nothing at all, its disk may be
    away: then nothing is deleted.
    """
    if ranks.size == 1:
        return []
    found = {session.digest: session.state.value for session in registry}
    told = [json.loads(text) for text in ranks.gather(json.dumps(found))]
    dropped = []
    for session in registry:
        states = {rank.get(session.digest) for rank in told}
        if None in states:
            registry.remove(session.digest)
            dropped.append(session)
        elif State.STALE.value in states:
            session.state = State.STALE
    if dropped and not all(told):
        logger.warning(
            "krul: a rank's store is empty: the others' %d sessions can't be resumed", len(dropped)
        )
        return []
    return dropped


def agree_on_session(registry: Registry, digest: str, busy: bool, ranks: Agreement) -> None:
    """Before a verb: every rank must know the session alike, or they would go different ways for good.

    They always should. Where they do not, nobody knows it any more: it is computed anew.
    """
    if ranks.size == 1:
        return
    session = registry.find(digest)
    view = "unknown" if session is None else f"{session.state} {len(session.token_ids)} {session.end_hash}"
    if session is not None:
        view += f" {len(session.branches)} {session.private}"
    told = ranks.gather(f"{view} {busy}")
    if len(set(told)) > 1:
        logger.error("krul: the ranks know session %s differently, it is forgotten: %s", digest[:12], told)
        registry.remove(digest)

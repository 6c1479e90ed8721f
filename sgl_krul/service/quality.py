"""How a session is coded: prices from its own KV and queries, then the cheapest plan within its loss budget.

Made at the pause, from the history alone (Krul's "preemptive"): the sums of its attention rows say which
layers may share, its sampled queries what each way to store a layer does to the layer's output. Where there
is too little to go by, what is new of the session is coded as before, or stored exactly if nothing was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

from sgl_krul.codec.loss import LossMeter, Queries
from sgl_krul.codec.pricing import price
from sgl_krul.config import QualityConfig
from sgl_krul.layout import KvLayout
from sgl_krul.pause.pipeline import PageSource, Segments, Snapshot
from sgl_krul.service.estimates import Estimates, Evidence
from sgl_krul.strategy import (
    Method,
    Plan,
    Sharing,
    Wish,
    blind_pairs,
    choose_pairs,
    loss_budget,
    plan_layers,
)

__all__ = ["QualityPlanner"]

logger = logging.getLogger(__name__)

_LEAST_ROWS = 8  # fewer queries say too little of a layer


class QualityPlanner:
    """Makes the layer plan of a session that is being paused. Blocks: call it from the pause's worker.

    `clock` gives seconds: pricing ends after `config.deadline_s`, and what was not priced is stored raw.
    """

    def __init__(
        self,
        config: QualityConfig,
        layout: KvLayout,
        estimates: Estimates,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._layout = layout
        self._estimates = estimates
        self._clock = clock
        self._budget = loss_budget(config.level)
        self._wish = Wish(
            Method(config.method),
            sharing=Sharing(config.sharing),
            share=config.share,
            gamma=config.gamma,
            alone="int4",
        )

    def plan(self, snapshot: Snapshot, source: PageSource, chunk_tokens: int) -> Plan | None:
        """The plan for what this pause writes; None: there is nothing to judge by.

        KV that was decoded says nothing of what coding costs: `snapshot.exact` False gives None.
        """
        if not self._config.codes or not snapshot.exact:
            return None
        tokens = min(len(snapshot.page_hashes) * self._layout.page_size, self._config.tokens)
        evidence = self._estimates.evidence(snapshot.digest, tokens)
        if evidence is None or len(evidence.queries.positions) < _LEAST_ROWS:
            logger.info("session %s: too few sampled queries to judge codings by", snapshot.digest[:12])
            return None
        pages = tokens // self._layout.page_size
        with ExitStack() as opened:
            chunks = _open(opened, source, pages, max(1, chunk_tokens // self._layout.page_size))
            if not chunks:
                return None
            return self._planned(chunks, evidence)

    def _planned(self, chunks: list[Segments], evidence: Evidence) -> Plan:
        seen, queries = evidence.similarity, evidence.queries
        if seen is None:
            pairs = blind_pairs(self._wish, self._layout.layers)
        else:
            pairs = choose_pairs(self._wish, seen.mass(), seen.distances())
        prices = price(
            chunks,
            self._layout,
            [Queries(q, queries.positions, evidence.scale) for q in queries.q],
            self._wish,
            pairs,
            meter=LossMeter(clock=self._clock),
            deadline_s=self._clock() + self._config.deadline_s,
        )
        return plan_layers(prices.table, self._budget, self._wish)


def _open(opened: ExitStack, source: PageSource, pages: int, chunk_pages: int) -> list[Segments]:
    """The leading pages of the session by chunk, as long as `opened` is; up to one that is nowhere."""
    chunks = []
    for first in range(0, pages, chunk_pages):
        segments = opened.enter_context(source.segments(first, min(chunk_pages, pages - first)))
        if segments is None:
            break
        chunks.append(segments)
    return chunks

"""All methods on one chat: what they store, what comes back, and what the model says on top of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality_chats import Prompt
from benchmarks.quality_claims import upper
from benchmarks.quality_methods import PAIRS, Asked, shared_share
from benchmarks.quality_metrics import Floats, Outcome, compare, spearman
from benchmarks.quality_models import Subject
from benchmarks.quality_runs import alike, history_of, read, score, stored, thinned
from benchmarks.quality_study import Study
from sgl_krul.similarity import Windows
from sgl_krul.strategy import LayerPlan

__all__ = ["Judge", "Verdict", "sampling_rows"]

SAMPLED = (4, 8, 16, 32, 64)  # rows per 1,000 tokens


@dataclass(frozen=True)
class Verdict:
    """What one chat showed: every method's outcome, and the statistics of its history.

    distances [L, L], mass [L] (relative windows) and mass_absolute [L]: float64; pairs: Krul's at r_l .25.
    """

    domain: str
    outcomes: tuple[Outcome, ...]
    distances: NDArray[np.float64]
    mass: NDArray[np.float64]
    mass_absolute: NDArray[np.float64]
    pairs: frozenset[tuple[int, int]]


class Judge:
    """Runs methods on chats with one model. `rows_per_1000`: sampled query rows."""

    def __init__(self, subject: Subject, rows_per_1000: int) -> None:
        self._subject = subject
        self._rows = rows_per_1000

    def judge(self, prompt: Prompt, methods: Sequence[Asked]) -> Verdict:
        """All `methods` on one chat. Its history is computed once; equal plans are run once."""
        subject = self._subject
        history = history_of(subject, prompt, self._rows)
        study = Study(history, subject.layout)
        exact = [score(subject, history.blocks, probe) for probe in prompt.probes]
        seen: dict[LayerPlan, Outcome] = {}
        outcomes = []
        for asked in methods:
            plan = study.plan(asked)
            if plan not in seen:
                seen[plan] = self._outcome(study, plan, exact)
            outcomes.append(replace(seen[plan], method=asked.name, predicted=study.predicted(asked)))
        return Verdict(
            domain=prompt.domain,
            outcomes=tuple(outcomes),
            distances=study.similarity.distances(),
            mass=study.similarity.mass(),
            mass_absolute=alike(history, Windows.absolute).mass(),
            pairs=_pair_set(study),
        )

    def _outcome(self, study: Study, plan: LayerPlan, exact: Sequence[Floats]) -> Outcome:
        subject, history = self._subject, study.history
        prompt = history.prompt
        pool, size = stored(history, subject.layout, plan)
        blocks = read(pool, subject.layout)
        sums: Counter[str] = Counter()
        found, exact_found = {}, {}
        for probe, truth in zip(prompt.probes, exact, strict=True):
            result = compare(truth, score(subject, blocks, probe), probe.ids[-probe.scored :])
            if probe.place:
                found[probe.place], exact_found[probe.place] = result["found"], result["exact_found"]
            sums.update({name: result[name] for name in ("kl", "agreed", "nll_exact", "nll_coded")})
        losses = study.losses(blocks)
        return Outcome(
            method="",
            prompt=prompt.name,
            domain=prompt.domain,
            positions=sum(probe.scored for probe in prompt.probes),
            **sums,
            found=found,
            exact_found=exact_found,
            stored_bytes=size,
            raw_bytes=len(prompt.history) * _raw_token_bytes(subject),
            loss=float(np.mean(losses)),
            worst_loss=float(np.max(losses)),
            shared=shared_share(plan),
            modes=", ".join(f"{count} {choice}" for choice, count in _modes(plan).items()),
        )


def _modes(plan: LayerPlan) -> Counter[str]:
    return Counter("/".join(filter(None, choice.coding)) for choice in plan.choices)


def _raw_token_bytes(subject: Subject) -> int:
    """16-bit KV of a token, all layers."""
    layout = subject.layout
    return 2 * layout.layers * layout.kv_heads * (layout.head_dim + layout.v_head_dim)


def _pair_set(study: Study) -> frozenset[tuple[int, int]]:
    return frozenset((pair.owner, pair.partner) for pair in study.pairs(PAIRS))


def sampling_rows(subject: Subject, prompt: Prompt) -> list[dict[str, Any]]:
    """What fewer rows say against all rows of a history.

    `spearman`: rank correlation of the layer distances; `pairs_kept`: share of the pairs of all rows that
    Krul chooses (r_l .25) from fewer too.
    """
    everything = history_of(subject, prompt, 1000)
    study = Study(everything, subject.layout)
    truth, pairs = upper(study.similarity.distances()).tolist(), _pair_set(study)
    rows = []
    for rows_per_1000 in SAMPLED:
        fewer = Study(thinned(everything, subject, rows_per_1000), subject.layout)
        rows.append(
            {
                "prompt": prompt.name,
                "rows_per_1000": rows_per_1000,
                "spearman": round(spearman(upper(fewer.similarity.distances()).tolist(), truth), 4),
                "pairs_kept": round(len(_pair_set(fewer) & pairs) / max(len(pairs), 1), 3),
            }
        )
    return rows

"""What the paper claims (Krul, arXiv 2507.08045), what its reviewers asked, what the rows say of it. Pure.

A claim is held against a rule that is written beside it. `holds` None: this run has no rows that could tell.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality_metrics import spearman

__all__ = ["MOST_KL", "budget_at_work", "layer_statistics", "paper_claims", "upper"]

Row = Mapping[str, Any]
Layers = Mapping[str, Any]

MOST_BYTES, MOST_KL = 0.55, 0.01
"""What a session of `quality: high` may take and lose. `prompts_over_bound` of a row counts above MOST_KL."""
USABLE_KL, USABLE_TOP1 = 0.05, 0.95
"""What counts as little loss below: about a tenth of what 2 bits a number cost (measurements.md)."""


def upper(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """What stands above the diagonal, row by row."""
    return distances[np.triu_indices(len(distances), 1)]


def layer_statistics(
    distances: Sequence[NDArray[np.float64]],
    mass: Sequence[NDArray[np.float64]],
    absolute: Sequence[NDArray[np.float64]],
    pairs: Sequence[frozenset[tuple[int, int]]],
    gamma: float,
) -> dict[str, Any]:
    """What the histories of a model say of its layers, one entry of each argument for a history.

    distances [L, L]; mass [L] of relative windows and of absolute ones; pairs: those that Krul chooses.
    `agreement`: share of the (history, layer) decisions, I-R or not, that are those of most histories.
    `stability`: mean rank correlation of the distances of two histories. `overlap`: mean share of the pairs
    of one history that another one has too.
    """
    decisions = np.stack(mass) >= gamma
    most = np.maximum(decisions.mean(axis=0), 1 - decisions.mean(axis=0))
    both = list(itertools.combinations(range(len(distances)), 2))
    overlap = [len(pairs[a] & pairs[b]) / max(len(pairs[a]), len(pairs[b]), 1) for a, b in both]
    stability = [spearman(upper(distances[a]).tolist(), upper(distances[b]).tolist()) for a, b in both]
    return {
        "histories": len(distances),
        "distances": np.mean(distances, axis=0).round(5).tolist(),
        "mass": np.mean(mass, axis=0).round(4).tolist(),
        "mass_absolute": np.mean(absolute, axis=0).round(4).tolist(),
        "gamma": gamma,
        "ir_layers": int((np.mean(mass, axis=0) >= gamma).sum()),
        "ir_layers_absolute": int((np.mean(absolute, axis=0) >= gamma).sum()),
        "agreement": round(float(most.mean()), 4),
        "stability": round(float(np.mean(stability)), 4) if both else None,
        "overlap": round(float(np.mean(overlap)), 4) if both else None,
    }


def budget_at_work(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Whether `quality: high` keeps what it promises in domain, whatever method was asked for.

    Promised: a bytes ratio of at most .55, an upper bound of the mean KL of at most .01, and at most one chat
    in 24 above that.
    """
    names = ("model", "method", "bytes_ratio", "kl_hi", "prompts", "prompts_over_bound", "loss")
    return [
        {
            **{name: row[name] for name in names},
            "met": row["bytes_ratio"] <= MOST_BYTES
            and row["kl_hi"] <= MOST_KL
            and row["prompts_over_bound"] <= row["prompts"] / 24,
        }
        for row in rows
        if row["domain"] == "prose" and row["method"].startswith("high:")
    ]


def paper_claims(
    rows: Sequence[Row], layers: Mapping[str, Layers], sampling: Sequence[Row]
) -> list[dict[str, Any]]:
    """For each claim: its text, the rule, and by model what was found and whether it holds.

    rows: those of the result, `model` among their fields; layers: `layer_statistics` by model; sampling: what
    was found for each number of sampled rows.
    """
    claims = []
    for text, rule, judge in _CLAIMS:
        found = {model: judge(_Rows(rows, model), layers[model], sampling) for model in layers}
        claims.append({"claim": text, "rule": rule, "found": found, "holds": _all(found)})
    return claims


def _all(found: Mapping[str, Mapping[str, Any]]) -> bool | None:
    holds = [entry["holds"] for entry in found.values() if entry["holds"] is not None]
    return all(holds) if holds else None


class _Rows:
    """The in-domain rows of a model, by method."""

    def __init__(self, rows: Sequence[Row], model: str) -> None:
        self.model = model
        self.by_method = {
            row["method"]: row for row in rows if row["model"] == model and row["domain"] == "prose"
        }

    def figures(self, *methods: str) -> dict[str, dict[str, Any]]:
        """The figures of those methods that were run."""
        names = ("bytes_ratio", "kl", "kl_lo", "kl_hi", "top1", "ppl_ratio", "r_l")
        return {
            method: {name: self.by_method[method][name] for name in names}
            for method in methods
            if method in self.by_method
        }

    def compared(self, ours: str, theirs: str) -> bool | None:
        """Whether `ours` loses clearly less: the intervals of the mean KL do not touch. None: not run."""
        if ours not in self.by_method or theirs not in self.by_method:
            return None
        return bool(self.by_method[ours]["kl_hi"] < self.by_method[theirs]["kl_lo"])


def _found(holds: bool | None, **figures: Any) -> dict[str, Any]:
    return {"holds": holds, **figures}


def _ir_layers(rows: _Rows, layers: Layers, sampling: Sequence[Row]) -> dict[str, Any]:
    names = ("ir_layers", "ir_layers_absolute", "agreement", "gamma", "histories")
    enough = layers["ir_layers"] > 0 and layers["agreement"] >= 0.9
    return _found(enough, layers=len(layers["mass"]), **{name: layers[name] for name in names})


def _little_loss(*methods: str) -> Callable[[_Rows, Layers, Sequence[Row]], dict[str, Any]]:
    def judge(rows: _Rows, layers: Layers, sampling: Sequence[Row]) -> dict[str, Any]:
        figures = rows.figures(*methods, "int4")
        asked = [figures[method] for method in methods if method in figures]
        holds = (
            all(row["kl_hi"] <= USABLE_KL and row["top1"] >= USABLE_TOP1 for row in asked) if asked else None
        )
        return _found(holds, **figures)

    return judge


def _better(*contests: tuple[str, str]) -> Callable[[_Rows, Layers, Sequence[Row]], dict[str, Any]]:
    def judge(rows: _Rows, layers: Layers, sampling: Sequence[Row]) -> dict[str, Any]:
        outcomes = [rows.compared(*contest) for contest in contests]
        run = [outcome for outcome in outcomes if outcome is not None]
        return _found(all(run) if run else None, **rows.figures(*dict.fromkeys(itertools.chain(*contests))))

    return judge


def _half(rows: _Rows, layers: Layers, sampling: Sequence[Row]) -> dict[str, Any]:
    figures = rows.figures("krul-raw-0.50", "krul-merged-0.50")
    reached = [row["r_l"] for row in figures.values()]
    return _found(min(reached) >= 0.49 if reached else None, **figures)


def _differs(rows: _Rows, layers: Layers, sampling: Sequence[Row]) -> dict[str, Any]:
    overlap = layers["overlap"]
    found = {name: layers[name] for name in ("overlap", "stability", "histories")}
    return _found(None if overlap is None else overlap <= 0.8, **found)


def _storage(rows: _Rows, layers: Layers, sampling: Sequence[Row]) -> dict[str, Any]:
    figures = rows.figures("krul-raw-0.50", "krul-merged-0.50", "int4")
    krul = [row["bytes_ratio"] for name, row in figures.items() if name != "int4"]
    return _found(1 / min(krul) >= 2.35 if krul else None, **figures)


def _middle(rows: _Rows, layers: Layers, sampling: Sequence[Row]) -> dict[str, Any]:
    methods = ("exact", "int4", "krul-raw-0.10", "krul-merged-0.10", "krul-raw-0.25", "krul-merged-0.25")
    places = ("needle_start", "needle_middle", "needle_end")
    figures = {
        method: {place: rows.by_method[method][place] for place in places}
        for method in methods
        if method in rows.by_method and rows.by_method[method]["needle_middle"] is not None
    }
    if "exact" not in figures or "krul-merged-0.10" not in figures:
        return _found(None, **figures)
    kept = figures["krul-merged-0.10"]["needle_middle"] >= figures["exact"]["needle_middle"]
    return _found(kept, **figures)


def _samples(rows: _Rows, layers: Layers, sampling: Sequence[Row]) -> dict[str, Any]:
    ours = [row for row in sampling if row["model"] == rows.model]
    served = [row["spearman"] for row in ours if row["rows_per_1000"] == 16]
    found = {str(row["rows_per_1000"]): [row["spearman"], row["pairs_kept"]] for row in ours}
    return _found(min(served) >= 0.97 if served else None, spearman_and_pairs_kept=found)


_CLAIMS: tuple[tuple[str, str, Callable[[_Rows, Layers, Sequence[Row]], dict[str, Any]]], ...] = (
    (
        "Some layers attend to the first and the last 10% of the tokens whatever is asked (I-R layers)",
        "there are I-R layers at gamma, and 90% of the decisions are the same in most histories",
        _ir_layers,
    ),
    (
        "The most similar I-R layers can share KV at little loss: a tenth of the layers",
        f"upper bound of the mean KL at most {USABLE_KL}, top-1 at least {USABLE_TOP1}, raw and merged",
        _little_loss("krul-raw-0.10", "krul-merged-0.10"),
    ),
    (
        "The same for half of the layers (LongBench 26.70 of 26.94 in the paper's tables)",
        f"upper bound of the mean KL at most {USABLE_KL}, top-1 at least {USABLE_TOP1}, raw and merged",
        _little_loss("krul-raw-0.50", "krul-merged-0.50"),
    ),
    ("Half of the layers can be given up", "r_l of at least .49 is reached with I-R layers alone", _half),
    (
        "Pairs chosen for the conversation lose less than fixed ones (MiniCache)",
        "the intervals of the mean KL do not touch, at every r_l compared",
        _better(
            ("krul-raw-0.10", "fixed-raw-0.10"),
            ("krul-raw-0.25", "fixed-raw-0.25"),
            ("krul-merged-0.10", "fixed-merged-0.10"),
            ("krul-merged-0.25", "fixed-merged-0.25"),
        ),
    ),
    (
        "Close attention tells which layers can share: better than pairs by chance",
        "the intervals of the mean KL do not touch: among I-R layers, and among all",
        _better(
            ("krul-raw-0.10", "ir-only-raw-0.10"),
            ("krul-raw-0.25", "ir-only-raw-0.25"),
            ("all-layers-raw-0.10", "random-raw-0.10"),
            ("all-layers-raw-0.25", "random-raw-0.25"),
        ),
    ),
    (
        "I-R layers are the ones that are safe to share",
        "the closest pairs of I-R layers lose less than the closest of all layers: intervals do not touch",
        _better(("krul-raw-0.10", "all-layers-raw-0.10"), ("krul-raw-0.25", "all-layers-raw-0.25")),
    ),
    (
        "Which layers are close differs between conversations, so it has to be measured in each",
        "two conversations have at most 80% of their pairs in common",
        _differs,
    ),
    ("Stored KV shrinks 2.35 times against all of it", "bytes ratio of at most 1 / 2.35", _storage),
    (
        "Asked by reviewers: facts in the middle of the context",
        "merged at r_l .1 finds as many needles in the middle as the exact model",
        _middle,
    ),
    (
        "Asked by reviewers: an estimator that is cheap enough. Sampled rows give the distances of all rows",
        "rank correlation of at least .97 with all rows, at 16 rows per 1,000 tokens",
        _samples,
    ),
)

"""How alike the layers of a model attend in one session: rows from sampled queries, and sums over them."""

from __future__ import annotations

from sgl_krul.similarity.estimator import Estimator
from sgl_krul.similarity.gram import Floats, Similarity, Windows
from sgl_krul.similarity.job import KeySource, RowCounts, RowJob
from sgl_krul.similarity.query_keep import KeptQueries, QueryKeep
from sgl_krul.similarity.rows import attention_rows
from sgl_krul.similarity.sampling import sampled_positions

__all__ = [
    "Estimator",
    "Floats",
    "KeptQueries",
    "KeySource",
    "QueryKeep",
    "RowCounts",
    "RowJob",
    "Similarity",
    "Windows",
    "attention_rows",
    "sampled_positions",
]

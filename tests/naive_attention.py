"""Attention by its definition: whole matrices in float64. What sgl_krul.similarity is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def random_layers(
    layers: int, tokens: int, heads: int, kv_heads: int, dim: int, *, seed: int, spread: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """q float32 [L, n, H, D] and k float32 [L, n, G, D]; neighbouring layers are alike."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn((layers, tokens, heads, dim), generator=generator).mul_(spread)
    k = torch.randn((layers, tokens, kv_heads, dim), generator=generator)
    for layer in range(1, layers):
        q[layer].mul_(0.5).add_(q[layer - 1])
        k[layer].mul_(0.5).add_(k[layer - 1])
    return q, k


def naive_rows(q: torch.Tensor, k: torch.Tensor, positions: Sequence[int], scale: float) -> Floats:
    """Rows float64 [r, n] of one layer, head by head: q [r, H, D], k [n, G, D]."""
    queries, keys = q.double().numpy(), k.double().numpy()
    heads, group = queries.shape[1], queries.shape[1] // keys.shape[1]
    rows = np.zeros((len(positions), len(keys)))
    for index, position in enumerate(positions):
        for head in range(heads):
            scores = scale * keys[: position + 1, head // group] @ queries[index, head]
            weights = np.exp(scores - scores.max())
            rows[index, : position + 1] += weights / weights.sum() / heads
    return rows


def naive_distances(matrices: Floats) -> Floats:
    """||A_i - A_j||_F of matrices [L, r, n], one after the other."""
    count = len(matrices)
    return np.array([[np.linalg.norm(matrices[i] - matrices[j]) for j in range(count)] for i in range(count)])


def naive_mass(matrices: Floats, positions: Sequence[int], history: int | None = None) -> Floats:
    """I-R mass [L], key by key; windows of the history if one is given, else of each row's own context."""
    mass = np.zeros(len(matrices))
    for index, position in enumerate(positions):
        length = position + 1 if history is None else history
        size = max(1, -(-length // 10))
        keys = [key for key in range(position + 1) if key < size or key >= length - size]
        mass += matrices[:, index, keys].sum(1)
    return mass / len(positions)


class Keys:
    """A KeySource over tensors [n, G, D]; layers that are missing have gone."""

    def __init__(self, layers: Mapping[int, torch.Tensor]) -> None:
        self.layers = layers
        self.asked: list[int] = []

    @contextmanager
    def keys(self, layer: int) -> Iterator[torch.Tensor | None]:
        self.asked.append(layer)
        yield self.layers.get(layer)


def keys_of(k: torch.Tensor) -> Keys:
    """A KeySource over k [L, n, G, D]."""
    return Keys(dict(enumerate(k)))

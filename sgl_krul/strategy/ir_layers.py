"""I-R layers: those whose attention stays with the first and the last tokens, whatever the user asks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ir_layers"]


def ir_layers(mass: NDArray[np.floating[Any]], gamma: float) -> tuple[int, ...]:
    """Krul's Algorithm 1 (arXiv 2507.08045): the layers that may share their KV, ascending.

    `mass` [L]: of each layer, the mean over the history's rows of the attention on the first and the last 10%
    of the context (`sgl_krul.similarity` has the definition). A layer whose mass is below `gamma` answers to
    what is asked and is not I-R. So gamma 0 takes every layer, and a history without rows (mass 0) none.
    The paper doesn't report its gamma.

    Raises:
        ValueError: mass that is not [L], finite and >= 0; gamma negative or NaN.
    """
    if mass.ndim != 1 or not (np.isfinite(mass) & (mass >= 0)).all():
        raise ValueError(f"mass: expected finite numbers >= 0, [layers]; got {mass}")
    if not gamma >= 0:
        raise ValueError(f"gamma: expected a number of at least 0; got {gamma!r}")
    return tuple(int(layer) for layer in np.flatnonzero(mass >= gamma))

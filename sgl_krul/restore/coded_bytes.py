"""What coded chunks weigh: in a plan, and in staging."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sgl_krul.codec.coder import ChunkCoder
from sgl_krul.session.record import ChunkRef

__all__ = ["charged_bytes", "staged_bytes"]

_CODED = 4  # the pages of a coded layer and of its owner, and no more bytes of either


def staged_bytes(ref: ChunkRef, page_bytes: int) -> int:
    """Staging that one layer of the chunk may take. `page_bytes`: of one layer of a page."""
    return ref.pages * page_bytes * (_CODED if ref.plan_id else 1)


def charged_bytes(coder: ChunkCoder, ref: ChunkRef, first_token: int) -> NDArray[np.int64]:
    """Bytes int64 [layers] that loading each layer of a coded chunk is charged.

    The segment of an owner is fetched for its partner too, so all of a pair is charged to the partner, the
    upper layer, and 1 byte to the owner (it is stored). Where lengths depend on the numbers (merged pairs),
    the rest of the chunk is shared out among those layers.
    """
    layers = coder.layout.layers
    lengths = [coder.length(layer, ref.tokens, first_token) for layer in range(layers)]
    rest = max(0, ref.bytes - sum(length or 0 for length in lengths))
    unknown = sum(length is None for length in lengths)
    sizes = np.array([max(1, rest // unknown if length is None else length) for length in lengths], np.int64)
    for partner, owner in coder.plan.owners.items():
        sizes[partner] += sizes[owner]
        sizes[owner] = 1
    return sizes

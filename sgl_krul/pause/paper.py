"""Paper mode: how many leading layers of each chunk are not stored, since a resume always recomputes them.

The staircase is the planner's (Krul's eq. 1, `sgl_krul.restore.paper_plan`), frozen at pause: layer l
recomputes the tokens [0, R_l). A chunk that lies whole below a stair of layer l needs no segment for it. The
number of such layers is the chunk's depth. In one session depths never rise from a chunk to the next: what is
missing is then a staircase itself, and can be recomputed from token 0 on without waiting for anything that is
loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

__all__ = ["falling", "paper_depths", "settle_depths"]


def paper_depths(chunk_tokens: Sequence[int], staircase: Sequence[int]) -> tuple[int, ...]:
    """The depth of each chunk: the leading layers l with R_l >= the end of the chunk, and layer 0 always.

    `chunk_tokens` are the tokens of the chunks, from token 0 on; `staircase` is R_l for every layer, absolute
    tokens.

    Raises:
        ValueError: no layers, a stair that rises with depth or is negative, a chunk without tokens.
    """
    if not staircase or min(staircase) < 0 or not falling(staircase):
        raise ValueError(
            f"staircase {list(staircase)[:8]}: expected one stair a layer, none above the one before"
        )
    if min(chunk_tokens, default=1) < 1:
        raise ValueError(f"chunk_tokens {list(chunk_tokens)[:8]}: expected 1 or more each")
    return tuple(max(1, sum(stair >= end for stair in staircase)) for end in accumulate(chunk_tokens))


def settle_depths(wanted: Sequence[int], kept: Sequence[int | None]) -> tuple[int, ...]:
    """The depths that a session is stored with: as `wanted`, and never rising, where `kept` fixes some.

    `kept` is the depth of a chunk that stays as an earlier pause wrote it, None where the chunk is written
    now. Those that are not None must not rise. A chunk written now goes no deeper than the one before it, and
    at least as deep as what is kept after it.
    """
    floors: list[int] = []
    for depth in reversed(kept):
        floors.append(depth if depth is not None else floors[-1] if floors else 0)
    floors.reverse()
    settled: list[int] = []
    for wish, depth, floor in zip(wanted, kept, floors, strict=True):
        roof = min(wish, settled[-1]) if settled else wish
        settled.append(max(roof, floor) if depth is None else depth)
    return tuple(settled)


def falling(values: Sequence[int]) -> bool:
    """Whether no value is above the one before it."""
    return all(one >= other for one, other in pairwise(values))

"""The Agreement over SGLang's own group of ranks on the CPU (gloo), the one its radix cache agrees by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from sgl_krul.engine.cache import KrulCache
from sgl_krul.errors import UnsupportedServer
from sgl_krul.service.agreement import Agreement, Alone

__all__ = ["Ranks", "in_turn", "ranks_of"]

T = TypeVar("T")


class Ranks:
    """One rank of several. For the scheduler's thread only, as SGLang's own collectives on the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def agree_min(self, values: Sequence[int]) -> list[int]:
        """See Agreement."""
        if not values:
            return []
        tensor = torch.tensor(list(map(int, values)), dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        return list(map(int, tensor.tolist()))

    def gather(self, text: str) -> list[str]:
        """See Agreement. As bytes in tensors: nothing is unpickled."""
        mine = np.frombuffer(text.encode(), np.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(mine)
        dist.all_reduce(lengths, op=dist.ReduceOp.MAX, group=self._group)
        longest = max(1, int(lengths.max()))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = torch.from_numpy(mine.copy())
        rows = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(rows, padded, group=self._group)
        sizes = lengths.tolist()
        return [row[:size].numpy().tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def ranks_of(cache: KrulCache) -> Agreement:
    """The ranks whose trees must stay the same.

    Raises:
        UnsupportedServer: SGLang's cache agrees over another group than that of all its ranks.
    """
    if cache.tp_world_size == 1:
        return Alone()
    group = cache.attn_tp_group if cache.attn_tp_group is not None else cache.tp_group
    if dist.get_world_size(group) != cache.tp_world_size:
        raise UnsupportedServer(
            f"the cache's ranks ({dist.get_world_size(group)}) are not all ranks ({cache.tp_world_size}): "
            "--radix-cache-backend krul serves plain --tp-size, without attention data or context parallelism"
        )
    return Ranks(group)


def in_turn(ranks: Agreement, work: Callable[[], T]) -> T:
    """`work()` on the first rank, then on all others at once: they profit from what the first left behind."""
    if ranks.rank > 0:
        ranks.agree_min([0])
    result = work()
    if ranks.rank == 0:
        ranks.agree_min([0])
    return result

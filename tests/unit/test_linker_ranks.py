"""`load` on several ranks: SGLang takes each one's answer for that of all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sgl_krul.engine.linker import KrulLinker
from sgl_krul.session.record import page_key
from sgl_krul.store.memory import MemoryTier
from tests.pools import PAGE, make_pool, pages_of
from tests.ranks import Meeting

HASHES = ["a" * 64, "b" * 64]


@pytest.mark.parametrize(("held", "loads"), [((2, 2), True), ((2, 1), False), ((0, 2), False)])
def test_a_page_that_left_one_memory_is_loaded_by_none(held: tuple[int, int], loads: bool) -> None:
    meeting = Meeting(2)
    pages, layout = pages_of(make_pool())
    transfer = cast(Any, SimpleNamespace(keys=HASHES, device_indices=torch.arange(PAGE, 3 * PAGE)))

    def rank_runs(rank: int) -> tuple[bool, int]:
        memory = MemoryTier(layout.layers, layout.page_segment_bytes, 2 * layout.page_bytes)
        for page_hash in HASHES[: held[rank]]:
            reservation = memory.reserve([page_key("n", page_hash)])
            assert reservation is not None
            memory.publish(reservation)
        ranks = meeting.ranks[rank]
        linker = KrulLinker(pages, memory, "n", max_layer_wait_s=1, forward_stream=None, ranks=ranks)
        queued = linker.load("request", [transfer])
        pinned = int(linker.cancel_queued_load("request"))
        assert memory.check() == []
        assert memory.reserve(["n/x", "n/y"]) is not None  # nothing is pinned any more
        linker.close()
        return queued, pinned

    assert meeting.everywhere(rank_runs) == [(loads, int(loads))] * 2

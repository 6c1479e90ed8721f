"""SGLang's contract for an external KV store (`UnifiedCacheLinker`), kept by the memory tier.

SGLang asks `lookup` while it matches a prefix, then `load`s what was found into slots of the request, layer
by layer under the forward; and it `offload`s every new node of the tree. All of it is memory only: what rests
in a slower tier is brought to memory before the request is let in (the hold).
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from sgl_krul.engine.device_queue import open_device
from sgl_krul.engine.layer_load import LayerCounter, LayerLoad
from sgl_krul.engine.pool import KvPages, Run
from sgl_krul.engine.upload import open_upload
from sgl_krul.engine.write_through import WriteThrough, device_pages
from sgl_krul.service.agreement import Agreement
from sgl_krul.session.record import page_key
from sgl_krul.store.memory import MemoryTier, PinnedPages, runs
from sgl_krul.store.workers import Workers

__all__ = ["KrulLinker"]

_IDLE = -1  # the consumer index of a batch that loads nothing


class KrulLinker(UnifiedCacheLinker):
    """Memory tier <-> device pool. Called by the scheduler's thread only."""

    def __init__(
        self,
        pages: KvPages,
        memory: MemoryTier,
        namespace: str,
        *,
        max_layer_wait_s: float,
        forward_stream: Any,
        ranks: Agreement,
    ) -> None:
        self.pages = pages
        self.memory = memory
        self.namespace = namespace
        self.forward_stream = forward_stream
        self.pools = {PoolName.KV: pages}
        self.layer_done_counter = LayerCounter(max_layer_wait_s)
        self.write_through = WriteThrough(pages, memory)
        self.suspended = False  # weights changed and the tree still holds KV of the old ones
        self._loaders = Workers("layer-load", 1)
        self._upload = open_upload(pages, open_device(pages.device))
        self._ranks = ranks
        self._queued: dict[str, tuple[PinnedPages, list[Run]]] = {}

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Every leading number of pages that memory holds. Reads memory only; repeatable."""
        return list(range(1, self.memory.leading(self._keys(transfers)) + 1))

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Pin the pages and queue their copy; False (recompute) when one has gone since `lookup`."""
        (transfer,) = transfers
        pinned = self.memory.pin(self._keys(transfers))
        # SGLang takes the answer for that of all ranks, and a page may have left the memory of one.
        everywhere = self._ranks.agree_min([pinned is not None])[0]
        if pinned is None or not everywhere:
            if pinned is not None:
                pinned.release()
            return False
        targets = device_pages(transfer.device_indices, self.pages.layout.page_size)
        self._queued[rid] = (pinned, runs(pinned.slots, targets))
        return True

    def start_layer_wise_loading(self) -> int:
        """Start what was queued for the batch being built."""
        if not self._queued:
            return _IDLE
        load = LayerLoad(self.pages, self.memory, list(self._queued.values()), self._upload)
        self._queued.clear()
        load.start(self._loaders)
        return self.layer_done_counter.add(load)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until batch `counter_index` no longer writes to the device. Every layer has landed then."""
        self.layer_done_counter.finish(counter_index)
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Drop a load that has not started."""
        queued = self._queued.pop(rid, None)
        if queued is None:
            return False
        queued[0].release()
        return True

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Copy a node of a session to memory. False: not ours to keep (no session, other weights)."""
        if session_id is None or self.suspended:
            return False
        (transfer,) = transfers
        ready = self.record_offload_ready() if self.pages.device.type == "cuda" else []
        self.write_through.submit(self._keys(transfers), transfer.device_indices, ready)
        return True

    def num_completed_offloads(self) -> int:
        """Copies that are done and not yet taken."""
        return self.write_through.completed

    def pop_completed_offload(self) -> bool:
        """Take the oldest one; True when its pages are in memory."""
        return self.write_through.take_completed()

    def reset(self) -> None:
        """Flush: nothing queued or under way stays. What memory holds stays, it is as good as before."""
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        self.layer_done_counter.reset()
        self.write_through.quiesce()
        self.suspended = False

    def close(self) -> None:
        """Stop the threads."""
        self.reset()
        self._loaders.close()
        self.write_through.close()

    def _keys(self, transfers: list[PoolTransfer]) -> tuple[str, ...]:
        (transfer,) = transfers
        return tuple(page_key(self.namespace, page_hash) for page_hash in transfer.keys)

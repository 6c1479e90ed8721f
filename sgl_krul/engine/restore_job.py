"""The engine's part of a restore to the device: slots out of SGLang's pool, and pages into its radix tree.

Slots that are reserved belong to no request and no tree node. SGLang counts its pool when idle and ends the
server if a slot is missing, so `EngineDevice.held_tokens` is added to what sessions hold (a hook).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.common import evict_from_tree_cache

from sgl_krul.engine.cache import DevicePath, KrulCache
from sgl_krul.engine.device_slots import DeviceSlots
from sgl_krul.engine.pool import KvPages
from sgl_krul.engine.recompute import Recompute, Recomputer
from sgl_krul.engine.recompute_measure import CALIBRATION_TOKENS, calibration_slices
from sgl_krul.engine.write_through import device_pages
from sgl_krul.restore.cost import ComputeSample
from sgl_krul.service.prepared import Prepared
from sgl_krul.session.record import SessionKey

__all__ = ["EngineDevice"]


class EngineDevice:
    """SGLang's pool and tree as a restore sees them. Called by the scheduler's thread only."""

    def __init__(self, cache: KrulCache, pages: KvPages, recomputer: Recomputer) -> None:
        self._cache = cache
        self._pages = pages
        self._recomputer = recomputer
        self.held_tokens = 0  # reserved, and not in the tree yet
        self.others_need: Callable[[], int] = lambda: 0  # slots that running requests may yet grow by

    @property
    def refuses_recompute(self) -> str:
        """Why this model can't be recomputed; "" if it can."""
        return self._recomputer.reason

    def test_recompute(self) -> None:
        """See whether this model's layers, driven one by one, make what its own forward makes."""
        self._recomputer.self_test()

    def calibration(self) -> Iterator[ComputeSample]:
        """Slices of all sizes, measured one by one; their slots go back at the end, or when it is closed."""
        for tokens in (CALIBRATION_TOKENS, CALIBRATION_TOKENS // 2, CALIBRATION_TOKENS // 4):
            slots = self._alloc(tokens // self._cache.page_size * self._cache.page_size)
            if slots is not None:
                break
        else:
            return
        epoch = self.epoch
        slices = calibration_slices(self._recomputer, slots)
        try:
            while self.epoch == epoch:  # after a flush the slots are somebody else's
                sample = next(slices, None)
                if sample is None:
                    return
                yield sample
        finally:
            slices.close()
            self.unhold(slots, free=self.epoch == epoch)

    def on_device(self, prepared: Prepared) -> int:
        """Leading tokens of the session that are on the device now."""
        return self._cache.match_tokens(prepared.key, prepared.token_ids[: prepared.tokens])

    def reserve(self, prepared: Prepared) -> _Reserved | None:
        """Slots for the tokens of the session that are not on the device; None when there is no room."""
        tokens = prepared.token_ids[: prepared.tokens]
        path = self._cache.lock_path(prepared.key, tokens)
        slots = None
        try:
            slots = self._alloc(len(tokens) - path.tokens)
        finally:
            if slots is None:
                self._cache.unlock_path(path)
        return None if slots is None else _Reserved(self, prepared.key, tokens, path, slots)

    def _alloc(self, tokens: int) -> torch.Tensor | None:
        """`tokens` slots in whole pages, int64 [tokens]. What nobody uses leaves the tree for them.

        Running requests grow: what they may still need is left to them, or SGLang would have to end some.
        """
        allocator = self._cache.token_to_kv_pool_allocator
        if tokens > allocator.available_size() + self._cache.evictable_size() - self.others_need():
            return None
        evict_from_tree_cache(self._cache, tokens)
        slots: torch.Tensor | None = allocator.alloc(tokens)
        if slots is not None:
            self.held_tokens += tokens
        return slots

    def slots_of(self, path: DevicePath, slots: torch.Tensor) -> DeviceSlots:
        """Where loaders write."""
        page_size = self._pages.layout.page_size
        return DeviceSlots(self._pages, device_pages(slots, page_size), path.tokens // page_size)

    def synchronize(self) -> None:
        """Wait until the slices run so far are done on the device."""
        self._recomputer.synchronize()

    def open_recompute(self, tokens: array[int], slots: torch.Tensor) -> Recompute:
        """A recompute of these tokens into these slots (int64 [tokens])."""
        return self._recomputer.open(tokens, slots)

    def insert(
        self, key: SessionKey, tokens: array[int], path: DevicePath, slots: torch.Tensor
    ) -> DevicePath:
        """Put `tokens` into the tree, as a finished request would: `slots` (int64 [tokens]) are those of
        `path`, which are there, and then new ones.

        The new ones are the tree's from then on (it frees what another request has put there meanwhile).
        Returns the path to all of them, locked.
        """
        if len(slots) > path.tokens:
            self._cache.insert(
                InsertParams(
                    key=self._cache.radix_key(key, tokens),
                    value=slots,
                    prev_prefix_len=path.tokens,
                    inserted_len=path.tokens,
                )
            )
        return self._cache.lock_path(key, tokens)

    def unhold(self, slots: torch.Tensor, *, free: bool) -> None:
        """Slots are reserved no more: they go back to the pool, or are somebody else's."""
        self.held_tokens -= len(slots)
        if free and len(slots):
            self._cache.token_to_kv_pool_allocator.free(slots)

    def release(self, path: DevicePath, epoch: int) -> None:
        """Unlock a path of that epoch: a flush has forgotten all locks."""
        if self._cache.epoch == epoch:
            self._cache.unlock_path(path)

    @property
    def epoch(self) -> int:
        """How often the device was flushed."""
        return self._cache.epoch

    def check(self) -> list[str]:
        """Problems found when no restore runs."""
        return [f"{self.held_tokens} slots are reserved for nobody"] if self.held_tokens else []


class _Reserved:
    """A Reservation: slots of one session, and the locked path they follow on."""

    def __init__(
        self,
        device: EngineDevice,
        key: SessionKey,
        tokens: array[int],
        path: DevicePath,
        slots: torch.Tensor,
    ) -> None:
        self.start = path.tokens
        self.target = device.slots_of(path, slots)
        self._device = device
        self._key = key
        self._tokens = tokens
        self._path = path
        self._slots = slots
        self._all_slots = torch.cat([path.indices, slots])
        self._epoch = device.epoch
        self._recomputes: dict[int, Recompute] = {}  # by the first token of their block

    @property
    def revoked(self) -> bool:
        """True once the device was flushed."""
        return self._device.epoch != self._epoch

    def compute(self, start: int, end: int, layer: int, *, kv_only: bool) -> None:
        """One slice through the model. Blocks with different starts are under way side by side."""
        recompute = self._recomputes.get(start)
        if recompute is None:
            recompute = self._device.open_recompute(self._tokens, self._all_slots)
            self._recomputes[start] = recompute
        recompute.run(start, end, layer, kv_only)
        self._device.synchronize()  # so slices don't queue up before others' decodes, and rates are true
        if kv_only:
            self._recomputes.pop(start).close()

    def drop_blocks(self) -> None:
        """What blocks under way hold is let go."""
        for recompute in self._recomputes.values():
            recompute.close()
        self._recomputes.clear()

    def keep(self, tokens: int) -> _PinnedPath:
        """The first `tokens` into the tree, pinned."""
        self._close()
        tokens = max(tokens, self.start)
        new = tokens - self.start
        path = self._device.insert(self._key, self._tokens[:tokens], self._path, self._all_slots[:tokens])
        self._device.unhold(self._slots[:new], free=False)
        self._device.unhold(self._slots[new:], free=True)
        self._device.release(self._path, self._epoch)
        return _PinnedPath(lambda: self._device.release(path, self._epoch))

    def give_back(self) -> None:
        """All slots go back."""
        self._close()
        self._device.unhold(self._slots, free=not self.revoked)
        self._device.release(self._path, self._epoch)

    def _close(self) -> None:
        self.target.revoke()
        self.drop_blocks()


class _PinnedPath:
    """Pages in the tree that nothing may evict until `release`."""

    def __init__(self, unlock: Callable[[], None]) -> None:
        self._unlock: Callable[[], None] | None = unlock

    def release(self) -> None:
        """Let the pages age like any others. Once."""
        if self._unlock is not None:
            unlock, self._unlock = self._unlock, None
            unlock()

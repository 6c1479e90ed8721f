"""The memory tier: fixed-size objects in the slots of one arena, least recently used out first."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from sgl_krul.errors import ConfigError, Corrupt, Missing, StoreFull
from sgl_krul.store.pages import PageReservation, PinnedPages, Slots, runs
from sgl_krul.store.slot_map import SlotMap
from sgl_krul.store.tier import Buffer, Entry, TierUsage, byte_view, check_header, check_key, writable_view

__all__ = ["MemoryTier", "PageReservation", "PinnedPages", "Slots", "runs"]


_MADV_POPULATE_WRITE = 23  # linux/mman.h; Python's mmap has no name for it


class MemoryTier:
    """A Tier for objects of exactly `layers` segments of `segment_bytes`; for the engine, also pages by key.

    The arena is uint8 [layers, slots, segment_bytes]; its memory is touched only when a slot is used. Headers
    lie beside it and are not counted. `clock` gives unix seconds.

    Raises:
        ConfigError: sizes out of range, no room for one page, or more than the system gives.
    """

    name = "memory"

    def __init__(
        self, layers: int, segment_bytes: int, capacity_bytes: int, *, clock: Callable[[], float] = time.time
    ) -> None:
        if layers < 1 or segment_bytes < 1:
            raise ConfigError(f"layers {layers}, segment_bytes {segment_bytes}: expected both at least 1")
        self.object_bytes = layers * segment_bytes
        self.slots = capacity_bytes // self.object_bytes
        if self.slots < 1:
            raise ConfigError(f"memory tier of {capacity_bytes} bytes: one page takes {self.object_bytes}")
        try:
            self._arena = np.empty((layers, self.slots, segment_bytes), dtype=np.uint8)
        except (MemoryError, ValueError) as error:  # numpy's ValueError: more than an address space
            raise ConfigError(
                f"memory tier of {capacity_bytes} bytes: the system refuses; give less"
            ) from error
        self.layers = layers
        self.segment_bytes = segment_bytes
        self.capacity_bytes = capacity_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._map = SlotMap(self.slots)
        self._headers: dict[str, bytes] = {}  # a key without one: empty
        self._modified = np.zeros(self.slots, dtype=np.float64)

    def prefault(self, size_bytes: int) -> int:
        """Have the system back the first slots with memory now, not in the middle of somebody's resume.

        Safe beside any other call, and slow (zeroing): call it from a worker. Returns the bytes backed: at
        most `size_bytes` and the capacity, and 0 where the system can't (Linux before 5.14).
        """
        slots = min(self.slots, size_bytes // self.object_bytes)
        libc = ctypes.CDLL(None, use_errno=True)
        for layer in self._arena[:, :slots] if slots else ():
            start = layer.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
            length = layer.ctypes.data + layer.nbytes - start
            if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE) != 0:
                return 0
        return slots * self.object_bytes

    # -- Tier --

    def put(self, key: str, header: bytes, segments: Sequence[Buffer]) -> int:
        """See Tier. ValueError unless there are `layers` segments of `segment_bytes`.

        With no slot free, the old object of this key gives its own if unpinned: readers miss it meanwhile.
        """
        check_key(key)
        check_header(header)
        views = [byte_view(segment) for segment in segments]
        sizes = {view.nbytes for view in views}
        if len(views) != self.layers or sizes != {self.segment_bytes}:
            raise ValueError(
                f"{len(views)} segments of {sorted(sizes)} bytes: "
                f"expected {self.layers} of {self.segment_bytes}"
            )
        with self._lock:
            if self._map.make_room_in_place(key):
                self._headers.pop(key, None)
            reservation = self._take((key,), frozenset())
        if reservation is None:
            raise StoreFull(f"memory tier: all {self.slots} slots are pinned or being written; release some")
        slot = int(reservation.slots[0])
        try:
            for layer, view in enumerate(views):
                self._arena[layer, slot] = np.frombuffer(view, dtype=np.uint8)
        except BaseException:
            self.abandon(reservation)
            raise
        self._publish(reservation, bytes(header), pin=False, replace=True)
        return self.object_bytes

    def read_header(self, key: str) -> bytes | None:
        """See Tier. Does not count as a use."""
        check_key(key)
        with self._lock:
            return self._headers.get(key, b"") if key in self._map.slot_of else None

    def read_segments(self, key: str, offset: int, into: Sequence[memoryview]) -> None:
        """See Tier. `offset` must be a multiple of `segment_bytes`, else ValueError. Counts as a use."""
        check_key(key)
        if offset < 0 or offset % self.segment_bytes:
            raise ValueError(f"offset {offset}: expected a multiple of {self.segment_bytes}, not negative")
        views = [writable_view(buffer) for buffer in into]
        end = offset + sum(view.nbytes for view in views)
        pinned = self.pin((key,))
        if pinned is None:
            raise Missing(f"memory tier: {key} has gone")
        with pinned:
            if end > self.object_bytes:
                raise Corrupt("length", f"{key}: byte {end} asked for, the body has {self.object_bytes}")
            self._copy_out(int(pinned.slots[0]), offset, views)

    def _copy_out(self, slot: int, position: int, views: Sequence[memoryview]) -> None:
        for view in views:
            target = np.frombuffer(view, dtype=np.uint8)
            done = 0
            while done < target.size:
                layer, start = divmod(position + done, self.segment_bytes)
                count = min(target.size - done, self.segment_bytes - start)
                target[done : done + count] = self._arena[layer, slot, start : start + count]
                done += count
            position += done

    def delete(self, key: str) -> bool:
        """See Tier. A pinned page vanishes from lookup; its slot returns at the last unpin."""
        check_key(key)
        with self._lock:
            self._headers.pop(key, None)
            return self._map.drop(key)

    def scan(self, prefix: str) -> Iterator[Entry]:
        """See Tier."""
        with self._lock:
            found = [(key, slot) for key, slot in self._map.slot_of.items() if key.startswith(prefix)]
            modified = self._modified[np.array([slot for _, slot in found], dtype=np.int64)].tolist()
        entries = [
            Entry(key, self.object_bytes, when) for (key, _), when in zip(found, modified, strict=True)
        ]
        return iter(sorted(entries))

    def usage(self) -> TierUsage:
        """See Tier. Every slot that is not free counts, also one reserved, or pinned and out of lookup."""
        with self._lock:
            used, objects = self._map.used(), len(self._map.slot_of)
        return TierUsage(used * self.object_bytes, objects, self.capacity_bytes)

    # -- pages --

    @property
    def evictions(self) -> int:
        """Pages evicted so far."""
        return self._map.evictions

    def leading(self, keys: Sequence[str]) -> int:
        """How many of the leading keys are present. Changes nothing."""
        with self._lock:
            for count, key in enumerate(keys):
                if key not in self._map.slot_of:
                    return count
        return len(keys)

    def contains(self, keys: Sequence[str]) -> NDArray[np.bool_]:
        """Which keys are present, bool [n]. Changes nothing."""
        with self._lock:
            return np.fromiter((key in self._map.slot_of for key in keys), dtype=np.bool_, count=len(keys))

    def pin(self, keys: Sequence[str]) -> PinnedPages | None:
        """Pin all the keys, or none (None) when one is missing.

        At the last release they count as just used, the first key the most: the last key is evicted first.
        """
        with self._lock:
            slots = self._map.pin(keys)
            return None if slots is None else PinnedPages(tuple(keys), slots, self._unpin)

    def reserve(self, keys: Sequence[str]) -> PageReservation | None:
        """Slots for those of `keys` not present: `.keys` of the answer, in order, without repeats.

        Evicts the least recently used unpinned pages if it must, never one of `keys`. All or nothing: None
        when there is no room, and nothing has changed. Neighbouring slots if there are any. ValueError on a
        bad key.
        """
        for key in keys:
            check_key(key)
        with self._lock:
            new = dict.fromkeys(key for key in keys if key not in self._map.slot_of)
            return self._take(tuple(new), frozenset(keys))

    def publish(
        self, reservation: PageReservation, header: bytes = b"", pin: bool = False
    ) -> PinnedPages | None:
        """Make the written pages visible; with `pin`, pinned too, and only then is the answer not None.

        A key somebody else published meanwhile keeps the other's slot, and ours goes back. After a `clear()`
        since `reserve`, nothing is published, all slots go back and the answer is None: the pages are from
        before it.
        """
        return self._publish(reservation, check_header(header), pin=pin, replace=False)

    def abandon(self, reservation: PageReservation) -> None:
        """Give the slots of a reservation back unpublished."""
        with self._lock:
            self._map.settle(reservation)

    def clear(self) -> None:
        """Forget every page at once. Pinned slots return at the last unpin, reserved ones at publish."""
        with self._lock:
            self._map.clear()
            self._headers.clear()

    def layer(self, index: int) -> NDArray[np.uint8]:
        """The page segments of one layer: a view, uint8 [slots, segment_bytes]."""
        if not 0 <= index < self.layers:
            raise ValueError(f"layer {index}: expected 0 to {self.layers - 1}")
        view: NDArray[np.uint8] = self._arena[index]
        return view

    def check(self) -> list[str]:
        """Problems found; empty when sound."""
        with self._lock:
            strays = self._headers.keys() - self._map.slot_of.keys()
            return self._map.problems() + [f"{key}: a header without a page" for key in sorted(strays)]

    # -- inside --

    def _take(self, keys: tuple[str, ...], kept: frozenset[str]) -> PageReservation | None:
        """SlotMap.take, and the headers of the evicted go. Under the lock."""
        taken = self._map.take(keys, kept)
        if taken is None:
            return None
        reservation, victims = taken
        for key in victims:
            self._headers.pop(key, None)
        return reservation

    def _unpin(self, keys: tuple[str, ...], slots: Slots) -> None:
        with self._lock:
            self._map.unpin(keys, slots)

    def _publish(
        self, reservation: PageReservation, header: bytes, *, pin: bool, replace: bool
    ) -> PinnedPages | None:
        keys = reservation.keys
        now = self._clock()
        with self._lock:
            if not self._map.settle(reservation):
                return None
            if replace:
                for key in keys:
                    self._map.drop(key)
                    self._headers.pop(key, None)
            if header:
                self._headers.update((key, header) for key in keys if key not in self._map.slot_of)
            slots = self._map.publish(reservation)
            self._modified[slots[slots == reservation.slots]] = now
            if pin:
                self._map.pin(keys)
                return PinnedPages(keys, slots, self._unpin)
        return None

"""Which page is in which slot of an arena, and which slot is next. No bytes here; the lock is the caller's.

Who may touch the bytes of a slot, by its state:

    FREE      nobody
    RESERVED  the holder of the PageReservation writes; no lookup finds it
    VISIBLE   found by its key; read under a pin; nobody writes
    HIDDEN    was VISIBLE and pinned when its key went (clear, delete, replaced); FREE at the last unpin

A key is in the eviction order exactly while its slot is VISIBLE and has no pin, so eviction steps over no
pinned slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from sgl_krul.store.pages import PageReservation, Slots

__all__ = ["SlotMap"]

_FREE, _RESERVED, _VISIBLE, _HIDDEN = range(4)


class SlotMap:
    """Keys, states, pins and the eviction order of `slots` slots."""

    def __init__(self, slots: int) -> None:
        self.slot_of: dict[str, int] = {}  # the VISIBLE ones
        self.evictions = 0
        self._state = np.zeros(slots, dtype=np.uint8)
        self._pins = np.zeros(slots, dtype=np.int64)
        self._idle: OrderedDict[str, None] = OrderedDict()  # first out first
        self._epoch = 0  # counts clear()

    def used(self) -> int:
        """Slots that are not FREE."""
        return int(np.count_nonzero(self._state))

    def pin(self, keys: Sequence[str]) -> Slots | None:
        """One more pin on every key (two on one given twice). None, and no change, when one is missing."""
        found = [self.slot_of.get(key, -1) for key in keys]
        if -1 in found:
            return None
        slots = np.array(found, dtype=np.int64)
        np.add.at(self._pins, slots, 1)
        for key in keys:
            self._idle.pop(key, None)
        return slots

    def unpin(self, keys: Sequence[str], slots: Slots) -> None:
        """Undo a `pin`. Keys without a pin now are the last to be evicted, the first key the very last."""
        np.subtract.at(self._pins, slots, 1)
        idle = self._pins[slots] == 0
        self._state[slots[idle & (self._state[slots] == _HIDDEN)]] = _FREE
        order = np.flatnonzero(idle)[::-1]
        for index, slot in zip(order.tolist(), slots[order].tolist(), strict=True):
            if self.slot_of.get(keys[index]) == slot:
                self._touch(keys[index])

    def drop(self, key: str) -> bool:
        """Take a key out of lookup; its slot is FREE now, or at the last unpin. True when it was there."""
        slot = self.slot_of.pop(key, None)
        if slot is None:
            return False
        self._idle.pop(key, None)
        self._state[slot] = _HIDDEN if self._pins[slot] else _FREE
        return True

    def make_room_in_place(self, key: str) -> bool:
        """When no slot is FREE, drop `key` if nobody pins it. True when it was dropped."""
        return key in self._idle and not bool((self._state == _FREE).any()) and self.drop(key)

    def take(self, keys: Sequence[str], kept: frozenset[str]) -> tuple[PageReservation, list[str]] | None:
        """Reserve a slot a key; says whom it evicted, never one of `kept`. Without room None, no change."""
        short = len(keys) - int(np.count_nonzero(self._state == _FREE))
        victims: list[str] = []
        if short > 0:
            for key in self._idle:
                if key not in kept:
                    victims.append(key)
                    if len(victims) == short:
                        break
            if len(victims) < short:
                return None
        for key in victims:
            self.drop(key)
        self.evictions += len(victims)
        slots = self._choose(len(keys))
        self._state[slots] = _RESERVED
        return PageReservation(tuple(keys), slots, self._epoch), victims

    def _choose(self, count: int) -> Slots:
        """The first of the tightest groups of `count` FREE slots: neighbours if there are any. Ascending."""
        free = np.flatnonzero(self._state == _FREE)
        if count == 0:
            return free[:0]
        first = int(np.argmin(free[count - 1 :] - free[: free.size - count + 1]))
        return free[first : first + count]

    def settle(self, reservation: PageReservation) -> bool:
        """End a reservation: its slots are FREE. True when no clear() has come between."""
        assert reservation.open, "reservation was already published or abandoned"
        reservation.open = False
        self._state[reservation.slots] = _FREE
        return reservation.epoch == self._epoch

    def publish(self, reservation: PageReservation) -> Slots:
        """Make the slots of a settled reservation VISIBLE, but for keys that are. Returns all keys' slots."""
        found = [
            self.slot_of.setdefault(key, slot)
            for key, slot in zip(reservation.keys, reservation.slots.tolist(), strict=True)
        ]
        slots = np.array(found, dtype=np.int64)
        fresh = slots[slots == reservation.slots]
        self._state[fresh] = _VISIBLE
        for index in np.flatnonzero(self._pins[slots] == 0)[::-1].tolist():
            self._touch(reservation.keys[index])
        return slots

    def clear(self) -> None:
        """Forget every key. Pinned slots are HIDDEN, reserved ones stay so."""
        self._epoch += 1
        visible = self._state == _VISIBLE
        self._state[visible & (self._pins == 0)] = _FREE
        self._state[visible & (self._pins > 0)] = _HIDDEN
        self.slot_of.clear()
        self._idle.clear()

    def _touch(self, key: str) -> None:
        self._idle[key] = None
        self._idle.move_to_end(key)

    def problems(self) -> list[str]:
        """What is not sound; empty when all is."""
        problems = []
        if sorted(self.slot_of.values()) != np.flatnonzero(self._state == _VISIBLE).tolist():
            problems.append("the visible slots are not those of the keys")
        if bool((self._pins < 0).any()):
            problems.append("a slot has fewer than no pins")
        if bool((self._pins[self._state == _HIDDEN] == 0).any()):
            problems.append("a hidden slot has no pin and was not freed")
        if bool(self._pins[(self._state == _FREE) | (self._state == _RESERVED)].any()):
            problems.append("a free or reserved slot is pinned")
        if set(self._idle) != {key for key, slot in self.slot_of.items() if self._pins[slot] == 0}:
            problems.append("the eviction order does not list the unpinned keys")
        return problems

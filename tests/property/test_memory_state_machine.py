"""The memory tier against a simple model, in any order of calls."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from sgl_krul.errors import StoreFull
from sgl_krul.store import MemoryTier, PageReservation, PinnedPages

LAYERS, SEGMENT, SLOTS = 2, 4, 4
PAGE = LAYERS * SEGMENT
KEYS = st.sampled_from([f"k{number}" for number in range(7)])
KEY_LISTS = st.lists(KEYS, max_size=6)


class MemoryMachine(RuleBasedStateMachine):
    """Model: what each key holds, and the order of eviction; a pin remembers what it must go on seeing."""

    pins = Bundle("pins")
    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.tier = MemoryTier(LAYERS, SEGMENT, SLOTS * PAGE)
        self.serial = 0
        self.content: dict[str, int] = {}  # key -> the serial number its page is filled with
        self.order: list[str] = []  # first out first; the pinned ones too
        self.held: dict[int, tuple[PinnedPages, list[int]]] = {}
        self.open: dict[int, tuple[PageReservation, int, dict[str, int]]] = {}
        self.epoch = 0
        self.evicted = 0

    # -- model --

    def pinned_keys(self) -> set[str]:
        held = {serial for _, serials in self.held.values() for serial in serials}
        return {key for key, serial in self.content.items() if serial in held}

    def used_slots(self) -> int:
        held = {serial for _, serials in self.held.values() for serial in serials}
        reserved = sum(len(reservation.keys) for reservation, _, _ in self.open.values())
        return len(held | set(self.content.values())) + reserved

    def make_room(self, count: int, kept: set[str]) -> bool:
        """Evict what `count` new pages need; False, and no change, when there is not enough."""
        short = count - (SLOTS - self.used_slots())
        protected = self.pinned_keys() | kept
        victims = [key for key in self.order if key not in protected][: max(short, 0)]
        if len(victims) < short:
            return False
        for key in victims:
            self.forget(key)
        self.evicted += len(victims)
        return True

    def forget(self, key: str) -> None:
        self.content.pop(key, None)
        if key in self.order:
            self.order.remove(key)

    def touch(self, keys: list[str]) -> None:
        """The first key is the last to go."""
        for key in reversed(keys):
            if key in self.order:
                self.order.remove(key)
            self.order.append(key)

    def fill(self, slot: int) -> int:
        self.serial += 1
        for layer in range(LAYERS):
            self.tier.layer(layer)[slot] = list((4 * self.serial + layer).to_bytes(SEGMENT, "big"))
        return self.serial

    def serial_in(self, slot: int) -> int:
        numbers = [int.from_bytes(self.tier.layer(layer)[slot].tobytes(), "big") for layer in range(LAYERS)]
        assert numbers == [numbers[0] + layer for layer in range(LAYERS)]
        return numbers[0] // 4

    # -- rules --

    @rule(target=pins, keys=KEY_LISTS)
    def pin(self, keys: list[str]) -> object:
        pinned = self.tier.pin(keys)
        assert (pinned is not None) == all(key in self.content for key in keys)
        if pinned is None:
            return multiple()
        return self.hold(pinned, keys)

    @rule(target=pins, data=st.data())
    def pin_what_is_there(self, data: st.DataObject) -> object:
        return self.pin(data.draw(st.permutations(sorted(self.content))))

    def hold(self, pinned: PinnedPages, keys: list[str]) -> int:
        assert pinned.keys == tuple(keys)
        self.serial += 1
        self.held[self.serial] = (pinned, [self.content[key] for key in keys])
        return self.serial

    @rule(number=consumes(pins))
    def release(self, number: int) -> None:
        pinned, serials = self.held.pop(number)
        pinned.release()
        pinned.release()
        unpinned = set(self.content) - self.pinned_keys()
        pairs = zip(pinned.keys, serials, strict=True)
        still = [key for key, serial in pairs if self.content.get(key) == serial and key in unpinned]
        self.touch(still)

    @rule(target=reservations, keys=KEY_LISTS)
    def reserve(self, keys: list[str]) -> object:
        new = list(dict.fromkeys(key for key in keys if key not in self.content))
        reservation = self.tier.reserve(keys)
        assert (reservation is not None) == self.make_room(len(new), set(keys))
        if reservation is None:
            return multiple()
        assert reservation.keys == tuple(new)
        assert sorted(set(reservation.slots.tolist())) == reservation.slots.tolist()
        written = {key: self.fill(int(slot)) for key, slot in zip(new, reservation.slots, strict=True)}
        self.serial += 1
        self.open[self.serial] = (reservation, self.epoch, written)
        return self.serial

    @rule(target=pins, number=consumes(reservations), pin=st.booleans())
    def publish(self, number: int, pin: bool) -> object:
        reservation, epoch, written = self.open.pop(number)
        pinned = self.tier.publish(reservation, b"published", pin)
        assert (pinned is not None) == (pin and epoch == self.epoch)
        if epoch != self.epoch:
            return multiple()
        keys = list(reservation.keys)
        self.content = written | self.content
        unpinned = set(self.content) - self.pinned_keys()
        self.order += [key for key in keys if key not in self.order]
        if pinned is not None:
            return self.hold(pinned, keys)
        self.touch([key for key in keys if key in unpinned])
        return multiple()

    @rule(number=consumes(reservations))
    def abandon(self, number: int) -> None:
        reservation, _, _ = self.open.pop(number)
        self.tier.abandon(reservation)

    @rule(key=KEYS)
    def put(self, key: str) -> None:
        self.serial += 1
        numbers = [(4 * self.serial + layer).to_bytes(SEGMENT, "big") for layer in range(LAYERS)]
        in_place = self.used_slots() == SLOTS and key in self.content and key not in self.pinned_keys()
        fits = in_place or self.make_room(1, set())
        try:
            self.tier.put(key, b"put", numbers)
        except StoreFull:
            assert not fits
            return
        assert fits
        self.forget(key)
        self.content[key] = self.serial
        self.touch([key])

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        assert self.tier.delete(key) == (key in self.content)
        self.forget(key)

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.content.clear()
        self.order.clear()
        self.epoch += 1

    @rule(keys=KEY_LISTS)
    def look(self, keys: list[str]) -> None:
        expected = [key in self.content for key in keys]
        assert self.tier.contains(keys).tolist() == expected
        assert self.tier.leading(keys) == [*expected, False].index(False)

    # -- invariants --

    @invariant()
    def sound(self) -> None:
        assert self.tier.check() == []

    @invariant()
    def same_as_the_model(self) -> None:
        assert [entry.key for entry in self.tier.scan("")] == sorted(self.content)
        usage = self.tier.usage()
        assert usage == (self.used_slots() * PAGE, len(self.content), SLOTS * PAGE)
        assert self.tier.evictions == self.evicted
        assert all(self.tier.read_header(key) in (b"put", b"published") for key in self.content)

    @invariant()
    def pins_see_what_they_saw(self) -> None:
        for pinned, serials in self.held.values():
            assert [self.serial_in(slot) for slot in pinned.slots.tolist()] == serials

    @invariant()
    def reserved_slots_are_the_holders_own(self) -> None:
        for reservation, _, written in self.open.values():
            assert [self.serial_in(slot) for slot in reservation.slots.tolist()] == list(written.values())

    def teardown(self) -> None:
        """Let everything go, then evict one page after another: the order must be the model's to the end."""
        for number in list(self.held):
            self.release(number)
        for number in list(self.open):
            self.abandon(number)
        free = [self.tier.reserve([f"free{number}"]) for number in range(SLOTS - self.used_slots())]
        while self.order:
            assert self.tier.reserve([f"fresh{len(self.order)}"]) is not None
            self.forget(self.order[0])
            assert [entry.key for entry in self.tier.scan("")] == sorted(self.content)
        assert None not in free
        assert self.tier.reserve(["more"]) is None
        assert self.tier.check() == []


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)

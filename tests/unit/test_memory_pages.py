"""Pages of a session that rests in memory, as a pause reads them."""

from __future__ import annotations

import pytest

from sgl_krul.pause.memory_only import MemoryPages, keep_in_memory
from sgl_krul.store.memory import MemoryTier
from tests.sessions import CHUNK_TOKENS, LAYOUT, TruePages, chat, true_kv


def page_bytes(found: object) -> list[bytes]:
    """Per layer all bytes."""
    assert found is not None
    return [b"".join(bytes(buffer) for buffer in layer) for layer in found]  # type: ignore[attr-defined]


def truth(hashes: tuple[str, ...]) -> list[bytes]:
    """Per layer what these pages must be."""
    return [b"".join(true_kv(h, layer) for h in hashes) for layer in range(LAYOUT.layers)]


def test_pages_are_given_layer_by_layer_in_order(memory: MemoryTier) -> None:
    session = chat(150)
    keep_in_memory(session.snapshot(), TruePages(session.hashes), memory, CHUNK_TOKENS)
    pages = MemoryPages(memory, session.page_keys)
    for first, count in ((0, 4), (4, 4), (8, 1), (3, 1), (0, 9)):
        with pages.segments(first, count) as found:
            assert page_bytes(found) == truth(session.hashes[first : first + count])


def test_pages_in_scattered_slots(memory: MemoryTier) -> None:
    """Written in another order than they are read in."""
    session = chat(150)
    for page_hash, key in reversed(list(zip(session.hashes, session.page_keys, strict=True))):
        memory.put(key, b"", [true_kv(page_hash, layer) for layer in range(LAYOUT.layers)])
    with MemoryPages(memory, session.page_keys).segments(0, 9) as found:
        assert page_bytes(found) == truth(session.hashes)


def test_one_evicted_page_and_none_is_given(memory: MemoryTier) -> None:
    session = chat(150)
    keep_in_memory(session.snapshot(), TruePages(session.hashes), memory, CHUNK_TOKENS)
    memory.delete(session.page_keys[5])
    pages = MemoryPages(memory, session.page_keys)
    with pages.segments(4, 4) as found:
        assert found is None
    with pages.segments(0, 4) as found:
        assert page_bytes(found) == truth(session.hashes[:4])


def test_pages_stay_while_they_are_read(memory: MemoryTier) -> None:
    """A flood of other pages evicts none of them, and an error lets them go (the fixture looks)."""
    session = chat(150)
    keep_in_memory(session.snapshot(), TruePages(session.hashes), memory, CHUNK_TOKENS)
    with MemoryPages(memory, session.page_keys).segments(0, 9) as found:
        for index in range(2 * memory.slots):
            memory.put(f"flood/{index}", b"", [bytes(LAYOUT.page_segment_bytes)] * LAYOUT.layers)
        assert page_bytes(found) == truth(session.hashes)
    with pytest.raises(RuntimeError), MemoryPages(memory, session.page_keys).segments(0, 9):
        raise RuntimeError
    memory.clear()

"""What there is to restore: chunks, where they lie, how many bytes each layer has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

__all__ = ["RestoreTask", "StoredChunk"]


@dataclass(frozen=True)
class StoredChunk:
    """A chunk as it is stored. `tier` "": lost, a hole; its bytes are then of no account.

    `segment_bytes[l]` is loaded whole or not at all; 0: layer l is not stored and must be recomputed.
    """

    tokens: int
    tier: str
    segment_bytes: tuple[int, ...]


@dataclass(frozen=True)
class RestoreTask:
    """A session of `chunks`, the first `on_device_tokens` of which the device has; `new_tokens` follow it.

    Raises:
        ValueError: counts that don't fit together; the message names the first one.
    """

    layers: int
    page_size: int
    chunks: tuple[StoredChunk, ...]
    on_device_tokens: int
    new_tokens: int

    def __post_init__(self) -> None:
        if self.layers < 1 or self.page_size < 1:
            raise ValueError(
                f"layers {self.layers}, page_size {self.page_size}: expected 1 or more of each; "
                "take both from the layout of the KV pool"
            )
        for index, chunk in enumerate(self.chunks):
            self._expect_chunk(index, chunk)
        if not 0 <= self.on_device_tokens <= self.tokens or self.on_device_tokens % self.page_size:
            raise ValueError(
                f"on_device_tokens {self.on_device_tokens}: expected whole pages of {self.page_size} tokens, "
                f"at most the session's {self.tokens}; count what the radix tree matched of this session"
            )
        if self.new_tokens < 0:
            raise ValueError(f"new_tokens {self.new_tokens}: expected 0 (no request follows) or more")

    def _expect_chunk(self, index: int, chunk: StoredChunk) -> None:
        if chunk.tokens < 1 or chunk.tokens % self.page_size:
            raise ValueError(
                f"chunks[{index}].tokens {chunk.tokens}: expected one or more whole pages of "
                f"{self.page_size} tokens; leave out what fills no page"
            )
        if len(chunk.segment_bytes) != self.layers:
            raise ValueError(
                f"chunks[{index}].segment_bytes has {len(chunk.segment_bytes)} layers: expected "
                f"{self.layers}; give one length for each layer, 0 where it is not stored"
            )
        if min(chunk.segment_bytes) < 0:
            raise ValueError(
                f"chunks[{index}].segment_bytes has {min(chunk.segment_bytes)}: "
                "expected 0 (not stored) or more bytes"
            )

    @cached_property
    def tokens(self) -> int:
        """All tokens of the session."""
        return sum(chunk.tokens for chunk in self.chunks)

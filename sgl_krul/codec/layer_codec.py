"""What a lossy codec does: the KV of one layer of one chunk to bytes and back.

`ChunkCoder` puts around it what all of them share: the variant's byte, the exact first tokens, pages.
"""

from __future__ import annotations

from typing import Protocol

from sgl_krul.codec.base import Mode
from sgl_krul.codec.block import KvBlock

__all__ = ["LayerCodec", "PairCodec"]


class LayerCodec(Protocol):
    """One layer by itself, or against a base. Pure and thread safe; the same arguments give the same bytes.

    `base`: for the partner of a pair the owner's block as the decoder has it, the same tokens; else None.
    Blocks have at least one token, and never the first tokens of the session, which are stored apart.
    """

    @property
    def mode(self) -> Mode:
        """The mode its segments have."""
        ...

    def length(self, tokens: int) -> int | None:
        """Bytes that `encode` gives for `tokens` tokens; None where they depend on the numbers."""
        ...

    def encode(self, block: KvBlock, base: KvBlock | None) -> bytes:
        """The stored form.

        Raises:
            ValueError: numbers that this codec can't hold (inf or NaN, for most); a base where none is to be,
                or none where one is.
        """
        ...

    def decode(self, data: memoryview, tokens: int, base: KvBlock | None) -> KvBlock:
        """The block of `tokens` tokens that was encoded.

        Raises:
            Corrupt: "length": bytes that `encode` gives for no such block.
        """
        ...


class PairCodec(Protocol):
    """Two layers that are coded together. Pure and thread safe, blocks as at LayerCodec.

    The owner's bytes stand alone; the partner's need the owner's (the bytes, not the block).
    """

    @property
    def mode(self) -> Mode:
        """The mode of both segments."""
        ...

    def encode(self, owner: KvBlock, partner: KvBlock) -> tuple[bytes, bytes]:
        """The stored forms of owner and partner.

        Raises:
            ValueError: numbers that this codec can't hold.
        """
        ...

    def decode_owner(self, data: memoryview, tokens: int) -> KvBlock:
        """Raises Corrupt("length") for bytes that `encode` gives for no owner of so many tokens."""
        ...

    def decode_partner(self, data: memoryview, owner_data: memoryview, tokens: int) -> KvBlock:
        """Raises Corrupt("length") as `decode_owner`, for either of the two."""
        ...

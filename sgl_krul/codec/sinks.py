"""The first tokens of a session (attention sinks), kept in 16 bits a number whatever the mode.

Models give them much attention and large keys, so errors there cost 1.3 to 20 times as much as elsewhere
(measured). They lie at the front of the chunk that begins with token 0, and there alone: where that chunk has
fewer tokens, fewer are kept.
"""

from __future__ import annotations

from sgl_krul.codec.block import KvBlock, numbers16, pack16, unpack16
from sgl_krul.errors import Corrupt
from sgl_krul.layout import KvLayout

__all__ = ["SINK_TOKENS", "decode_sinks", "encode_sinks", "sink_bytes", "sink_tokens", "split_sinks"]

SINK_TOKENS = 4


def sink_tokens(tokens: int, first_token: int) -> int:
    """How many of a chunk's `tokens` are kept apart; `first_token`: position of its first one."""
    return 0 if first_token else min(SINK_TOKENS, tokens)


def sink_bytes(tokens: int, first_token: int, layout: KvLayout) -> int:
    """Bytes of `encode_sinks` for a chunk of `tokens` tokens."""
    return 2 * numbers16(sink_tokens(tokens, first_token), layout)


def split_sinks(block: KvBlock, first_token: int) -> tuple[KvBlock, KvBlock]:
    """The tokens kept apart, and the rest; views. Either may have no tokens."""
    kept = sink_tokens(block.tokens, first_token)
    return block.rows(0, kept), block.rows(kept, block.tokens)


def encode_sinks(sinks: KvBlock, layout: KvLayout) -> bytes:
    """K, then V, of these tokens: bfloat16, in a float16 pool float16."""
    return pack16(sinks, layout)


def decode_sinks(
    data: memoryview, tokens: int, first_token: int, layout: KvLayout
) -> tuple[KvBlock, memoryview]:
    """The tokens kept apart of a chunk of `tokens` tokens, and what follows them in `data`.

    Raises:
        Corrupt: "length": `data` is shorter than they are.
    """
    size = sink_bytes(tokens, first_token, layout)
    if data.nbytes < size:
        raise Corrupt("length", f"{data.nbytes} bytes, the first tokens alone take {size}")
    return unpack16(data[:size], sink_tokens(tokens, first_token), layout), data[size:]

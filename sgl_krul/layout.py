"""The shape of a KV pool, and the name of everything that must agree before bytes may be shared."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

__all__ = ["FORMAT_VERSION", "KvLayout", "namespace"]

FORMAT_VERSION = 1
"""Version of the stored format. A change makes every older session a miss."""

_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class KvLayout:
    """One rank's KV pool. For one layer of one page: K [page_size, kv_heads, head_dim], then
    V [page_size, kv_heads, v_head_dim], C order, `dtype`.

    `rope` describes the rotation of K in any text that differs where the rotation differs.
    Raises ValueError where a number is not a positive int or the dtype is not known.
    """

    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    page_size: int
    rope: str

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "v_head_dim", "page_size"):
            _check_int(name, getattr(self, name), at_least=1)
        if self.dtype not in _ITEMSIZE:
            raise ValueError(f"dtype: expected one of {', '.join(_ITEMSIZE)}; got {self.dtype!r}")
        _check_text("rope", self.rope)

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return _ITEMSIZE[self.dtype]

    @property
    def k_page_bytes(self) -> int:
        """Bytes of K of one layer of one page."""
        return self.page_size * self.kv_heads * self.head_dim * self.itemsize

    @property
    def v_page_bytes(self) -> int:
        """Bytes of V of one layer of one page."""
        return self.page_size * self.kv_heads * self.v_head_dim * self.itemsize

    @property
    def page_segment_bytes(self) -> int:
        """Bytes of one layer of one page, K and V."""
        return self.k_page_bytes + self.v_page_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return self.layers * self.page_segment_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers."""
        return self.page_bytes // self.page_size


def namespace(
    layout: KvLayout, weights_fingerprint: str, weight_version: str, rank: int, world_size: int
) -> str:
    """32 hex characters (half a SHA-256): equal only where stored KV may be exchanged.

    Depends on nothing but the arguments and FORMAT_VERSION, so that every process gets the same.
    Raises ValueError for an empty fingerprint or a rank outside [0, world_size).
    """
    _check_text("weights_fingerprint", weights_fingerprint)
    if not weights_fingerprint:
        raise ValueError("weights_fingerprint: expected a text that names the weights; got ''")
    _check_text("weight_version", weight_version)
    _check_int("world_size", world_size, at_least=1)
    _check_int("rank", rank, at_least=0)
    if rank >= world_size:
        raise ValueError(f"rank: expected less than world_size {world_size}; got {rank}")
    identity = {
        "format_version": FORMAT_VERSION,
        "layout": asdict(layout),
        "weights_fingerprint": weights_fingerprint,
        "weight_version": weight_version,
        "rank": rank,
        "world_size": world_size,
    }
    # JSON, because it quotes: no choice of texts can run into a neighbouring field.
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


def _check_int(name: str, value: object, *, at_least: int) -> None:
    # bool is an int to Python, and True would count as 1.
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name}: expected an int of at least {at_least}; got {value!r}")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected a str; got {value!r}")

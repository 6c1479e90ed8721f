"""The identity of a session and the manifest: the record of a paused one."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgpack
import msgspec

from sgl_krul.errors import Corrupt, InvalidSessionId
from sgl_krul.strategy.layer_plan import LayerPlan

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST_VERSION",
    "MAX_LOSS",
    "ChunkRef",
    "Manifest",
    "SessionKey",
    "chunk_key",
    "common_tokens",
    "decode_manifest",
    "encode_manifest",
    "is_exact_chunk",
    "manifest_key",
    "pack_tokens",
    "page_key",
    "parse_key",
    "plans_used",
    "session_prefix",
    "validate_session_id",
]

FORMAT_VERSION = 1
MANIFEST_VERSION = 1
MAX_SESSION_ID_CHARACTERS = 256
MAX_TOKENS = 1 << 27
_MAX_GENERATION = 1 << 40
_MAX_BYTES = 1 << 60
_MAX_LAYERS = 4096
_MAX_STATISTICS = 1 << 27  # what _MAX_LAYERS make
MAX_LOSS = 1e9
_MAX_PAUSED_AT = 1e11  # seconds; the year 5138
_CHUNK_NAME = re.compile(r"g[0-9]{8,}-[cl][0-9]{6,}")


def validate_session_id(session_id: object) -> str:
    """Return `session_id` if it may name a session.

    Any text of 1 to 256 characters without control characters or lone surrogates will do, slashes and
    dots included: an id never becomes a path (paths are made of its SHA-256).

    Raises:
        InvalidSessionId: naming the id, what was expected and what to do.
    """
    advice = "send a session_id of 1 to 256 characters without control characters"
    if not isinstance(session_id, str):
        raise InvalidSessionId(
            f"session_id {session_id!r} is a {type(session_id).__name__}, not text: {advice}"
        )
    if not session_id:
        raise InvalidSessionId(f"session_id '' is empty: {advice}, or leave the field out")
    if len(session_id) > MAX_SESSION_ID_CHARACTERS:
        raise InvalidSessionId(
            f"session_id {session_id[:32]!r}... has {len(session_id)} characters, "
            f"expected at most {MAX_SESSION_ID_CHARACTERS}: {advice}"
        )
    bad = next((c for c in session_id if unicodedata.category(c) in ("Cc", "Cs")), None)
    if bad is not None:
        raise InvalidSessionId(f"session_id {session_id[:32]!r} has the character {bad!r}: {advice}")
    return session_id


class SessionKey(NamedTuple):
    """What makes two requests the same session. The salts are the caller's cache namespaces.

    LoRA adapters are not served yet, so they are no part of it; tenants come with quotas.
    """

    session_id: str
    cache_salt: str | None = None
    extra_key: str | None = None

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the parts, each length-prefixed, absent told from empty: its name in stores."""
        digest = hashlib.sha256(b"krul-session-1")
        for part in self:
            if part is None:
                digest.update(b"\x00")
            else:
                encoded = part.encode("utf-8", "surrogatepass")  # JSON may bring lone surrogates in a salt
                digest.update(b"\x01" + len(encoded).to_bytes(8, "little") + encoded)
        return digest.hexdigest()

    @property
    def salted(self) -> bool:
        """True when the caller isolates this session by a cache salt or an extra key."""
        return self.cache_salt is not None or self.extra_key is not None


def session_prefix(namespace: str, digest: str) -> str:
    """Store prefix of everything that belongs to one session under one namespace."""
    return f"v{FORMAT_VERSION}/{namespace}/{digest}/"


def manifest_key(namespace: str, digest: str) -> str:
    """Store key of a session's manifest."""
    return session_prefix(namespace, digest) + "manifest"


def chunk_key(namespace: str, digest: str, generation: int, index: int, *, exact: bool = True) -> str:
    """Store key of chunk `index` as written by pause number `generation`.

    One that is not exact has another name than any that is: it can never be read in the place of one, in
    whatever tier it was left.
    """
    return f"{session_prefix(namespace, digest)}g{generation:08d}-{'c' if exact else 'l'}{index:06d}"


def is_exact_chunk(key: str) -> bool:
    """Whether a chunk of this key (`chunk_key`) is exact."""
    return "-l" not in key.rpartition("/")[2]


def parse_key(key: str) -> tuple[str, str, str] | None:
    """Namespace, digest and name of a session's object ("manifest" or a chunk's); None for any other key."""
    parts = key.split("/")
    return (parts[1], parts[2], parts[3]) if len(parts) == 4 else None


def page_key(namespace: str, page_hash: str) -> str:
    """Memory-tier key of one page. With the namespace: after a change of weights no old page is found."""
    return f"{namespace}/{page_hash}"


def common_tokens(a: array[int], b: array[int]) -> int:
    """Length of the common prefix of two sessions' tokens. Most differ at once: that is cheap."""
    low, high, step = 0, min(len(a), len(b)), 16
    while low < high and a[low : low + step] == b[low : low + step]:
        low, step = min(high, low + step), 2 * step
    high = min(high, low + step)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class ChunkRef(msgspec.Struct, frozen=True, array_like=True):
    """A chunk as the manifest names it. `bytes` is what it takes in the store, header included; of its first
    `depth` layers nothing is stored (paper mode). `plan_id` names the layer plan it is coded under; "": its
    layers are stored raw.
    """

    key: str
    pages: int
    tokens: int
    last_page_hash: str
    token_digest: str
    bytes: int
    depth: int = 0
    plan_id: str = ""

    @property
    def plan_name(self) -> str:
        """What the header of the chunk calls its plan."""
        return self.plan_id or ("paper" if self.depth else "raw")


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The record of a paused session; writing it is what makes the pause true (invariant 2).

    `token_ids` are all tokens of the session's last finished request (little-endian int32), of which the
    first `stored_tokens` have their KV in `chunks`; the rest is recomputed when the session goes on.
    `statistics`: the estimate of how alike the layers attend (`similarity.Similarity`), b"" for none. Whoever
    uses it checks it: a damaged one is a session without an estimate.
    """

    version: int
    namespace: str
    digest: str
    session_id: str
    salted: bool
    generation: int
    page_size: int
    token_ids: bytes
    page_hashes: bytes
    chunks: tuple[ChunkRef, ...]
    exact: bool
    raw_bytes: int
    stored_bytes: int
    paused_at: float
    plans: tuple[bytes, ...] = ()
    loss: float = 0.0
    statistics: bytes = b""

    @property
    def tokens(self) -> int:
        """Tokens of the session."""
        return len(self.token_ids) // 4

    @property
    def token_array(self) -> array[int]:
        """The token ids."""
        token_ids = array("i")
        token_ids.frombytes(self.token_ids)
        return array("q", token_ids)

    @property
    def stored_tokens(self) -> int:
        """Leading tokens whose KV is stored."""
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def layer_plan(self) -> str:
        """The plan of the chunks; of several the last that is not "raw"."""
        return next((chunk.plan_name for chunk in reversed(self.chunks) if chunk.plan_name != "raw"), "raw")

    @property
    def layer_modes(self) -> tuple[str, ...]:
        """How each layer of the last coded chunk is stored, as "mode/variant", a partner's with its owner;
        empty where nothing is coded.
        """
        plan = self.layer_plans.get(self.layer_plan)
        if plan is None:
            return ()
        return tuple(str(c) if c.owner is None else f"{c} of {c.owner}" for c in plan.choices)

    @property
    def layer_plans(self) -> dict[str, LayerPlan]:
        """The layer plans of the coded chunks, by id."""
        plans = map(LayerPlan.decode, self.plans)
        return {plan.plan_id: plan for plan in plans}

    @property
    def hashes(self) -> tuple[str, ...]:
        """SGLang's chained page hashes (hex) of all full pages."""
        raw = self.page_hashes
        return tuple(raw[i : i + 32].hex() for i in range(0, len(raw), 32))


def plans_used(plans: Mapping[str, LayerPlan], chunks: Sequence[ChunkRef]) -> tuple[bytes, ...]:
    """Of layer plans by their id, those that these chunks are coded under, as a manifest has them."""
    names = dict.fromkeys(chunk.plan_id for chunk in chunks if chunk.plan_id)
    return tuple(plans[name].encode() for name in names)


def pack_tokens(token_ids: Any) -> bytes:
    """Token ids as little-endian int32 bytes."""
    packed = array("i", token_ids)
    assert packed.itemsize == 4
    return packed.tobytes()


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as msgpack."""
    return msgspec.msgpack.encode(manifest)


def decode_manifest(data: bytes, *, namespace: str, digest: str) -> Manifest:
    """Read a manifest and check that it is the one asked for and consistent in itself.

    Raises:
        Corrupt: "version" for one from the future, "length" for anything malformed, "identity" for
            another session's or namespace's.
    """
    try:
        # Only the version is read at first: another version may have other fields.
        loose = msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise Corrupt("length", f"manifest of {len(data)} bytes is no msgpack: {error}") from error
    version = loose.get("version") if isinstance(loose, Mapping) else None
    if version != MANIFEST_VERSION:
        raise Corrupt("version", f"manifest has version {version!r}, this is version {MANIFEST_VERSION}")
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise Corrupt("length", f"manifest is malformed: {error}") from error
    if manifest.namespace != namespace or manifest.digest != digest:
        raise Corrupt("identity", f"manifest belongs to {manifest.namespace}/{manifest.digest}")
    problem = (
        _wrong_numbers(manifest)
        or _wrong_chunks(manifest)
        or _wrong_plans(manifest)
        or _wrong_id(manifest.session_id)
    )
    if problem is not None:
        raise Corrupt("length", f"manifest of session {digest[:12]} has {problem}")
    if not manifest.salted and SessionKey(manifest.session_id).digest != digest:
        raise Corrupt("identity", f"digest {digest} is not that of session {manifest.session_id!r}")
    return manifest


def _are_tokens(data: bytes) -> bool:
    """Whether these are int32, not too many, and none negative."""
    if len(data) % 4 or len(data) // 4 > MAX_TOKENS:
        return False
    return min(memoryview(data).cast("i"), default=0) >= 0


def _hashes_agree(manifest: Manifest) -> bool:
    end = 0
    for chunk in manifest.chunks:
        end += chunk.pages
        if manifest.page_hashes[32 * (end - 1) : 32 * end].hex() != chunk.last_page_hash:
            return False
    return True


def _wrong_numbers(manifest: Manifest) -> str | None:
    """What is wrong with the numbers, before any of them is used."""
    if not 1 <= manifest.page_size <= 1 << 16:
        return f"page size {manifest.page_size}"
    if not _are_tokens(manifest.token_ids):
        return f"{len(manifest.token_ids)} bytes of token ids"
    if len(manifest.page_hashes) != 32 * (manifest.tokens // manifest.page_size):
        return f"{len(manifest.page_hashes)} bytes of page hashes for {manifest.tokens} tokens"
    if not 1 <= manifest.generation <= _MAX_GENERATION:
        return f"generation {manifest.generation}"
    if not 0 <= manifest.raw_bytes <= _MAX_BYTES or not 0 <= manifest.stored_bytes <= _MAX_BYTES:
        return f"raw_bytes {manifest.raw_bytes}, stored_bytes {manifest.stored_bytes}"
    if not 0 <= manifest.loss <= MAX_LOSS:  # nor NaN
        return f"a loss of {manifest.loss}"
    if not 0 <= manifest.paused_at <= _MAX_PAUSED_AT:  # nor NaN
        return f"paused at {manifest.paused_at} s"
    if len(manifest.statistics) > _MAX_STATISTICS:
        return f"{len(manifest.statistics)} bytes of statistics"
    return None


def _wrong_chunks(manifest: Manifest) -> str | None:
    """What is wrong with the chunks, by themselves or together with the rest."""
    chunks = manifest.chunks
    prefix = session_prefix(manifest.namespace, manifest.digest)
    pages = sum(chunk.pages for chunk in chunks)
    if any(chunk.pages < 1 or chunk.tokens != chunk.pages * manifest.page_size for chunk in chunks):
        return "a chunk whose tokens and pages disagree"
    if not all(0 <= chunk.bytes <= _MAX_BYTES for chunk in chunks):
        return "a chunk of so many bytes as there cannot be"
    if not all(0 <= chunk.depth <= _MAX_LAYERS for chunk in chunks):
        return "a chunk with a depth that no model has"
    if any(before.depth < chunk.depth for before, chunk in pairwise(chunks)):
        return "a chunk that leaves out more layers than the one before it"
    if pages * 32 > len(manifest.page_hashes):
        return f"{pages} stored pages of {len(manifest.page_hashes) // 32}"
    if not all(_CHUNK_NAME.fullmatch(chunk.key.removeprefix(prefix)) for chunk in chunks):
        return "a chunk under a key that is not one of the session's"
    if manifest.exact and not all(is_exact_chunk(chunk.key) for chunk in chunks):
        return "a chunk that is not exact, and says it were"
    if not _hashes_agree(manifest):
        return "a chunk whose last page hash is not that of its last page"
    return None


def _wrong_plans(manifest: Manifest) -> str | None:
    """What is wrong with the layer plans, or with what the chunks say of theirs."""
    try:
        plans = manifest.layer_plans
    except Corrupt as error:
        if error.reason == "version":  # of a newer server, and no damage
            raise
        return f"a layer plan that can't be read: {error}"
    used = {chunk.plan_id for chunk in manifest.chunks} - {""}
    if len(plans) != len(manifest.plans) or used != set(plans):
        return f"{len(manifest.plans)} layer plans, its chunks name {len(used)}"
    if any(chunk.plan_id and chunk.depth for chunk in manifest.chunks):
        return "a coded chunk of which layers are left out"
    if any(chunk.plan_id and is_exact_chunk(chunk.key) for chunk in manifest.chunks):
        return "a coded chunk under the key of an exact one"
    return None


def _wrong_id(session_id: str) -> str | None:
    try:
        validate_session_id(session_id)
    except InvalidSessionId as error:
        return f"an id that none may have: {error}"
    return None

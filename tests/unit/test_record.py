"""Names of sessions, and the manifest: what is accepted, and what every kind of damage is called."""

from __future__ import annotations

from array import array
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sgl_krul.errors import Corrupt, InvalidSessionId
from sgl_krul.session.record import (
    ChunkRef,
    Manifest,
    SessionKey,
    chunk_key,
    common_tokens,
    decode_manifest,
    encode_manifest,
    manifest_key,
    pack_tokens,
    page_key,
    validate_session_id,
)
from sgl_krul.store.tier import is_key
from tests.sessions import CHUNK_TOKENS, LAYOUT, NAMESPACE, NOW, OTHER_NAMESPACE, PAGE, chat

DIGEST = SessionKey("chat").digest


def manifest(count: int = 150, **changes: Any) -> Manifest:
    """The manifest of a session of `count` tokens: chunks of 4 pages, the last one shorter."""
    session = chat(count)
    hashes = session.hashes
    step = CHUNK_TOKENS // PAGE
    chunks = []
    for index, first in enumerate(range(0, len(hashes), step)):
        pages = min(step, len(hashes) - first)
        key = chunk_key(NAMESPACE, DIGEST, 1, index)
        chunks.append(ChunkRef(key, pages, pages * PAGE, hashes[first + pages - 1], "0" * 64, 5000))
    fields: dict[str, Any] = {
        "version": 1,
        "namespace": NAMESPACE,
        "digest": DIGEST,
        "session_id": "chat",
        "salted": False,
        "generation": 1,
        "page_size": PAGE,
        "token_ids": pack_tokens(session.token_ids),
        "page_hashes": b"".join(bytes.fromhex(page_hash) for page_hash in hashes),
        "chunks": tuple(chunks),
        "exact": True,
        "raw_bytes": len(hashes) * LAYOUT.page_bytes,
        "stored_bytes": 5000 * len(chunks),
        "paused_at": NOW,
    }
    return Manifest(**{**fields, **changes})


def reason(data: bytes, namespace: str = NAMESPACE, digest: str = DIGEST) -> str:
    with pytest.raises(Corrupt) as caught:
        decode_manifest(data, namespace=namespace, digest=digest)
    return caught.value.reason


# -- ids --


@pytest.mark.parametrize(
    "session_id",
    [
        "a",
        "x" * 256,
        "../x",
        "..",
        "/",
        "a/b",
        "/etc/passwd",
        "naïve",
        "会話",
        "🦑",
        " ",
        "e\u0301",
        ".tmp-1",
        "%00",
    ],
)
def test_any_text_may_name_a_session_and_is_never_a_path(session_id: str) -> None:
    assert validate_session_id(session_id) == session_id
    key = manifest_key(NAMESPACE, SessionKey(session_id).digest)
    assert is_key(key)
    assert key.count("/") == 3
    assert ".." not in key


@pytest.mark.parametrize(
    ("session_id", "said"),
    [
        ("", "is empty"),
        ("x" * 257, "has 257 characters"),
        ("a\0b", r"has the character '\\x00'"),
        ("a\nb", "character"),
        ("\x7f", "character"),
        ("a\ud800", "character"),
        (7, "is a int, not text"),
        (None, "is a NoneType"),
        (b"a", "is a bytes"),
        (["a"], "is a list"),
    ],
)
def test_other_ids_are_refused_saying_what_to_do(session_id: object, said: str) -> None:
    with pytest.raises(InvalidSessionId, match=said) as caught:
        validate_session_id(session_id)
    assert "send a session_id of 1 to 256 characters" in str(caught.value)
    assert caught.value.status == 400


def test_the_digest_tells_everything_apart() -> None:
    keys = [
        SessionKey("ab"),
        SessionKey("a"),
        SessionKey("a", "b"),
        SessionKey("a", None, "b"),
        SessionKey("a", "b", ""),
        SessionKey("a", ""),
        SessionKey("a", "", ""),
        SessionKey("a", None, ""),
        SessionKey("", "ab"),
        SessionKey("", "a", "b"),
        SessionKey("a\x00"),
        SessionKey("a\x01b"),
        SessionKey("a", "b\x00"),
        SessionKey("\u00e9"),
        SessionKey("e\u0301"),
        SessionKey("a", "\ud800"),
    ]
    assert len({key.digest for key in keys}) == len(keys)
    assert [key.salted for key in keys[:4]] == [False, False, True, True]


def test_the_digest_is_the_same_in_every_process() -> None:
    assert SessionKey("chat", "salt").digest == (
        "28fd68a79fba0203e8d5f2dd42f2bfcd905c5cbb5cfedd55c799f13a49d18dcb"
    )


@given(st.tuples(st.text(), st.none() | st.text(), st.none() | st.text()), st.data())
def test_equal_digests_mean_equal_keys(
    parts: tuple[str, str | None, str | None], data: st.DataObject
) -> None:
    joined = "".join(part or "" for part in parts)
    cut = data.draw(st.integers(0, len(joined)))
    other = SessionKey(joined[:cut], joined[cut:])
    assert (other.digest == SessionKey(*parts).digest) == (other == SessionKey(*parts))


def test_keys_of_the_store() -> None:
    assert chunk_key("ns", "d", 3, 12) == "v1/ns/d/g00000003-c000012"
    assert manifest_key("ns", "d") == "v1/ns/d/manifest"
    assert page_key("ns", "ff") == "ns/ff"


# -- manifests --


@pytest.mark.parametrize("count", [0, 1, 15, 16, 64, 150, 1000])
def test_a_manifest_comes_back(count: int) -> None:
    record = manifest(count)
    again = decode_manifest(encode_manifest(record), namespace=NAMESPACE, digest=DIGEST)
    assert again == record
    assert again.tokens == count
    assert again.stored_tokens == count // PAGE * PAGE
    assert again.hashes == chat(count).hashes


def test_a_manifest_cut_off_anywhere_is_corrupt() -> None:
    data = encode_manifest(manifest())
    for length in range(len(data)):
        assert reason(data[:length]) in ("length", "version")
    assert reason(data + b"\0") == "length"


def test_a_version_from_the_future_is_told_from_damage() -> None:
    fields = msgpack.unpackb(encode_manifest(manifest()))
    assert reason(msgpack.packb({**fields, "version": 2})) == "version"
    assert reason(msgpack.packb({"version": 2, "all": "else", "is": "new"})) == "version"
    assert reason(msgpack.packb({**fields, "version": None})) == "version"


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\xff", b"\x91\x01", b"\x81\x01\x02", b"\x81\x90\x01", b"\xa1\xff", b"KRUL" * 999]
)
def test_nonsense_is_corrupt(data: bytes) -> None:
    assert reason(data) in ("length", "version")


def test_statistics_come_back_and_a_manifest_without_any_is_as_it_always_was() -> None:
    plain = encode_manifest(manifest())
    assert b"statistics" not in plain
    assert decode_manifest(plain, namespace=NAMESPACE, digest=DIGEST).statistics == b""
    record = manifest(statistics=b"\x00any bytes\xff")
    assert decode_manifest(encode_manifest(record), namespace=NAMESPACE, digest=DIGEST) == record
    fields = msgpack.unpackb(encode_manifest(record))
    for other in (None, 1, "text", [1]):
        assert reason(msgpack.packb({**fields, "statistics": other})) == "length", other


def test_statistics_of_a_size_that_no_model_has_are_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl_krul.session.record._MAX_STATISTICS", 10)
    decode_manifest(encode_manifest(manifest(statistics=bytes(10))), namespace=NAMESPACE, digest=DIGEST)
    assert reason(encode_manifest(manifest(statistics=bytes(11)))) == "length"


def test_another_sessions_manifest_is_not_ours() -> None:
    data = encode_manifest(manifest())
    assert reason(data, namespace=OTHER_NAMESPACE) == "identity"
    assert reason(data, digest=SessionKey("other").digest) == "identity"


def test_fields_of_other_types_names_or_numbers_are_corrupt() -> None:
    fields = msgpack.unpackb(encode_manifest(manifest()))
    for name, value in fields.items():
        for other in (None, [], {}, "text", 1.5, True, -1, b"x"):
            if type(other) is type(value) and other != -1:
                continue
            assert reason(msgpack.packb({**fields, name: other})) in ("length", "version", "identity"), name
        if name != "plans":  # which manifests had not at first
            without = {k: v for k, v in fields.items() if k != name}
            assert reason(msgpack.packb(without)) in ("length", "version")
    assert reason(msgpack.packb({**fields, "more": 1})) == "length"


def replaced_chunk(**changes: Any) -> tuple[ChunkRef, ...]:
    chunks = manifest().chunks
    return (*chunks[:-1], msgspec.structs.replace(chunks[-1], **changes))


INCONSISTENT = {
    "a page size of 0": {"page_size": 0},
    "a page size too large": {"page_size": (1 << 16) + 1},
    "half a token": {"token_ids": pack_tokens(range(150)) + b"\0"},
    "fewer page hashes": {"page_hashes": manifest().page_hashes[:-32]},
    "more page hashes": {"page_hashes": manifest().page_hashes + bytes(32)},
    "half a page hash": {"page_hashes": manifest().page_hashes[:-1]},
    "more tokens": {"token_ids": pack_tokens(range(160))},
    "a chunk without pages": {"chunks": replaced_chunk(pages=0, tokens=0)},
    "a chunk of fewer tokens": {"chunks": replaced_chunk(tokens=1)},
    "a chunk of fewer than no pages": {"chunks": replaced_chunk(pages=-1, tokens=-PAGE)},
    "a chunk of fewer than no bytes": {"chunks": replaced_chunk(bytes=-1)},
    "more pages stored than there are": {"chunks": replaced_chunk(pages=2, tokens=2 * PAGE)},
    "a chunk outside the session": {
        "chunks": replaced_chunk(key=f"v1/{NAMESPACE}/{'0' * 64}/g00000001-c000000")
    },
    "a chunk outside the store": {"chunks": replaced_chunk(key="../../etc/passwd")},
    "the manifest as a chunk": {"chunks": replaced_chunk(key=manifest_key(NAMESPACE, DIGEST))},
    "a chunk of another page": {"chunks": replaced_chunk(last_page_hash="0" * 64)},
    "chunks in another order": {"chunks": (manifest().chunks[1], manifest().chunks[0], manifest().chunks[2])},
    "no generation": {"generation": 0},
    "more generations than there can be": {"generation": (1 << 40) + 1},
    "a generation of 64 bits": {"generation": (1 << 64) - 1},
    "paused at no number": {"paused_at": float("nan")},
    "paused never": {"paused_at": float("inf")},
    "paused before all time": {"paused_at": -float("inf")},
    "paused before 1970": {"paused_at": -1.0},
    "paused in milliseconds": {"paused_at": 1.8e12},
    "fewer than no bytes": {"raw_bytes": -5},
    "fewer than no bytes stored": {"stored_bytes": -(1 << 62)},
    "more bytes than there can be": {"raw_bytes": (1 << 60) + 1},
    "more bytes stored than there can be": {"stored_bytes": (1 << 60) + 1},
    "a chunk of more bytes than there can be": {"chunks": replaced_chunk(bytes=(1 << 60) + 1)},
    "an empty id": {"session_id": ""},
    "an id for the terminal": {"session_id": "a\x1b[2Jb"},
    "an id too long": {"session_id": "x" * 257},
    "an id none may have, of a salted session": {"session_id": "a\nb", "salted": True},
}


@pytest.mark.parametrize("name", INCONSISTENT)
def test_counts_that_disagree_are_corrupt(name: str) -> None:
    assert reason(encode_manifest(manifest(**INCONSISTENT[name]))) == "length"


def test_the_largest_numbers_come_back() -> None:
    record = manifest(generation=1 << 40, raw_bytes=1 << 60, stored_bytes=1 << 60, paused_at=1e11)
    assert decode_manifest(encode_manifest(record), namespace=NAMESPACE, digest=DIGEST) == record


def test_an_id_that_is_not_the_sessions_is_found_unless_a_salt_hides_it() -> None:
    assert reason(encode_manifest(manifest(session_id="other/team"))) == "identity"
    record = manifest(session_id="other/team", salted=True)
    assert decode_manifest(encode_manifest(record), namespace=NAMESPACE, digest=DIGEST) == record


def test_a_session_stored_in_part_is_sound() -> None:
    record = manifest(chunks=manifest().chunks[:1])
    assert decode_manifest(encode_manifest(record), namespace=NAMESPACE, digest=DIGEST).stored_tokens == 64


@given(st.binary(max_size=300))
@example(b"\xc7\x0c\xff" + bytes(12))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    assert reason(data) in ("length", "version")


@given(st.data())
def test_a_changed_byte_is_corrupt_or_changes_no_count(data: st.DataObject) -> None:
    """The object's checksum is the tier's; here is only that nothing unchecked gets through or crashes."""
    good = encode_manifest(manifest())
    position = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[position] ^= data.draw(st.integers(1, 255))
    try:
        record = decode_manifest(bytes(bad), namespace=NAMESPACE, digest=DIGEST)
    except Corrupt:
        return
    assert record.stored_tokens <= record.tokens
    assert len(record.hashes) == record.tokens // record.page_size
    assert all(is_key(chunk.key) for chunk in record.chunks)


@given(
    st.lists(st.integers(0, 3), max_size=80),
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.integers(0, 3), max_size=40),
)
def test_common_tokens_is_the_length_of_the_common_prefix(
    trunk: list[int], a: list[int], b: list[int]
) -> None:
    first, second = array("q", trunk + a), array("q", trunk + b)
    expected = next(
        (i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y),
        min(len(first), len(second)),
    )
    assert common_tokens(first, second) == expected

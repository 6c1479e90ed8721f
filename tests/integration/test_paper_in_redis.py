"""Chunks without their first layers in a real Redis: whole bodies, partial ones and none at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_krul.codec.frame import decode_header
from sgl_krul.pause.pipeline import write_session
from sgl_krul.service.mover import copy_session, read_chunk
from sgl_krul.session.catalog import find_shared, read_manifest
from sgl_krul.session.record import ChunkRef
from sgl_krul.store.tier import Tier
from tests.redis_servers import ValkeyServer, open_tier
from tests.sessions import (
    CHUNK_TOKENS,
    LAYOUT,
    NAMESPACE,
    NOW,
    Chat,
    TruePages,
    chat,
    files,
    open_ssd,
    true_kv,
)

DEPTHS = (3, 3, 2, 1, 0)


def pause(session: Chat, tier: Tier, depths: tuple[int, ...] | None = DEPTHS) -> None:
    """Pause a session of five chunks."""
    write_session(
        session.snapshot(),
        TruePages(session.hashes),
        tier,
        chunk_tokens=CHUNK_TOKENS,
        now=lambda: NOW,
        depths=None if depths is None else lambda chunk_tokens: depths,
    )


def chunks_of(tier: Tier, session: Chat) -> tuple[ChunkRef, ...]:
    """Its chunks in the tier."""
    record = read_manifest(tier, NAMESPACE, session.digest)
    assert record is not None
    return record.chunks


def stored_depths(tier: Tier, session: Chat) -> list[int]:
    """The depths of its chunks; fails unless the rest is the true KV."""
    depths, page = [], 0
    for ref in chunks_of(tier, session):
        _, segments = read_chunk(tier, NAMESPACE, ref)
        depth = ref.depth
        hashes = session.hashes[page : page + ref.pages]
        assert [bytes(segment) for segment in segments] == [
            b"" if layer < depth else b"".join(true_kv(name, layer) for name in hashes)
            for layer in range(LAYOUT.layers)
        ]
        depths.append(depth)
        page += ref.pages
    return depths


def test_a_session_in_paper_mode(redis: ValkeyServer) -> None:
    session = chat(300)
    with open_tier(redis.url) as tier:
        pause(session, tier)
        assert stored_depths(tier, session) == list(DEPTHS)
        assert tier.check() == []
        counted = tier.usage()
        tier.refresh()
        assert tier.usage() == counted
    with open_tier(redis.url) as other:  # another server, which has seen no shapes yet
        catalog, _ = find_shared(other, NAMESPACE, {})
        assert [found.digest for found in catalog.sessions] == [session.digest]
        assert stored_depths(other, session) == list(DEPTHS)


def test_a_layer_alone_is_read_beside_layers_of_no_bytes(redis: ValkeyServer) -> None:
    session = chat(300)
    with open_tier(redis.url) as tier:
        pause(session, tier)
        reads, wanted = [], []
        for ref in chunks_of(tier, session):
            header = decode_header(tier.read_header(ref.key) or b"")
            for layer, entry in enumerate(header.segments):
                reads.append((ref.key, entry.offset, [memoryview(bytearray(entry.length))]))
                wanted.append(read_chunk(tier, NAMESPACE, ref)[1][layer])
        assert tier.read_batch(reads) == [None] * len(reads)
        assert [bytes(views[0]) for _, _, views in reads] == [bytes(segment) for segment in wanted]


def test_the_mode_of_the_servers_changes(redis: ValkeyServer) -> None:
    session = chat(300)
    with open_tier(redis.url) as tier:
        for depths, stored in ((DEPTHS, DEPTHS), (None, (0,) * 5), (DEPTHS, (0,) * 5)):
            pause(session, tier, depths)
            assert stored_depths(tier, session) == list(stored)
            assert len(list(tier.scan(""))) == 6
            assert tier.check() == []


@pytest.mark.parametrize("lost", ["gone", "evicted"])
def test_a_chunk_without_a_body_may_be_lost(redis: ValkeyServer, lost: str) -> None:
    session = chat(300)
    with open_tier(redis.url) as tier:
        pause(session, tier)
        key = chunks_of(tier, session)[1].key
        if lost == "gone":
            tier.delete(key)
        else:
            client = redis.client()
            (name,) = [found for found in client.keys("*") if found.endswith(key.rpartition("/")[2].encode())]
            client.delete(name)
        pause(session, tier)
        assert stored_depths(tier, session) == list(DEPTHS)


def test_from_disk_to_redis_and_back(redis: ValkeyServer, tmp_path: Path) -> None:
    session = chat(300)
    with (
        open_ssd(tmp_path / "one") as here,
        open_ssd(tmp_path / "two") as there,
        open_tier(redis.url) as tier,
    ):
        pause(session, here)
        for source, target in ((here, tier), (tier, there)):
            record = read_manifest(source, NAMESPACE, session.digest)
            assert record is not None
            assert copy_session(record, source, target).cut == ""
        assert files(there.root) == files(here.root)
        assert stored_depths(tier, session) == list(DEPTHS)

"""Starts that must fail, with a message that says what to do; and a disk that fills up while serving."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_krul.errors import StoreFull
from tests.e2e.harness import ServerFactory, prompt


def refused(servers: ServerFactory, *arguments: str, config: Path | None = None) -> str:
    """The log of a server that must not come up."""
    process = servers.launch(*arguments, config=config)
    status = process.wait(timeout_s=180)
    assert status != 0
    return process.log.read_text()


@pytest.mark.parametrize(
    "flags", [("--disable-radix-cache",), ("--tokenizer-worker-num", "2"), ("--enable-hierarchical-cache",)]
)
def test_flag(servers: ServerFactory, flags: tuple[str, ...]) -> None:
    log = refused(servers, *flags)
    assert f"--radix-cache-backend krul can't be used with {flags[0]}" in log
    assert f"Drop {flags[0]}" in log


def test_unknown_setting(servers: ServerFactory) -> None:
    config = servers.place / "wrong.yaml"
    config.write_text("memory: {capacity_byte: 1GiB}\n")
    log = refused(servers, config=config)
    assert "memory.capacity_byte" in log
    assert "capacity_bytes" in log


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_read_only_store(servers: ServerFactory, tmpfs: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(tmpfs)], check=True)
    log = refused(servers, config=servers.config(store=tmpfs / "store"))
    assert str(tmpfs / "store") in log
    assert os.strerror(30) in log  # EROFS


def test_full_disk(servers: ServerFactory, tmpfs: Path) -> None:
    chatter = servers.start(config=servers.config(store=tmpfs / "missing" / "store"))
    small, large = prompt(1, 60), prompt(2, 400)
    reference = chatter.reference([large, [31] * 5], "full")
    chatter.ask(small, "small")
    begun = chatter.ask(large, "large")
    assert chatter.sessions.pause("small").stored_tokens == 64
    with pytest.raises(StoreFull, match="store"):
        chatter.sessions.pause("large")
    assert chatter.sessions.session("large").state == "active"
    assert chatter.sessions.session("small").state == "paused"
    assert chatter.ask(large + begun.tokens + [31] * 5, "large").same_as(reference[1])
    assert chatter.ask(small + [32] * 9, "small").restored > 0
    assert chatter.sessions.sessions().counters["pauses_failed"] == 1
    usage = chatter.sessions.sessions().tiers["ssd"]
    on_disk = sum(p.stat().st_size for p in tmpfs.rglob("*") if p.is_file() and p.name != ".lock")
    assert usage.bytes == on_disk
    chatter.sessions.delete("small")
    assert chatter.sessions.sessions().tiers["ssd"].bytes == 0


def test_a_second_server_on_the_same_store(servers: ServerFactory) -> None:
    first = servers.start()
    other = ServerFactory(servers.place / "other")
    other.place.mkdir()
    try:
        log = refused(other, config=other.config(store=servers.store))
        assert "in use by another server" in log
    finally:
        other.close()
    assert first.http.get("/health").status_code == 200

"""Starts that must fail, with a message that says what to do; and a disk that fills up while serving."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from sgl_krul.errors import StoreFull
from tests.e2e.harness import KRUL_SERVE, SGLANG, START_S, ServerFactory, prompt

# `krul serve` looks at the configuration and the store before it becomes SGLang's server, which looks again.
STARTERS = pytest.mark.parametrize("starter", [KRUL_SERVE, SGLANG], ids=["krul", "sglang"])


def refused(
    servers: ServerFactory,
    *arguments: str,
    config: Path | None = None,
    starter: Sequence[str] = KRUL_SERVE,
    status: int | None = None,
) -> str:
    """What a server that must not come up wrote. `status`: the one it ends with, where that is promised."""
    log = servers.place / "server.log"
    before = log.stat().st_size if log.exists() else 0
    process = servers.launch(*arguments, config=config, starter=starter)
    ended = process.wait(timeout_s=START_S)
    assert ended != 0
    assert status in (None, ended)
    return log.read_bytes()[before:].decode(errors="replace")


@pytest.mark.parametrize(
    "flags", [("--disable-radix-cache",), ("--tokenizer-worker-num", "2"), ("--enable-hierarchical-cache",)]
)
def test_flag(servers: ServerFactory, flags: tuple[str, ...]) -> None:
    log = refused(servers, *flags)
    assert f"--radix-cache-backend krul can't be used with {flags[0]}" in log
    assert f"Drop {flags[0]}" in log


@STARTERS
def test_unknown_setting(servers: ServerFactory, starter: Sequence[str]) -> None:
    config = servers.place / "wrong.yaml"
    config.write_text("memory: {capacity_byte: 1GiB}\n")
    log = refused(servers, config=config, starter=starter, status=2 if starter is KRUL_SERVE else None)
    assert "memory.capacity_byte" in log
    assert "capacity_bytes" in log


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@STARTERS
def test_read_only_store(servers: ServerFactory, tmpfs: Path, starter: Sequence[str]) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(tmpfs)], check=True)
    log = refused(servers, config=servers.config(store=tmpfs / "store"), starter=starter)
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
        for starter in (KRUL_SERVE, SGLANG):
            log = refused(other, config=other.config(store=servers.store), starter=starter)
            assert "in use by another server" in log, starter
    finally:
        other.close()
    assert first.http.get("/health").status_code == 200

"""`krul doctor` and a real Valkey: one that answers, is full, is down, wants a password, or only reads."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from sgl_krul.cli.doctor import Finding, Level, _check_config, _print
from sgl_krul.cli.server_process import free_port
from tests.redis_servers import Proxy, ValkeyServer, certificates, open_tier, replica_of

ADVICE = "start it, or correct redis.url, redis.username, redis.password and redis.tls_ca_file"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path / "valkey") as server:
        yield server


def findings(tmp_path: Path, redis: dict[str, object]) -> list[Finding]:
    file = tmp_path / "krul.yaml"
    memory = {"capacity_bytes": "1MiB", "prefault_bytes": 0}
    section = {"timeout_s": "500ms", "connect_timeout_s": "500ms"} | redis
    file.write_text(yaml.safe_dump({"memory": memory, "ssd": None, "redis": section}), encoding="utf-8")
    return list(_check_config(file, {}))


def redis_finding(tmp_path: Path, **redis: object) -> Finding:
    found = findings(tmp_path, redis)
    # Without a disk, but with Redis, nothing is to be warned of.
    assert [finding.name for finding in found] == ["configuration", "memory", "redis"]
    return found[-1]


def test_one_that_answers(tmp_path: Path, server: ValkeyServer) -> None:
    with open_tier(server.url) as tier:
        stored = tier.put("v1/a/b/manifest", b"header", [bytes(1 << 20)])
    finding = redis_finding(tmp_path, url=server.url, capacity_bytes="1GiB")
    assert finding == Finding(Level.OK, "redis", f"redis {server.address} answers, 1MiB of 1GiB used")
    assert stored > 1 << 20


def test_nothing_is_left_behind(tmp_path: Path, server: ValkeyServer) -> None:
    assert redis_finding(tmp_path, url=server.url).level is Level.OK
    assert server.client().dbsize() == 0


def test_one_that_is_nearly_full(tmp_path: Path, server: ValkeyServer) -> None:
    with open_tier(server.url) as tier:
        tier.put("v1/a/b/manifest", b"header", [bytes(1 << 20)])
    finding = redis_finding(tmp_path, url=server.url, capacity_bytes="1100KiB")
    assert finding == Finding(
        Level.WARN,
        "redis",
        f"redis {server.address} answers, 1MiB of 1.1MiB used",
        "delete sessions (`krul sessions rm`), or raise the cap",
    )


def test_one_that_is_not_there(tmp_path: Path) -> None:
    port = free_port()
    finding = redis_finding(tmp_path, url=f"redis://:s3cret@127.0.0.1:{port}")
    assert (finding.level, finding.advice) == (Level.FAIL, ADVICE)
    assert f"redis 127.0.0.1:{port}" in finding.text
    assert "s3cret" not in finding.text


def test_one_that_hangs(tmp_path: Path, server: ValkeyServer) -> None:
    with server.stopped():
        finding = redis_finding(tmp_path, url=server.url)
    assert (finding.level, finding.advice) == (Level.FAIL, ADVICE)
    assert server.address in finding.text


@pytest.mark.parametrize("given", ["", "wr0ng"])
def test_one_that_wants_another_password(tmp_path: Path, given: str) -> None:
    with ValkeyServer(tmp_path / "valkey", password="s3cret") as server:
        finding = redis_finding(tmp_path, url=server.url, password=given or None)
        sound = redis_finding(tmp_path, url=server.url, password="s3cret")
        in_url = redis_finding(tmp_path, url=server.url.replace("//", "//:s3cret@"))
    assert (finding.level, finding.advice) == (Level.FAIL, ADVICE)
    assert "redis.password" in finding.text
    assert sound.level is in_url.level is Level.OK
    for shown in (finding, sound, in_url):
        assert "s3cret" not in str(shown)
        assert "wr0ng" not in str(shown)


def test_a_password_from_the_environment_is_not_printed(tmp_path: Path) -> None:
    file = tmp_path / "krul.yaml"
    with ValkeyServer(tmp_path / "valkey", password="s3cret") as server:
        text = f"ssd: null\nredis: {{url: '{server.url}', password: $KRUL_REDIS_PASSWORD}}\n"
        file.write_text(text, encoding="utf-8")
        out = io.StringIO()
        for password in ("s3cret", "wr0ng$ecret"):
            for finding in _check_config(file, {"KRUL_REDIS_PASSWORD": password}):
                _print(Console(file=out, soft_wrap=True), finding)
    lines = [line for line in out.getvalue().splitlines() if " redis " in line]
    assert [line.split()[0] for line in lines] == ["OK", "FAIL"]
    assert "s3cret" not in out.getvalue()
    assert "ecret" not in out.getvalue()


def test_one_that_only_reads(tmp_path: Path, server: ValkeyServer) -> None:
    with replica_of(server, tmp_path / "replica") as replica:
        finding = redis_finding(tmp_path, url=replica.url)
    assert (finding.level, finding.advice) == (Level.FAIL, ADVICE)
    assert "READONLY" in finding.text


def test_one_behind_tls(tmp_path: Path, server: ValkeyServer) -> None:
    ca_file, context = certificates(tmp_path)
    with Proxy(server.port, context=context) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}"
        trusted = redis_finding(tmp_path, url=url, tls_ca_file=str(ca_file))
        unknown = redis_finding(tmp_path, url=url)
        missing = redis_finding(tmp_path, url=url, tls_ca_file=str(tmp_path / "none.pem"))
    assert trusted.level is Level.OK
    assert unknown.level is missing.level is Level.FAIL
    assert "certificate" in unknown.text


def test_an_address_that_cannot_be_one(tmp_path: Path) -> None:
    finding = redis_finding(tmp_path, url="http://:s3cret@h:1")
    assert (finding.level, finding.advice) == (
        Level.FAIL,
        "correct the section redis of the configuration",
    )
    assert "s3cret" not in finding.text

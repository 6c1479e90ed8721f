"""Servers shared by the tests of a module: started once, emptied before each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.redis_servers import ValkeyServer


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """One server for the tests of a module."""
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def redis(valkey: ValkeyServer) -> ValkeyServer:
    """That server, empty, however the test before left it."""
    valkey.kill()
    return valkey.start()

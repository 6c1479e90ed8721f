"""Real servers for the end-to-end tests: one at a time, killed as a tree, on a port that was free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Chatter, ServerFactory


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for the module's store, configuration and logs."""
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def servers(place: Path) -> Iterator[ServerFactory]:
    """Starts servers; whatever still runs at the end is killed."""
    factory = ServerFactory(place)
    yield factory
    factory.close()


@pytest.fixture(scope="module")
def chatter(servers: ServerFactory) -> Chatter:
    """The module's server with the default configuration of the tests."""
    return servers.start()


@pytest.fixture
def fresh_id(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Session ids that no other test uses."""
    count = iter(range(1000))
    return lambda: f"{request.node.name}-{next(count)}"

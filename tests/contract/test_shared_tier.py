"""What a tier promises that several servers share, run over each such tier: two servers, one place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sgl_krul.errors import LeaseHeld, StoreError, StoreUnavailable
from sgl_krul.store.tier import SharedTier
from tests.faults import Backing, FakeSharedTier
from tests.redis_servers import ValkeyServer, open_tier

LEASE_S = 0.4
BODY = [b"a" * 1000, b"b" * 1000]


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(params=["redis", "fake"])
def pair(
    request: pytest.FixtureRequest, redis_server: ValkeyServer
) -> Iterator[tuple[SharedTier, SharedTier]]:
    """The same empty place, as the servers alpha:1 and beta:2 see it."""
    if request.param == "fake":
        backing = Backing()
        yield (
            FakeSharedTier(backing, owner="alpha:1", lease_s=LEASE_S),
            FakeSharedTier(backing, owner="beta:2", lease_s=LEASE_S),
        )
        return
    redis_server.client().flushall()
    with (
        open_tier(redis_server.url, owner="alpha:1", lease_s=LEASE_S) as alpha,
        open_tier(redis_server.url, owner="beta:2", lease_s=LEASE_S) as beta,
    ):
        yield alpha, beta
        assert alpha.check() == beta.check() == []


def keys(tier: SharedTier, prefix: str = "") -> list[str]:
    return [entry.key for entry in tier.scan(prefix)]


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(LeaseHeld) as caught:
        call()
    return str(caught.value)


def test_each_sees_what_the_other_does(pair: tuple[SharedTier, SharedTier]) -> None:
    alpha, beta = pair
    alpha.put("s/a", b"one", BODY)
    assert beta.read_header("s/a") == b"one"
    beta.put("s/a", b"two", BODY)
    assert alpha.read_header("s/a") == b"two"
    assert keys(alpha) == keys(beta) == ["s/a"]
    assert beta.delete("s/a") is True
    assert alpha.read_header("s/a") is None
    assert keys(alpha) == []


def test_refresh_counts_what_the_others_put(pair: tuple[SharedTier, SharedTier]) -> None:
    alpha, beta = pair
    stored = alpha.put("s/a", b"h", BODY) + alpha.put("t/b", b"h", BODY)
    assert beta.usage()[:2] == (0, 0)
    beta.refresh()
    assert beta.usage()[:2] == alpha.usage()[:2] == (stored, 2)
    beta.delete("s/a")
    assert beta.usage()[:2] == (stored // 2, 1)
    alpha.refresh()
    assert alpha.usage()[:2] == (stored // 2, 1)


def test_deletes_of_what_was_never_counted_leave_no_debt(pair: tuple[SharedTier, SharedTier]) -> None:
    alpha, beta = pair
    alpha.put("s/a", b"h", BODY)
    beta.delete("s/a")
    assert beta.usage()[:2] == (0, 0)


def test_one_server_writes_at_a_time(pair: tuple[SharedTier, SharedTier]) -> None:
    alpha, beta = pair
    alpha.put("s/old", b"old", BODY)
    with alpha.lease("s/"):
        for call in (
            lambda: beta.put("s/a", b"h", BODY),
            lambda: beta.delete("s/old"),
            lambda: beta.lease("s/").__enter__(),
        ):
            assert "'alpha:1'" in refused(call)
        assert keys(beta) == ["s/old"]
        assert beta.read_header("s/old") == b"old"
        alpha.put("s/a", b"mine", BODY)
        beta.put("t/a", b"other", BODY)
    with beta.lease("s/"):
        beta.put("s/a", b"now", BODY)
        assert "'beta:2'" in refused(lambda: alpha.put("s/a", b"h", BODY))
    assert alpha.read_header("s/a") == b"now"


def test_a_lease_covers_the_whole_name_only(pair: tuple[SharedTier, SharedTier]) -> None:
    alpha, beta = pair
    with alpha.lease("s/1/"):
        beta.put("s/10/a", b"h", BODY)
        beta.put("s/a", b"h", BODY)


def test_a_second_lease_of_the_same_server_is_refused(pair: tuple[SharedTier, SharedTier]) -> None:
    alpha, _ = pair
    with alpha.lease("s/"):
        assert "this server (alpha:1)" in refused(lambda: alpha.lease("s/").__enter__())
        with alpha.lease("t/"):
            alpha.put("t/a", b"h", BODY)
        alpha.put("s/a", b"h", BODY)
    with alpha.lease("s/"):
        pass


def test_an_error_inside_gives_the_lease_back(pair: tuple[SharedTier, SharedTier]) -> None:
    alpha, beta = pair
    with pytest.raises(RuntimeError), alpha.lease("s/"):
        raise RuntimeError
    with beta.lease("s/"):
        beta.put("s/a", b"h", BODY)


def test_a_lease_runs_out(pair: tuple[SharedTier, SharedTier]) -> None:
    """A server that stood still for too long changes nothing, and does not end the lease of another."""
    alpha, beta = pair
    alpha.put("s/a", b"old", BODY)
    with alpha.lease("s/"):
        time.sleep(LEASE_S + 0.1)
        with pytest.raises(StoreUnavailable, match="run out"):
            alpha.put("s/a", b"late", BODY)
        with beta.lease("s/"):
            beta.put("s/a", b"new", BODY)
            assert "'beta:2'" in refused(lambda: alpha.put("s/a", b"late", BODY))
            assert "'beta:2'" in refused(lambda: alpha.delete("s/a"))
    with beta.lease("s/"):
        pass
    assert alpha.read_header("s/a") == b"new"


def test_the_end_of_a_lost_lease_leaves_the_next_one_alone(pair: tuple[SharedTier, SharedTier]) -> None:
    alpha, beta = pair
    with alpha.lease("s/"):
        time.sleep(LEASE_S + 0.1)
        other = beta.lease("s/")
        other.__enter__()
    assert "'beta:2'" in refused(lambda: alpha.put("s/a", b"late", BODY))
    other.__exit__(None, None, None)


def test_puts_keep_a_lease(pair: tuple[SharedTier, SharedTier]) -> None:
    alpha, beta = pair
    with alpha.lease("s/"):
        for count in range(8):
            time.sleep(LEASE_S / 4)
            alpha.put(f"s/{count}", b"h", BODY)
        refused(lambda: beta.put("s/a", b"h", BODY))


@pytest.mark.parametrize("prefix", ["", "/", "s", "s//", "../", "S/", "s/.lease/", "{s}/"])
def test_a_lease_takes_a_directory(pair: tuple[SharedTier, SharedTier], prefix: str) -> None:
    with pytest.raises(ValueError, match="expected the key of a directory"), pair[0].lease(prefix):
        pass


def test_many_servers_want_one_session(pair: tuple[SharedTier, SharedTier]) -> None:
    """Whoever has the lease finds the object as it put it, until the end."""
    winners: list[str] = []
    failures: list[str] = []

    def compete(tier: SharedTier, name: str) -> None:
        for count in range(40):
            try:
                with tier.lease("s/"):
                    mine = f"{name} {count}".encode()
                    tier.put("s/a", mine, BODY)
                    if tier.read_header("s/a") != mine:
                        failures.append(name)
                    winners.append(name)
            except LeaseHeld:
                time.sleep(0.001)

    threads = [
        threading.Thread(target=compete, args=(tier, name)) for tier, name in zip(pair, "ab", strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert len(winners) > 20


def test_touch_takes_anything_but_bad_keys(pair: tuple[SharedTier, SharedTier]) -> None:
    alpha, _ = pair
    alpha.put("s/a", b"h", BODY)
    alpha.touch(["s/a", "s/gone", "nowhere/b"])
    alpha.touch([])
    with pytest.raises(ValueError, match="expected"):
        alpha.touch(["s/a", "Bad"])
    assert keys(alpha) == ["s/a"]


@pytest.mark.parametrize("closed", ["server", "tier"])
def test_out_of_reach(closed: str, tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path / "server").start()
    tier = open_tier(server.url, timeout_s=1.0)
    assert tier.available
    if closed == "server":
        server.kill()
    else:
        tier.close()
    calls: list[Callable[[], object]] = [
        lambda: tier.put("s/a", b"h", BODY),
        lambda: tier.read_header("s/a"),
        lambda: tier.read_segments("s/a", 0, []),
        lambda: tier.delete("s/a"),
        lambda: tier.scan(""),
        lambda: tier.scan("s/"),
        lambda: tier.lease("s/").__enter__(),
        tier.refresh,
        tier.check,
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable):
            call()
    tier.touch(["s/a"])
    assert isinstance(tier.usage().objects, int)
    errors = tier.read_batch([("s/a", 0, []), ("t/b", 0, [])])
    assert all(isinstance(error, StoreError) for error in errors)
    tier.close()
    server.kill()

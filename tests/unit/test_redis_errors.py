"""Every error redis-py can raise is one of ours, with what to do about it."""

from __future__ import annotations

import inspect

import pytest
from redis import exceptions

from sgl_krul.errors import StoreError, StoreFull, StoreUnavailable
from sgl_krul.store.redis.tier import node_failure, reply_error
from sgl_krul.store.redis.wire import Elsewhere, NodeFailure, WrongType

CLASSES = [
    kind
    for _, kind in inspect.getmembers(exceptions, inspect.isclass)
    if issubclass(kind, exceptions.RedisError)
]


def made(kind: type[exceptions.RedisError]) -> exceptions.RedisError:
    if issubclass(kind, exceptions.AskError):
        return kind("5 127.0.0.1:7000")
    return kind("for a test")


def test_there_are_errors_to_look_at() -> None:
    assert len(CLASSES) > 25


@pytest.mark.parametrize("kind", CLASSES)
def test_each_is_known_as_a_failure_and_as_a_reply(kind: type[exceptions.RedisError]) -> None:
    failure = node_failure(made(kind), 2.0)
    assert isinstance(failure, NodeFailure)
    assert failure.counts
    reply = reply_error(made(kind), "redis here")
    error = reply.error if isinstance(reply, Elsewhere) else reply
    assert isinstance(error, StoreError)
    assert "redis here" in str(error)


@pytest.mark.parametrize(
    ("error", "again", "text"),
    [
        (exceptions.AuthenticationError("x", status_code="WRONGPASS"), False, "correct redis.username and"),
        (exceptions.AuthenticationError("x", status_code="NOAUTH"), False, "set redis.password"),
        (exceptions.BusyLoadingError("x"), True, "still loading"),
        (exceptions.TimeoutError("x"), True, "did not answer for 2 s"),
        (TimeoutError("x"), True, "did not answer for 2 s"),
        (exceptions.NoPermissionError("no right"), False, "no right (NOPERM); give"),
        (exceptions.ResponseError("DB index is out of range"), False, "refuses the connection: DB index"),
        (exceptions.ConnectionError("Error 111. Connection refused."), True, "refused; see whether it runs"),
        (OSError(5, "broken"), True, "broken; see whether"),
    ],
)
def test_failures_say_what_to_do(error: Exception, again: bool, text: str) -> None:
    failure = node_failure(error, 2.0)
    assert failure.again is again
    assert text in failure.reason


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (exceptions.OutOfMemoryError("full"), StoreFull, "raise maxmemory there"),
        (exceptions.NoPermissionError("no right"), StoreUnavailable, "give this user the right"),
        (exceptions.ResponseError("WRONGTYPE Operation"), WrongType, "something else wrote a key of ours"),
        (exceptions.ResponseError("MISCONF disk"), StoreUnavailable, "MISCONF disk"),
    ],
)
def test_replies_say_what_to_do(error: exceptions.RedisError, kind: type[StoreError], text: str) -> None:
    reply = reply_error(error, "redis here")
    assert type(reply) is kind
    assert text in str(reply)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (exceptions.MovedError("5 127.0.0.1:7000"), "write redis+cluster://"),
        (exceptions.AskError("5 127.0.0.1:7000"), "(Ask)"),
        (exceptions.TryAgainError("x"), "(TryAgain)"),
        (exceptions.ClusterDownError("x"), "(ClusterDown)"),
        (exceptions.MasterDownError("x"), "(MasterDown)"),
        (exceptions.ReadOnlyError("x"), "put the address of the master in redis.url"),
    ],
)
def test_what_may_be_elsewhere_by_now(error: exceptions.RedisError, text: str) -> None:
    reply = reply_error(error, "redis here")
    assert isinstance(reply, Elsewhere)
    assert text in str(reply.error)

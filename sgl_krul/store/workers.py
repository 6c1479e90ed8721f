"""Transfer workers: threads that move bytes between tiers and the device; the scheduler never does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, ParamSpec, TypeVar

__all__ = ["Workers"]

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """A few named threads with a queue. Jobs are few and long (a pause, a chunk, a write-through)."""

    def __init__(self, name: str, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"threads is {threads}, expected at least 1")
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"krul-{name}")
        self._lock = Lock()
        self._pending = 0

    @property
    def pending(self) -> int:
        """Jobs submitted and not yet done."""
        return self._pending

    def submit(self, job: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `job` on a worker. Returns at once."""
        future = self._pool.submit(job, *args, **kwargs)
        with self._lock:
            self._pending += 1
        future.add_done_callback(self._done)
        return future

    def close(self) -> None:
        """Let running jobs end, drop queued ones, stop the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _done(self, _future: Future[Any]) -> None:
        with self._lock:
            self._pending -= 1

"""Tasks on workers that belong together: begun, stopped and waited for as one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event, Lock

from sgl_krul.store.workers import Workers

__all__ = ["TaskGroup"]


class TaskGroup:
    """`done` ends when no task is left, after `on_end()`; its exception is the first bug of a task.

    Tasks look at `stopped` and begin nothing new when it is set; `on_stop(why, bug)` is called after that,
    from any thread, perhaps more than once.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        on_stop: Callable[[str, BaseException | None], None],
        on_end: Callable[[], None],
    ) -> None:
        self.stopped = Event()
        self.done: Future[None] = Future()
        self.done.set_running_or_notify_cancel()  # nobody else can end it
        self._workers = workers
        self._on_stop = on_stop
        self._on_end = on_end
        self._lock = Lock()
        self._tasks = 0
        self._started = self._ended = False
        self._bug: BaseException | None = None

    @property
    def ended(self) -> bool:
        """No task is left, and none will begin."""
        return self._ended

    def start(self, jobs: int, job: Callable[[], None]) -> None:
        """Queue `job` so many times; returns at once. Once only."""
        with self._lock:
            assert not self._started, "a group of tasks is started once"
            self._started = True
            self._tasks += 1  # ours, so that the first task to end is not the last
        if not self._ended:
            for _ in range(jobs):
                self.spawn(job)
        self._task_over()

    def spawn(self, job: Callable[..., None], *args: object) -> None:
        """Queue one more task, from one that has not ended. Where the workers were closed, all stop."""
        with self._lock:
            self._tasks += 1
        try:
            future = self._workers.submit(job, *args)
        except RuntimeError:  # the workers were closed
            self._stop("the loaders were closed")
            self._task_over()
            return
        future.add_done_callback(self._task_ended)

    def stop(self, why: str) -> None:
        """Have the tasks end; returns at once. Before `start`, `done` ends here."""
        self._stop(why)
        with self._lock:
            idle = not self._started
            self._tasks += idle
        if idle:
            self._task_over()

    def check(self) -> list[str]:
        """Problems found; empty when sound."""
        with self._lock:
            if self._tasks < 0 or (self._ended and self._tasks) or (self.done.done() and not self._ended):
                return [f"tasks: {self._tasks} left, ended: {self._ended}, done: {self.done.done()}"]
        return []

    def _stop(self, why: str, bug: BaseException | None = None) -> None:
        if not self._ended:
            self.stopped.set()
            self._on_stop(why, bug)

    def _task_ended(self, future: Future[None]) -> None:
        try:
            if future.cancelled():
                self._stop("the loaders were closed")
            elif (bug := future.exception()) is not None:
                self._bug = self._bug or bug
                self._stop(f"a bug ({bug!r})", bug)
        finally:
            self._task_over()

    def _task_over(self) -> None:
        """One task less; with the last one all ends."""
        with self._lock:
            self._tasks -= 1
            if self._tasks or self._ended:
                return
            self._ended = True
        try:
            self._on_end()
        except BaseException as bug:
            self._bug = self._bug or bug
        if self._bug is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(self._bug)

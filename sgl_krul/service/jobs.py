"""Work under way: begun by a verb, finished in the thread that polls."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Event
from typing import Any

from sgl_krul.errors import KrulError, SessionBusy
from sgl_krul.service.agreed import Agreed, ready
from sgl_krul.service.agreement import Agreement, Alone
from sgl_krul.session.registry import Session

__all__ = ["Body", "Job", "Jobs", "Reply"]

logger = logging.getLogger(__name__)

Body = dict[str, Any]
Reply = Callable[[Body | KrulError], None]


@dataclass
class Job:
    """One verb for one session ("": for none). `complete` runs in the polling thread once `future` is done;
    None from it: the reply follows from elsewhere.
    """

    digest: str
    future: Future[Any]
    complete: Callable[[], Body | None]
    reply: Reply


class Jobs:
    """Jobs of one polling thread. Every rank begins the same ones, and finishes them in the same `poll`."""

    def __init__(self, ranks: Agreement | None = None) -> None:
        self._ranks = Alone() if ranks is None else ranks
        self._jobs: list[Job] = []
        self._done = Event()

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def busy(self, digest: str) -> bool:
        """True while the session has a job."""
        return any(job.digest == digest for job in self._jobs)

    def refuse_if_busy(self, session: Session) -> None:
        """Raises SessionBusy while the session has a job."""
        if self.busy(session.digest):
            raise SessionBusy(
                f"session {session.session_id!r} is busy right now ({session.state.value}): "
                "try again when that is done"
            )

    def begin(self, job: Job) -> None:
        """Watch a job."""
        self._jobs.append(job)
        local = job.future.local if isinstance(job.future, Agreed) else job.future
        local.add_done_callback(lambda _: self._done.set())

    def wait(self, timeout_s: float) -> None:
        """Return when a job is done, or after `timeout_s`."""
        self._done.wait(timeout_s)
        self._done.clear()

    def poll(self) -> None:
        """Finish and answer what is done. Never blocks."""
        done = ready([job.future for job in self._jobs], self._ranks)
        for job in [job for job, is_done in zip(self._jobs, done, strict=True) if is_done]:
            self._jobs.remove(job)
            outcome = self._outcome(job)
            if outcome is not None:
                job.reply(outcome)

    @staticmethod
    def _outcome(job: Job) -> Body | KrulError | None:
        """The answer of a finished job. A bug in a job must not end the caller, which is the scheduler."""
        try:
            return job.complete()
        except KrulError as error:
            return error
        except Exception as error:
            logger.exception("krul: a job of session %s failed", job.digest[:12])
            return KrulError(f"internal error: {error!r}; the server's log has the trace")

"""The verbs of sessions: pause, resume, forget; and the state each session passes through."""

from sgl_krul.service.counters import Counters
from sgl_krul.service.jobs import Reply
from sgl_krul.service.sessions import SessionService

__all__ = ["Counters", "Reply", "SessionService"]

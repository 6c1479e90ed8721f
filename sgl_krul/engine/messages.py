"""What the front end and the scheduler say to each other about sessions, over SGLang's own channels."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types

__all__ = ["KrulControlReqInput", "KrulControlReqOutput", "register_messages"]


class KrulControlReqInput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """A verb for one session (or none). `request_id` pairs it with its answer, which may come much later."""

    request_id: str
    verb: str  # see SessionControl: "pause", "resume", "hold", ...
    session_id: str = ""
    cache_salt: str | None = None
    extra_key: str | None = None
    argument: str = ""  # of "move" the tier, of "export" and "import" the path of a file


class KrulControlReqOutput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """The answer. `status` is an HTTP status, `body` the answer or the error's {"type", "message"}."""

    request_id: str
    status: int
    body: dict[str, Any]


def register_messages() -> None:
    """Teach this process's decoder both types."""
    hook_custom_types(KrulControlReqInput, KrulControlReqOutput)

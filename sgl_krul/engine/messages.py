"""What the front end and the scheduler say to each other about sessions, over SGLang's own channels."""

from __future__ import annotations

import base64
import json
from array import array
from typing import Any

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types

__all__ = [
    "KrulControlReqInput",
    "KrulControlReqOutput",
    "hold_argument",
    "prompt_of",
    "register_messages",
    "resume_argument",
]


class KrulControlReqInput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """A verb for one session (or none). `request_id` pairs it with its answer, which may come much later."""

    request_id: str
    verb: str  # see SessionControl: "pause", "resume", "hold", ...
    session_id: str = ""
    cache_salt: str | None = None
    extra_key: str | None = None
    # Of "move" the tier, of "export" and "import" the path of a file; of "resume" and "hold" see below.
    argument: str = ""


class KrulControlReqOutput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """The answer. `status` is an HTTP status, `body` the answer or the error's {"type", "message"}."""

    request_id: str
    status: int
    body: dict[str, Any]


def resume_argument(target: str, strategy: str | None) -> str:
    """Where a session is to be brought, and how (None: as the planner finds best). service.wish reads it."""
    return json.dumps({"target": target, "strategy": strategy})


def hold_argument(obj: Any) -> str:
    """The tokens of the request that waits, as text (int32, base64); "" where they aren't known.

    SGLang's chat route renders the template itself, so its requests carry token ids; a text has none yet.
    """
    ids = getattr(obj, "input_ids", None)
    # A list of lists is a batch. The first tells: SGLang's own check of the type asks no more.
    if isinstance(ids, list) and ids and isinstance(ids[0], int):
        try:
            return base64.b64encode(array("i", ids).tobytes()).decode()
        except (OverflowError, TypeError):  # no tokens of any model: SGLang refuses them
            return ""
    return ""


def prompt_of(argument: str) -> array[int] | None:
    """The tokens in a `hold_argument`; None where there are none."""
    ids = array("i")
    ids.frombytes(base64.b64decode(argument))
    return array("q", ids) if ids else None


def register_messages() -> None:
    """Teach this process's decoder both types."""
    hook_custom_types(KrulControlReqInput, KrulControlReqOutput)

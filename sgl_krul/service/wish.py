"""What a caller asks of a resume, read from a message of the front end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sgl_krul.errors import BadRequest
from sgl_krul.restore.planner import Strategy

__all__ = ["NO_WISH", "TargetPlace", "Wish"]


class TargetPlace(StrEnum):
    """How far a resume brings a session."""

    MEMORY = "memory"
    DEVICE = "device"


@dataclass(frozen=True)
class Wish:
    """What the caller asks of a resume. `target` None: the best way for a request that waits.

    `prompt_tokens`: length of that request, if known: more is not restored. `strategy` None: the configured.
    """

    target: TargetPlace | None = None
    strategy: Strategy | None = None
    prompt_tokens: int | None = None

    @classmethod
    def read(cls, argument: str, *, hold: bool) -> Wish:
        """From a message of the front end ("" or JSON).

        Raises:
            BadRequest: naming what is wrong.
        """
        given: Any = json.loads(argument) if argument else {}
        tokens = given.get("prompt_tokens")
        if hold:
            return cls(prompt_tokens=tokens if isinstance(tokens, int) and tokens > 0 else None)
        target = _one_of(TargetPlace, "target", given.get("target") or TargetPlace.MEMORY)
        strategy = given.get("strategy")
        if strategy is not None and target is not TargetPlace.DEVICE:
            raise BadRequest(
                f"strategy {strategy!r} with target {target.value!r}: a strategy chooses what is recomputed, "
                'which happens on the device only. Send target "device", or no strategy.'
            )
        return cls(target, None if strategy is None else _one_of(Strategy, "strategy", strategy))


def _one_of(kind: Any, name: str, value: object) -> Any:
    try:
        return kind(value)
    except ValueError as error:
        names = ", ".join(member.value for member in kind)
        raise BadRequest(f"{name} {value!r}: expected one of {names}, or leave it out") from error


NO_WISH = Wish()

"""What a caller asks of a resume, read from a message of the front end."""

from __future__ import annotations

import json
from array import array
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

    `prompt`: the tokens of that request, if known: what it shares with the session is restored, and no more.
    `strategy` None: the configured one.
    """

    target: TargetPlace | None = None
    strategy: Strategy | None = None
    prompt: array[int] | None = None

    @classmethod
    def read(cls, argument: str) -> Wish:
        """From a message of the front end ("" or JSON).

        Raises:
            BadRequest: naming what is wrong.
        """
        given: Any = json.loads(argument) if argument else {}
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

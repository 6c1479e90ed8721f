"""How one value of the configuration is read and written.

Byte sizes and durations come as people write them: `8GiB`, `1GB`, `10_000`; `20ms`, `1h30m`, `30d`.
A leaf is the dataclass field metadata by which sgl_krul.config reads a key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from string import Template
from typing import NamedTuple, TypeVar

__all__ = [
    "Leaf",
    "choice_leaf",
    "count_leaf",
    "duration_leaf",
    "flag_leaf",
    "format_duration",
    "format_size",
    "fraction_leaf",
    "home",
    "level_leaf",
    "parse_duration",
    "parse_size",
    "path_leaf",
    "read_size",
    "size_leaf",
    "text_leaf",
]

_N = TypeVar("_N", int, float)
_MAX_BYTES = 2**63 - 1
_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE_UNITS = {name: 1024**power for power, name in enumerate(_BINARY_UNITS)} | {
    name: 1000**power for power, name in enumerate(("KB", "MB", "GB", "TB", "PB"), start=1)
}
_SECONDS = {
    "d": Decimal(86400),
    "h": Decimal(3600),
    "m": Decimal(60),
    "s": Decimal(1),
    "ms": Decimal("1e-3"),
    "us": Decimal("1e-6"),
}

# Digits are counted so that no text from a file costs more than a few steps to read.
_NUMBER = r"[0-9][0-9_]{0,30}(?:\.[0-9]{1,9})?"
_SIZE = re.compile(rf"({_NUMBER}) ?({'|'.join(_SIZE_UNITS)})?")
_DURATION = re.compile("".join(rf"(?:({_NUMBER}){unit})?" for unit in _SECONDS))


def parse_size(value: object) -> int:
    """Bytes of a whole number or a text such as `8GiB` (1024s) or `1GB` (1000s). Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a size")
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None:
            raise ValueError("not a size")
        number, unit = match.groups()
        exact = Decimal(number) * _SIZE_UNITS[unit or "B"]
        if unit is None and exact != int(exact):
            raise ValueError("part of a byte")
        return int(exact)
    if isinstance(value, float) and (not math.isfinite(value) or value != int(value)):
        raise ValueError("part of a byte")
    return int(value)


def parse_duration(value: object) -> float:
    """Seconds of a number (seconds) or a text such as `1h30m`, largest unit first. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a duration")
    if isinstance(value, str):
        if re.fullmatch(_NUMBER, value):
            return float(Decimal(value))
        match = _DURATION.fullmatch(value)
        if match is None or not value:
            raise ValueError("not a duration")
        parts = zip(match.groups(), _SECONDS.values(), strict=True)
        return float(sum(Decimal(number) * seconds for number, seconds in parts if number is not None))
    try:
        seconds = float(value)
    except OverflowError:
        raise ValueError("out of range") from None
    if not math.isfinite(seconds):
        raise ValueError("not a finite number")
    return seconds


def read_size(value: object, *, at_least: int) -> int:
    """Like parse_size, and ValueError below `at_least` or above 2**63 - 1."""
    return _within(parse_size(value), at_least, _MAX_BYTES)


def format_size(size_bytes: int) -> str:
    """A short spelling that parse_size reads back, at most one decimal: 1536 is `1.5KiB`."""
    if size_bytes < 0:
        return "-" + format_size(-size_bytes)
    amount = float(size_bytes)
    for unit in _BINARY_UNITS:
        if round(amount, 1) < 1024 or unit == _BINARY_UNITS[-1]:
            break
        amount /= 1024
    return f"{_short(amount)}{unit}"


def format_duration(duration_s: float) -> str:
    """A short spelling that parse_duration reads back, at most two units: 5400 is `1h30m`."""
    if duration_s < 0:
        return "-" + format_duration(-duration_s)
    if round(duration_s, 1) < 60:
        for unit, scale in (("us", 1e6), ("ms", 1e3)):
            if round(duration_s * scale, 1) < 1000:
                return f"{_short(duration_s * scale)}{unit}" if round(duration_s * scale, 1) > 0 else "0s"
        return f"{_short(duration_s)}s"
    text, left = "", round(duration_s)
    for unit, seconds in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(left, seconds)
        if count:
            # The second unit is the last: nobody reads the seconds of a day.
            if text:
                return f"{text}{count}{unit}"
            text, left = f"{count}{unit}", rest
        elif text:
            return text
    return text


def _short(amount: float) -> str:
    return f"{amount:.1f}".removesuffix(".0")


class Leaf(NamedTuple):
    """How one key is read: `read` raises ValueError, `expected` completes "expected ..."."""

    read: Callable[[object, Mapping[str, str]], object]
    expected: str
    secret: bool = False  # never shown in a message


def size_leaf(*, at_least: int) -> dict[str, Leaf]:
    """Bytes, as an int."""

    def read(value: object, environ: Mapping[str, str]) -> int:
        return read_size(value, at_least=at_least)

    return {"leaf": Leaf(read, f"a size of at least {format_size(at_least)}, such as 512MiB, 8GiB or 10_000")}


def duration_leaf(*, at_least_s: float, at_most_s: float = 100 * 365 * 86400.0) -> dict[str, Leaf]:
    """Seconds, as a float."""

    def read(value: object, environ: Mapping[str, str]) -> float:
        return _within(parse_duration(value), at_least_s, at_most_s)

    limits = f"from {format_duration(at_least_s)} to {format_duration(at_most_s)}"
    return {"leaf": Leaf(read, f"a duration {limits}, such as 20ms, 1h30m or a number of seconds")}


def count_leaf(*, at_most: int, step: int = 1) -> dict[str, Leaf]:
    """A positive multiple of `step`; numbers only."""

    def read(value: object, environ: Mapping[str, str]) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value % step:
            raise ValueError("not such a number")
        return _within(value, step, at_most)

    kind = "a whole number" if step == 1 else f"a multiple of {step}"
    return {"leaf": Leaf(read, f"{kind} from {step} to {at_most}")}


def choice_leaf(*names: str) -> dict[str, Leaf]:
    """One of the names, exactly so spelled."""

    def read(value: object, environ: Mapping[str, str]) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError("not one of them")
        return value

    return {"leaf": Leaf(read, f"one of {', '.join(names)}")}


def path_leaf(*, optional: bool = False) -> dict[str, Leaf]:
    """An absolute path, filled in from the environment that the reader is given; null too if `optional`."""

    def read(value: object, environ: Mapping[str, str]) -> Path | None:
        return None if optional and value is None else _read_path(value, environ)

    return {"leaf": Leaf(read, "an absolute path; a leading ~ and $VARIABLES are filled in")}


def text_leaf(
    expected: str, *, optional: bool = False, empty: bool = False, secret: bool = False
) -> dict[str, Leaf]:
    """A text in which $VARIABLES are filled in; null too if `optional`, '' only if `empty`."""

    def read(value: object, environ: Mapping[str, str]) -> str | None:
        if optional and value is None:
            return None
        if not isinstance(value, str):
            raise ValueError("not a text")
        text = _filled_in(value, environ, secret)
        if not text and not empty:
            raise ValueError("empty")
        return text

    return {"leaf": Leaf(read, f"{expected}; $VARIABLES are filled in", secret)}


def fraction_leaf(*, zero: bool = False) -> dict[str, Leaf]:
    """A number above 0 (0 too if `zero`), at most 1."""

    def read(value: object, environ: Mapping[str, str]) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError("not such a number")
        if not 0 <= value <= 1 or not (value or zero):
            raise ValueError("out of range")
        return float(value)

    return {"leaf": Leaf(read, "a number from 0 to 1" if zero else "a number above 0, at most 1")}


def level_leaf(*names: str) -> dict[str, Leaf]:
    """One of the names, or a number of at least 0."""

    def read(value: object, environ: Mapping[str, str]) -> str | float:
        if isinstance(value, str):
            if value not in names:
                raise ValueError("not one of them")
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError("not such a number")
        return float(value)

    return {"leaf": Leaf(read, f"one of {', '.join(names)}, or a number of at least 0")}


def flag_leaf() -> dict[str, Leaf]:
    """True or false; nothing that only looks like it."""

    def read(value: object, environ: Mapping[str, str]) -> bool:
        if not isinstance(value, bool):
            raise ValueError("not one of them")
        return value

    return {"leaf": Leaf(read, "true or false")}


def _within(value: _N, at_least: _N, at_most: _N) -> _N:
    if not at_least <= value <= at_most:
        raise ValueError("out of range")
    return value


def _read_path(value: object, environ: Mapping[str, str]) -> Path:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("not a path")
    text = _filled_in(value, environ)
    if text == "~" or text.startswith("~/"):
        text = str(home(environ)) + text[1:]
    path = Path(text)
    # The server and the `krul` command run in different directories: a relative path names two places.
    if not path.is_absolute():
        raise ValueError("not absolute")
    return path


def _filled_in(value: str, environ: Mapping[str, str], secret: bool = False) -> str:
    try:
        return Template(value).substitute(environ)
    except KeyError as error:
        if secret:
            # In a password with a dollar sign, what looks like a variable is a part of the password.
            raise ValueError("a $VARIABLE in it is not set; a dollar sign itself is written $$") from None
        raise ValueError(f"the environment variable {error.args[0]} is not set") from error


def home(environ: Mapping[str, str]) -> Path:
    """$HOME, else what the system says."""
    given = environ.get("HOME", "")
    return Path(given) if given else Path.home()

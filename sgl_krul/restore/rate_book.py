"""The rates of this machine: measured once, refreshed by every restore, kept in a small JSON file.

The file belongs to one fingerprint (machine, model, settings). One of another, or one that can't be read, is
as good as none: then nothing counts as measured and plans are the safe ones.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

from sgl_krul.restore.cost import (
    DEFAULT_LAND_S_PER_BYTE,
    REQUEST_BYTES,
    ComputeRates,
    ComputeSample,
    ForwardSample,
    LandSample,
    LoadSample,
    Rates,
    TierRates,
)
from sgl_krul.restore.rate_fit import average, fit_compute, fit_tier, land_s_per_byte, request_s

__all__ = ["RateBook", "machine_fingerprint"]

log = logging.getLogger(__name__)

_VERSION = 1
_MAX_NUMBER = 1e15  # of any rate; more is a damaged file
_MAX_FILE_BYTES = 1 << 20


def machine_fingerprint(**facts: str | int) -> str:
    """A name (32 hex digits) for whatever rates depend on: `cpu_model="..."`, `cores=2`, `device="..."`, ...

    Any facts will do, in any order; another value or another set of them is another machine.

    Raises:
        ValueError: no facts.
    """
    if not facts:
        raise ValueError(
            "no facts: expected what rates depend on, such as cpu_model, cores, device, namespace"
        )
    text = json.dumps({name: str(value) for name, value in facts.items()}, sort_keys=True)
    return hashlib.sha256(b"krul-rates-1" + text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class _Known:
    """What was measured so far; None and absent: nothing."""

    compute: ComputeRates | None = None
    tiers: Mapping[str, TierRates] = field(default_factory=dict)
    land_s_per_byte: float | None = None
    request_s: float | None = None


class RateBook:
    """Thread safe. `rates` never waits for the disk; `observe_*` write the file, so call them from a worker.

    `path` None: nothing is kept. A file that can't be written costs a line in the log and nothing else.
    """

    def __init__(self, path: Path | None, fingerprint: str, *, request_bytes: int = REQUEST_BYTES) -> None:
        self._path = path
        self._fingerprint = fingerprint
        self._request_bytes = request_bytes
        self._changing = Lock()  # one observation and its file at a time
        self._known = _read(path, fingerprint) if path is not None else _Known()

    def rates(self) -> Rates:
        """What is known now; with nothing measured no compute, no tiers."""
        known = self._known  # frozen, replaced whole
        return Rates(
            compute=known.compute,
            tiers=dict(known.tiers),
            land_s_per_byte=(
                DEFAULT_LAND_S_PER_BYTE if known.land_s_per_byte is None else known.land_s_per_byte
            ),
            request_s=known.request_s or 0.0,
            request_bytes=self._request_bytes,
        )

    def observe_compute(self, samples: Sequence[ComputeSample]) -> None:
        """Slices of a calibration or of a restore. The first ones must be able to tell the rates apart."""

        def change(known: _Known) -> _Known:
            fitted = fit_compute(samples, known.compute)
            if fitted is None and samples:
                log.info("%d slices can't tell the compute rates apart: calibrate first", len(samples))
            return replace(known, compute=fitted)

        self._change(change)

    def observe_load(self, samples: Sequence[LoadSample]) -> None:
        """Requests to any tiers."""
        of_tier: dict[str, list[LoadSample]] = {}
        for sample in samples:
            of_tier.setdefault(sample.tier, []).append(sample)

        def change(known: _Known) -> _Known:
            fitted = {name: fit_tier(some, known.tiers.get(name)) for name, some in of_tier.items()}
            found = {name: rates for name, rates in fitted.items() if rates is not None}
            return replace(known, tiers={**known.tiers, **found})

        self._change(change)

    def observe_land(self, samples: Sequence[LandSample]) -> None:
        """Verify, decode and copy."""
        pace = land_s_per_byte(samples)
        self._change(lambda known: replace(known, land_s_per_byte=average(known.land_s_per_byte, pace)))

    def observe_forward(self, samples: Sequence[ForwardSample]) -> None:
        """Requests after a restore: what they take beside their layers. Of no use before compute is known."""

        def change(known: _Known) -> _Known:
            if known.compute is None:
                return known
            return replace(known, request_s=average(known.request_s, request_s(samples, known.compute)))

        self._change(change)

    def forget(self, tiers: Collection[str] = (), *, compute: bool = False) -> None:
        """What was measured of these is not known any more: a new calibration counts alone."""

        def change(known: _Known) -> _Known:
            left = {name: rates for name, rates in known.tiers.items() if name not in tiers}
            return replace(known, tiers=left, compute=None if compute else known.compute)

        self._change(change)

    def _change(self, change: Callable[[_Known], _Known]) -> None:
        with self._changing:
            known = change(self._known)
            if known == self._known:
                return
            self._known = known
            if self._path is not None:
                _write(self._path, self._fingerprint, known)

    def check(self) -> list[str]:
        """Problems found: leftovers beside the file, a file that says something else."""
        if self._path is None:
            return []
        with self._changing:
            problems = [
                f"rates: {path} was left behind by a write"
                for path in self._path.parent.glob(_temporary("*", self._path))
            ]
            if self._path.exists() and _read(self._path, self._fingerprint) != self._known:
                problems.append(f"rates: {self._path} does not hold what is known")
            return problems


# -- the file --


def _temporary(middle: str, path: Path) -> str:
    return f".{path.name}-{middle}.tmp"


def _write(path: Path, fingerprint: str, known: _Known) -> None:
    content = {
        "version": _VERSION,
        "fingerprint": fingerprint,
        "compute": None if known.compute is None else asdict(known.compute),
        "tiers": {name: asdict(rates) for name, rates in known.tiers.items()},
        "land_s_per_byte": known.land_s_per_byte,
        "request_s": known.request_s,
    }
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        prefix, suffix = _temporary("*", path).split("*")
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=prefix, suffix=suffix, delete=False, encoding="utf-8"
        ) as file:
            temporary = file.name
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())  # else a crash may leave an empty file under the name
        os.replace(temporary, path)
    except OSError as error:
        log.warning(
            "rates could not be kept in %s (%s): they are measured again after a restart", path, error
        )
        if temporary:
            with suppress(OSError):
                os.unlink(temporary)


def _read(path: Path, fingerprint: str) -> _Known:
    """What the file holds for this machine; nothing, and a line in the log, when it is no good."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
        if len(raw) > _MAX_FILE_BYTES:
            raise ValueError(f"more than {_MAX_FILE_BYTES} bytes")
        content = json.loads(raw)
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']!r}, expected {_VERSION}")
        if content["fingerprint"] != fingerprint:
            log.info("rates in %s are of another machine, model or setting: not used", path)
            return _Known()
        return _parse(content)
    except FileNotFoundError:
        return _Known()
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        log.warning("rates in %s are not used (%s: %s): calibrate again", path, type(error).__name__, error)
        return _Known()


def _parse(content: Mapping[str, Any]) -> _Known:
    compute = content["compute"]
    known = _Known(
        compute=None if compute is None else ComputeRates(**_numbers(compute)),
        tiers={
            str(name): TierRates(
                _number(rates["latency_s"]), _number(rates["bytes_per_s"]), int(_number(rates["in_flight"]))
            )
            for name, rates in content["tiers"].items()
        },
        land_s_per_byte=_optional(content["land_s_per_byte"]),
        request_s=_optional(content["request_s"]),
    )
    # The rest is checked where it will be used.
    Rates(None, {}, known.land_s_per_byte or 0.0, known.request_s or 0.0)
    return known


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: _number(value) for name, value in values.items()}


def _optional(value: object) -> float | None:
    return None if value is None else _number(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    if not 0 <= value <= _MAX_NUMBER:
        raise ValueError(f"{value!r}: expected 0 to {_MAX_NUMBER:g}")
    return float(value)

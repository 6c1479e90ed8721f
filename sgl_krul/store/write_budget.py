"""How much may be written to a disk in a day: flash wears by the byte."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from datetime import UTC, date, datetime

from sgl_krul.errors import ConfigError, StoreFull
from sgl_krul.store.root import RootDirectory

__all__ = ["WRITES_FILE", "WriteBudget"]

logger = logging.getLogger(__name__)

WRITES_FILE = ".writes"  # no key, so no object
_LINE = re.compile(rb"([0-9]{4}-[0-9]{2}-[0-9]{2}) ([0-9]{1,19}) bytes\n")
_DAY_S = 86_400
_EPOCH = date(1970, 1, 1).toordinal()
_UNKNOWN = (-1, 0)
_SAVE_AFTER_BYTES = 64 << 20
_SAVE_AFTER_S = 5.0


class WriteBudget:
    """Counts the bytes written in one day (UTC) and refuses what passes `daily_bytes` (0: no bound).

    `place` is for messages, `now` gives unix seconds. The count is kept in a file once `load` was called.
    It is written every few seconds or at most 64 MiB (1 % of a small budget), and not synced: a server that
    is killed forgets no more than that. Threads may share it.

    Raises:
        ConfigError: a negative budget.
    """

    def __init__(self, daily_bytes: int, place: str, now: Callable[[], float] = time.time) -> None:
        if daily_bytes < 0:
            raise ConfigError(f"daily_write_bytes {daily_bytes}: expected 0 (no budget) or a number of bytes")
        self.daily_bytes = daily_bytes
        self._place = place
        self._now = now
        self._lock = threading.Lock()  # never held over I/O
        self._day = self._today()
        self._used = 0
        self._directory: RootDirectory | None = None
        self._saving = threading.Lock()
        self._saved = _UNKNOWN  # day and bytes in the file
        self._saved_at = 0.0
        self._told = False

    def load(self, directory: RootDirectory) -> None:
        """Go on from what the file in `directory` says, and keep it. A damaged file counts as none."""
        if not self.daily_bytes:
            return
        self._directory = directory
        try:
            text = directory.read_note(WRITES_FILE)
            found = (self._day, 0) if text is None else _parse(text)
        except (OSError, ValueError) as error:
            logger.warning("%s/%s: %s; today's writes count from 0", self._place, WRITES_FILE, error)
            return
        with self._lock:
            self._day, self._used = found
            self._saved, self._saved_at = found, self._now()
            self._turn_day()

    @property
    def left_bytes(self) -> int | None:
        """What may still be written today; None without a budget. Never waits for I/O."""
        if not self.daily_bytes:
            return None
        with self._lock:
            self._turn_day()
            return max(0, self.daily_bytes - self._used)

    def claim(self, size_bytes: int) -> None:
        """Count bytes that are about to be written.

        Raises:
            StoreFull: they would pass the budget; nothing is counted.
        """
        if not self.daily_bytes:
            return
        with self._lock:
            self._turn_day()
            if self._used + size_bytes > self.daily_bytes:
                raise StoreFull(
                    f"{self._place}: {size_bytes} bytes on top of {self._used} written today pass the daily "
                    f"write budget of {self.daily_bytes}; "
                    f"wait for the new day at {self._new_day()}, or raise ssd.daily_write_bytes"
                )
            self._used += size_bytes
        self._save_if_due()

    def give_back(self, size_bytes: int) -> None:
        """Undo a claim of which nothing was written."""
        with self._lock:
            self._used = max(0, self._used - size_bytes)  # the day may have changed in between

    def lost(self) -> None:
        """The file may have gone: the next `claim` writes it again."""
        with self._lock:
            self._saved = _UNKNOWN

    def save(self) -> None:
        """Write the count now, best effort: the first failure is logged, later claims try again."""
        with self._saving:
            self._save()

    # -- inside --

    def _today(self) -> int:
        return int(self._now() // _DAY_S)

    def _turn_day(self) -> None:
        """Start anew on another day; a clock set back over midnight makes no second day of one."""
        today = self._today()
        if today not in (self._day, self._day - 1):
            self._day, self._used = today, 0

    def _new_day(self) -> str:
        return datetime.fromtimestamp((self._day + 1) * _DAY_S, UTC).strftime("%Y-%m-%d %H:%M UTC")

    def _save_if_due(self) -> None:
        with self._lock:
            day, saved = self._saved
            many = self._used - saved > min(_SAVE_AFTER_BYTES, self.daily_bytes // 100)
            due = day != self._day or many or not 0 <= self._now() - self._saved_at < _SAVE_AFTER_S
        if due and self._saving.acquire(blocking=False):  # one that saves already is enough
            try:
                self._save()
            finally:
                self._saving.release()

    def _save(self) -> None:
        """Write the count. The caller has `_saving`."""
        with self._lock:
            count = (self._day, self._used)
            if self._directory is None or count == self._saved:
                return
            self._saved, self._saved_at = count, self._now()
        day = date.fromordinal(_EPOCH + count[0]).isoformat()
        try:
            self._directory.write_note(WRITES_FILE, f"{day} {count[1]} bytes\n".encode("ascii"))
        except OSError as error:
            self.lost()
            if not self._told:
                self._told = True
                logger.warning("%s/%s: %s; a restart would forget it", self._place, WRITES_FILE, error)


def _parse(text: bytes) -> tuple[int, int]:
    """Day (since 1970) and bytes. Raises ValueError."""
    match = _LINE.fullmatch(text)
    if match is None:
        raise ValueError(f"damaged, {text[:40]!r}")
    return date.fromisoformat(match[1].decode("ascii")).toordinal() - _EPOCH, int(match[2])

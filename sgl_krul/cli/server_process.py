"""A server of `krul serve` in a process tree of its own: started on a free port, watched, killed as a whole.

The demo, the tests and the benchmarks use it; so would a script of yours.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import psutil

from sgl_krul.errors import KrulError

__all__ = ["ServerProcess", "free_port"]

_POLL_S = 0.25
_OWN_PORTS = range(12_000, 22_000)


def free_port() -> int:
    """A port of the loopback address that nobody listens on now, and that the system gives to nobody.

    A server listens half a minute after it was started; by then a port out of the system's own range
    (32768 and up) may belong to another, or to one of the server's own processes.
    """
    ports = list(_OWN_PORTS)
    random.shuffle(ports)
    for port in ports:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise KrulError(f"no port of {_OWN_PORTS.start} to {_OWN_PORTS.stop - 1} is free: stop some server")


class ServerProcess:
    """Runs `krul serve ARGUMENTS` (or another `module`); its output goes to `log`, which is appended to."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        log: Path,
        api_key: str | None = None,
        environ: Mapping[str, str] | None = None,
        module: Sequence[str] = ("sgl_krul.cli", "serve"),
    ) -> None:
        self.port = free_port()
        self.log = log
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *module, *arguments, "--host", "127.0.0.1", "--port", str(self.port)],
                env=dict(os.environ if environ is None else environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def base_url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        """True until the process has ended."""
        return self._process.poll() is None

    def wait_ready(self, timeout_s: float = 300) -> None:
        """Return when requests are answered.

        Raises:
            KrulError: it ended or was too slow; the message has the log's path and last lines.
        """
        deadline = time.monotonic() + timeout_s
        with httpx.Client(base_url=self.base_url, headers=self._headers, timeout=30) as client:
            while time.monotonic() < deadline:
                if not self.running:
                    raise KrulError(
                        f"the server ended with status {self._process.returncode}.\n{self.last_lines()}"
                    )
                try:
                    if client.get("/health").status_code == 200:
                        return
                except httpx.TransportError:
                    pass  # not listening yet
                time.sleep(_POLL_S)
        self.kill()
        raise KrulError(f"the server did not answer within {timeout_s:g} s.\n{self.last_lines()}")

    def wait(self, timeout_s: float) -> int:
        """The exit status.

        Raises:
            subprocess.TimeoutExpired
        """
        return self._process.wait(timeout_s)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to every process of the tree and wait until all are gone."""
        tree = self._processes()
        for process in tree:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue
        _, left = psutil.wait_procs(tree, timeout=30)
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=30)
        self._process.wait()

    def last_lines(self, count: int = 15) -> str:
        """The end of the log, and where it is."""
        lines = self.log.read_text(errors="replace").splitlines()[-count:]
        return "\n".join([f"Last lines of {self.log}:", *lines])

    def _processes(self) -> list[psutil.Process]:
        if not self.running:
            return []  # its number may be another process's by now
        try:
            top = psutil.Process(self._process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

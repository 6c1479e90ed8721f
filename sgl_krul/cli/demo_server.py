"""The server of `krul demo`, with a store directory, a configuration and a log of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sgl_krul.cli.server_process import ServerProcess
from sgl_krul.config import Config, MemoryConfig, SsdConfig, to_mapping
from sgl_krul.errors import KrulError, StoreUnavailable

__all__ = ["DemoServer", "prepare_store"]

_MEMORY_BYTES = 1 << 30
_SSD_BYTES = 2 << 30
_FLOOR_BYTES = 256 << 20


class DemoServer:
    """Can be started again after `kill()`, which leaves no process behind."""

    def __init__(self, model: Path, config_file: Path, log: Path, environ: Mapping[str, str]) -> None:
        self._arguments = [str(model), "--served-model-name", "demo"]
        self._environ = {**environ, "KRUL_CONFIG": str(config_file)}
        self._process: ServerProcess | None = None
        self.log = log

    @property
    def url(self) -> str:
        """Where it answers."""
        assert self._process is not None
        return self._process.base_url

    def start(self) -> None:
        """Start, and return when requests are served.

        Raises:
            KrulError: it ended, or did not get ready; the message holds the log's last lines.
        """
        assert self._process is None
        self._process = ServerProcess(self._arguments, log=self.log, environ=self._environ)
        self._process.wait_ready()

    def kill(self) -> None:
        """SIGKILL to all its processes, as a power cut would end them; nothing if there is none."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def failure(self, what: str) -> KrulError:
        """An error that names the log and shows its end."""
        return KrulError(f"{what}.\n{self._process.last_lines()}" if self._process is not None else what)


def prepare_store(folder: Path) -> tuple[Path, Path]:
    """Empty the demo's store in `folder` and write its configuration; returns (store, configuration file).

    Raises:
        StoreUnavailable: naming the path.
    """
    store, config_file = folder / "sessions", folder / "krul.yaml"
    config = replace(
        Config(),
        memory=MemoryConfig(capacity_bytes=_MEMORY_BYTES),
        ssd=SsdConfig(path=store, capacity_bytes=_SSD_BYTES, free_space_floor_bytes=_FLOOR_BYTES),
    )
    try:
        if store.exists():
            shutil.rmtree(store)
        store.mkdir(parents=True)
        # JSON is YAML, and quotes whatever a path may hold.
        config_file.write_text(json.dumps(to_mapping(config), indent=2), encoding="utf-8")
    except OSError as error:
        where = error.filename or folder
        raise StoreUnavailable(f"the demo's folder can't be used: {where}: {error.strerror}") from error
    return store, config_file

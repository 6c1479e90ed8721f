"""A real server for a benchmark, requests with their time to first token, and a stamp of the machine."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sgl_krul.cli.demo_model import demo_model_path
from sgl_krul.cli.server_process import ServerProcess
from sgl_krul.config import cache_home

VOCABULARY = range(1000, 48000)  # ordinary tokens of the demo model


@dataclass(frozen=True)
class Timed:
    """One answered request."""

    ttft_s: float
    total_s: float
    output_ids: list[int]
    meta: dict[str, Any]


class Server:
    """SGLang's own server module with the given flags, and requests to it."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.process = ServerProcess(
            arguments,
            log=log,
            environ={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
            module=("sglang.launch_server",),
        )
        self.port = self.process.port
        self.http = httpx.Client(base_url=self.process.base_url, timeout=300)

    def wait_ready(self) -> None:
        """Return when requests are served."""
        self.process.wait_ready()

    def kill(self) -> None:
        """SIGKILL to the whole tree."""
        self.http.close()
        self.process.kill()

    def generate(self, ids: list[int], *, new_tokens: int = 1, **fields: Any) -> Timed:
        """One greedy request, streamed."""
        body = {
            "input_ids": ids,
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            **fields,
        }
        start = time.perf_counter()
        ttft, last = 0.0, None
        with self.http.stream("POST", "/generate", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                ttft = ttft or time.perf_counter() - start
                last = json.loads(line[6:])
        if last is None or "error" in last:
            raise RuntimeError(f"no answer: {last}")
        return Timed(ttft, time.perf_counter() - start, last["output_ids"], last["meta_info"])

    def pause(self, session: str) -> dict[str, Any]:
        """Pause a session."""
        answer = self.http.post(f"/v1/sessions/{session}/pause", json={})
        answer.raise_for_status()
        result: dict[str, Any] = answer.json()
        return result


def model_arguments() -> list[str]:
    """Flags that choose the demo model."""
    model = demo_model_path(cache_home(os.environ), lambda line: print(line, file=sys.stderr))
    return ["--model-path", str(model), "--enable-cache-report"]


def tokens(rng: random.Random, count: int) -> list[int]:
    """Random ordinary tokens: no two prompts share a prefix."""
    return rng.choices(VOCABULARY, k=count)


@contextmanager
def workspace(name: str, place: Path | None = None) -> Iterator[Path]:
    """A directory in `place` (else in the cache directory) for stores and logs, removed afterwards."""
    above = cache_home(os.environ) if place is None else place
    above.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"krul-{name}-", dir=above) as path:
        yield Path(path)


def write_config(path: Path, store: Path, memory: str = "4GiB") -> Path:
    """A configuration with an SSD store at `store`."""
    path.write_text(
        f"memory: {{capacity_bytes: {memory}}}\n"
        f"ssd: {{path: {store}, capacity_bytes: 32GiB, free_space_floor_bytes: 1GiB}}\n"
    )
    return path


def write_redis_config(path: Path, url: str, memory: str = "4GiB") -> Path:
    """A configuration without SSD: sessions rest in Redis only."""
    path.write_text(
        f"memory: {{capacity_bytes: {memory}}}\nssd: null\nredis: {{url: '{url}', capacity_bytes: 32GiB}}\n"
        "placement: {replicate: redis}\n"
    )
    return path


def resident_share(paths: Iterable[Path]) -> float:
    """Share of the files' pages that is in the page cache, by mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    total = resident = 0
    for path in paths:
        if not path.is_file() or path.stat().st_size == 0:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
            pages = -(-len(mapped) // mmap.PAGESIZE)
            vector = (ctypes.c_ubyte * pages)()
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), vector) != 0:
                raise OSError(ctypes.get_errno(), f"mincore of {path}")
            resident += sum(value & 1 for value in vector)
            total += pages
    return resident / total if total else 0.0


def stamp() -> dict[str, Any]:
    """The machine, the versions and the commit."""
    import sglang
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": commit.stdout.strip(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sglang": sglang.__version__,
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def progress(text: str) -> None:
    """A line for whoever watches; results go to stdout."""
    print(text, file=sys.stderr, flush=True)

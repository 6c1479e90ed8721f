"""Start a server with pausable chats from Python, pause a chat, and stop it.

    .venv/bin/python launch/serve.py                      the demo model
    .venv/bin/python launch/serve.py /models/my-model     another

`serve_arguments` gives the command line; the server is a process like any other.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import httpx

from sgl_krul.api.client import KrulClient
from sgl_krul.cli.demo_model import demo_model_path
from sgl_krul.cli.serve import serve_arguments
from sgl_krul.config import cache_home

PORT = 30000


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    arguments = serve_arguments(
        [model, "--host", "127.0.0.1", "--port", str(PORT)],
        demo_model=lambda: demo_model_path(cache_home(os.environ), print),
    )
    command = [sys.executable, "-m", "sglang.launch_server", *arguments]
    server = subprocess.Popen(command, start_new_session=True)
    try:
        with KrulClient(f"http://127.0.0.1:{PORT}") as krul:
            while not krul.health():
                if server.poll() is not None:
                    sys.exit(f"the server ended with status {server.returncode}")
                time.sleep(1)
            chat(krul)
    finally:
        # A server has several processes: end them all.
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def chat(krul: KrulClient) -> None:
    """One turn, as any OpenAI client sends it: only `session_id` is new."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Tell me about the river Danube."}],
        "max_tokens": 64,
        "session_id": "river",
    }
    answer = httpx.post(f"{krul.base_url}/v1/chat/completions", json=body, timeout=120).raise_for_status()
    print(answer.json()["choices"][0]["message"]["content"])
    paused = krul.pause("river")
    print(f"paused: {paused.stored_tokens} tokens, {paused.bytes_stored} bytes in {paused.tier}")
    resumed = krul.resume("river")
    print(f"resumed: {resumed.restored_tokens} tokens in {resumed.elapsed_ms} ms")


if __name__ == "__main__":
    main()

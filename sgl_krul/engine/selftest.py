"""`python -m sgl_krul.engine.selftest`: load the plugin as SGLang does, without a server. For `krul doctor`.

The last line of its output is JSON: {"platform": name, "accelerator": bool, "hooks": count}, or
{"error": text}.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from multiprocessing.connection import Connection

from sgl_krul.errors import KrulError

__all__ = ["main"]


def main() -> int:
    """Check the hooks of the front-end process here, those of the scheduler in a child, as in a server."""
    try:
        hooks = _load_and_check()
        receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
        child = multiprocessing.get_context("spawn").Process(target=_in_scheduler, args=(sender,))
        child.start()
        sender.close()
        try:
            answer = receiver.recv_bytes().decode()
        except EOFError:
            answer = "the scheduler's process ended before it answered"
        child.join()
        if not answer.isdigit():
            raise KrulError(answer)
    except (ImportError, KrulError) as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 1
    from sglang.srt.platforms import current_platform

    from sgl_krul.engine.cpu import has_accelerator

    platform = {
        "platform": type(current_platform).__name__,
        "accelerator": has_accelerator(),
        "hooks": hooks + int(answer),
    }
    print(json.dumps(platform))
    return 0


def _in_scheduler(sender: Connection) -> None:
    """The scheduler's process: it has loaded the scheduler when plugins run."""
    try:
        import sglang.srt.managers.scheduler  # noqa: F401

        sender.send_bytes(str(_load_and_check()).encode())
    except (ImportError, KrulError) as error:
        sender.send_bytes(f"in the scheduler's process: {error}".encode())
    finally:
        sender.close()


def _load_and_check() -> int:
    """Returns how many hooks were applied. Raises UnsupportedServer."""
    from sglang.srt.plugins import load_plugins

    from sgl_krul.engine.compat import require_hooks, require_version
    from sgl_krul.engine.hooks import _hooks

    require_version()
    load_plugins()
    hooks = _hooks()
    require_hooks(hooks)
    return len(hooks)


if __name__ == "__main__":
    sys.exit(main())

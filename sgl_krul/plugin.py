"""Entry point of group `sglang.srt.plugins`: SGLang calls `register` in each of its processes."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Make `--radix-cache-backend krul`, the session routes and the CPU attention backend known to SGLang."""
    from sgl_krul.engine.compat import require_version

    require_version()  # before anything of SGLang is imported that another version may not have

    from sgl_krul.api.routes import make_router
    from sgl_krul.engine.hooks import register as register_engine

    register_engine(make_router)

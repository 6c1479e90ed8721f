"""`python -m sgl_krul.cli` is `krul`."""

from __future__ import annotations

from sgl_krul.cli import main

if __name__ == "__main__":
    main()

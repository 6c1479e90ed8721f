"""sgl-krul: pauses chat sessions of an SGLang server and brings them back."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"

"""The private cache namespace of a session whose KV is not exact.

SGLang seeds its page hashes and its radix tree by `extra_key`. A session that came back lossy runs under one
of its own from then on: the caller's, then "krul:", the session's digest, a colon and a number. The digest is
that of the caller's key, so no two sessions ever have the same; and callers may not use a key that ends so
(`looks_private`), so none has that of a session by accident or by intent.
"""

from __future__ import annotations

import re

from sgl_krul.session.record import SessionKey

__all__ = ["caller_key", "looks_private", "private_key"]

# Where the suffix begins is decided from the end: a number, 64 digits, and what comes before them.
_PRIVATE = re.compile(r"(.*)krul:[0-9a-f]{64}:([0-9]{1,20})", re.DOTALL)


def private_key(key: SessionKey, generation: int) -> SessionKey:
    """The key that the session of the caller's `key` runs under from `generation` on, once it is lossy.

    Raises:
        ValueError: `key` is private itself, or `generation` is none.
    """
    if looks_private(key.extra_key):
        raise ValueError(f"extra_key {key.extra_key!r} is private already: expected the caller's own")
    if generation < 1:
        raise ValueError(f"generation {generation}: expected 1 or more")
    return key._replace(extra_key=f"{key.extra_key or ''}krul:{key.digest}:{generation}")


def caller_key(key: SessionKey) -> tuple[SessionKey, int | None]:
    """What `private_key` was given; (`key`, None) for a key that it did not make."""
    match = None if key.extra_key is None else _PRIVATE.fullmatch(key.extra_key)
    if match is None:
        return key, None
    theirs, generation = match.group(1), int(match.group(2))
    if looks_private(theirs) or generation < 1:
        return key, None
    for extra_key in (theirs or None, theirs):  # absent and empty are two sessions, and their keys differ
        caller = key._replace(extra_key=extra_key)
        if private_key(caller, generation) == key:
            return caller, generation
    return key, None


def looks_private(extra_key: object) -> bool:
    """Whether this ends as the key of some session's private namespace does; a caller's must not."""
    return isinstance(extra_key, str) and _PRIVATE.fullmatch(extra_key) is not None

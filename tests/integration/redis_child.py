"""A server process of its own that pauses into Redis: `python -m tests.integration.redis_child URL NAME ..`

`duel LEASE_S`: for each line "session round" on stdin, pause that session as it is here in that round, and
answer with a line of JSON. `loop SEED`: say which versions of three sessions are there, then pause newer ones
without end.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from array import array

from sgl_krul.errors import LeaseHeld, StoreError
from sgl_krul.session.catalog import read_manifest
from sgl_krul.session.record import SessionKey
from tests.integration.redis_site import open_site, true_tokens
from tests.sessions import NAMESPACE, Chat, tokens

__all__ = ["LEASE_S", "LOOPED", "duelled", "looped"]

LOOPED = 3
LEASE_S = 0.3


def duelled(name: str, session_id: str, number: int) -> Chat:
    """What this server has of a session in a round: two chunks as all have them, and a tail of its own.

    All servers have the same one of sessions called "same"; "long" ones take a while to pause.
    """
    rng = random.Random(f"{'' if session_id == 'same' else name} {number}")
    length = 8000 if session_id == "long" else rng.randrange(64, 640)
    return Chat(SessionKey(session_id), true_tokens(2) + tokens(length, first=rng.randrange(10_000, 90_000)))


def looped(index: int, version: int) -> Chat:
    """A session at its n-th pause: it grows, and every fourth time it is edited."""
    rng = random.Random(f"{index} {version // 4}")
    grown: array[int] = tokens(64 * (1 + version // 4 % 3), first=1000 * index)
    grown += tokens(200 + 150 * (version % 4), first=rng.randrange(10_000, 40_000))
    return Chat(SessionKey(f"s{index}"), grown)


def duel(url: str, name: str, lease_s: float) -> None:
    """Pause what is asked for, when it is asked for."""
    with open_site(url, redis={"owner": f"{name}:{os.getpid()}", "lease_s": lease_s}) as site:
        print("ready", flush=True)
        for line in sys.stdin:
            session_id, number = line.split()
            answer = site.pause(duelled(name, session_id, int(number)))
            if isinstance(answer, Exception):
                answer = {"error": type(answer).__name__, "text": str(answer)}
            print(json.dumps(answer), flush=True)


def loop(url: str, name: str, seed: int) -> None:
    """Pause until killed. The lease of one that was killed is waited for."""
    version = dict.fromkeys(range(LOOPED), 0)
    settings = {"owner": f"{name}:{os.getpid()}", "lease_s": LEASE_S}
    now = 0
    with open_site(url, redis=settings, now=lambda: now) as site:
        for index in version:
            manifest = read_manifest(site.redis, NAMESPACE, looped(index, 0).digest)
            version[index] = 0 if manifest is None else int(manifest.paused_at)
        print(*version.values(), flush=True)
        rng = random.Random(seed)
        while True:
            index = rng.randrange(LOOPED)
            now = version[index] = version[index] + 1
            print("begin", index, now, flush=True)
            while isinstance(answer := site.pause(looped(index, now)), StoreError):
                assert isinstance(answer, LeaseHeld) or "lease" in str(answer), answer
                time.sleep(0.02)
            assert answer["tiers"] == ["redis"], answer
            print("end", index, now, flush=True)


if __name__ == "__main__":
    if sys.argv[3] == "duel":
        duel(sys.argv[1], sys.argv[2], float(sys.argv[4]))
    else:
        loop(sys.argv[1], sys.argv[2], int(sys.argv[4]))

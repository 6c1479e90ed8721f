"""SIGKILL in the middle of pauses: every session is as before or as after, and no orphan is left."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from array import array
from pathlib import Path

from sgl_krul.session.catalog import find_sessions, read_manifest
from sgl_krul.session.registry import State
from tests.sessions import LAYOUT, NAMESPACE, NOW, chat, files, open_ssd, page_hashes, tokens, true_kv

PROJECT = Path(__file__).parents[2]
KILLS = 10
SESSIONS = 3

CHILD = """
import random, sys
from pathlib import Path
from sgl_krul.session.catalog import read_manifest
from tests.sessions import NAMESPACE, chat, open_ssd
from tests.integration.test_kill_during_pause import state

with open_ssd(Path(sys.argv[1])) as tier:
    version = {}
    for index in range(3):
        manifest = read_manifest(tier, NAMESPACE, chat(0, f"s{index}").digest)
        version[index] = 0 if manifest is None else int(manifest.paused_at)
    print(*version.values(), flush=True)
    rng = random.Random(int(sys.argv[2]))
    while True:
        index = rng.randrange(3)
        version[index] += 1
        session = chat(0, f"s{index}")
        session.token_ids = state(index, version[index])
        print("begin", index, version[index], flush=True)
        session.write(tier, now=version[index])
        print("end", index, version[index], flush=True)
"""


def state(index: int, version: int) -> array[int]:
    """The tokens of a session at its n-th pause: it grows, and every third time it is edited."""
    rng = random.Random(f"{index} {version // 3}")
    return tokens(64 * (1 + version // 3 % 3), first=1000 * index) + tokens(
        100 + 30 * (version % 3), first=rng.randrange(10_000, 40_000)
    )


def progress(output: str) -> tuple[dict[int, int], dict[int, int]]:
    """By session: the last pause that ended, and the last that began."""
    first, *lines = [line for line in output.splitlines(keepends=True) if line.endswith("\n")]
    ended = dict(enumerate(int(word) for word in first.split()))
    begun = dict(ended)
    for line in lines:
        word, index, version = line.split()
        (begun if word == "begin" else ended)[int(index)] = int(version)
    return ended, begun


def test_ten_kills_at_seeded_moments(tmp_path: Path) -> None:
    rng = random.Random("kill during pause")
    middle = 0
    expected: dict[int, int] = dict.fromkeys(range(SESSIONS), 0)
    for kill in range(KILLS):
        arguments = [sys.executable, "-c", CHILD, str(tmp_path), str(kill)]
        with subprocess.Popen(arguments, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            first = child.stdout.readline()
            time.sleep(rng.uniform(0.0, 0.15))
            child.kill()
            ended, begun = progress(first + child.stdout.read())
        assert {index: int(word) for index, word in enumerate(first.split())} == expected
        middle += ended != begun
        with open_ssd(tmp_path) as tier:
            catalog = find_sessions(tier, NAMESPACE, now=NOW, stale_ttl_s=1.0)
            assert catalog.corrupt == catalog.expired == 0
            assert all(session.state is State.PAUSED for session in catalog.sessions)
            named = set()
            for index in range(SESSIONS):
                session = chat(0, f"s{index}")
                manifest = read_manifest(tier, NAMESPACE, session.digest)
                expected[index] = 0 if manifest is None else int(manifest.paused_at)
                assert expected[index] in (ended[index], begun[index])
                if manifest is None:
                    continue
                session.token_ids = state(index, expected[index])
                assert manifest.hashes == session.hashes == page_hashes(session.token_ids)
                assert manifest.stored_tokens == len(session.token_ids) // 16 * 16
                named |= {name for name in files(tmp_path) if session.digest in name}
                first_page = 0
                for chunk in manifest.chunks:
                    size = chunk.pages * LAYOUT.page_segment_bytes
                    layers = [bytearray(size) for _ in range(LAYOUT.layers)]
                    tier.read_segments(chunk.key, 0, [memoryview(layer) for layer in layers])
                    hashes = session.hashes[first_page : first_page + chunk.pages]
                    for layer, found in enumerate(layers):
                        assert bytes(found) == b"".join(true_kv(h, layer) for h in hashes)
                    first_page += chunk.pages
                assert len([name for name in files(tmp_path) if session.digest in name]) == 1 + len(
                    manifest.chunks
                )
            assert set(files(tmp_path)) == named
            assert tier.check() == []
    assert middle >= KILLS // 2  # most kills came in the middle of a pause
    assert min(expected.values()) > 0

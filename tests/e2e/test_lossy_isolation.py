"""A session whose stored KV is not exact, beside others of the same text, on real servers.

Its KV is made visibly wrong while the server is down: that of another text, a little larger. What the session
answers then is not what the model would; whatever else is asked, in whatever order, is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from sgl_krul.layout import KvLayout
from sgl_krul.pause.pipeline import Snapshot, write_session
from sgl_krul.service.mover import read_chunk
from sgl_krul.session.catalog import delete_session, read_manifest
from sgl_krul.session.private import private_key
from sgl_krul.session.record import Manifest, SessionKey
from sgl_krul.store.ssd import SsdTier
from tests.e2e.harness import Answer, Chatter, ServerFactory, prompt
from tests.sessions import open_ssd

LAYOUT = KvLayout(
    layers=30, kv_heads=3, head_dim=64, v_head_dim=64, dtype="float32", page_size=16, rope="as served"
)
LOSSY = ("lossy", "lossy too", "lossy three")
LENGTH, NEW = 600, 8
STORED = 592
SECOND = prompt(4002, 25)
LOAD_ONLY = "restore: {recompute: false}"  # what is recomputed would be exact, and the answer another


class WrongPages:
    """A PageSource: the KV of another session's chunks, in float32, a hundredth larger."""

    def __init__(self, tier: SsdTier, manifest: Manifest) -> None:
        self._tier = tier
        self._manifest = manifest

    @contextmanager
    def segments(self, first_page: int, pages: int) -> Iterator[Sequence[Sequence[memoryview]]]:
        """See PageSource; whole chunks are asked for."""
        first = 0
        for ref in self._manifest.chunks:
            if (first, ref.pages) == (first_page, pages):
                break
            first += ref.pages
        else:
            raise AssertionError(f"no chunk of pages {first_page} to {first_page + pages}")
        _, layers = read_chunk(self._tier, self._manifest.namespace, ref)
        larger = [np.frombuffer(layer, np.float32) * np.float32(1.01) for layer in layers]
        yield [[layer.data.cast("B")] for layer in larger]


def stored(tier: SsdTier, namespace: str, name: str) -> Manifest:
    manifest = read_manifest(tier, namespace, SessionKey(name).digest)
    assert manifest is not None
    return manifest


def make_lossy(store: Path, namespace: str, name: str, other: str) -> None:
    """Store the session `name` anew, with the KV of `other`, as a lossy pause would."""
    with open_ssd(store, 4 << 30) as tier:
        manifest, donor = stored(tier, namespace, name), stored(tier, namespace, other)
        delete_session(tier, namespace, manifest.digest)
        snapshot = Snapshot(
            namespace=namespace,
            digest=manifest.digest,
            session_id=name,
            salted=False,
            layout=LAYOUT,
            token_ids=manifest.token_array,
            page_hashes=manifest.hashes,
            exact=False,
        )
        report = write_session(
            snapshot, WrongPages(tier, donor), tier, chunk_tokens=256, now=lambda: manifest.paused_at
        )
        assert report.manifest.stored_tokens == STORED


class Story:
    """Sessions of one text; `lossy` is stored with wrong KV, `exact` as it was."""

    def __init__(self, servers: ServerFactory) -> None:
        self.servers = servers
        self.first = prompt(4000, LENGTH - NEW + 1)
        self.config = servers.config(more=LOAD_ONLY)
        server = servers.start(config=self.config)
        self.begun = server.ask(self.first, "exact")
        self.history = [*self.first, *self.begun.tokens, *SECOND]
        self.right = server.ask(self.history, cache_salt="reference")
        for name in LOSSY:
            assert server.ask(self.first, name).same_as(self.begun)
        server.ask(prompt(4001, LENGTH - NEW + 1), "donor")
        for name in (*LOSSY, "exact", "donor"):
            assert server.sessions.pause(name).exact
        self.namespace = server.sessions.sessions().namespace
        server.kill()
        for name in LOSSY:
            make_lossy(servers.store, self.namespace, name, "donor")
        self.wrong: Answer | None = None

    def start(self) -> Chatter:
        """A server that knows nothing but what is stored."""
        return self.servers.start(config=self.config)

    def ask_lossy(self, server: Chatter, name: str = "lossy", restored: int | None = STORED) -> Answer:
        """The second turn of a lossy session: always the same wrong answer."""
        answer = server.ask(self.history, name)
        assert restored is None or answer.restored == restored
        assert answer.krul["exact"] is False
        assert not answer.same_as(self.right)
        if self.wrong is None:
            self.wrong = answer
        assert answer.same_as(self.wrong)
        return answer

    def ask_exact(self, server: Chatter, name: str | None = "exact") -> Answer:
        """The same text from anybody else."""
        answer = server.ask(self.history, name)
        assert answer.same_as(self.right), name
        assert name is None or answer.krul["exact"] is True
        return answer


@pytest.fixture(scope="module")
def story(servers: ServerFactory) -> Story:
    return Story(servers)


def sound(server: Chatter) -> None:
    """Nothing is left over, and the pool is whole: SGLang counts it when idle."""
    assert server.sessions.sessions().load["problems"] == []
    assert server.http.get("/health").status_code == 200


def test_the_lossy_one_comes_first(story: Story) -> None:
    server = story.start()
    listed = server.sessions.session("lossy")
    assert (listed.state, listed.exact, listed.lossy_since) == ("paused", False, None)
    story.ask_lossy(server)
    listed = server.sessions.session("lossy")
    assert (listed.state, listed.exact, listed.lossy_since) == ("active", False, 1)
    assert story.ask_exact(server, None).cached == 0  # without a session: nothing to match
    story.ask_lossy(server, "lossy too")
    story.ask_exact(server)
    story.ask_exact(server, "new")
    story.ask_lossy(server, "lossy three")  # though memory has the very pages now: the exact session's
    story.ask_lossy(server, restored=None)  # regenerated: its own pages on the device
    story.ask_exact(server)
    sound(server)


def test_what_is_paused_of_it_is_lossy(story: Story) -> None:
    """Goes on with the server of the test before."""
    server = story.servers.running
    paused = server.sessions.pause("lossy")
    assert (paused.exact, paused.lossy_since, paused.chunks_kept) == (False, 1, 2)
    assert server.sessions.pause("exact").exact
    with_answer = STORED + 32  # the second turn, in whole pages
    assert paused.stored_tokens == with_answer
    story.ask_lossy(server, restored=None)  # out of memory, where it lies under names of its own
    story.ask_exact(server)
    server.sessions.pause("lossy")
    server.http.post("/flush_cache")
    story.ask_exact(server)
    story.ask_lossy(server, restored=None)
    sound(server)
    for name in ("lossy", "lossy too", "exact"):
        server.sessions.pause(name)
    server.kill()
    with open_ssd(story.servers.store, 4 << 30) as tier:
        lossy, exact = (stored(tier, story.namespace, name) for name in ("lossy", "exact"))
        assert (lossy.exact, exact.exact) == (False, True)
        assert lossy.hashes[: STORED // 16] == exact.hashes[: STORED // 16]


def test_the_exact_one_comes_first(story: Story) -> None:
    server = story.start()
    story.ask_exact(server)
    story.ask_lossy(server, restored=None)
    story.ask_exact(server, None)
    for name, target in (("lossy", "device"), ("lossy too", "memory"), ("exact", "device")):
        server.sessions.pause(name)
        resumed = server.sessions.resume(name, target=target)
        assert resumed.exact is (name == "exact")
        assert (resumed.lossy_since is None) is (name == "exact")
        assert resumed.restored_tokens >= STORED
    server.sessions.pause("exact")
    server.sessions.resume("exact", target="memory")
    story.ask_lossy(server, "lossy too", restored=None)
    story.ask_exact(server)
    story.ask_lossy(server, restored=None)
    sound(server)


def test_side_by_side(story: Story) -> None:
    """Goes on with the server of the test before."""
    server = story.servers.running
    for name in ("lossy", "exact", "lossy too"):
        server.sessions.pause(name)
    server.http.post("/flush_cache")
    with ThreadPoolExecutor(6) as pool:
        asked = [
            pool.submit(story.ask_lossy, server, "lossy", None),
            pool.submit(story.ask_exact, server, "exact"),
            pool.submit(story.ask_exact, server, None),
            pool.submit(story.ask_lossy, server, "lossy too", None),
            pool.submit(story.ask_exact, server, "another"),
            pool.submit(story.ask_lossy, server, "lossy", None),
        ]
        for one in asked:
            one.result()
    sound(server)


def test_nobody_gets_in_and_nothing_leaks(story: Story) -> None:
    """Goes on with the server of the test before."""
    server = story.servers.running
    key = SessionKey("lossy")
    since = server.sessions.session("lossy").lossy_since
    assert since is not None
    body = {"input_ids": story.history, "sampling_params": {"max_new_tokens": 1}}
    forged = {"extra_key": private_key(key, since).extra_key}
    for fields in ({}, {"session_id": "lossy"}, {"session_id": "thief"}):
        answer = server.http.post("/generate", json=body | forged | fields)
        assert answer.status_code == 400, fields
        assert "private" in answer.text
    chat = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert server.http.post("/v1/chat/completions", json=chat | forged).status_code == 400
    for path, request in (("/generate", body), ("/v1/chat/completions", chat)):
        for stream in (False, True):
            answer = server.http.post(path, json=request | {"session_id": "lossy", "stream": stream})
            assert answer.status_code == 200
            assert "krul:" not in answer.text
            assert key.digest not in answer.text
    sound(server)


def test_deleted_it_is_exact_again(story: Story) -> None:
    """Goes on with the server of the test before."""
    server = story.servers.running
    assert server.sessions.delete("lossy").deleted
    story.ask_exact(server, "lossy")
    listed = server.sessions.session("lossy")
    assert (listed.exact, listed.lossy_since) == (True, None)
    paused = server.sessions.pause("lossy")
    assert (paused.exact, paused.chunks_kept) == (True, 0)
    server.http.post("/flush_cache")
    story.ask_exact(server, "lossy")
    story.ask_lossy(server, "lossy too", restored=None)
    sound(server)

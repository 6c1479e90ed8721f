"""A store that was damaged, or belongs to something else: right answers, computed, and counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.e2e.harness import Chatter, ServerFactory, prompt

LENGTH = 600  # three chunks


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def version_from_the_future(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8:12] = (99).to_bytes(4, "little")
    path.write_bytes(data)


def swap(a: Path, b: Path) -> None:
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


# What is done to a session's directory -> tokens that are restored: damaged chunks are computed.
DAMAGE: dict[str, tuple[Callable[[list[Path], Path], object], int]] = {
    "first-chunk-truncated": (lambda chunks, manifest: truncate(chunks[0]), 592),
    "second-chunk-one-bit": (lambda chunks, manifest: flip(chunks[1], 5 << 20), 592),
    "last-byte-one-bit": (lambda chunks, manifest: flip(chunks[2], chunks[2].stat().st_size - 1), 592),
    "header-one-bit": (lambda chunks, manifest: flip(chunks[1], 60), 592),
    "two-chunks-swapped": (lambda chunks, manifest: swap(chunks[0], chunks[1]), 592),
    "chunk-deleted": (lambda chunks, manifest: chunks[2].unlink(), 592),
    "chunk-from-the-future": (lambda chunks, manifest: version_from_the_future(chunks[1]), 592),
    "chunk-empty": (lambda chunks, manifest: chunks[0].write_bytes(b""), 592),
    "manifest-cut-off": (lambda chunks, manifest: truncate(manifest), 0),
    "manifest-one-bit": (lambda chunks, manifest: flip(manifest, 200), 0),
    "manifest-from-the-future": (lambda chunks, manifest: version_from_the_future(manifest), 0),
    "untouched": (lambda chunks, manifest: None, 592),
}


def test_damage_costs_time_only(servers: ServerFactory, chatter: Chatter) -> None:
    names = list(DAMAGE)
    histories: dict[str, list[int]] = {}
    references = {}
    for number, name in enumerate(names):
        first = prompt(3000 + number, LENGTH - 7)
        begun = chatter.ask(first, name)
        histories[name] = [*first, *begun.tokens, 21, 22, 23]
        references[name] = chatter.ask(histories[name], cache_salt="damage")
        chatter.sessions.pause(name)
    directories = session_directories(servers.store, chatter, names)
    chatter.kill()
    for name in names:
        damage, _ = DAMAGE[name]
        chunks = sorted(p for p in directories[name].iterdir() if "-c" in p.name)
        damage(chunks, directories[name] / "manifest")
    second = servers.start()
    for name in names:
        answer = second.ask(histories[name], name)
        assert answer.same_as(references[name]), name
        assert answer.restored == DAMAGE[name][1], name
    counters = second.sessions.sessions().counters
    assert counters["corrupt_chunks"] in (7, 8)  # of the swapped ones both, if compute was not there before
    assert counters["missing_chunks"] == 1
    assert counters["corrupt_manifests"] == 3
    assert second.sessions.session("two-chunks-swapped").corrupt_chunks in (1, 2)
    for name in names:  # paused anew, everything is whole again
        assert second.sessions.pause(name).stored_tokens == 592 + 16, name
        second.http.post("/flush_cache")
        assert second.ask([*histories[name], *references[name].tokens, 24], name).restored == 608, name


def session_directories(store: Path, chatter: Chatter, names: list[str]) -> dict[str, Path]:
    from sgl_krul.session.record import SessionKey

    namespace = chatter.sessions.sessions().namespace
    return {name: store / "v1" / namespace / SessionKey(name).digest for name in names}


def test_another_page_size_or_dtype_is_another_namespace(servers: ServerFactory) -> None:
    for arguments in (("--page-size", "32"), ("--dtype", "bfloat16")):
        chatter = servers.start(*arguments)
        listed = chatter.sessions.session("untouched")
        assert listed.state == "stale", arguments
        answer = chatter.ask(prompt(3011, LENGTH - 7), "untouched")
        assert answer.restored == 0
        reference = chatter.ask(prompt(3011, LENGTH - 7), cache_salt="other")
        assert answer.same_as(reference)
        chatter.kill()

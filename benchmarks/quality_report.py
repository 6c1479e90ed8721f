"""Tables and pictures of a result of bench_quality.py.

python -m benchmarks.quality_report RESULT.json PICTURE.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import table

__all__ = ["draw", "family", "show"]

Row = Mapping[str, Any]

_NEEDLES = ("needle_start", "needle_middle", "needle_end")
_COLOURS = [
    *(f"tab:{name}" for name in "blue orange green red purple brown pink gray olive cyan".split()),
    *("navy", "gold", "lime", "teal"),
]
BUDGETED = "within a budget"
_LEAST_KL = 1e-6  # what is less is drawn there: exact has none at all


def family(method: str) -> str:
    """What a method belongs to, for a line in the picture: its name without the share and the budget's."""
    if ":" in method:
        return BUDGETED
    head, _, tail = method.rpartition("-")
    return head if tail.replace(".", "").isdigit() else method


def show(result: Mapping[str, Any]) -> None:
    """The readable tables."""
    for model in result["models"]:
        for domain in dict.fromkeys(row["domain"] for row in result["rows"] if row["model"] == model):
            rows = [row for row in result["rows"] if (row["model"], row["domain"]) == (model, domain)]
            print(f"\n{model}, {domain}: {rows[0]['prompts']} chats, {rows[0]['positions']} positions")
            print(table(_names(rows), [_cells(row) for row in rows]))
    for row in result["budget"]:
        kept = "kept" if row["met"] else "NOT KEPT"
        figures = f"{row['bytes_ratio']:.3f}, KL at most {row['kl_hi']:.5f}"
        print(f"{row['model']}, {row['method']}: {figures}: {kept}")
    for claim in result["paper_claims"]:
        holds = {True: "holds", False: "DOES NOT HOLD", None: "not measured"}
        by_model = ", ".join(f"{model}: {holds[entry['holds']]}" for model, entry in claim["found"].items())
        print(f"- {claim['claim']}. {by_model}")


def _names(rows: Sequence[Row]) -> list[str]:
    shown = "method ratio r_l kl kl_lo kl_hi worst over top1 ppl loss".split()
    return [*shown, *(name.removeprefix("needle_") for name in _NEEDLES if rows[0][name] is not None)]


def _cells(row: Row) -> list[str]:
    cells = [
        row["method"],
        f"{row['bytes_ratio']:.4f}",
        f"{row['r_l']:.3f}",
        *(f"{row[name]:.5f}" for name in ("kl", "kl_lo", "kl_hi", "worst_kl")),
        str(row["prompts_over_bound"]),
        f"{row['top1']:.2%}",
        f"{row['ppl_ratio']:.4f}",
        f"{row['loss']:.5f}",
    ]
    return cells + [f"{row[name]:.2f}" for name in _NEEDLES if row[name] is not None]


def draw(result: Mapping[str, Any], path: Path) -> None:
    """For each model: distances of its layers, their I-R mass, and quality against bytes of all methods."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = result["models"]
    figure, pictures = pyplot.subplots(
        len(models), 3, figsize=(16, 4.8 * len(models)), layout="constrained", squeeze=False
    )
    for (left, middle, right), model in zip(pictures, models, strict=True):
        _draw_distances(figure, left, result["layers"][model], model)
        _draw_mass(middle, result["layers"][model])
        _draw_quality(right, [r for r in result["rows"] if (r["model"], r["domain"]) == (model, "prose")])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_distances(figure: Any, axes: Any, layers: Row, model: str) -> None:
    image = axes.imshow(layers["distances"], cmap="viridis_r")
    figure.colorbar(image, ax=axes, shrink=0.85)
    axes.set_title(
        f"{model}: distance of the layers' attention, {layers['histories']} histories", fontsize=10
    )
    axes.set_xlabel("layer")
    axes.set_ylabel("layer")


def _draw_mass(axes: Any, layers: Row) -> None:
    places = range(len(layers["mass"]))
    ir = [value >= layers["gamma"] for value in layers["mass"]]
    axes.bar(
        places, layers["mass"], color=["tab:blue" if one else "lightgrey" for one in ir], label="relative"
    )
    axes.plot(places, layers["mass_absolute"], color="tab:orange", marker=".", label="absolute windows")
    axes.axhline(layers["gamma"], color="grey", linestyle=":", linewidth=1)
    axes.set_ylim(0, 1)
    axes.set_title("attention on the first and the last 10% (blue: I-R layers)", fontsize=10)
    axes.set_xlabel("layer")
    axes.legend(fontsize=8)


def _draw_quality(axes: Any, rows: Sequence[Row]) -> None:
    axes.set_prop_cycle(color=_COLOURS)
    for name in dict.fromkeys(family(row["method"]) for row in rows):
        line = sorted(
            (row for row in rows if family(row["method"]) == name), key=lambda row: row["bytes_ratio"]
        )
        kl, low, high = ([max(row[of], _LEAST_KL) for row in line] for of in ("kl", "kl_lo", "kl_hi"))
        spread = [[max(at - bound, 0.0) for at, bound in zip(kl, low, strict=True)]]
        spread.append([max(bound - at, 0.0) for at, bound in zip(kl, high, strict=True)])
        style: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.2}
        if name == BUDGETED:  # rings around what they came to
            style = {"marker": "o", "markersize": 10, "linewidth": 0, "fillstyle": "none", "color": "black"}
        ratios = [row["bytes_ratio"] for row in line]
        axes.errorbar(ratios, kl, yerr=spread, label=name, elinewidth=1, capsize=2, **style)
    axes.set_yscale("log")
    axes.set_xlabel("stored bytes / 16-bit KV")
    axes.set_title("mean KL(exact || coded), nats, 95% interval", fontsize=10)
    axes.legend(fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="what bench_quality.py --out wrote")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    result = json.loads(options.result.read_text(encoding="utf-8"))
    show(result)
    draw(result, options.picture)


if __name__ == "__main__":
    main()

"""Tables for a terminal and bars for a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns."""
    widths = [max(len(name), *(len(row[i]) for row in rows)) for i, name in enumerate(names)]
    lines = ["  ".join(name.rjust(width) for name, width in zip(names, widths, strict=True))]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def bars(rows: Sequence[dict[str, Any]], columns: Sequence[str], path: Path, title: str) -> None:
    """Grouped bars of `columns` (seconds, log scale) for each row's `tokens`, with the spread as whiskers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    width = 0.8 / len(columns)
    for index, column in enumerate(columns):
        places = [x + (index - (len(columns) - 1) / 2) * width for x in range(len(rows))]
        values = [row[column] for row in rows]
        low = [row[column] - row["spread"][column][0] for row in rows]
        high = [row["spread"][column][1] - row[column] for row in rows]
        drawn = axes.bar(places, values, width, label=column.removesuffix("_s"), yerr=[low, high], capsize=3)
        axes.bar_label(drawn, labels=[f"{value:.2f}" for value in values], padding=2, fontsize=8)
    axes.set_yscale("log")
    axes.set_xticks(range(len(rows)), [f"{row['tokens']:,} tokens" for row in rows])
    axes.set_ylabel("seconds")
    axes.set_title(title, fontsize=10)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

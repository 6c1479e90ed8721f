"""A restore as a picture: seconds by layer, both streams. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sgl_krul.restore.timeline import Span

__all__ = ["draw_timeline"]

_COLORS = {"compute": "#d1662b", "load": "#2b6fb5"}
_LABELS = {"compute": "recompute", "load": "load"}
_LANES = {"compute": (-0.44, -0.02), "load": (0.02, 0.44)}  # of a layer: the streams work in it at once
_DPI = 120
_TITLE_LENGTH = 120


def draw_timeline(timeline: Mapping[str, Any], title: str) -> Figure:
    """Draw `Timeline.as_dict()`. Layer 0 is on top; below stand both streams as a whole.

    A span is a bar in each of its layers. Work in vain (a note with "wasted") is hatched. Every kind of bars
    is a PolyCollection of the upper axes, whose gid is the stream, and "wasted" after it where it is so.
    """
    spans = [Span(*span) for span in timeline["spans"]]
    layers = max([len(timeline["staircase"]), 1, *(span.first_layer + span.layers for span in spans)])
    end_s = max([timeline["seconds"], *(span.end_s for span in spans)]) or 1.0
    height = min(14.0, max(4.0, 2.2 + 0.2 * layers))
    figure = Figure(figsize=(11, height), dpi=_DPI, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[max(3.0, height - 1.6), 1])
    for stream in _COLORS:
        for wasted in (False, True):
            chosen = [s for s in spans if s.stream == stream and ("wasted" in s.note) is wasted]
            if chosen:
                upper.add_collection(_bars(chosen, stream, wasted))
    _frame_layers(upper, layers, title)
    _draw_streams(lower, spans)
    lower.set_xlim(0, 1.01 * end_s)
    lower.axvline(timeline["seconds"], color="black", linewidth=0.8, linestyle=":")
    upper.axvline(timeline["seconds"], color="black", linewidth=0.8, linestyle=":")
    if spans:  # beside the axes, where it hides nothing
        figure.legend(handles=list(upper.collections), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _bars(spans: Sequence[Span], stream: str, wasted: bool) -> PolyCollection:
    top, bottom = _LANES[stream]
    corners = [
        [
            (span.start_s, layer + top),
            (span.end_s, layer + top),
            (span.end_s, layer + bottom),
            (span.start_s, layer + bottom),
        ]
        for span in spans
        for layer in range(span.first_layer, span.first_layer + span.layers)
    ]
    # Loads of one layer overlap in time, several being under way: what lies below shows through.
    return PolyCollection(
        corners,
        facecolors="white" if wasted else _COLORS[stream],
        edgecolors=_COLORS[stream],
        linewidths=0.4,  # a span narrower than a pixel still shows
        alpha=0.55 if stream == "load" else 0.9,
        hatch="////" if wasted else None,
        label=f"{_LABELS[stream]}, in vain" if wasted else _LABELS[stream],
        gid=f"{stream} wasted" if wasted else stream,
    )


def _frame_layers(axes: Axes, layers: int, title: str) -> None:
    axes.set_ylim(layers - 0.4, -0.6)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    axes.set_ylabel("layer")
    axes.grid(axis="x", linewidth=0.3)
    # An id may hold dollar signs, which are no formula here, and be very long.
    short = title if len(title) <= _TITLE_LENGTH else f"...{title[3 - _TITLE_LENGTH :]}"
    axes.set_title(short, fontsize=10, parse_math=False)


def _draw_streams(axes: Axes, spans: Sequence[Span]) -> None:
    """Both streams over time: where there is white, one did nothing."""
    for row, stream in enumerate(_COLORS):
        times = [(span.start_s, span.end_s - span.start_s) for span in spans if span.stream == stream]
        axes.broken_barh(times, (row - 0.4, 0.8), facecolors=_COLORS[stream])
    axes.set_yticks(range(len(_COLORS)), [_LABELS[stream] for stream in _COLORS])
    axes.set_ylim(1.6, -0.6)
    axes.set_xlabel("seconds since the restore began")
    axes.grid(axis="x", linewidth=0.3)

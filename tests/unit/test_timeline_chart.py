"""The picture of a restore: a real PNG, and in it every span of the timeline."""

from __future__ import annotations

import io
import struct
from collections import Counter
from typing import Any

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from sgl_krul.cli.timeline_chart import draw_timeline
from sgl_krul.restore.timeline import Span
from tests.restores import SPANS, timeline_of


def png_size(data: bytes) -> tuple[int, int]:
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return int(width), int(height)


def png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def bars_of(figure: Figure) -> dict[str, PolyCollection]:
    return {str(bars.get_gid()): bars for bars in figure.axes[0].collections}  # type: ignore[misc]


def drawn(bars: PolyCollection) -> Counter[tuple[float, float, int]]:
    """(start, end, layer) of every bar. A bar lies wholly within its layer's row."""
    found: Counter[tuple[float, float, int]] = Counter()
    for path in bars.get_paths():
        corners = path.vertices
        layer = round(float(corners[:, 1].mean()))
        assert abs(corners[:, 1] - layer).max() < 0.5
        found[float(corners[:, 0].min()), float(corners[:, 0].max()), layer] += 1
    return found


def expected(spans: list[Span]) -> Counter[tuple[float, float, int]]:
    return Counter(
        (span.start_s, span.end_s, layer)
        for span in spans
        for layer in range(span.first_layer, span.first_layer + span.layers)
    )


def as_dict(spans: list[Span], seconds: float = 1.5) -> dict[str, Any]:
    return timeline_of(spans, seconds).as_dict()


def test_every_span_is_drawn_in_each_of_its_layers() -> None:
    figure = draw_timeline(as_dict(SPANS), "'trip'")
    bars = bars_of(figure)
    assert sorted(bars) == ["compute", "load", "load wasted"]
    assert drawn(bars["compute"]) == expected(SPANS[:3])
    assert drawn(bars["load"]) == expected(SPANS[3:5])
    assert drawn(bars["load wasted"]) == expected(SPANS[5:])
    width, height = png_size(png(figure))
    assert (width, height) == (1320, 480)


def test_streams_have_two_colors_and_what_was_in_vain_is_hatched() -> None:
    spans = [*SPANS, Span("compute", 1.0, 1.1, 0, 256, 3, 1, note="wasted")]
    bars = bars_of(draw_timeline(as_dict(spans), "'trip'"))
    edges = {name: to_hex(each.get_edgecolor()[0]) for name, each in bars.items()}
    assert edges["compute"] == edges["compute wasted"] != edges["load"] == edges["load wasted"]
    assert [name for name, each in bars.items() if each.get_hatch()] == ["compute wasted", "load wasted"]
    labels = {each.get_label() for each in bars.values()}
    assert labels == {"recompute", "recompute, in vain", "load", "load, in vain"}


def test_the_streams_do_not_hide_each_other() -> None:
    """Both may be at work in one layer at one time: each has half of the layer's row."""
    spans = [Span("compute", 0, 1, 0, 256, 0, 1), Span("load", 0, 1, 256, 256, 0, 1, 9, "ssd")]
    bars = bars_of(draw_timeline(as_dict(spans), "'trip'"))
    (compute,), (load,) = (bars[name].get_paths() for name in ("compute", "load"))
    assert compute.vertices[:, 1].max() < load.vertices[:, 1].min()


def test_all_of_it_lies_within_the_axes() -> None:
    late = [
        *SPANS,
        Span("load", 1.4, 2.0, 0, 256, 5, 1, 9, "ssd"),
    ]  # after the end, below the stairs
    upper, lower = draw_timeline(as_dict(late), "'trip'").axes
    for axes in (upper, lower):
        assert axes.get_xlim()[0] <= 0
        assert axes.get_xlim()[1] >= 2.0
    bottom, top = upper.get_ylim()
    assert bottom >= 5.5
    assert top <= -0.5
    assert len(lower.collections) == 2


def test_the_title_is_no_formula_and_has_an_end() -> None:
    figure = draw_timeline(as_dict(SPANS), "'$x$': first token after 1 s")
    assert figure.axes[0].get_title() == "'$x$': first token after 1 s"
    png(figure)
    long = draw_timeline(as_dict(SPANS), "'" + "x" * 300 + "': first token; bubble 4%").axes[0].get_title()
    assert len(long) == 120
    assert long.endswith("; bubble 4%")


@pytest.mark.parametrize(("spans", "seconds"), [([], 0.0), ([SPANS[0]], 0.4), ([SPANS[3]], 0.7)])
def test_less_than_two_streams(spans: list[Span], seconds: float) -> None:
    figure = draw_timeline(as_dict(spans, seconds), "'trip'")
    assert sum(sum(drawn(bars).values()) for bars in bars_of(figure).values()) == sum(s.layers for s in spans)
    assert png_size(png(figure))[0] == 1320


def test_a_deep_model_and_many_spans() -> None:
    spans = [
        Span("load", start / 100, start / 100 + 0.03, 256 * start, 256, 40, 40, 1 << 20, "ssd")
        for start in range(200)
    ]
    figure = draw_timeline(as_dict(spans, 2.03), "'trip'")
    assert sum(drawn(bars_of(figure)["load"]).values()) == 8000
    assert png_size(png(figure)) == (1320, 1680)

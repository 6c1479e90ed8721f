"""Plans, rates and timelines as text and tables: pure, from the server's answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from sgl_krul.api.plans import PlanInfo, RatesInfo, SessionPlan, SessionTimeline, TimelineInfo
from sgl_krul.config import format_duration, format_size
from sgl_krul.restore.timeline import Span

__all__ = [
    "comparison_table",
    "explain_lines",
    "rates_note",
    "rates_table",
    "staircase_lines",
    "timeline_lines",
    "timeline_title",
]

_WIDTH = 48  # columns of a staircase and of a stream
_MAX_ROWS = 16  # of a staircase; deeper models show several layers in a row
_WAYS = {
    "memory": "A resume would go over host memory: SGLang copies it layer by layer under the forward.",
    "device": "A resume would go straight to the device, as a job beside the other chats.",
    "none": "A resume would bring nothing back: the next request computes what is not on the device.",
}


# ---- a plan ----


def explain_lines(plan: SessionPlan) -> list[str]:
    """What would be done and why, a sentence a line."""
    places = [f"{plan.on_device_tokens:,} on the device"] if plan.on_device_tokens else []
    places += [f"{tokens:,} in {tier}" for tier, tokens in plan.tiers.items() if tokens]
    recompute = "available" if plan.recompute.available else f"not on this server: {plan.recompute.reason}"
    return [
        f"{plan.session_id!r}: {plan.tokens:,} tokens ({', '.join(places) or 'none stored'}), "
        f"assuming {plan.new_tokens:,} new ones follow",
        _WAYS[plan.path],
        *([f"Why: {plan.plan.why}"] if plan.plan is not None and plan.plan.why else []),
        *([f"Of note: {plan.reason}"] if plan.reason else []),
        f"Recompute: {recompute}",
        f"Rates: {_rates_in_short(plan.rates)}",
        *([] if plan.rates.measured else [rates_note(plan.rates)]),
    ]


def comparison_table(plan: SessionPlan) -> Table:
    """The plan beside loading all and recomputing all: predicted seconds and bytes."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("way")
    for name in ("first token", "brought back", "bytes loaded", "load", "recompute", "forward"):
        table.add_column(name, justify="right")
    for name, way in (
        ("the plan", plan.plan),
        ("load all", plan.load_all),
        ("recompute all", plan.recompute_all),
        (f"the paper's pyramid, r_c {plan.paper_share or 0:.2f}", plan.paper),
    ):
        if way is None or (way is plan.paper and plan.paper_share is None):
            continue
        # Without rates of the model the planner counts nothing for it: no time to first token is that short.
        known = plan.rates.compute is not None
        table.add_row(
            f"{name} ({way.strategy})" if way is plan.plan else name,
            _predicted(way.ttft_s if known else None),
            f"{way.tokens:,}",
            format_size(way.load_bytes),
            _predicted(way.load_s),
            _predicted(way.compute_s if known else None),
            _predicted(way.forward_s if known else None),
        )
    return table


def staircase_lines(plan: PlanInfo, tokens: int, on_device_tokens: int) -> list[str]:
    """Each layer's tokens from left to right: on the device, recomputed, loaded, left to the request."""
    if not plan.tokens or not plan.staircase:
        return ["Nothing is brought back, so there is no staircase."]
    rows = [
        (_layers(first, count), width, f"{max(0, width - on_device_tokens):,} recomputed")
        for first, count, width in _stairs(plan.staircase)
    ]
    label = max(len(name) for name, _, _ in rows)
    lines = ["Staircase: # recomputed   . loaded   = on the device already   blank: computed by the request"]
    for name, width, text in rows:
        cells = (
            _cell((column + 0.5) * tokens / _WIDTH, on_device_tokens, width, plan.tokens)
            for column in range(_WIDTH)
        )
        lines.append(f"{name:{label}}  |{''.join(cells)}|  {text}")
    return lines


def _stairs(staircase: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first layer, layers, tokens) of each row: equal layers together, and more where there are too many."""
    stairs: list[tuple[int, int, int]] = []
    for width, group in groupby(staircase):
        stairs.append((sum(count for _, count, _ in stairs), len(list(group)), width))
    if len(stairs) <= _MAX_ROWS:
        return stairs
    step = -(-len(staircase) // _MAX_ROWS)
    cuts = [(first, staircase[first : first + step]) for first in range(0, len(staircase), step)]
    return [(first, len(part), round(sum(part) / len(part))) for first, part in cuts]


def _cell(token: float, on_device: int, recomputed: int, restored: int) -> str:
    if token < on_device:
        return "="
    if token < recomputed:
        return "#"
    return "." if token < restored else " "


def _layers(first: int, count: int) -> str:
    return f"layer {first}" if count == 1 else f"layers {first}-{first + count - 1}"


# ---- rates ----


def rates_note(rates: RatesInfo) -> str:
    """Where the rates come from, and what to do about it."""
    if rates.measured:
        return "These were measured on this server, and follow what restores really take."
    if rates.tiers and rates.recompute is not None and not rates.recompute.available:
        return (
            "The tiers were measured on this server; it does not recompute, so there is no more to measure."
        )
    return "These are safe defaults, in part at least: run `krul calibrate restore` to measure this server."


def rates_table(rates: RatesInfo) -> Table:
    """A row for each rate."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what")
    table.add_column("rate", justify="right")
    table.add_column("for each")
    compute = rates.compute
    if compute is None:
        table.add_row("recompute", "not measured", "")
    else:
        table.add_row("recompute: K and V", _tiny(compute.kv_s_per_token), "token and layer")
        table.add_row("recompute: rest of the layer", _tiny(compute.rest_s_per_token), "token and layer")
        table.add_row("recompute: attention", _tiny(compute.attention_s_per_pair), "pair of tokens and layer")
        table.add_row("recompute: a slice", _tiny(compute.slice_s), "slice of one layer")
    for name, tier in rates.tiers.items():
        table.add_row(
            f"{name}: bandwidth", _per_second(tier.bytes_per_s), f"{tier.in_flight} reads in flight"
        )
        table.add_row(f"{name}: latency", _tiny(tier.latency_s), "read")
    landing = _per_second(1 / rates.land_s_per_byte) if rates.land_s_per_byte > 0 else "free"
    table.add_row("verify, decode, copy", landing, "worker")
    return table


def _rates_in_short(rates: RatesInfo) -> str:
    parts = [
        f"{name} {_per_second(tier.bytes_per_s)} after {_tiny(tier.latency_s)}"
        for name, tier in rates.tiers.items()
    ]
    if rates.compute is None:
        parts += ["recompute not measured"] if rates.tiers else ["nothing was measured"]
    else:
        layer_s = rates.compute.kv_s_per_token + rates.compute.rest_s_per_token
        parts.append(f"recompute {_tiny(layer_s)} a token and layer, beside attention")
    return "; ".join(parts)


def _predicted(seconds: float | None) -> str:
    return "not known" if seconds is None else f"{seconds:.2f} s"


def _tiny(seconds: float) -> str:
    return f"{seconds * 1e9:.2g}ns" if 0 < seconds < 1e-6 else format_duration(seconds)


def _per_second(bytes_per_s: float) -> str:
    return f"{format_size(round(bytes_per_s))}/s"


# ---- a timeline ----


def timeline_lines(measured: SessionTimeline) -> list[str]:
    """What both streams did, a line each, and what was done in vain."""
    timeline = measured.timeline
    lines = [timeline_title(measured)]
    if measured.reason:
        lines.append(f"Of note: {measured.reason}")
    if not timeline.spans:
        return [*lines, "Neither stream had anything to do."]
    layers = max(len(timeline.staircase), *(span.first_layer + span.layers for span in timeline.spans))
    for stream in sorted(timeline.idle):
        spans = [span for span in timeline.spans if span.stream == stream]
        did = _recomputed(spans, layers) if stream == "compute" else _loaded(spans)
        busy = f"{1 - timeline.idle[stream]:.0%} busy"
        lines.append(f"{stream:7}  |{_busy_bar(spans, timeline.seconds)}|  {busy}, {did}")
    lines += _losses(timeline)
    return lines


def timeline_title(measured: SessionTimeline) -> str:
    """The parts of the time to first token, and the bubble."""
    timeline = measured.timeline
    parts, total = [f"restore {timeline.seconds:.2f} s"], ""
    if measured.plan.forward_s:  # 0: the model was not measured, so nothing is predicted of it
        parts.append(f"forward {measured.plan.forward_s:.2f} s (predicted)")
        planned = measured.plan.ttft_s
        total = "" if planned is None else f", planned {planned:.2f} s in all"
    # Written out where no font has it: the title of a picture is drawn with one font.
    name = ascii(measured.session_id)
    return f"{name}: first token after {' + '.join(parts)}{total}; bubble {timeline.bubble:.0%}"


def _recomputed(spans: Sequence[Span], layers: int) -> str:
    cells = sum(span.tokens * span.layers for span in spans)
    return f"{cells / layers:,.0f} tokens recomputed (through all {layers} layers, on average)"


def _loaded(spans: Sequence[Span]) -> str:
    by_tier = sorted({span.note for span in spans if span.note and "wasted" not in span.note})
    source = f" from {' and '.join(by_tier)}" if by_tier else ""
    return f"{format_size(sum(span.bytes for span in spans))} loaded{source}"


def _losses(timeline: TimelineInfo) -> list[str]:
    wasted = [span for span in timeline.spans if "wasted" in span.note]
    lines = []
    if wasted:
        size = format_size(sum(span.bytes for span in wasted))
        lines.append(f"In vain: {len(wasted)} of {len(timeline.spans)} spans, {size} loaded")
    if timeline.spans_dropped:
        lines.append(f"{timeline.spans_dropped:,} more spans were not kept: the picture has gaps")
    return lines


def _busy_bar(spans: Sequence[Span], seconds: float) -> str:
    """A column for each part of the time: # busy for most of it, - for some, blank for none."""
    step = max(seconds, *(span.end_s for span in spans), 1e-9) / _WIDTH
    covered = [0.0] * _WIDTH
    reached = 0.0
    for span in sorted(spans, key=lambda span: span.start_s):
        start, reached = max(span.start_s, reached), max(span.end_s, reached)
        for column in range(int(start / step), min(_WIDTH, int(reached / step) + 1)):
            covered[column] += max(0.0, min(reached, (column + 1) * step) - max(start, column * step))
    return "".join("#" if part > 0.5 * step else "-" if part > 0 else " " for part in covered)

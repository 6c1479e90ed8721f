"""`krul explain`, `krul timeline`, `krul calibrate`: what a restore would do, what it did, and the rates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sgl_krul.api.plans import CalibrateResult, RatesInfo, SessionTimeline
from sgl_krul.cli.options import (
    ApiKey,
    Extra,
    Json,
    Salt,
    SessionId,
    Url,
    naming,
    open_client,
    out_console,
    print_json,
)
from sgl_krul.cli.progress import Steps
from sgl_krul.cli.restore_text import (
    comparison_table,
    explain_lines,
    rates_note,
    rates_table,
    staircase_lines,
    timeline_lines,
    timeline_title,
)
from sgl_krul.errors import KrulError

__all__ = ["calibrate_app", "explain", "timeline"]

calibrate_app = typer.Typer(no_args_is_help=True, help="Measure a running server, so that it plans well.")


def explain(
    session_id: SessionId,
    url: Url = None,
    api_key: ApiKey = None,
    cache_salt: Salt = None,
    extra_key: Extra = None,
    json: Json = False,
) -> None:
    """Say what a resume of a session would do now, and why. Nothing is done."""
    with open_client(url, api_key) as client:
        plan = client.plan(session_id, cache_salt=cache_salt, extra_key=extra_key)
    if json:
        print_json(plan)
        return
    console = out_console()
    _say(console, explain_lines(plan))
    if plan.plan is not None:
        console.print()
        console.print(comparison_table(plan))
        console.print()
        _say(console, staircase_lines(plan.plan, plan.tokens, plan.on_device_tokens))


def timeline(
    session_id: SessionId,
    url: Url = None,
    api_key: ApiKey = None,
    cache_salt: Salt = None,
    extra_key: Extra = None,
    json: Json = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw it: seconds by layer, both streams.", show_default=False),
    ] = None,
) -> None:
    """Show what the last restore of a session did, when: both streams, measured."""
    if out is not None:
        _require_chart(out)
    with open_client(url, api_key) as client:
        measured = client.timeline(session_id, cache_salt=cache_salt, extra_key=extra_key)
    if json:
        print_json(measured)
    else:
        _say(out_console(), timeline_lines(measured))
    if out is not None:
        _draw(measured, out)
        if not json:
            print(f"drawn in {out}")


@calibrate_app.command("restore")
def calibrate_restore(url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """Measure how fast the server recomputes and loads; takes up to a minute, while it goes on serving."""
    # JSON is for a program: what moves goes elsewhere.
    steps = Steps(Console(stderr=json), 1)
    with (
        open_client(url, api_key) as client,
        steps.step("Measuring recompute and every tier, up to a minute") as step,
    ):
        rates = client.calibrate()
        step.outcome = "not all of it could be measured" if rates.problems else "measured"
    _print_rates(rates, json)


@calibrate_app.command("rates")
def show_rates(url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """Show what the server plans restores with now. Nothing is measured."""
    with open_client(url, api_key) as client:
        rates = client.rates()
    _print_rates(rates, json)


def _print_rates(rates: RatesInfo, json: bool) -> None:
    if json:
        print_json(rates)
        return
    console = out_console()
    console.print(rates_table(rates))
    problems = rates.problems if isinstance(rates, CalibrateResult) else []
    _say(console, [*problems, rates_note(rates)])


def _say(console: Console, lines: list[str]) -> None:
    for line in lines:  # ids and reasons come from strangers: never read as markup
        console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _require_chart(file: Path) -> None:
    """Before the server is asked: what can't be drawn need not be fetched."""
    if file.suffix.lower() != ".png":
        raise KrulError(f"{file} is no PNG file by its name: give one that ends in .png")
    try:
        import sgl_krul.cli.timeline_chart  # noqa: F401
    except ModuleNotFoundError as error:
        raise KrulError(
            f"a picture needs matplotlib, which is not installed ({error}): run "
            "`pip install 'matplotlib>=3.10'` in the Python of this command, or leave --out away"
        ) from error


def _draw(measured: SessionTimeline, file: Path) -> None:
    from sgl_krul.cli.timeline_chart import draw_timeline

    figure = draw_timeline(measured.timeline.model_dump(), timeline_title(measured))
    with naming(file):
        figure.savefig(file, format="png")

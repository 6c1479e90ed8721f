"""Steps of a long command: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

__all__ = ["Step", "Steps"]


class Step:
    """A step under way."""

    def __init__(self, title: str, progress: Progress | None, task: TaskID | None) -> None:
        self.outcome = ""
        self._title = title
        self._progress = progress
        self._task = task

    def note(self, text: str) -> None:
        """Show what it is at; only on a terminal."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=escape(f"{self._title}: {text}"))


def _columns() -> tuple[ProgressColumn, ...]:
    return SpinnerColumn(), BarColumn(bar_width=16), TextColumn("{task.description}"), TimeElapsedColumn()


class Steps:
    """`total` steps, shown one after another on `console`."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._done = 0

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Run a step. What its body puts into `outcome` stands behind it when it is done."""
        number = f"[{self._done + 1}/{self._total}]"
        start = time.monotonic()
        if self._console.is_terminal:
            columns = (
                SpinnerColumn(),
                BarColumn(bar_width=16),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
            )
            with Progress(*columns, console=self._console, transient=True) as progress:
                task = progress.add_task(escape(title), total=self._total, completed=self._done)
                step = Step(title, progress, task)
                yield step
        else:
            self._say(f"{number} {title} ...")
            step = Step(title, None, None)
            yield step
        self._done += 1
        elapsed = f"{time.monotonic() - start:.1f} s"
        outcome = f": {step.outcome}" if step.outcome else ""
        if self._console.is_terminal:
            self._console.print(
                f"[green]✓[/] {escape(number)} {escape(title + outcome)} [dim]({elapsed})[/]", highlight=False
            )
        else:
            self._say(f"{number} done in {elapsed}{outcome}")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

"""Progress on stderr, so that stdout has only the result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def load_bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar over bytes while loading, which disappears when done; yields None if stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def show_activity(what: str) -> Iterator[Callable[[str], None]]:
    """Show the current work of unknown length: with the time it takes, or a line each in a log."""
    if not sys.stderr.isatty():
        yield lambda step: print(step, file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda step: progress.update(task, description=step)


@contextmanager
def show_steps(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar over steps whose number is known: (current step, steps begun, steps in all); in a log a line each."""
    if not sys.stderr.isatty():
        yield _each_once()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    text = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), text)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda step, begun, total: progress.update(task, description=step, completed=begun - 1, total=total)


def _each_once() -> Callable[[str, int, int], None]:
    """Return a function that prints each step once: sides take turns, and a log needs no line for each."""
    said: set[str] = set()

    def show(step: str, begun: int, total: int) -> None:
        if step not in said:
            said.add(step)
            print(f"{step} ({begun} of {total})", file=sys.stderr, flush=True)

    return show

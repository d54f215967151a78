"""The bar that is shown while something takes long: on a terminal, never in a pipe or a file."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol


class Show(Protocol):
    """Shows how many are done, of how many, and what is done now if that changes."""

    def __call__(self, done: int, total: int, what: str | None = None) -> None: ...


def on_terminal() -> bool:
    """Whether a person may be looking at standard error."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def shown_progress(what: str, shown: bool = True) -> Iterator[Show]:
    """A function that shows how many are done of all, as a bar on standard error.

    It shows nothing if ``shown`` is false, or where standard error is no terminal.

    Args:
        what: is done; stands before the bar.
    """
    if not (shown and on_terminal()):
        yield lambda done, total, what=None: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    # The stream of now, also while it is redirected.
    with progress.Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task(what, total=None)

        def show(done: int, total: int, what: str | None = None) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield show

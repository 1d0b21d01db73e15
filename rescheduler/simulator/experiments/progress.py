"""What a user sees of many runs while they are computed, and Ctrl-C in the middle of them."""

import sys
from collections.abc import Callable, Generator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from predictor.compilation import is_kept
from rescheduler.commands.event_loop import held_interrupts
from rescheduler.simulator.engine.engine import advance

__all__ = ["compile_notice", "gather", "progress_bar"]

Job = TypeVar("Job")
Result = TypeVar("Result")


def compile_notice() -> None:
    """Announce on standard error that compiling takes a while, unless compiled code is cached."""
    if not is_kept(advance):
        print("compiling the simulator: about a minute, only once", file=sys.stderr, flush=True)


def progress_bar() -> Progress:
    """Return a bar on standard error, which shows nothing where that is not a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def gather(
    results: Generator[tuple[Job, Result], None, None],
    total: int,
    keep: Callable[[Job, Result], None],
    title: Callable[[Job], str],
) -> bool:
    """Keep each result as soon as it is computed; return whether Ctrl-C ended that early.

    A result that is being kept when Ctrl-C arrives is kept whole.
    """
    with progress_bar() as bar:
        task = bar.add_task("", total=total)
        try:
            for job, result in results:
                with held_interrupts():
                    keep(job, result)
                bar.update(task, advance=1, description=title(job))
        except KeyboardInterrupt:
            return True
        finally:
            results.close()
    return False

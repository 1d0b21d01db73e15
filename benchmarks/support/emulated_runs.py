"""Runs on emulated engines: which are valid, and how often one is tried."""

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.support.deployments import engines
from benchmarks.support.report import Cells, rotated
from rescheduler.emulation.emulate_options import ForecastQuality
from rescheduler.engines.deployment import Deployment

RECORDED = ForecastQuality(sigma=1.9, correlation=0.5)
"""As good as those recorded of SmolLM2."""
EXACT = ForecastQuality(sigma=0.0)
MOST_EXCESS = 0.0001
"""Of a run's steps; 0.000001 on quiet cores. With 0.0003, while tests ran beside it, a run's P99 of
pauses was four times what it was alone."""
PATIENCE = 600.0
_TRIES = 3


def valid(cells: Cells, name: str, most: float = MOST_EXCESS) -> Any:
    """Return a kept run's figures; None if it was not run, or its steps took too long."""
    found = cells.read(name)
    return found if found is not None and found["excess"] <= most else None


def keep_valid(
    cells: Cells,
    name: str,
    of: str,
    serve: Callable[[int], Mapping[str, float]],
    most: float = MOST_EXCESS,
) -> None:
    """Run until the steps took as long as they should, at most three times, and keep the last."""
    for number in range(_TRIES):
        result = serve(number)
        shown = ", ".join(f"{key} {value:.3g}" for key, value in result.items())
        print(f"{time.strftime('%H:%M')} {of}: {shown}", file=sys.stderr, flush=True)
        if result["excess"] <= most:
            break
    else:
        print(f"{of}: not valid, its steps took too long", file=sys.stderr, flush=True)
    cells.write(name, result)


class Rounds(Protocol):
    """Rounds of arms whose engines know lengths exactly, or do not."""

    def cells(self, number: int, arm: str) -> Cells:
        """Return where the result of an arm in a round is kept."""
        ...

    def deployment(self, exact: bool) -> Deployment:
        """Return the engines."""
        ...


Serve = Callable[[Deployment, int, str, int], Coroutine[Any, Any, Mapping[str, float]]]
"""Serves an arm in a round, at a try."""


def run_missing(
    plan: Rounds, rounds: int, arms: Mapping[str, bool], serve: Serve, logs: Path
) -> None:
    """Run what is not kept, by arms of which some know lengths; each result is kept at once."""
    for number in range(rounds):
        for exact in (False, True):
            alike = rotated([name for name in arms if arms[name] == exact], number)
            missing = [name for name in alike if valid(plan.cells(number, name), name) is None]
            if not missing:
                continue
            deployment = plan.deployment(exact)
            with engines(deployment, logs):
                for name in missing:
                    once = partial(_once, serve, deployment, number, name)
                    keep_valid(plan.cells(number, name), name, f"round {number}, {name}", once)


def _once(
    serve: Serve, deployment: Deployment, number: int, name: str, attempt: int
) -> Mapping[str, float]:
    return asyncio.run(serve(deployment, number, name, attempt))


def kept_rounds(
    plan: Rounds, rounds: int, arms: Sequence[str]
) -> dict[str, dict[int, Mapping[str, float]]]:
    """Return the valid results, by arm and round."""
    return {
        arm: {
            number: result
            for number in range(rounds)
            if (result := valid(plan.cells(number, arm), arm)) is not None
        }
        for arm in arms
    }

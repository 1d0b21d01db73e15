"""Runs on emulated engines: which are valid, and how often one is tried."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.support.report import Cells
from rescheduler.emulation.emulate_options import ForecastQuality

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

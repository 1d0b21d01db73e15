"""Pictures of migration planners over the time of one run."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rescheduler.simulator.results.figures import COLOURS, finish_axes
from rescheduler.simulator.results.run_result import RunResult

__all__ = ["draw_rescheduling"]


def draw_rescheduling(runs: Sequence[RunResult], kv_capacity: int) -> Any:
    """Return step-time variance and highest KV usage over time, a row for each run.

    As in STAR (Wang et al. 2026), Figures 11 and 12: shaded where requests are preempted, ticks
    where requests move.

    Args:
        runs: to draw.
        kv_capacity: of an instance, in tokens.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 1.0 + 1.35 * len(runs)), layout="constrained")
    grid = figure.subplots(len(runs), 2, sharex=True, sharey="col", squeeze=False)
    for (left, right), run in zip(grid, runs, strict=True):
        series = run.series
        colour = COLOURS[0]
        left.plot(series.time, 1e6 * series.execution_variance, color=colour, linewidth=0.6)
        left.set_yscale("symlog", linthresh=0.1)
        mean = f"{run.policy}: {1e6 * run.execution_variance:.3f} ms² on average"
        left.set_title(mean, loc="left", fontsize="small")
        right.plot(series.time, 100 * series.held / kv_capacity, color=colour, linewidth=0.7)
        right.axhline(99, color="0.4", linestyle="--", linewidth=0.7)
        for time in series.time[1:][np.diff(series.preemptions) > 0]:
            right.axvspan(time - 4, time + 4, color=COLOURS[1], alpha=0.4, linewidth=0)
        moved = series.time[1:][np.diff(series.migrations) > 0]
        right.plot(moved, np.full(len(moved), 3.0), "|", color="0.25", markersize=5, alpha=0.6)
        counts = f"{run.preemptions} preemptions, {run.migrations} migrations"
        right.set_title(counts, loc="left", fontsize="small")
        right.set_ylim(0, 108)
        for axes in (left, right):
            axes.set_xlim(left=0)
            finish_axes(axes)
    figure.supxlabel("time, s", fontsize="medium")
    grid[len(runs) // 2][0].set_ylabel("variance of step times, ms²")
    grid[len(runs) // 2][1].set_ylabel("highest KV usage, %")
    return figure

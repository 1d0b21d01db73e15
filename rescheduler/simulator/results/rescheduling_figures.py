"""Pictures of migration planners: over the cases of a study, and over the time of one run."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rescheduler.simulator.results.figures import COLOURS, finish_axes
from rescheduler.simulator.results.metrics import Summary
from rescheduler.simulator.results.run_result import RunResult

__all__ = ["draw_cases", "draw_rescheduling"]


def draw_cases(found: Mapping[tuple[str, str], Summary]) -> Any:
    """Return the variance of step times and the P99 TPOT of each planner in each case.

    As in STAR (Wang et al. 2026), Figure 13. Means over the seeds; the table has intervals.

    Args:
        found: (case, planner) -> figures.
    """
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(case for case, _ in found))
    labels = list(dict.fromkeys(label for _, label in found))
    figure = Figure(figsize=(10.0, 3.8), layout="constrained")
    panels = figure.subplots(1, 2)
    shown = (
        ("execution_variance", 1e6, "variance of step times, ms²"),
        ("tpot_p99", 1e3, "P99 TPOT, ms"),
    )
    for axes, (name, scale, title) in zip(panels, shown, strict=True):
        for i, label in enumerate(labels):
            known = [found.get((case, label)) for case in cases]
            values = [scale * s.mean.get(name, np.nan) if s else np.nan for s in known]
            at = np.arange(len(cases)) + 0.08 * (i - (len(labels) - 1) / 2)
            colour = COLOURS[i % len(COLOURS)]
            axes.plot(at, values, "o", color=colour, markersize=5, label=label)
        if name == "execution_variance":  # it differs by factors
            axes.set_yscale("log")
        axes.set_xticks(range(len(cases)), cases)
        finish_axes(axes, "", title)
    panels[1].legend(frameon=False, fontsize="small")
    return figure


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

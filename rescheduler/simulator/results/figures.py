"""Pictures of simulations: loads and power over time, comparisons."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_collection.files import replace_file
from rescheduler.simulator.results.metrics import Summary
from rescheduler.simulator.results.run_result import RunResult

__all__ = [
    "COLOURS",
    "create_panels",
    "draw_comparison",
    "draw_loads",
    "draw_power",
    "draw_rescheduling",
    "finish_axes",
    "running_mean",
    "save_figure",
]


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Okabe and Ito's palette, which colour-blind people can distinguish, and a brown."""

_COMPARED = (
    ("imbalance", "imbalance, thousand tokens", 1e-3),
    ("throughput", "throughput, thousand tokens/s", 1e-3),
    ("tpot", "TPOT, ms", 1e3),
    ("energy", "energy, kJ", 1e-3),
)


def draw_loads(runs: Sequence[RunResult]) -> Any:
    """Return the load of every instance over the steps, a panel for each run.

    As in paper 000, Figure 6.
    """
    from matplotlib import colormaps

    figure, panels = create_panels(len(runs), columns=2, size=(5.6, 2.7))
    top = max((run.series.load.max(initial=0) for run in runs), default=0)
    for axes, run in zip(panels, runs, strict=True):
        colours = colormaps["viridis"](np.linspace(0.0, 0.92, run.n_instances))
        for g in range(run.n_instances):
            load = run.series.load[:, g] / 1e3
            axes.plot(run.series.step, load, color=colours[g], linewidth=0.6, alpha=0.85)
        axes.set_ylim(0, 1.05 * max(top, 1) / 1e3)
        axes.set_xlim(left=0)
        axes.set_title(run.policy, loc="left", fontweight="bold", fontsize="medium")
        axes.text(
            0.99,
            1.02,
            f"mean max − min {run.max_minus_min / 1e3:,.1f}k, idle {run.idle_share:.1%}",
            transform=axes.transAxes,
            ha="right",
            va="bottom",
            fontsize="small",
            color="0.35",
        )
        finish_axes(axes)
    figure.supxlabel("step", fontsize="medium")
    figure.supylabel("context tokens on an instance, thousands", fontsize="medium")
    return figure


def draw_power(runs: Sequence[RunResult]) -> Any:
    """Return the mean power of a GPU over time, a line for each run.

    As in paper 000, Figure 7. Thin lines are steps, thick ones their running mean.
    """
    figure, (axes,) = create_panels(1, columns=1, size=(8.0, 3.6))
    for i, run in enumerate(runs):
        time, power = run.series.time, run.series.power
        if len(time) == 0:
            continue
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(time, power, color=colour, linewidth=0.5, alpha=0.25)
        label = f"{run.policy}: {run.energy_load_joules / 1e3:,.0f} kJ in {run.seconds:,.0f} s"
        axes.plot(time, running_mean(power, 50), color=colour, linewidth=1.8, label=label)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize="small", loc="lower left")
    finish_axes(axes, "time, s", "mean power of a GPU, W")
    return figure


def draw_comparison(summaries: Mapping[str, Summary]) -> Any:
    """Return the main figures of all policies as dots with their 95% intervals."""
    shown = [entry for entry in _COMPARED if any(entry[0] in s.mean for s in summaries.values())]
    height = 1.1 + 0.34 * len(summaries)
    figure, panels = create_panels(
        len(shown), columns=4, size=(3.1, height), sharex=False, sharey=True
    )
    rows = np.arange(len(summaries))
    for axes, (name, title, scale) in zip(panels, shown, strict=True):
        for row, summary in enumerate(summaries.values()):
            if name not in summary.mean:
                continue
            value = summary.mean[name] * scale
            half = summary.ci95.get(name, 0.0) * scale
            colour = COLOURS[row % len(COLOURS)]
            axes.errorbar(value, row, xerr=half, fmt="o", color=colour, markersize=6, capsize=3)
        axes.set_yticks(rows, list(summaries))
        axes.set_ylim(len(rows) - 0.5, -0.5)
        if name == "imbalance":  # differs by factors, from a meaningful 0
            axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=5)
        finish_axes(axes, title)
    return figure


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure as PNG, whole or not at all; return its path."""
    with replace_file(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
    return path


def create_panels(
    n: int,
    columns: int,
    size: tuple[float, float],
    sharex: bool = True,
    sharey: bool | Literal["col"] = True,
) -> tuple[Any, list[Any]]:
    """Return a figure and its panels.

    Args:
        n: number of panels.
        columns: panels side by side, at most.
        size: inches of a panel.
        sharex: all panels have the same horizontal axis.
        sharey: all panels, or those of a column (``col``), have the same vertical axis.
    """
    from matplotlib.figure import Figure

    columns = min(n, columns)
    rows = -(-n // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=sharex, sharey=sharey, squeeze=False)
    panels = list(grid.flat)
    for spare in panels[n:]:
        spare.remove()
    return figure, panels[:n]


def running_mean(values: Any, parts: int, whole: bool = False) -> Any:
    """Return the mean of each value and its neighbours.

    Args:
        values: [n] of a series.
        parts: of the series, one of which a mean is over.
        whole: leave out the ends, where means are over fewer values otherwise.
    """
    n = len(values)
    width = max(n // parts, 1)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    if whole:
        return (sums[width:] - sums[:-width]) / width
    at = np.arange(n)
    low, high = np.maximum(at - width // 2, 0), np.minimum(at + width // 2 + 1, n)
    return (sums[high] - sums[low]) / (high - low)


def finish_axes(axes: Any, x: str = "", y: str = "", which: str = "major") -> None:
    """Label a panel's axes, and give it a grid and no frame."""
    if x:
        axes.set_xlabel(x)
    if y:
        axes.set_ylabel(y)
    axes.grid(alpha=0.25, which=which)
    axes.spines[["top", "right"]].set_visible(False)


def draw_rescheduling(runs: Sequence[RunResult], kv_capacity: int) -> Any:
    """Return step-time variance and highest KV usage over time, a row for each run.

    As in STAR (Wang et al. 2026), Figures 11 and 12: shaded where requests are preempted, ticks
    where requests move.
    """
    figure, panels = create_panels(2 * len(runs), 2, (5.0, 1.6), sharey="col")
    for left, right, run in zip(panels[::2], panels[1::2], runs, strict=True):
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
    middle = len(runs) // 2 * 2
    panels[middle].set_ylabel("variance of step times, ms²")
    panels[middle + 1].set_ylabel("highest KV usage, %")
    return figure

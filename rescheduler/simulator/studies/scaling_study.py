r"""`headway study scaling`: how the imbalance of FCFS and BF-IO grows with workers and batches.

Theorems 1 to 3 of A Universal Load Balancing Principle (Chen et al. 2026) say that

.. math:: \frac{\text{imbalance of FCFS}}{\text{imbalance of BF-IO}(H = 0)}
          \ge c \,\kappa \sqrt{B \ln G} \,\frac{G}{G - 1}

since FCFS's is of order :math:`G \sqrt{B \ln G}` and BF-IO's at most of order
:math:`(G - 1)\, s_{max}`. The study fits slopes in :math:`\ln \sqrt{B \ln G}`: of the ratio, and
of FCFS's imbalance over :math:`G - 1`, the part of the theorems that is an order in both
directions. A slope of 1 is the theorems' growth.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rescheduler.simulator.config.config_parser import config_parser, parsed_config
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.results.figures import save_figure
from rescheduler.simulator.sweeps.study_cases import CaseRow, compute_cases, write_study

__all__ = ["ScalingPoint", "fitted_slope", "scaling_command", "scaling_points", "scaling_study"]

FloatArray = npt.NDArray[np.float64]

_DESCRIPTION = """Measure how imbalance grows with workers and batches, and fit slopes. The YAML
file names two policies, what varies (cluster.instances and cluster.slots), and the cases."""

_BALANCED = 1.0
"""Tokens of mean imbalance below which a ratio says nothing but that it is large."""


class ScalingPoint(NamedTuple):
    """One case at one size.

    Attributes:
        case: its name.
        instances: G.
        slots: B.
        size: sqrt(B ln G).
        baseline: mean imbalance of the first policy, tokens.
        balanced: of the second.
    """

    case: str
    instances: int
    slots: int
    size: float
    baseline: float
    balanced: float

    @property
    def ratio(self) -> float:
        """How many times less imbalance the second policy leaves; infinite for next to none."""
        return self.baseline / self.balanced if self.balanced >= _BALANCED else float("inf")


def scaling_command(arguments: list[str]) -> int:
    """Run the study with a command line; return the exit status."""
    parser = config_parser("study scaling", _DESCRIPTION)
    parser.add_function_arguments(scaling_study, skip={"config"})
    given = parser.parse_args(arguments)
    config = parsed_config(parser, given)
    return scaling_study(config, given.out, given.cases, given.vary, given.workers)


def scaling_study(
    config: SimulationConfig,
    out: Path,
    cases: dict[str, dict[str, Any]],
    vary: dict[str, list[Any]],
    workers: int | None = None,
) -> int:
    """Simulate all cases and sizes, write table, JSON and figure; return the exit status.

    Args:
        config: what all cases share; with two policies, the baseline first.
        out: folder; run it again to resume.
        cases: name -> key -> value, such as ``geometric: {trace.name: geometric}``.
        vary: ``cluster.instances`` and ``cluster.slots`` -> values.
        workers: processes at once; one a core when not given.

    Raises:
        ValueError: not two policies, or a key or value that means nothing.
    """
    if len(config.policy_choices()) != 2:
        raise ValueError("policies: a baseline, and the policy that is compared with it")
    points = scaling_points(compute_cases(config, cases, vary, out, "study scaling", workers))
    save_figure(_draw(points, config), out / "scaling.png")
    rows = [point._asdict() for point in points]
    write_study(out, "study scaling", config, rows, _table(points, config))
    return 0


def scaling_points(rows: Sequence[CaseRow]) -> list[ScalingPoint]:
    """Return a point for each case and size, of rows of two policies in turn."""
    points = []
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        cluster = first.cells[0].config["cluster"]
        n_instances, slots = cluster["instances"], cluster["slots"]
        size = float(np.sqrt(slots * np.log(n_instances)))
        imbalances = (row.summary.mean["imbalance"] for row in (first, second))
        points.append(ScalingPoint(first.case, n_instances, slots, size, *imbalances))
    return points


def fitted_slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the least-squares slope of ln values in ln sizes; NaN for less than two finite."""
    x, y = np.log(np.asarray(sizes)), np.log(np.asarray(values))
    finite = np.isfinite(y)
    if len(np.unique(x[finite])) < 2:
        return float("nan")
    return float(np.polyfit(x[finite], y[finite], 1)[0])


def _of(points: Sequence[ScalingPoint], case: str) -> list[ScalingPoint]:
    return [point for point in points if point.case == case]


def _slopes(points: Sequence[ScalingPoint]) -> tuple[float, float]:
    """Return the slopes of the ratio and of the baseline's imbalance over G - 1."""
    sizes = [point.size for point in points]
    baseline = [point.baseline / (point.instances - 1) for point in points]
    return fitted_slope(sizes, [point.ratio for point in points]), fitted_slope(sizes, baseline)


def _table(points: Sequence[ScalingPoint], config: SimulationConfig) -> list[str]:
    first, second = (choice.label for choice in config.policy_choices())
    lines = [
        f"| case | smallest | largest | {first} / {second} | slope | slope of {first} / (G − 1) |",
        "|---|---|---|---:|---:|---:|",
    ]
    for case in dict.fromkeys(point.case for point in points):
        own = sorted(_of(points, case), key=lambda point: point.size)
        ends = [f"G {point.instances}, B {point.slots}" for point in (own[0], own[-1])]
        ratios = " to ".join(_shown(point.ratio) for point in (own[0], own[-1]))
        slopes = " | ".join("–" if np.isnan(s) else f"{s:.2f}" for s in _slopes(own))
        lines.append(f"| {case} | {ends[0]} | {ends[1]} | {ratios} | {slopes} |")
    lines += ["", "| case | G | B | √(B ln G) | " + f"{first} | {second} | ratio |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    for point in points:
        lines.append(
            f"| {point.case} | {point.instances} | {point.slots} | {point.size:.1f} | "
            f"{point.baseline:,.0f} | {point.balanced:,.1f} | {_shown(point.ratio)} |"
        )
    return lines


def _shown(ratio: float) -> str:
    return f"{ratio:.2f}" if np.isfinite(ratio) else "∞"


def _draw(points: Sequence[ScalingPoint], config: SimulationConfig) -> Any:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    first, second = (choice.label for choice in config.policy_choices())
    figure = Figure(figsize=(10.4, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    cases = list(dict.fromkeys(point.case for point in points))
    colours = colormaps["viridis"](np.linspace(0.0, 0.9, len(cases)))
    for case, colour in zip(cases, colours, strict=True):
        own = sorted(_of(points, case), key=lambda point: point.size)
        sizes = np.array([point.size for point in own])
        ratio, growth = _slopes(own)
        for axes, values, slope in (
            (left, np.array([point.ratio for point in own]), ratio),
            (right, np.array([point.baseline / (point.instances - 1) for point in own]), growth),
        ):
            if np.isnan(slope):
                axes.plot([], [], "o", color=colour, label=f"{case}: balanced exactly")
                continue
            axes.loglog(sizes, values, "o", color=colour, markersize=4)
            x, y = np.log(sizes), np.log(values)
            offset = np.mean((y - slope * x)[np.isfinite(y)])
            line = np.exp(offset + slope * x)
            axes.loglog(sizes, line, "-", color=colour, label=f"{case}: slope {slope:.2f}")
    for axes, title in (
        (left, f"imbalance, {first} / {second}"),
        (right, f"imbalance of {first} / (G − 1), tokens"),
    ):
        axes.set_xlabel("√(B ln G)")
        axes.set_ylabel(title)
        axes.grid(alpha=0.25, which="both")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    return figure

r"""`headway papers scaling`: how the imbalance of FCFS and BF-IO grows with workers and batches.

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

from rescheduler.papers.studies.study import Report, run_study
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.experiments.runner import Row
from rescheduler.simulator.results.report import COLOURS, create_panels, finish_axes, markdown_table

_BALANCED = 1.0
"""Tokens of mean imbalance below which a ratio says nothing but that it is large."""


class _Point(NamedTuple):
    """One case at one size sqrt(B ln G), with the mean imbalance of both policies in tokens."""

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


def scaling(
    config: SimulationConfig,
    out: Path,
    cases: dict[str, dict[str, Any]],
    vary: dict[str, list[Any]],
    workers: int | None = None,
) -> int:
    """Measure how imbalance grows with workers and batches, and fit slopes.

    The YAML file names two policies, what varies (cluster.instances and cluster.slots), and the
    cases.

    Args:
        out: folder; run it again to resume.
        workers: processes at once; one per core if not set.
        config: what all cases share; with two policies, the baseline first.
        cases: name -> key -> value, such as ``geometric: {trace.name: geometric}``.
        vary: ``cluster.instances`` and ``cluster.slots`` -> values.

    Raises:
        ValueError: not two policies.
    """
    labels = [choice.label for choice in config.policy_choices()]
    if len(labels) != 2:
        raise ValueError("policies: a baseline, and the policy that is compared with it")

    def report(rows: Sequence[Row]) -> Report:
        points = _points(rows)
        plain = [point._asdict() for point in points]
        return Report(plain, _table(points, *labels), {"scaling.png": _draw(points, *labels)})

    return run_study("scaling", config, out, workers, cases, report, vary)


def _points(rows: Sequence[Row]) -> list[_Point]:
    """Return a point for each case and size, of rows of two policies in turn."""
    points = []
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        cluster = first.group.cells[0].config["cluster"]
        n_instances, slots = cluster["instances"], cluster["slots"]
        size = float(np.sqrt(slots * np.log(n_instances)))
        imbalances = (row.summary.mean["imbalance"] for row in (first, second))
        points.append(_Point(first.group.case, n_instances, slots, size, *imbalances))
    return points


def fitted_slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the least-squares slope of ln values in ln sizes; NaN for less than two finite."""
    x, y = np.log(np.asarray(sizes)), np.log(np.asarray(values))
    finite = np.isfinite(y)
    if len(np.unique(x[finite])) < 2:
        return float("nan")
    return float(np.polyfit(x[finite], y[finite], 1)[0])


def _by_case(points: Sequence[_Point]) -> dict[str, list[_Point]]:
    """Return the points of each case, by size."""
    found: dict[str, list[_Point]] = {}
    for point in sorted(points, key=lambda point: point.size):
        found.setdefault(point.case, []).append(point)
    return {case: found[case] for case in dict.fromkeys(point.case for point in points)}


def _slopes(points: Sequence[_Point]) -> tuple[float, float]:
    """Return the slopes of the ratio and of the baseline's imbalance over G - 1."""
    sizes = [point.size for point in points]
    baseline = [point.baseline / (point.instances - 1) for point in points]
    return fitted_slope(sizes, [point.ratio for point in points]), fitted_slope(sizes, baseline)


def _table(points: Sequence[_Point], first: str, second: str) -> list[str]:
    heads = ["case", "smallest", "largest", f"{first} / {second}", "slope"]
    fits = []
    for case, own in _by_case(points).items():
        ends = [f"G {point.instances}, B {point.slots}" for point in (own[0], own[-1])]
        ratios = " to ".join(_shown(point.ratio) for point in (own[0], own[-1]))
        slopes = ["–" if np.isnan(slope) else f"{slope:.2f}" for slope in _slopes(own)]
        fits.append([case, *ends, ratios, *slopes])
    sizes = [
        [case, str(g), str(b), f"{size:.1f}", f"{baseline:,.0f}", f"{balanced:,.1f}", _shown(ratio)]
        for case, g, b, size, baseline, balanced, ratio in ((*p, p.ratio) for p in points)
    ]
    return [
        *markdown_table([*heads, f"slope of {first} / (G − 1)"], fits, "lll"),
        "",
        *markdown_table(["case", "G", "B", "√(B ln G)", first, second, "ratio"], sizes),
    ]


def _shown(ratio: float) -> str:
    return f"{ratio:.2f}" if np.isfinite(ratio) else "∞"


def _draw(points: Sequence[_Point], first: str, second: str) -> Any:
    figure, (left, right) = create_panels(2, 2, (5.2, 4.0), sharey=False)
    for i, (case, own) in enumerate(_by_case(points).items()):
        colour = COLOURS[i % len(COLOURS)]
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
        finish_axes(axes, "√(B ln G)", title, which="both")
        axes.legend(frameon=False, fontsize="small")
    return figure

"""Pictures of what is served in time: effective requests per second over the load."""

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

from rescheduler.simulator.results.figures import COLOURS, finish_axes
from rescheduler.simulator.results.metrics import Summary

__all__ = ["LoadCurve", "draw_effective"]

_COLUMNS = 4


class LoadCurve(NamedTuple):
    """One system in one case, with one choice of its tuned options, over the loads.

    Attributes:
        case: its name.
        system: its name.
        tuned: key -> value, of its tuned options.
        points: load in requests per second an instance -> figures; ``effective`` among them.
    """

    case: str
    system: str
    tuned: dict[str, Any]
    points: dict[float, Summary]

    @property
    def peak(self) -> tuple[float, float]:
        """Its most effective requests per second, and the load where they are."""
        return max((summary.mean["effective"], load) for load, summary in self.points.items())


def draw_effective(curves: Sequence[LoadCurve]) -> Any:
    """Return effective requests per second over the load, a panel for each case.

    As in FairBatching (Lyu et al. 2025), Figure 5.
    """
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(curve.case for curve in curves))
    systems = list(dict.fromkeys(curve.system for curve in curves))
    columns = min(len(cases), _COLUMNS)
    rows = ceil(len(cases) / columns)
    size = (1.0 + 3.4 * columns, 0.8 + 2.6 * rows)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(cases) :]:
        axes.set_axis_off()
    for axes, case in zip(panels, cases, strict=False):
        for curve in curves:
            if curve.case != case:
                continue
            i = systems.index(curve.system)
            loads = sorted(curve.points)
            axes.errorbar(
                loads,
                [curve.points[load].mean["effective"] for load in loads],
                [curve.points[load].ci95.get("effective", 0.0) for load in loads],
                fmt="o-",
                color=COLOURS[i % len(COLOURS)],
                markersize=3.5,
                linewidth=1.2,
                label=curve.system,
            )
        axes.set_title(case, loc="left", fontsize="medium")
        axes.set_ylim(bottom=0)
        finish_axes(axes)
    panels[0].legend(frameon=False, fontsize="small")
    figure.supxlabel("offered requests/s an instance", fontsize="medium")
    figure.supylabel("effective requests/s", fontsize="medium")
    return figure

"""The KV loads of a cluster's instances as a figure: a bar each, divided by request."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from predictor.forecasts.curve_plot import AHEAD, LOAD

if TYPE_CHECKING:
    from matplotlib.axes import Axes


IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_WIDTH, _TALLEST = 7.2, 12.0
BAR_HEIGHT = 0.62
"""Of the distance between two rows."""
_ALPHAS = (0.9, 0.6)
_NAMED = 32
"""Instances whose names have room beside their bars."""
_TO_10_PERCENT = 1.2816
"""Standard deviations between the mean and the 10 or 90% quantile of a normal distribution."""


@dataclass(frozen=True, slots=True)
class LoadAhead:
    """What the instances are expected to carry.

    Attributes:
        steps: decode steps from now.
        mean: [n_instances] context tokens.
        deviation: [n_instances] standard deviation of them.
    """

    steps: int
    mean: FloatArray
    deviation: FloatArray


@dataclass(frozen=True, slots=True)
class LoadBars:
    """What a figure of a cluster shows.

    Attributes:
        instance: [n_running] where each request is, from 0.
        context: [n_running] tokens in its KV cache.
        capacity: [n_instances] tokens that each instance holds; nan if unlimited.
        ahead: the loads ahead, or None without forecasts.
    """

    instance: IntArray
    context: IntArray
    capacity: FloatArray
    ahead: LoadAhead | None

    @property
    def figure_size(self) -> tuple[float, float]:
        """Width and height of a new figure, in inches."""
        return _WIDTH, min(1.4 + 0.5 * len(self.capacity), _TALLEST)

    def starts(self) -> IntArray:
        """Return where each request's part of its instance's bar begins, in tokens, [n_running]."""
        order, first = self._in_rows()
        before = np.cumsum(self.context[order]) - self.context[order]
        found = np.empty(len(order), dtype=np.int64)
        found[order] = before - before[first]
        return found

    def draw(self, axes: "Axes") -> None:
        """Draw the bars, the capacities and the loads ahead."""
        from matplotlib import rcParams

        n_instances = len(self.capacity)
        rows, starts, shades = np.arange(n_instances), self.starts(), self._shades()
        for alpha in _ALPHAS:
            some = shades == alpha
            axes.barh(
                self.instance[some],
                self.context[some],
                left=starts[some],
                height=BAR_HEIGHT,
                color=LOAD,
                alpha=alpha,
                linewidth=0,
                label="now, by request" if alpha == _ALPHAS[0] else None,
            )
        axes.vlines(
            self.capacity,
            rows - 0.4,
            rows + 0.4,
            color=rcParams["axes.edgecolor"],
            linewidth=2.5,
            label="capacity",
        )
        if self.ahead is not None:
            axes.errorbar(
                self.ahead.mean,
                rows,
                xerr=_TO_10_PERCENT * self.ahead.deviation,
                fmt="D",
                color=AHEAD,
                markeredgecolor="white",
                zorder=5,
                label=f"in {self.ahead.steps:,} steps, 80% interval",
            )
        if n_instances <= _NAMED:
            axes.set_yticks(rows, [f"instance {g}" for g in rows])
        axes.set_ylim(n_instances - 0.25, -0.75)
        axes.set_xlim(left=0)
        axes.grid(axis="y", visible=False)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("context tokens")
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=3,
            borderaxespad=0.2,
            columnspacing=1.2,
            fontsize="small",
            frameon=False,
        )

    def _in_rows(self) -> tuple[IntArray, IntArray]:
        """Return the requests bar by bar, and the place of the first of each one's bar in that."""
        order = np.argsort(self.instance, kind="stable")
        where = self.instance[order]
        return order, np.searchsorted(where, where)

    def _shades(self) -> FloatArray:
        """Return each request's opacity, [n_running]: neighbours differ."""
        order, first = self._in_rows()
        found = np.empty(len(order))
        found[order] = np.take(_ALPHAS, (np.arange(len(order)) - first) % len(_ALPHAS))
        return found

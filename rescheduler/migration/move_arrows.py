"""The moves of a plan as arrows on a figure of the cluster."""

from textwrap import fill
from typing import TYPE_CHECKING

from predictor.forecasts.curve_plot import MOVING
from rescheduler.cluster.load_bars import BAR_HEIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_move", "draw_reason"]

_CHARACTERS = 90


def draw_move(
    axes: "Axes",
    source: tuple[float, int],
    target: tuple[float, int],
    tokens: int,
    label: str,
) -> None:
    """Draw a request where it is, outlined where it goes, with an arrow and a label.

    Args:
        axes: with a bar in each instance's row.
        source: where its part of the bar begins, in tokens, and the row.
        target: the same, where it goes.
        tokens: that it brings along.
        label: above or below the outline.
    """
    for (start, row), filled in ((source, True), (target, False)):
        axes.barh(
            row,
            tokens,
            left=start,
            height=BAR_HEIGHT,
            facecolor=MOVING if filled else "none",
            edgecolor=MOVING,
            linestyle="solid" if filled else "dashed",
            linewidth=1.5,
            zorder=3,
        )
    ends = [(start + tokens / 2, row) for start, row in (source, target)]
    axes.annotate(
        "",
        xy=ends[1],
        xytext=ends[0],
        arrowprops={
            "arrowstyle": "-|>",
            "connectionstyle": "arc3,rad=0.2",
            "color": MOVING,
            "linewidth": 2,
            "mutation_scale": 18,
        },
        zorder=4,
    )
    side = 1 if source[1] < target[1] else -1  # away from where the arrow comes
    axes.text(
        ends[1][0],
        target[1] + side * BAR_HEIGHT / 1.75,
        label,
        ha="center",
        va="top" if side > 0 else "bottom",  # rows are numbered downwards
        fontsize="small",
        zorder=4,
    )


def draw_reason(axes: "Axes", reason: str) -> None:
    """Write why above the legend; signs of mathematics in it are only signs."""
    title = axes.set_title(fill(reason, _CHARACTERS), loc="left", fontsize="small", pad=24)
    title.set_parse_math(False)

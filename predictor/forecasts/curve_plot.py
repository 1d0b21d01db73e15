"""Survival curves as a figure."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes


LOAD, AHEAD, MOVING = "#3b82c4", "#c8671b", "#d1495b"
"""Colours of what is there, what is expected, and what moves: they mean the same in all figures."""


@contextmanager
def axes_to_draw(ax: "Axes | None", width: float, height: float) -> Iterator["Axes"]:
    """Give the axes to draw on while the context lasts.

    A figure made here has no background and colours that can be read on light and on dark pages
    (`predictor/figure.mplstyle`), of a size in inches; axes of the caller keep their own style.
    """
    if ax is not None:
        yield ax
        return
    from matplotlib import pyplot

    with pyplot.style.context("predictor.figure"):
        figure, axes = pyplot.subplots(figsize=(width, height))
        try:
            yield axes
        except BaseException:
            pyplot.close(figure)  # else a notebook shows what was drawn of it
            raise


FloatArray = npt.NDArray[np.float64]


def draw_curves(
    tokens: npt.NDArray[Any], survival: FloatArray, interval: FloatArray, ax: "Axes | None"
) -> "Axes":
    """Draw S(h) [n, n_h] of some requests, each with its median and its 80% interval, shaded.

    ``interval`` [n, 3] are the 10, 50 and 90% quantiles, in tokens.
    """
    with axes_to_draw(ax, 6.4, 3.4) as axes:
        for curve, (low, median, high) in zip(survival, np.ceil(interval), strict=True):
            label = f"median {median:,.0f}, 80% between {low:,.0f} and {high:,.0f}"
            (line,) = axes.step(tokens, curve, where="post", label=label)
            colour, inside = line.get_color(), (low <= tokens) & (tokens <= high)
            axes.fill_between(
                tokens, curve, where=inside, step="post", color=colour, alpha=0.18, linewidth=0
            )
            axes.plot(median, 0.5, "o", color=colour)
        axes.set_xlim(0, tokens[-1])
        axes.set_ylim(0, 1.03)
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("more tokens")
        axes.set_ylabel("still running")
        axes.legend(loc="upper right", fontsize="small", frameon=False)
    return axes

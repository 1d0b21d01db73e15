"""What a `plot` draws on: the axes it is given, or new ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["AHEAD", "LOAD", "MOVING", "axes_to_draw"]

LOAD, AHEAD, MOVING = "#3b82c4", "#c8671b", "#d1495b"
"""Colours of what is there, what is expected, and what moves: they mean the same in all figures."""


@contextmanager
def axes_to_draw(ax: "Axes | None", width: float, height: float) -> Iterator["Axes"]:
    """Give the axes to draw on while the context lasts.

    A figure made here has no background and colours that can be read on light and on dark pages
    (`predictor/figure.mplstyle`); axes of the caller keep the caller's style.

    Args:
        ax: the caller's axes; None makes a figure.
        width: of a new figure, in inches.
        height: of a new figure, in inches.
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

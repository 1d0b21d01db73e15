"""Tables in Markdown, and the cells of summarised figures in them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rescheduler.simulator.results.metrics import Summary

__all__ = ["Column", "figure_cell", "markdown_table", "signed_share"]


class Column(NamedTuple):
    """A column of figures.

    Attributes:
        title: of the column.
        name: of the figure that it shows.
        scale: multiplies the figure.
        form: format specification of the scaled figure.
    """

    title: str
    name: str
    scale: float
    form: str


def markdown_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], align: str = "l"
) -> list[str]:
    """Return the lines of a table.

    Args:
        heads: title of each column.
        rows: cells of each row, one for each column.
        align: ``l`` or ``r`` for each of the first columns; those after them are aligned right.
    """
    marks = ("---" if side == "l" else "---:" for side in align.ljust(len(heads), "r"))
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(marks)}|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def figure_cell(summary: Summary, column: Column) -> str:
    """Return a mean with half its interval: "1.25 ± 0.03"; a dash where there is no figure."""
    if column.name not in summary.mean:
        return "–"
    cell = format(summary.mean[column.name] * column.scale, column.form)
    half = summary.ci95.get(column.name)
    return cell if half is None else f"{cell} ± {format(half * column.scale, column.form)}"


def signed_share(share: float) -> str:
    """Return a change as "+4.1%" or "−4.1%"."""
    return f"{share:+.1%}".replace("-", "−")

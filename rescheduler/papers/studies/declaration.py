"""What a study declares: its cases, and how their figures are shown."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rescheduler.simulator.experiments.runner import Row

__all__ = ["Report", "Study"]


class Report(NamedTuple):
    """What a study has found.

    Attributes:
        rows: plain values for study.json, one mapping per row.
        table: lines in Markdown.
        figures: file's name -> matplotlib figure.
    """

    rows: Sequence[Mapping[str, Any]]
    table: Sequence[str]
    figures: Mapping[str, Any]


class Study(NamedTuple):
    """A question that takes several simulations.

    Attributes:
        cases: name -> key -> value: settings that change together, unlike those that vary.
        report: from the rows of all cases, in their order, to what is written.
        vary: key -> values, of every case.
    """

    cases: Mapping[str, Mapping[str, Any]]
    report: Callable[[Sequence[Row]], Report]
    vary: Mapping[str, Sequence[Any]] = {}

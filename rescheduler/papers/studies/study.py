"""`headway papers`: questions of a paper that take more than one table of simulations."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.experiments.runner import Row, compute
from rescheduler.simulator.experiments.workers import groups
from rescheduler.simulator.results.metrics import Summary
from rescheduler.simulator.results.report import (
    COLOURS,
    about,
    create_panels,
    finish_axes,
    write_study,
)


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


def run_study(
    name: str,
    config: SimulationConfig,
    out: Path,
    workers: int | None,
    cases: Mapping[str, Mapping[str, Any]],
    report: Callable[[Sequence[Row]], Report],
    vary: Mapping[str, Sequence[Any]] | None = None,
) -> int:
    """Simulate all cases; write table, JSON and figures; return the exit status.

    Args:
        name: of the study.
        config: what all cases share.
        out: folder; run it again to resume.
        workers: processes at once; one per core when None.
        cases: name -> key -> value: settings that change together, unlike those that vary.
        report: from the rows of all cases, in their order, to what is written.
        vary: key -> values, of every case.

    Raises:
        ValueError: no cases, a key that does not exist, a value that it refuses, or a folder of
            something else.
        RuntimeError: a cell that could not be computed.
    """
    if not cases:
        raise ValueError("cases: at least one, a name with the keys that it changes")
    verb = f"papers {name}"
    found = [
        group
        for case, changes in cases.items()
        for group in groups(config, {k: [v] for k, v in changes.items()} | dict(vary or {}), case)
    ]
    computed = compute(found, out, verb, "study.json", workers=workers)
    if computed.interrupted:
        raise KeyboardInterrupt
    for cell, what in computed.failed:
        raise RuntimeError(f"{cell.title}: {what}")
    write_study(out, about(verb, config) | computed.traces, *report(computed.rows))
    return 0


def draw_cases(
    found: Mapping[tuple[str, str], Summary],
    labels: Sequence[str],
    shown: Sequence[tuple[str, float, str]],
) -> tuple[Any, list[Any]]:
    """Return a figure of means with their intervals by case, a panel for each figure shown.

    Args:
        found: (case, label) -> figures.
        labels: to draw, each in its colour.
        shown: name of a figure, what it is multiplied by, and its title.
    """
    cases = list(dict.fromkeys(case for case, _ in found))
    figure, panels = create_panels(len(shown), len(shown), (4.0, 3.7), sharey=False)
    for axes, (name, scale, title) in zip(panels, shown, strict=True):
        for i, label in enumerate(labels):
            known = [found.get((case, label)) for case in cases]
            values = [scale * s.mean.get(name, np.nan) if s else np.nan for s in known]
            half = [scale * s.ci95.get(name, 0.0) if s else 0.0 for s in known]
            at = np.arange(len(cases)) + 0.1 * (i - (len(labels) - 1) / 2)
            colour = COLOURS[i % len(COLOURS)]
            axes.errorbar(at, values, half, fmt="o", color=colour, markersize=4, label=label)
        axes.set_xticks(range(len(cases)), cases)
        finish_axes(axes, "", title)
    panels[-1].legend(frameon=False, fontsize="small")
    return figure, panels

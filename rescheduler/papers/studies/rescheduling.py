"""`headway papers rescheduling`: migration planners side by side, in several cases.

The figures are those of STAR's evaluation (Wang et al. 2026, §6): the variance of the decode
instances' step times, averaged over time, P99 TPOT, goodput, preemptions and migrations.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rescheduler.papers.studies.study import Report, draw_cases, run_study
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.experiments.runner import Row
from rescheduler.simulator.results.report import Column, figure_cell, markdown_table

_COLUMNS = (
    Column("exec. variance, ms²", "execution_variance", 1e6, ".3f"),
    Column("P99 TPOT, ms", "tpot_p99", 1e3, ".2f"),
    Column("goodput, requests/s", "goodput", 1.0, ".4f"),
    Column("preemptions", "preemptions", 1.0, ".1f"),
    Column("migrations", "migrations", 1.0, ",.0f"),
    Column("KV peak, tokens", "kv_peak", 1.0, ",.0f"),
)


def rescheduling(
    config: SimulationConfig,
    out: Path,
    cases: dict[str, dict[str, Any]],
    workers: int | None = None,
) -> int:
    """Compare migration planners in several cases.

    The cases may be cluster sizes, forecasts, intervals between plans, or options of the planners.

    Args:
        out: folder; run it again to resume.
        workers: processes at once; one per core if not set.
        config: what all cases share; its ``migration.planners`` are compared.
        cases: name -> key -> value, such as ``"8": {cluster.instances: 8, arrivals.rate: 0.3}``.
    """
    return run_study("rescheduling", config, out, workers, cases, _report)


def _report(rows: Sequence[Row]) -> Report:
    found = {(row.group.case, row.group.policy): row.summary for row in rows}
    cells = [
        [case, label, *(figure_cell(summary, column) for column in _COLUMNS)]
        for (case, label), summary in found.items()
    ]
    # As STAR's Figure 13.
    shown = [(column.name, column.scale, column.title) for column in _COLUMNS[:2]]
    figure, panels = draw_cases(found, list(dict.fromkeys(label for _, label in found)), shown)
    panels[0].set_yscale("log")  # it differs by factors
    return Report(
        [{"case": case, "planner": label, **s.plain} for (case, label), s in found.items()],
        markdown_table(["case", "planner", *(column.title for column in _COLUMNS)], cells, "ll"),
        {"rescheduling.png": figure},
    )

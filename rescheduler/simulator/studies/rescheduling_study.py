"""`headway study rescheduling`: migration planners side by side, in several cases.

The figures are those of STAR's evaluation (Wang et al. 2026, §6): the variance of the decode
instances' step times, averaged over time, P99 TPOT, goodput, preemptions and migrations.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rescheduler.simulator.config.config_parser import config_parser, parsed_config
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.results.figures import save_figure
from rescheduler.simulator.results.metrics import Summary
from rescheduler.simulator.results.rescheduling_figures import draw_cases
from rescheduler.simulator.sweeps.study_cases import CaseRow, compute_cases, write_study

__all__ = ["rescheduling", "rescheduling_command"]

_DESCRIPTION = """Compare migration planners in several cases: cluster sizes, forecasts, intervals
between plans, or options of the planners."""

_COLUMNS = (
    ("exec. variance, ms²", "execution_variance", 1e6, ".3f"),
    ("P99 TPOT, ms", "tpot_p99", 1e3, ".2f"),
    ("goodput, requests/s", "goodput", 1.0, ".4f"),
    ("preemptions", "preemptions", 1.0, ".1f"),
    ("migrations", "migrations", 1.0, ",.0f"),
    ("KV peak, tokens", "kv_peak", 1.0, ",.0f"),
)


def rescheduling_command(arguments: list[str]) -> int:
    """Run the study with a command line; return the exit status."""
    parser = config_parser("study rescheduling", _DESCRIPTION)
    parser.add_function_arguments(rescheduling, skip={"config"})
    given = parser.parse_args(arguments)
    config = parsed_config(parser, given)
    return rescheduling(config, given.out, given.cases, given.workers)


def rescheduling(
    config: SimulationConfig,
    out: Path,
    cases: dict[str, dict[str, Any]],
    workers: int | None = None,
) -> int:
    """Simulate all cases, write table, JSON and figure; return the exit status.

    Args:
        config: what all cases share; its ``migration.planners`` are compared.
        out: folder; run it again to resume.
        cases: name -> key -> value, such as ``"8": {cluster.instances: 8, arrivals.rate: 0.3}``.
        workers: processes at once; one a core when not given.

    Raises:
        ValueError: a key or value that means nothing.
    """
    rows = compute_cases(config, cases, {}, out, "study rescheduling", workers)
    found = {(row.case, row.policy): row.summary for row in rows}
    save_figure(draw_cases(found), out / "rescheduling.png")
    write_study(out, "study rescheduling", config, [_plain(row) for row in rows], _table(found))
    return 0


def _plain(row: CaseRow) -> dict[str, Any]:
    summary = row.summary
    return {
        "case": row.case,
        "planner": row.policy,
        "runs": summary.runs,
        **summary.mean,
        "ci95": summary.ci95,
    }


def _table(found: Mapping[tuple[str, str], Summary]) -> Sequence[str]:
    lines = [
        f"| case | planner | {' | '.join(title for title, *_ in _COLUMNS)} |",
        "|---|---|" + "---:|" * len(_COLUMNS),
    ]
    for (case, label), summary in found.items():
        cells = []
        for _, name, scale, form in _COLUMNS:
            value, half = summary.mean.get(name), summary.ci95.get(name)
            cell = "–" if value is None else format(value * scale, form)
            cells.append(cell if half is None else f"{cell} ± {format(half * scale, form)}")
        lines.append(f"| {case} | {label} | {' | '.join(cells)} |")
    return lines

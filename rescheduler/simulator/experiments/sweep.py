"""`headway simulate --vary`: every combination of some settings, on all cores."""

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.experiments.cells import groups
from rescheduler.simulator.experiments.runner import Computed, Row, compute
from rescheduler.simulator.results.report import about, json_text, main_columns, write_report
from rescheduler.simulator.run_setup import create_candidates, run_setup

__all__ = ["sweep"]

_SHOWN_ROWS = 60


def sweep(
    config: SimulationConfig,
    out: Path,
    vary: dict[str, list[Any]] | None = None,
    workers: int | None = None,
    ray: str | None = None,
    overwrite: bool = False,
) -> int:
    """Simulate every combination of some settings with every policy and seed.

    Each policy with each seed in each combination is a cell of its own, kept as soon as it is
    finished; what is in ``out`` already is not computed again.

    Args:
        config: what does not vary.
        out: folder for the cells, sweep.csv and sweep.json.
        vary: key -> values. A policy is named by its label: policies.bfio.horizon.
        workers: processes at once; one per core when None.
        ray: address of a Ray cluster (auto, local, ray://...) that computes instead.
        overwrite: write to ``out`` whatever else is in it.

    Returns:
        The exit status.

    Raises:
        ValueError: a key that does not exist, a value that it refuses, or a folder that is not
            to be overwritten.
        RuntimeError: Ray is not installed, or its cluster cannot be reached.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")
    create_candidates(run_setup(config))
    found = groups(config, vary or {})
    computed = compute(found, out, "simulate", "sweep.json", overwrite, workers, ray)
    rows = computed.rows
    if rows:
        _write(computed, config, vary or {}, out)
        Console().print(_table(rows))
        if len(rows) > _SHOWN_ROWS:
            print(f"and {len(rows) - _SHOWN_ROWS} more in {out / 'sweep.csv'}")
    for cell, what in computed.failed:
        print(f"headway simulate: {cell.title}: {what}", file=sys.stderr)
    if computed.missing:
        left = f"{computed.missing} of {computed.cells} cells are missing"
        print(f"headway simulate: {left}", file=sys.stderr)
    return 130 if computed.interrupted else int(bool(computed.failed))


def _write(
    computed: Computed, config: SimulationConfig, vary: Mapping[str, list[Any]], out: Path
) -> None:
    rows = computed.rows
    flat = []
    for group, summary in ((row.group, row.summary) for row in rows):
        halves = {f"{name}_ci95": half for name, half in summary.ci95.items()}
        named = {"policy": group.policy, **group.varied, "runs": summary.runs}
        flat.append(named | summary.mean | halves)
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in flat for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    document = {
        "_about": about("simulate", config) | computed.traces | {"vary": dict(vary)},
        "rows": [
            {"policy": row.group.policy, "varied": row.group.varied, **row.summary.plain}
            for row in rows
        ],
    }
    write_report(out, {"sweep.csv": text.getvalue(), "sweep.json": json_text(document)}, {})


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    columns = main_columns([row.summary for row in rows])
    varied = list(rows[0].group.varied)
    table.add_column("policy", no_wrap=True)
    for name in varied:
        table.add_column(name.replace(".", ".\n"), justify="right")
    for title in columns:
        table.add_column(title.replace(", ", "\n"), justify="right", no_wrap=True)
    for i, (group, _) in enumerate(rows[:_SHOWN_ROWS]):
        values = map(str, group.varied.values())
        table.add_row(group.policy, *values, *(cells[i] for cells in columns.values()))
    return table

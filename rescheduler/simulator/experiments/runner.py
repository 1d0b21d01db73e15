"""Compute the cells of an experiment on all cores; resume one that was begun before."""

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from data_collection.versions import source_commit
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.experiments.workers import (
    Cell,
    Figures,
    Group,
    available_cores,
    cells_of,
    compile_notice,
    gather,
    groups,
    read_cell,
    run_cell,
    run_locally,
    run_on_ray,
    write_cell,
)
from rescheduler.simulator.results.metrics import Summary, summarise
from rescheduler.simulator.results.report import (
    about,
    json_text,
    main_columns,
    refuse_foreign_folder,
    write_report,
)
from rescheduler.simulator.simulation import create_candidates, run_setup
from rescheduler.simulator.workloads.trace_files import announce_traces


class Row(NamedTuple):
    """A policy in one case and one combination of what varies, over the seeds.

    Attributes:
        group: the case, the combination and the policy.
        runs: figures of its finished cells, at least one, in order of the seeds.
    """

    group: Group
    runs: list[Figures]

    @property
    def summary(self) -> Summary:
        """Means over the seeds."""
        return summarise(self.runs)


class Computed(NamedTuple):
    """What an experiment has come to.

    Attributes:
        rows: in order of the groups; without those that have no finished cell.
        failed: cells that could not be computed, with what went wrong.
        missing: number of cells without figures.
        cells: number of all cells.
        interrupted: Ctrl-C ended it early.
        traces: as what the files among the traces were read, for a result's notes.
    """

    rows: list[Row]
    failed: list[tuple[Cell, str]]
    missing: int
    cells: int
    interrupted: bool
    traces: dict[str, list[str]]


def compute(
    found: Sequence[Group],
    out: Path,
    verb: str,
    results: str,
    overwrite: bool = False,
    workers: int | None = None,
    ray: str | None = None,
) -> Computed:
    """Compute all cells; those that ``out`` already has are not computed again.

    Args:
        found: groups of cells.
        out: folder, in which each cell is kept as soon as it is finished.
        verb: of the command, whose earlier folder may be written to.
        results: file that the command writes to ``out`` at its end.
        overwrite: write to ``out`` whatever is in it.
        workers: processes at once; one per core when None.
        ray: address of a Ray cluster to compute on instead.

    Raises:
        ValueError: the folder holds something else.
        RuntimeError: Ray is not installed, or its cluster cannot be reached.
    """
    folder = out / "cells"
    if not folder.is_dir():  # which a run leaves that was killed before it wrote its results
        refuse_foreign_folder(out, verb, results, overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    cells = cells_of(found)
    different = {repr(cell.config["trace"]): cell.config["trace"] for cell in cells}
    traces = announce_traces(verb, list(different.values()))
    figures = _finished(folder, cells)
    missing = [cell for cell in cells if cell.key not in figures]
    failed: list[tuple[Cell, str]] = []

    def keep(cell: Cell, outcome: Figures | str) -> None:
        if isinstance(outcome, str):
            failed.append((cell, outcome))
        else:
            write_cell(folder, cell, outcome)
            figures[cell.key] = outcome

    interrupted = False
    if missing:
        if ray is None:
            compile_notice()
            outcomes = run_locally(missing, workers or available_cores(), run_cell, True)
        else:
            outcomes = run_on_ray(missing, ray)
        interrupted = gather(outcomes, len(missing), keep, lambda cell: cell.title)
    rows = [
        Row(group, runs)
        for group in found
        if (runs := [figures[cell.key] for cell in group.cells if cell.key in figures])
    ]
    return Computed(rows, failed, len(cells) - len(figures), len(cells), interrupted, traces)


def _finished(folder: Path, cells: Sequence[Cell]) -> dict[str, Figures]:
    """Return the figures of the cells that are there, by key, and report how many there are."""
    commit, others = source_commit(), 0
    figures: dict[str, Figures] = {}
    for cell in cells:
        kept = read_cell(folder, cell)
        if kept is not None:
            figures[cell.key], made_at = kept
            others += made_at != commit
    if figures:
        print(f"{len(figures)} of {len(cells)} cells are done already", file=sys.stderr)
    if others:
        print(
            f"{others} of them were computed by another version of this program; "
            f"remove {folder} to compute all of them again",
            file=sys.stderr,
        )
    return figures


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

"""Compute the cells of an experiment on all cores; resume one that was begun before."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from data_collection.versions import source_commit
from rescheduler.simulator.experiments.cells import (
    Cell,
    Figures,
    Group,
    cells_of,
    read_cell,
    run_cell,
    write_cell,
)
from rescheduler.simulator.experiments.progress import compile_notice, gather
from rescheduler.simulator.experiments.workers import (
    available_cores,
    run_locally,
    run_on_ray,
)
from rescheduler.simulator.results.metrics import Summary, summarise
from rescheduler.simulator.results.report import refuse_foreign_folder
from rescheduler.simulator.workloads.trace_files import announce_traces

__all__ = ["Computed", "Row", "compute"]


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

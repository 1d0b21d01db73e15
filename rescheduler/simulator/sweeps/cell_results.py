"""The results of cells, each kept in a file as soon as it is there, so that a run can resume."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from data_collection.versions import source_commit
from rescheduler.simulator.simulate import compile_notice, progress_bar, refuse_foreign_folder
from rescheduler.simulator.sweeps.sweep_cells import Cell, read_cell, write_cell
from rescheduler.simulator.sweeps.sweep_workers import available_cores, run_locally, run_on_ray

__all__ = ["Figures", "cell_folder", "compute_cells", "finished_cells"]

Figures = dict[str, float]


def cell_folder(out: Path, verb: str, results: str, overwrite: bool) -> Path:
    """Return the folder of a run's cells, made if need be.

    Args:
        out: of the run; one with cells was begun before, and killed before it wrote ``results``.
        verb: of the command, whose earlier folder may be written to.
        results: file that it writes at its end.
        overwrite: write to ``out`` whatever is in it.

    Raises:
        ValueError: as `refuse_foreign_folder`.
    """
    folder = out / "cells"
    if not folder.is_dir():
        refuse_foreign_folder(out, verb, results, overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def finished_cells(folder: Path, cells: Sequence[Cell]) -> dict[str, Figures]:
    """Return the figures of the cells that are there, by key, and tell what there is."""
    commit, others = source_commit(), 0
    results: dict[str, Figures] = {}
    for cell in cells:
        kept = read_cell(folder, cell)
        if kept is not None:
            results[cell.key], made_at = kept
            others += made_at != commit
    if results:
        print(f"{len(results)} of {len(cells)} cells are done already", file=sys.stderr)
    if others:
        print(
            f"{others} of them were computed by another version of this program; "
            f"remove {folder} to compute all of them again",
            file=sys.stderr,
        )
    return results


def compute_cells(
    cells: Iterable[Cell],
    folder: Path,
    results: dict[str, Figures],
    workers: int | None = None,
    ray: str | None = None,
) -> tuple[list[tuple[Cell, str]], bool]:
    """Compute cells without results; return those that failed, and whether Ctrl-C ended it.

    Args:
        cells: of the run.
        folder: in which each is kept.
        results: by key; those computed are added.
        workers: processes at once; one a core when None.
        ray: address of a Ray cluster to compute on instead.
    """
    missing = [cell for cell in cells if cell.key not in results]
    failed: list[tuple[Cell, str]] = []
    if not missing:
        return failed, False
    if ray is None:
        compile_notice()
        outcomes = run_locally(missing, workers or available_cores())
    else:
        outcomes = run_on_ray(missing, ray)
    with progress_bar() as bar:
        task = bar.add_task("", total=len(missing))
        try:
            for cell, outcome in outcomes:
                if isinstance(outcome, str):
                    failed.append((cell, outcome))
                else:
                    write_cell(folder, cell, outcome)
                    results[cell.key] = outcome
                bar.update(task, advance=1, description=cell.title)
        except KeyboardInterrupt:
            outcomes.close()
            return failed, True
    return failed, False

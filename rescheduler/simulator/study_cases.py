"""Studies: named cases of one simulation, each over the same settings, computed on all cores."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data_collection.atomic_file import write_text_atomically
from rescheduler.simulator.metrics import Summary, summarise
from rescheduler.simulator.report import about
from rescheduler.simulator.simulate import compile_notice, progress_bar, refuse_foreign_folder
from rescheduler.simulator.simulation_config import SimulationConfig
from rescheduler.simulator.sweep_cells import Cell, Group, cells_of, groups, read_cell, write_cell
from rescheduler.simulator.sweep_workers import available_cores, run_locally

__all__ = ["CaseRow", "compute_cases", "write_study"]


class CaseRow(NamedTuple):
    """One policy in one case and one combination of what varies, over all seeds.

    Attributes:
        case: its name.
        varied: key -> value, of what varies and of what makes the case.
        policy: label.
        cells: one for each seed; their configurations say all.
        runs: figures of each cell.
    """

    case: str
    varied: dict[str, Any]
    policy: str
    cells: list[Cell]
    runs: list[dict[str, float]]

    @property
    def summary(self) -> Summary:
        """Means over the seeds."""
        return summarise(self.runs)


def compute_cases(
    config: SimulationConfig,
    cases: Mapping[str, Mapping[str, Any]],
    vary: Mapping[str, Sequence[Any]],
    out: Path,
    verb: str,
    workers: int | None,
) -> list[CaseRow]:
    """Return every policy of every case and combination; what is in ``out`` is not run again.

    Args:
        config: what all cases share.
        cases: name -> key -> value: settings that change together, unlike those that vary.
        vary: key -> values.
        out: folder, in which each cell is kept as soon as it is finished.
        verb: of the command, whose earlier folder may be written to.
        workers: processes at once; one a core when None.

    Raises:
        ValueError: a key that does not exist, a value that it refuses, or a folder of something
            else.
        RuntimeError: a cell that could not be computed.
    """
    if not cases:
        raise ValueError("cases: at least one, a name with the keys that it changes")
    found: list[tuple[str, Group]] = []
    for name, changes in cases.items():
        every = {key: [value] for key, value in changes.items()} | dict(vary)
        found += [(name, group) for group in groups(config, every)]
    folder = out / "cells"
    if not folder.is_dir():
        refuse_foreign_folder(out, verb, "study.json", overwrite=False)
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, float]] = {}
    missing = []
    for cell in cells_of([group for _, group in found]):
        kept = read_cell(folder, cell)
        if kept is None:
            missing.append(cell)
        else:
            results[cell.key] = kept[0]
    if results and missing:
        print(f"{len(results)} of {len(results) + len(missing)} cells are done", file=sys.stderr)
    if missing:
        compile_notice()
    with progress_bar() as bar:
        task = bar.add_task(verb, total=len(missing))
        for cell, outcome in run_locally(missing, workers or available_cores()):
            if isinstance(outcome, str):
                raise RuntimeError(f"{cell.title}: {outcome}")
            write_cell(folder, cell, outcome)
            results[cell.key] = outcome
            bar.update(task, advance=1, description=cell.title)
    return [
        CaseRow(
            name, group.varied, group.policy, group.cells, [results[c.key] for c in group.cells]
        )
        for name, group in found
    ]


def write_study(
    out: Path, verb: str, config: SimulationConfig, rows: Sequence[Any], table: Sequence[str]
) -> None:
    """Write study.json and table.md, and print the table.

    Args:
        out: the folder.
        verb: of the command.
        config: what all cases share.
        rows: plain values, one mapping a row.
        table: lines in Markdown.
    """
    document = {"_about": about(verb, config), "rows": list(rows)}
    write_text_atomically(out / "study.json", json.dumps(document, indent=1) + "\n")
    text = "\n".join(table) + "\n"
    write_text_atomically(out / "table.md", text)
    print(text)
    print(f"wrote {out}")

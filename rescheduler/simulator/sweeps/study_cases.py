"""Studies: named cases of one simulation, each over the same settings, computed on all cores."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data_collection.atomic_file import write_text_atomically
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.results.metrics import Summary, summarise
from rescheduler.simulator.results.report import about
from rescheduler.simulator.sweeps.cell_results import cell_folder, compute_cells, finished_cells
from rescheduler.simulator.sweeps.sweep_cells import Cell, Group, cells_of, groups

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
    folder = cell_folder(out, verb, "study.json", overwrite=False)
    cells = cells_of([group for _, group in found])
    results = finished_cells(folder, cells)
    failed, interrupted = compute_cells(cells, folder, results, workers)
    if interrupted:
        raise KeyboardInterrupt
    for cell, what in failed:
        raise RuntimeError(f"{cell.title}: {what}")
    return [
        CaseRow(
            name, group.varied, group.policy, group.cells, [results[c.key] for c in group.cells]
        )
        for name, group in found
    ]


def write_study(
    out: Path,
    verb: str,
    config: SimulationConfig,
    rows: Sequence[Any],
    table: Sequence[str],
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write study.json and table.md, and print the table.

    Args:
        out: the folder.
        verb: of the command.
        config: what all cases share.
        rows: plain values, one mapping a row.
        table: lines in Markdown.
        settings: beyond the simulation's that the rows depend on, plain values.
    """
    document = {"_about": about(verb, config) | dict(settings or {}), "rows": list(rows)}
    write_text_atomically(out / "study.json", json.dumps(document, indent=1) + "\n")
    text = "\n".join(table) + "\n"
    write_text_atomically(out / "table.md", text)
    print(text)
    print(f"wrote {out}")

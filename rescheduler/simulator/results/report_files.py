"""The files that a command writes to its folder, and whose folder that is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_collection.atomic_file import write_text_atomically
from data_collection.text_file import read_text
from data_collection.versions import machine, source_commit, versions
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.results.figures import save_figure

__all__ = ["about", "json_text", "refuse_foreign_folder", "write_report", "write_study"]


def about(verb: str, config: SimulationConfig) -> dict[str, Any]:
    """Return what a result depends on: configuration, machine, versions, commit."""
    return {
        "made_by": f"headway {verb}",
        "config": asdict(config),
        "commit": source_commit(),
        "machine": machine(),
        "versions": versions(),
    }


def json_text(document: Any, allow_nan: bool = True) -> str:
    """Return a document as the text of a file."""
    return json.dumps(document, indent=1, allow_nan=allow_nan) + "\n"


def refuse_foreign_folder(folder: Path, verb: str, results: str, overwrite: bool) -> None:
    """Refuse to write among files that are not of an earlier run of the same verb.

    Raises:
        ValueError: the path is not a folder, or the folder is not empty and holds no such results.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: not a folder")
    if overwrite or not folder.exists() or not any(folder.iterdir()):
        return
    try:
        made_by = json.loads(read_text(folder / results))["_about"]["made_by"]
    except (ValueError, KeyError, TypeError):
        made_by = None
    if made_by != f"headway {verb}":
        raise ValueError(
            f"{folder}: not empty, and not written by `headway {verb}`; "
            "choose another folder or add --overwrite"
        )


def write_report(out: Path, texts: Mapping[str, str], figures: Mapping[str, Any]) -> None:
    """Write the files of a report to a folder, each whole or not at all.

    Args:
        out: the folder; made if need be.
        texts: file's name -> text.
        figures: file's name -> matplotlib figure.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        save_figure(figure, out / name)
    for name, text in texts.items():
        write_text_atomically(out / name, text)


def write_study(
    out: Path,
    notes: Mapping[str, Any],
    rows: Sequence[Any],
    table: Sequence[str],
    figures: Mapping[str, Any],
) -> None:
    """Write study.json, table.md and figures, and print the table.

    Args:
        out: the folder.
        notes: what the rows depend on, see `about`.
        rows: plain values, one mapping per row.
        table: lines in Markdown.
        figures: file's name -> matplotlib figure.
    """
    text = "\n".join(table) + "\n"
    document = json_text({"_about": dict(notes), "rows": list(rows)})
    write_report(out, {"study.json": document, "table.md": text}, figures)
    print(text)
    print(f"wrote {out}")

"""What every benchmark writes: its figures with what they depend on, and results to go on from."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_collection.atomic_file import write_text_atomically
from data_collection.versions import machine, source_commit, versions


def arguments(description: str, quick: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share: a short run, and the file."""
    parser = argparse.ArgumentParser(description=description)
    if quick:
        parser.add_argument("--quick", action="store_true", help="a short run, for trying it out")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    return parser


def report(name: str, figures: dict[str, float], out: Path | None) -> None:
    """Print the figures as a table and, if asked, write them with machine and versions."""
    width = max(map(len, figures))
    print(f"\n| {'figure':<{width}} | value |\n|{'-' * (width + 2)}|---:|")
    for key, value in figures.items():
        print(f"| {key:<{width}} | {value:.6g} |")
    write_report(name, figures, out)


def write_report(
    name: str,
    figures: Mapping[str, float | str],
    out: Path | None,
    quiet: bool = False,
    **further: Any,
) -> None:
    """Write figures with commit, machine and versions, if asked."""
    if out is None:
        return
    document = {
        "name": name,
        "commit": source_commit(),
        "machine": machine(),
        "versions": versions(),
        "figures": figures,
        **further,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(out, json.dumps(document, indent=1) + "\n")
    if not quiet:
        print(f"\nwrote {out}")


class Cells:
    """Results by name, a file each, so that a measurement goes on where it was interrupted.

    Those of other settings, as JSON, are none.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None) -> None:
        self._folder = folder
        self._settings = json.loads(json.dumps(settings or {}))

    def file(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def read(self, name: str) -> Any:
        """Return a result, or None where there is none of these settings."""
        if not self.file(name).is_file():
            return None
        kept = json.loads(self.file(name).read_text())
        return kept["result"] if kept["settings"] == self._settings else None

    def write(self, name: str, result: Any) -> None:
        file = self.file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(file, json.dumps({"settings": self._settings, "result": result}))

"""What was measured, a file each, so that a measurement goes on where it was interrupted."""

import json
from pathlib import Path
from typing import Any

from data_collection.atomic_file import write_text_atomically


class Cells:
    """Results by name, of the same settings."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._folder = folder
        self._settings = json.loads(json.dumps(settings))

    def read(self, name: str) -> Any:
        """Return a result, or None where there is none of these settings."""
        file = self._folder / f"{name}.json"
        if not file.is_file():
            return None
        kept = json.loads(file.read_text())
        return kept["result"] if kept["settings"] == self._settings else None

    def write(self, name: str, result: Any) -> None:
        file = self._folder / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(file, json.dumps({"settings": self._settings, "result": result}))

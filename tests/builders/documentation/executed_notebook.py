"""Notebooks of `examples/`, executed by a kernel of their own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
from shown_commands import ROOT

EXAMPLES = ROOT / "examples"


def execute(notebook: Path, folder: Path, out: Path) -> Any:
    """Execute a notebook in its own folder, and return it with its new outputs.

    Args:
        notebook: the file.
        folder: of the kernel's files.
        out: folder of the executed notebook.
    """
    environment = os.environ | {"IPYTHONDIR": str(folder / "ipython")}
    environment.pop("MPLBACKEND", None)  # the kernel chooses what shows figures in a notebook
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute"]
    command += ["--config", str(EXAMPLES / "nbconvert_config.py"), "--output-dir", str(out)]
    done = subprocess.run(
        [*command, str(notebook)], env=environment, capture_output=True, text=True, timeout=840
    )
    assert done.returncode == 0, done.stderr
    return nbformat.read(out / notebook.name, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    """Return the cells that hold code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(notebook: Any) -> list[str]:
    """Return what each cell prints and shows as text, figures aside."""
    return [
        "".join(
            output.text if output.output_type == "stream" else output.data["text/plain"]
            for output in cell.outputs
        )
        for cell in code_cells(notebook)
    ]


def figures(notebook: Any) -> list[str]:
    """Return the figures that the cells show, each as base64."""
    return [
        output.data["image/png"]
        for cell in code_cells(notebook)
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]


def check_ran_quietly(notebook: Any) -> None:
    """Check that every cell has run, in order, and that none has warned."""
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.get("name") == "stderr"]

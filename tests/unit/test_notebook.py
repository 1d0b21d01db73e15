"""The notebook runs, says what the repository shows of it, and keeps what its text promises."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.slow

NOTEBOOK = EXAMPLES / "from_dataset_to_routing.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook as a kernel of its own has just executed it."""
    out = tmp_path_factory.mktemp("notebook")
    environment = os.environ | {"IPYTHONDIR": str(out / "ipython")}
    environment.pop("MPLBACKEND", None)  # the kernel chooses what shows figures in a notebook
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute"]
    command += ["--config", str(EXAMPLES / "nbconvert_config.py"), "--output-dir", str(out)]
    done = subprocess.run(
        [*command, str(NOTEBOOK)], env=environment, capture_output=True, text=True, timeout=840
    )
    assert done.returncode == 0, done.stderr
    return nbformat.read(out / NOTEBOOK.name, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(notebook: Any) -> list[str]:
    """What each cell prints and shows as text, figures aside."""
    return [
        "".join(
            output.text if output.output_type == "stream" else output.data["text/plain"]
            for output in cell.outputs
        )
        for cell in code_cells(notebook)
    ]


def test_every_cell_has_run_without_a_warning(executed: Any) -> None:
    cells = code_cells(executed)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.get("name") == "stderr"]


def test_every_section_has_its_figure(executed: Any) -> None:
    figures = [
        output.data["image/png"]
        for cell in code_cells(executed)
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert len(figures) == len(set(figures)) == 6


def test_the_repository_shows_what_the_code_says(executed: Any) -> None:
    shown = nbformat.read(NOTEBOOK, as_version=4)
    assert texts(shown) == texts(executed), "run `make notebook`, and commit what it changes"


def test_the_intervals_hold_about_as_many_ends_as_they_say(executed: Any) -> None:
    held = re.findall(r"(\d+)% intervals hold ([\d.]+)%", "".join(texts(executed)))
    assert [int(nominal) for nominal, _ in held] == [50, 80, 90]
    for nominal, share in held:
        assert float(share) == pytest.approx(int(nominal), abs=2)


def test_the_predictor_beats_the_age_alone(executed: Any) -> None:
    scores = re.findall(r"integrated Brier score ([\d.]+)", "".join(texts(executed)))
    predictor, by_age = map(float, scores)
    assert predictor < by_age


def test_looking_ahead_routes_to_the_instance_that_is_fullest_now(executed: Any) -> None:
    said = "".join(texts(executed))
    (listed,) = re.findall(r"instances with (.*) context tokens", said)
    loads = [int(load.replace(",", "")) for load in listed.split(", ")]
    assert (
        f"{{'jsq_load': {loads.index(min(loads))}, 'headroom': {loads.index(max(loads))}}}" in said
    )

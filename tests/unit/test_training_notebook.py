"""The notebook that trains a predictor runs, and what it says of the predictor holds."""

import re
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from executed_notebook import EXAMPLES, check_ran_quietly, execute, figures, texts

from predictor.prompts.prompt_predictor import PromptPredictor

pytestmark = pytest.mark.slow

NOTEBOOK = EXAMPLES / "train_a_predictor.ipynb"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """A folder like a checkout, in which the notebook writes its checkpoint."""
    folder = tmp_path_factory.mktemp("training_notebook")
    (folder / "examples").mkdir()
    (folder / "transcripts").symlink_to(EXAMPLES.parent / "transcripts")
    shutil.copyfile(NOTEBOOK, folder / "examples" / NOTEBOOK.name)
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Any:
    """The notebook as a kernel of its own has just executed it."""
    return execute(folder / "examples" / NOTEBOOK.name, folder, folder)


def numbers(notebook: Any) -> list[float]:
    """Return the numbers that the cells print."""
    said = "".join(texts(notebook)).replace(",", "")
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", said)]


def test_every_cell_of_the_training_has_run_without_a_warning(trained: Any) -> None:
    check_ran_quietly(trained)
    assert len(figures(trained)) == len(set(figures(trained))) == 3


def test_the_repository_shows_about_what_the_training_says(trained: Any) -> None:
    """Other processors round in another way, and a training adds that up."""
    shown = nbformat.read(NOTEBOOK, as_version=4)
    assert numbers(shown) == pytest.approx(numbers(trained), rel=0.1), "run `make notebook`"


def test_the_trained_predictor_beats_one_curve_for_all(trained: Any) -> None:
    scores = re.findall(r"integrated Brier score ([\d.]+)", "".join(texts(trained)))
    predictor, alike = map(float, scores)
    assert predictor < 0.95 * alike


def test_a_story_is_expected_to_be_longer_than_a_number(trained: Any) -> None:
    short, long = re.findall(r"(\d+) tokens: ", "".join(texts(trained)))
    assert int(long) > 3 * int(short)


def test_the_checkpoint_of_the_notebook_can_be_served(trained: Any, folder: Path) -> None:
    assert PromptPredictor.load(str(folder / "runs" / "first-predictor")).longest > 1000

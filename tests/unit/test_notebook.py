"""The notebook runs, says what the repository shows of it, and keeps what its text promises."""

import re
from typing import Any

import nbformat
import pytest
from executed_notebook import EXAMPLES, check_ran_quietly, execute, figures, texts

pytestmark = pytest.mark.slow

NOTEBOOK = EXAMPLES / "from_dataset_to_routing.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook as a kernel of its own has just executed it."""
    out = tmp_path_factory.mktemp("notebook")
    return execute(NOTEBOOK, out, out)


def test_every_cell_has_run_without_a_warning(executed: Any) -> None:
    check_ran_quietly(executed)


def test_every_section_has_its_figure(executed: Any) -> None:
    assert len(figures(executed)) == len(set(figures(executed))) == 6


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

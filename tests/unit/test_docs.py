"""What the pages show in Python runs, and says what they say."""

import re
from pathlib import Path
from typing import Any

import numpy as np

DOCS = Path(__file__).parents[2] / "docs"


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def test_the_forecast_page_computes_what_it_says() -> None:
    (block,) = python_blocks("forecast.md")
    names: dict[str, object] = {}
    exec(block, names)
    forecast = names["forecast"]
    np.testing.assert_allclose(forecast.at([0, 10, 50]), [[1, 0.6, 1 / 3]])  # type: ignore[attr-defined]
    assert "# [[1, 0.6, 0.333...]]" in block


def test_the_routing_page_assigns_as_it_says() -> None:
    names: dict[str, Any] = {}
    for block in python_blocks("route.md"):
        exec(block, names)
    assert f"# {names['now'].tolist()}\n" in python_blocks("route.md")[0]
    assert f"# {names['ahead'].tolist()}\n" in python_blocks("route.md")[0]
    mine = names["create_policy"]("emptiest_first").assign(names["view"])
    assert mine.instance.tolist() == [1, -1]


def test_the_simulation_page_migrates_a_request() -> None:
    (block,) = python_blocks("simulate.md")
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["result"].migrations == 1
    assert len(names["result"].requests.number) == 40


def test_every_page_that_a_page_links_to_is_there() -> None:
    root = DOCS.parent
    for page in [*DOCS.glob("*.md"), root / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_configuration_that_a_page_names_is_there() -> None:
    root = DOCS.parent
    for page in [*DOCS.glob("*.md"), root / "README.md", root / "Makefile"]:
        for name in re.findall(r"configs/[\w/]+\.yaml", page.read_text()):
            assert (root / name).is_file(), f"{page.name} names {name}"


def test_the_migration_page_plans_as_it_says() -> None:
    (block,) = python_blocks("migrate.md")
    names: dict[str, Any] = {}
    exec(block, names)
    moves = [(m.request, m.source, m.target) for m in names["plan"].migrations]
    assert f"# {moves}\n" in block

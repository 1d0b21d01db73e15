"""What the pages show in Python runs, and says what they say."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot
from shown_commands import PAGES, ROOT

DOCS = ROOT / "docs"
FOLDERS = (
    "benchmarks|charts|checkpoints|configs|data_collection|deploy|docs|examples|predictor|"
    "rescheduler|tests"
)


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def test_the_readme_forecasts_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (block,) = python_blocks("../README.md")
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["still_running"].shape == (1,)
    assert 0 < names["still_running"][0] < 1
    early, middle, late = names["quantiles"][0]
    assert 0 < early <= middle <= late <= 824 - 50


def test_the_forecast_page_loads_and_forecasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(python_blocks("forecast.md")[0], names)
    forecast = names["forecast"]
    survival = forecast.at([0, 16, 64])
    assert survival.shape == (2, 3)
    assert (survival[:, 0] == 1).all()
    assert (np.diff(survival) <= 0).all()
    np.testing.assert_allclose(
        forecast.aged(10).at([6])[:, 0] * forecast.at([10])[:, 0], survival[:, 1]
    )


def test_the_forecast_page_computes_what_it_says() -> None:
    _, block = python_blocks("forecast.md")
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


def test_the_page_on_plots_draws_what_it_says_and_saves_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = python_blocks("reference.md")
    names: dict[str, Any] = {}
    exec(block, names)
    assert len(pyplot.get_fignums()) == 4
    assert [move.request for move in names["plan"].migrations] == [1]
    assert (tmp_path / "plan.svg").read_text().endswith("</svg>\n")
    pyplot.close("all")


def test_the_gateway_page_shows_the_configuration_of_envoy() -> None:
    config = (DOCS / "envoy.yaml").read_text()
    assert f"```yaml\n{config}```" in (DOCS / "gateway.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "Makefile"], ids=page_name)
def test_every_path_of_the_repository_exists(page: Path) -> None:
    for path in re.findall(rf"(?<![\w./-])(?:{FOLDERS})/[\w/.-]*\.\w+", page.read_text()):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_dotted_name_exists(page: Path) -> None:
    packages = "benchmarks|data_collection|predictor|rescheduler"
    prose = re.sub(r"```python\n.*?```", "", page.read_text(), flags=re.DOTALL)
    for name in re.findall(rf"(?<![\w./-])(?:{packages})(?:\.\w+)+", prose):
        module, attributes = ROOT / name.replace(".", "/"), []
        while not (module.is_dir() or module.with_suffix(".py").is_file()):
            attributes.append(module.name)
            module = module.parent
        source = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
        for attribute in attributes:
            found = re.search(rf"\b{attribute}\b", source.read_text())
            assert found, f"{page.name} names {name}"


def test_the_map_of_the_code_names_every_folder_of_it_and_no_other() -> None:
    root = DOCS.parent
    page = (DOCS / "develop.md").read_text()
    named = set(re.findall(r"`([\w/]+)/`", page))
    missing = [folder for folder in named if not (root / folder).is_dir()]
    assert not missing, f"develop.md names {missing}"
    for file in re.findall(r"`([\w]+/[\w/]+\.\w+)`", page):
        assert (root / file).is_file(), f"develop.md names {file}"
    rooms = {
        str(init.parent.relative_to(root))
        for package in ("data_collection", "predictor", "rescheduler")
        for init in (root / package).glob("*/**/__init__.py")
    }
    assert rooms <= named, f"develop.md leaves out {sorted(rooms - named)}"


def test_the_migration_page_plans_as_it_says() -> None:
    (block,) = python_blocks("migrate.md")
    names: dict[str, Any] = {}
    exec(block, names)
    moves = [(m.request, m.source, m.target) for m in names["plan"].migrations]
    assert f"# {moves}\n" in block

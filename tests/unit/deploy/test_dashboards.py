"""The dashboards that Grafana imports are those that the code describes."""

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.dashboards import DASHBOARDS
from deploy.panels import dashboard_json

FOLDER = Path(__file__).parents[3] / "deploy" / "grafana"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_file_is_what_the_code_describes(name: str) -> None:
    described = dashboard_json(DASHBOARDS[name]())
    assert (FOLDER / f"{name}.json").read_text() == described, "run python -m deploy.dashboards"


def test_every_file_is_described() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(DASHBOARDS)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_fit_beside_each_other(name: str) -> None:
    dashboard = json.loads((FOLDER / f"{name}.json").read_text())
    assert dashboard["uid"] == name
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard["panels"]:
        place: dict[str, Any] = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                other = taken.setdefault((x, y), panel["title"])
                assert other == panel["title"]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)

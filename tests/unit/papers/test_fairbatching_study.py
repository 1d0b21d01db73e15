"""The study of FairBatching's systems: its comparison, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rescheduler.commands.command_line import main
from rescheduler.papers.studies.fairbatching import LoadCurve
from rescheduler.simulator.results.metrics import Summary

ROOT = Path(__file__).parents[3]


def values_of(name: str) -> dict[str, Any]:
    values = yaml.safe_load((ROOT / f"configs/papers/fairbatching_{name}.yaml").read_text())
    assert isinstance(values, dict)
    return values


def small(**changes: Any) -> dict[str, Any]:
    """A cluster that is overloaded at its second load, and two systems."""
    return values_of("node") | {
        "trace": values_of("node")["trace"] | {"requests": 150},
        "seeds": 2,
        "cases": {"one": {}, "two": {"cluster.instances": 2}},
        "systems": {
            "Sarathi": {},
            "fair": {"prefill.formation": "fairbatching", "admission.pab": True},
        },
        "baselines": ["Sarathi"],
        "tuned": {"Sarathi": {"prefill.token_budget": [8, 256]}},
        "loads": [1.0, 5.0],
        "case_loads": {"two": [2.0]},
    } | changes  # fmt: skip


def run_study(tmp_path: Path, values: dict[str, Any]) -> Path:
    path, out = tmp_path / "small.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(values))
    arguments = ["fairbatching", "--config", str(path), "--out", str(out), "--workers", "1"]
    assert main(["papers", *arguments]) == 0
    return out


def test_systems_are_compared_by_their_peaks(tmp_path: Path) -> None:
    out = run_study(tmp_path, small())
    written = {cell: cell.stat().st_mtime_ns for cell in (out / "cells").iterdir()}
    run_study(tmp_path, small())
    assert all(cell.stat().st_mtime_ns == at for cell, at in written.items()), "resumed"
    rows = json.loads((out / "study.json").read_text())["rows"]
    assert len(rows) == 2 * 3 + 3
    for row in rows:
        instances = 2 if row["case"] == "two" else 1
        offered = row["offered_per_s"]
        assert 0.5 < offered / (row["load"] * instances) < 1.5
        assert row["effective"] <= offered
        assert (row["rejected"] > 0) <= (row["system"] == "fair")
    table = (out / "table.md").read_text()
    of_one = [line for line in table.splitlines() if line.startswith("| one | Sarathi |")]
    assert "token_budget 256" in of_one[0], "8 tokens a step starve every prompt"
    assert "+0.0%" in of_one[0]
    assert "| one | fair |" in table and "| two | fair | 2 |" in table
    assert (out / "effective.png").stat().st_size > 0


@pytest.mark.slow
def test_arrivals_of_a_file_are_scaled_to_the_load(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"{0.5 * i},200,20" for i in range(100)]
    trace.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *lines]) + "\n")
    changed = small(
        trace={"path": str(trace)}, arrivals={"kind": "trace"}, cases={"one": {}}, case_loads={}
    )
    rows = json.loads((run_study(tmp_path, changed) / "study.json").read_text())["rows"]
    for row in rows:
        assert row["offered_per_s"] == pytest.approx(row["load"])


def test_a_peak_is_the_most_over_the_loads() -> None:
    points = {1.0: 0.9, 2.0: 1.4, 3.0: 1.1}
    curve = LoadCurve(
        "case", "system", {}, {x: Summary({"effective": y}, {}, 1) for x, y in points.items()}
    )
    assert curve.peak == (1.4, 2.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baselines": ["vLLM"]}, "baselines: 'vLLM' is none of Sarathi, fair"),
        ({"tuned": {"vLLM": {}}}, "tuned: 'vLLM' is none of"),
        ({"case_loads": {"three": [1.0]}}, "case_loads: 'three' is none of one, two"),
        ({"slo": None, "systems": {"Sarathi": {}}}, "slo and baselines"),
    ],
)
def test_what_the_study_cannot_do_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(small(**changes)))
    assert main(["papers", "fairbatching", "--config", str(path), "--out", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err

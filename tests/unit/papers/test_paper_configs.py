"""The papers' configurations and studies: each runs, and orders policies as the pages say."""

import json
from copy import deepcopy
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rescheduler.commands.command_line import main
from rescheduler.papers.studies.barrier_tax import retimed_throughput
from rescheduler.papers.studies.fairbatching import LoadCurve
from rescheduler.papers.studies.scaling import fitted_slope
from rescheduler.simulator.config.simulation_config import SimulationConfig, read_config
from rescheduler.simulator.experiments.workers import groups
from rescheduler.simulator.results.metrics import RunResult, Summary
from rescheduler.simulator.simulation import create_policies, run, run_setup
from rescheduler.simulator.workloads.length_generators import BurstGPTSample, LognormalLengths

ROOT = Path(__file__).parents[3]
TABLES = ("bfio_table1", "mixed_workloads")
STUDIES = ("bfio_theory", "barrier_tax", "barrier_tax_points")
SYSTEMS = ("node", "breakdown", "readings", "budgets", "slo_grid", "cluster")
OWN = (
    *("vary", "cases", "overheads", "systems", "baselines", "tuned", "loads", "case_loads"),
    "latency_load",
)


def values_of(name: str) -> dict[str, Any]:
    values = yaml.safe_load((ROOT / f"configs/papers/{name}.yaml").read_text())
    assert isinstance(values, dict)
    return values


def plain(values: dict[str, Any]) -> SimulationConfig:
    return read_config({key: v for key, v in values.items() if key not in OWN})


def first_runs(config: SimulationConfig) -> dict[str, RunResult]:
    setup = run_setup(config)
    return {label: run(setup, p, 0, label) for label, p in create_policies(config).items()}


LARGE = ("bfio_theory", "fairbatching_cluster", "fairbatching_slo_grid")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name
        for name in (*TABLES, *STUDIES, *(f"fairbatching_{name}" for name in SYSTEMS))
    ],
)
def test_every_configuration_is_accepted(name: str) -> None:
    values = values_of(name)
    config = plain(values)
    systems = values.get("systems", {"all": {}})
    assert set(values.get("baselines", ())) <= set(systems)
    for changes in values.get("cases", {"as it is": {}}).values():
        for system in systems.values():
            every = {key: [value] for key, value in (changes | system).items()}
            for group in groups(config, every | values.get("vary", {})):
                found = read_config(group.cells[0].config)  # seeds share their configuration
                run_setup(found)
                create_policies(found)


@pytest.mark.parametrize("name", TABLES)
def test_a_few_requests_of_every_table_run(name: str) -> None:
    values = values_of(name)
    values["trace"]["requests"] = 60
    results = first_runs(plain(values))
    assert all(len(result.requests.number) == 60 for result in results.values())


def test_the_integer_program_balances_what_counting_requests_does_not() -> None:
    values = values_of("bfio_table1")
    values["trace"]["requests"] = 20_000
    values["max_steps"] = 800
    results = first_runs(plain(values))
    assert results["bfio_h0"].imbalance < results["fcfs"].imbalance / 3
    assert results["bfio_h80"].imbalance < results["fcfs"].imbalance / 3
    assert results["jsq"].imbalance > results["fcfs"].imbalance / 2
    assert len({result.tokens for result in results.values()}) == 1, "all slots, all steps"
    for ahead in ("bfio_h0", "bfio_h80"):
        assert results[ahead].seconds < results["fcfs"].seconds / 1.05
        assert results[ahead].energy_load_joules < results["fcfs"].energy_load_joules


def test_dedicated_instances_are_last_in_every_order_of_arrival() -> None:
    values = values_of("mixed_workloads")
    values["trace"]["requests"] = 300
    vary = values.pop("vary")
    for scenario in vary["trace.scenario"]:
        values["trace"]["scenario"] = scenario
        results = first_runs(plain(deepcopy(values)))
        seconds = {label: result.seconds for label, result in results.items()}
        assert seconds.pop("dedicated_small_large") > 1.1 * max(seconds.values())


def test_the_released_sample_has_the_statistics_of_its_header() -> None:
    prompt, output = BurstGPTSample(requests=1).draw(np.random.default_rng(0), 400_000)
    assert prompt.mean() == pytest.approx(363, rel=0.03)
    assert prompt.std() == pytest.approx(502, rel=0.03)
    assert output.mean() == pytest.approx(57, rel=0.03)
    assert output.std() == pytest.approx(154, rel=0.06)
    np.testing.assert_allclose(np.quantile(prompt, [0.25, 0.5]), [188, 217], atol=1)
    np.testing.assert_allclose(np.quantile(output, [0.25, 0.5, 0.75]), [7, 7, 33], atol=4)
    assert np.corrcoef(prompt, output)[0, 1] == pytest.approx(0.367, abs=0.02)


def test_the_barrier_tax_trace_has_the_papers_lengths_and_load() -> None:
    values = values_of("barrier_tax")
    options = {key: v for key, v in values["trace"].items() if key != "name"}
    _, output = LognormalLengths(**options).draw(np.random.default_rng(0), 400_000)
    survival = [(output > h).mean() for h in (10, 50, 100, 500, 1000)]
    np.testing.assert_allclose(survival, [0.95, 0.70, 0.50, 0.10, 0.03], atol=0.015)
    for changes in values["cases"].values():
        instances, rate = changes["cluster.instances"], changes["arrivals.rate"]
        busy = rate * output.mean() / (instances * values["cluster"]["slots"])
        assert busy == pytest.approx(0.7, abs=0.005)


def test_throughput_is_retimed_exactly() -> None:
    values = values_of("barrier_tax")
    values["cluster"] = {"instances": 3, "slots": 16}
    values["trace"] |= {"requests": 200, "output_max": 60}
    values["arrivals"]["rate"] = 0.4
    stepping = first_runs(plain(values))
    prompt, output = stepping["jsq"].requests.prompt, stepping["jsq"].requests.output
    totals = int(output.sum()), int((output * prompt + output * (output - 1) // 2).sum())
    for result in stepping.values():
        series = result.series
        assert len(series.step) == result.steps, "nothing is thinned"
        seconds = (series.load.max(axis=1) + 0.5 * series.load.mean(axis=1)).sum()
        figures = {"steps": result.steps, "imbalance": result.imbalance}
        retimed = retimed_throughput(figures, 3, totals, 0.5)
        assert retimed == pytest.approx(result.tokens / seconds)


def test_br0_with_ties_to_the_least_load_is_jsq_load() -> None:
    values = values_of("barrier_tax")
    values["trace"]["requests"] = 400
    results = first_runs(plain(values))
    instances = {label: result.requests.instance.tolist() for label, result in results.items()}
    assert instances["br0"] == instances["jsq_load"]
    assert instances["br0"] != instances["jsq"]


def written(tmp_path: Path, values: dict[str, Any], study: str) -> Any:
    path, out = tmp_path / "small.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(values))
    arguments = [study, "--config", str(path), "--out", str(out), "--workers", "1"]
    assert main(["papers", *arguments]) == 0
    cells = {cell: cell.stat().st_mtime_ns for cell in (out / "cells").iterdir()}
    assert main(["papers", *arguments]) == 0
    assert all(cell.stat().st_mtime_ns == written for cell, written in cells.items()), "resumed"
    assert (out / "table.md").read_text().startswith("| case |")
    assert list(out.glob("*.png"))
    return json.loads((out / "study.json").read_text())["rows"]


@pytest.mark.slow
def test_fcfs_grows_with_the_theorems(tmp_path: Path) -> None:
    values = values_of("bfio_theory")
    values["max_steps"] = 500
    values["arrivals"]["target"] = 300
    values["vary"] = {"cluster.instances": [4, 8], "cluster.slots": [8, 32]}
    kept = ("homogeneous", "geometric, drift 0")
    values["cases"] = {case: values["cases"][case] for case in kept}
    rows = written(tmp_path, values, "scaling")
    for case in kept:
        own = [row for row in rows if row["case"] == case]
        assert len(own) == 4
        grown = [row["baseline"] / (row["instances"] - 1) for row in own]
        assert 0.4 < fitted_slope([row["size"] for row in own], grown) < 1.4
        assert all(row["balanced"] < row["baseline"] / 3 for row in own)
    assert all(row["balanced"] < 3 for row in rows if row["case"] == "homogeneous")


def test_a_slope_is_fitted_to_what_is_finite() -> None:
    assert fitted_slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
    assert fitted_slope([1, 2, 4], [3, float("inf"), 48]) == pytest.approx(2)
    assert isnan(fitted_slope([1, 2], [float("inf"), 1.0]))


def test_what_overhead_dilutes_is_written(tmp_path: Path) -> None:
    values = values_of("barrier_tax") | {"seeds": 2}
    values["cases"] = {
        "G = 4": {"cluster.instances": 4, "arrivals.rate": 0.916, "trace.requests": 500}
    }
    rows = written(tmp_path, values, "barrier-tax")
    assert [row["policy"] for row in rows] == ["jsq", "jsq_load", "br0", "fast_phi"]
    for row in rows[1:]:
        gains = [row[f"gain_{b}"] for b in ("0", "0.3", "0.5", "1")]
        assert gains == sorted(gains, reverse=True)
        assert gains[-1] > 0
        assert row["max_minus_min"] < rows[0]["max_minus_min"]


def test_studies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["papers"]) == 0
    assert "barrier-tax" in capsys.readouterr().out
    assert main(["papers", "nothing"]) == 2
    assert "unknown name 'nothing'" in capsys.readouterr().err


def small(**changes: Any) -> dict[str, Any]:
    """A cluster that is overloaded at its second load, and two systems."""
    return values_of("fairbatching_node") | {
        "trace": values_of("fairbatching_node")["trace"] | {"requests": 150},
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


def test_systems_are_compared_by_their_peaks(tmp_path: Path) -> None:
    rows = written(tmp_path, small(), "fairbatching")
    assert len(rows) == 2 * 3 + 3
    for row in rows:
        instances = 2 if row["case"] == "two" else 1
        offered = row["offered_per_s"]
        assert 0.5 < offered / (row["load"] * instances) < 1.5
        assert row["effective"] <= offered
        assert (row["rejected"] > 0) <= (row["system"] == "fair")
    out = tmp_path / "out"
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
    for row in written(tmp_path, changed, "fairbatching"):
        assert row["offered_per_s"] == pytest.approx(row["load"])


def test_a_peak_is_the_most_over_the_loads() -> None:
    points = {1.0: 0.9, 2.0: 1.4, 3.0: 1.1}
    curve = LoadCurve(
        "case", "system", {}, {x: Summary({"effective": y}, {}, 1) for x, y in points.items()}
    )
    assert curve.peak == (1.4, 2.0)


@pytest.mark.parametrize(
    ("study", "changes", "message"),
    [
        ("barrier-tax", {"step_time": {"name": "bfio"}}, "a step a second"),
        ("barrier-tax", {"max_steps": 10}, "run to its end"),
        ("scaling", {"policies": ["fcfs"]}, "a baseline, and the policy"),
        ("scaling", {"cases": {}}, "cases: at least one"),
        ("fairbatching", {"baselines": ["vLLM"]}, "baselines: 'vLLM' is none of Sarathi, fair"),
        ("fairbatching", {"tuned": {"vLLM": {}}}, "tuned: 'vLLM' is none of"),
        ("fairbatching", {"case_loads": {"three": [1.0]}}, "case_loads: 'three' is none of one"),
        ("fairbatching", {"slo": None, "systems": {"Sarathi": {}}}, "slo and baselines"),
    ],
)
def test_what_a_study_cannot_do_is_refused(
    tmp_path: Path,
    study: str,
    changes: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"scaling": "bfio_theory", "barrier-tax": "barrier_tax"}
    values = small() if study == "fairbatching" else values_of(names[study])
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(values | changes))
    assert main(["papers", study, "--config", str(path), "--out", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err

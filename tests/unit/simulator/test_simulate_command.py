"""`headway simulate`, with ``--vary`` and without, as a user meets it."""

import csv
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from checked_commands import exit_status

from rescheduler.simulator.config.simulation_config import (
    ArrivalsConfig,
    PoolConfig,
    SimulationConfig,
    read_config,
)
from rescheduler.simulator.experiments.workers import cells_of, groups, run_cell, run_locally
from rescheduler.simulator.simulation import create_candidates, run, run_setup

ROOT = Path(__file__).parents[3]
SMALL = {
    "cluster": {"instances": 2, "slots": 4},
    "trace": {"name": "geometric", "requests": 60, "mean_prompt": 50, "mean_output": 20.0},
    "policies": ["fcfs", {"name": "bfio", "horizon": 5}],
    "seeds": 2,
}


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return str(path)


def test_policies_are_compared(
    tmp_path: Path, small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, again = tmp_path / "a" / "x.json", tmp_path / "x.json"
    for path in (first, again):
        assert exit_status("simulate", "--config", small, "--json", path) == 0
    assert first.read_text() == again.read_text(), "the same command, the same figures"
    printed = capsys.readouterr().out
    assert "| fcfs |" in printed and "| bfio |" in printed
    written = json.loads(first.read_text())
    assert list(written) == ["_about", "fcfs", "bfio"]
    for policy in ("fcfs", "bfio"):
        figures = written[policy]
        for name in ("imbalance", "throughput", "tpot", "energy"):
            assert figures[name] > 0
            assert figures["ci95"][name] >= 0
        assert figures["runs"] == 2
    assert written["bfio"]["imbalance"] < written["fcfs"]["imbalance"]
    assert written["_about"]["config"]["cluster"]["slots"] == 4
    assert {"machine", "versions", "commit"} <= set(written["_about"])


def test_every_request_is_in_the_folder(tmp_path: Path, small: str) -> None:
    out = tmp_path / "out"
    assert exit_status("simulate", "--config", small, "--out", out) == 0
    names = {"requests.parquet", "results.json", "table.md"}
    names |= {"comparison.png", "loads.png", "power.png"}
    assert {path.name for path in out.iterdir()} == names
    table = pq.read_table(out / "requests.parquet")
    assert len(table) == 2 * 2 * 60
    counts = table.group_by(["policy", "seed"]).aggregate([("number", "count_distinct")])
    assert counts["number_count_distinct"].to_pylist() == [60] * 4
    rows = table.to_pylist()
    assert all(row["arrival"] <= row["placed"] <= row["start"] < row["end"] for row in rows)
    assert "![loads](loads.png)" in (out / "table.md").read_text()


def test_a_trace_says_which_client_sent_each_request(tmp_path: Path) -> None:
    rows = "".join(f"{i / 9},5,{i % 4 + 1},{'ab'[i % 2]}\n" for i in range(40))
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens,client\n" + rows)
    values = {
        "cluster": {"instances": 1, "slots": 2},
        "trace": {"path": str(trace)},
        "arrivals": {"kind": "trace"},
        "policies": "fcfs",
        "seeds": 1,
    }
    config = tmp_path / "clients.yaml"
    config.write_text(yaml.safe_dump(values))
    out = tmp_path / "out"
    assert exit_status("simulate", "--config", config, "--out", out) == 0
    requests = pq.read_table(out / "requests.parquet").to_pylist()
    assert all(request["client"] == request["number"] % 2 for request in requests)
    figures = json.loads((out / "results.json").read_text())["fcfs"]
    assert figures["latency_worst_client"] >= figures["latency_of_clients"] > 0


def test_a_folder_of_something_else_is_left_alone(
    tmp_path: Path, small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run = ("simulate", "--config", small, "--seeds", "1", "--out", out)
    assert exit_status(*run) == 0
    assert exit_status(*run) == 0, "an earlier simulation is replaced"
    (out / "results.json").unlink()
    assert exit_status(*run) == 1
    assert "not empty, and not written by `headway simulate`" in capsys.readouterr().err
    assert not (out / "results.json").exists()
    assert exit_status(*run, "--overwrite") == 0
    assert (out / "results.json").exists()
    assert exit_status("simulate", "--config", small, "--out", small) == 1
    assert "not a folder" in capsys.readouterr().err


def test_keys_are_overridden_on_the_command_line(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--cluster.instances", "32", "--trace.requests", "7", "--policies", "jsq,br0"]
    given += ["--slo.ttft_s", "1", "--slo.tpot_s", "0.1", "--drift", "[0,2]"]
    assert exit_status("simulate", "--config", small, *given, "--print_config") == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["cluster"]["instances"] == 32
    assert printed["cluster"]["slots"] == 4
    assert printed["trace"] == SMALL["trace"] | {"requests": 7}
    assert printed["policies"] == "jsq,br0"
    assert printed["slo"]["ttft_s"] == 1.0 and printed["slo"]["tpot_s"] == 0.1
    assert printed["drift"] == [0, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster.instances", "0"], "cluster.instances must be at least 1, not 0"),
        (["--policies", "[{name: bfio, horizn: 3}]"], "policies.0: bfio has no option 'horizn'"),
        (["--trace", "{path: nowhere.csv}"], "trace: nowhere.csv"),
        (["--forecast.name", "none"], "bfio needs forecasts"),
    ],
)
def test_a_mistake_is_one_line(
    small: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status("simulate", "--config", small, *arguments) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("headway simulate: ")
    assert message in error


FAIR: dict[str, Any] = {
    "clock": "independent",
    "dispatch": "instant",
    "prefill": {"kind": "chunked", "formation": "fairbatching"},
    "step_time": {"name": "batch", "a": 0.01, "b": 1e-4, "c": 1e-7},
    "arrivals": {"kind": "poisson", "rate": 5.0},
    "slo": {"ttft_s": 0.5, "tpot_s": 0.05},
}
"""Batches by what requests were promised."""
AT_ONCE = {"dispatch": "instant", "arrivals": {"kind": "poisson", "rate": 1}}
FAIRLY = [{"name": "fcfs", "fairness": 0.5}]
NOTHING = {"forecast": {"name": "none"}}


def moving(*planners: Any, **options: Any) -> dict[str, Any]:
    return AT_ONCE | {"clock": "independent", "migration": {"planners": [*planners], **options}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cluster": {"slots": 0}}, "cluster.slots must be at least 1, not 0"),
    ({"cluster": {"kv_capacity": 0}}, "cluster.kv_capacity must be at least 1"),
    ({"cluster": {"instances": "x"}}, "cluster.instances"),
    ({"clutser": {"instances": 3}}, "clutser.instances"),
    ({"pool": {"limit": 0}}, "pool.limit must be at least 1"),
    ({"pool": {"limit": 3}}, "give arrivals.target"),
    ({"prefill": {"instances": 0}}, "prefill.instances must be at least 1"),
    ({"prefill": {"kind": "stage"}}, "prefill.kind: a stage needs arrivals in time"),
    ({"arrivals": {"rate": 0}}, "arrivals.rate must be above 0"),
    ({"arrivals": {"target": 0}}, "arrivals.target must be at least 1"),
    ({"arrivals": {"kind": "poisson", "target": 3}}, "target is for .*revelation; give pool.limit"),
    ({"arrivals": {"kind": "trace"}}, "arrivals.kind: trace, but .* has no arrival times"),
    ({"dispatch": "instant"}, "dispatch: instant needs arrivals in time"),
    ({"seeds": 0}, "seeds must be at least 1"),
    ({"max_steps": 0}, "max_steps must be at least 1"),
    ({"max_seconds": 0.0}, "max_seconds must be above 0"),
    ({"drift": []}, "drift: at least one number"),
    ({"drift": [1, -1]}, "drift: .* none below 0"),
    ({"policies": " , "}, "policies: at least one"),
    ({"policies": "fcfs,jsk"}, "policies.1: no routing policy 'jsk'; known: "),
    ({"policies": ["jsq", "jsq"]}, "policies.1.label: there already is"),
    ({"policies": [{"horizon": 3}]}, "policies.0: a policy's name"),
    ({"step_time": {}}, "step_time.name is missing"),
    ({"trace": {"requests": 3}}, "trace: give either the name"),
    (SMALL | {"cluster": {"kv_capacity": 20}}, "raise cluster.kv_capacity or leave it out"),
    (FAIR | {"clock": "barrier"}, "prefill.formation: fairbatching needs clock: independent"),
    (FAIR | {"batching": "bin_packing"}, "needs batching: fcfs"),
    (FAIR | {"migration": {"planners": ["star"]}}, "not simulated with migration"),
    (FAIR | {"prefill": {"kind": "none", "formation": "fairbatching"}}, "of prefill.kind chunked"),
    (FAIR | {"prefill": FAIR["prefill"] | {"token_budget": 9}}, "fairbatching has none"),
    (FAIR | {"prefill": FAIR["prefill"] | {"expected_context": 9}}, "of .* fairbatching_tokens"),
    (FAIR | {"slo": None}, "prefill.formation: fairbatching needs slo"),
    (FAIR | {"step_time": {"name": "moe", "a": 1e-6}}, "step_time: {name: batch, a, b, c}"),
    (FAIR | {"admission": {"pab": True}, "dispatch": "pool"}, "admission.pab: of dispatch instant"),
    (FAIR | {"admission": {"pab": True}, "prefill": {"kind": "none"}}, "pab needs .*kind: chunked"),
    (
        FAIR | {"slo": None, "prefill": {"kind": "chunked"}, "policies": "pab"},
        "a policy that goes by prefill budgets needs slo",
    ),
    ({"orders": "shortes"}, "orders.0: no order of service 'shortes'"),
    ({"orders": [{"name": "boost", "gamma": -1}]}, "orders.0: boost: gamma must be above 0"),
    ({"orders": [{"name": "boost", "fairness": 1.5}]}, "boost: fairness must be .* at most 1"),
    ({"orders": "boost,boost"}, "orders"),
    (AT_ONCE | {"orders": "boost"}, "orders: with dispatch instant no request waits at the"),
    (AT_ONCE | {"orders": FAIRLY}, "orders: with dispatch instant no request waits at the"),
    (NOTHING | {"orders": FAIRLY, "policies": "jsq"}, "fcfs needs forecasts"),
    (NOTHING | {"orders": "shortest", "policies": "jsq"}, "shortest needs .*or another order"),
    (moving("magic"), "migration.planners.0: no migration policy 'magic'"),
    (moving("none", {"name": "star", "theta": -1.0}), "migration.planners.1: theta must be"),
    (moving({"name": "none", "theta": 1.0}), "migration.planners.0"),
    (moving("star", "star"), "migration.planners.1.label: there already is"),
    (moving(), "migration.planners: at least one"),
    (moving("star", interval=0), "migration.interval must be at least 1"),
    (moving({"name": "star", "forecast": {"name": "x"}}), "migration.planners.0.forecast"),
    (moving("survival") | NOTHING, "survival needs forecasts, but"),
]
SECTIONS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "power": [
        ({"idle": 500.0}, "power: 0 <= idle <= max, not 500.0 and 400.0"),
        ({"idle": -1.0}, "power: 0 <= idle"),
        ({"gamma": 0.0}, "power.gamma must be above 0, not 0.0"),
        ({"mfu_sat": float("nan")}, "power.mfu_sat must be above 0"),
        ({"peak_flops": float("inf")}, "power.peak_flops must be above 0"),
    ],
    "step_time": [
        ({"name": "roofline"}, "no model 'roofline'; known: bfio, moe, batch, profile, table"),
        ({"name": "batch", "a": 0.01}, "missing 2 required"),
        ({"name": "batch", "a": 0.01, "b": -1e-4, "c": 0.0}, "must not be below 0"),
        ({"name": "batch", "a": 0.0, "b": 0.0, "c": 0.0}, "not all 0"),
        ({"name": "batch", "a": "fast", "b": 0.0, "c": 0.0}, "not supported between"),
        ({"name": "moe", "a": float("nan")}, "must not be below 0"),
        ({"name": "bfio", "speed": 2}, "unexpected keyword argument 'speed'"),
        ({"name": "table", "path": "no such file.csv"}, "no such file.csv"),
        ({"name": "table", "path": "x.csv", "knots": 1}, "knots must be at least 2"),
    ],
    "trace": [
        ({"name": "geometrik"}, "no generator 'geometrik'; known: burstgpt_like, burstgpt_sample"),
        ({"name": "star", "path": "x"}, "either the name of a generator or the path of a file"),
        ({"name": "star", "median": 3}, "star has no option 'median'; it takes: requests, dataset"),
        ({"name": "replay"}, "replay needs the option 'recording'"),
        ({"name": "star", "requests": 0}, "star: requests must be at least 1, not 0"),
        ({"name": "star", "requests": 1.5}, "star: requests must be a whole number, not 1.5"),
        ({"name": "star", "dataset": "c4"}, "star: dataset is 'sharegpt' or 'alpaca', not 'c4'"),
        ({"name": "geometric", "mean_output": 0.5}, "mean_output must be at least 1, not 0.5"),
        ({"name": "geometric", "prompts": "zipf"}, "prompts is 'uniform' or 'geometric', not 'zi"),
        ({"name": "lognormal", "output_sigma": -1}, "output_sigma must be at least 0, not -1"),
        ({"name": "burstgpt_like", "subset": "api"}, "subset is 'all' or 'gpt4_conversation', not"),
        ({"name": "five_tasks", "shares": [1, 2]}, "shares are 5 numbers"),
        ({"name": "five_tasks", "drift_to": [0, 0, 0, 0, 0]}, "drift_to are 5 numbers"),
        ({"name": "five_tasks", "longest": 900}, "longest must exceed"),
        ({"name": "mixed_classes", "scenario": "ll"}, "scenario is one of 'lh_hl_random', "),
    ],
    "forecast": [
        ({"name": "orakle"}, "no forecast 'orakle'; known: binned, classified, interval, kaplan_"),
        ({"name": "oracle", "sigma": 1}, "oracle has no option 'sigma'; it takes: none"),
        ({"name": "noisy"}, "noisy needs the option 'sigma'"),
        ({"name": "noisy", "sigma": -1}, "noisy: sigma must be at least 0, not -1"),
        ({"name": "noisy", "sigma": 1, "interval": 0}, "noisy: interval must be at least 1, not 0"),
        ({"name": "interval", "k": 0.5}, "interval: k must be a whole number, not 0.5"),
        ({"name": "binned"}, "binned: give either bins .2, 4, 6. or edges"),
        ({"name": "binned", "bins": 4, "edges": [0, 3]}, "binned: give either bins"),
        ({"name": "binned", "bins": 3}, "binned: bins is 2, 4, 6, not 3"),
        ({"name": "binned", "edges": [0, 5, 5]}, r"edges must ascend from 0, not \[0, 5, 5\]"),
        ({"name": "binned", "bins": 2, "sigma": -1}, "binned: sigma must be at least 0"),
        ({"name": "classified", "edges": [1, 5]}, "ascend from 0"),
        ({"name": "classified", "accuracy": 1.5}, "accuracy must be at least 0 and at most 1"),
        ({"name": "replay", "recording": "nowhere"}, "nowhere: cannot be read"),
    ],
}
REFUSED += [({section: row[0]}, row[1]) for section, rows in SECTIONS.items() for row in rows]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_what_means_nothing_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        for policy, planner, setup, order in create_candidates(
            run_setup(read_config(values))
        ).values():
            run(setup, policy, 0, planner=planner, order=order)
    assert "\n" not in str(refused.value)


def test_the_pool_is_four_requests_an_instance_unless_said() -> None:
    assert SimulationConfig().pool_limit == 64
    assert SimulationConfig(arrivals=ArrivalsConfig(target=128)).pool_limit == 128
    poisson = ArrivalsConfig("poisson")
    assert SimulationConfig(arrivals=poisson, pool=PoolConfig(7)).pool_limit == 7


@pytest.mark.parametrize(
    "path",
    sorted([*ROOT.glob("configs/simulate/*.yaml"), *ROOT.glob("configs/papers/star_*.yaml")]),
    ids=lambda path: path.name,
)
def test_shipped_configurations_describe_something(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # which the files that they name are relative to
    values = yaml.safe_load(path.read_text())
    vary, cases = values.pop("vary", {}), values.pop("cases", {"as it is": {}})
    if str(values["trace"].get("path", "")).startswith("traces/"):  # whoever uses it puts it there
        rows = "".join(f"{second},{100 + second},{200 + second}\n" for second in range(50))
        (tmp_path / "trace.csv").write_text("arrival_s,input_tokens,output_tokens\n" + rows)
        values["trace"]["path"] = str(tmp_path / "trace.csv")
    config = read_config(values)
    assert len(create_candidates(run_setup(config))) > 1
    for changes in cases.values():
        found = groups(config, {key: [value] for key, value in changes.items()} | vary)
        create_candidates(run_setup(read_config(found[0].cells[0].config)))


@pytest.mark.slow
def test_ctrl_c_keeps_the_finished_runs(tmp_path: Path, small: str) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "rescheduler", "simulate", "--config", small]
    command += ["--seeds", "1000000", "--out", str(out)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        # A job that a shell has put in the background ignores SIGINT, and so would its child.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while process.poll() is None and not _has_rows(out):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode == 130, said
    assert "of 2000000 runs" in said
    results = json.loads((out / "results.json").read_text())
    runs = results["fcfs"]["runs"], results["bfio"]["runs"]
    assert runs[0] - runs[1] in (0, 1), "seeds come first, so that policies stay comparable"
    assert len(pq.read_table(out / "requests.parquet")) == 60 * sum(runs)


def _has_rows(out: Path) -> bool:
    return any(path.stat().st_size > 20_000 for path in out.glob(".requests.parquet.*.tmp"))


def sweep(small: str, out: Path, *arguments: str) -> int:
    return exit_status("simulate", "--config", small, "--out", out, "--workers", "2", *arguments)


def rows_of(out: Path) -> list[dict[str, str]]:
    with (out / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_sweep_resumes_and_grows(
    tmp_path: Path, small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert sweep(small, out, "--vary", "policies.bfio.horizon=[0, 5]") == 0
    rows = rows_of(out)
    assert [(row["policy"], row["policies.bfio.horizon"]) for row in rows] == [
        ("fcfs", "0"),
        ("bfio", "0"),
        ("fcfs", "5"),
        ("bfio", "5"),
    ]
    assert rows[0]["imbalance"] == rows[2]["imbalance"], "fcfs looks at no horizon: computed once"
    assert float(rows[1]["imbalance"]) != float(rows[3]["imbalance"])
    assert exit_status("simulate", "--config", small, "--json", tmp_path / "x.json") == 0
    simulated = json.loads((tmp_path / "x.json").read_text())
    assert [float(row["imbalance"]) for row in rows[2:]] == [
        simulated[row["policy"]]["imbalance"] for row in rows[2:]
    ], "a cell alone is what simulate gives"
    written = {path: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}
    assert len(written) == 6
    capsys.readouterr()

    assert sweep(small, out, "--vary", "policies.1.horizon=[0,5,7]") == 0
    assert "6 of 8 cells are done already" in capsys.readouterr().err
    assert all(path.stat().st_mtime_ns == written[path] for path in written)
    assert len(rows_of(out)) == 6
    document = json.loads((out / "sweep.json").read_text())
    assert document["_about"]["vary"] == {"policies.1.horizon": [0, 5, 7]}
    assert document["rows"][-1]["varied"] == {"policies.1.horizon": 7}
    assert document["rows"][-1]["runs"] == 2


def test_a_cell_that_fails_does_not_lose_the_others(
    tmp_path: Path, small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ("--policies", "jsq", "--seeds", "1", "--vary", "cluster.kv_capacity=[10, 9999]")
    assert sweep(small, out, *arguments) == 1
    assert [row["cluster.kv_capacity"] for row in rows_of(out)] == ["9999"]
    error = capsys.readouterr().err
    assert "jsq, cluster.kv_capacity=10, seed 0: ValueError: request " in error
    assert "1 of 2 cells are missing" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vary", "cluster.instanzes=[1]"], "cluster.instanzes"),
        (["--vary", "clutser.instances=[1]"], "vary.clutser.instances: there is no clutser"),
        (["--vary", "cluster.instances=3"], "cluster.instances: a list of values such as [3], not"),
        (["--vary", "policies.bfoi.horizon=[1]"], "no policy 'bfoi'; there are: fcfs, bfio"),
        (["--vary", "clock.speed=[1]"], "vary.clock.speed: clock has no keys of its own"),
        (["--vary", "cluster.instances=[0]"], "vary: cluster.instances = 0: cluster.instances m"),
        (["--vary", "cluster.instances"], "expected KEY=VALUE"),
        (["--workers", "0"], "workers must be at least 1"),
    ],
)
def test_a_sweep_over_nothing_is_one_line(
    tmp_path: Path,
    small: str,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_status("simulate", "--config", small, "--out", tmp_path / "out", *arguments) in (
        1,
        2,
    )
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_ray_it_is_said_how_to_get_it(
    tmp_path: Path, small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert sweep(small, tmp_path / "out", "--ray", "auto") == 1
    assert "pip install ray" in capsys.readouterr().err


def kill_children(stop: threading.Event, at_most: int) -> None:
    killed: set[int] = set()
    while not stop.wait(0.02) and len(killed) < at_most:
        for child in multiprocessing.active_children():
            if child.pid is not None and child.pid not in killed:
                os.kill(child.pid, signal.SIGKILL)
                killed.add(child.pid)
                break


@pytest.mark.parametrize(("at_most", "lost"), [(1, 0), (1000, 1)])
def test_a_killed_worker_loses_only_what_kills_it_again(at_most: int, lost: int) -> None:
    config = read_config(SMALL | {"policies": "jsq", "seeds": 4 if lost == 0 else 1})
    cells = cells_of(groups(config, {}))
    stop = threading.Event()
    killer = threading.Thread(target=kill_children, args=(stop, at_most))
    outcomes = run_locally(cells, 2, run_cell, first_alone=True)
    killer.start()
    try:
        found = {cell.seed: outcome for cell, outcome in outcomes}
    finally:
        stop.set()
        killer.join()
    assert set(found) == {cell.seed for cell in cells}
    died = [outcome for outcome in found.values() if isinstance(outcome, str)]
    assert died == ["its process died; was it out of memory?"] * lost

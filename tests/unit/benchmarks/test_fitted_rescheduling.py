"""The simulation of a live measurement: its steps are the live ones, and its verdict can fail."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import fitted_rescheduling, live_rescheduling
from benchmarks.support.forecast_log import write_forecasts
from benchmarks.support.live_fit import StepFit, fitted_steps, step_samples
from benchmarks.support.live_machine import Machine, read_machine
from rescheduler.simulator.workloads.forecast_recording import read_recording
from rescheduler.telemetry.forecast_batch import ForecastBatch

MACHINE = Machine(0.3, 0.03, 0.02, 0.8, 0.08, 0.3, 0.1)
FIT = StepFit(0.02, 0.006, 2e-5, 1.0)


def served(
    requests: int = 24, moves: bool = True, preempted_seconds: float = 0.0, burst: int = 1
) -> dict[str, Any]:
    """What two engines whose steps take as long as `FIT` says leave behind.

    Some requests are moved after 40 tokens, and others are preempted after 60. Tokens come in
    bursts.
    """
    generator = np.random.default_rng(3)
    rows = [
        {
            "name": f"r{i}",
            "arrives": 0.4 * i,
            "max_tokens": 300,
            "prompt": int(generator.integers(20, 80)),
            "tokens": int(generator.integers(5, 200)),
            "finish_reason": "stop",
            "error": "",
            "text": "",
            "times": [],
        }
        for i in range(requests)
    ]
    placements = [
        {"seconds": one["arrives"], "request": one["name"], "target": f"decode-{i % 2}"}
        for i, one in enumerate(rows)
    ]
    where = {one["request"]: one["target"] for one in placements}
    moved, clocks = [], {"decode-0": 0.0, "decode-1": 0.0}
    preempted_until = {one["name"]: 0.0 for one in rows}
    while any(one["times"][-1:] == [] or one["times"][-1][0] < one["tokens"] for one in rows):
        engine = min(clocks, key=clocks.__getitem__)
        now = clocks[engine]
        here = [
            one
            for one in rows
            if where[one["name"]] == engine
            and max(one["arrives"], preempted_until[one["name"]]) <= now
            and len(one["times"]) < one["tokens"]
        ]
        context = sum(one["prompt"] + len(one["times"]) for one in here)
        seconds = FIT.a + FIT.b * len(here) + FIT.c * context if here else 0.01
        clocks[engine] = now + seconds
        for one in here:
            one["times"].append([len(one["times"]) + 1, now + seconds])
            if len(one["times"]) == 60 and int(one["name"][1:]) % 3 == 1:
                preempted_until[one["name"]] = now + seconds + preempted_seconds
            if moves and len(one["times"]) == 40 and int(one["name"][1:]) % 3 == 0:
                other = "decode-1" if engine == "decode-0" else "decode-0"
                where[one["name"]] = other
                moved.append(
                    {
                        "seconds": now + seconds - 0.001,
                        "took": 0.001,
                        "request": one["name"],
                        "source": engine,
                        "target": other,
                        "outcome": "moved",
                    }
                )
    for number, one in enumerate(rows):
        times = [at for _, at in one["times"]]
        ends = range(number % burst, len(times), burst)  # of bursts, at other tokens in each
        times = [times[next((end for end in ends if end >= i), -1)] for i in range(len(times))]
        one["times"] = [[i + 1, round(at, 3)] for i, at in enumerate(times)]
        one["ended"], one["ttft"] = times[-1], times[0] - one["arrives"]
        one["tpot"] = (times[-1] - times[0]) / (len(times) - 1)
        one["longest_gap"] = float(np.diff(times).max())
    return {
        "requests": rows,
        "placements": placements,
        "moves": moved,
        "seconds": max(one["ended"] for one in rows),
        "ttft_p99": float(np.percentile([one["ttft"] for one in rows], 99)),
        "tpot_p99": float(np.percentile([one["tpot"] for one in rows], 99)),
        "preemptions": 0.0,
        "migrations": len(moved),
    }


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("preempted_seconds", [0.0, 3.0])
@pytest.mark.parametrize("burst", [1, 3])
def test_the_fit_finds_the_steps_of_the_engines_again(
    moves: bool, preempted_seconds: float, burst: int
) -> None:
    found = fitted_steps(step_samples(served(24, moves, preempted_seconds, burst)))
    for context, running in ((200, 2), (600, 6)):
        true = FIT.a + FIT.b * running + FIT.c * context
        assert found.a + found.b * running + found.c * context == pytest.approx(true, rel=0.03)
    assert found.explained > 0.8


def test_runs_too_short_to_time_a_step_are_named() -> None:
    with pytest.raises(ValueError, match="no request got enough tokens on one engine"):
        fitted_steps(step_samples({"requests": [], "placements": [], "moves": []}))


def recording(folder: Path, requests: list[dict[str, Any]]) -> None:
    """Forecasts every 7 tokens of each request, but for the shortest: none came in time."""
    edges = (0, 10, 100, 400)
    batches = [
        ForecastBatch(
            "decode-0",
            edges,
            (f"chatcmpl-{one['name']}",),
            np.array([one["prompt"]]),
            np.array([one["prompt"] + at]),
            np.array([one["max_tokens"] - at]),
            np.array([[65_535, 60_000 - 100 * at, 20_000, 0]], dtype=np.uint16),
        )
        for one in requests
        if one["tokens"] > 10
        for at in range(7, one["tokens"], 7)
    ]
    write_forecasts(folder / "forecasts.parquet", batches, requests, 10)


def test_a_recorded_forecast_is_the_one_made_closest(tmp_path: Path) -> None:
    requests = served()["requests"]
    recording(tmp_path, requests)
    found = read_recording(tmp_path / "forecasts.parquet")
    assert found.output.tolist() == [one["tokens"] for one in requests]
    long = int(found.output.argmax())
    rows = found.curves[found.first_row[long] :][: found.n_rows[long]]
    made = [7, 7, 21, 28, 42]  # closest to 0, 10, 20, 30, 40
    np.testing.assert_allclose(rows[:5, 1], (60_000 - 100 * np.array(made)) / 65_535, atol=1e-4)
    short = int(found.output.argmin())
    assert found.output[short] <= 10
    mean = found.output.mean()
    np.testing.assert_allclose(
        found.curves[found.first_row[short]], np.exp(-found.edges / mean), atol=1e-4
    )


def test_every_arm_is_simulated_on_the_requests_that_were_served(tmp_path: Path) -> None:
    result = served()
    folder = tmp_path / "load-90" / "round-0"
    folder.mkdir(parents=True)
    recording(folder, result["requests"])
    (tmp_path / "machine.json").write_text(json.dumps(asdict(MACHINE)))
    for name in live_rescheduling.ARMS:
        arm = live_rescheduling.arm_of(name, MACHINE, 0.1)
        settings = live_rescheduling.settings_of(arm, [])
        kept = {"settings": settings, "result": result}
        (folder / f"{name}.json").write_text(json.dumps(kept))
    (found,) = fitted_rescheduling.read_rounds(tmp_path, list(live_rescheduling.ARMS))
    assert (found.load, found.number) == (0.9, 0)
    tokens = sum(one["tokens"] for one in result["requests"])
    moved = {}
    for name in found.results:
        simulated = fitted_rescheduling.simulate(found, name, MACHINE, FIT)
        assert simulated.tokens == tokens
        assert len(simulated.requests.end) == len(result["requests"])
        moved[name] = simulated.migrations
    assert moved["jsq_load"] == moved["reserve"] == moved["headroom"] == 0
    assert moved["star_no_prediction"] > 0
    assert moved["star"] > 0
    assert moved["survival"] > 0
    live, values = fitted_rescheduling.values_of([found], MACHINE, FIT)
    assert live.keys() == values.keys()
    latency = fitted_rescheduling.reserve_latencies([found], MACHINE, FIT)
    at_ten = fitted_rescheduling.simulate(found, "reserve", MACHINE, FIT).requests
    assert latency[0.1] == pytest.approx((at_ten.end - at_ten.arrival).mean(), abs=1e-3)


def test_arms_of_a_round_that_served_other_requests_are_not_compared(tmp_path: Path) -> None:
    for arm, requests in (("jsq_load", "one"), ("reserve", "other")):
        kept = {"settings": {"requests": requests, "engine": {}}, "result": {}}
        file = live_rescheduling.Run(0.9, 0, arm).file(tmp_path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(kept))
    with pytest.raises(ValueError, match="round-0: its arms served other requests"):
        fitted_rescheduling.read_rounds(tmp_path, ["jsq_load", "reserve"])


def test_a_damaged_measurement_of_the_machine_is_named(tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text('{"alone_ttft": 1.0}')
    with pytest.raises(ValueError, match="damaged, remove it to measure anew"):
        read_machine(tmp_path)


def test_a_certain_difference_of_the_other_sign_is_found() -> None:
    """Live, `star` preempts 5 fewer; simulated 5 fewer, then 5 more. TTFT is not certain live."""

    def values(difference: float, ttft: float) -> fitted_rescheduling.Values:
        noise = [0.0, 0.3, -0.2]
        rows = {
            "goodput": (1.0, 1.0),
            "tpot_p99": (0.2, 0.2),
            "migrations": (0.0, 9.0),
            "preemptions": (10.0, 10.0 + difference),
            "ttft_p99": (3.0, 3.0 + ttft),
        }
        return {
            (0.9, arm, name): {i: pair[j] + j * noise[i] for i in range(3)}
            for name, pair in rows.items()
            for j, arm in enumerate(("jsq_load", "star"))
        }

    live = values(-5.0, 0.1)
    _, wrong = fitted_rescheduling.compared(live, values(-5.0, -0.4))
    assert wrong == []
    figures, wrong = fitted_rescheduling.compared(live, values(5.0, 0.1))
    assert len(wrong) == figures["wrong_signs"] == 1
    assert "star - jsq_load, preemptions" in wrong[0]

"""The figures of a run, worked out by hand, and how they are reported."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from rescheduler.simulator.config.simulation_config import PowerConfig, SimulationConfig, SLOConfig
from rescheduler.simulator.engine.step_metrics import load_watts, mfu_watts, power_model, watts
from rescheduler.simulator.results.metrics import (
    LoadSeries,
    RequestRecords,
    RunResult,
    Summary,
    histogram_quantile,
    run_metrics,
    summarise,
    time_per_output_token,
)
from rescheduler.simulator.results.report import (
    about,
    document,
    draw_comparison,
    draw_loads,
    draw_power,
    markdown_report,
    save_figure,
    terminal_table,
)

# A run that was never simulated, small enough to work out by hand.


def requests(**columns: Any) -> RequestRecords:
    """Three requests: 1, 3 and 5 tokens, arrived at 0, 0 and 1 second."""
    given: dict[str, Any] = {
        "number": [0, 1, 2],
        "instance": [0, 1, 0],
        "arrival": [0.0, 0.0, 1.0],
        "placed": [0.5, 0.5, 2.0],
        "start": [1.0, 1.0, 2.0],
        "first_token": [2.0, 2.0, 4.0],
        "end": [2.0, 6.0, 10.0],
        "prompt": [10, 20, 30],
        "output": [1, 3, 5],
        "preemptions": [0, 0, 1],
        "migrations": [0, 0, 0],
        "tpot_worst": [np.nan, np.nan, np.nan],
        "client": [0, 0, 0],
        **columns,
    }
    return RequestRecords(**{name: np.array(values) for name, values in given.items()})


def run_result(policy: str = "fcfs", **changes: Any) -> RunResult:
    steps = np.arange(8)
    load = np.stack([10 * steps, 5 * steps], axis=1)
    result = RunResult(
        policy=policy,
        seed=0,
        n_instances=2,
        requests=requests(),
        prefilled_first_token=False,
        steps=8,
        seconds=10.0,
        busy_seconds=9.0,
        tokens=9,
        imbalance=17.5,
        max_minus_min=17.5,
        idle_share=0.25,
        execution_variance=4e-6,
        most_held=70,
        energy_load_joules=5000.0,
        energy_mfu_joules=3000.0,
        preemptions=1,
        migrations=0,
        decisions=2,
        plans=0,
        itl_histogram=np.array([0, 4, 0, 2, 0]),
        itl_edges=np.array([0.25, 0.5, 1.0, 2.0, 4.0, 8.0]),
        series=LoadSeries(
            steps,
            steps * 1.25,
            load,
            np.full(8, 2),
            np.linspace(300.0, 400.0, 8),
            np.full(8, 4e-6),
            load.max(axis=1),
            np.minimum(steps, 1),
            np.zeros(8, dtype=np.int64),
        ),
    )
    return replace(result, **changes)


def test_figures_of_requests_that_come_prefilled() -> None:
    figures = run_metrics(run_result())
    assert figures["throughput"] == pytest.approx(0.9)
    assert figures["requests_per_s"] == pytest.approx(0.3)
    assert figures["latency"] == pytest.approx(np.mean([2, 6, 9]))
    assert figures["ttft"] == pytest.approx(np.mean([2, 2, 3]))
    assert figures["ttft_p50"] == pytest.approx(2.0)
    # Paper 000, equation (9): (1, 5, 8 seconds) / (1, 3, 5 tokens).
    assert figures["tpot"] == pytest.approx(np.mean([1, 5 / 3, 8 / 5]))
    assert figures["wait"] == pytest.approx(1.0)
    assert figures["wait_p99"] == pytest.approx(1.0)
    assert (figures["energy"], figures["energy_mfu"]) == (5000.0, 3000.0)
    assert (figures["makespan"], figures["steps"], figures["preemptions"]) == (10.0, 8.0, 1.0)
    assert "goodput" not in figures
    assert all(type(value) is float for value in figures.values())


def test_after_a_simulated_prefill_the_first_token_is_not_decoded() -> None:
    tpot = time_per_output_token(requests(), prefilled_first_token=True)
    np.testing.assert_allclose(tpot, [np.nan, (6 - 2) / 2, (10 - 4) / 4])
    figures = run_metrics(run_result(prefilled_first_token=True))
    assert figures["tpot"] == pytest.approx(1.75), "over the two requests that have one"


@pytest.mark.parametrize(
    ("ttft", "tpot", "met"),
    [(2.5, 2.5, 2), (2.5, 1.9, 1), (1.0, 9.0, 0), (9.0, 9.0, 3), (2.0, 2.0, 2)],
)
def test_goodput_counts_requests_that_meet_both_objectives(
    ttft: float, tpot: float, met: int
) -> None:
    result = run_result(prefilled_first_token=True)
    assert run_metrics(result, SLOConfig(ttft, tpot))["goodput"] == pytest.approx(met / 10)
    with pytest.raises(ValueError, match=r"slo\.ttft_s must be above 0"):
        SLOConfig(0.0, 1.0)


def test_inter_token_latency_is_read_off_the_histogram() -> None:
    figures = run_metrics(run_result())
    # 4 of 6 in (0.5, 1], 2 in (2, 4]: log-linear inside.
    assert figures["itl_p50"] == pytest.approx(0.5 * 2**0.75)
    assert figures["itl_p95"] == pytest.approx(2 * 2 ** ((0.95 * 6 - 4) / 2))
    assert figures["itl"] == pytest.approx((4 * math.sqrt(0.5) + 2 * math.sqrt(8)) / 6)


def test_fine_histograms_give_the_quantiles_of_the_values() -> None:
    values = np.random.default_rng(3).lognormal(-4, 1, 50_000)
    edges = np.geomspace(1e-5, 1e5, 1601)
    counts = np.histogram(values, edges)[0]
    levels = [0.0, 0.01, 0.5, 0.95, 0.99, 1.0]
    found = histogram_quantile(counts, edges, levels)
    np.testing.assert_allclose(found, np.quantile(values, levels), rtol=0.015)


def test_each_client_counts_the_same() -> None:
    """Of the client with two requests 2 and 6 s, of the other one's 9 s."""
    assert "latency_of_clients" not in run_metrics(run_result())
    figures = run_metrics(run_result(requests=requests(client=[3, 3, 0])))
    assert figures["latency_of_clients"] == pytest.approx((4 + 9) / 2)
    assert figures["latency_worst_client"] == pytest.approx(9)


def test_a_run_without_finished_requests_has_no_latencies() -> None:
    nobody = requests(**{name: [] for name in requests()._fields})
    empty = run_result(requests=nobody, itl_histogram=np.zeros(5, dtype=int), seconds=0.0)
    figures = run_metrics(empty, SLOConfig(1.0, 1.0))
    assert not {"latency", "ttft", "tpot", "itl", "wait", "throughput", "goodput"} & set(figures)
    assert all(math.isfinite(value) for value in figures.values())
    summary = summarise([figures, run_metrics(run_result())])
    assert set(summary.mean) == set(figures)


def test_intervals_are_students() -> None:
    values = [3.0, 5.0, 4.0, 8.0]
    summary = summarise([{"x": value} for value in values])
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert summary.mean["x"] == pytest.approx(5.0)
    assert summary.ci95["x"] == pytest.approx((high - low) / 2)
    assert summary.runs == 4
    assert summarise([{"x": 3.0}]) == Summary({"x": 3.0}, {}, 1)


@pytest.fixture
def summaries() -> dict[str, Summary]:
    one = [{"imbalance": 279_000.0 + i, "throughput": 80_000.0, "tpot": 0.0142} for i in range(3)]
    two = [{"imbalance": 16_500.0 + i, "throughput": 91_300.0, "tpot": 0.0125} for i in range(3)]
    return {"fcfs": summarise(one), "bfio": summarise(two)}


def test_the_report_compares_with_the_first_policy(summaries: dict[str, Summary]) -> None:
    report = markdown_report(summaries, SimulationConfig(), [Path("loads.png")])
    rows = [line for line in report.splitlines() if line.startswith("| ")]
    assert rows[0].startswith("| policy | imbalance, tokens | change | throughput, tokens/s |")
    assert rows[1].startswith("| fcfs | 279,001 ± 2 |  | 80,000 ± 0 |  | 14.20 ± 0.00 |")
    assert rows[2] == (
        "| bfio | 16,501 ± 2 | 16.9× less | 91,300 ± 0 | +14.1% | 12.50 ± 0.00 | −12.0% |"
    )
    assert "16 instances × 72 slots, barrier clock" in report
    assert "over 3 seeds, ± half a 95%" in report
    assert "![loads](loads.png)" in report
    console = Console(width=120)
    with console.capture() as capture:
        console.print(terminal_table(summaries))
    assert "16.9× less" in capture.get()


def test_the_document_has_plain_numbers_by_policy(summaries: dict[str, Summary]) -> None:
    made = document(summaries, about("simulate", SimulationConfig()))
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert list(made) == ["_about", "fcfs", "bfio"]
    assert made["bfio"]["imbalance"] == pytest.approx(16_501)
    assert made["bfio"]["ci95"]["imbalance"] == pytest.approx(2.48, abs=0.01)
    assert made["bfio"]["runs"] == 3
    assert set(made["_about"]) == {"made_by", "config", "commit", "machine", "versions"}
    assert made["_about"]["config"]["cluster"]["instances"] == 16


def test_the_pictures_are_drawn(tmp_path: Path, summaries: dict[str, Summary]) -> None:
    runs = [run_result(policy) for policy in ("fcfs", "jsq", "bfio")]
    loads = draw_loads(runs)
    assert [axes.get_title(loc="left") for axes in loads.axes] == ["fcfs", "jsq", "bfio"]
    assert [len(axes.lines) for axes in loads.axes] == [2, 2, 2], "a line for each instance"
    np.testing.assert_array_equal(loads.axes[0].lines[0].get_ydata(), np.arange(8) * 0.01)
    power = draw_power(runs)
    assert len(power.axes[0].get_legend().get_texts()) == 3
    comparison = draw_comparison(summaries)
    assert [axes.get_xlabel() for axes in comparison.axes] == [
        "imbalance, thousand tokens",
        "throughput, thousand tokens/s",
        "TPOT, ms",
    ]
    for i, figure in enumerate((loads, power, comparison)):
        path = save_figure(figure, tmp_path / f"{i}.png")
        assert path.read_bytes().startswith(b"\x89PNG")


POWER = power_model(PowerConfig())


def test_power_between_idle_and_busy_is_the_papers() -> None:
    assert watts(POWER, 0.0) == 100.0
    assert watts(POWER, 1.0) == 400.0
    assert watts(POWER, 0.5) == pytest.approx(100 + 300 * 0.5**0.7)
    assert watts(POWER, 7.0) == 400.0, "saturated"
    linear = power_model(PowerConfig(idle=50, max=150, gamma=1.0))
    assert watts(linear, 0.25) == pytest.approx(75.0)


def test_by_load_a_gpu_draws_for_the_share_of_the_step_that_it_works() -> None:
    found = load_watts(POWER, np.array([1000, 500, 0]))
    assert found == pytest.approx(400 + (100 + 300 * 0.5**0.7) + 100)
    assert load_watts(POWER, np.array([700, 700])) == pytest.approx(800.0), "balanced"
    assert load_watts(POWER, np.array([0, 0])) == pytest.approx(200.0), "nothing to do"


def test_by_mfu_a_gpu_draws_for_its_tokens_a_second() -> None:
    config = PowerConfig(flops_per_token=14e9, peak_flops=312e12, mfu_sat=0.45)
    power = power_model(config)
    mfu = 72 / 0.015 * 14e9 / 312e12  # 21.5%
    assert mfu_watts(power, 72, 0.015) == pytest.approx(100 + 300 * (mfu / 0.45) ** 0.7)
    assert mfu_watts(power, 2048, 0.015) == 400.0, "a prefill saturates it"
    assert mfu_watts(power, 0, 0.015) == 100.0
    assert mfu_watts(power, 0, 0.0) == 100.0

"""What room, an order, forecasts and fairness are worth or cost: gains are paired."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from shown_commands import ROOT

from benchmarks import fairness_cost, worth
from benchmarks.fairness_cost import CLIENTS, FAIRNESS, FIGURES, ORDERS, SentByClients, label_of
from benchmarks.worth import FORECASTS, STUDIES, Case, Runs, Use
from rescheduler.simulator.workloads.trace import first_requests, timed_blocks
from rescheduler.simulator.workloads.trace_files import create_trace

USES = {f"{study}, {name}": use for study, uses in STUDIES.items() for name, use in uses.items()}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> dict[str, Case]:
    """The cases without files, with a tenth of their requests."""
    monkeypatch.chdir(ROOT)
    return {case.name: case for case in worth.cases(None, 10, staged=True)}


@pytest.mark.parametrize("name", USES)
def test_a_use_is_compared_with_what_needs_no_forecast(name: str, few: dict[str, Case]) -> None:
    use = USES[name]
    case = few["five_tasks"]
    each = [arm for file in use.files for arm in worth.arms(file, case, 2.0)]
    by_forecast = {label: one.setup.forecast.name for label, one in each if ", " in label}
    assert {"oracle", "kaplan_meier"} <= set(by_forecast.values()), "nothing was recorded of it"
    runs = {label: {0: dict.fromkeys(use.figures, 1.0)} for label, _ in each}
    for figure in use.figures:
        assert worth.best(runs, use, figure) not in by_forecast
        assert set(worth.gains(runs, use, figure)) <= set(FORECASTS)
    for label, one in each:
        if one.setup.forecast.name != "none":
            assert worth.needs_forecasts(one)
            assert label.endswith(one.setup.forecast.name) or "prompt" in label


def test_recorded_forecasts_are_used_where_they_are_in_time(few: dict[str, Case]) -> None:
    def forecasts(file: str, case: str) -> set[str]:
        found = worth.arms(file, few[case], 2.0)
        return {label.rpartition(", ")[2] for label, _ in found} & set(FORECASTS)

    assert forecasts("room", "smollm2") == set(FORECASTS)
    assert forecasts("order", "smollm2") == {"oracle", "kaplan_meier"}
    assert forecasts("order", "smollm2_staged") == set(FORECASTS)
    for _, one in worth.arms("order", few["smollm2_staged"], 2.0):
        assert one.setup.config.prefill == worth.STAGE
    (headroom, *_) = [
        one.policy for label, one in worth.arms("room", few["star_trace"], 2.0) if "head" in label
    ]
    assert headroom.prefill_cost == pytest.approx(1.0e-4 / 10.5e-3), "of its own engines"


def test_a_small_case_is_simulated_and_told(few: dict[str, Case]) -> None:
    use = STUDIES["order"]["order"]
    found = worth.simulated(use, few["mixed_workloads"], 1.2, seeds=2)
    runs = {arm: dict(enumerate(by_seed)) for arm, by_seed in found.items()}
    assert all(np.isfinite(list(figures.values())).all() for figures in found["fcfs"])
    figures = worth.order_figures("mixed_120", runs)
    assert len(figures) == 3 * (len(runs) - 1)
    assert worth.order_table("mixed", runs).count("\n") == len(runs) + 2


def rounds(*values: float) -> dict[int, dict[str, float]]:
    return {seed: dict.fromkeys(worth.CHANGES, value) for seed, value in enumerate(values)}


def test_changes_are_paired_by_seed() -> None:
    """Each run is half as long as the one with the same requests, however long that is."""
    runs = {"fcfs": rounds(10.0, 1000.0), "boost, oracle": rounds(5.0, 500.0)}
    for by_seed in runs.values():
        for figures in by_seed.values():
            figures["preemptions"] = 3.0
    found = worth.order_figures("smollm2_120", runs)
    assert found["latency_smollm2_120_boost, oracle"] == pytest.approx(-50.0)
    assert "| boost, oracle | -50 ± 0% |" in worth.order_table("smollm2", runs)


@pytest.mark.parametrize(("figure", "gain"), [("throughput", 20.0), ("latency", -300.0)])
def test_the_gain_is_over_the_best_without_forecasts(figure: str, gain: float) -> None:
    use = Use((), (), ("a",), (figure,))
    values = {"a1": 1.0, "a2": 10.0, "a3": 3.0, "b": 0.1, "c, oracle": 12.0, "c, noisy": 99.0}
    if figure == "latency":
        values["c, oracle"] = 4.0
    runs: Runs = {arm: {i: {figure: value} for i in range(2)} for arm, value in values.items()}
    assert worth.best(runs, use, figure) == ("a2" if figure == "throughput" else "a1")
    found = worth.gains(runs, use, figure)
    assert set(found) == {"oracle"}
    assert found["oracle"].mean == pytest.approx(gain)
    shown = f"{gain:+.1f} ± 0.0%"
    assert worth.value_cells(runs, use, figure, found)[1:] == [shown, "", ""]


def test_a_cache_holds_32_requests_of_a_trace_and_its_longest(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("input_tokens,output_tokens\n100,50\n100,50\n")
    assert worth.tokens(path) == 32 * 125
    path.write_text("input_tokens,output_tokens\n10,5\n9000,10\n")
    assert worth.tokens(path) > 9_210


def test_clients_send_the_requests_that_the_trace_has() -> None:
    trace = create_trace("geometric", requests=70_000)
    sent = SentByClients(trace, CLIENTS[1].shares)
    plain, block = (first_requests(one, np.random.default_rng(3), 70_000) for one in (trace, sent))
    np.testing.assert_array_equal(plain.output, block.output)
    assert not plain.client.any()
    found = np.bincount(block.client) / 70_000
    np.testing.assert_allclose(found, CLIENTS[1].shares, atol=0.01)
    first, second = (
        next(timed_blocks(one, np.random.default_rng(3), "poisson")) for one in (trace, sent)
    )
    np.testing.assert_array_equal(first.arrival, second.arrival)


def test_whoever_sends_less_than_an_even_share_is_light() -> None:
    zipf, flood = CLIENTS
    assert [share < 1 / 20 for share in zipf.shares] == [i >= zipf.light for i in range(20)]
    assert flood.shares[0] == pytest.approx(sum(flood.shares[flood.light :])) == 0.5
    assert all(sum(clients.shares) == pytest.approx(1) for clients in CLIENTS)


def test_changes_are_paired_by_seed_with_the_same_order() -> None:
    factor = {"fcfs": 1.0, "boost": 0.5}
    arms = {
        label_of(order, fairness): {
            seed: dict.fromkeys(FIGURES, base * factor[order] * (1 + fairness))
            for seed, base in enumerate((10.0, 1000.0))
        }
        for order, fairness in product(ORDERS, FAIRNESS)
    }
    found = fairness_cost.changes_of(arms)
    assert found["latency_fcfs_0.5"] == pytest.approx(50)
    assert found["light_boost_1"] == pytest.approx(100)
    assert found["latency_boost_0.5_over_fcfs"] == pytest.approx(-25)
    assert "| boost, 0.5 | +50 ± 0% |" in fairness_cost.table("made up", arms)
    summary = fairness_cost.summary("made up", {key: [value] for key, value in found.items()})
    assert "| boost, 0.5 over fcfs, 0 | -25 (-25 … -25)% |" in summary

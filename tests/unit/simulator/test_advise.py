"""`headway advise`: its verdicts on known differences, and the whole of it on small traces."""

import _thread
import json
import math
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_forecasts import OF_THREE

from predictor.forecasts.forecast_recording import (
    MEASURED_INTERVAL,
    MEASURED_SIGMA,
    error_sigma,
    read_recording,
)
from rescheduler.simulator.advice.advise import Study, advise
from rescheduler.simulator.advice.text import advice_text, in_words
from rescheduler.simulator.advice.verdicts import (
    Frontier,
    Gain,
    Judgement,
    OrderGains,
    Quality,
    Scenario,
    frontier_cases,
    gain,
    ladder,
    order_cases,
    scenarios,
)
from rescheduler.simulator.config.simulation_config import (
    ClusterConfig,
    SimulationConfig,
    SLOConfig,
)
from rescheduler.simulator.workloads.trace import ResampledTrace, TraceBlock, first_requests
from rescheduler.step_time.step_time import create_step_time

ROOT = Path(__file__).parents[3]
OVERLOADED = Scenario("barrier", None, 1.0, False, 100.0)
RECORDED = Scenario("barrier", 0.5, 1.0, True, 100.0)
CASES = ladder(1.25)
BEST: dict[str, float] = {"jsq": 0.0, "jsq_load": 0.04, "bfio_now": 0.05}


def runs(figure: str = "throughput", noise: float = 0.002, **gains: float) -> Any:
    """Five seeds, whose level differs far more between them than the routers do."""
    generator = np.random.default_rng(1)
    level = 1000 * (1 + 0.3 * generator.random(5))
    made: dict[str, dict[int, dict[str, float]]] = {}
    for case in CASES:
        own = gains.get(case.key, 0.0) + noise * generator.normal(size=5)
        made[case.key] = {
            seed: {
                "wait_p95": 0.001,
                "tpot": 0.02,
                "requests_per_s": 10.0,
                figure: level[seed] * (1 + own[seed]),
            }
            for seed in range(5)
        }
    return made


def verdict(scenario: Scenario = OVERLOADED, **gains: float) -> Judgement:
    return Judgement(scenario, CASES, runs(**gains), None)


def said(
    *judged: Judgement,
    order: OrderGains | None = None,
    quality: Quality | None = None,
    frontier: Frontier | None = None,
) -> str:
    return " ".join(advice_text([], order, frontier, judged or [verdict()], quality, 1.25).split())


def order_gained(**gains: float) -> OrderGains:
    """What orders gain in mean latency, by what they know; the tail loses as much."""
    cases = order_cases(1.25, "own_past" in gains)
    runs = {
        case.key: {
            seed: {
                "latency": (1 - gains.get(case.key, 0.0)) * (10 + seed),
                "latency_p99": (1 + gains.get(case.key, 0.0)) * 30,
            }
            for seed in range(3)
        }
        for case in cases
    }
    return OrderGains("independent", cases, runs)


def test_a_gain_is_paired_by_seed() -> None:
    base = {0: {"throughput": 100.0}, 1: {"throughput": 300.0}, 2: {"throughput": 500.0}}
    better = {0: {"throughput": 104.0}, 1: {"throughput": 315.0}, 7: {"throughput": 1.0}}
    found = gain(better, base, "throughput")
    assert found.mean == pytest.approx(0.045)
    # t_{0.975, 1} = 12.706, s = 0.01 / sqrt(2), n = 2
    assert found.half == pytest.approx(12.706 * 0.01 / 2, rel=1e-4)
    assert found.seeds == 2
    assert not found.measurable


def test_less_latency_is_a_gain_and_goodput_may_begin_at_nothing() -> None:
    shorter = gain({0: {"latency": 9.0}}, {0: {"latency": 10.0}}, "latency")
    assert shorter.mean == pytest.approx(0.1)
    base = {0: {"goodput": 0.0, "requests_per_s": 20.0}}
    assert gain({0: {"goodput": 5.0}}, base, "goodput").mean == pytest.approx(0.25)
    with pytest.raises(ValueError, match="no seed"):
        gain({0: {"latency": 9.0}}, {1: {"latency": 10.0}}, "latency")


def test_one_seed_measures_nothing() -> None:
    alone = gain({0: {"throughput": 2.0}}, {0: {"throughput": 1.0}}, "throughput")
    assert math.isnan(alone.half)
    assert not (alone.measurable or alone.better or alone.pays)
    assert "no interval" in in_words(alone, "throughput")


def test_gains_are_changes_of_their_figure() -> None:
    assert in_words(Gain(0.041, 0.003, 5), "throughput") == "+4.1% (±0.3)"
    assert in_words(Gain(0.041, 0.003, 5), "latency") == "−4.1% (±0.3)"
    assert in_words(Gain(-0.0002, 0.0001, 5), "throughput") == "−0.02% (±0.01)"


@pytest.mark.parametrize(
    ("gains", "choice", "words"),
    [
        ({}, "vllm", "no router is measurably better"),
        (BEST | {"bfio_oracle": 0.05}, "jsq_load", "no gain that could be measured"),
        (BEST | {"bfio_now": 0.06}, "bfio_now", "even the truth does harm"),
        (
            BEST | {"bfio_km": 0.1, "bfio_measured": 0.102, "bfio_oracle": 0.11},
            "bfio_km",
            "Kaplan-Meier is enough",
        ),
        (BEST | {"bfio_km": 0.05, "bfio_measured": 0.1}, "bfio_measured", "a forecast pays"),
        (BEST | {"bfio_now": 0.06, "bfio_oracle": 0.2}, "bfio_now", "known better"),
        (
            BEST | {"bfio_oracle": 0.058, "bfio_now": 0.05},
            "jsq_load",
            "even the truth is worth less than 1%",
        ),
    ],
)
def test_the_choice_is_the_simplest_router_that_is_as_good(
    gains: dict[str, float], choice: str, words: str
) -> None:
    found = verdict(noise=0.0005, **gains)
    assert found.choice.key == choice
    assert words in said(found)


def test_what_is_inside_the_interval_is_no_difference() -> None:
    found = verdict(noise=0.05, jsq_load=0.02, bfio_measured=0.03)
    assert not found.by_load.measurable
    assert found.choice.key == "vllm"
    verdict_on_all = "Forecasts do not pay off for routing here. Configure vllm in every case"
    assert verdict_on_all in said(found)


def test_looking_ahead_must_beat_the_best_router_that_does_not() -> None:
    made = runs(noise=0.0005, bfio_km=0.05)
    for seed, factor in enumerate([0.9, 1.25, 0.9, 1.25, 1.05]):  # better, but who can tell
        made["bfio_now"][seed]["throughput"] = made["vllm"][seed]["throughput"] * factor
    found = Judgement(OVERLOADED, CASES, made, None)
    assert found.blind.key == "bfio_now"
    assert gain(made["bfio_km"], made["vllm"], "throughput").pays
    assert found.choice.key == "vllm"


def test_a_cluster_that_keeps_up_is_judged_by_latency_or_objectives() -> None:
    slower = {"bfio_now": -0.1, "jsq_load": -0.05}
    found = Judgement(RECORDED, CASES, runs("latency", **slower), None)
    assert found.figure == "latency"
    assert found.choice.key == "bfio_now", "less latency is better"
    assert "nobody queues" in said(found)
    assert Judgement(RECORDED, CASES, runs("goodput"), SLOConfig(1.0, 0.1)).figure == "goodput"


def test_the_quality_needed_is_where_the_gain_ends() -> None:
    made = runs(noise=0.0005, **BEST, bfio_oracle=0.1)
    for title, value in (("σ 0.25", 0.08), ("σ 0.5", 0.06), ("σ 1", 0.0501), ("σ 2", 0.09)):
        made[title] = {
            seed: {"throughput": base["throughput"] * (1 + value)}
            for seed, base in runs(noise=0.0005)["vllm"].items()
        }
    judgement = Judgement(OVERLOADED, CASES, made, None)
    titles = ["σ 0.25", "σ 0.5", "σ 1", "σ 2", "6 bins"]
    found = Quality(judgement, titles, 1.25)
    assert found.lasts == 0.5, "what a worse forecast gains by chance does not count"
    assert list(found.gains) == ["σ 0", "σ 0.25", "σ 0.5", "σ 1", "σ 2", "real"]
    words = "a gain can be measured up to σ 0.5 and is gone at σ 1"
    assert words in said(judgement, quality=found)


def block(n: int, timed: bool = True) -> TraceBlock:
    number = np.arange(n)
    return TraceBlock(
        arrival=np.cumsum(1.0 + number % 7) if timed else np.full(n, np.nan),
        prompt=100 + number,
        output=1 + number % 50,
        template=np.full(n, -1),
        client=np.zeros(n, dtype=np.int64),
    )


@pytest.mark.parametrize(
    ("gains", "pays", "words"),
    [
        ((0.0, None, 0.0), None, "Serving in order of arrival is as good"),
        ((-0.1, None, -0.2), None, "Serving in order of arrival is as good"),
        ((0.1, None, 0.1), "past_lengths", "{name: boost} pays, and needs no forecast"),
        ((0.1, None, 0.3), "real_forecasts", "{name: boost} pays, and more with forecasts"),
        ((0.0, None, 0.2), "real_forecasts", "{name: boost} pays with forecasts, and not without"),
        ((0.1, 0.2, 0.2), "own_past", "more by the past, which needs no model"),
        ((0.1, 0.2, 0.4), "real_forecasts", "{name: boost} pays, and more with forecasts"),
        ((0.1, 0.1, 0.1), "past_lengths", "{name: boost} pays, and needs no forecast"),
    ],
)
def test_an_order_that_needs_more_must_gain_more(
    gains: tuple[float, float | None, float], pays: str | None, words: str
) -> None:
    ages, past, real = gains
    own = {} if past is None else {"own_past": past}
    more = {"past_lengths": ages, "real_forecasts": real, "true_lengths": 0.5}
    found = order_gained(**own, **more)
    assert found.pays == pays
    assert found.latency["true_lengths"].mean == pytest.approx(0.5)
    assert found.tail["true_lengths"].mean == pytest.approx(-0.5)
    assert words in said(order=found)
    assert ("slowest requests become slower" in said(order=found)) == (pays is not None)
    if past is not None:
        assert f"−{past:.1%} (±0.0) with the past of each client and prefix" in said(order=found)


def test_a_trace_with_clients_is_judged_by_their_past(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{i / 10},20,{5 if i % 2 else 150},name{i % 2}" for i in range(400)]
    path = tmp_path / "clients.csv"
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens,client", *rows]) + "\n")
    out = tmp_path / "advice.json"
    assert advise(path, 1, 4, requests=300, seeds=2, clock="independent", json=out) == 0
    gains = json.loads(out.read_text())["order"]["latency_gain"]
    assert gains["own_past"]["mean"] > gains["past_lengths"]["mean"] + 0.05
    assert "with the past of each client and prefix" in " ".join(capsys.readouterr().out.split())


def traded(tail: float, *changes: tuple[float, float], noise: float = 0.0) -> Frontier:
    """Orders that take so much off the mean latency, and change its P99 by so much."""
    boost = order_cases(1.25)[2]
    cases = [boost, *frontier_cases(boost)]
    level = {seed: 10.0 + seed for seed in range(3)}
    base = {seed: {"latency": at, "latency_p99": 3 * at} for seed, at in level.items()}
    runs = {
        case.key: {
            seed: {
                "latency": (1 - mean - noise * (seed - 1)) * at,
                "latency_p99": (1 + p99) * 3 * at,
            }
            for seed, at in level.items()
        }
        for case, (mean, p99) in zip(cases, changes, strict=True)
    }
    return Frontier(boost.key, cases, base, runs, tail)


TRADES = (0.05, -0.01), (0.2, 0.15), (0.3, 0.6), (0.32, 1.5), (0.33, 2.0)


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        (1.0, "at most 0% above that in order of arrival (--tail), ORDER: {name: boost} gains"),
        (1.2, "ORDER: {name: boost, scale: 0.3} gains most"),
        (2.0, "ORDER: {name: boost, scale: 0.1} gains most"),
        (3.1, "ORDER: {name: shortest} gains most"),
    ],
)
def test_of_the_orders_that_keep_to_a_tail_the_shortest_mean_is_advised(
    tail: float, words: str
) -> None:
    found = traded(tail, *TRADES)
    text = said(frontier=found)
    assert words in text
    assert "with forecasts of real quality: mean latency boost −5.0% (±0.0) (P99 −1.0%" in text
    assert "scale 0.1 −30.0% (±0.0) (P99 +60.0% (±0.0)), scale 0.03 −32.0%" in text
    json.dumps(found.plain, allow_nan=False)


def test_a_gain_that_may_be_chance_is_not_advised() -> None:
    found = traded(9.0, *TRADES, noise=0.5)
    assert found.chosen is None
    assert "(--tail), no order gains." in said(frontier=found)


def test_one_seed_recommends_no_order() -> None:
    runs = {
        case.key: {0: {"latency": 10.0 - i, "latency_p99": 30.0}}
        for i, case in enumerate(order_cases(1.25))
    }
    found = OrderGains("independent", order_cases(1.25), runs)
    assert "no order is recommended" in said(order=found)


def test_resampling_keeps_runs_and_their_gaps() -> None:
    trace = ResampledTrace("x", block(1000), 70_000)
    drawn = first_requests(trace, np.random.default_rng(0), 10**9)
    assert len(drawn.prompt) == 70_000
    assert (np.diff(drawn.arrival) >= 0).all()
    number = drawn.prompt - 100
    follows = np.diff(number) == 1
    assert follows.mean() > 0.97
    gaps = np.diff(drawn.arrival)[follows]
    np.testing.assert_allclose(gaps, 1.0 + number[1:][follows] % 7)
    assert 70_000 / drawn.arrival[-1] == pytest.approx(trace.rate, rel=0.02)
    other = first_requests(trace, np.random.default_rng(1), 100)
    assert (other.prompt != drawn.prompt[:100]).any()


def test_lengths_alone_are_resampled_too() -> None:
    trace = ResampledTrace("x", block(3, timed=False), 10)
    assert not trace.has_arrivals
    assert len(first_requests(trace, np.random.default_rng(0), 100).prompt) == 10
    assert [s.load for s in scenarios({"barrier": 5.0}, trace, None)] == [None]


def test_loads_are_the_recorded_one_if_it_is_kept_up_with() -> None:
    trace = ResampledTrace("x", block(1000), 10)
    kept_up, overloaded = scenarios({"barrier": 2 * trace.rate}, trace, None)
    assert kept_up.load == pytest.approx(0.5)
    assert kept_up.recorded
    assert overloaded.load is None
    assert [s.load for s in scenarios({"barrier": trace.rate / 2}, trace, None)] == [None]
    scaled, _ = scenarios({"barrier": trace.rate / 2}, trace, 0.9)
    assert (scaled.load, scaled.scale) == (0.9, pytest.approx(0.45))


def test_the_error_of_a_recording() -> None:
    # At 0 and 2 tokens the median is 4 tokens each; 4 and 2 are left, then 1 of another request.
    errors = np.log([4 / 4, 4 / 2, 4 / 1])
    assert error_sigma(OF_THREE) == pytest.approx(errors.std(ddof=1))


def test_the_default_quality_is_that_of_the_included_recording() -> None:
    recording = read_recording(ROOT / "recordings/smollm2-135m-instruct.parquet")
    assert error_sigma(recording) == pytest.approx(MEASURED_SIGMA, abs=0.01)
    assert recording.interval == MEASURED_INTERVAL


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    generator = np.random.default_rng(3)
    arrival = np.cumsum(generator.exponential(0.02, 400))
    prompt, output = generator.integers(5, 400, 400), generator.geometric(1 / 30, 400)
    rows = zip(arrival, prompt, output, strict=True)
    lines = [f"{a:.4f},{p},{o}" for a, p, o in rows]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *lines]) + "\n")
    return path


SMALL: dict[str, Any] = {"instances": 2, "slots": 6, "requests": 150, "seeds": 2}


def test_the_whole_of_it(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert advise(trace, **SMALL, load=0.9, out=out, slo=SLOConfig(1.0, 0.05)) == 0
    printed = capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {"advice.json", "advice.txt", "advice.png"}
    written = (out / "advice.txt").read_text()
    assert written in printed
    assert "RECOMMENDATION: " in written
    words = " ".join(written.split())
    assert "Who goes first, as independent replicas at 120% of capacity" in words
    assert len(written.splitlines()) <= 40
    found = json.loads((out / "advice.json").read_text())
    names = [f"{c}, {r}" for c in ("barrier", "independent") for r in ("scaled", "overloaded")]
    assert [key.partition(" (")[0] for key in found["scenarios"]] == names
    for scenario in found["scenarios"].values():
        assert {case.key for case in CASES} <= set(scenario["routers"])
        assert scenario["routers"]["vllm"]["gain"]["mean"] == 0
        assert scenario["judged_by"] == ("throughput" if scenario["load"] is None else "goodput")
        assert scenario["routers"]["bfio_km"]["runs"] == 2
    order = found["order"]
    assert (order["clock"], order["load"]) == ("independent", 1.2)
    assert set(order["latency_gain"]) == {"past_lengths", "real_forecasts", "true_lengths"}
    assert order["latency_gain"]["true_lengths"]["mean"] > 0
    assert order["latency_gain"]["true_lengths"]["seeds"] == 2
    frontier = found["frontier"]
    assert frontier["knows"] in ("past_lengths", "real_forecasts")
    assert [point["order"]["name"] for point in frontier["points"]] == ["boost"] * 4 + ["shortest"]
    assert frontier["points"][0]["latency_gain"] == order["latency_gain"][frontier["knows"]]
    assert set(found["quality"]["gains"]) >= {"σ 0", "σ 0.25", "σ 2", "6 bins", "real"}
    advise(trace, **SMALL, load=0.9, out=out, slo=SLOConfig(1.0, 0.05))
    assert json.loads((out / "advice.json").read_text()) == found, "the same command, the same"


def test_without_arrivals_or_capacity_only_overload_is_judged(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = tmp_path / "lengths.csv"
    rows = [line.split(",", 1)[1] for line in trace.read_text().splitlines()]
    lengths.write_text("\n".join(rows))
    assert advise(lengths, **SMALL, clock="barrier") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "no arrival times: only an overloaded cluster is judged" in text
    assert "independent" not in text
    slow = {"name": "batch", "a": 10.0, "b": 0.0, "c": 0.0}
    assert advise(trace, **SMALL, clock="independent", step_time=slow, json=tmp_path / "x") == 0
    assert "cannot keep up with the trace" in " ".join(capsys.readouterr().out.split())
    assert list(json.loads((tmp_path / "x").read_text())["scenarios"]) == [
        "independent, overloaded"
    ]
    with pytest.raises(ValueError, match="no arrival times that load could scale"):
        advise(lengths, load=0.9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_capacity": 100}, "of 400 requests need more than the 100 tokens.*--kv_capacity"),
        ({"load": 1.5}, "load must be above 0 and at most 1.2"),
        ({"requests": 0}, "requests must be at least 1"),
        ({"tail": 0.9}, "tail must be at least 1, the P99 in order of arrival, not 0.9"),
        ({"tail": math.nan}, "tail must be at least 1"),
        ({"requests": 9, "slots": 5000}, "none has ended when all are full; give at least 80000"),
        ({"instances": 0}, "cluster.instances must be at least 1"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"step_time": {"name": "moe"}}, "'a'"),
        ({"recording": Path("nowhere.parquet")}, "nowhere.parquet"),
    ],
)
def test_mistakes_are_reported(trace: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        advise(trace, **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"file\.csv"),
        ("", r"file\.csv"),
        ("input_tokens,output_tokens\n", "no requests in it"),
        ("input_tokens,output_tokens\n5,5\n", "not empty"),
    ],
)
def test_no_trace_no_advice(tmp_path: Path, text: str | None, message: str) -> None:
    file, out = tmp_path / "file.csv", tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").touch()
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=message):
        advise(file, out=out)


def test_ctrl_c_keeps_what_there_is() -> None:
    config = SimulationConfig(cluster=ClusterConfig(2, 6), trace={"path": "x"}, seeds=500)
    timing = create_step_time("bfio", slots=6)
    study = Study(config, ResampledTrace("x", block(300, timed=False), 200), timing, 1.25)

    def interrupt() -> None:
        judged: list[Judgement] = []
        while not judged:
            with suppress(RuntimeError):  # the runs grow meanwhile
                judged = study.judgements()
            time.sleep(0.01)
        _thread.interrupt_main()

    # A job that a shell has put in the background ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    waiter = threading.Thread(target=interrupt)
    waiter.start()
    assert study.simulate(["barrier"], None)
    waiter.join()
    signal.signal(signal.SIGINT, before)
    (judgement,) = study.judgements()
    assert 1 <= judgement.by_load.seeds < 500
    assert study.quality([judgement]) is None

"""`headway scale`: what it prints, writes and refuses, and that seasons pay where they should."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rescheduler.commands.command_line import main
from rescheduler.emulation.emulate_options import read_machine
from rescheduler.scaling.days import DayProfile
from rescheduler.scaling.outcome import contrasts, outcome_table
from rescheduler.scaling.scale import prepared
from rescheduler.scaling.scale_config import ScaleConfig
from rescheduler.scaling.study import Arm, Found, ScalingStudy, Tried
from rescheduler.simulator.workloads.trace import ResampledTrace, lengths_block

SMALL = (
    *("--period-hours", "1", "--day.history", "2", "--seeds", "2", "--training", "1"),
    *("--peak-replicas", "1.5", "--start-seconds", "60", "240"),
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = ["arrival_s,input_tokens,output_tokens"]
    lines += [f"{i / 5:.1f},{20 + i * 37 % 900},{5 + i * 53 % 300}" for i in range(400)]
    path = tmp_path / "my_trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def study_of(config: ScaleConfig, output: Callable[[int], np.ndarray]) -> ScalingStudy:
    prompts = np.random.default_rng(0).integers(50, 400, 2000)
    block = lengths_block(prompts, output(2000))
    trace = ResampledTrace("made.csv", block, 2000)
    return prepared(config, trace, read_machine(config.machine))


def test_rules_are_compared_and_figures_written(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = ["--json", f"{tmp_path}/new/scale.json", "--figure", f"{tmp_path}/new/scale.png"]
    rules = ["fixed", "kv_usage", "rate", "arrivals", "load_ahead+arrivals"]
    assert main(["scale", "--simulate", str(trace), "--rules", *rules, *SMALL, *written]) == 0
    printed = capsys.readouterr().out
    assert "60 s to start" in printed and "240 s to start" in printed
    assert (
        "a season of arrivals instead of the last minute's rate (arrivals against rate)" in printed
    )
    assert all(rule in printed for rule in rules)
    found = json.loads((tmp_path / "new/scale.json").read_text())
    assert found["_about"]["config"]["day"]["history"] == 2
    arms = found["start_seconds"]["240"]["arms"]
    assert list(arms) == [*rules[:4], "load_ahead+arrivals (recorded)"]
    for arm in arms.values():
        hours = [day["hours"] for day in arm["days"].values()]
        assert len(hours) == 2 and arm["gpu_hours"] == pytest.approx(2 * np.mean(hours))
        assert {"target", "slo", "hours"} == set(arm["training"][0])
    assert (tmp_path / "new/scale.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_with_its_own_times_is_simulated_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["arrival_s,input_tokens,output_tokens"]
    lines += [f"{i * 11},{20 + i % 90},{5 + i % 30}" for i in range(1000)]
    path = tmp_path / "long.csv"
    path.write_text("\n".join(lines) + "\n")
    given = ["scale", "--simulate", str(path), "--times", "recorded", "--rules", "rate", "arrivals"]
    period = ["--period-hours", "1", "--start-seconds", "60"]
    assert main([*given, *period]) == 0
    assert "targets are chosen in hindsight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "give --simulate TRACE"),
        ("--simulate none.csv", "none.csv"),
        ("--simulate {trace} --rules kv_usge", "no rule 'kv_usge'; known: fixed, queue"),
        ("--simulate {trace} --rules rate rate", "none twice"),
        ("--simulate {trace} --start-seconds 9000", "each from 0 to 7200"),
        ("--simulate {trace} --keep 1", "keep must be above 0 and below 1, not 1.0"),
        ("--simulate {trace} --least 9 --most 8", "least (9) is more than most (8)"),
        ("--simulate {trace} --period-hours 0.99", "multiple of five minutes"),
        ("--simulate {trace} --day.swing 2", "day.swing must be at least 0 and at most 1"),
        ("--simulate {trace} --machine h100", "h100"),
        ("--simulate {trace} --slo.tpot-s 0.001", "give a longer --slo.tpot-s"),
        ("--simulate {trace} --rate 10000", "lower --rate or --peak-replicas"),
        ("--simulate {trace} --times recorded", "a season of 24 h is learnt from two of them"),
        ("--simulate {trace} --json {trace}/a.json", "my_trace.csv"),
        ("--simulate {large}", "1 of 1 requests need more than the 419,430 tokens"),
        ("--simulate {untimed} --times recorded --rules rate", "no arrival times to keep"),
        ("--simulate {trace} --json {trace}", "must be files of their own"),
        ("--simulate {trace} --json {trace}.png --figure {trace}.png", "files of their own"),
        ("--simulate {trace} --figure a.pdf", "it is a PNG file"),
        ("--simulate {trace} --json /dev/null", "is not a regular file"),
        ("--simulate {trace} --start-seconds 60 60", "start_seconds: none twice"),
        ("--simulate {trace} --slots 1000000", "more than the 10,000,000 places"),
        ("--simulate {trace} --slo.tpot worst", "slo: ttft_s and tpot_s only"),
        ("--simulate {trace} --day.burst 1e18", "day.burst must be at least 0"),
        ("--simulate {trace} --day.burst 900 --peak-replicas 90", "on a busy day"),
        ("--simulate {trace} --period-hours 1e308", "period_hours must be above 0 and at most"),
        ("--simulate {gap} --times recorded --rules rate --period-hours 1", "no requests in its"),
        ("--simulate {trace} --times recorded --rate 1e9", "are more than the 20,000,000"),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    given: str,
    message: str,
    trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    large, untimed = tmp_path / "large.csv", tmp_path / "untimed.csv"
    large.write_text("arrival_s,input_tokens,output_tokens\n0,500000,9\n")
    untimed.write_text("input_tokens,output_tokens\n5,9\n7,9\n")
    gap = tmp_path / "gap.csv"
    gap.write_text("arrival_s,input_tokens,output_tokens\n0,5,9\n1,5,9\n99999,5,9\n")
    words = given.format(trace=trace, large=large, untimed=untimed, gap=gap).split()
    try:
        status = main(["scale", *words])
    except SystemExit as end:
        status = int(end.code or 0)
    reported = capsys.readouterr().err
    assert status in (1, 2) and message in reported, reported
    assert reported.count("\n") <= 2 and "Traceback" not in reported


def test_a_season_pays_where_it_is_what_changes() -> None:
    """Surges at the same time every day, nothing else: the season knows, the last minute cannot."""
    surging = DayProfile(swing=0, irregular=0, surges=2, surge=1.0, bursts=0, history=2)
    config = ScaleConfig(
        start_seconds=[300.0], period_hours=3.0, day=surging, peak_replicas=2, seeds=2, training=1
    )
    lengths = np.random.default_rng(1)
    study = study_of(config, lambda n: lengths.geometric(1 / 200, n))
    arms = [Arm("rate"), Arm("arrivals")]
    found = study.compare(arms, 300.0)
    (part,) = contrasts(found).values()
    assert part.hours + part.hours_half < 0, part.text
    assert part.slo > -0.5, part.text


def test_rules_that_forecast_serve_replicas_that_start_at_once() -> None:
    config = ScaleConfig(
        period_hours=1.0, day=DayProfile(history=2), peak_replicas=1, training=1, seeds=1
    )
    study = study_of(config, lambda n: np.full(n, 150))
    assert study.compare([Arm("arrivals"), Arm("load+arrivals")], 0.0)


@pytest.mark.parametrize("needed", [1, 2, 7, 19, 33, 64])
def test_every_fixed_number_is_found(needed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ScaleConfig(period_hours=1.0, day=DayProfile(history=2), training=1, seeds=1)
    study = study_of(config, lambda n: np.full(n, 150))

    def day(*of: Any, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(figures={"slo": float(of[2] >= needed), "hours": of[2]})

    monkeypatch.setattr(study, "simulate", day)
    for least, most in ((1, 64), (needed, needed), (1, needed), (needed, 200)):
        operation = replace(study.operation, least=least, most=most)
        assert study.tuned(Arm("fixed"), operation).target == needed


def test_a_fixed_number_is_the_least_that_keeps_the_objectives() -> None:
    calm = DayProfile(swing=0.2, irregular=0, bursts=0, history=2)
    config = ScaleConfig(period_hours=1.0, day=calm, peak_replicas=3, training=1, seeds=1)
    study = study_of(config, lambda n: np.full(n, 150))
    found = study.tuned(Arm("fixed"), study.operation)
    kept = {tried.target: tried.slo >= 0.99 for tried in found.tried}
    assert kept[found.target] and found.target == min(t for t, ok in kept.items() if ok)
    assert found.target - 1 in kept and not kept[found.target - 1]
    day = study.simulate(Arm("fixed"), study.operation, found.target, 0).figures
    assert day["hours"] == pytest.approx(found.target) and day["mean"] == found.target


def test_what_is_paid_is_the_integral_of_replicas() -> None:
    config = ScaleConfig(period_hours=1.0, day=DayProfile(history=2), peak_replicas=2, seeds=1)
    study = study_of(config, lambda n: np.full(n, 150))
    operation = study.operation
    assert operation.interval == 15 and config.names[0] == "fixed"
    result = study.simulate(Arm("running"), operation, 0.2, 3)
    # Between two decisions only those that drain may stop.
    most = result.paid.mean() * study.day(3).seconds / 3600
    assert most - result.figures["drain_hours"] - 0.05 <= result.figures["hours"]
    assert result.figures["hours"] <= most + result.figures["starts"] * 15 / 3600
    assert result.figures["slo"] > 0.9 and result.figures["peak"] == result.paid.max()


def test_differences_are_paired_by_day_and_failures_marked() -> None:
    def found(hours: list[float], slo: float) -> Found:
        one = {"ttft_p99": 1.0, "mean": 2.0, "starts": 3.0, "moved": 0.0, "cut": 0.0}
        days = {k: one | {"hours": h, "slo": slo} for k, h in enumerate(hours)}
        return Found(0.5, [Tried(0.5, slo, 1.0)], days)

    arms = {
        Arm("kv_usage"): found([10, 20], 1.0),
        Arm("rate"): found([9, 18], 1.0),
        Arm("arrivals"): found([4.5, 9], 0.9),
    }
    (part,) = contrasts(arms).values()
    assert (part.hours, part.hours_half) == (-50.0, pytest.approx(0.0))
    assert part.slo == pytest.approx(-10)
    columns = {str(c.header): list(c.cells) for c in outcome_table(arms, 2, 0.99, "").columns}
    assert columns["rule"] == ["kv_usage", "rate", "arrivals *"]
    assert columns["against kv_usage"] == ["", "−10.0 ± 0.0%", "−55.0 ± 0.0%"]
    assert columns["GPU-hours"][0].startswith("30 ±")

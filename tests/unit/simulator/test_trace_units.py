"""Which format and unit of time a trace is read in: said, checked, and as the user has it."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_collection.workload.arrivals import Arrivals, arrival_times
from rescheduler.simulator.advice.advise import advise
from rescheduler.simulator.config.simulation_config import read_config
from rescheduler.simulator.experiments.runner import sweep
from rescheduler.simulator.simulate import simulate
from rescheduler.simulator.workloads.trace import first_requests
from rescheduler.simulator.workloads.trace_files import TraceFile, create_trace

TICKS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
OWN_UNIT = {"headway": "s", "burstgpt": "s", "mooncake": "ms"}
EPOCH = 1_700_000_000


def written(path: Path, format: str, seconds: list[float], unit: str | None = None) -> Path:
    """A trace of requests at these times, of 100 + i prompt tokens and 5 + 3 i output tokens."""
    numbers = [time * TICKS[unit or OWN_UNIT.get(format, "s")] for time in seconds]
    times = [f"{number:.9f}".rstrip("0").rstrip(".") for number in numbers]
    rows = [(time, 100 + i, 5 + 3 * i) for i, time in enumerate(times)]
    if format == "mooncake":
        lines = [
            f'{{"timestamp": {time}, "input_length": {p}, "output_length": {o}, "hash_ids": [1]}}'
            for time, p, o in rows
        ]
    elif format == "burstgpt":
        lines = ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"]
        lines += [f"{time},GPT-4,{p},{o},{p + o},API log" for time, p, o in rows]
    elif format == "azure":
        start = datetime(2024, 5, 10, 23, 59, tzinfo=UTC)
        if unit is None:
            times = [str(start + timedelta(seconds=time)) for time in seconds]
        lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
        lines += [f"{time},{p},{o}" for time, (_, p, o) in zip(times, rows, strict=True)]
    else:
        lines = ["arrival_s,input_tokens,output_tokens"]
        lines += [f"{time},{p},{o}" for time, p, o in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def arrivals(path: Path, **options: object) -> list[float]:
    trace = create_trace(path=path, **options)
    return first_requests(trace, np.random.default_rng(0), 10**6).arrival.tolist()


def plausible(shortest: int = 150) -> st.SearchStrategy[list[float]]:
    """Times of requests that come every few seconds, in whole milliseconds."""
    gaps = st.lists(st.integers(shortest, 10_000), min_size=10, max_size=30)
    starts = st.sampled_from([0.0, 7.25, float(EPOCH)])
    return st.builds(
        lambda start, gaps: (start + np.cumsum([0, *gaps]) / 1000).tolist(), starts, gaps
    )


@given(data=st.data())
def test_a_trace_has_its_arrivals_in_every_format_and_unit(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "trace"
    format = data.draw(st.sampled_from(["headway", "azure", "burstgpt", "mooncake"]))
    unit = data.draw(st.sampled_from([None, *TICKS]))
    seconds = data.draw(plausible())
    options = {"format": data.draw(st.sampled_from([None, format])), "time_unit": unit}
    read = arrivals(written(path, format, seconds, unit), **options)
    expected = np.array(seconds) - seconds[0]
    np.testing.assert_allclose(read, expected, rtol=0, atol=2e-6)


@given(data=st.data())
def test_a_plausible_trace_in_another_unit_is_never_read_without_asking(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "trace"
    others = {"headway": ["ms", "us"], "burstgpt": ["ms"], "mooncake": ["s", "us", "ns"]}
    format = data.draw(st.sampled_from(sorted(others)))
    unit = data.draw(st.sampled_from(others[format]))
    seconds = data.draw(plausible(600 if format == "burstgpt" else 150))
    written(path, format, seconds, unit)
    with pytest.raises(
        ValueError, match=r"as .*: .*; say --trace\.time-unit \w+ or \w+"
    ) as refusal:
        create_trace(path=path)
    assert len(str(refusal.value).splitlines()) == 1
    np.testing.assert_allclose(
        arrivals(path, time_unit=unit), np.array(seconds) - seconds[0], rtol=0, atol=2e-6
    )


def test_a_doubt_is_told_with_both_readings(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl", "mooncake", [float(i) for i in range(3600)], "s")
    expected = (
        "log.jsonl: Mooncake's format by its first line: timestamp is taken for milliseconds, "
        "which is uncertain: as milliseconds: 3,600 requests in 3.6 s (1,000 requests/s); as "
        "seconds: in 1 h (1 request/s); say --trace.time-unit s or ms"
    )
    with pytest.raises(ValueError) as refusal:
        TraceFile(path)
    assert str(refusal.value).endswith(expected)


@pytest.mark.parametrize(
    ("format", "unit", "seconds", "message"),
    [
        ("mooncake", "s", [EPOCH, EPOCH + 60], "looks like seconds since 1970"),
        ("headway", "ms", [EPOCH, EPOCH + 1], "looks like milliseconds since 1970"),
        ("burstgpt", "us", [EPOCH, EPOCH + 1], "looks like microseconds since 1970"),
        ("mooncake", "ms", [i / 5 + 1e-4 for i in range(20)], "has fractions, which milli"),
        ("headway", "s", [i / 5000 for i in range(20)], "taken for seconds, which is uncertain"),
    ],
)
def test_an_implausible_unit_is_refused(
    tmp_path: Path, format: str, unit: str, seconds: list[float], message: str
) -> None:
    path = written(tmp_path / "log", format, seconds, unit)
    with pytest.raises(ValueError, match=message):
        TraceFile(path)
    assert len(arrivals(path, time_unit=unit)) == len(seconds)


@pytest.mark.parametrize(
    ("format", "sentence"),
    [
        ("headway", "Headway's format by its first line; arrival_s in seconds, by the name of"),
        ("azure", "Azure's format by its first line; arrivals are dates"),
        ("burstgpt", "BurstGPT's format by its first line; Timestamp in seconds, as BurstGPT is"),
        ("mooncake", "timestamp in milliseconds, as Mooncake's traces are published: its requests"),
        ("lengths", "Headway's format by its first line; no column arrival_s, so lengths without"),
    ],
)
def test_the_format_and_the_unit_are_said(tmp_path: Path, format: str, sentence: str) -> None:
    path = tmp_path / "log"
    if format == "lengths":
        path.write_text("timestamp,input_tokens,output_tokens\n1,2,3\n")
    else:
        written(path, format, [0.0, 1.0, 2.0])
    assert sentence in TraceFile(path).read_as


HEADWAY = "arrival_s,input_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (HEADWAY + "0,1,2\n", {"format": "vidur"}, "format is one of headway, azure, burstgpt, m"),
        (HEADWAY + "0,1,2\n", {"time_unit": "h"}, "time_unit is one of s, ms, us, ns, not 'h'"),
        (HEADWAY + "0,1,2\n", {"format": "azure"}, "log:1: lacks 'TIMESTAMP'.*format azure has"),
        (HEADWAY + "0,1,2\n", {"format": "mooncake"}, "log:1: format mooncake is JSON Lines, but"),
        ('{"a": 1}\n', {"format": "azure"}, "log:1: format azure is CSV, but the file begins '{"),
        (AZURE + "1.5,1,2\n", {}, "log:2: TIMESTAMP is '1.5', .*a number: say its time_unit"),
        (AZURE + "20231116,1,2\n", {}, "log:2: TIMESTAMP is '20231116', .* say its time_unit"),
        (AZURE + "2023-11-16 18:17:03,1,2\n", {"time_unit": "s"}, "log:2: .* in s, but a date"),
        (HEADWAY + "2023-11-16 18:17:03,1,2\n", {}, "log:2: arrival_s is .* but a date"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens,input_tokens,output_tokens\n",
            {},
            "log:1: has the columns of several formats; say which format: headway, azure",
        ),
        ("arrival_s,arrival_s,input_tokens,output_tokens\n", {}, "log:1: .*'arrival_s' twice"),
        ("arrival_s;input_tokens;output_tokens\n0,5;1;2\n", {}, "log:1: .*separated by semicolons"),
        ("arrival_s\tinput_tokens\toutput_tokens\n", {}, "log:1: .*separated by tabs"),
        (HEADWAY + "0,5,12,30\n", {}, "log:2: 4 columns, but the header has 3"),
        ('[\n{"timestamp": 1}\n]\n', {}, "log:1: JSON over several lines, or an array"),
        ('{\n"timestamp": 1}\n', {}, "log:1: JSON over several lines, or an array"),
        (HEADWAY, {"scale": 2}, "no option 'scale'; it takes: requests, skip_empty, format, time"),
        (HEADWAY, {"requests": 0}, "requests must be at least 1, not 0"),
        ("input_tokens,output_tokens\n", {"time_unit": "s"}, "no arrival_s that time_unit could"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, text: str, options: dict[str, Any], message: str
) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        arrivals(path, **options)


def test_a_format_decides_between_the_columns_of_several(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens,input_tokens,output_tokens\n"
        "2024-05-10 23:59:59,7,8,9,9\n2024-05-11 00:00:01,7,8,9,9\n"
    )
    assert arrivals(path, format="azure") == [0, 2]


def test_commands_say_what_they_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "log.jsonl", "mooncake", [float(i) for i in range(30)], "s")
    small = {"instances": 2, "slots": 4}
    result, trace = tmp_path / "result.json", {"path": str(path), "time_unit": "s"}
    said = (
        "log.jsonl: Mooncake's format by its first line; timestamp in seconds, as given: its "
        "requests are in 29 s (1 request/s)"
    )
    config = read_config({"trace": trace, "cluster": small, "policies": "jsq", "seeds": 1})
    assert simulate(config, json=result) == 0
    assert f"headway simulate: {said}" in capsys.readouterr().err.splitlines()
    assert json.loads(result.read_text())["_about"]["traces"] == [said]
    assert sweep(config, tmp_path / "sweep", workers=1) == 0
    assert f"headway simulate: {said}" in capsys.readouterr().err.splitlines()
    swept = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert swept["_about"]["traces"] == [said]
    asked = {"clock": "barrier", "requests": 40, "seeds": 1, "json": result}
    assert advise(path, **small, **asked, time_unit="s") == 0  # type: ignore[arg-type]
    assert f"headway advise: {said}" in capsys.readouterr().err.splitlines()
    about = json.loads(result.read_text())["_about"]
    assert about["traces"] == [said]
    assert about["config"]["trace"] == trace
    with pytest.raises(ValueError, match="say --time-unit s or ms"):
        advise(path, **small)


def test_collecting_asks_for_the_unit_too(tmp_path: Path) -> None:
    seconds = [float(i) for i in range(20)]
    path = written(tmp_path / "log.csv", "headway", seconds, "ms")
    with pytest.raises(ValueError, match=r"as seconds: .*; say --arrivals\.time-unit ms or s"):
        list(arrival_times(Arrivals(kind="trace", trace=str(path))))
    assert list(arrival_times(Arrivals(kind="trace", trace=str(path), time_unit="ms"))) == seconds
    with pytest.raises(ValueError, match="time_unit is one of s, ms, us, ns, not 'h'"):
        Arrivals(time_unit="h")  # type: ignore[arg-type]

"""What `headway rehearse` refuses before it starts an engine, and what it writes."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rescheduler.demo.load import EmulatedAnswer, EmulatedRequest, answer_figures
from rescheduler.demo.rehearse import _prepared, excess, rehearse, rows_of
from rescheduler.engines.deployment import Deployment, read_deployment
from rescheduler.engines.emulated_deployment import emulated
from rescheduler.engines.proxy_options import PastOptions
from rescheduler.simulator.workloads.trace_files import TraceFile

TIMED = "arrival_s,input_tokens,output_tokens\n0.0,10,5\n1.5,300,40\n"
UNTIMED = "input_tokens,output_tokens\n10,5\n"


@pytest.fixture
def deployment() -> Deployment:
    return read_deployment("configs/serve/local-pd.yaml")


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (TIMED, {"emulate": None}, "pass --emulate h100-llama-8b or set engine.emulate"),
        (TIMED, {"emulate": "h1"}, "h1"),
        (UNTIMED, {}, "trace.csv: no arrival times; add --rate, in requests a second"),
        (TIMED, {"rate": 0.0}, "--rate must be a positive number, not 0.0"),
        (TIMED, {"requests": 0}, "requests must be at least 1, not 0"),
        (TIMED, {"format": "azure"}, "trace.csv"),
        (
            "arrival_s,input_tokens,output_tokens\n0,2000,100\n",
            {},
            "context of 2048 tokens; the longest has 2100",
        ),
        ("arrival_s,input_tokens,output_tokens\n0,-1,100\n", {}, "trace.csv:2"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_before_an_engine_starts(
    deployment: Deployment, tmp_path: Path, text: str, options: dict[str, Any], message: str
) -> None:
    given = {"emulate": "h100-llama-8b", "out": tmp_path / "out"} | options
    with pytest.raises(ValueError, match=message):
        rehearse(written(tmp_path, text), deployment, **given)
    assert not (tmp_path / "out").exists()


def test_a_rehearsal_neither_reads_nor_writes_what_is_known_of_real_requests(
    deployment: Deployment, tmp_path: Path
) -> None:
    order = {"name": "boost", "past_file": str(tmp_path / "engine")}
    real = replace(
        emulated(deployment, "h100-llama-8b"),
        proxy=replace(deployment.proxy, past=PastOptions(keys=64, file=str(tmp_path / "proxy"))),
    )
    real = replace(real, engine=replace(real.engine, order=order))
    rehearsed = _prepared(real, tmp_path / "steps")
    assert rehearsed.proxy.past == PastOptions(keys=64)
    assert rehearsed.engine.order == {"name": "boost"}
    assert _prepared(replace(real, engine=replace(real.engine, order=None)), tmp_path)
    assert real.engine.order == order


def test_a_folder_of_something_else_is_left_alone(deployment: Deployment, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="not written by `headway rehearse`"):
        rehearse(written(tmp_path, TIMED), deployment, "h100-llama-8b", out=tmp_path / "out")
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("seconds", "expected"), [({}, 0.0), ({0: (0.02, 1.0)}, 0.01), ({0: (6.0, 0.4)}, 0.4)]
)
def test_an_engine_that_does_little_does_not_spoil_a_rehearsal(
    deployment: Deployment, tmp_path: Path, seconds: dict[int, tuple[float, float]], expected: float
) -> None:
    config = emulated(deployment, "h100-llama-8b")
    for i, one in enumerate(config.instances):
        asked, over = seconds.get(i, (50.0, 0.0))
        text = "end,requests,new_tokens,context_tokens,seconds,asked_seconds,cpu\n"
        text += f"2.0,1,1,9,{asked * (1 + over)},{asked},0\n" + "1"
        (tmp_path / f"{one.name}.csv").write_text(text)
    logs = [*tmp_path.glob("*.csv"), tmp_path / "none.csv"]
    assert excess(logs, 1.0) == pytest.approx(expected, abs=0.01)
    assert np.isnan(excess(logs, 3.0)), "no step since"


def test_answers_of_one_token_have_no_time_between_tokens() -> None:
    answer = EmulatedAnswer(EmulatedRequest(0, 5, 1, 0.0), sent=1.0, first=2.0, last=2.0, tokens=1)
    figures = answer_figures([answer], 1.0)
    assert figures["ttft"] == figures["latency"] == 1.0
    assert figures["tpot"] == figures["gap_p99"] == 0.0


def test_what_each_client_saw_is_a_row_of_a_trace_again(tmp_path: Path) -> None:
    request = EmulatedRequest(0, 5, 9, 0.25)
    served = EmulatedAnswer(request, sent=1.0, first=2.0, last=5.0, longest_gap=0.5, tokens=9)
    failed = EmulatedAnswer(EmulatedRequest(1, 7, 3, 0.5), sent=1.0, error="HTTP 500: a, b")
    path = written(tmp_path, rows_of([served, failed], 2.0))
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert rows[0]["ttft_s"] == "0.5000" and rows[0]["latency_s"] == "2.0000"
    assert rows[1]["ttft_s"] == "" and rows[1]["error"] == "HTTP 500: a, b"
    assert "Headway" in TraceFile(path).read_as

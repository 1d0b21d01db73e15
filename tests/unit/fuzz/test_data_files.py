"""Datasets, traces and checkpoints, damaged: each is read, or refused with what is wrong."""

import gzip
from collections.abc import Callable
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import msgspec
import numpy as np
import pytest
from damage import damaged_bytes, json_text
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from measured_profiles import TRUE, profile_of
from recorded_dataset import record

from data_collection.dataset.export_transcripts import export_transcripts
from data_collection.dataset.validate_dataset import validate
from data_collection.workload.prompts import load_prompts
from data_collection.workload.transcripts import load_transcripts
from predictor.models.checkpoint import export_checkpoint, load_predictor
from predictor.models.survival_mlp import SurvivalMLP
from predictor.training.row_table import load_rows
from rescheduler.monitoring.finished_log import LoggedRequest, read_finished_log
from rescheduler.routing.learned.router_network import load_router
from rescheduler.simulator.workloads.forecast_recording import (
    ForecastRecording,
    read_recording,
    write_recording,
)
from rescheduler.simulator.workloads.trace import first_requests
from rescheduler.simulator.workloads.trace_files import TraceFile
from rescheduler.step_time.step_log import StepLog, read_engine, read_steps

ROUTER = Path(__file__).parents[3] / "checkpoints" / "rl-router"
TRACES = {
    "headway.csv": "arrival_s,input_tokens,output_tokens\n0.0,12,30\n0.5,1,2\n2,400,10\n",
    "azure.csv": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    ),
    "burstgpt.csv": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,0,1087,API log\n"
    ),
    "mooncake.jsonl": (
        '{"timestamp": 0, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1]}\n'
        '{"timestamp": 27, "input_length": 7, "output_length": 1, "hash_ids": []}\n'
    ),
}
LOGGED = LoggedRequest(
    "a-0", "gpu0", "m", "0123", "stop", 40, [0, 20], [0.5, 0.25], False, [9.0, 8.0]
)


def try_to_read(read: Callable[[Path], object], path: Path) -> None:
    """Read what may be damaged; if it is refused, then shortly and by its name."""
    try:
        read(path)
    except (ValueError, OSError) as error:
        assert str(path) in str(error)
        assert len(str(error).splitlines()) < 20
    except RecursionError:
        pass  # JSON of a thousand levels; the command line says so in a line


def damaged(draw: st.DrawFn, file: str, original: bytes) -> bytes:
    """JSON, or a line of it, changed as such, or any bytes changed."""
    if ".json" in file and draw(st.booleans()):
        lines = original.splitlines() if file.endswith("l") else [original]
        at = draw(st.integers(0, len(lines) - 1))
        lines[at] = draw(json_text(msgspec.json.decode(lines[at])))
        return b"\n".join(lines)
    return draw(damaged_bytes(original))


def read_whole(path: Path) -> object:
    block = first_requests(TraceFile(path), np.random.default_rng(0), 1000)
    return [column.tolist() for column in block]


@fuzzed()
@given(data=st.data())
def test_a_trace_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(TRACES)))
    content = damaged(data.draw, name, TRACES[name].encode())
    if data.draw(st.booleans()):
        content = data.draw(damaged_bytes(gzip.compress(content)))
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(content)
    try_to_read(read_whole, path)


UNITS = {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}
HEADERS = {
    "headway": "arrival_s,input_tokens,output_tokens",
    "burstgpt": "Timestamp,Request tokens,Response tokens",
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens",
}
ASKS = ("; say --trace.time-unit ", ": say its time_unit")


@fuzzed()
@given(
    form=st.sampled_from([*HEADERS, "mooncake"]),
    unit=st.sampled_from(sorted(UNITS)),
    start=st.sampled_from([0, 3, 1_700_000_000]),
    gaps=st.lists(st.integers(0, 60_000), min_size=1, max_size=20),
    stated=st.booleans(),
    spaced=st.booleans(),
)
def test_times_of_any_unit_are_read_as_said_or_asked_about(
    tmp_path_factory: pytest.TempPathFactory,
    form: str,
    unit: str,
    start: int,
    gaps: list[int],
    stated: bool,
    spaced: bool,
) -> None:
    times = [UNITS[unit] * (start + at / 1000) for at in np.cumsum([0, *gaps]).tolist()]
    if form == "mooncake":
        lines = [f'{{"timestamp": {t}, "input_length": 9, "output_length": 9}}' for t in times]
    else:
        lines = [HEADERS[form], *(f"{t},9,9" for t in times)]
    path = tmp_path_factory.getbasetemp() / "trace"
    path.write_text(("\n\n" if spaced else "\n").join(lines))
    given_unit: Any = unit if stated else None
    try:
        trace = TraceFile(path, time_unit=given_unit)
        block = first_requests(trace, np.random.default_rng(0), len(times))
    except ValueError as error:
        assert not stated
        assert any(asks in str(error) for asks in ASKS), error
        return
    taken = unit if stated else {"headway": "s", "burstgpt": "s", "mooncake": "ms"}[form]
    expected = np.subtract(times, times[0]) / UNITS[taken]
    np.testing.assert_allclose(block.arrival, expected, rtol=1e-6, atol=1e-6)
    assert len(block.prompt) == len(times)


PROMPTS = (
    b'{"id": "a", "task": "story", "prompt": "Tell me a story", "source": "x"}\n'
    b'{"id": "b", "messages": [{"role": "user", "content": "Hello"}]}\n'
)
ANSWERED = (
    b'{"id": "a", "sample_index": 1, "prompt": "Hello", "answer": "Hi", "temperature": 0.5}\n'
    b'{"prompt_token_ids": [5, 6], "output_token_ids": [7, 2], "finish_reason": "length", '
    b'"max_tokens": 2, "top_p": 0.9, "source": "x", "task": "chat"}\n'
)
LINES: dict[str, tuple[bytes, Callable[[Path], object]]] = {
    "prompts": (PROMPTS, lambda path: load_prompts(str(path))),
    "transcripts": (ANSWERED, load_transcripts),
    "finished": (
        msgspec.json.encode(LOGGED) + b"\n",
        lambda path: list(read_finished_log(path)),
    ),
}


@fuzzed()
@given(data=st.data())
def test_lines_of_json_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(sorted(LINES)))
    original, read = LINES[kind]
    path = tmp_path_factory.getbasetemp() / f"{kind}.jsonl"
    path.write_bytes(damaged(data.draw, path.name, original))
    try_to_read(read, path)


SAVED: dict[str, Callable[[bytes], bytes]] = {
    "byte-order mark": lambda content: b"\xef\xbb\xbf" + content,
    "CRLF": lambda content: content.replace(b"\n", b"\r\n"),
    "blank lines": lambda content: content.replace(b"\n", b"\n\n"),
    "no last newline": lambda content: content.rstrip(b"\n"),
}
TEXTS = {name: (text.encode(), read_whole) for name, text in TRACES.items()} | {
    name: LINES[name] for name in ("prompts", "transcripts")
}


@fuzzed()
@given(
    name=st.sampled_from(sorted(TEXTS)),
    ways=st.lists(st.sampled_from(sorted(SAVED)), min_size=1, max_size=4, unique=True),
    wide=st.booleans(),
    zipped=st.booleans(),
)
def test_how_a_file_is_saved_changes_nothing_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, ways: list[str], wide: bool, zipped: bool
) -> None:
    content, read = TEXTS[name]
    path = tmp_path_factory.getbasetemp() / f"{name}.jsonl"
    path.write_bytes(content)
    as_it_was = read(path)
    for way in ways:
        content = SAVED[way](content)
    if wide:
        content = content.decode().encode("utf-16")
    path.write_bytes(gzip.compress(content) if zipped else content)
    if wide:
        with pytest.raises(ValueError, match="save it as UTF-8"):
            read(path)
    else:
        assert read(path) == as_it_was


def dataset(folder: Path) -> None:
    record(folder)


def transcripts(folder: Path) -> None:
    record(folder / "dataset")
    export_transcripts(folder / "dataset", folder / "transcripts.parquet")
    rmtree(folder / "dataset")


def recording(folder: Path) -> None:
    of_three = ForecastRecording(
        model="m",
        predictor="p",
        part="test",
        interval=2,
        edges=np.array([0.0, 4.0, 8.0]),
        prompt=np.array([5, 5, 5]),
        output=np.array([4, 1, 3]),
        max_tokens=np.array([100, 100, 3]),
        cut=np.array([False, False, True]),
        curves=np.array([[1.0, 0.5, 0.0]] * 5, dtype=np.float32),
        first_row=np.array([0, 2, 3]),
        n_rows=np.array([2, 1, 2]),
    )
    write_recording(of_three, folder / "forecasts.parquet")


def steps(folder: Path) -> None:
    log = StepLog(folder / "steps.csv", profile_of(TRUE).engine)
    for step in range(3):
        log.add(1 + step, 100, 0.25)
    log.close()


def predictor(folder: Path) -> None:
    model: dict[str, Any] = {"hidden_size": 4, "model": "m", "model_revision": "1", "k": 2}
    export_checkpoint(SurvivalMLP([0, 4, 8], widths=[4], **model), folder, {})


def router(folder: Path) -> None:
    copytree(ROUTER, folder)


def steps_and_engine(folder: Path) -> object:
    return read_engine(folder / "steps.csv"), read_steps(folder / "steps.csv")


FOLDERS: dict[str, tuple[Callable[[Path], None], Callable[[Path], object]]] = {
    "validated dataset": (dataset, validate),
    "dataset": (dataset, load_rows),
    "transcripts": (transcripts, lambda folder: load_transcripts(folder / "transcripts.parquet")),
    "recording": (recording, lambda folder: read_recording(folder / "forecasts.parquet")),
    "steps": (steps, steps_and_engine),
    "predictor": (predictor, lambda folder: load_predictor(str(folder))),
    "router": (router, load_router),
}


@pytest.fixture(params=FOLDERS, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole folder of a kind, which is its name."""
    path: Path = tmp_path_factory.mktemp("folder") / request.param
    FOLDERS[request.param][0](path)
    return path


@fuzzed()
@given(data=st.data())
def test_a_folder_is_read_or_refused(folder: Path, data: st.DataObject) -> None:
    files = sorted(path for path in folder.rglob("*") if path.suffix not in (".md", ".png", ""))
    file = data.draw(st.sampled_from(files))
    original = file.read_bytes()
    file.write_bytes(damaged(data.draw, file.name, original))
    try:
        try_to_read(FOLDERS[folder.name][1], folder)
    finally:
        file.write_bytes(original)

"""Whatever is read, damaged: it is read, or refused in a line or some that say what is wrong.

Each entry of the tables is a reader, what it reads whole, and how it may refuse.
"""

import functools
import gzip
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copy, copytree, rmtree
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from checked_commands import command_for, exit_status
from fuzzing import changed, damaged_bytes, damaged_frames, damaged_yaml, fuzzed, json_text, structs
from hypothesis import given
from hypothesis import strategies as st
from measured_profiles import TRUE, profile_of
from recorded_dataset import record
from recorded_forecasts import OF_THREE

from data_collection.capture.capture_config import read_capture_config
from data_collection.dataset.dataset_commands import export_transcripts
from data_collection.dataset.validate_dataset import validate
from data_collection.files import read_yaml
from data_collection.workload.prompts import load_prompts, load_transcripts
from predictor.forecasts.forecast_recording import read_recording, write_recording
from predictor.live.engine_forecasts import LiveConfig
from predictor.models.checkpoint import export_checkpoint, load_predictor, read_config
from predictor.models.survival_mlp import SurvivalMLP
from predictor.training.row_table import load_rows
from rescheduler.batch.batch_files import read_batch
from rescheduler.batching.batching_config import read_batching_config
from rescheduler.commands import command_parser
from rescheduler.coordination import messages as coordination
from rescheduler.emulation.emulate_options import EMULATE_SECTION, read_emulate_config, read_machine
from rescheduler.engines.deployment import read_deployment
from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.monitoring.recalibrate import LoggedRequest, read_finished_log
from rescheduler.placement.upstream import engine_key
from rescheduler.routing.learned.rl import load_router
from rescheduler.simulator.workloads.trace import first_requests
from rescheduler.simulator.workloads.trace_files import TraceFile
from rescheduler.step_time.profile import (
    StepLog,
    load_profile,
    read_engine,
    read_steps,
    write_profile,
)
from rescheduler.transfer.migration_params import connector_config

ROOT = Path(__file__).parents[3]
MACHINES = sorted((ROOT / "configs/emulate").glob("*.yaml"))
CONFIGS = sorted({*(ROOT / "configs").glob("*/*.yaml")} - {*MACHINES})

# Values and messages.


class Decoder(NamedTuple):
    """What reads a message or a section."""

    damaged: st.SearchStrategy[Any]  # what it is given
    read: Callable[[Any], Any]  # returns what it read
    refused: type[Exception]  # how it refuses
    again: Callable[[Any], Any] | None = None  # codes what was read; None where nothing does


def section(read: Callable[[Any], Any], whole: dict[str, Any]) -> Decoder:
    damaged = changed({"headway": whole})
    # vLLM checks that it is an object.
    return Decoder(damaged.filter(lambda value: isinstance(value, dict)), read, ValueError)


def coordinating(kind: Any) -> Decoder:
    frames = damaged_frames(coordination.TOPIC, structs(kind))
    deep = st.just([coordination.TOPIC, b"\x91" * 100_000])
    refused = coordination.CoordinationError
    read = functools.partial(coordination.decode, kind=kind)
    return Decoder(frames | deep, read, refused, coordination.encode)


FORECAST = {"checkpoint": "c", "telemetry": {"bind": "tcp://127.0.0.1:1"}}
BATCHING = {"profile": "p", "ttft_s": 2.0}
EMULATED = {
    "step_time": {"constant": 0.1, "per_new": 0.1, "per_context": 0.1},
    "lengths": {"median": 9.0},
    "forecast": {"sigma": 1.0},
    "transfer": {"bytes_per_token": 9, "gigabytes_per_second": 1.0},
    "telemetry": {"bind": "tcp://127.0.0.1:1"},
}
DECODERS = {
    "batching": section(
        read_batching_config, {"batching": BATCHING, "forecast": {"checkpoint": "c"}}
    ),
    "capture": section(
        functools.partial(read_capture_config, config_type=LiveConfig),
        {"k": 20, "record": {"path": "dataset", "dtype": "float16"}, "forecast": FORECAST},
    ),
    "emulated": Decoder(
        changed({EMULATE_SECTION: EMULATED}).filter(lambda value: isinstance(value, dict)),
        read_emulate_config,
        ValueError,
    ),
    "connector": section(connector_config, {"control": "tcp://127.0.0.1:1", "time_to_live": 15}),
    "report": coordinating(coordination.Report),
    "notice": coordinating(coordination.Notice),
}


@pytest.mark.parametrize("name", DECODERS)
@fuzzed()
@given(data=st.data())
def test_a_message_is_read_or_refused(name: str, data: st.DataObject) -> None:
    damaged, decode, refused, again = DECODERS[name]
    try:
        read = decode(data.draw(damaged))
    except refused as error:
        assert 0 < len(str(error).splitlines()) < 20
        assert again is None or str(error).isprintable()
    else:
        assert again is None or decode(again(read)) == read


# Files.

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
PROMPTS = (
    '{"id": "a", "task": "story", "prompt": "Tell me a story", "source": "x"}\n'
    '{"id": "b", "messages": [{"role": "user", "content": "Hello"}]}\n'
)
ANSWERED = (
    '{"id": "a", "sample_index": 1, "prompt": "Hello", "answer": "Hi", "temperature": 0.5}\n'
    '{"prompt_token_ids": [5, 6], "output_token_ids": [7, 2], "finish_reason": "length", '
    '"max_tokens": 2, "top_p": 0.9, "source": "x", "task": "chat"}\n'
)
ASKED = (
    '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
    '{"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": '
    '{"messages": [{"role": "user", "content": "Hello"}], "stream": false}}\n'
)
FINISHED = LoggedRequest(
    "a-0", "gpu0", "m", "0123", "stop", 40, [0, 20], [0.5, 0.25], False, [9.0, 8.0]
)


class Kind(NamedTuple):
    """A kind of files."""

    write: Callable[[Path], object]  # writes whole ones into a folder
    read: Callable[[Path], object]  # reads the one that was damaged
    lines: int = 20  # of an error, at most


def texts(**files: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        for name, text in files.items():
            (folder / name).write_text(text)

    return write


def deployments(folder: Path) -> None:
    for path in CONFIGS:
        if path.parent.name == "serve":
            copy(path, folder)


def machines(folder: Path) -> None:
    for path in MACHINES:
        copy(path, folder)


def transcripts(folder: Path) -> None:
    record(folder / "dataset")
    export_transcripts(folder / "dataset", folder / "transcripts.parquet")
    rmtree(folder / "dataset")


def recording(folder: Path) -> None:
    write_recording(OF_THREE, folder / "forecasts.parquet")


def steps(folder: Path) -> None:
    log = StepLog(folder / "steps.csv", profile_of(TRUE).engine)
    for step in range(3):
        log.add(1 + step, 100, 0.25)
    log.close()


def predictor(folder: Path) -> None:
    model: dict[str, Any] = {"hidden_size": 4, "model": "m", "model_revision": "1", "k": 2}
    export_checkpoint(SurvivalMLP([0, 4, 8], widths=[4], **model), folder, {})


def whole_folder(read: Callable[[Path], object]) -> Callable[[Path], object]:
    """Read the folder of a kind, whichever of its files is given."""
    return lambda path: read(next(up for up in path.parents if up.name in KINDS))


def read_whole(path: Path) -> object:
    block = first_requests(TraceFile(path), np.random.default_rng(0), 1000)
    return [column.tolist() for column in block]


def read_whole_batch(path: Path) -> object:
    batch = read_batch(path)
    read = [batch.read(request) for request in batch.requests]
    assert all(b"service_tier" in body for _, body in read)
    return read


def steps_and_engine(folder: Path) -> object:
    return read_engine(folder / "steps.csv"), read_steps(folder / "steps.csv")


KINDS = {
    "traces": Kind(texts(**TRACES), read_whole),
    "prompts": Kind(texts(**{"prompts.jsonl": PROMPTS}), lambda path: load_prompts(str(path))),
    "answers": Kind(texts(**{"answers.jsonl": ANSWERED}), load_transcripts),
    "finished": Kind(
        texts(**{"finished.jsonl": msgspec.json.encode(FINISHED).decode() + "\n"}),
        lambda path: list(read_finished_log(path)),
    ),
    "batch": Kind(texts(**{"asked.jsonl": ASKED}), read_whole_batch),
    "deployments": Kind(deployments, read_deployment, 1),
    "profile": Kind(
        lambda folder: write_profile(profile_of(TRUE), folder / "profile.yaml"), load_profile
    ),
    "machine": Kind(machines, lambda path: read_machine(str(path))),
    "validated dataset": Kind(record, whole_folder(validate)),
    "dataset": Kind(record, whole_folder(load_rows)),
    "transcripts": Kind(transcripts, load_transcripts),
    "recording": Kind(recording, read_recording),
    "steps": Kind(steps, whole_folder(steps_and_engine)),
    "predictor": Kind(predictor, whole_folder(lambda folder: load_predictor(str(folder)))),
    "router": Kind(
        lambda folder: copytree(ROOT / "checkpoints/rl-router", folder, dirs_exist_ok=True),
        whole_folder(load_router),
    ),
}


@pytest.fixture(params=KINDS, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with whole files of a kind, which is its name."""
    path: Path = tmp_path_factory.mktemp("files") / request.param
    path.mkdir()
    KINDS[request.param].write(path)
    return path


def damaged(draw: st.DrawFn, file: str, original: bytes) -> bytes:
    """YAML, or JSON or a line of it, changed as such, or any bytes changed; perhaps gzipped."""
    if file.endswith(".yaml"):
        return draw(damaged_yaml(original.decode()))
    if ".json" in file and draw(st.booleans()):
        lines = original.splitlines() if file.endswith("l") else [original]
        at = draw(st.integers(0, len(lines) - 1))
        lines[at] = draw(json_text(msgspec.json.decode(lines[at])))
        content = b"\n".join(lines)
    else:
        content = draw(damaged_bytes(original))
    if file.endswith((".csv", ".jsonl")) and draw(st.booleans()):
        return draw(damaged_bytes(gzip.compress(content)))
    return content


@fuzzed()
@given(data=st.data())
def test_a_file_is_read_or_refused(folder: Path, data: st.DataObject) -> None:
    files = sorted(path for path in folder.rglob("*") if path.suffix not in (".md", ".png", ""))
    file = data.draw(st.sampled_from(files))
    original = file.read_bytes()
    file.write_bytes(damaged(data.draw, file.name, original))
    kind = KINDS[folder.name]
    try:
        kind.read(file)
    except (ValueError, OSError) as error:
        assert str(folder) in str(error)
        assert str(error).startswith(str(file)) or file.suffix != ".yaml"
        assert len(str(error).splitlines()) <= kind.lines
    except RecursionError:
        pass  # JSON of a thousand levels; the command line says so in a line
    finally:
        file.write_bytes(original)


@pytest.fixture(scope="module")
def parsers_once() -> Iterator[None]:
    """Make the parser of each verb once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            command_parser, "command_parser", functools.cache(command_parser.command_parser)
        )
        yield


@pytest.mark.usefixtures("parsers_once")
@fuzzed()
@given(config=st.sampled_from(CONFIGS), data=st.data())
def test_a_command_reads_or_refuses_its_configuration(
    tmp_path_factory: pytest.TempPathFactory,
    config: Path,
    data: st.DataObject,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    path.write_bytes(data.draw(damaged_yaml(config.read_text())))
    capsys.readouterr()
    status = exit_status(*command_for(config), "--config", path, "--print_config")
    reported = capsys.readouterr().err
    assert status in (0, 1, 2)
    assert "Traceback" not in reported and len(reported.splitlines()) < 20
    assert (status == 0) == (not reported)


# What a file means, however it was saved.


SMALL = {
    "config.yaml": Kind(texts(**{"config.yaml": "seeds: 1\ntrace: {name: star}\n"}), read_yaml),
    "config.json": Kind(
        texts(**{"config.json": '{"kind": "survival"}\n'}), lambda path: read_config(path.parent)
    ),
    "key": Kind(
        texts(key="secret\n"), lambda path: engine_key(ProxyOptions(engine_key_file=str(path)))
    ),
    "steps.csv": Kind(steps, lambda path: read_steps(path).tolist()),
    "steps.csv.engine.json": Kind(steps, lambda path: read_engine(path.with_name("steps.csv"))),
    "profile.yaml": KINDS["profile"],
    "prompts.jsonl": KINDS["prompts"],
    "answers.jsonl": KINDS["answers"],
    "finished.jsonl": KINDS["finished"],
    **dict.fromkeys(TRACES, KINDS["traces"]),
}


@pytest.mark.parametrize("name", SMALL)
def test_how_a_text_is_saved_changes_nothing_or_is_refused(tmp_path: Path, name: str) -> None:
    write, read, _ = SMALL[name]
    write(tmp_path)
    path = tmp_path / name
    content, as_it_was = path.read_bytes(), read(path)
    for end in (b"\r\n", b"\r"):
        path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + content.replace(b"\n", end)))
        assert read(path) == as_it_was
    path.write_bytes(content.decode().encode("utf-16"))
    with pytest.raises(ValueError, match=rf"{name}.*save it as UTF-8"):
        read(path)

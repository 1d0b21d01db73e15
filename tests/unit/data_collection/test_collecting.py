"""`headway collect`: when it asks, once each, what room it takes, and what was not recorded."""

import gzip
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from recorded_dataset import ended, new_session, step_rows

from data_collection.capture.capture_config import RecordConfig
from data_collection.capture.recorder import Recorder
from data_collection.dataset.dataset_schema import requests_files
from data_collection.dataset.validate_dataset import validate
from data_collection.models import identify
from data_collection.workload import collect as collecting
from data_collection.workload.arrivals import Arrivals, arrival_times
from data_collection.workload.collect import hidden_size, room_on_disk
from data_collection.workload.engine_options import RecordOptions


class Letters:
    """A tokenizer of letters."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return [ord(letter) for message in messages for letter in message["content"]]


@pytest.fixture
def collect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Collect into ``dataset`` with an engine that answers so many prompts, and then ends.

    Of the last ones that it answers it may have ``lost`` what it was to record.
    """
    model, dataset, sessions = tmp_path / "model", tmp_path / "dataset", count()
    model.mkdir()
    (model / "config.json").write_text("{}")

    def run(answers: int, lost: int = 0, **options: Any) -> None:
        def drive(source: Any, *_: object) -> int:
            identity, number = identify(str(model)), next(sessions)
            session = new_session(
                f"20250101T000000-{number}", model=identity.name, revision=identity.revision
            )
            recorder = Recorder(RecordConfig(path=str(dataset)), session)
            for i, request in enumerate(source(Letters())[: answers - lost]):
                name = f"{request.id}-{i:08x}"
                recorder.on_rows(step_rows(i, {name: 0}))
                recorder.on_finished([ended(name, 5, task="".join(map(chr, request.token_ids)))])
            recorder.close()
            return answers

        driving = SimpleNamespace(drive=drive, CollectionError=RuntimeError)
        monkeypatch.setitem(sys.modules, "data_collection.workload.drive", driving)
        collecting.collect(dataset, str(model), **options)

    monkeypatch.setattr(collecting, "vllm_version", lambda: "0.32.0")
    return run


def answered(dataset: Path) -> Counter[str]:
    """How often each prompt was answered: the engine writes it as the task."""
    rows = [row for file in requests_files(dataset) for row in pq.read_table(file).to_pylist()]
    return Counter(row["task"] for row in rows)


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return str(path)


def test_lines_that_were_inserted_or_moved_cost_no_answer_and_repeat_none(
    tmp_path: Path, collect: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    path, texts = tmp_path / "mine.jsonl", [f"number {i}" for i in range(20)]
    collect(10, prompts=write(path, [*texts, texts[3], texts[3]]))
    changed = ["new", *reversed(texts), texts[3], texts[3]]
    collect(13, prompts=write(path, changed))
    assert "10 of 23 prompts are done already" in capsys.readouterr().out
    assert answered(tmp_path / "dataset") == Counter(changed)
    collect(0, prompts=str(path))
    assert "23 of 23 prompts are done already" in capsys.readouterr().out


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_answers_that_were_not_written_are_an_error(
    tmp_path: Path, collect: Callable[..., None], lost: int
) -> None:
    if lost:
        said = f"{lost} of 3 answers could not be written.*resume"
        with pytest.raises(RuntimeError, match=said):
            collect(3, lost, limit=3)
    else:
        collect(3, limit=3)
    if lost < 3:
        validate(tmp_path / "dataset")


def test_the_room_is_what_the_longest_answers_would_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def said(gigabytes: float) -> str:
        usage = SimpleNamespace(free=int(gigabytes * 1e9))
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
        return room_on_disk(tmp_path, 4096, 10_000, 1024, RecordOptions(k=20, dtype="float16"))

    # 10,000 answers · 52 rows · 4,096 numbers · 2 bytes
    assert said(50).startswith("up to about 4.3 GB of hidden states (10,000 answers of up to 1,024")
    assert said(50).endswith("50.0 GB are free")
    assert said(4).startswith("warning: up to about 4.3 GB")
    assert "--record.k" in said(4)


@pytest.mark.parametrize(
    ("config", "d"),
    [
        ({"model_type": "llama", "hidden_size": 96}, 96),
        ({"model_type": "opt", "hidden_size": 96, "word_embed_proj_dim": 48}, 48),
        ({"model_type": "gpt2", "n_embd": 80}, 80),
        ({"model_type": "gemma3", "text_config": {"hidden_size": 72}}, 72),
        ({"model_type": "a model of tomorrow"}, None),
    ],
)
def test_the_width_is_that_of_the_captured_states(
    tmp_path: Path, config: dict[str, object], d: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert hidden_size(str(tmp_path)) == d


def write_trace(path: Path, text: str) -> Arrivals:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return Arrivals(kind="trace", trace=str(path), scale=2.0)


def test_a_closed_loop_never_waits_for_an_arrival() -> None:
    assert list(islice(arrival_times(Arrivals()), 5)) == [0.0] * 5


def test_poisson_gaps_are_exponential_with_mean_one_over_rate() -> None:
    times = list(islice(arrival_times(Arrivals(kind="poisson", rate=4.0, seed=7)), 20_000))
    gaps = np.diff([0.0, *times])
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)  # of an exponential, mean = deviation


def test_the_seed_decides_the_arrivals() -> None:
    first, again, other = (
        list(islice(arrival_times(Arrivals(kind="poisson", seed=seed)), 10)) for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_a_trace_starts_at_zero_and_is_scaled(tmp_path: Path, name: str) -> None:
    text = "arrival_s,input_tokens\n10.0,5\n11.0,6\n11.0,7\n14.0,8\n"
    arrivals = write_trace(tmp_path / name, text)
    assert list(arrival_times(arrivals)) == [0.0, 0.5, 0.5, 2.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arrival_s\n5\n4\n", r"trace\.csv:3: arrival 4\.0 comes before 5\.0"),
        ("time\n5\n", r"trace\.csv:2: needs a column 'arrival_s'.*'time': '5'"),
        ("arrival_s\nsoon\n", r"trace\.csv:2: needs a column 'arrival_s'.*'soon'"),
        ("arrival_s\n1\nnan\n", r"trace\.csv:3: needs a column 'arrival_s'.*'nan'"),
        ("arrival_s\n", r"trace\.csv: no arrivals found"),
        ("", r"trace\.csv: no arrivals found"),
    ],
)
def test_a_wrong_trace_is_named(tmp_path: Path, text: str, message: str) -> None:
    arrivals = write_trace(tmp_path / "trace.csv", text)
    with pytest.raises(ValueError, match=message):
        list(arrival_times(arrivals))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"concurrency": 0}, "concurrency must be at least 1, not 0"),
        ({"rate": 0.0}, "must be above 0"),
        ({"scale": -1.0}, "must be above 0"),
        ({"kind": "trace"}, "need the path of a trace"),
    ],
)
def test_impossible_arrivals_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Arrivals(**wrong)  # type: ignore[arg-type]


def test_a_layer_that_the_model_lacks_is_refused_before_an_engine_starts(
    smollm2: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"--record\.layer 31: the model has 30 layers"):
        collecting.collect(tmp_path / "out", str(smollm2), record=RecordOptions(layer=31), limit=1)

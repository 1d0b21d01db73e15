"""`headway collect`: the room that it says it takes, and answers that could not be recorded."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from recorded_dataset import ended, new_session, step_rows

from data_collection.capture.capture_config import RecordConfig
from data_collection.capture.recorder import Recorder
from data_collection.dataset.validate_dataset import validate
from data_collection.models import identify
from data_collection.workload import collect as collecting
from data_collection.workload.collect import hidden_size, room_on_disk
from data_collection.workload.engine_options import RecordOptions

ANSWERS = 3


class CollectionError(RuntimeError):
    """That of the module that loads vLLM."""


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_answers_that_were_not_written_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    model, dataset = tmp_path / "model", tmp_path / "dataset"
    model.mkdir()
    (model / "config.json").write_text("{}")

    def drive(*_: object) -> int:
        identity = identify(str(model))
        session = new_session(model=identity.name, revision=identity.revision)
        recorder = Recorder(RecordConfig(path=str(dataset)), session)
        for i in range(ANSWERS - lost):
            name = f"prompt-{i}-{i:08x}"
            recorder.on_rows(step_rows(i, {name: 0}))
            recorder.on_finished([ended(name, 5)])
        recorder.close()
        return ANSWERS

    driving = SimpleNamespace(drive=drive, CollectionError=CollectionError)
    monkeypatch.setitem(sys.modules, "data_collection.workload.drive", driving)
    monkeypatch.setattr(collecting, "vllm_version", lambda: "0.32.0")
    if lost:
        said = f"{lost} of 3 answers could not be written.*resume"
        with pytest.raises(CollectionError, match=said):
            collecting.collect(dataset, str(model), limit=ANSWERS)
    else:
        collecting.collect(dataset, str(model), limit=ANSWERS)
    if lost < ANSWERS:
        validate(dataset)


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

"""`headway collect` again, after its file of prompts was changed: each is answered once."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from recorded_dataset import ended, new_session, step_rows

from data_collection.capture.capture_config import RecordConfig
from data_collection.capture.recorder import Recorder
from data_collection.dataset.dataset_schema import requests_files
from data_collection.models import identify
from data_collection.workload import collect as collecting


class Letters:
    """A tokenizer of letters."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return [ord(letter) for message in messages for letter in message["content"]]


@pytest.fixture
def collect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Collect into ``dataset`` with an engine that answers so many prompts, and then ends."""
    model, dataset, sessions = tmp_path / "model", tmp_path / "dataset", count()
    model.mkdir()
    (model / "config.json").write_text("{}")

    def run(prompts: Path, answers: int) -> None:
        def drive(source: Any, *_: object) -> int:
            identity, number = identify(str(model)), next(sessions)
            session = new_session(
                f"20250101T000000-{number}", model=identity.name, revision=identity.revision
            )
            recorder = Recorder(RecordConfig(path=str(dataset)), session)
            for i, request in enumerate(source(Letters())[:answers]):
                name = f"{request.id}-{i:08x}"
                recorder.on_rows(step_rows(i, {name: 0}))
                recorder.on_finished([ended(name, 5, task="".join(map(chr, request.token_ids)))])
            recorder.close()
            return answers

        driving = SimpleNamespace(drive=drive, CollectionError=RuntimeError)
        monkeypatch.setitem(sys.modules, "data_collection.workload.drive", driving)
        collecting.collect(dataset, str(model), prompts=str(prompts))

    monkeypatch.setattr(collecting, "vllm_version", lambda: "0.32.0")
    return run


def answered(dataset: Path) -> Counter[str]:
    """How often each prompt was answered: the engine writes it as the task."""
    rows = [row for file in requests_files(dataset) for row in pq.read_table(file).to_pylist()]
    return Counter(row["task"] for row in rows)


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def test_lines_that_were_inserted_or_moved_cost_no_answer_and_repeat_none(
    tmp_path: Path, collect: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    path, texts = tmp_path / "mine.jsonl", [f"number {i}" for i in range(20)]
    collect(write(path, [*texts, texts[3], texts[3]]), 10)
    changed = ["new", *reversed(texts), texts[3], texts[3]]
    collect(write(path, changed), 13)
    assert "10 of 23 prompts are done already" in capsys.readouterr().out
    assert answered(tmp_path / "dataset") == Counter(changed)
    collect(path, 0)
    assert "23 of 23 prompts are done already" in capsys.readouterr().out

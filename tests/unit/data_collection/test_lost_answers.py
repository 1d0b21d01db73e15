"""`headway collect` where the disk is full when the engine ends; the engine here is a recorder."""

import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from recorded_dataset import D, ended, new_session, step_rows

from data_collection.capture.capture_config import RecordConfig
from data_collection.capture.recorder import Recorder
from data_collection.dataset.validate_dataset import validate
from data_collection.models import identify
from data_collection.workload import collect as collecting

ANSWERS = 3


class CollectionError(RuntimeError):
    """That of the module that loads vLLM."""


def wait_until(holds: Callable[..., object]) -> None:
    while not holds():  # pytest's own timeout ends a wait that is in vain
        time.sleep(0.01)


@pytest.fixture
def full_at_the_end(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the disk is full: what writes shards then finds no room."""
    full: list[bool] = []
    write = pq.write_table

    def fail_when_full(*args: Any, **kwargs: Any) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*args, **kwargs)

    monkeypatch.setattr(pq, "write_table", fail_when_full)
    return full


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(collecting, "vllm_version", lambda: "0.32.0")
    return folder


def drives(dataset: Path, model: Path, full: list[bool], full_from: int) -> SimpleNamespace:
    """What drives an engine whose answers end at once; the disk is full from one of them on."""

    def drive(*_: object) -> int:
        identity = identify(str(model))
        session = new_session(model=identity.name, revision=identity.revision)
        config = RecordConfig(path=str(dataset), flush_seconds=3600, shard_rows=1)
        recorder = Recorder(config, session)
        for i in range(ANSWERS):
            written = recorder.status()["requests"]
            if i == full_from:
                full.append(True)
            name = f"prompt-{i}-{i:08x}"
            recorder.on_rows(step_rows(i, {name: 0}, [[1.0] * D]))
            recorder.on_finished([ended(name, 5)])
            wait_until(lambda seen=written: recorder.status()["requests"] > seen)
            wait_until(lambda: full or not recorder.status()["unwritten_rows"])
        recorder.close()
        return ANSWERS

    return SimpleNamespace(drive=drive, CollectionError=CollectionError)


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_answers_that_a_full_disk_took_at_the_end_are_an_error(
    tmp_path: Path,
    model: Path,
    full_at_the_end: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    lost: int,
) -> None:
    dataset = tmp_path / "dataset"
    driving = drives(dataset, model, full_at_the_end, ANSWERS - lost)
    monkeypatch.setitem(sys.modules, "data_collection.workload.drive", driving)
    if not lost:
        collecting.collect(dataset, str(model), limit=ANSWERS)
        return
    with pytest.raises(CollectionError, match=f"{lost} of 3 answers could not be written.*resume"):
        collecting.collect(dataset, str(model), limit=ANSWERS)
    full_at_the_end.clear()
    if lost < ANSWERS:
        validate(dataset)

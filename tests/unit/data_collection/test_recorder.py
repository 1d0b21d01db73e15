import errno
import json
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded_dataset import D, K, ended, new_session, record, step_rows

from data_collection.capture.capture_config import RecordConfig
from data_collection.capture.capture_hook import CapturedRows, FinishedRequest
from data_collection.capture.recorder import Recorder
from data_collection.dataset.dataset_schema import (
    SERVER_STOPPED,
    DatasetError,
    requests_files,
    rows_files,
)
from data_collection.dataset.validate_dataset import validate


def recorder_in(dataset: Path, **config: Any) -> Recorder:
    session = new_session(dtype=config.get("dtype", "float16"))
    return Recorder(RecordConfig(path=str(dataset), **config), session)


def write(
    dataset: Path, rows: list[CapturedRows], ends: list[FinishedRequest], **config: Any
) -> Recorder:
    """Record rows and ends, and close."""
    recorder = recorder_in(dataset, **config)
    for step in rows:
        recorder.on_rows(step)
    if ends:
        recorder.on_finished(ends)
    recorder.close()
    return recorder


def rows_of(dataset: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(file) for file in rows_files(dataset)])


def requests_of(dataset: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(file) for file in requests_files(dataset)])


def session_of(dataset: Path) -> dict[str, Any]:
    (file,) = (dataset / "sessions").glob("*.json")
    described: dict[str, Any] = json.loads(file.read_text())
    return described


def wait_until(condition: Any) -> None:
    while not condition():  # pytest's own timeout ends a wait that is in vain
        time.sleep(0.01)


class FailingDisk:
    """Stands before pyarrow's writer: some calls find the disk full."""

    def __init__(self, failing: Any, before: Any = lambda: None) -> None:
        self.calls = 0
        self._failing = failing
        self._before = before
        self._write = pq.write_table

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        self._before()
        if self._failing(self.calls):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._write(*args, **kwargs)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(totals=st.lists(st.integers(0, 130), min_size=1, max_size=6))
def test_remaining_is_total_minus_generated(
    tmp_path_factory: pytest.TempPathFactory, totals: list[int]
) -> None:
    dataset = tmp_path_factory.mktemp("dataset")
    total_of = {f"prompt-{i}-{i:08x}": total for i, total in enumerate(totals)}
    names = list(total_of)
    steps = [
        step_rows(n, dict.fromkeys((name for name in names if n < total_of[name]), n))
        for n in range(0, max(totals), K)
    ]
    write(dataset, steps, [ended(*end) for end in total_of.items()])
    for row in rows_of(dataset).select(range(6)).to_pylist():
        assert (
            row["remaining_tokens"]
            == totals[names.index(row["request_id"])] - row["generated_tokens"]
        )
    assert requests_of(dataset)["rows"].to_pylist() == [-(-total // K) for total in totals]
    assert requests_of(dataset)["external_id"].to_pylist() == [name[:-9] for name in names]
    validate(dataset)


def test_rows_past_the_end_are_dropped_and_those_captured_again_replaced(tmp_path: Path) -> None:
    steps = [step_rows(1, {"a-00000001": 0})]
    # Preempted, it computes n = 20 again; asynchronous scheduling runs one step past its end.
    steps += [step_rows(1 + i, {"a-00000001": 20}, [[float(i)] * D]) for i in (1, 2)]
    write(tmp_path, [*steps, step_rows(4, {"a-00000001": 40})], [ended("a-00000001", 40)])
    rows = rows_of(tmp_path)
    assert rows["generated_tokens"].to_pylist() == [0, 20]
    assert rows["remaining_tokens"].to_pylist() == [40, 20]
    assert rows["step_index"].to_pylist() == [1, 3]
    assert rows["hidden_state"][1].as_py() == [2.0] * D


def test_requests_that_still_run_at_the_end_are_censored(tmp_path: Path) -> None:
    write(tmp_path, [step_rows(n, {"a-00000001": n}) for n in (0, 20, 40)], [])
    rows = rows_of(tmp_path)
    assert rows["finish_reason"].unique().to_pylist() == [SERVER_STOPPED]
    assert rows["censored"].to_pylist() == [True] * 3
    assert rows["remaining_tokens"].to_pylist() == [41, 21, 1]  # after n = 40 came one at least
    assert session_of(tmp_path)["closed"] is not None


@pytest.mark.parametrize("reason", ["length", "abort", "repetition"])
def test_cut_requests_are_censored(tmp_path: Path, reason: str) -> None:
    write(tmp_path, [step_rows(1, {"a-00000001": 0})], [ended("a-00000001", 7, reason)])
    assert requests_of(tmp_path)["censored"].to_pylist() == [True]


def test_a_value_outside_float16_is_refused_and_counted_or_kept_in_float32(tmp_path: Path) -> None:
    vectors = [[70_000.0] + [0.0] * (D - 1), [1.0] * D]
    rows = step_rows(1, {"a-00000001": 0, "b-00000002": 0}, vectors)
    ends = [ended("a-00000001", 5), ended("b-00000002", 5)]
    narrow, wide = tmp_path / "float16", tmp_path / "float32"
    recorder = write(narrow, [rows], ends)
    assert rows_of(narrow)["request_id"].to_pylist() == ["b-00000002"]
    assert requests_of(narrow)["rows"].to_pylist() == [0, 1]
    assert recorder.status()["refused_rows"] == session_of(narrow)["refused_rows"] == 1
    write(wide, [rows], ends, dtype="float32")
    assert rows_of(wide)["hidden_state"].to_pylist() == vectors


def test_what_a_slow_disk_cannot_take_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def wait_for_the_disk() -> None:
        writing.set()
        go_on.wait()

    monkeypatch.setattr(pq, "write_table", FailingDisk(lambda call: False, wait_for_the_disk))
    recorder = recorder_in(tmp_path, queue_rows=4, shard_rows=1)
    recorder.on_rows(step_rows(1, {"a-00000001": 0}))
    recorder.on_finished([ended("a-00000001", 5)])
    writing.wait()
    for n in (0, 20, 40):  # the third pair does not fit into the queue of four
        recorder.on_rows(step_rows(2 + n, {"b-00000002": n, "c-00000003": n}))
    assert recorder.status()["dropped_rows"] == 2
    go_on.set()
    recorder.on_finished([ended("b-00000002", 50), ended("c-00000003", 50)])
    recorder.close()
    assert rows_of(tmp_path)["generated_tokens"].to_pylist() == [0, 0, 20, 0, 20]
    assert session_of(tmp_path)["dropped_rows"] == 2
    validate(tmp_path)


def test_a_full_disk_keeps_rows_and_the_folder_valid_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: list[BaseException] = []
    room, tries_requests = threading.Event(), threading.Event()

    def check_folder() -> None:
        try:
            if disk.calls > 2:
                validate(tmp_path)
        except BaseException as error:
            broken.append(error)

    def is_full(call: int) -> bool:
        # The first shard (calls 1, 2) fits; then rows fail, then requests, until there is room.
        if call == 5:
            tries_requests.set()
        return call == 3 or (call >= 5 and not room.is_set())

    disk = FailingDisk(is_full, check_folder)
    monkeypatch.setattr(pq, "write_table", disk)
    recorder = recorder_in(tmp_path, shard_rows=1)
    for name in ("a-00000001", "b-00000002", "c-00000003"):
        recorder.on_rows(step_rows(1, {name: 0}))
        recorder.on_finished([ended(name, 5)])
        if name.startswith("a"):
            wait_until(lambda: session_of(tmp_path)["rows"] == 1)
    wait_until(lambda: recorder.status()["unwritten_rows"] == 2 and recorder.status()["error"])
    assert os.strerror(errno.ENOSPC) in recorder.status()["error"]
    assert str(tmp_path) in recorder.status()["error"]
    tries_requests.wait()
    validate(tmp_path)
    room.set()
    wait_until(lambda: recorder.status()["unwritten_rows"] == 0)
    assert recorder.status()["error"] is None
    recorder.close()
    assert not broken
    validate(tmp_path)
    names = ["a-00000001", "b-00000002", "c-00000003"]
    assert sorted(rows_of(tmp_path)["request_id"].to_pylist()) == names
    assert session_of(tmp_path)["dropped_rows"] == 0
    assert not list(tmp_path.rglob("*.tmp"))


def test_rows_held_for_a_full_disk_are_bounded_and_the_rest_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pq, "write_table", FailingDisk(lambda call: True))
    recorder = recorder_in(tmp_path, shard_rows=1, queue_rows=2)
    for i in range(4):
        recorder.on_rows(step_rows(i, {f"{i}-0000000{i}": 0}))
        recorder.on_finished([ended(f"{i}-0000000{i}", 5)])
        wait_until(
            lambda i=i: recorder.status()["requests"] + recorder.status()["dropped_rows"] > i
        )
    recorder.close()
    assert session_of(tmp_path)["rows"] == 0
    assert session_of(tmp_path)["dropped_rows"] == recorder.status()["dropped_rows"] == 4
    assert os.strerror(errno.ENOSPC) in recorder.status()["error"]


def test_rows_become_visible_before_the_recorder_is_closed(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path, flush_seconds=0.05)
    recorder.on_rows(step_rows(1, {"a-00000001": 0}))
    recorder.on_finished([ended("a-00000001", 5)])
    wait_until(lambda: rows_files(tmp_path))
    assert rows_of(tmp_path).num_rows == 1
    recorder.close()


@pytest.mark.parametrize(
    ("changes", "both"),
    [
        ({"model": "acme/other-model"}, ("acme/small-model", "acme/other-model")),
        ({"k": 50}, ("k = 20", "now it is 50")),
        ({"dtype": "float32"}, ("float16", "float32")),
        ({"hidden_size": 4096}, ("hidden_size = 8", "4096")),
    ],
)
def test_a_dataset_of_another_kind_is_not_continued(
    tmp_path: Path, changes: dict[str, Any], both: tuple[str, str]
) -> None:
    record(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(DatasetError) as raised:
        Recorder(RecordConfig(path=str(tmp_path)), new_session("20250102T000000-2", **changes))
    assert all(text in str(raised.value) for text in both)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_dataset_of_the_same_model_is_continued(tmp_path: Path) -> None:
    record(tmp_path)
    once = rows_of(tmp_path).num_rows
    record(tmp_path, new_session("20250102T000000-2"), prefix="b")
    assert rows_of(tmp_path).num_rows == 2 * once
    card = (tmp_path / "README.md").read_text()
    assert f"{2 * once} rows of 40 requests" in card
    validate(tmp_path)


def test_vectors_are_stored_as_they_were_captured(tmp_path: Path) -> None:
    vectors = np.random.default_rng(3).standard_normal((2, D)).astype(np.float16)
    rows = step_rows(1, {"a-00000001": 0, "b-00000002": 0}, vectors.tolist())
    write(tmp_path, [rows], [ended("b-00000002", 5), ended("a-00000001", 5)])
    stored = rows_of(tmp_path)["hidden_state"].combine_chunks().flatten().to_numpy()
    np.testing.assert_array_equal(stored.reshape(2, D), vectors[::-1])


def test_a_new_dataset_is_for_its_owner_only(tmp_path: Path) -> None:
    recorder_in(tmp_path / "new").close()
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    (tmp_path / "shared").mkdir(mode=0o755)
    recorder_in(tmp_path / "shared").close()
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o755, "as it was chosen"

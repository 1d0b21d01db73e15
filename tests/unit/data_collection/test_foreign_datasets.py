"""Datasets of somebody else: what is in their files harms neither disk, memory nor terminal."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recorded_dataset import change_shard, new_session, record, with_column

from data_collection.dataset.dataset_commands import TRANSCRIPTS_SCHEMA, export_transcripts, merge
from data_collection.dataset.dataset_schema import (
    DatasetError,
    read_sessions,
    requests_files,
    rows_files,
)
from data_collection.dataset.inspect_dataset import inspect
from data_collection.dataset.validate_dataset import validate
from data_collection.parquet_file import UnusableParquetError, parquet_batches
from data_collection.workload.prompts import PromptError, load_transcripts
from predictor.training.prompt_table import load_prompt_rows
from predictor.training.row_table import load_rows

Table = Callable[[pa.Table], pa.Table]
CLEAR = "\x1b[2J"


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    record(tmp_path / "recorded")
    return tmp_path / "recorded"


def transcripts(dataset: Path) -> None:
    export_transcripts(dataset, dataset.with_name("out.parquet"))


def merged(dataset: Path) -> None:
    other = dataset.with_name("other")
    if not other.exists():
        record(other, new_session("other"), prefix="b")
    merge([other, dataset], dataset.with_name("merged"))


def prompt_rows(dataset: Path) -> None:
    load_prompt_rows(dataset, 0)


NAMES = ("request_id", "external_id", "total_tokens", "finish_reason")


def change_session(dataset: Path, **changes: Any) -> None:
    (file,) = (dataset / "sessions").glob("*.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "a/b", "", "a b", "a\n", CLEAR])
def test_a_session_s_name_is_no_path(dataset: Path, tmp_path: Path, name: str) -> None:
    change_session(dataset, name=name)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DatasetError, match=r"not a session's file: .*\$\.name"):
        merged(dataset)
    added = set(tmp_path.rglob("*")) - set(before)
    assert all(path.is_relative_to(tmp_path / "other") for path in added)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", 10**22),
        ("requests", -1),
        ("dropped_rows", 1.5),
        ("hidden_size", 10**9),
        ("workload", {"prompts": {"deep": 1}}),
        ("sampling", []),
    ],
)
def test_what_a_session_cannot_say_is_named(dataset: Path, field: str, value: Any) -> None:
    change_session(dataset, **{field: value})
    with pytest.raises(DatasetError, match=rf"not a session's file: .*\$\.{field}"):
        read_sessions(dataset)


def test_a_session_nested_deeply_is_refused(dataset: Path) -> None:
    (file,) = (dataset / "sessions").glob("*.json")
    nested = "[" * 100_000
    file.write_text(file.read_text().rstrip()[:-1] + f', "more": {nested}')
    with pytest.raises(DatasetError, match="not a session's file"):
        read_sessions(dataset)


def first_empty(name: str) -> Table:
    return with_column(name, lambda values: [None, *values[1:]])


def doubled(name: str) -> Table:
    return lambda table: table.append_column(name, table[name])


def without(name: str) -> Table:
    return lambda table: table.drop_columns([name])


def as_text(name: str) -> Table:
    def change(table: pa.Table) -> pa.Table:
        return table.set_column(
            table.schema.get_field_index(name), name, pa.array(["7"] * table.num_rows)
        )

    return change


EMPTY = {name: (first_empty(name), f"empty values in {name}") for name in NAMES}
DOUBLED = {name: (doubled(name), f"{name!r} more than once") for name in NAMES}
MISSING = without("finish_reason"), "finish_reason is missing"
TEXT = as_text("total_tokens"), "total_tokens is string, it should be int32"


@pytest.mark.parametrize(
    ("read", "wrong"),
    [
        *((validate, wrong) for wrong in (*EMPTY.values(), *DOUBLED.values(), MISSING, TEXT)),
        *((inspect, wrong) for wrong in (EMPTY["total_tokens"], EMPTY["finish_reason"])),
        *((inspect, wrong) for wrong in (DOUBLED["total_tokens"], MISSING, TEXT)),
        *(
            (transcripts, wrong)
            for wrong in (EMPTY["external_id"], DOUBLED["external_id"], MISSING)
        ),
        *((merged, wrong) for wrong in (EMPTY["request_id"], DOUBLED["request_id"])),
        *((load_rows, wrong) for wrong in (EMPTY["total_tokens"], DOUBLED["external_id"])),
        *((prompt_rows, wrong) for wrong in (EMPTY["total_tokens"], EMPTY["external_id"])),
        *((prompt_rows, wrong) for wrong in (DOUBLED["finish_reason"], MISSING, TEXT)),
    ],
)
def test_requests_that_are_not_what_they_should_be_are_named(
    dataset: Path, read: Callable[[Path], object], wrong: tuple[Table, str]
) -> None:
    shard = requests_files(dataset)[0]
    change, message = wrong
    change_shard(shard, change)
    with pytest.raises(DatasetError) as raised:
        read(dataset)
    assert message in str(raised.value)
    assert shard.name in str(raised.value)


def test_rows_with_an_empty_value_are_not_learned_from(dataset: Path) -> None:
    shard = rows_files(dataset)[0]
    change_shard(shard, first_empty("remaining_tokens"))
    with pytest.raises(DatasetError, match=f"{shard.name}: empty values in remaining_tokens"):
        load_rows(dataset)


def of_long_texts(table: pa.Table) -> pa.Table:
    """A text of 1 MB in 2,000 rows: kilobytes on the disk, gigabytes in memory."""
    few = pa.table({name: table[name].take([0] * 2000) for name in table.column_names})
    text = pa.DictionaryArray.from_arrays(np.zeros(2000, np.int32), ["x" * 1_000_000])
    return few.set_column(few.schema.get_field_index("finish_reason"), "finish_reason", text)


def of_many_rows(table: pa.Table) -> pa.Table:
    return table.take([0] * 300_000)


def of_long_lists(table: pa.Table) -> pa.Table:
    ids = np.zeros(20_000_000, np.int32)
    offsets = np.array([*([0] * table.num_rows), len(ids)], np.int32)
    place = table.schema.get_field_index("prompt_token_ids")
    return table.set_column(place, "prompt_token_ids", pa.ListArray.from_arrays(offsets, ids))


BOMBS = [of_long_texts, of_many_rows, of_long_lists]


@pytest.fixture(scope="module", params=BOMBS, ids=lambda bomb: bomb.__name__)
def bomb(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard of requests of a few kilobytes."""
    folder = tmp_path_factory.mktemp("bomb")
    record(folder)
    table = request.param(pq.ParquetFile(requests_files(folder)[0]).read())
    file = folder / "bomb.parquet"
    pq.write_table(table, file, compression="zstd", store_schema=False)
    assert file.stat().st_size < 100_000
    return file


@contextmanager
def reading_pool() -> Iterator[pa.MemoryPool]:
    """Let Arrow take memory of a pool of which the bombs were not made."""
    before, pool = pa.default_memory_pool(), pa.system_memory_pool()
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(before)


@pytest.mark.parametrize("read", [validate, inspect, transcripts, load_rows, prompt_rows])
def test_a_small_shard_does_not_fill_the_memory(
    dataset: Path, bomb: Path, read: Callable[[Path], object]
) -> None:
    shard = requests_files(dataset)[0]
    shard.write_bytes(bomb.read_bytes())
    with reading_pool() as pool, pytest.raises(DatasetError, match=r"parquet: .*so small a file"):
        read(dataset)
    assert pool.max_memory() < 200 << 20


def test_transcripts_and_texts_are_bounded_alike(tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    columns = {
        field.name: pa.array([None] * 2000, field.type)
        for field in TRANSCRIPTS_SCHEMA
        if field.name != "task"
    }
    task = pa.DictionaryArray.from_arrays(np.zeros(2000, np.int32), ["x" * 1_000_000])
    pq.write_table(pa.table({**columns, "task": task}), file, compression="zstd")
    with pytest.raises(PromptError, match=r"t\.parquet: .*so small a file"):
        load_transcripts(file)


def test_texts_that_fit_are_read_as_they_are(tmp_path: Path) -> None:
    table = pa.table(
        {
            "short": pa.array(["a", None, "é"] * 1000),
            "large": pa.array(["b", "c", None] * 1000, pa.large_string()),
            "bytes": pa.array([b"b", None, b"\xff"] * 1000),
            "vector": pa.array([[1, 2], [3, 4], [5, 6]] * 1000, pa.list_(pa.float16(), 2)),
            "number": pa.array([1, 2, None] * 1000),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=700)
    batches = list(parquet_batches(tmp_path / "t.parquet", rows=900))
    assert pa.Table.from_batches(batches).equals(table)
    (first, *_) = parquet_batches(tmp_path / "t.parquet", ["large", "number"])
    assert sorted(first.schema.names) == ["large", "number"]


def test_lists_of_texts_are_refused(tmp_path: Path) -> None:
    """How large they are is not known before they are read."""
    pq.write_table(pa.table({"a": [["x"]], "b": [1]}), tmp_path / "t.parquet")
    with pytest.raises(UnusableParquetError, match=r"column 'a' is list<.*: lists of texts"):
        list(parquet_batches(tmp_path / "t.parquet"))
    assert len(list(parquet_batches(tmp_path / "t.parquet", ["b"]))) == 1


def test_names_reach_the_terminal_as_text(
    dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{CLEAR}a\n| b\u202e"
    change_session(dataset, model=f"$x^{name}")
    named = with_column("task", lambda values: [name] * len(values))
    change_shard(requests_files(dataset)[0], named)
    inspect(dataset)
    printed = capsys.readouterr().out
    assert "\\x1b[2Ja\\n| b\\u202e" in printed
    assert all(line.isprintable() for line in printed.splitlines())
    shard = rows_files(dataset)[0]
    change_shard(shard, with_column("request_id", lambda values: [name] * len(values)))
    with pytest.raises(DatasetError) as raised:
        validate(dataset)
    assert all(line.isprintable() for line in str(raised.value).splitlines())
    assert "\n| b" not in str(raised.value)

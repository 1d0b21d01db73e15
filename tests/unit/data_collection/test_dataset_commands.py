"""Datasets: validated, inspected, merged, split; whole, damaged, and made by somebody else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_dataset import D, change_shard, ended, new_session, record, step_rows, with_column

from data_collection.capture.capture_config import RecordConfig
from data_collection.capture.recorder import Recorder
from data_collection.dataset.dataset_commands import TRANSCRIPTS_SCHEMA, export_transcripts, merge
from data_collection.dataset.dataset_schema import (
    DatasetError,
    read_sessions,
    requests_files,
    rows_files,
    split_requests,
)
from data_collection.dataset.inspect_dataset import inspect
from data_collection.dataset.validate_dataset import validate
from data_collection.parquet_file import UnusableParquetError, parquet_batches
from data_collection.workload.prompts import PromptError, load_transcripts
from predictor.training.row_table import load_rows
from predictor.training.rows_data_module import load_prompt_rows

ROWS_PER_DATASET = sum(-(-int(total) // 20) for total in np.linspace(1, 100, 20).astype(int))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    record(tmp_path / "recorded")
    return tmp_path / "recorded"


def set_column(name: str, row: int, value: object) -> Callable[[pa.Table], pa.Table]:
    return with_column(name, lambda values: [*values[:row], value, *values[row + 1 :]])


def problems(dataset: Path) -> str:
    with pytest.raises(DatasetError) as raised:
        validate(dataset)
    return str(raised.value)


def test_a_recorded_dataset_is_valid(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validate(dataset)
    printed = capsys.readouterr().out
    assert printed.startswith(f"valid: {ROWS_PER_DATASET} rows of 20 requests")
    assert "train 14, validation 3, test 3" in printed


def test_too_few_requests_to_split_are_still_a_valid_dataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(RecordConfig(path=str(tmp_path)), new_session())
    recorder.on_rows(step_rows(1, {"a-00000001": 0}))
    recorder.on_finished([ended("a-00000001", 5)])
    recorder.close()
    validate(tmp_path)
    assert "too few to split" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "damage", "untold"),
    [
        (rows_files, lambda content: content[:-100], "requests table says"),
        (rows_files, lambda content: content[:4] + bytes(396) + content[400:], "table says"),
        (requests_files, lambda content: content[:50], "not in the requests table"),
    ],
    ids=["truncated rows", "damage within rows", "truncated requests"],
)
def test_a_damaged_shard_is_named(
    dataset: Path,
    files: Callable[[Path], list[Path]],
    damage: Callable[[bytes], bytes],
    untold: str,
) -> None:
    shard = files(dataset)[0]
    shard.write_bytes(damage(shard.read_bytes()))
    message = problems(dataset)
    assert f"{shard.name}: not a whole Parquet file" in message
    assert untold not in message, "what follows from it is not listed as well"
    with pytest.raises(DatasetError):
        load_rows(dataset)


def test_vectors_of_another_model_are_named(dataset: Path) -> None:
    (file,) = (dataset / "sessions").glob("*.json")
    session = json.loads(file.read_text())
    file.write_text(json.dumps(session | {"hidden_size": 3584}))
    shard = rows_files(dataset)[0]
    assert (
        f"{shard.name}: hidden_state has {D} values, the dataset card says 3584: "
        "was it collected from another model?"
    ) in problems(dataset)


@pytest.mark.parametrize("batch_rows", [4096, 1])
def test_rows_out_of_order_are_found_also_from_batch_to_batch(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, batch_rows: int
) -> None:
    monkeypatch.setattr("data_collection.dataset.validate_dataset._BATCH_ROWS", batch_rows)
    validate(dataset)
    shard = rows_files(dataset)[-1]
    change_shard(shard, lambda table: table.take(list(reversed(range(table.num_rows)))))
    assert "generated_tokens falls within a request" in problems(dataset)


def test_a_shard_that_is_missing_or_appears_twice_is_found(dataset: Path) -> None:
    shard = rows_files(dataset)[-1]
    copy = shard.with_name("rows-copy.parquet")
    copy.write_bytes(shard.read_bytes())
    assert "rows are not as many as the requests table says" in problems(dataset)
    shard.unlink()
    copy.unlink()
    assert "rows are not as many as the requests table says" in problems(dataset)


def test_all_problems_are_listed_with_counts(dataset: Path) -> None:
    first, second = rows_files(dataset)[:2]
    change_shard(first, set_column("remaining_tokens", 1, 0))
    change_shard(second, lambda table: table.drop_columns(["task"]))
    message = problems(dataset)
    assert message.count("\n- ") == 3
    assert "remaining_tokens is below 1: 1 times, first" in message
    assert "task is missing" in message


@pytest.mark.parametrize("command", [validate, inspect])
def test_a_folder_without_a_dataset_or_its_rows_is_refused(
    tmp_path: Path, command: Callable[[Path], None]
) -> None:
    with pytest.raises(DatasetError, match="not a dataset recorded by Headway"):
        command(tmp_path)
    with pytest.raises(DatasetError, match="no such folder"):
        command(tmp_path / "absent")
    Recorder(RecordConfig(path=str(tmp_path)), new_session()).close()
    with pytest.raises(DatasetError, match="nothing was recorded yet"):
        command(tmp_path)


def test_inspect_prints_tables_and_draws_a_picture(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.png"
    inspect(dataset, picture)
    assert not (dataset / "inspect.png").exists()
    printed = capsys.readouterr().out
    assert f"{ROWS_PER_DATASET} rows of 20 requests" in printed
    assert "| output | 50.0 | 50.0 |" in printed
    assert "| length | 1 | 5.0% | censored |" in printed
    assert "| story | 20 | 100.0% |" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_merged_datasets_are_one_valid_dataset(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "second", new_session("20250102T000000-2"), prefix="b")
    merge([dataset, tmp_path / "second"], tmp_path / "merged")
    capsys.readouterr()
    validate(tmp_path / "merged")
    assert f"valid: {2 * ROWS_PER_DATASET} rows of 40 requests" in capsys.readouterr().out
    assert len(read_sessions(tmp_path / "merged")) == 2
    assert f"{2 * ROWS_PER_DATASET} rows of 40" in (tmp_path / "merged" / "README.md").read_text()
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("session", "prefix", "said"),
    [
        ({"model": "acme/other-model"}, "b", ["acme/small-model", "acme/other-model"]),
        ({"name": "20250101T000000-1"}, "b", ["both hold session 20250101T000000-1"]),
        ({}, "a", ["both hold request prompt-a0-00000000"]),
    ],
    ids=["another model", "the same session", "the same requests"],
)
def test_datasets_that_do_not_fit_together_are_not_merged(
    dataset: Path, tmp_path: Path, session: dict[str, str], prefix: str, said: list[str]
) -> None:
    other = tmp_path / "second"
    record(other, new_session(**{"name": "20250102T000000-2", **session}), prefix=prefix)
    with pytest.raises(DatasetError) as raised:
        merge([dataset, other], tmp_path / "merged")
    for words in (str(dataset), str(other), *said):
        assert words in str(raised.value)
    assert not (tmp_path / "merged").exists()


def test_a_merge_that_is_refused_leaves_everything_as_it_was(dataset: Path, tmp_path: Path) -> None:
    second, out = tmp_path / "second", tmp_path / "merged"
    record(second, new_session("20250102T000000-2"), prefix="b")
    with pytest.raises(DatasetError, match="at least two"):
        merge([dataset], out)
    shard = rows_files(second)[0]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(DatasetError, match=f"{shard.name}: not a whole Parquet file"):
        merge([dataset, second], out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recorded", "second"]
    out.mkdir()
    (out / "precious").write_text("data")
    with pytest.raises(DatasetError, match="not an empty folder"):
        merge([dataset, second], out)
    assert [path.name for path in out.iterdir()] == ["precious"]


groups = st.lists(st.integers(0, 40), min_size=20, max_size=120).filter(
    lambda numbers: len(set(numbers)) >= 10
)


@given(groups, st.integers(0, 1000))
def test_parts_cover_everything_and_share_no_client(numbers: list[int], seed: int) -> None:
    group = np.array(numbers)
    parts = split_requests(group, seed)
    assert sorted(np.concatenate(list(parts.values()))) == list(range(len(group)))
    owners = [set(group[part]) for part in parts.values()]
    assert sum(map(len, owners)) == len(set(numbers))
    assert all(owners)
    assert all((np.diff(part) > 0).all() for part in parts.values())


def test_a_seed_splits_as_in_star() -> None:
    parts, again, other = (split_requests(np.arange(1000), seed)["test"] for seed in (0, 0, 1))
    assert len(parts) == 150
    assert np.array_equal(parts, again) and not np.array_equal(parts, other)
    with pytest.raises(DatasetError, match="2 requests are too few"):
        split_requests(np.array([0, 0, 0, 1]), seed=0)


Table = Callable[[pa.Table], pa.Table]
CLEAR = "\x1b[2J"


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


def cast(name: str, kind: str) -> Table:
    return lambda table: table.set_column(
        table.schema.get_field_index(name), name, table[name].cast(kind)
    )


def twice(table: pa.Table) -> pa.Table:
    return pa.concat_tables([table.slice(0, 1), table])


Wrong = tuple[Table, str]
NOT_FINITE = "hidden_state has NaN or infinite"
NOT_MULTIPLE = "generated_tokens is not a multiple of k = 20"
ROWS: list[Wrong] = [
    (without("censored"), "censored is missing"),
    (cast("max_tokens", "int64"), "max_tokens is int64, it should be int32"),
    (set_column("hidden_state", 2, [float("nan")] + [0.0] * (D - 1)), NOT_FINITE),
    (set_column("hidden_state", 2, [float("inf")] + [0.0] * (D - 1)), NOT_FINITE),
    (set_column("remaining_tokens", 2, 0), "remaining_tokens is below 1"),
    (set_column("remaining_tokens", 2, 99), "is not the request's total_tokens"),
    (set_column("generated_tokens", 2, 7), NOT_MULTIPLE),
    (set_column("generated_tokens", 2, -20), NOT_MULTIPLE),
    (set_column("request_id", 2, "nobody-00000000"), "not in the requests table"),
    (set_column("finish_reason", 2, "length"), "row's censored does not agree"),
    (set_column("task", 2, None), "empty values in task"),
    (twice, "two rows with the same generated_tokens: 1 times"),
    (twice, "has 2, not 1"),
]
EMPTY = {name: (first_empty(name), f"empty values in {name}") for name in NAMES}
DOUBLED = {name: (doubled(name), f"{name!r} more than once") for name in NAMES}
MISSING: Wrong = without("finish_reason"), "finish_reason is missing"
TEXT: Wrong = cast("total_tokens", "string"), "total_tokens is string, it should be int32"
CENSORED: Wrong = set_column("censored", 0, True), "request's censored does not agree"
TWICE: Wrong = twice, "a request appears twice"
REQUESTS: dict[Callable[[Path], object], list[Wrong]] = {
    validate: [*EMPTY.values(), *DOUBLED.values(), MISSING, TEXT, CENSORED, TWICE],
    inspect: [*(EMPTY[name] for name in NAMES[2:]), DOUBLED["total_tokens"], MISSING, TEXT],
    transcripts: [EMPTY["external_id"], DOUBLED["external_id"], MISSING],
    merged: [EMPTY["request_id"], DOUBLED["request_id"]],
    load_rows: [EMPTY["total_tokens"], DOUBLED["external_id"]],
    prompt_rows: [*(EMPTY[name] for name in NAMES[1:3]), DOUBLED["finish_reason"], MISSING, TEXT],
}


@pytest.mark.parametrize(
    ("files", "read", "wrong"),
    [
        *((rows_files, validate, wrong) for wrong in ROWS),
        (rows_files, load_rows, (first_empty("remaining_tokens"), "empty values in remaining_tok")),
        *((requests_files, read, wrong) for read, many in REQUESTS.items() for wrong in many),
    ],
)
def test_what_is_wrong_is_found_and_placed(
    dataset: Path, files: Callable[[Path], list[Path]], read: Callable[[Path], object], wrong: Wrong
) -> None:
    shard = files(dataset)[0]
    change, message = wrong
    change_shard(shard, change)
    with pytest.raises(DatasetError) as raised:
        read(dataset)
    assert message in str(raised.value)
    assert shard.name in str(raised.value)


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


@pytest.fixture(scope="module", params=[of_long_texts, of_many_rows, of_long_lists])
def bomb(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard of requests of a few kilobytes."""
    folder = tmp_path_factory.mktemp("bomb")
    record(folder)
    table = request.param(pq.ParquetFile(requests_files(folder)[0]).read())
    file = folder / "bomb.parquet"
    pq.write_table(table, file, compression="zstd", store_schema=False)
    assert file.stat().st_size < 100_000
    return file


@pytest.mark.parametrize("read", [validate, inspect, transcripts, load_rows, prompt_rows])
def test_a_small_shard_does_not_fill_the_memory(
    dataset: Path, bomb: Path, read: Callable[[Path], object]
) -> None:
    shard = requests_files(dataset)[0]
    shard.write_bytes(bomb.read_bytes())
    before, pool = pa.default_memory_pool(), pa.system_memory_pool()
    pa.set_memory_pool(pool)  # of which the bombs were not made
    try:
        with pytest.raises(DatasetError, match=r"parquet: .*so small a file"):
            read(dataset)
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() < 200 << 20


def test_transcripts_and_texts_are_bounded_alike(tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    columns = {one.name: pa.array([None] * 2000, one.type) for one in TRANSCRIPTS_SCHEMA}
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

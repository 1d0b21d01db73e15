import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from matplotlib.image import imread
from recorded_dataset import D, change_shard, ended, new_session, record, step_rows

from data_collection.capture.capture_config import RecordConfig
from data_collection.capture.recorder import Recorder
from data_collection.dataset.dataset_schema import (
    DatasetError,
    read_sessions,
    requests_files,
    rows_files,
    rows_schema,
)
from data_collection.dataset.inspect_dataset import inspect
from data_collection.dataset.merge_datasets import merge
from data_collection.dataset.validate_dataset import validate
from predictor.training.row_table import load_rows

ROWS_PER_DATASET = sum(-(-int(total) // 20) for total in np.linspace(1, 100, 20).astype(int))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    record(tmp_path / "recorded")
    return tmp_path / "recorded"


def set_column(name: str, row: int, value: object) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        values = table[name].to_pylist()
        values[row] = value
        field = table.schema.field(name)
        place = table.schema.get_field_index(name)
        return table.set_column(place, field, pa.array(values, field.type))

    return change


def problems(dataset: Path) -> str:
    with pytest.raises(DatasetError) as raised:
        validate(dataset)
    return str(raised.value)


def test_a_recorded_dataset_is_valid(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validate(dataset)
    printed = capsys.readouterr().out
    assert printed.startswith(f"valid: {ROWS_PER_DATASET} rows of 20 requests")
    assert "train 14, validation 3, test 3" in printed


def test_hugging_face_datasets_reads_what_was_recorded(dataset: Path, tmp_path: Path) -> None:
    from datasets import load_dataset

    files = [str(file) for file in rows_files(dataset)]
    rows = load_dataset(
        "parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache")
    )
    assert len(rows) == ROWS_PER_DATASET
    assert rows.column_names == rows_schema(D, "float16").names
    assert len(rows[0]["hidden_state"]) == D


def test_too_few_requests_to_split_are_still_a_valid_dataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(RecordConfig(path=str(tmp_path)), new_session())
    recorder.on_rows(step_rows(1, {"a-00000001": 0}))
    recorder.on_finished([ended("a-00000001", 5)])
    recorder.close()
    validate(tmp_path)
    assert "too few to split" in capsys.readouterr().out


def test_a_truncated_shard_is_named(dataset: Path) -> None:
    shard = rows_files(dataset)[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    message = problems(dataset)
    assert f"{shard.name}: not a whole Parquet file" in message
    assert "requests table says" not in message  # what follows from it is not listed as well


def test_damage_within_a_shard_is_named(dataset: Path) -> None:
    shard = rows_files(dataset)[0]
    whole = bytearray(shard.read_bytes())
    whole[4:400] = bytes(396)
    shard.write_bytes(whole)
    assert f"{shard.name}: not a whole Parquet file" in problems(dataset)


def test_a_truncated_requests_shard_is_named(dataset: Path) -> None:
    shard = requests_files(dataset)[0]
    shard.write_bytes(shard.read_bytes()[:50])
    message = problems(dataset)
    assert f"{shard.name}: not a whole Parquet file" in message
    assert "not in the requests table" not in message


def test_vectors_of_another_model_are_named(dataset: Path) -> None:
    (file,) = (dataset / "sessions").glob("*.json")
    session = json.loads(file.read_text())
    file.write_text(json.dumps(session | {"hidden_size": 3584}))
    shard = rows_files(dataset)[0]
    assert (
        f"{shard.name}: hidden_state has {D} values, the dataset card says 3584: "
        "was it collected from another model?"
    ) in problems(dataset)


def test_a_missing_column_is_named(dataset: Path) -> None:
    shard = rows_files(dataset)[0]
    change_shard(shard, lambda table: table.drop_columns(["censored"]))
    assert f"{shard.name}: censored is missing" in problems(dataset)


def test_a_wrong_type_is_named(dataset: Path) -> None:
    shard = rows_files(dataset)[0]
    place = rows_schema(D, "float16").get_field_index("max_tokens")
    change_shard(
        shard,
        lambda table: table.set_column(place, "max_tokens", table["max_tokens"].cast("int64")),
    )
    assert f"{shard.name}: max_tokens is int64, it should be int32" in problems(dataset)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("hidden_state", [float("nan")] + [0.0] * (D - 1), "hidden_state has NaN or infinite"),
        ("hidden_state", [float("inf")] + [0.0] * (D - 1), "hidden_state has NaN or infinite"),
        ("remaining_tokens", 0, "remaining_tokens is below 1"),
        ("remaining_tokens", 99, "remaining_tokens + generated_tokens is not the request's"),
        ("generated_tokens", 7, "generated_tokens is not a multiple of k = 20"),
        ("generated_tokens", -20, "generated_tokens is not a multiple of k = 20"),
        ("request_id", "nobody-00000000", "row's request is not in the requests table"),
        ("finish_reason", "length", "row's censored does not agree with its finish_reason"),
        ("task", None, "empty values in task"),
    ],
)
def test_a_wrong_row_is_found_and_placed(
    dataset: Path, column: str, value: object, message: str
) -> None:
    shard = rows_files(dataset)[0]
    change_shard(shard, set_column(column, 2, value))
    found = problems(dataset)
    assert message in found
    assert shard.name in found


def test_rows_out_of_order_are_found(dataset: Path) -> None:
    shard = rows_files(dataset)[-1]
    change_shard(shard, lambda table: table.take(list(reversed(range(table.num_rows)))))
    assert "generated_tokens falls within a request" in problems(dataset)


def test_a_row_that_appears_twice_is_found(dataset: Path) -> None:
    shard = rows_files(dataset)[0]
    change_shard(shard, lambda table: pa.concat_tables([table.slice(0, 1), table]))
    found = problems(dataset)
    assert "two rows with the same generated_tokens: 1 times" in found
    assert "has 2, not 1" in found


def test_a_shard_that_appears_twice_is_found(dataset: Path) -> None:
    shard = rows_files(dataset)[-1]
    shard.with_name("rows-copy.parquet").write_bytes(shard.read_bytes())
    assert "rows are not as many as the requests table says" in problems(dataset)


def test_a_missing_rows_shard_is_found(dataset: Path) -> None:
    rows_files(dataset)[0].unlink()
    assert "rows are not as many as the requests table says" in problems(dataset)


def test_a_wrong_request_is_found(dataset: Path) -> None:
    shard = requests_files(dataset)[0]
    change_shard(shard, set_column("censored", 0, True))
    assert "request's censored does not agree with its finish_reason" in problems(dataset)


def test_a_request_that_appears_twice_is_found(dataset: Path) -> None:
    shard = requests_files(dataset)[0]
    change_shard(shard, lambda table: pa.concat_tables([table, table.slice(0, 1)]))
    assert "a request appears twice" in problems(dataset)


def test_all_problems_are_listed_with_counts(dataset: Path) -> None:
    first, second = rows_files(dataset)[:2]
    change_shard(first, set_column("remaining_tokens", 1, 0))
    change_shard(second, lambda table: table.drop_columns(["task"]))
    message = problems(dataset)
    assert message.count("\n- ") == 3
    assert "remaining_tokens is below 1: 1 times, first" in message
    assert "task is missing" in message


@pytest.mark.parametrize("command", [validate, inspect])
def test_a_folder_without_a_dataset_is_refused(
    tmp_path: Path, command: Callable[[Path], None]
) -> None:
    with pytest.raises(DatasetError, match="not a dataset recorded by Headway"):
        command(tmp_path)
    with pytest.raises(DatasetError, match="no such folder"):
        command(tmp_path / "absent")


@pytest.mark.parametrize("command", [validate, inspect])
def test_an_empty_dataset_is_refused(tmp_path: Path, command: Callable[[Path], None]) -> None:
    Recorder(RecordConfig(path=str(tmp_path)), new_session()).close()
    with pytest.raises(DatasetError, match="nothing was recorded yet"):
        command(tmp_path)


def test_inspect_prints_tables_and_draws_a_picture(
    dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect(dataset)
    printed = capsys.readouterr().out
    assert f"{ROWS_PER_DATASET} rows of 20 requests" in printed
    assert "| output | 50.0 | 50.0 |" in printed
    assert "| length | 1 | 5.0% | censored |" in printed
    assert "| story | 20 | 100.0% |" in printed
    picture = dataset / "inspect.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    height, width, _ = imread(picture).shape
    assert width > 1200
    assert height > 400
    assert np.unique(imread(picture).reshape(-1, 4), axis=0).shape[0] > 20


def test_inspect_puts_the_picture_where_it_is_asked_to(dataset: Path, tmp_path: Path) -> None:
    inspect(dataset, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").exists()
    assert not (dataset / "inspect.png").exists()


def test_inspect_names_a_damaged_shard(dataset: Path) -> None:
    shard = requests_files(dataset)[0]
    shard.write_bytes(b"")
    with pytest.raises(DatasetError, match=shard.name):
        inspect(dataset)


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


def test_datasets_of_two_models_are_not_merged(dataset: Path, tmp_path: Path) -> None:
    other = tmp_path / "second"
    record(other, new_session("20250102T000000-2", model="acme/other-model"), prefix="b")
    with pytest.raises(DatasetError) as raised:
        merge([dataset, other], tmp_path / "merged")
    for name in (str(dataset), str(other), "acme/small-model", "acme/other-model"):
        assert name in str(raised.value)
    assert not (tmp_path / "merged").exists()


def test_a_dataset_is_not_merged_with_itself(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="both hold session 20250101T000000-1"):
        merge([dataset, dataset], tmp_path / "merged")


def test_a_request_in_both_datasets_is_refused(dataset: Path, tmp_path: Path) -> None:
    record(tmp_path / "second", new_session("20250102T000000-2"), prefix="a")
    with pytest.raises(DatasetError, match="both hold request prompt-a0-00000000"):
        merge([dataset, tmp_path / "second"], tmp_path / "merged")


def test_merge_leaves_an_existing_folder_alone(dataset: Path, tmp_path: Path) -> None:
    record(tmp_path / "second", new_session("20250102T000000-2"), prefix="b")
    out = tmp_path / "merged"
    out.mkdir()
    (out / "precious").write_text("data")
    with pytest.raises(DatasetError, match="not an empty folder"):
        merge([dataset, tmp_path / "second"], out)
    assert [path.name for path in out.iterdir()] == ["precious"]


def test_merge_names_a_damaged_shard_and_leaves_nothing(dataset: Path, tmp_path: Path) -> None:
    record(tmp_path / "second", new_session("20250102T000000-2"), prefix="b")
    shard = rows_files(tmp_path / "second")[0]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(DatasetError, match=f"{shard.name}: not a whole Parquet file"):
        merge([dataset, tmp_path / "second"], tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recorded", "second"]


def test_merge_needs_two_datasets(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="at least two"):
        merge([dataset], tmp_path / "merged")


def test_requests_are_followed_from_batch_to_batch(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_collection.dataset.validate_dataset._BATCH_ROWS", 1)
    validate(dataset)
    shard = rows_files(dataset)[-1]
    change_shard(shard, lambda table: table.take(list(reversed(range(table.num_rows)))))
    assert "generated_tokens falls within a request" in problems(dataset)


@pytest.mark.parametrize("seed", range(40))
def test_damage_anywhere_in_a_shard_is_read_or_named(
    dataset: Path, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    generator = random.Random(seed)
    shard = generator.choice([*rows_files(dataset), *requests_files(dataset)])
    content = bytearray(shard.read_bytes())
    for _ in range(generator.randint(1, 8)):
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    shard.write_bytes(content)
    with suppress(DatasetError):
        load_rows(dataset)

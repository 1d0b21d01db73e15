"""Transcripts: exported from a dataset, read again, turned into requests and back."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from recorded_dataset import ended, new_session, record, step_rows

from data_collection.capture.capture_config import RecordConfig
from data_collection.capture.recorder import Recorder
from data_collection.capture.requests import FinishedRequest, Replay, as_recorded, parse_request_id
from data_collection.dataset.dataset_commands import export_transcripts
from data_collection.dataset.dataset_schema import DatasetError, requests_files
from data_collection.dataset.validate_dataset import validate
from data_collection.workload.engine_requests import transcript_requests
from data_collection.workload.prompts import PromptError, load_transcripts


class Words:
    """A tokenizer of whole numbers, with a template of one token before and after."""

    eos_token_id = 2

    def __len__(self) -> int:
        return 1000

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens, "an answer goes on from its prompt"
        return [int(word) for word in text.split()]

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return [7, *(int(word) for m in messages for word in m["content"].split()), 8]


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def finished(request: Any, reason: str = "length") -> FinishedRequest:
    """What the engine says of a request that replays: one token was generated."""
    name, ids = f"{request.id}-0123abcd", request.token_ids
    return FinishedRequest(name, reason, len(ids), 1, 1, ids, [5], request.extra_args, 0.0, 1.0)


def test_a_dataset_survives_as_its_transcripts(tmp_path: Path) -> None:
    record(tmp_path / "dataset")
    export_transcripts(tmp_path / "dataset", tmp_path / "mine.parquet")
    file = load_transcripts(tmp_path / "mine.parquet")
    (session,) = [new_session()]
    assert (file.model, file.revision) == (session.model, session.revision)

    config = RecordConfig(path=str(tmp_path / "again"), replays=True, flush_seconds=60)
    recorder = Recorder(config, new_session(name="again", dtype=config.dtype))
    requests = transcript_requests(file.transcripts)(Words())
    recorder.on_finished([finished(request) for request in requests])
    recorder.close()

    def entries(dataset: Path) -> list[dict[str, Any]]:
        rows = [row for f in requests_files(dataset) for row in pq.read_table(f).to_pylist()]
        for row in rows:
            del row["request_id"], row["rows"]
        return sorted(rows, key=lambda row: row["external_id"])

    assert entries(tmp_path / "again") == entries(tmp_path / "dataset")


def test_requests_without_token_ids_are_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(RecordConfig(path=str(tmp_path / "d"), dtype="float32"), new_session())
    recorder.on_rows(step_rows(1, {"open-00000001": 0}))
    recorder.on_finished([ended("a-00000002", 3), ended("a-00000003", 4)])
    recorder.on_finished([ended("left-00000004", 3, "abort")])
    recorder.close()
    validate(tmp_path / "d")
    export_transcripts(tmp_path / "d", tmp_path / "mine.parquet")
    names = [t.request_id for t in load_transcripts(tmp_path / "mine.parquet").transcripts]
    assert names == ["0_a", "1_a", "0_left"], "two answers to one prompt are numbered"
    assert "left out: 1 requests without token ids" in capsys.readouterr().out


def test_answers_of_adapters_are_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base model would compute other rows from them."""
    record(tmp_path / "d")
    record(tmp_path / "d", new_session("20250102T000000-2"), prefix="b", adapter="poet")
    export_transcripts(tmp_path / "d", tmp_path / "mine.parquet")
    assert "20 answers" in (said := capsys.readouterr().out)
    assert "left out: 20 requests of LoRA adapters" in said


def test_a_dataset_without_transcripts_cannot_be_exported(tmp_path: Path) -> None:
    mine = tmp_path / "mine.parquet"
    record(tmp_path / "poet's", adapter="poet")
    with pytest.raises(DatasetError, match="all of its requests are of LoRA adapters"):
        export_transcripts(tmp_path / "poet's", mine)
    recorder = Recorder(RecordConfig(path=str(tmp_path / "d"), tokens=False), new_session())
    recorder.on_finished([ended("a-00000002", 3)])
    recorder.close()
    with pytest.raises(DatasetError, match="none of 1 requests has token ids"):
        export_transcripts(tmp_path / "d", mine)
    with pytest.raises(DatasetError, match="name the file"):
        export_transcripts(tmp_path / "d", mine.with_suffix(".csv"))


def test_text_is_put_into_the_template_and_ended_where_the_model_ended_it(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.jsonl",
        {"id": "5_x", "prompt": "10 11", "answer": "20 21 22"},
        {"prompt": "10", "answer": "20 21", "finish_reason": "length", "temperature": 0.5},
        {"prompt": "10", "answer": ""},
    )
    requests = transcript_requests(load_transcripts(path).transcripts)(Words())
    assert requests[0].token_ids == [7, 10, 11, 8, 20, 21, 22], "of the last one no state is needed"
    recorded = [as_recorded(finished(request)) for request in requests]
    whole, cut, empty = (one for one in recorded if one is not None)
    assert whole.output_token_ids == [20, 21, 22, Words.eos_token_id]
    assert (whole.prompt_tokens, whole.total_tokens) == (4, 4)
    assert parse_request_id(whole.request_id) == ("5_x", 0, 0)
    assert cut.output_token_ids == [20, 21]
    assert (cut.finish_reason, cut.temperature) == ("length", 0.5)
    assert empty.output_token_ids == [Words.eos_token_id]
    assert as_recorded(finished(requests[0], "abort")) is None, "a replay that was cut short"


def test_clients_of_a_recording_server_cannot_forge_lengths(tmp_path: Path) -> None:
    config = RecordConfig(path=str(tmp_path / "d"), dtype="float32")
    recorder = Recorder(config, new_session())
    replay = Replay(1, 9, 10_000, "stop").extra_args()
    recorder.on_finished([FinishedRequest("a-00000001", "stop", 3, 2, 9, [1] * 3, [4, 5], replay)])
    recorder.close()
    (file,) = requests_files(tmp_path / "d")
    (row,) = pq.read_table(file).to_pylist()
    assert (row["prompt_tokens"], row["total_tokens"], row["max_tokens"]) == (3, 2, 9)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "1"}, "line 1: needs 'answer' .a text. or 'output_token_ids'"),
        ({"answer": "1"}, "line 1: needs 'prompt'"),
        ({"prompt": "1", "output_token_ids": []}, "output_token_ids: expected token ids"),
        ({"prompt": "1", "output_token_ids": [1, -1]}, "output_token_ids: expected token ids"),
        ({"prompt_token_ids": "1", "answer": "1"}, "prompt_token_ids: expected token ids"),
        ({"prompt": "1", "answer": "1", "finish_reason": "error"}, "finish_reason: 'error'"),
        ({"prompt": "1", "answer": "1", "sample_index": "a"}, "sample_index: 'a' is invalid"),
        ({"prompt": "1", "answer": "1", "sample_index": 1 << 31}, "sample_index: 2147483648 is"),
        ({"prompt": "1", "answer": "1", "temperature": -1}, "temperature: -1 is invalid"),
    ],
)
def test_malformed_transcripts_are_refused_by_line(
    tmp_path: Path, line: dict[str, Any], message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        load_transcripts(write(tmp_path / "mine.jsonl", line))


def test_files_that_hold_no_transcripts_are_refused(tmp_path: Path) -> None:
    line = {"id": "a", "prompt": "1", "answer": "1"}
    with pytest.raises(PromptError, match="answer 0 to 'a' appeared before"):
        load_transcripts(write(tmp_path / "twice.jsonl", line, line))
    with pytest.raises(PromptError, match="no transcripts in it"):
        load_transcripts(write(tmp_path / "empty.jsonl"))
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    with pytest.raises(PromptError, match="not a whole Parquet file"):
        load_transcripts(tmp_path / "torn.parquet")
    record(tmp_path / "dataset")
    with pytest.raises(PromptError, match="not a file of transcripts: it has no id"):
        load_transcripts(requests_files(tmp_path / "dataset")[0])
    with pytest.raises(PromptError, match="cannot be read"):
        load_transcripts(tmp_path / "absent.jsonl")
    with pytest.raises(PromptError, match=r"absent\.parquet: no such file"):
        load_transcripts(tmp_path / "absent.parquet")


def test_tokens_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", {"id": "x", "prompt": "1", "output_token_ids": [1000]})
    with pytest.raises(PromptError, match="x: token 1000 is outside the model's vocabulary"):
        transcript_requests(load_transcripts(path).transcripts)(Words())

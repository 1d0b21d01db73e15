"""Answers are kept through whatever ends the program, and each of them once."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from rescheduler.batch.batch_input import Batch, BatchFileError, read_batch
from rescheduler.batch.batch_output import Answer, BatchOutput, error_path, result_path

NAMES = [f"n-{i}" for i in range(6)]


def batch_of(folder: Path, names: list[str] = NAMES) -> Batch:
    path = folder / "asked.jsonl"
    asked = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    path.write_text("".join(json.dumps({"custom_id": name, **asked}) + "\n" for name in names))
    return read_batch(path)


def answer(tokens: int) -> Answer:
    body = {"choices": [{"text": "é"}], "usage": {"completion_tokens": tokens}}
    return Answer(200, "r", Raw(json.dumps(body).encode()))


REFUSED = Answer(400, "r", Raw(b'{"error":{"message":"no","code":400}}'))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_and_errors_have_openais_format(tmp_path: Path) -> None:
    batch, out = batch_of(tmp_path), tmp_path / "new" / "asked.results.jsonl"
    with BatchOutput(batch, out) as output:
        output.add("batch_req_1", "n-0", answer(7))
        output.add("batch_req_2", "n-1", REFUSED)
        assert (output.tokens, output.failed) == ({"n-0": 7, "n-1": None}, 1)
    assert lines(out) == [
        {
            "id": "batch_req_1",
            "custom_id": "n-0",
            "response": {
                "status_code": 200,
                "request_id": "r",
                "body": {"choices": [{"text": "é"}], "usage": {"completion_tokens": 7}},
            },
            "error": None,
        }
    ]
    (error,) = lines(tmp_path / "new" / "asked.errors.jsonl")
    assert error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["message"] == "no"
    with BatchOutput(batch, out) as output:
        assert (output.tokens, output.failed) == ({"n-0": 7, "n-1": None}, 1)


LOST = Answer(
    422, "r", Raw(b'{"error":{"message":"no","type":"UnprocessableEntityError","code":422}}')
)
OTHER_422 = Answer(422, "r", Raw(b'{"error":{"message":"no","type":"BadRequestError"}}'))


def test_requests_that_cost_engines_are_known_by_name_also_later(tmp_path: Path) -> None:
    batch, out = batch_of(tmp_path), tmp_path / "out.jsonl"
    with BatchOutput(batch, out) as output:
        for name, response in zip(NAMES, (LOST, REFUSED, OTHER_422, LOST), strict=False):
            output.add("id", name, response)
        assert output.lost_engines == ["n-0", "n-3"]
    with BatchOutput(batch, out) as output:
        assert (output.lost_engines, output.failed) == (["n-0", "n-3"], 4)


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"completion_tokens": 7, "total_tokens": 9}, 7),
        ({"input_tokens": 2, "output_tokens": 7, "total_tokens": 9}, 7),
        ({"prompt_tokens": 9, "total_tokens": 9, "completion_tokens": 0}, 9),
        ({"prompt_tokens": 9, "total_tokens": 9, "completion_tokens": None}, 9),
        ({}, 0),
        (None, 0),
    ],
)
def test_every_endpoint_s_tokens_count(tmp_path: Path, usage: Any, tokens: int) -> None:
    """The end is expected by them."""
    with BatchOutput(batch_of(tmp_path), tmp_path / "out.jsonl") as output:
        output.add("id", "n-0", Answer(200, "r", Raw(json.dumps({"usage": usage}).encode())))
        assert output.tokens == {"n-0": tokens}


def test_the_names_of_the_files() -> None:
    assert result_path(Path("a/x.jsonl")) == Path("a/x.results.jsonl")
    assert result_path(Path("a/x.jsonl.gz")) == Path("a/x.results.jsonl")
    assert error_path(Path("a/x.results.jsonl")) == Path("a/x.errors.jsonl")
    assert error_path(Path("mine.jsonl")) == Path("mine.errors.jsonl")


@given(st.integers(1, len(NAMES)), st.integers(1, 400), st.booleans())
def test_a_cut_at_any_byte_costs_the_last_answers_only(
    tmp_path_factory: pytest.TempPathFactory, n: int, cut: int, of_errors: bool
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    batch, out = batch_of(folder), folder / "out.jsonl"
    with BatchOutput(batch, out) as output:
        for name in NAMES[:n]:
            output.add("id", name, REFUSED if of_errors else answer(3))
    path = output.errors if of_errors else out
    raw = path.read_bytes()
    left = raw[: max(0, len(raw) - cut)]
    path.write_bytes(left)
    with BatchOutput(batch, out) as output:
        known = list(output.tokens)
        assert known == NAMES[: left.count(b"\n")]
        for name in NAMES[len(known) :]:
            output.add("id", name, answer(3))
    found = [line["custom_id"] for file in (out, output.errors) for line in lines(file)]
    assert sorted(found) == NAMES, "none is lost, and none is there twice"


def test_one_program_at_a_time_writes(tmp_path: Path) -> None:
    batch, out = batch_of(tmp_path), tmp_path / "out.jsonl"
    with BatchOutput(batch, out), pytest.raises(BatchFileError, match="another `headway batch`"):
        BatchOutput(batch, out)
    errors_are_shared = tmp_path / "out.results.jsonl"
    with BatchOutput(batch, out), pytest.raises(BatchFileError, match="another `headway batch`"):
        BatchOutput(batch, errors_are_shared)
    with BatchOutput(batch, out):
        pass


def test_answers_to_another_input_are_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with BatchOutput(batch_of(tmp_path), out) as output:
        output.add("id", "n-0", answer(1))
    other = batch_of(tmp_path, [*NAMES, "more"])
    with pytest.raises(BatchFileError, match=r"has answers to another asked\.jsonl"):
        BatchOutput(other, out)
    out.unlink()
    with BatchOutput(other, out) as output:
        assert output.tokens == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"custom_id": "other", "response": {}}\n', "out.jsonl:1: 'other' is not in the input"),
        (b'{"custom_id": "n-0", "response": {}}\n' * 2, "out.jsonl:2: 'n-0' is twice"),
        (b"hello\nyou", "out.jsonl:1: not an answer of `headway batch`"),
        (b'{"precious": 1}', "out.jsonl:1: no line of `headway batch`"),
    ],
)
def test_a_file_with_something_else_is_left_as_it_is(
    tmp_path: Path, line: bytes, message: str
) -> None:
    batch, out = batch_of(tmp_path), tmp_path / "out.jsonl"
    out.write_bytes(line)
    for _ in range(2):
        with pytest.raises(BatchFileError) as raised:
            BatchOutput(batch, out)
        assert message in str(raised.value)
        assert out.read_bytes() == line


def test_the_input_is_never_overwritten(tmp_path: Path) -> None:
    batch = batch_of(tmp_path)
    with pytest.raises(BatchFileError, match="it would be overwritten"):
        BatchOutput(batch, batch.path)

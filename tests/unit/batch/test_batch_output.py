"""Answers are kept through whatever ends the program, and each of them once."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from rescheduler.batch.batch_files import (
    Answer,
    Batch,
    BatchFileError,
    BatchOutput,
    error_path,
    read_batch,
    result_path,
)

NAMES = [f"n-{i}" for i in range(6)]


def batch_of(folder: Path, names: list[str] = NAMES, prompt: str = "x") -> Batch:
    path = folder / "asked.jsonl"
    asked = {"method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}}
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
        output.add(batch.requests[0], answer(7))
        output.add(batch.requests[1], REFUSED)
        assert (output.tokens, output.failed) == ({"n-0": 7, "n-1": None}, 1)
    (line,) = lines(out)
    assert line.pop("id").startswith("batch_req_")
    asked = batch.path.read_bytes().splitlines()[0]
    assert [line] == [
        {
            "custom_id": "n-0",
            "request_sha256": hashlib.sha256(asked).hexdigest(),
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
        answers = (LOST, REFUSED, OTHER_422, LOST)
        for request, response in zip(batch.requests, answers, strict=False):
            output.add(request, response)
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
        ({"completion_tokens": 10**22}, 0),
        ({"completion_tokens": 10**4000}, 0),
        ({"completion_tokens": -5, "total_tokens": 3}, 0),
        ({"completion_tokens": 7.5}, 0),
        ({"completion_tokens": "7"}, 0),
        ({"completion_tokens": True}, 0),
        ([7], 0),
    ],
)
def test_every_endpoint_s_tokens_count(tmp_path: Path, usage: Any, tokens: int) -> None:
    """The end is expected by them; a number that cannot be is none."""
    batch, out = batch_of(tmp_path), tmp_path / "out.jsonl"
    with BatchOutput(batch, out) as output:
        body = Raw(json.dumps({"usage": usage}).encode())
        output.add(batch.requests[0], Answer(200, "r", body))
        assert output.tokens == {"n-0": tokens}
    with BatchOutput(batch, out) as output:
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
        for request in batch.requests[:n]:
            output.add(request, REFUSED if of_errors else answer(3))
    path = output.errors if of_errors else out
    raw = path.read_bytes()
    left = raw[: max(0, len(raw) - cut)]
    path.write_bytes(left)
    with BatchOutput(batch, out) as output:
        known = list(output.tokens)
        assert known == NAMES[: left.count(b"\n")]
        for request in batch.requests[len(known) :]:
            output.add(request, answer(3))
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


def answered(folder: Path, response: Answer = REFUSED) -> Path:
    """Write the output of a batch whose first request is answered, and a second as given."""
    batch, out = batch_of(folder), folder / "out.results.jsonl"
    with BatchOutput(batch, out) as output:
        output.add(batch.requests[0], answer(1))
        output.add(batch.requests[1], response)
    return out


def as_it_is(out: Path) -> Path:
    return out


def of_the_shorter_name(out: Path) -> Path:
    """``out.errors.jsonl`` is also beside ``out.jsonl``."""
    return out.with_name("out.jsonl")


def copied(out: Path) -> Path:
    """Only what `cp` takes with a star."""
    copy = out.parent / "copy"
    copy.mkdir()
    for path in out.parent.glob("out.*"):
        shutil.copy(path, copy)
    return copy / out.name


def linked(out: Path) -> Path:
    link = out.parent / "links" / "mine.jsonl"
    link.parent.mkdir()
    link.symlink_to(out)
    return link


def renamed(out: Path) -> Path:
    return out.rename(out.with_name("final.jsonl"))


@pytest.mark.parametrize("way", [as_it_is, of_the_shorter_name, copied, linked, renamed])
def test_answers_to_another_input_are_never_taken_for_this_one_s(
    tmp_path: Path, way: Callable[[Path], Path]
) -> None:
    """The other input has the same `custom_id`s."""
    out = way(answered(tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.jsonl")}
    other = batch_of(tmp_path, prompt="y")
    with pytest.raises(
        BatchFileError, match=r"jsonl:1: 'n-\d' answers another request than "
    ) as no:
        BatchOutput(other, out)
    assert "give another --out, or remove " in str(no.value)
    assert all(path.read_bytes() == raw for path, raw in before.items() if path != other.path)
    with BatchOutput(other, tmp_path / "new.jsonl") as output:
        assert output.tokens == {}


@pytest.mark.parametrize("way", [as_it_is, copied, linked])
def test_the_same_input_goes_on_wherever_its_output_is(
    tmp_path: Path, way: Callable[[Path], Path]
) -> None:
    out = way(answered(tmp_path))
    with BatchOutput(batch_of(tmp_path), out) as output:
        assert output.tokens["n-0"] == 1


def test_an_input_that_has_grown_goes_on_and_one_that_has_changed_does_not(
    tmp_path: Path,
) -> None:
    out = answered(tmp_path)
    with BatchOutput(batch_of(tmp_path, [*NAMES, "more"]), out) as output:
        assert output.tokens == {"n-0": 1, "n-1": None}
    with pytest.raises(BatchFileError, match="'n-0' is not in the input"):
        BatchOutput(batch_of(tmp_path, NAMES[1:]), out)


def test_answers_without_a_digest_are_refused(tmp_path: Path) -> None:
    """As earlier versions and other programs wrote them."""
    out = answered(tmp_path)
    line = lines(out)[0]
    del line["request_sha256"]
    out.write_text(json.dumps(line) + "\n")
    with pytest.raises(BatchFileError) as raised:
        BatchOutput(batch_of(tmp_path), out)
    assert (
        "out.results.jsonl:1: 'n-0' has no `request_sha256` that says which request it answers; "
        "give another --out, or remove "
    ) in str(raised.value)


def test_errors_are_not_taken_for_answers(tmp_path: Path) -> None:
    out = answered(tmp_path)
    errors = error_path(out)
    first, second = out.read_bytes(), errors.read_bytes()
    out.write_bytes(second)
    errors.write_bytes(first)
    with pytest.raises(BatchFileError, match="'n-1' belongs to the file of errors, not of answers"):
        BatchOutput(batch_of(tmp_path), out)


def test_a_line_that_is_cut_within_its_name_is_cut_off(tmp_path: Path) -> None:
    out = answered(tmp_path)
    out.write_bytes(out.read_bytes() + b'{"id":"batch')
    with BatchOutput(batch_of(tmp_path), out) as output:
        assert output.tokens["n-0"] == 1
    assert len(lines(out)) == 1


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "errors"])
@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_refused(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out.jsonl"
    if kind == "pipe":
        os.mkfifo(out)
    elif kind == "folder":
        out.mkdir()
    elif kind == "device":
        out = Path("/dev/null")
    else:
        os.mkfifo(tmp_path / "out.errors.jsonl")
    with pytest.raises(BatchFileError, match="is not a regular file; give another --out"):
        BatchOutput(batch_of(tmp_path), out)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"custom_id": "other", "response": {}}\n', "out.jsonl:1: 'other' is not in the input"),
        (b"hello\nyou", "out.jsonl:1: not an answer of `headway batch`"),
        (b'{"precious": 1}', "out.jsonl:1: no line of `headway batch`"),
        (
            b'{"custom_id": "n-0", "request_sha256": 3, "response": {}}\n',
            "out.jsonl:1: not an answer of `headway batch`",
        ),
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


def test_an_answer_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    out = answered(tmp_path)
    out.write_bytes(2 * out.read_bytes())
    with pytest.raises(BatchFileError, match=r"out\.results\.jsonl:2: 'n-0' is twice"):
        BatchOutput(batch_of(tmp_path), out)


def test_the_input_is_never_overwritten(tmp_path: Path) -> None:
    batch = batch_of(tmp_path)
    (tmp_path / "link.jsonl").symlink_to(batch.path)
    (tmp_path / "second.jsonl").hardlink_to(batch.path)
    for out in (batch.path, tmp_path / "link.jsonl", tmp_path / "second.jsonl"):
        with pytest.raises(BatchFileError, match="it would be overwritten"):
            BatchOutput(batch, out)


def test_answers_and_errors_are_two_files(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").touch()
    (tmp_path / "out.errors.jsonl").hardlink_to(tmp_path / "out.jsonl")
    with pytest.raises(BatchFileError, match="are one file; remove the link"):
        BatchOutput(batch_of(tmp_path), tmp_path / "out.jsonl")

"""Which files `headway batch` takes, and what it says of the others."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rescheduler.batch.batch_input import LARGEST_LINE, BatchFileError, read_batch


def line(custom_id: str = "a", **changes: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": "One", "max_tokens": 5}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": body,
    } | changes


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "asked.jsonl"
    texts = (one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines)
    path.write_bytes(b"\n".join(texts))
    return path


def test_requests_are_sent_as_they_are_and_in_the_background(tmp_path: Path) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hé\n"}], "seed": 2**60}
    default = {"prompt": "x", "service_tier": "default"}
    chat["service_tier"] = None
    path = written(
        tmp_path,
        line("a"),
        b"",
        line("b", url="/v1/chat/completions", body=chat),
        line("c", body=default),
    )
    batch = read_batch(path)
    assert [(one.custom_id, one.number) for one in batch.requests] == [("a", 1), ("b", 3), ("c", 4)]
    url, body = batch.read(batch.requests[1])
    assert url == "/v1/chat/completions"
    assert json.loads(body) == chat | {"service_tier": "flex"}
    assert json.loads(batch.read(batch.requests[2])[1]) == default


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (b"{", "asked.jsonl:2: no JSON object: "),
        (b"[1]", "asked.jsonl:2: Expected `object`, got `array`"),
        (b'{"custom_id": "\xff"}', "asked.jsonl:2: "),
        (b"[" * 100_000, "asked.jsonl:2: "),
        (line("a"), "asked.jsonl:2: custom_id 'a' is also that of line 1"),
        (line("b", method="GET"), "asked.jsonl:2: Invalid enum value 'GET' - at `$.method`"),
        (line("b", url="/v1/embeddings"), "asked.jsonl:2: Invalid enum value '/v1/embeddings'"),
        (line(""), r"asked.jsonl:2: Expected `str` of length >= 1 - at `$.custom_id`"),
        (line("b", body=3), "asked.jsonl:2: Expected `object`, got `int` - at `$.body`"),
        (line("b", body={"stream": True}), "asked.jsonl:2: `stream`: a batch has whole answers"),
        ({"custom_id": "b"}, "asked.jsonl:2: Object missing required field `method`"),
        (
            line("b", body={"prompt": "x" * LARGEST_LINE}),
            "asked.jsonl:2: it has more than 8 MiB",
        ),
    ],
)
def test_what_is_no_request_is_named_by_its_line(tmp_path: Path, wrong: Any, message: str) -> None:
    path = written(tmp_path, line("a"), wrong, line("z"))
    with pytest.raises(BatchFileError) as raised:
        read_batch(path)
    assert message in str(raised.value)


def test_ten_mistakes_are_named_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, *[line("a") for _ in range(20)])
    with pytest.raises(BatchFileError) as raised:
        read_batch(path)
    said = str(raised.value).splitlines()
    assert len(said) == 11
    assert said[9].startswith(f"{path}:11: ")


def test_a_file_without_requests_is_none(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match="it has no requests"):
        read_batch(written(tmp_path, b"\n\n"))


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.jsonl")
    with pytest.raises(BatchFileError, match="is not a regular file"):
        read_batch(tmp_path / "x.jsonl")


@pytest.mark.parametrize("last", [line("d"), line("b", body={"prompt": "another"})])
def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path, last: Any) -> None:
    path = written(tmp_path, line("a"), line("b"))
    batch = read_batch(path)
    written(tmp_path, line("c"), last)
    with pytest.raises(BatchFileError, match=":2: the file has been changed meanwhile"):
        batch.read(batch.requests[1])


@given(st.binary(max_size=200), st.integers(0, 400))
def test_damaged_files_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
) -> None:
    whole = "\n".join(json.dumps(line(name)) for name in "abc").encode()
    path = tmp_path_factory.mktemp("damaged") / "x.jsonl"
    path.write_bytes(whole[:at] + noise + whole[at:])
    try:
        batch = read_batch(path)
    except BatchFileError as error:
        assert str(path) in str(error)
    else:
        for request in batch.requests:
            assert b"service_tier" in batch.read(request)[1]

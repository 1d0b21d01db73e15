"""Which files `headway batch` takes, and what it says of the others."""

import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rescheduler.batch.batch_files import SERVED, BatchFileError, read_batch
from rescheduler.engines.deployment import ProxyOptions


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
        (
            line("b", url="/v1/fine_tuning"),
            "asked.jsonl:2: url '/v1/fine_tuning' is not served: /v1/chat/completions, "
            "/v1/completions, /v1/chat/completions/batch, /v1/responses, ",
        ),
        (line(""), r"asked.jsonl:2: Expected `str` of length >= 1 - at `$.custom_id`"),
        (line("b", body=3), "asked.jsonl:2: Expected `object`, got `int` - at `$.body`"),
        (line("b", body={"stream": True}), "asked.jsonl:2: `stream`: a batch has whole answers"),
        (line("b", body={"background": True}), "asked.jsonl:2: `background`: a batch has whole"),
        ({"custom_id": "b"}, "asked.jsonl:2: Object missing required field `method`"),
    ],
)
def test_what_is_no_request_is_named_by_its_line(tmp_path: Path, wrong: Any, message: str) -> None:
    path = written(tmp_path, line("a"), wrong, line("z"))
    with pytest.raises(BatchFileError) as raised:
        read_batch(path)
    assert message in str(raised.value)


def test_every_endpoint_that_the_proxy_forwards_is_taken(tmp_path: Path) -> None:
    lines = [line(url, url=url, body={"input": "Hi"}) for url in SERVED]
    batch = read_batch(written(tmp_path, *lines))
    assert [batch.read(request)[0] for request in batch.requests] == list(SERVED)
    assert {"/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/responses"} < set(SERVED)


@pytest.mark.parametrize("packed", [False, True])
def test_byte_order_marks_and_gzip_are_read(tmp_path: Path, packed: bool) -> None:
    lines = [json.dumps(line(name, body={"prompt": f"{name} é"})).encode() for name in "abc"]
    mark = b"\xef\xbb\xbf"
    text = mark + lines[0] + b"\r\n\n" + mark + lines[1] + b"\n" + lines[2]
    path = tmp_path / ("asked.jsonl.gz" if packed else "asked.jsonl")
    path.write_bytes(gzip.compress(text) if packed else text)
    batch = read_batch(path)
    assert [(one.custom_id, one.number) for one in batch.requests] == [("a", 1), ("b", 3), ("c", 4)]
    asked = [json.loads(batch.read(request)[1])["prompt"] for request in batch.requests]
    assert asked == ["a é", "b é", "c é"]
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(text.replace(mark, b""))
    again = read_batch(plain)
    assert [one.digest for one in again.requests] == [one.digest for one in batch.requests]
    assert batch.requests[0].digest == hashlib.sha256(lines[0]).digest(), "as `sha256sum` says"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            gzip.compress(b'{"custom_id": "a"'.ljust(5000), mtime=0)[:-9],
            "asked.jsonl: the gzip file is not",
        ),
        (b"\x1f\x8bnonsense", "the gzip file is not whole"),
        (b"PK\x03\x04", "asked.jsonl: a zip archive; unpack it"),
        (json.dumps(line()).encode("utf-16"), "asked.jsonl: UTF-16 text; save it as UTF-8"),
    ],
)
def test_other_formats_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "asked.jsonl").write_bytes(content)
    with pytest.raises(BatchFileError) as raised:
        read_batch(tmp_path / "asked.jsonl")
    assert message.removeprefix("asked.jsonl") in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path / "asked.jsonl"))


def test_a_line_may_be_as_large_as_a_proxy_s_bodies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (ProxyOptions().largest_body_mb << 20) + 1000
    batch = read_batch(written(tmp_path, line(body={"prompt": "x" * size})))
    assert len(batch.read(batch.requests[0])[1]) > size
    monkeypatch.setattr("rescheduler.batch.batch_files.LARGEST_LINE", 1 << 20)
    with pytest.raises(BatchFileError, match=r"jsonl:1: (it has more than|a line of over) 1 MiB"):
        read_batch(tmp_path / "asked.jsonl")


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

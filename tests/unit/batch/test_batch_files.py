"""The files of a batch: which are taken, and that answers are kept, each of them once."""

import gzip
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
    SERVED,
    Answer,
    Batch,
    BatchFileError,
    BatchOutput,
    error_path,
    read_batch,
    result_path,
)
from rescheduler.engines.proxy_options import ProxyOptions


def line(custom_id: str = "a", **changes: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": "One", "max_tokens": 5}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": body,
    } | changes


def joined(*lines: Any) -> bytes:
    return b"\n".join(one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines)


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "asked.jsonl"
    path.write_bytes(joined(*lines))
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


WRONG: list[tuple[Any, str]] = [
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
]
"""Second lines of three."""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((joined(line("a"), wrong, line("z")), message) for wrong, message in WRONG),
        (
            gzip.compress(b'{"custom_id": "a"'.ljust(5000), mtime=0)[:-9],
            "the gzip file is not whole",
        ),
        (b"\x1f\x8bnonsense", "the gzip file is not whole"),
        (b"PK\x03\x04", "asked.jsonl: a zip archive; unpack it"),
        (json.dumps(line()).encode("utf-16"), "asked.jsonl: UTF-16 text; save it as UTF-8"),
        (b"\n\n", "it has no requests"),
    ],
)
def test_what_is_no_batch_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "asked.jsonl").write_bytes(content)
    with pytest.raises(BatchFileError) as raised:
        read_batch(tmp_path / "asked.jsonl")
    assert message in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path / "asked.jsonl"))


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


NAMES = [f"n-{i}" for i in range(6)]


def batch_of(folder: Path, names: list[str] = NAMES, prompt: str = "x") -> Batch:
    return read_batch(written(folder, *(line(name, body={"prompt": prompt}) for name in names)))


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


def test_an_input_that_has_grown_goes_on_and_one_that_has_changed_does_not(tmp_path: Path) -> None:
    out = answered(tmp_path)
    with BatchOutput(batch_of(tmp_path, [*NAMES, "more"]), out) as output:
        assert output.tokens == {"n-0": 1, "n-1": None}
    with pytest.raises(BatchFileError, match="'n-0' is not in the input"):
        BatchOutput(batch_of(tmp_path, NAMES[1:]), out)


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


def kept(**changes: Any) -> bytes:
    """A line of the output: an answer to the first request."""
    digest = hashlib.sha256(json.dumps(line("n-0", body={"prompt": "x"})).encode()).hexdigest()
    whole = {"custom_id": "n-0", "request_sha256": digest, "response": {"status_code": 200}}
    return json.dumps(whole | changes).encode() + b"\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (kept(custom_id="other"), "out.jsonl:1: 'other' is not in the input"),
        (b"hello\nyou", "out.jsonl:1: not an answer of `headway batch`"),
        (b'{"precious": 1}', "out.jsonl:1: no line of `headway batch`"),
        (kept(request_sha256=3), "out.jsonl:1: not an answer of `headway batch`"),
        (
            b'{"custom_id": "n-0", "response": {}}\n',  # as earlier versions wrote them
            "out.jsonl:1: 'n-0' has no `request_sha256` that says which request it answers; "
            "give another --out, or remove ",
        ),
        (2 * kept(), "out.jsonl:2: 'n-0' is twice"),
        (
            kept(response={"status_code": 400}),
            "'n-0' belongs to the file of errors, not of answers",
        ),
    ],
)
def test_a_file_with_something_else_is_left_as_it_is(
    tmp_path: Path, content: bytes, message: str
) -> None:
    batch, out = batch_of(tmp_path), tmp_path / "out.jsonl"
    out.write_bytes(content)
    for _ in range(2):
        with pytest.raises(BatchFileError) as raised:
            BatchOutput(batch, out)
        assert message in str(raised.value)
        assert out.read_bytes() == content


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

"""What vLLM's own server accepts and answers, the proxy accepts and answers alike."""

import codecs
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_cluster import PROMPT, Cluster, cluster
from tokenizers import Tokenizer

from benchmarks.equality.cases import CASES
from benchmarks.equality.comparing import Difference
from benchmarks.equality.reasons import REASONS, explained, table
from rescheduler.openai.openai_request import CHAT, COMPLETIONS, RequestRefusedError
from rescheduler.openai.request_reader import read_forwarded, read_request

ROOT = Path(__file__).parents[3]
BODY = {"model": "m", "prompt": PROMPT, "max_tokens": 5}
JSON = {"Content-Type": "application/json"}


def read(path: str = COMPLETIONS, **fields: Any) -> Any:
    return read_request(path, json.dumps({"model": "m", "prompt": "a", **fields}).encode())


@pytest.mark.parametrize("value", [8, 8.0, "8", "8.0"])
@pytest.mark.parametrize("field", ["max_tokens", "min_tokens"])
def test_a_number_may_be_written_in_every_way_that_vllm_reads(field: str, value: Any) -> None:
    request = read(**{field: value})
    number = request.max_tokens if field == "max_tokens" else request.text.min_tokens
    assert number == 8
    assert request.movable


@pytest.mark.parametrize("value", [True, " 8", "+8", 8.5, "many", [], 10**30])
def test_an_engine_judges_what_the_proxy_cannot_read(value: Any) -> None:
    request = read(max_tokens=value, min_tokens=3)
    assert request.direct == "max_tokens"
    assert request.text.min_tokens == 3
    assert json.loads(bytes(request.body["max_tokens"])) == value


STREAMS = [True, 1, 1.0, "1", "true", "True", "on", "t", "y", "yes", "YES"]
NONE = [False, 0, 0.0, "0", "false", "off", "f", "n", "no", None, 2, []]


def test_a_stream_may_be_asked_for_in_every_way_that_vllm_reads() -> None:
    assert all(read(stream=value).stream for value in STREAMS)
    assert not any(read(stream=value).stream for value in NONE)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/invocations"])
@pytest.mark.parametrize("field", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize("inside", [False, True])
def test_no_wrong_type_beside_it_hides_what_only_the_proxy_may_say(
    path: str, field: str, inside: bool
) -> None:
    reserved = {"vllm_xargs": {field: {}}} if inside else {field: {"a": 1}}
    reading = read_forwarded if path == "/invocations" else read_request
    for beside in ({}, {"max_tokens": "many"}, {"stream": []}, {"request_id": 5}):
        with pytest.raises(RequestRefusedError, match=f"`{field}` is set by the proxy"):
            reading(path, json.dumps({**reserved, **beside}).encode())


@pytest.mark.parametrize(
    "beside",
    [
        b'"vllm_xargs": {"a": 1e400}',
        b'"ec_transfer_params": 1e400',
        b'"max_tokens": "many", "stop": "\xff"',
        b'"max_tokens": "many", "request_id": "\\ud800"',
    ],
)
def test_what_only_python_reads_hides_nothing(beside: bytes) -> None:
    for reserved in (b'"kv_transfer_params": {"do_remote_prefill": true}, ', b""):
        with pytest.raises(RequestRefusedError):
            read_request(COMPLETIONS, b"{" + reserved + beside + b"}")
    with pytest.raises(RequestRefusedError):
        read_forwarded("/v1/responses", b'{"kv_transfer_params": {}, ' + beside + b"}")


@pytest.mark.parametrize("value", [True, 1, "true", "yes"])
def test_a_response_in_the_background_is_refused_however_it_is_asked_for(value: Any) -> None:
    with pytest.raises(RequestRefusedError, match="`background` is not supported"):
        read_forwarded("/v1/responses", json.dumps({"background": value}).encode())


def test_an_engine_judges_options_of_a_stream_that_is_none() -> None:
    assert read(stream_options={"include_usage": True}).direct == "stream_options"
    assert read(stream_options={"include_usage": True}, stream=True).movable


@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"]
)
@given(text=st.text(st.characters(codec="utf-8")))
def test_a_body_may_have_any_encoding_of_unicode(encoding: str, text: str) -> None:
    body = json.dumps({"model": "m", "prompt": text, "max_tokens": 3}, ensure_ascii=False)
    request = read_request(COMPLETIONS, body.encode(encoding))
    assert json.loads(bytes(request.body["prompt"])) == text
    assert request.max_tokens == 3


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[1]", b'"a"', b"null", codecs.BOM_UTF16_LE + b"{", b"\xff\xfe\x00\xd8", b"\x80"],
)
def test_what_is_no_json_object_is_a_bad_request(raw: bytes) -> None:
    with pytest.raises(RequestRefusedError, match="not a valid JSON object") as refused:
        read_request(COMPLETIONS, raw)
    error = json.loads(refused.value.body)["error"]
    assert (error["code"], error["type"], error["param"]) == (400, "Bad Request", "body")


async def test_a_stream_that_an_engine_reads_a_word_for_is_passed_on_as_one(it: Cluster) -> None:
    await it.answered(5, stream="yes")


@pytest.mark.cluster(prefix_caching=False)
async def test_a_number_in_quotes_moves_like_any_other(it: Cluster) -> None:
    _, outcome = await it.moved(100, max_tokens="100")
    assert outcome == "moved"


@pytest.mark.parametrize(
    ("method", "path", "target"),
    [
        ("GET", "/v1/models/", "/v1/models"),
        ("GET", "/health//", "/health"),
        ("POST", COMPLETIONS + "/?a=b%20c", COMPLETIONS + "?a=b%20c"),
        ("GET", CHAT + "/", CHAT),
        ("POST", "/tokenize/", "/tokenize"),
        *(("GET", path, "") for path in ("/", "//", "/unknown/", "//elsewhere.example/", "/v1/")),
    ],
)
async def test_a_slash_at_the_end_of_an_endpoint_is_redirected(
    it: Cluster, method: str, path: str, target: str
) -> None:
    async with it.session.request(method, it.url + path, allow_redirects=False) as response:
        assert response.status == (307 if target else 404)
        if target:
            assert response.headers["Location"] in (target, target.replace("%20", "+"))
            assert await response.read() == b""


async def test_ping_and_version_are_answered(it: Cluster) -> None:
    for method in ("GET", "POST"):
        async with it.session.request(method, it.url + "/ping") as response:
            assert (response.status, await response.read()) == (200, b"")
    async with it.session.get(it.url + "/version") as response:
        assert (response.status, await response.json()) == (200, {"version": "scripted"})


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/batch", "/generative_scoring", "/v1/systemone", "/invocations"]
)
async def test_an_endpoint_that_one_engine_answers_is_forwarded(it: Cluster, path: str) -> None:
    status, answer, _ = await it.post({"model": "m", "priority": 3}, path)
    assert (status, answer["path"]) == (200, path)
    assert "priority" not in answer["asked"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
@pytest.mark.parametrize(
    "kind",
    [
        *(None, "text/plain", "application/x-www-form-urlencoded", "application/vnd.api+json"),
        *("application/json", "Application/JSON; charset=utf-8"),
    ],
)
async def test_a_body_has_to_say_that_it_is_json(it: Cluster, path: str, kind: str | None) -> None:
    """As for vLLM: a page that may not ask across origins can send no other kind."""
    data = json.dumps({**BODY, "messages": []}).encode()
    headers = {} if kind is None else {"Content-Type": kind}
    asked = it.session.post(
        it.url + path, data=data, headers=headers, skip_auto_headers=["Content-Type"]
    )
    async with asked as response:
        answer = await response.json()
    if kind and kind.lower().startswith("application/json"):
        assert response.status == 200
    else:
        assert (response.status, answer["error"]["type"]) == (400, "Bad Request")
        assert not any(engine.bodies for engine in it.engines.values())


COMMON = {"service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params"}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_whole_answer_has_the_fields_that_are_null(it: Cluster, path: str) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    _, answer, _ = await it.post({**BODY, "messages": messages}, path)
    (choice,) = answer["choices"]
    nulls = {key for key, value in answer.items() if value is None}
    of_choice = {key for key, value in choice.items() if value is None}
    usage = {key for key, value in answer["usage"].items() if value is None}
    assert usage == {"prompt_tokens_details", "completion_tokens_details"}
    kept = {"logprobs", "stop_reason", "token_ids", "routed_experts"}
    if path == CHAT:
        message = {key for key, value in choice["message"].items() if value is None}
        named = {"refusal", "annotations", "audio", "function_call", "reasoning"}
        assert message == named
        further = {"prompt_logprobs", "prompt_token_ids", "prompt_text"}
        assert (nulls, of_choice) == (COMMON | {"metrics"} | further, kept)
    else:
        assert nulls == COMMON | {"metrics"}
        assert of_choice == kept | {"prompt_logprobs", "prompt_token_ids"}


PAGE = "https://chat.example"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}


async def test_no_page_may_read_answers_by_default(it: Cluster) -> None:
    async with it.session.options(it.url + COMPLETIONS, headers=PREFLIGHT) as response:
        assert response.status == 400
        assert "Access-Control-Allow-Origin" not in response.headers
    async with it.session.get(it.url + "/v1/models", headers={"Origin": PAGE}) as response:
        assert response.status == 200
        assert "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.parametrize(
    ("allowed", "answered"), [([PAGE], PAGE), (["*"], "*"), (["https://other.example"], None)]
)
async def test_pages_of_allowed_origins_may_read_answers_and_errors(
    tokenizer: Tokenizer, allowed: list[str], answered: str | None
) -> None:
    async with cluster(tokenizer, allowed_origins=allowed) as it:
        asked = {**PREFLIGHT, "Access-Control-Request-Headers": "authorization, content-type"}
        async with it.session.options(it.url + COMPLETIONS, headers=asked) as response:
            assert response.status == (200 if answered else 400)
            assert response.headers.get("Access-Control-Allow-Origin") == answered
            assert response.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
        stream = {**BODY, "stream": True}
        for path, body, status in (
            (COMPLETIONS, BODY, 200),
            (COMPLETIONS, stream, 200),
            (COMPLETIONS, [], 400),
            ("/unknown", {}, 404),
        ):
            origin = {"Origin": PAGE}
            async with it.session.post(it.url + path, json=body, headers=origin) as response:
                assert response.status == status
                assert response.headers.get("Access-Control-Allow-Origin") == answered
                assert response.headers["Vary"] == "Origin"


def found() -> tuple[int, list[Difference]]:
    file = ROOT / "benchmarks" / "results" / "equality.json"
    document = json.loads(file.read_text())
    return document["figures"]["cases"], msgspec.convert(document["differences"], list[Difference])


def test_the_page_shows_what_was_found() -> None:
    cases, differences = found()
    page = (ROOT / "docs" / "equality.md").read_text()
    assert table(cases, differences) in page


def test_what_was_found_is_of_these_cases_and_has_these_reasons() -> None:
    cases, differences = found()
    names = [case.request for case in CASES]
    assert cases == len(names) == len(set(names)) >= 60
    assert {one.request for one in differences} <= set(names)
    assert explained(differences) == differences
    assert {one.reason for one in differences} == set(REASONS)
    for pattern in (pattern for patterns in REASONS.values() for pattern in patterns):
        assert any(fnmatchcase(one.request, pattern) for one in differences), pattern

"""Rejections become 429, absurd objectives 400, and everything else passes as it is."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import pytest

from rescheduler.batching.admission import AdmissionMiddleware, read_rejection, rejection_reason

Message = MutableMapping[str, Any]
REJECTED = {"finish_reason": "abort", "stop_reason": rejection_reason(3)}


class Server:
    """A plain ASGI application that answers with given chunks, and notes what it was sent."""

    def __init__(self, chunks: Iterable[bytes], status: int = 200) -> None:
        self.chunks, self.status = list(chunks), status
        self.body = b""
        self.gone = False
        self.on_chunk: Callable[[int], None] = lambda i: None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                return
            self.body += message.get("body", b"")
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        for i, chunk in enumerate(self.chunks):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            self.on_chunk(i)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self.gone = (await receive())["type"] == "http.disconnect"


async def call(
    server: Server,
    body: bytes | list[bytes] = b"{}",
    path: str = "/v1/completions",
    sent: list[Message] | None = None,
    leaves: bool = False,
) -> list[Message]:
    """Post a body, in one or several parts; the client leaves at its end or after the answer."""
    parts = [body] if isinstance(body, bytes) else body
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages[-1]["more_body"] = leaves
    answer: list[Message] = [] if sent is None else sent

    async def receive() -> Message:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        answer.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "root_path": ""}
    await AdmissionMiddleware(server)(scope, receive, send)
    return answer


def text(answer: list[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in answer)


def event(**choice: Any) -> bytes:
    return (
        b"data: " + json.dumps({"id": "x", "choices": [{"index": 0, **choice}]}).encode() + b"\n\n"
    )


OPENING = event(delta={"role": "assistant", "content": ""}, finish_reason=None)
WORD = event(text="word", finish_reason=None, stop_reason=None)


@pytest.mark.parametrize(
    "chunks",
    [
        [json.dumps({"choices": [{"text": "", **REJECTED}]}).encode()],
        [event(text="", **REJECTED), b"data: [DONE]\n\n"],
        [OPENING, event(delta={"content": ""}, **REJECTED), b"data: [DONE]\n\n"],
        [OPENING, OPENING, event(delta={}, **REJECTED), b"data: [DONE]\n\n"],
    ],
    ids=["whole", "stream", "chat stream", "chat stream of two"],
)
async def test_a_rejection_is_429_and_says_when_to_come_back(chunks: list[bytes]) -> None:
    answer = await call(Server(chunks))
    start, body = answer
    assert start["status"] == 429
    headers = dict(start["headers"])
    assert headers[b"retry-after"] == b"3"
    assert int(headers[b"content-length"]) == len(body["body"])
    error = json.loads(body["body"])["error"]
    assert error["code"] == 429 and error["type"] == "RateLimitError"


async def test_other_answers_pass_chunk_by_chunk() -> None:
    sent: list[Message] = []
    server = Server([WORD, WORD, b"data: [DONE]\n\n"])
    there: list[int] = []
    server.on_chunk = lambda i: there.append(len(sent))
    await call(server, sent=sent)
    assert there == [2, 3, 4], "the head waits for the first chunk, and no chunk for another"
    assert text(sent) == WORD + WORD + b"data: [DONE]\n\n"


async def test_who_speaks_waits_for_what_is_said() -> None:
    said = event(delta={"content": "word"}, finish_reason=None)
    assert text(await call(Server([OPENING, said]))) == OPENING + said


@pytest.mark.parametrize(
    "chunks",
    [
        [event(text="", finish_reason="abort", stop_reason=None)],
        [event(text="", finish_reason="stop", stop_reason=rejection_reason(3))],
        [event(text=f'"stop_reason":"{rejection_reason(3)}"', finish_reason=None)],
        [WORD, event(text="", **REJECTED)],
        [b'{"choices":[{"text":"headway: prefill budget, retry in 3 s"}]}'],
        [b'{"choices":[{"text":"headway: prefill budget', b'"}]}'],
        [b"data: [DONE]\n\n"],
        [b""],
        [],
    ],
)
async def test_what_only_looks_like_a_rejection_passes(chunks: list[bytes]) -> None:
    answer = await call(Server(chunks))
    assert answer[0]["status"] == 200
    assert text(answer) == b"".join(chunks)


async def test_errors_of_the_server_pass() -> None:
    answer = await call(Server([b'{"error": {"code": 404}}'], status=404))
    assert answer[0]["status"] == 404 and text(answer) == b'{"error": {"code": 404}}'


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"vllm_xargs": {"ttft_s": -1}}', "ttft_s must be seconds from 0.001"),
        (b'{"vllm_xargs": {"tpot_s": "fast"}}', "tpot_s must be seconds"),
        (b'{"vllm_xargs": {"ttft_s": NaN}}', "ttft_s must be seconds"),
    ],
)
async def test_absurd_objectives_are_400_and_never_reach_the_server(body: bytes, says: str) -> None:
    server = Server([WORD])
    start, message = await call(server, [body[:9], body[9:]], path="/v1/chat/completions")
    assert start["status"] == 400 and server.body == b""
    error = json.loads(message["body"])["error"]
    assert says in error["message"] and error["param"] == "vllm_xargs"


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":  "caf\xc3\xa9",\n "vllm_xargs": {"ttft_s": 1, "other": [1]}}',
        b'{"prompt": "vllm_xargs"}',
        b'{"vllm_xargs": null}',
        b'["vllm_xargs"]',
        b"not json: vllm_xargs \xff",
        b"",
    ],
)
async def test_bodies_pass_byte_for_byte(body: bytes) -> None:
    server = Server([WORD])
    answer = await call(server, [body[:5], body[5:]])
    assert server.body == body and text(answer) == WORD


async def test_other_paths_are_left_alone() -> None:
    rejection = json.dumps({"choices": [{"text": "", **REJECTED}]}).encode()
    server = Server([rejection])
    answer = await call(server, b'{"vllm_xargs": {"ttft_s": -1}}', path="/v1/embeddings")
    assert text(answer) == rejection


@pytest.mark.parametrize("leaves", [False, True])
async def test_the_server_learns_that_the_client_has_gone(leaves: bool) -> None:
    server = Server([WORD])
    await call(server, leaves=leaves)
    assert server.gone


def test_the_api_server_loads_no_compiler() -> None:
    """vLLM's CPU worker does not start in a process that has loaded one."""
    code = "import sys, rescheduler.batching.admission; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_rejection_reads_back() -> None:
    assert read_rejection("abort", rejection_reason(17)) == 17
    assert read_rejection("abort", "17") is None
    assert read_rejection("abort", 17) is None
    assert read_rejection("abort", "headway: prefill budget, retry in soon s") is None

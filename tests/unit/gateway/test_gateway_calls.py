"""The picker asked without Envoy: subsets, limits, and what it keeps of a request."""

import asyncio
import json
from typing import Any

import grpc
import pytest
from gateway_calls import Asked, asked_picker, request_head, said
from scripted_cluster import until
from scripted_engine import NarrowEngine
from tokenizers import Tokenizer

from rescheduler.gateway.messages import ProcessingResponse

BODY = said(request_body={"body": b'{"prompt": "a"}', "end_of_stream": True}).SerializeToString()


def head(subset: list[str] | None = None, **headers: str) -> bytes:
    message = request_head(**headers)
    if subset is not None:
        hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        listed = hint.fields["x-gateway-destination-endpoint-subset"].list_value
        for one in subset:
            listed.values.add(string_value=one)
        listed.SetInParent()
    data: bytes = message.SerializeToString()
    return data


def destination(answer: Any) -> tuple[str, str]:
    """What an answer says, in the header and in the metadata."""
    name = "x-gateway-destination-endpoint"
    options = answer.request_headers.response.header_mutation.set_headers
    (header,) = (one.header.raw_value.decode() for one in options if one.header.key == name)
    metadata = answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields[name]
    return header, metadata.string_value


def refused(answers: list[Any]) -> tuple[int, str]:
    """The status and the message of an error."""
    (answer,) = answers
    error = json.loads(answer.immediate_response.body)["error"]
    return answer.immediate_response.status.code, error["message"]


async def test_a_gateway_may_limit_where_a_request_goes(tokenizer: Tokenizer) -> None:
    async with asked_picker(tokenizer, 3) as asked:
        urls = [one.instance.url for one in asked.picker.cluster.all]
        endpoints = [url.removeprefix("http://") for url in urls]
        for subset, chosen in (
            (None, endpoints[0]),
            ([endpoints[2]], endpoints[2]),
            (["10.0.0.1:1", endpoints[1]], endpoints[1]),
        ):
            answers, code = await asked.exchange([head(subset), BODY])
            assert code is grpc.StatusCode.OK
            assert destination(answers[0]) == (chosen, chosen)
        for subset in ([], ["10.0.0.1:1"]):
            for more in ({}, {"path": "/v1/models"}):
                answers, _ = await asked.exchange([head(subset, **more), BODY])
                assert refused(answers) == (503, "no engine in service may serve this request")


async def begun(asked: Asked, *messages: bytes) -> Any:
    call = asked.call()
    for message in messages:
        await call.write(message)
    return call


async def ended(call: Any) -> list[Any]:
    """End an exchange; return all answers."""
    await call.done_writing()
    return await read_all(call)


async def read_all(call: Any) -> list[Any]:
    """Return all answers of an exchange."""
    answers = []
    while (raw := await call.read()) is not grpc.aio.EOF:
        answers.append(ProcessingResponse.FromString(raw))
    return answers


async def test_a_body_that_does_not_come_is_not_waited_for(tokenizer: Tokenizer) -> None:
    async with asked_picker(tokenizer, body_seconds=0.05) as asked:
        call = await begun(asked, head())
        answer = ProcessingResponse.FromString(await call.read())
        assert refused([answer]) == (408, "the body took more than 0.05 s")
        assert await call.code() is grpc.StatusCode.OK


async def test_bodies_are_held_only_until_they_are_handed_on(tokenizer: Tokenizer) -> None:
    async with asked_picker(tokenizer, bodies_mb=1, largest_body_mb=1) as asked:
        first = b'{"model": "m", "prompt": [1], "suffix": "'.ljust(700 << 10, b"a")
        large = said(request_body={"body": first}).SerializeToString()
        rest = said(request_body={"body": b'"}', "end_of_stream": True}).SerializeToString()
        uploading = await begun(asked, head(), large)
        await until(lambda: asked.picker.bodies.held == 700 << 10)
        answers, _ = await asked.exchange([head(), large])
        assert refused(answers)[0] == 503
        await uploading.write(rest)
        reading = asyncio.create_task(read_all(uploading))  # else they are not handed on
        await until(lambda: len(running(asked)) == 1)
        assert running(asked)[0].client.body == {}
        await until(lambda: asked.picker.bodies.held == 0)
        answers, _ = await asked.exchange([head(), large, rest])
        assert answers[0].WhichOneof("kind") == "request_headers"
        await uploading.done_writing()
        assert len(await reading) > 2


@pytest.mark.parametrize("length", ["1", str(1 << 20), None])
async def test_memory_is_counted_as_bodies_come_whatever_they_say(
    tokenizer: Tokenizer, length: str | None
) -> None:
    announced = {} if length is None else {"content-length": length}
    async with asked_picker(tokenizer, bodies_mb=2, largest_body_mb=1) as asked:
        silent = [await begun(asked, head(**announced)) for _ in range(4)]
        answers, _ = await asked.exchange([head(), BODY])
        assert answers[0].WhichOneof("kind") == "request_headers", "they have sent nothing yet"
        part = said(request_body={"body": b" " * (900 << 10)}).SerializeToString()
        for call in silent:
            await call.write(part)
        answered = [asyncio.create_task(call.read()) for call in silent]
        await until(lambda: sum(map(asyncio.Task.done, answered)) == 2)
        assert asked.picker.bodies.held == 2 * (900 << 10)
        refusals = [ProcessingResponse.FromString(one.result()) for one in answered if one.done()]
        assert [refused([answer])[0] for answer in refusals] == [503] * 2
        for call in silent:
            call.cancel()
        await asyncio.gather(*answered, return_exceptions=True)
        await asked.idle()
        await until(lambda: asked.picker.bodies.held == 0)


async def test_a_body_may_come_in_one_message(tokenizer: Tokenizer) -> None:
    async with asked_picker(tokenizer, largest_body_mb=8) as asked:
        for size, status in ((8 << 20, 400), ((8 << 20) + 1, 413)):  # read to its end: no JSON
            message = said(request_body={"body": b"a" * size, "end_of_stream": True})
            answers, code = await asked.exchange([head(), message.SerializeToString()])
            assert code is grpc.StatusCode.OK
            assert refused(answers)[0] == status


async def test_no_more_requests_wait_than_may_however_late_their_bodies_come(
    tokenizer: Tokenizer,
) -> None:
    async with asked_picker(tokenizer, kind=NarrowEngine, pool=2) as asked:
        dispatcher = asked.picker.cluster.dispatcher
        calls = [await begun(asked, head(), BODY)]
        await until(lambda: len(running(asked)) == 1)
        part = said(request_body={"body": b" "}).SerializeToString()
        late = [await begun(asked, head(), part) for _ in range(5)]
        await until(lambda: asked.picker.bodies.held == 5)
        for call in late:
            await call.write(BODY)
        answers = [asyncio.create_task(call.read()) for call in late]
        await until(lambda: len(dispatcher.waiting) + sum(map(asyncio.Task.done, answers)) == 5)
        assert len(dispatcher.waiting) == 2
        refusals = [ProcessingResponse.FromString(one.result()) for one in answers if one.done()]
        assert [refused([answer])[0] for answer in refusals] == [429] * 3
        for call in [*calls, *late]:
            call.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        await asked.idle()


def running(asked: Asked) -> list[Any]:
    on = asked.picker.cluster.placements.on
    return [request for one in asked.picker.cluster.all for request in on(one)]


@pytest.mark.parametrize("answer", ["nothing", "headers", "half", "whole"])
async def test_a_request_counts_until_its_answer_ends_or_the_gateway_goes(
    tokenizer: Tokenizer, answer: str
) -> None:
    events = b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choices": [{"text": "b"}]}\n\n'
    headers = [
        {"key": ":status", "raw_value": b"200"},
        {"key": "content-type", "raw_value": b"text/event-stream"},
    ]
    parts = [
        said(response_headers={"headers": {"headers": headers}}),
        said(response_body={"body": events[:50]}),
        said(response_body={"body": events[50:], "end_of_stream": True}),
    ]
    many = {"nothing": 0, "headers": 1, "half": 2, "whole": 3}[answer]
    async with asked_picker(tokenizer) as asked:
        call = await begun(asked, head(), BODY)
        await until(lambda: len(running(asked)) == 1)
        (request,) = running(asked)
        for part in parts[:many]:
            await call.write(part.SerializeToString())
        if answer == "whole":
            await until(lambda: not running(asked))
        elif answer == "half":
            await until(lambda: request.generated_tokens == 1)
        assert request.ended == (answer == "whole")
        call.cancel()
        await until(lambda: not running(asked))
        assert request.generated_tokens == (2 if answer == "whole" else int(answer == "half"))
        assert asked.picker.ready

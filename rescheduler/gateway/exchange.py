"""One HTTP exchange: where its request goes, and what its answer says until it ends."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any
from urllib.parse import unquote

from rescheduler.gateway.messages import (
    Body,
    Event,
    Head,
    ProcessingResponse,
    ProtocolError,
    Trailers,
)
from rescheduler.gateway.running_requests import EngineAnswer, RunningRequests
from rescheduler.openai.body_memory import KeptBody
from rescheduler.openai.openai_request import (
    CHAT,
    COMPLETIONS,
    FORWARDED,
    RequestRefusedError,
    given_name,
)
from rescheduler.openai.request_reader import read_forwarded, read_request
from rescheduler.placement.live_request import LiveRequest

DESTINATION = "x-gateway-destination-endpoint"

_NAMESPACE = "envoy.lb"
_OVERWRITE_IF_EXISTS_OR_ADD = 2
_PIECE = 62 << 10  # Envoy recommends pieces below 64 KiB


def routed(endpoint: str, headers: Mapping[str, str]) -> bytes:
    """Return the answer to a request's headers: send it to an endpoint.

    Args:
        endpoint: ``ip:port``; it is said in a header and in the metadata, as the endpoint picker
            protocol of the Gateway API Inference Extension has it.
        headers: that the engine gets beside those of the client, in place of them.
    """
    answer = ProcessingResponse()
    response = answer.request_headers.response
    _set(response.header_mutation, {**headers, DESTINATION: endpoint})
    response.clear_route_cache = True
    metadata = answer.dynamic_metadata.fields[_NAMESPACE].struct_value
    metadata.fields[DESTINATION].string_value = endpoint
    return _bytes(answer)


def unchanged(event: Head | Trailers) -> bytes:
    """Return the answer to headers or trailers that stay as they are."""
    answer = ProcessingResponse()
    side = "response" if event.response else "request"
    name = f"{side}_{'headers' if isinstance(event, Head) else 'trailers'}"
    getattr(answer, name).SetInParent()
    return _bytes(answer)


def body_answers(body: Body) -> Iterator[bytes]:
    """Yield the answers that hand a piece of a body on as it is."""
    name = "response_body" if body.response else "request_body"
    for start in range(0, max(1, len(body.data)), _PIECE):
        answer = ProcessingResponse()
        piece = getattr(answer, name).response.body_mutation.streamed_response
        piece.SetInParent()
        piece.body = body.data[start : start + _PIECE]
        piece.end_of_stream = body.ends and start + _PIECE >= len(body.data)
        yield _bytes(answer)


def refusal(error: RequestRefusedError) -> bytes:
    """Return the answer that has the gateway refuse a request."""
    answer = ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = error.status
    headers = {"content-type": "application/json"}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    _set(immediate.headers, headers)
    immediate.body = error.body
    immediate.details = "headway_picker"
    return _bytes(answer)


def _set(mutation: Any, headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        option = mutation.set_headers.add(append_action=_OVERWRITE_IF_EXISTS_OR_ADD)
        option.header.key, option.header.raw_value = name, value.encode()


def _bytes(answer: Any) -> bytes:
    data: bytes = answer.SerializeToString()
    return data


def announced_size(head: Head) -> int | None:
    """Return how many bytes a body is said to have, if any; refuse one that is compressed."""
    if head.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise RequestRefusedError(415, "engines read no compressed bodies")
    said = head.headers.get("content-length", "")
    return int(said) if said.isdecimal() and len(said) < 20 else None


async def read_body(
    head: Head, event: Callable[[], Awaitable[Event | None]], kept: KeptBody, seconds: float
) -> list[Event] | None:
    """Return the pieces of a body, and the trailers if there are any; None if it has no end.

    Raises:
        RequestRefusedError: 408, it came too slowly; 413, it is too large; 503, there is no
            memory.
        ProtocolError: something else comes before its end.
    """
    events: list[Event] = []
    ended = head.ends
    try:
        async with asyncio.timeout(seconds):
            while not ended:
                one = await event()
                if one is None:
                    return None
                if one.response or isinstance(one, Head):
                    raise ProtocolError("something else comes within the body of a request")
                if isinstance(one, Body):
                    kept.grow(len(one.data))
                events.append(one)
                ended = not isinstance(one, Body) or one.ends
    except TimeoutError:
        raise RequestRefusedError(408, f"the body took more than {seconds:g} s") from None
    return events


_GENERATING = (COMPLETIONS, CHAT, *FORWARDED)
_KEPT_RESPONSES = "/v1/responses/"


class Exchange:
    """Answers the gateway about one HTTP request.

    Bodies pass as they are. A request that an engine has to work for is read to its end before it
    is placed; any other goes to an engine in service at once.

    Args:
        read: waits for what the gateway says next; None at the end.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Event | None]],
        write: Callable[[bytes], Awaitable[None]],
        running: RunningRequests,
    ) -> None:
        self._read = read
        self._write = write
        self._running = running

    async def run(self) -> None:
        """Go on until the gateway ends the exchange, or breaks the protocol."""
        head = await self._read()
        if head is None:
            return
        if not isinstance(head, Head) or head.response:
            raise ProtocolError("an exchange begins with the headers of the request")
        path = unquote(head.headers.get(":path", "").partition("?")[0])
        try:
            if head.headers.get(":method") == "POST" and path in _GENERATING:
                await self._generate(head, path)
            else:
                await self._forward(head, path)
        except RequestRefusedError as error:
            await self._write(refusal(error))

    async def _generate(self, head: Head, path: str) -> None:
        """Place a request by the policy, and follow its answer; or refuse it."""
        account = self._running.accounts.of("", head.headers)
        self._running.dispatcher.admit(account)
        with ExitStack() as memory, ExitStack() as stack:
            kept = memory.enter_context(self._running.bodies.kept("", announced_size(head)))
            events = await read_body(head, self._read, kept, self._running.body_seconds)
            if events is None:
                return
            self._running.dispatcher.admit(account)  # others may have come while the body did
            raw = b"".join(event.data for event in events if isinstance(event, Body))
            read = read_forwarded if path in FORWARDED else read_request
            client = read(path, raw, priority=True)
            name = given_name(head.headers.get("x-request-id"), client)
            request = stack.enter_context(self._running.begun(client, name, account))
            instance = await self._running.place(request, head.subset)
            # Engines name it in their telemetry by this header.
            headers = {"x-request-id": request.name}
            await self._write(routed(self._running.endpoints.of(instance), headers))
            for event in events:
                await self._pass_on(event)
            del client, raw, events
            memory.close()
            await self._follow(request, path)

    async def _follow(self, request: LiveRequest, path: str) -> None:
        """Pass on whatever comes, and note what it says of a request."""
        answer: EngineAnswer | None = None
        while (event := await self._read()) is not None:
            if event.response:
                answer = self._note(request, path, answer, event)
            await self._pass_on(event)

    def _note(
        self, request: LiveRequest, path: str, answer: EngineAnswer | None, event: Event
    ) -> EngineAnswer:
        """Note an event of an answer before it passes: Envoy may end the exchange with it."""
        if isinstance(event, Head):
            if answer is not None:
                raise ProtocolError("the headers of an answer come twice")
            answer = EngineAnswer(event, path)
            self._running.answered(request, answer)
            ends = event.ends
        elif answer is None:
            raise ProtocolError("an answer comes before its headers")
        elif isinstance(event, Body):
            ends = event.ends
            self._running.generated(request, answer.add(event.data, ends))
        else:
            ends = True
            self._running.generated(request, answer.add(b"", ends))
        if ends:
            self._running.end(request, answer)
        return answer

    async def _forward(self, head: Head, path: str) -> None:
        """Send a request that is no work to an engine in service, and pass on whatever comes.

        Raises:
            RequestRefusedError: 501, its answer is kept by one engine only; 503, none is in
                service.
        """
        if path.startswith(_KEPT_RESPONSES):
            why = "a response is not kept: no engine knows those of the others"
            raise RequestRefusedError(501, f"{path}: {why}")
        instance = self._running.any_instance(head.subset)
        await self._write(routed(self._running.endpoints.of(instance), {}))
        while (event := await self._read()) is not None:
            if isinstance(event, Head) and event.response and EngineAnswer(event, path).failed:
                self._running.suspects.erred(instance)
            await self._pass_on(event)

    async def _pass_on(self, event: Event) -> None:
        if isinstance(event, Body):
            for answer in body_answers(event):
                await self._write(answer)
        else:
            await self._write(unchanged(event))

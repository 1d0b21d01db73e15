"""A gateway's requests: where each goes, and what its answer says until it ends."""

import asyncio
import ipaddress
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from rescheduler.engines.deployment import DeploymentError, Instance
from rescheduler.gateway.messages import (
    Body,
    Event,
    Head,
    ProcessingResponse,
    ProtocolError,
    Trailers,
)
from rescheduler.openai.body_memory import BodyMemory, KeptBody
from rescheduler.openai.openai_request import (
    CHAT,
    COMPLETIONS,
    FORWARDED,
    MOST_TOKENS,
    ClientRequest,
    RequestRefusedError,
    given_name,
)
from rescheduler.openai.openai_stream import DONE, Chunk, read_chunk
from rescheduler.openai.request_reader import read_forwarded, read_request
from rescheduler.placement.account import Account
from rescheduler.placement.cluster import Cluster
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.upstream import EngineFullError, EngineRefusedError, UpstreamError

_BLANK_LINE = re.compile(rb"\n\r?\n")
_LARGEST_EVENT = 256 << 10


class EventStream:
    """Cuts a byte stream into server-sent events, wherever its packets end.

    An event that is incomplete when it is too large is left out. Every byte is searched once, so
    that it does not matter how small the packets are.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._left_out = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that are complete by now, without the blank lines that end them."""
        rest, events, start = self._rest, [], 0
        unsearched = max(0, len(rest) - 2)  # a blank line may have begun there
        rest += data
        while (end := _BLANK_LINE.search(rest, unsearched)) is not None:
            if not self._left_out:
                events.append(bytes(rest[start : end.start()]))
            self._left_out = False
            start = unsearched = end.end()
        del rest[:start]
        if len(rest) > _LARGEST_EVENT:
            self._left_out = True
            del rest[:-2]
        return events


# In JSON a quote inside a string is escaped, so that this finds keys only.
_COUNTED = re.compile(rb'"(?:completion|output)_tokens":\s*(\d{1,9})\b')
_TAIL = 4 << 10
"""Bytes at the end of an answer, in which it says how many tokens it has."""


class TokenCount:
    """Counts the tokens of one answer.

    A stream's chunk is a token for each choice, unless it says more exactly. An event of another
    shape is a token, unless its name says that it adds nothing; such a stream says in its last
    events how many it has, as a document does at its end. What cannot be read is not counted, and
    never an error: the answer is the client's.

    Args:
        events: the answer is a stream of events, not a document.
        chunks: its events are chunks of completions or of a chat.
    """

    def __init__(self, events: bool, chunks: bool) -> None:
        self.tokens = 0
        self._chunks = chunks
        self._stream = EventStream() if events else None
        self._tail = b""

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
        if self._stream is None or not self._chunks:
            self._tail = (self._tail + data[-_TAIL:])[-_TAIL:]
        if self._stream is not None:
            for event in self._stream.feed(data):
                self._count(event)

    def end(self) -> None:
        """Take what an answer says of itself at its end."""
        found = _COUNTED.findall(self._tail)
        if found:
            self.tokens = max(self.tokens, min(int(found[-1]), MOST_TOKENS))

    def _count(self, event: bytes) -> None:
        name, payload = _fields(event)
        if not payload or payload == DONE:
            return
        if not self._chunks:
            self.tokens += _adds_text(name)
            return
        try:
            chunk = read_chunk(payload)
        except msgspec.DecodeError:
            return
        self.tokens += _tokens(chunk)
        said = (chunk.usage or {}).get("completion_tokens")
        if isinstance(said, int) and self.tokens < said <= MOST_TOKENS:
            self.tokens = said


def _fields(event: bytes) -> tuple[bytes, bytes]:
    """Return the name of an event, empty if it has none, and its data."""
    name, payload = b"", []
    for line in event.splitlines():
        field, _, value = line.partition(b":")
        if field == b"data":
            payload.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.strip()
    return name, b"\n".join(payload)


def _adds_text(name: bytes) -> bool:
    """Whether an event carries text: ``content_block_delta``, ``response.output_text.delta``."""
    return not name or (name.endswith(b"delta") and name != b"message_delta")


def _tokens(chunk: Chunk) -> int:
    """Return the tokens of a chunk; that of a chat's role, which comes first, has none."""
    tokens = 0
    for choice in chunk.choices:
        delta = choice.delta
        if choice.token_ids is not None:
            tokens += len(choice.token_ids)
        elif delta is None or delta.role is None or delta.content or choice.finish_reason:
            tokens += 1
    return tokens


class EngineAnswer:
    """What the headers of an answer say, and how many tokens its body has brought.

    Attributes:
        failed: a server's error, of the engine or of the gateway that does not reach it.
    """

    def __init__(self, head: Head, path: str) -> None:
        status = head.headers.get(":status", "")
        self.ok, self.failed = status == "200", status.startswith("5")
        kind = head.headers.get("content-type", "")
        events = kind.lower().startswith("text/event-stream")
        self._count = TokenCount(events, chunks=path in (COMPLETIONS, CHAT)) if self.ok else None

    def add(self, data: bytes, ends: bool) -> int:
        """Take the next bytes; return how many tokens the answer has by now."""
        if self._count is None:
            return 0
        self._count.add(data)
        if ends:
            self._count.end()
        return self._count.tokens


logger = logging.getLogger("headway.serve")

_REST_SECONDS = 0.5


class Suspects:
    """Asks an engine itself whether it works, when a request's end makes that doubtful.

    The picker sees neither why a stream was cut, which the client may have done, nor whether an
    error is the request's own fault. So neither counts against an engine; the check does. It is
    made once at a time and at most every half second, whatever clients do.
    """

    def __init__(self, cluster: Cluster[LiveRequest]) -> None:
        self._cluster = cluster
        self._checked: set[InstanceState] = set()

    def cut(self, instance: InstanceState) -> None:
        """Note that an answer ended before its time: ask for the engine's health."""
        self._check(instance, self._cluster.prober.probe)

    def erred(self, instance: InstanceState) -> None:
        """Note that a request was answered with a server's error: have one token generated."""
        self._check(instance, self._generate)

    def _check(
        self,
        instance: InstanceState,
        check: Callable[[InstanceState], Coroutine[Any, Any, None]],
    ) -> None:
        if not instance.breaker.closed or instance in self._checked:
            return
        self._checked.add(instance)

        async def run() -> None:
            try:
                await check(instance)
                await asyncio.sleep(_REST_SECONDS)
            finally:
                self._checked.discard(instance)

        self._cluster.background(run())

    async def _generate(self, instance: InstanceState) -> None:
        try:
            model = self._cluster.deployment.served_name
            await self._cluster.upstream.generate_one(instance.instance, model)
        except (EngineFullError, RequestRefusedError):
            return
        except (UpstreamError, EngineRefusedError) as error:
            if isinstance(error, UpstreamError) and not (error.answered or error.gone):
                return  # it is late: its evidence says whether it lives
            if instance.breaker.failed(asyncio.get_running_loop().time(), certain=True):
                logger.warning("%s; out of service", error)


_PORTS = {"http": 80, "https": 443}


class Endpoints:
    """The ``ip:port`` of each engine, and which engines a gateway allows for a request.

    Raises:
        DeploymentError: an engine's url has a name in place of an address.
    """

    def __init__(self, instances: Iterable[InstanceState]) -> None:
        self._of: Mapping[InstanceState, str] = {one: _endpoint(one.instance) for one in instances}

    def of(self, instance: InstanceState) -> str:
        """Return the ``ip:port`` of an engine, an IPv6 address in brackets."""
        return self._of[instance]

    def outside(self, subset: frozenset[str] | None) -> frozenset[InstanceState]:
        """Return the engines that a request must not go to, of which its gateway allows these."""
        if subset is None:
            return frozenset()
        return frozenset(one for one, endpoint in self._of.items() if endpoint not in subset)


def nowhere_to_go() -> RequestRefusedError:
    """Return the refusal of a request that no engine in service may serve."""
    return RequestRefusedError(503, "no engine in service may serve this request", retry_after=1)


def _endpoint(instance: Instance) -> str:
    parts = urlsplit(instance.url)
    try:
        address = ipaddress.ip_address(parts.hostname or "")
    except ValueError as error:
        raise DeploymentError(
            f"{instance.name}: url: {instance.url}: a gateway is told addresses, not names; "
            "write the engine's IP address"
        ) from error
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"{host}:{parts.port or _PORTS[parts.scheme]}"


class RunningRequests:
    """Places requests, and knows of each where it is and how many tokens it has.

    Attributes:
        bodies: the memory of all that are being read.
        body_seconds: for which a body may be incomplete.
    """

    def __init__(self, cluster: Cluster[LiveRequest]) -> None:
        options = cluster.deployment.proxy
        self._cluster, self.dispatcher = cluster, cluster.dispatcher
        self.accounts = cluster.accounts
        self.endpoints, self.suspects = Endpoints(cluster.all), Suspects(cluster)
        self.bodies = BodyMemory(options.largest_body_mb, options.bodies_mb, share=1.0)
        self.body_seconds = options.body_seconds

    @contextmanager
    def begun(
        self, client: ClientRequest, name: str | None, account: Account
    ) -> Iterator[LiveRequest]:
        """Count a request that has just arrived, without its body, until it ends somehow."""
        id = uuid.uuid4().hex
        now = asyncio.get_running_loop().time()
        client = replace(client, body={}, direct=client.direct or "gateway")
        request = LiveRequest(id, name or id, client, {}, now, None, self._cluster.placements)
        request.account = account
        self._cluster.began(request)
        try:
            yield request
        finally:
            self.end(request, None)

    async def place(self, request: LiveRequest, subset: frozenset[str] | None) -> InstanceState:
        """Wait until the policy gives a request an engine, where it counts then; or refuse it."""
        request.avoid = self.endpoints.outside(subset)
        if not self.dispatcher.has_another(request):
            raise nowhere_to_go()
        instance = await self.dispatcher.place(request)
        if instance in request.avoid:  # meanwhile the others have left service
            raise nowhere_to_go()
        return instance

    def any_instance(self, subset: frozenset[str] | None) -> InstanceState:
        """Return an engine in service for what is no work: the one with the fewest requests."""
        outside = self.endpoints.outside(subset)
        usable = [one for one in self.dispatcher.usable if one not in outside]
        if not usable:
            raise nowhere_to_go()
        return min(usable, key=lambda instance: len(self._cluster.placements.on(instance)))

    def answered(self, request: LiveRequest, answer: EngineAnswer) -> None:
        """Note an engine's answer to a request, of which the headers have come."""
        assert request.instance is not None
        if answer.failed:
            self.suspects.erred(request.instance)
        elif answer.ok:
            request.accepted()
        else:
            request.refused = True

    def generated(self, request: LiveRequest, total: int) -> None:
        """Note how many tokens a request has by now, unless more were known already."""
        instance, tokens = request.instance, total - request.generated_tokens
        if tokens <= 0 or instance is None:
            return
        arrival = request.untracked_tokens(tokens, asyncio.get_running_loop().time())
        if arrival.first:
            instance.breaker.succeeded()
        if arrival.waited is not None:
            self._cluster.step.took(arrival.waited / tokens)

    def end(self, request: LiveRequest, answer: EngineAnswer | None) -> None:
        """Forget a request, once; without an answer, there was none, or it was cut."""
        if request.ended:
            return
        if request.instance is not None and answer is None:
            self.suspects.cut(request.instance)
        request.finish()
        by_itself = answer is not None and answer.ok and request.generated_tokens > 0
        self._cluster.ended(request, by_itself)
        self.dispatcher.wake()


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

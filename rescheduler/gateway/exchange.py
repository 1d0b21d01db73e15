"""One HTTP exchange: where its request goes, and what its answer says until it ends."""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from urllib.parse import unquote

from rescheduler.gateway.answers import body_answers, refusal, routed, unchanged
from rescheduler.gateway.endpoints import Endpoints
from rescheduler.gateway.engine_answer import EngineAnswer
from rescheduler.gateway.events import Body, Event, Head, ProtocolError
from rescheduler.gateway.request_body import announced_size, read_body
from rescheduler.gateway.running_requests import RunningRequests
from rescheduler.openai.body_memory import BodyMemory
from rescheduler.openai.openai_request import (
    CHAT,
    COMPLETIONS,
    FORWARDED,
    RequestRefusedError,
    read_forwarded,
    read_request,
)
from rescheduler.openai.request_name import given_name
from rescheduler.placement.live_request import LiveRequest

__all__ = ["Exchange"]

_GENERATING = (COMPLETIONS, CHAT, *FORWARDED)
_KEPT_RESPONSES = "/v1/responses/"


class Exchange:
    """Answers the gateway about one HTTP request.

    Bodies pass as they are. A request that an engine has to work for is read to its end before it
    is placed; any other goes to an engine in service at once.

    Args:
        read: waits for what the gateway says next; None at the end.
        write: answers it.
        running: places requests and follows them.
        endpoints: of the engines.
        memory: of all bodies that are being read.
        body_seconds: for which a body may be incomplete.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Event | None]],
        write: Callable[[bytes], Awaitable[None]],
        running: RunningRequests,
        endpoints: Endpoints,
        memory: BodyMemory,
        body_seconds: float,
    ) -> None:
        self._read, self._write = read, write
        self._running, self._endpoints = running, endpoints
        self._memory, self._body_seconds = memory, body_seconds

    async def run(self) -> None:
        """Go on until the gateway ends the exchange.

        Raises:
            ProtocolError: the gateway says what the protocol does not allow.
        """
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
        """Place a request by the policy, and follow its answer.

        Raises:
            RequestRefusedError: the request is wrong, or there is no room for it.
        """
        self._running.admit()
        with ExitStack() as memory, ExitStack() as stack:
            kept = memory.enter_context(self._memory.kept("", announced_size(head)))
            events = await read_body(head, self._read, kept, self._body_seconds)
            if events is None:
                return
            self._running.admit()  # others may have come while the body did
            raw = b"".join(event.data for event in events if isinstance(event, Body))
            read = read_forwarded if path in FORWARDED else read_request
            client = read(path, raw, priority=True)
            name = given_name(head.headers.get("x-request-id"), client)
            request = stack.enter_context(self._running.begun(client, name))
            instance = await self._running.place(request, head.subset)
            # Engines name it in their telemetry by this header.
            headers = {"x-request-id": request.name}
            await self._write(routed(self._endpoints.of(instance), headers))
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
        await self._write(routed(self._endpoints.of(instance), {}))
        while (event := await self._read()) is not None:
            if isinstance(event, Head) and event.response and EngineAnswer(event, path).failed:
                self._running.failed(instance)
            await self._pass_on(event)

    async def _pass_on(self, event: Event) -> None:
        if isinstance(event, Body):
            for answer in body_answers(event):
                await self._write(answer)
        else:
            await self._write(unchanged(event))

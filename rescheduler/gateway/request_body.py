"""Reading clients' request bodies from the gateway: not too large, not too slowly, not too many."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from rescheduler.engines.deployment import ProxyOptions
from rescheduler.gateway.events import Body, Event, Head, ProtocolError
from rescheduler.openai.openai_request import RequestRefusedError

__all__ = ["RequestBodies"]


class RequestBodies:
    """The bodies that are being read, until they have been handed on.

    Args:
        options: the limits.
    """

    def __init__(self, options: ProxyOptions) -> None:
        self._seconds = options.body_seconds
        self._megabytes, self._largest = options.largest_body_mb, options.largest_body_mb << 20
        self._most, self._held = options.bodies_mb << 20, 0

    @contextmanager
    def held(self, head: Head) -> Iterator[Callable[[int], None]]:
        """Reserve memory for a request's body until it has been handed on.

        Yields:
            A function that takes the size of the body, once it has been read.

        Raises:
            RequestRefusedError: 413, it is too large; 415, it is compressed; 503, all of them
                together are too large.
        """
        if head.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise RequestRefusedError(415, "engines read no compressed bodies")
        said = head.headers.get("content-length", "")
        size = int(said) if said.isdecimal() and len(said) < 20 else self._largest
        if size > self._largest:
            raise self._too_large()
        if self._held + size > self._most:
            raise RequestRefusedError(
                503, "too many large requests are being served; try again later", retry_after=1
            )
        self._held += size

        def is_of(actual: int) -> None:
            nonlocal size
            self._held += actual - size
            size = actual

        try:
            yield is_of
        finally:
            self._held -= size

    async def read(
        self, head: Head, event: Callable[[], Awaitable[Event | None]]
    ) -> list[Event] | None:
        """Return the pieces of a body, and the trailers if there are any; None if it has no end.

        Args:
            head: of the request.
            event: waits for what the gateway says next.

        Raises:
            RequestRefusedError: 408, it came too slowly; 413, it is too large.
            ProtocolError: something else comes before its end.
        """
        events: list[Event] = []
        size, ended = 0, head.ends
        try:
            async with asyncio.timeout(self._seconds):
                while not ended:
                    one = await event()
                    if one is None:
                        return None
                    if one.response or isinstance(one, Head):
                        raise ProtocolError("something else comes within the body of a request")
                    events.append(one)
                    ended = not isinstance(one, Body) or one.ends
                    size += len(one.data) if isinstance(one, Body) else 0
                    if size > self._largest:
                        raise self._too_large()
        except TimeoutError:
            message = f"the body took more than {self._seconds:g} s"
            raise RequestRefusedError(408, message) from None
        return events

    def _too_large(self) -> RequestRefusedError:
        return RequestRefusedError(413, f"the body is larger than {self._megabytes} MiB")

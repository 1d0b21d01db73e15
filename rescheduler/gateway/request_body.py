"""Reading clients' request bodies from the gateway: not too large, not too slowly."""

import asyncio
from collections.abc import Awaitable, Callable

from rescheduler.gateway.events import Body, Event, Head, ProtocolError
from rescheduler.openai.body_memory import KeptBody
from rescheduler.openai.openai_request import RequestRefusedError

__all__ = ["announced_size", "read_body"]


def announced_size(head: Head) -> int | None:
    """Return how many bytes a body is said to have; None if nothing is said.

    Raises:
        RequestRefusedError: 415, it is compressed.
    """
    if head.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise RequestRefusedError(415, "engines read no compressed bodies")
    said = head.headers.get("content-length", "")
    return int(said) if said.isdecimal() and len(said) < 20 else None


async def read_body(
    head: Head, event: Callable[[], Awaitable[Event | None]], kept: KeptBody, seconds: float
) -> list[Event] | None:
    """Return the pieces of a body, and the trailers if there are any; None if it has no end.

    Args:
        head: of the request.
        event: waits for what the gateway says next.
        kept: counts what arrives.
        seconds: for which a body may be incomplete.

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

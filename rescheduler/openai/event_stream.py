"""Server-sent events as a client reads them; the proxy's relay has a faster reader of its own."""

from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import msgspec

__all__ = ["read_events"]

_DATA = b"data: "
_DONE = b"data: [DONE]"


async def read_events(lines: AsyncIterable[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of each event of an answer, up to ``[DONE]`` or the end of the stream.

    Args:
        lines: of the answer, such as ``aiohttp.ClientResponse.content``.

    Raises:
        msgspec.DecodeError: an event is not JSON.
    """
    async for line in lines:
        if line.startswith(_DONE):
            return
        if line.startswith(_DATA):
            yield msgspec.json.decode(line[len(_DATA) :])

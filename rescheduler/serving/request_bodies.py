"""Reading clients' request bodies: not too large, not too slowly, not too many."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from rescheduler.engines.deployment import ProxyOptions
from rescheduler.openai.openai_request import RequestRefusedError

__all__ = ["RequestBodies"]


class RequestBodies:
    """The bodies of all requests that are being served, which are kept to resume them.

    Args:
        options: the limits.
    """

    def __init__(self, options: ProxyOptions) -> None:
        self._options = options
        self._largest, self._most = options.largest_body_mb << 20, options.bodies_mb << 20
        self._held = 0

    @contextmanager
    def held(self, http: web.Request) -> Iterator[None]:
        """Reserve memory for a body, before any of it is read, until its request ends.

        Raises:
            RequestRefusedError: 413, it is too large; 503, all of them together are.
        """
        size = http.content_length
        if size is None:
            size = self._largest
        if size > self._largest:
            raise self._too_large()
        if self._held + size > self._most:
            raise RequestRefusedError(
                503, "too many large requests are being served; try again later", retry_after=1
            )
        self._held += size
        try:
            yield
        finally:
            self._held -= size

    async def read(self, http: web.Request) -> bytes:
        """Return a body.

        Raises:
            RequestRefusedError: 400, it is broken; 408, it came too slowly; 413, it is too large.
        """
        seconds = self._options.body_seconds
        try:
            async with asyncio.timeout(seconds):
                return await http.read()
        except TimeoutError:
            raise RequestRefusedError(408, f"the body took more than {seconds:g} s") from None
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except web.RequestPayloadError as error:
            raise RequestRefusedError(400, "the body is incomplete or damaged") from error

    def _too_large(self) -> RequestRefusedError:
        megabytes = self._options.largest_body_mb
        return RequestRefusedError(413, f"the body is larger than {megabytes} MiB")

"""Reading clients' request bodies: not too large, not too slowly, not too many."""

import asyncio
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from rescheduler.engines.deployment import ProxyOptions
from rescheduler.openai.openai_request import RequestRefusedError

__all__ = ["RequestBodies"]

_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


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
        if size is None or _encoding(http):
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
            RequestRefusedError: 400, it is broken; 408, it came too slowly; 413, it is too large;
                415, it is compressed in another way than gzip's or zlib's.
        """
        seconds, encoding = self._options.body_seconds, _encoding(http)
        if encoding not in ("", *_WINDOW_BITS):
            raise RequestRefusedError(415, "a body may be compressed as gzip or deflate only")
        try:
            async with asyncio.timeout(seconds):
                raw = await http.read()
        except TimeoutError:
            raise RequestRefusedError(408, f"the body took more than {seconds:g} s") from None
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except web.RequestPayloadError as error:
            raise RequestRefusedError(400, "the body is incomplete or damaged") from error
        return self._unpacked(raw, encoding) if encoding else raw

    def _unpacked(self, packed: bytes, encoding: str) -> bytes:
        """Return what a compressed body holds, but no more than the largest body.

        A kilobyte can hold a megabyte: what is too large is not unpacked to its end.
        """
        unpacking = zlib.decompressobj(_WINDOW_BITS[encoding])
        try:
            raw = unpacking.decompress(packed, self._largest + 1)
        except zlib.error as error:
            raise RequestRefusedError(400, "the body is incomplete or damaged") from error
        if len(raw) > self._largest:
            raise self._too_large()
        if not unpacking.eof:
            raise RequestRefusedError(400, "the body is incomplete or damaged")
        return raw

    def _too_large(self) -> RequestRefusedError:
        megabytes = self._options.largest_body_mb
        return RequestRefusedError(413, f"the body is larger than {megabytes} MiB")


def _encoding(http: web.Request) -> str:
    """Return how a body is compressed; nothing if it is not."""
    encoding = http.headers.get("Content-Encoding", "").strip().lower()
    return "" if encoding == "identity" else encoding

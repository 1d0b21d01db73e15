"""Reading clients' request bodies: not too large, not too slowly, not too many."""

import asyncio
import zlib

from aiohttp import web

from rescheduler.engines.deployment import ProxyOptions
from rescheduler.openai.body_memory import KeptBody
from rescheduler.openai.openai_request import RequestRefusedError

__all__ = ["read_body"]

_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


async def read_body(http: web.Request, kept: KeptBody, options: ProxyOptions) -> bytes:
    """Return a body.

    Args:
        http: the request.
        kept: counts what arrives.
        options: the limits.

    Raises:
        RequestRefusedError: 400, it is broken; 408, it came too slowly; 413, it is too large;
            415, it is compressed in another way than gzip's or zlib's; 503, there is no memory.
    """
    seconds, encoding = options.body_seconds, _encoding(http)
    if encoding not in ("", *_WINDOW_BITS):
        raise RequestRefusedError(415, "a body may be compressed as gzip or deflate only")
    parts = []
    try:
        async with asyncio.timeout(seconds):
            async for part in http.content.iter_any():
                kept.grow(len(part))
                parts.append(part)
    except TimeoutError:
        raise RequestRefusedError(408, f"the body took more than {seconds:g} s") from None
    except web.RequestPayloadError as error:
        raise RequestRefusedError(400, "the body is incomplete or damaged") from error
    raw = b"".join(parts)
    if encoding:
        raw = _unpacked(raw, encoding, options.largest_body_mb << 20)
        kept.be(len(raw))
    return raw


def _unpacked(packed: bytes, encoding: str, most: int) -> bytes:
    """Return what a compressed body holds, or a little more than the largest body.

    A kilobyte can hold a megabyte: what is too large is not unpacked to its end.
    """
    unpacking = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        raw = unpacking.decompress(packed, most + 1)
    except zlib.error as error:
        raise RequestRefusedError(400, "the body is incomplete or damaged") from error
    if len(raw) <= most and not unpacking.eof:
        raise RequestRefusedError(400, "the body is incomplete or damaged")
    return raw


def _encoding(http: web.Request) -> str:
    """Return how a body is compressed; nothing if it is not."""
    encoding = http.headers.get("Content-Encoding", "").strip().lower()
    return "" if encoding == "identity" else encoding

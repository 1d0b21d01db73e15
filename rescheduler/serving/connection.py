"""Connections whose errors are the proxy's own, also where nothing of a request can be read."""

import asyncio
import logging
from typing import Any

from aiohttp import web

from rescheduler.openai.openai_request import error_body

__all__ = ["Connection", "refuse_expectations"]

logger = logging.getLogger("headway.serve")


class Connection(web.RequestHandler):
    """Answers bytes that are no HTTP in OpenAI's shape, and logs no traceback of them.

    Bodies are left compressed: `RequestBodies` knows how much of one may be unpacked.

    Args:
        server: that it belongs to.
        loop: the running event loop.
        **options: of aiohttp's connections.
    """

    __slots__ = ()

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        own: dict[str, Any] = {"access_log": None, "auto_decompress": False}
        super().__init__(server, loop=loop, **own, **options)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer to what no endpoint has answered.

        Raises:
            ConnectionError: an answer has begun.
        """
        text = "the proxy failed; see its log"
        if status >= 500:
            super().handle_error(request, status, exc, message)
        else:
            text = f"not a valid HTTP request: {(message or '').partition(':')[0]}"
            logger.debug("refused a client: %s", text)
            if request.writer.output_size > 0:
                raise ConnectionError("an answer has begun")
        response = _error(status, text)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Log a failure, unless it is that of a client to send a body."""
        if isinstance(options.get("exc_info"), web.RequestPayloadError):
            self.log_debug(*args, **options)
        else:
            super().log_exception(*args, **options)


def refuse_expectations(server: web.Server) -> None:
    """Have a server answer 417 to an ``Expect`` that it does not know.

    aiohttp would do so before any middleware, and fail where the header is no UTF-8.
    """
    handler = server.request_handler

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect", "100-continue").lower() != "100-continue":
            return _error(417, "of all expectations only 100-continue is met")
        return await handler(request)

    server.request_handler = handle


def _error(status: int, message: str) -> web.Response:
    return web.Response(
        status=status, body=error_body(status, message), content_type="application/json"
    )

"""Errors as HTTP answers, in OpenAI's shape."""

import logging
from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler

from rescheduler.openai.openai_request import RequestRefusedError, error_body

__all__ = ["answer_errors", "with_errors"]

logger = logging.getLogger("headway.serve")


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a refusal, a wrong path and a failure of our own."""
    try:
        return await handler(request)
    except RequestRefusedError as error:
        headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
        return _document(error.status, error.body, headers)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        message = f"{request.method} {request.path}: {error.reason}"
        allowed = {key: error.headers[key] for key in ("Allow",) if key in error.headers}
        return _document(error.status, error_body(error.status, message), allowed)
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return _document(500, error_body(500, "the proxy failed; see its log"), {})


def with_errors(routes: Sequence[web.RouteDef]) -> list[web.RouteDef]:
    """Return routes that answer, too, what aiohttp itself would, before any middleware.

    Args:
        routes: of an application; one for every other path is added.
    """

    async def unknown(request: web.Request) -> web.Response:
        allowed = {route.method for route in routes if route.path == request.path}
        if allowed:
            raise web.HTTPMethodNotAllowed(request.method, allowed)
        raise web.HTTPNotFound

    every = [*routes, web.route("*", "/{path:.*}", unknown)]
    return [
        web.RouteDef(route.method, route.path, route.handler, {"expect_handler": _expect})
        for route in every
    ]


async def _expect(request: web.Request) -> web.Response | None:
    """Let a client go on that waits to be told so; refuse whatever else it expects."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        return _document(417, error_body(417, "`Expect` may be 100-continue only"), {})
    assert request.transport is not None
    request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return None


def _document(status: int, body: bytes, headers: dict[str, str]) -> web.Response:
    return web.Response(status=status, body=body, headers=headers, content_type="application/json")

"""Errors as HTTP answers, in OpenAI's shape."""

import logging

from aiohttp import web
from aiohttp.typedefs import Handler

from rescheduler.openai.openai_request import RequestRefusedError, error_body

__all__ = ["answer_errors"]

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


def _document(status: int, body: bytes, headers: dict[str, str]) -> web.Response:
    return web.Response(status=status, body=body, headers=headers, content_type="application/json")

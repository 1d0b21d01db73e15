"""Who may use an endpoint for operators."""

import hmac
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from rescheduler.openai.openai_request import RequestRefusedError

__all__ = ["token_check"]

_Open = Callable[[web.Request], Awaitable[web.StreamResponse]]


def token_check(token: str, open_to_all: _Open | None = None) -> Middleware:
    """Return what refuses requests that lack the token.

    Args:
        token: given as ``Authorization: Bearer``, and never in an address.
        open_to_all: the endpoint that needs none, if there is one.
    """
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check_token(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        is_open = open_to_all is not None and request.match_info.handler == open_to_all
        if not is_open and not hmac.compare_digest(given, expected):
            raise RequestRefusedError(401, "the proxy's admin token is required")
        return await handler(request)

    return check_token

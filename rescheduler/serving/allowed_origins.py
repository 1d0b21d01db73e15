"""Which web pages may read the proxy's answers (CORS)."""

from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler

__all__ = ["AllowedOrigins"]

_METHODS = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT, QUERY"
_PREFLIGHT_SECONDS = "600"


class AllowedOrigins:
    """Tells browsers which pages may read answers, as vLLM's ``--allowed-origins`` does.

    Credentials that a browser keeps, such as cookies, are never allowed.

    Args:
        origins: of pages, as ``https://chat.example``; ``*`` stands for all.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    @web.middleware
    async def answer_preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a browser's question whether a page may send a request."""
        asked = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or asked is None or "Origin" not in request.headers:
            return await handler(request)
        headers = {
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Max-Age": _PREFLIGHT_SECONDS,
        }
        wanted = request.headers.get("Access-Control-Request-Headers")
        if wanted is not None and wanted.isascii():
            headers["Access-Control-Allow-Headers"] = wanted
        if self._allowed(request) is None:
            return web.Response(status=400, text="Disallowed CORS origin", headers=headers)
        return web.Response(text="OK", headers=headers)

    async def allow(self, http: web.Request, response: web.StreamResponse) -> None:
        """Let the page that asks read an answer, if it may."""
        if not self._origins:
            return
        response.headers.add("Vary", "Origin")
        origin = self._allowed(http)
        if origin is not None:
            response.headers["Access-Control-Allow-Origin"] = origin

    def _allowed(self, http: web.Request) -> str | None:
        """Return the origin that a browser has to read; None: it is not allowed."""
        origin = http.headers.get("Origin")
        if origin is None:
            return None
        if "*" in self._origins:
            return "*"
        return origin if origin in self._origins else None

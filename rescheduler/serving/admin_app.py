"""The endpoints for whoever operates the proxy: which instances there are, and draining."""

import hmac
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.instance_state import InstanceState
from rescheduler.proxy.proxy import Proxy
from rescheduler.serving.http_errors import answer_errors

__all__ = ["admin_app"]


def admin_app(proxy: Proxy, token: str) -> web.Application:
    """Return the application.

    Args:
        proxy: that is operated.
        token: that every request has to have, as ``Authorization: Bearer``.
    """
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check_token(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, expected):
            raise RequestRefusedError(401, "the proxy's admin token is required")
        return await handler(request)

    endpoints = _Endpoints(proxy)
    app = web.Application(middlewares=[answer_errors, check_token])
    app.add_routes(
        [
            web.get("/admin/instances", endpoints.instances),
            web.post("/admin/drain/{instance}", endpoints.drain),
            web.post("/admin/undrain/{instance}", endpoints.undrain),
        ]
    )
    return app


class _Endpoints:
    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    async def instances(self, http: web.Request) -> web.Response:
        """List the instances."""
        del http
        listed = [self._described(instance) for instance in self._proxy.instances.values()]
        return _json({"instances": listed})

    async def drain(self, http: web.Request) -> web.Response:
        """Begin to drain an instance."""
        instance = self._named(http)
        self._proxy.drainer.drain(instance)
        return _json(self._described(instance))

    async def undrain(self, http: web.Request) -> web.Response:
        """Let requests come to an instance again."""
        instance = self._named(http)
        self._proxy.drainer.undrain(instance)
        return _json(self._described(instance))

    def _named(self, http: web.Request) -> InstanceState:
        name = http.match_info["instance"]
        instance = self._proxy.instances.get(name)
        if instance is None:
            known = ", ".join(self._proxy.instances)
            raise RequestRefusedError(404, f"no instance {name!r}; there are: {known}")
        return instance

    def _described(self, instance: InstanceState) -> dict[str, Any]:
        requests = self._proxy.placements.on(instance)
        return {
            "name": instance.name,
            "role": instance.instance.role,
            "url": instance.instance.url,
            "state": instance.breaker.state.value,
            "draining": instance.draining,
            "requests": len(requests),
            "movable": sum(request.can_move for request in requests),
            "context_tokens": sum(r.context_tokens for r in requests),
        }


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")

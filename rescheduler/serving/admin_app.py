"""The endpoints for operators: instances, draining, and the page."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic

import msgspec
from aiohttp import web

from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.page.page_files import PageFiles
from rescheduler.page.page_stream import PageStream
from rescheduler.page.snapshot_feed import SnapshotFeed
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.placeable import PlacedRequests, R
from rescheduler.proxy.drainer import Drainer
from rescheduler.serving.http_errors import answer_errors
from rescheduler.serving.token_check import token_check

__all__ = ["Operated", "admin_app"]


@dataclass(frozen=True)
class Operated(Generic[R]):
    """What is operated: a proxy, or a coordinator of many.

    Attributes:
        instances: all, by name.
        placements: which requests are on which instance.
        drainer: empties instances.
    """

    instances: Mapping[str, InstanceState]
    placements: PlacedRequests[R]
    drainer: Drainer[R]


def admin_app(
    operated: Operated[R], token: str, feed: SnapshotFeed | None = None
) -> web.Application:
    """Return the application.

    Args:
        operated: what is operated.
        token: that every request but those for the page's files has to have, as
            ``Authorization: Bearer``.
        feed: what the page shows; closed with the application. None: there is no page.
    """
    endpoints, page = _Endpoints(operated), PageFiles()
    without_token = page.answer if feed is not None else None
    app = web.Application(middlewares=[answer_errors, token_check(token, without_token)])
    if feed is not None:
        stream = PageStream(feed)
        app.on_shutdown.append(stream.close)
        app.add_routes([*page.routes, *stream.routes])
    app.add_routes(
        [
            web.get("/admin/instances", endpoints.instances),
            web.post("/admin/drain/{instance}", endpoints.drain),
            web.post("/admin/undrain/{instance}", endpoints.undrain),
        ]
    )
    return app


class _Endpoints(Generic[R]):
    def __init__(self, operated: Operated[R]) -> None:
        self._operated = operated

    async def instances(self, http: web.Request) -> web.Response:
        """List the instances."""
        del http
        listed = [self._described(instance) for instance in self._operated.instances.values()]
        return _json({"instances": listed})

    async def drain(self, http: web.Request) -> web.Response:
        """Begin to drain an instance."""
        instance = self._named(http)
        self._operated.drainer.drain(instance)
        return _json(self._described(instance))

    async def undrain(self, http: web.Request) -> web.Response:
        """Let requests come to an instance again."""
        instance = self._named(http)
        self._operated.drainer.undrain(instance)
        return _json(self._described(instance))

    def _named(self, http: web.Request) -> InstanceState:
        name = http.match_info["instance"]
        instance = self._operated.instances.get(name)
        if instance is None:
            known = ", ".join(self._operated.instances)
            raise RequestRefusedError(404, f"no instance {name!r}; there are: {known}")
        return instance

    def _described(self, instance: InstanceState) -> dict[str, Any]:
        requests = self._operated.placements.on(instance)
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

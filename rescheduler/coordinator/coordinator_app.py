"""The coordinator's HTTP endpoints: health, readiness and metrics."""

from aiohttp import web

from rescheduler.coordinator.coordinator import Coordinator

__all__ = ["coordinator_app"]


def coordinator_app(coordinator: Coordinator) -> web.Application:
    """Return the application."""

    async def health(http: web.Request) -> web.Response:
        del http
        return web.Response()

    async def ready(http: web.Request) -> web.Response:
        del http
        return web.Response(status=200 if coordinator.ready else 503)

    async def metrics(http: web.Request) -> web.Response:
        del http
        return web.Response(
            body=coordinator.metrics.text(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    app = web.Application()
    app.add_routes(
        [web.get("/health", health), web.get("/ready", ready), web.get("/metrics", metrics)]
    )
    return app

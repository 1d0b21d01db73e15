"""The proxy's HTTP endpoints."""

import asyncio
import ipaddress
import logging
import re
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from rescheduler.openai.openai_request import (
    CHAT,
    COMPLETIONS,
    RequestRefusedError,
    read_request,
)
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.proxy.client_answer import ClientAnswer, ClientGoneError
from rescheduler.proxy.proxy import Proxy
from rescheduler.proxy.upstream import EngineRefusedError, UpstreamError

__all__ = ["http_app"]

logger = logging.getLogger("headway.serve")

_PASSED_ON = ("Authorization", "traceparent", "tracestate")
_NAME = re.compile(r"[\w.:-]{1,128}")


def http_app(proxy: Proxy) -> web.Application:
    """Return the application: OpenAI's endpoints, health, metrics, and draining."""
    endpoints = _Endpoints(proxy)
    largest = proxy.deployment.proxy.largest_body_mb << 20
    app = web.Application(client_max_size=largest, middlewares=[_refuse])
    app.add_routes(
        [
            web.post(COMPLETIONS, endpoints.generate),
            web.post(CHAT, endpoints.generate),
            web.get("/v1/models", endpoints.models),
            web.get("/health", endpoints.health),
            web.get("/ready", endpoints.ready),
            web.get("/metrics", endpoints.metrics),
            web.get("/admin/instances", endpoints.instances),
            web.post("/admin/drain/{instance}", endpoints.drain),
            web.post("/admin/undrain/{instance}", endpoints.undrain),
        ]
    )
    return app


class _Endpoints:
    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """Answer ``/v1/completions`` or ``/v1/chat/completions``."""
        path = http.path
        try:
            raw = await http.read()
            client = read_request(path, raw)
            self._proxy.dispatcher.admit()
        except web.HTTPRequestEntityTooLarge:
            raise RequestRefusedError(413, "the body is too large") from None
        except RequestRefusedError as error:
            outcome = "refused" if error.status == 400 else f"rejected_{error.status}"
            self._proxy.metrics.requests.labels(path, outcome).inc()
            raise
        name = http.headers.get("X-Request-Id") or client.body.get("request_id")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            name = None
        headers = {key: http.headers[key] for key in _PASSED_ON if key in http.headers}
        request = self._proxy.new_request(client, name, headers, len(raw))
        answer = ClientAnswer(http, client, {"X-Request-Id": request.name})
        outcome = "client_gone"
        try:
            response, outcome = await self._generated(request, answer)
            return response
        finally:
            self._proxy.request_ended(request, outcome)

    async def _generated(
        self, request: LiveRequest, answer: ClientAnswer
    ) -> tuple[web.StreamResponse, str]:
        """Return the answer to a request, and how it ended."""
        try:
            if request.client.movable:
                await self._proxy.flow.run(request, answer.chunks)
                return await answer.finish(), "ok"
            return await self._proxy.pass_through.run(request, answer), "ok"
        except EngineRefusedError as error:
            return await answer.fail(error.status, error.body), "refused"
        except RequestRefusedError as error:
            failed = await answer.fail(error.status, error.body, error.retry_after)
            return failed, f"rejected_{error.status}"
        except UpstreamError as error:
            logger.error("request %s failed: %s", request.id, error)
            return await answer.fail_with(502, f"the engines failed: {error}"), "failed"
        except ClientGoneError:
            raise asyncio.CancelledError from None

    async def models(self, http: web.Request) -> web.Response:
        """Answer ``/v1/models`` as a decode instance does."""
        del http
        failure = "no decode instance is in service"
        for instance in self._proxy.instances.values():
            if instance.instance.role != "decode" or not instance.breaker.closed:
                continue
            try:
                seconds = self._proxy.deployment.proxy.control_seconds
                body = await self._proxy.upstream.get(instance.instance, "/v1/models", seconds)
            except UpstreamError as error:
                failure = str(error)
                continue
            return web.Response(body=body, content_type="application/json")
        raise RequestRefusedError(503, failure, retry_after=1)

    async def health(self, http: web.Request) -> web.Response:
        """Return 200 while the proxy runs."""
        del http
        return web.Response()

    async def ready(self, http: web.Request) -> web.Response:
        """Return 200 if a decode instance is in service, else 503."""
        del http
        return web.Response(status=200 if self._proxy.ready else 503)

    async def metrics(self, http: web.Request) -> web.Response:
        """Answer Prometheus."""
        del http
        return web.Response(
            body=self._proxy.metrics.text(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def instances(self, http: web.Request) -> web.Response:
        """List the instances."""
        _refuse_remote(http)
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
        _refuse_remote(http)
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
            "context_tokens": sum(r.prompt_tokens + r.generated_tokens for r in requests),
        }


def _refuse_remote(http: web.Request) -> None:
    """Draining is for this machine only, wherever the proxy listens.

    Raises:
        RequestRefusedError: the request comes from another machine.
    """
    try:
        local = ipaddress.ip_address(http.remote or "").is_loopback
    except ValueError:
        local = False
    if not local:
        raise RequestRefusedError(403, "/admin answers to this machine only")


@web.middleware
async def _refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a refusal in OpenAI's shape."""
    try:
        return await handler(request)
    except RequestRefusedError as error:
        return _refused(error)


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _refused(error: RequestRefusedError) -> web.Response:
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return web.Response(
        status=error.status, body=error.body, headers=headers, content_type="application/json"
    )

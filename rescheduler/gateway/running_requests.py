"""The requests that gateways have been told where to send, until their answers end."""

import asyncio
import ipaddress
import logging
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from rescheduler.engines.deployment import DeploymentError, Instance
from rescheduler.gateway.engine_answer import EngineAnswer
from rescheduler.openai.body_memory import BodyMemory
from rescheduler.openai.openai_request import ClientRequest, RequestRefusedError
from rescheduler.placement.account import Account
from rescheduler.placement.cluster import Cluster
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.upstream import EngineFullError, EngineRefusedError, UpstreamError

__all__ = ["Endpoints", "RunningRequests", "Suspects", "nowhere_to_go"]


logger = logging.getLogger("headway.serve")

_REST_SECONDS = 0.5


class Suspects:
    """Asks an engine itself whether it works, when a request's end makes that doubtful.

    The picker sees neither why a stream was cut, which the client may have done, nor whether an
    error is the request's own fault. So neither counts against an engine; the check does. It is
    made once at a time and at most every half second, whatever clients do.
    """

    def __init__(self, cluster: Cluster[LiveRequest]) -> None:
        self._cluster = cluster
        self._checked: set[InstanceState] = set()

    def cut(self, instance: InstanceState) -> None:
        """Note that an answer ended before its time: ask for the engine's health."""
        self._check(instance, self._cluster.prober.probe)

    def erred(self, instance: InstanceState) -> None:
        """Note that a request was answered with a server's error: have one token generated."""
        self._check(instance, self._generate)

    def _check(
        self,
        instance: InstanceState,
        check: Callable[[InstanceState], Coroutine[Any, Any, None]],
    ) -> None:
        if not instance.breaker.closed or instance in self._checked:
            return
        self._checked.add(instance)

        async def run() -> None:
            try:
                await check(instance)
                await asyncio.sleep(_REST_SECONDS)
            finally:
                self._checked.discard(instance)

        self._cluster.background(run())

    async def _generate(self, instance: InstanceState) -> None:
        try:
            model = self._cluster.deployment.served_name
            await self._cluster.upstream.generate_one(instance.instance, model)
        except (EngineFullError, RequestRefusedError):
            return
        except (UpstreamError, EngineRefusedError) as error:
            if isinstance(error, UpstreamError) and not (error.answered or error.gone):
                return  # it is late: its evidence says whether it lives
            if instance.breaker.failed(asyncio.get_running_loop().time(), certain=True):
                logger.warning("%s; out of service", error)


_PORTS = {"http": 80, "https": 443}


class Endpoints:
    """The ``ip:port`` of each engine, and which engines a gateway allows for a request.

    Raises:
        DeploymentError: an engine's url has a name in place of an address.
    """

    def __init__(self, instances: Iterable[InstanceState]) -> None:
        self._of: Mapping[InstanceState, str] = {one: _endpoint(one.instance) for one in instances}

    def of(self, instance: InstanceState) -> str:
        """Return the ``ip:port`` of an engine, an IPv6 address in brackets."""
        return self._of[instance]

    def outside(self, subset: frozenset[str] | None) -> frozenset[InstanceState]:
        """Return the engines that a request must not go to, of which its gateway allows these."""
        if subset is None:
            return frozenset()
        return frozenset(one for one, endpoint in self._of.items() if endpoint not in subset)


def nowhere_to_go() -> RequestRefusedError:
    """Return the refusal of a request that no engine in service may serve."""
    return RequestRefusedError(503, "no engine in service may serve this request", retry_after=1)


def _endpoint(instance: Instance) -> str:
    parts = urlsplit(instance.url)
    try:
        address = ipaddress.ip_address(parts.hostname or "")
    except ValueError as error:
        raise DeploymentError(
            f"{instance.name}: url: {instance.url}: a gateway is told addresses, not names; "
            "write the engine's IP address"
        ) from error
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"{host}:{parts.port or _PORTS[parts.scheme]}"


class RunningRequests:
    """Places requests, and knows of each where it is and how many tokens it has.

    Attributes:
        bodies: the memory of all that are being read.
        body_seconds: for which a body may be incomplete.
    """

    def __init__(self, cluster: Cluster[LiveRequest]) -> None:
        options = cluster.deployment.proxy
        self._cluster, self.dispatcher = cluster, cluster.dispatcher
        self.accounts = cluster.accounts
        self.endpoints, self.suspects = Endpoints(cluster.all), Suspects(cluster)
        self.bodies = BodyMemory(options.largest_body_mb, options.bodies_mb, share=1.0)
        self.body_seconds = options.body_seconds

    @contextmanager
    def begun(
        self, client: ClientRequest, name: str | None, account: Account
    ) -> Iterator[LiveRequest]:
        """Count a request that has just arrived, without its body, until it ends somehow."""
        id = uuid.uuid4().hex
        now = asyncio.get_running_loop().time()
        client = replace(client, body={}, direct=client.direct or "gateway")
        request = LiveRequest(id, name or id, client, {}, now, None, self._cluster.placements)
        request.account = account
        self._cluster.began(request)
        try:
            yield request
        finally:
            self.end(request, None)

    async def place(self, request: LiveRequest, subset: frozenset[str] | None) -> InstanceState:
        """Wait until the policy gives a request an engine, where it counts then; or refuse it."""
        request.avoid = self.endpoints.outside(subset)
        if not self.dispatcher.has_another(request):
            raise nowhere_to_go()
        instance = await self.dispatcher.place(request)
        if instance in request.avoid:  # meanwhile the others have left service
            raise nowhere_to_go()
        return instance

    def any_instance(self, subset: frozenset[str] | None) -> InstanceState:
        """Return an engine in service for what is no work: the one with the fewest requests."""
        outside = self.endpoints.outside(subset)
        usable = [one for one in self.dispatcher.usable if one not in outside]
        if not usable:
            raise nowhere_to_go()
        return min(usable, key=lambda instance: len(self._cluster.placements.on(instance)))

    def answered(self, request: LiveRequest, answer: EngineAnswer) -> None:
        """Note an engine's answer to a request, of which the headers have come."""
        assert request.instance is not None
        if answer.failed:
            self.suspects.erred(request.instance)
        elif answer.ok:
            request.accepted()
        else:
            request.refused = True

    def generated(self, request: LiveRequest, total: int) -> None:
        """Note how many tokens a request has by now, unless more were known already."""
        instance, tokens = request.instance, total - request.generated_tokens
        if tokens <= 0 or instance is None:
            return
        arrival = request.untracked_tokens(tokens, asyncio.get_running_loop().time())
        if arrival.first:
            instance.breaker.succeeded()
        if arrival.waited is not None:
            self._cluster.step.took(arrival.waited / tokens)

    def end(self, request: LiveRequest, answer: EngineAnswer | None) -> None:
        """Forget a request, once; without an answer, there was none, or it was cut."""
        if request.ended:
            return
        if request.instance is not None and answer is None:
            self.suspects.cut(request.instance)
        request.finish()
        by_itself = answer is not None and answer.ok and request.generated_tokens > 0
        self._cluster.ended(request, by_itself)
        self.dispatcher.wake()

"""Health probes of the instances."""

import asyncio
import logging
from collections.abc import Callable

from prometheus_client import Counter

from rescheduler.engines.deployment import ProxyOptions
from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.upstream import EngineRefusedError, Upstream, UpstreamError
from rescheduler.transfer.control_messages import ControlError

__all__ = ["OutlierDetection", "Prober"]


logger = logging.getLogger("headway.serve")

_SHORTEST = 0.1


class Prober:
    """Asks an instance for its health, and a decode instance how full it is.

    An instance in service is asked every ``probe_seconds``. One that is not has to generate a
    token, when its breaker lets it: vLLM's HTTP server also answers while its engine hangs.

    Args:
        wake: called when an instance may have more room.
        changed: called when an instance has become of another kind.
    """

    def __init__(
        self,
        upstream: Upstream,
        wake: Callable[[], None],
        options: ProxyOptions,
        model: str,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._upstream, self._wake = upstream, wake
        self._options, self._model, self._changed = options, model, changed
        self._said: dict[str, str] = {}

    async def run(self, instance: InstanceState) -> None:
        """Probe an instance forever."""
        loop = asyncio.get_running_loop()
        while True:
            if instance.breaker.closed or instance.breaker.probe_due(loop.time()):
                before = instance.kind
                await self.probe(instance)
                if instance.kind != before:
                    self._changed()
            wait = self._options.probe_seconds
            if not instance.breaker.closed:
                wait = min(wait, instance.breaker.seconds_to_probe(loop.time()))
            await asyncio.sleep(max(_SHORTEST, wait))

    async def probe(self, instance: InstanceState) -> None:
        """Probe an instance once; whatever goes wrong counts against it, and ends nothing else."""
        try:
            await self._probe(instance)
        except Exception:
            logger.exception("%s: its probe failed", instance.name)
            instance.breaker.failed(asyncio.get_running_loop().time())

    async def _probe(self, instance: InstanceState) -> None:
        try:
            await self._upstream.get(instance.instance, "/health")
            returns = not instance.breaker.closed
            if returns:
                await self._upstream.generate_one(instance.instance, self._model)
        except RequestRefusedError as error:  # nobody can be asked now
            logger.warning("%s: not probed: %s", instance.name, error)
            return
        except (UpstreamError, EngineRefusedError) as error:
            now = asyncio.get_running_loop().time()
            unsent = isinstance(error, UpstreamError) and error.unsent
            if instance.breaker.failed(now, certain=unsent):
                logger.warning("%s; out of service", error)
            return
        if instance.control is not None:
            try:
                instance.engine = await instance.control.state(self._options.control_seconds)
                self._said.pop(instance.name, None)
            except ControlError as error:
                if returns:  # it may be another engine by now
                    instance.engine = None
                if self._said.get(instance.name) != str(error):  # it may say so for days
                    logger.warning("%s: %s", instance.name, error)
                self._said[instance.name] = str(error)
        if returns:
            instance.breaker.succeeded()
            logger.info("%s: in service again", instance.name)
        self._wake()


class OutlierDetection:
    """Notes what requests see of the instances.

    An error that an instance answers may be the request's own fault. It counts only once another
    instance has served the same request.

    Source: the design follows Envoy's outlier detection (consecutive gateway failures).

    Args:
        count: counts a failure against an instance; the flag: nothing listens there.
        failures: counts failed calls, by the instance's name.
    """

    def __init__(self, count: Callable[[InstanceState, bool], None], failures: Counter) -> None:
        self._count, self._failures = count, failures

    def failed(self, request: LiveRequest, instance: InstanceState, error: UpstreamError) -> None:
        """Note that an instance failed a request."""
        self._failures.labels(instance.name).inc()
        logger.warning("request %s: %s", request.id, error)
        if error.answered:
            request.failed_by.append(instance)
        else:
            self._count(instance, error.unsent)

    def succeeded(self, request: LiveRequest, instance: InstanceState) -> None:
        """Note that an instance serves a request; those that answered it with an error failed."""
        instance.breaker.succeeded()
        for other in request.failed_by:
            if other is not instance:
                self._count(other, False)
        request.failed_by.clear()

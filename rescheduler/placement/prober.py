"""Health probes of the instances."""

import asyncio
import logging
from collections.abc import Callable

from prometheus_client import Counter

from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.evidence import LONGEST_WAIT
from rescheduler.placement.instance_state import InstanceState, ask_models
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.upstream import EngineRefusedError, Upstream, UpstreamError
from rescheduler.transfer.control_messages import ControlError

logger = logging.getLogger("headway.serve")

_SHORTEST = 0.1
_MOMENT = 0.5
"""Seconds for an answer of a control socket that needs none of the engine's own time."""


class Prober:
    """Asks an instance for its health and its models, and a decode instance how full it is.

    An instance in service is asked every ``probe_seconds``. One that is not has to make a step, or
    to generate a token, when its breaker lets it: vLLM's HTTP server also answers while its engine
    hangs. What it says, or does not say, goes into the instance's evidence.

    Args:
        lost: called when an instance has failed by its evidence.
        wake: called when an instance may have more room.
        heard: returns when telemetry of an instance last came; None if none has.
        longest_step: returns how long a step of an instance may take, with the prompts it has.
        changed: called when an instance has become of another kind.
    """

    def __init__(
        self,
        upstream: Upstream,
        lost: Callable[[InstanceState], None],
        wake: Callable[[], None],
        options: ProxyOptions,
        model: str,
        heard: Callable[[InstanceState], float | None] = lambda instance: None,
        longest_step: Callable[[InstanceState], float] = lambda instance: LONGEST_WAIT,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._upstream = upstream
        self._lost = lost
        self._wake = wake
        self._options = options
        self._model = model
        self._changed = changed
        self._heard, self._longest_step = heard, longest_step
        self._said: dict[str, str] = {}
        self._verifying: dict[InstanceState, asyncio.Task[bool]] = {}

    async def run(self, instance: InstanceState) -> None:
        """Ask an instance forever; its control socket, and what is known of it, apart."""
        await asyncio.gather(self._probe_forever(instance), self._look_forever(instance))

    async def _look_forever(self, instance: InstanceState) -> None:
        while True:
            await asyncio.sleep(max(_SHORTEST, self._options.probe_seconds))
            before = instance.kind
            try:
                await self._ask_state(instance)
                self._look(instance)
            except Exception:
                logger.exception("%s: looking at it failed", instance.name)
            if instance.kind != before:
                self._changed()

    def _look(self, instance: InstanceState) -> None:
        telemetry = self._heard(instance)
        if telemetry is not None:
            instance.evidence.heard(telemetry)
        now = asyncio.get_running_loop().time()
        if instance.evidence.look(now, self._longest_step(instance)):
            self._lost(instance)

    async def _probe_forever(self, instance: InstanceState) -> None:
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

    async def has_died(self, instance: InstanceState, incarnation: str) -> bool:
        """Return whether an engine has ended, or started anew, since it had this incarnation.

        Nobody listens there, its server says that it is dead, or it is another one by now.
        """
        task = self._verifying.get(instance)
        if task is None:
            task = asyncio.create_task(self._verify(instance))
            self._verifying[instance] = task
            task.add_done_callback(lambda _: self._verifying.pop(instance, None))
        dead = await asyncio.shield(task)
        return dead or (bool(incarnation) and instance.evidence.incarnation != incarnation)

    async def _verify(self, instance: InstanceState) -> bool:
        try:
            await self._upstream.get(instance.instance, "/health")
        except UpstreamError as error:
            if error.gone:
                self.refused(instance)
            return (error.gone or error.answered) and not await self._still_controlled(
                instance, otherwise=error.answered
            )
        except (EngineRefusedError, RequestRefusedError):
            return False
        instance.evidence.answered(asyncio.get_running_loop().time())
        await self._ask_state(instance)
        return False

    async def _still_controlled(self, instance: InstanceState, otherwise: bool) -> bool:
        """Return whether the engine itself lives, behind whose HTTP server something is wrong.

        That of an engine that is dead answers for a moment that it is. One without a control socket
        cannot be asked ``otherwise``.
        """
        if instance.control is None:
            return otherwise
        try:
            state = await instance.control.state(_MOMENT)
        except ControlError:
            return False
        return state.incarnation == instance.evidence.incarnation

    def refused(self, instance: InstanceState) -> None:
        """Note that nothing listens on an instance's port."""
        if instance.evidence.refused(asyncio.get_running_loop().time()):
            self._lost(instance)

    async def _probe(self, instance: InstanceState) -> None:
        loop, returns = asyncio.get_running_loop(), not instance.breaker.closed
        steps, incarnation = instance.evidence.steps, instance.evidence.incarnation
        if returns or instance.engine is None:
            healthy, _ = await asyncio.gather(self._is_healthy(instance), self._ask_state(instance))
        else:
            healthy = await self._is_healthy(instance)
        if healthy:
            await ask_models(self._upstream, instance)
        if returns and healthy:
            stepped = instance.evidence.incarnation == incarnation and (
                instance.evidence.steps > steps >= 0
            )
            if not stepped and not await self._generates(instance):
                return
            instance.evidence.returned(loop.time())
            instance.breaker.succeeded()
            logger.info("%s: in service again", instance.name)
        if healthy:
            self._wake()

    async def _is_healthy(self, instance: InstanceState) -> bool:
        """Return whether an instance answers that it is well; count it if it answers otherwise."""
        loop = asyncio.get_running_loop()
        try:
            await self._upstream.get(instance.instance, "/health")
        except RequestRefusedError as error:  # nobody can be asked now
            logger.warning("%s: not probed: %s", instance.name, error)
            instance.evidence.answered(loop.time())
            if not instance.breaker.closed:
                instance.breaker.failed(loop.time())
            return False
        except (UpstreamError, EngineRefusedError) as error:
            gone = isinstance(error, UpstreamError) and error.gone
            answered = isinstance(error, EngineRefusedError) or error.answered
            if gone:
                self.refused(instance)
            if answered:
                instance.evidence.answered(loop.time())
            if gone or answered or not instance.breaker.closed:
                self._count(instance, error, certain=gone)
            return False
        instance.evidence.answered(loop.time())
        return True

    async def _generates(self, instance: InstanceState) -> bool:
        try:
            await self._upstream.generate_one(instance.instance, self._model)
        except (UpstreamError, EngineRefusedError, RequestRefusedError) as error:
            self._count(instance, error)
            return False
        return True

    def _count(self, instance: InstanceState, error: Exception, certain: bool = False) -> None:
        if instance.breaker.failed(asyncio.get_running_loop().time(), certain=certain):
            logger.warning("%s; out of service", error)

    async def _ask_state(self, instance: InstanceState) -> None:
        if instance.control is None:
            return
        try:
            state = await instance.control.state(self._options.control_seconds)
        except ControlError as error:
            if not instance.breaker.closed:  # it may be another engine by now
                instance.engine = None
            if self._said.get(instance.name) != str(error):  # it may say so for days
                logger.warning("%s: %s", instance.name, error)
            self._said[instance.name] = str(error)
            return
        drained, instance.engine = instance.draining, state
        if instance.draining and not drained:
            logger.info("%s: draining, since it is being stopped", instance.name)
        self._said.pop(instance.name, None)
        now, busy = asyncio.get_running_loop().time(), state.running + state.waiting > 0
        instance.evidence.reported(now, state.incarnation, state.steps, busy)


class OutlierDetection:
    """Notes what requests see of the instances.

    An error that an instance answers may be the request's own fault. It counts only once another
    instance has served the same request. A broken or late stream counts against no instance that
    can be asked: whether that one lives is for its evidence to say.

    Source: the design follows Envoy's outlier detection (consecutive gateway failures).

    Args:
        count: counts a failure against an instance; the flag: nothing listens there.
        refused: notes that nothing listens on an instance's port.
        failures: counts failed calls, by the instance's name.
    """

    def __init__(
        self,
        count: Callable[[InstanceState, bool], None],
        refused: Callable[[InstanceState], None],
        failures: Counter,
    ) -> None:
        self._count = count
        self._refused = refused
        self._failures = failures

    def failed(self, request: LiveRequest, instance: InstanceState, error: UpstreamError) -> None:
        """Note that an instance failed a request."""
        self._failures.labels(instance.name).inc()
        logger.warning("request %s: %s", request.id, error)
        if error.answered:
            request.failed_by.append(instance)
        elif error.gone:
            self._refused(instance)
        elif instance.control is None and not error.unsent:
            self._count(instance, False)

    def succeeded(self, request: LiveRequest, instance: InstanceState) -> None:
        """Note that an instance serves a request; those that answered it with an error failed."""
        if instance.breaker.closed:  # else its probes decide
            instance.breaker.succeeded()
        for other in request.failed_by:
            if other is not instance:
                self._count(other, False)
        request.failed_by.clear()

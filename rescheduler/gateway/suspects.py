"""Engines that may have failed, checked before more requests go there."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.instance_state import InstanceState
from rescheduler.proxy.prober import Prober
from rescheduler.proxy.upstream import (
    EngineFullError,
    EngineRefusedError,
    Upstream,
    UpstreamError,
)

__all__ = ["Suspects"]

logger = logging.getLogger("headway.serve")

_REST_SECONDS = 0.5


class Suspects:
    """Asks an engine itself whether it works, when a request's end makes that doubtful.

    The picker sees neither why a stream was cut, which the client may have done, nor whether an
    error is the request's own fault. So neither counts against an engine; the check does. It is
    made once at a time and at most every half second, whatever clients do.

    Args:
        upstream: connections to the engines.
        prober: asks for an engine's health.
        model: name that the engines serve.
        background: runs a check.
    """

    def __init__(
        self,
        upstream: Upstream,
        prober: Prober,
        model: str,
        background: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._upstream, self._prober, self._model = upstream, prober, model
        self._background = background
        self._checked: set[InstanceState] = set()

    def cut(self, instance: InstanceState) -> None:
        """Note that an answer ended before its time: ask for the engine's health."""
        self._check(instance, self._prober.probe)

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

        self._background(run())

    async def _generate(self, instance: InstanceState) -> None:
        try:
            await self._upstream.generate_one(instance.instance, self._model)
        except (EngineFullError, RequestRefusedError):
            return
        except (UpstreamError, EngineRefusedError) as error:
            if instance.breaker.failed(asyncio.get_running_loop().time(), certain=True):
                logger.warning("%s; out of service", error)

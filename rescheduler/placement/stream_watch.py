"""Watches everything that is awaited from engines, and ends what has failed."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from math import inf

from rescheduler.placement.cluster import Cluster
from rescheduler.placement.evidence import (
    LONGEST_WAIT,
    EngineHealth,
    RequestEvidence,
    allowance,
)
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.upstream import EngineRefusedError, UpstreamError
from rescheduler.transfer.control_messages import MOST_FOUND, ControlError, RequestStatus

logger = logging.getLogger("headway.serve")

_SWEEP_SECONDS = 0.1
_PAUSE_SECONDS = 2.0
_STILL_READ = 1.0
"""Seconds between two tokens of an engine that ends its streams, but takes no more."""

_COUNTED = re.compile(
    rb"^vllm:(prompt_tokens_total|generation_tokens_total|num_requests_running|"
    rb"num_requests_waiting)(?:\{[^}\n]*\})? ([0-9.eE+]+)$",
    re.MULTILINE,
)


class LateError(UpstreamError):
    """Raised when what was awaited from an engine has failed, by evidence or after its bound."""


@dataclass(eq=False, slots=True)
class Wait:
    """Something that is awaited from an engine for a request.

    Attributes:
        evidence: of the request there.
        timeout: ends it.
        streams: the request's tokens are seen as they come.
        paused: nobody reads what the engine says, since a client reads slowly.
        error: why it has failed; None while it has not.
    """

    request: LiveRequest
    instance: InstanceState
    evidence: RequestEvidence
    timeout: asyncio.Timeout
    streams: bool
    paused: bool = False
    error: LateError | None = None

    def progressed(self, now: float, patience: float) -> None:
        """Note a token."""
        self.evidence.progressed(now, patience)
        self.instance.evidence.stepped(now)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Pause while the body writes to the client: a slow one is not the engine's fault."""
        clock, self.paused = asyncio.get_running_loop().time, True
        began = clock()
        try:
            yield
        finally:
            self.paused = False
            self.evidence.held(clock() - began)

    def fail(self, why: str) -> None:
        """End the wait."""
        if self.error is None:
            self.error = LateError(self.instance.instance, why)
            self.timeout.reschedule(asyncio.get_running_loop().time())


class StreamWatch:
    """Decides whether an engine is slow or has failed a request: nothing else of the proxy does.

    Whatever is awaited from an engine is registered by `over`. What is late is asked for at its
    engine's control socket, many at once; an engine without one is asked for its ``/metrics``. What
    is awaited from an engine that has failed fails at once.
    """

    def __init__(self, cluster: Cluster[LiveRequest]) -> None:
        self._cluster = cluster
        self._control_seconds = cluster.deployment.proxy.control_seconds
        self._waits: set[Wait] = set()
        self._asking: set[InstanceState] = set()
        self._counted: dict[InstanceState, tuple[float, float]] = {}  # tokens, and when they grew
        self._looked = asyncio.get_running_loop().time()

    @asynccontextmanager
    async def over(
        self,
        request: LiveRequest,
        instance: InstanceState,
        patience: float,
        lands: bool = False,
        streams: bool = True,
    ) -> AsyncIterator[Wait]:
        """Watch over a request while the body awaits its engine.

        Args:
            request: that is awaited.
            instance: whose engine has it.
            patience: seconds without a token after which its engine is asked.
            lands: it has just been moved there.
            streams: its tokens are seen as they come.

        Raises:
            LateError: it has failed there, or its engine has.
        """
        evidence = RequestEvidence(asyncio.get_running_loop().time(), patience, lands)
        wait: Wait | None = None
        try:
            async with asyncio.timeout(None) as timeout:
                wait = Wait(request, instance, evidence, timeout, streams)
                self._waits.add(wait)
                try:
                    yield wait
                finally:
                    self._waits.discard(wait)
        except TimeoutError as error:
            if wait is None or wait.error is None:
                raise
            raise wait.error from error

    async def run(self) -> None:
        """Look after all, forever."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            try:
                self.look()
            except Exception:
                logger.exception("looking after streams failed")

    def look(self) -> None:
        """Look after all once."""
        now, late = asyncio.get_running_loop().time(), dict[InstanceState, list[Wait]]()
        paused, self._looked = now - self._looked, now
        for wait in list(self._waits):
            if paused > _PAUSE_SECONDS:  # of this process itself: what came has not been read yet
                wait.evidence.held(paused)
            with _alone(wait):
                if self._is_due(wait, now):
                    late.setdefault(wait.instance, []).append(wait)
        for instance, waits in late.items():
            if instance not in self._asking:
                self._asking.add(instance)
                self._cluster.background(self._ask(instance, waits[:MOST_FOUND]))

    def _is_due(self, wait: Wait, now: float) -> bool:
        """Return whether to ask an engine for what is awaited; end it if the engine has failed."""
        engine = wait.instance.evidence
        if wait.paused:
            return False
        if not engine.why:
            return wait.evidence.is_due(now)
        last = max(engine.failed_at, wait.evidence.since)
        if not engine.gone or now - last > _STILL_READ:
            wait.fail(engine.why)
        return False

    async def _ask(self, instance: InstanceState, waits: list[Wait]) -> None:
        try:
            statuses, steps = await self._statuses(instance, waits)
            now, ahead = asyncio.get_running_loop().time(), self._ahead(instance)
            for wait, status in zip(waits, statuses, strict=True):
                if wait in self._waits:
                    with _alone(wait):
                        absent = status is RequestStatus.UNKNOWN
                        allowed = _allowance(wait, *ahead, comes_at_once=wait.streams or absent)
                        self._judge(wait, status, steps, now, allowed)
        finally:
            self._asking.discard(instance)

    def _judge(
        self, wait: Wait, status: RequestStatus | None, steps: int, now: float, allowed: float
    ) -> None:
        """End a wait that its engine, or its bound, ends."""
        engine = wait.instance.evidence
        if status is not None:
            answers = engine.answers(now)
            why = wait.evidence.told(now, status, steps, answers, allowed)
        elif engine.health(now) is EngineHealth.SILENT:
            why = wait.evidence.overdue(now, LONGEST_WAIT)  # it comes back, or fails as a whole
        else:
            why = wait.evidence.overdue(now, allowed)
        if why:
            wait.fail(why)

    async def _statuses(
        self, instance: InstanceState, waits: list[Wait]
    ) -> tuple[Sequence[RequestStatus | None], int]:
        """Return what an engine has of requests, None where it does not say, and its steps."""
        if instance.control is None:
            status, grew = await self._by_metrics(instance)
            return [status or _went_on(grew, wait) for wait in waits], -1
        ids = [wait.request.id_there for wait in waits]
        try:
            found = await instance.control.find(ids, self._control_seconds)
        except ControlError:
            return [None] * len(waits), -1
        instance.evidence.heard(asyncio.get_running_loop().time())
        state = instance.engine
        busy = state is not None and state.running + state.waiting > 0
        unnamed = RequestStatus.RUNNING if busy else None  # nobody knows its name in the engine
        return [
            unnamed if wait.request.client.direct == "path" else status
            for wait, status in zip(waits, found.statuses, strict=True)
        ], found.steps

    async def _by_metrics(self, instance: InstanceState) -> tuple[RequestStatus | None, float]:
        """Return what ``/metrics`` says of the requests of an engine that has no control socket.

        Returns:
            That it has none, and when its tokens were last seen to have become more.
        """
        try:
            page = await self._cluster.upstream.get(instance.instance, "/metrics")
        except (UpstreamError, EngineRefusedError):
            return None, -inf
        counts: dict[bytes, float] = {}
        for name, value in _COUNTED.findall(page):
            counts[name] = counts.get(name, 0.0) + _number(value)
        if not {b"generation_tokens_total", b"num_requests_running"} <= counts.keys():
            return None, -inf
        if counts[b"num_requests_running"] + counts.get(b"num_requests_waiting", 0.0) == 0:
            return RequestStatus.UNKNOWN, -inf
        total = counts[b"generation_tokens_total"] + counts.get(b"prompt_tokens_total", 0.0)
        before, grew = self._counted.get(instance, (total, -inf))
        if total > before:
            grew = asyncio.get_running_loop().time()
        self._counted[instance] = total, grew
        return None, grew

    def _ahead(self, instance: InstanceState) -> tuple[int, int]:
        """Return how many requests of an instance have no token yet, and the tokens of these."""
        requests = [one for one in self._cluster.placements.on(instance) if not one.generating]
        return len(requests), sum(one.context_tokens for one in requests)


@contextmanager
def _alone(wait: Wait) -> Iterator[None]:
    """End what is awaited for a request where the body fails over it, and nothing else."""
    try:
        yield
    except Exception:
        logger.exception("looking after request %s failed", wait.request.id)
        wait.fail("the proxy failed to look after it")


def _went_on(grew: float, wait: Wait) -> RequestStatus | None:
    """Return that a request runs if its engine has gone on since it was last asked for it.

    Others may have asked a moment ago: that there is no token since then proves nothing.
    """
    return RequestStatus.RUNNING if grew > wait.evidence.asked else None


def _allowance(wait: Wait, requests: int, tokens: int, comes_at_once: bool) -> float:
    """Return for how many seconds nobody has to say anything of a request.

    Args:
        wait: for it.
        requests: of its instance that have no token yet, itself among them.
        tokens: of these.
        comes_at_once: a sign of it is expected with its first token, not with its last.
    """
    if not comes_at_once:
        return LONGEST_WAIT
    others = 0 if wait.request.generating else max(0, requests - 1)
    return allowance(wait.evidence.patience, others, tokens)


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0

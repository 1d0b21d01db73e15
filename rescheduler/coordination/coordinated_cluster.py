"""A proxy's cluster where a coordinator decides: a link to it, and a fallback by least KV load."""

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from rescheduler.coordination.link import CoordinatorSilentError, Link
from rescheduler.coordination.link_socket import LinkSocket
from rescheduler.coordination.messages import RefusedMessages
from rescheduler.engines.deployment import Deployment
from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.account import Account
from rescheduler.placement.accounts import Accounts
from rescheduler.placement.cluster import Cluster
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.evidence import allowance
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import MoveOutcome, Mover, Placements
from rescheduler.placement.waiting_line import Pool
from rescheduler.routing.heuristics import JSQLoad
from rescheduler.step_time.profile import MeanStepTime

_SLACK_SECONDS = 5.0


class CoordinatedDispatcher(Dispatcher[LiveRequest]):
    """Asks the coordinator for places while it answers, and finds them itself while it does not.

    Args:
        placements: of this proxy's requests, by which it finds places.
        accounts: of the clients.
    """

    def __init__(
        self,
        link: Link,
        placements: Placements[LiveRequest],
        instances: Sequence[InstanceState],
        options: ProxyOptions,
        step: MeanStepTime,
        clock: Callable[[], float],
        accounts: Accounts,
    ) -> None:
        pool = Pool[LiveRequest](None, accounts)
        super().__init__(placements, instances, JSQLoad(), options, step, clock, pool=pool)
        self._link = link

    @property
    def waiting(self) -> Sequence[LiveRequest]:
        """Requests that wait for a decode instance."""
        return [*self._link.asked, *super().waiting]

    @property
    def waiting_for_prefill(self) -> int:
        """Requests that wait for a prefill instance."""
        return self._link.asked_for_prefill + super().waiting_for_prefill

    def admit(self, account: Account) -> None:
        """Refuse a new request when there is no room for it, here or in the whole cluster."""
        super().admit(account)
        if self._link.full:
            raise RequestRefusedError(
                429, "this proxy has too many requests; try another one", retry_after=1
            )
        view, pool = self._link.view if self._link.alive else None, self._options.pool
        if view is None or view.waiting < pool:
            return
        # The coordinator knows of more that waits: whom this proxy refuses, it would refuse, too.
        if not self.accounts.may_wait(account, pool):
            raise RequestRefusedError(
                429, f"{view.waiting} requests wait already; try again later", retry_after=1
            )

    def admit_background(self, account: Account) -> None:
        """Refuse a background request: the coordinator gives places to all alike.

        Raises:
            RequestRefusedError: 400, always.
        """
        message = "`service_tier`: flex is not served behind a coordinator; leave it out"
        raise RequestRefusedError(400, message, "service_tier")

    async def take_prefill(self, request: LiveRequest) -> InstanceState | None:
        """Wait for a place on a prefill instance; None if none is in service."""
        async with _in_time(self._options.pool_seconds, "prefill"):
            while True:
                if self._link.alive:
                    with suppress(CoordinatorSilentError), self.accounts.waits(request):
                        return await self._link.ask(request, for_prefill=True)
                elif await self._by_itself(super().take_prefill(request)):
                    return request.instance

    async def place(self, request: LiveRequest) -> InstanceState:
        """Wait for a place on a decode instance; the request is counted there then."""
        request.wait(self._clock())
        async with _in_time(self._options.pool_seconds, "decode"):
            while request.instance is None:
                if self._link.alive:
                    with suppress(CoordinatorSilentError), self.accounts.waits(request):
                        await self._link.ask(request, for_prefill=False)
                else:
                    await self._by_itself(super().place(request))
        return request.instance

    async def _by_itself(self, place: Coroutine[Any, Any, InstanceState | None]) -> bool:
        """Return whether a place, or that none is, was found before the coordinator was back."""
        self._link.give_up()  # so that `back` is not from before it fell silent
        finding = asyncio.create_task(place)
        back = asyncio.create_task(self._link.back.wait())
        try:
            await asyncio.wait({finding, back}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            back.cancel()
            finding.cancel()
            await asyncio.wait({finding})
        if finding.cancelled():
            return False
        finding.result()
        return True


@asynccontextmanager
async def _in_time(seconds: float, what: str) -> AsyncIterator[None]:
    """End a wait that the coordinator, which would end it earlier, has not ended."""
    try:
        async with asyncio.timeout(seconds + _SLACK_SECONDS):
            yield
    except TimeoutError as error:
        message = f"no {what} instance had room in time"
        raise RequestRefusedError(503, message, retry_after=5) from error


class WatchedPlacements(Placements[LiveRequest]):
    """Which request is on which instance; tells the link of each request that changes."""

    def __init__(self, changed: Callable[[LiveRequest], None]) -> None:
        super().__init__()
        self._changed = changed

    def put(self, request: LiveRequest, instance: InstanceState | None) -> None:
        """Note where a request is now; None: on no instance."""
        super().put(request, instance)
        self._changed(request)


def instances_digest(deployment: Deployment) -> str:
    """Return a digest of the instances, which both ends of a link must list alike."""
    listed = "\n".join(f"{i.name} {i.role} {i.url}" for i in deployment.instances)
    return hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()


class CoordinatedCluster(Cluster[LiveRequest]):
    """A cluster in which the coordinator places and moves this proxy's requests.

    Attributes:
        mover: carries out the coordinator's orders.
        refused: messages of the coordinator.

    Raises:
        TelemetryError: an open endpoint without keys, or keys that cannot be used.
    """

    link: Link
    refused: RefusedMessages
    mover: Mover[LiveRequest] | None = None

    def _decide_by(self, deployment: Deployment) -> None:
        """Have the coordinator decide."""
        options, clock = deployment.coordinator, asyncio.get_running_loop().time
        assert options is not None
        self.link = Link(
            uuid.uuid4().hex,
            self.all,
            instances_digest(deployment),
            options.silent_seconds,
            clock,
            self.step,
            self._carry_out,
            lambda: self._socket.wake(),
        )
        self.placements = WatchedPlacements(self.link.changed)
        self.refused = RefusedMessages("headway_proxy_refused_messages", "coordinator")
        self._socket = LinkSocket(options.endpoint, deployment.keys_folder, self.link, self.refused)
        self._stack.callback(self._socket.close)
        self.dispatcher = CoordinatedDispatcher(
            self.link,
            self.placements,
            self.all,
            deployment.proxy,
            self.step,
            clock,
            self.accounts,
        )

    async def start(self) -> None:
        """Ask every instance how it is, go on asking, and speak with the coordinator."""
        await super().start()
        self.speak()

    def speak(self) -> None:
        """Speak with the coordinator from now on."""
        self.forever(self._socket.run())

    def began(self, request: LiveRequest) -> None:
        """Note a request here: the coordinator hears of it when it wants a place."""
        self.dispatcher.arrived(request)

    def ended(self, request: LiveRequest, by_itself: bool) -> None:
        """Note a request's end; by itself: the coordinator may learn from its length."""
        self.dispatcher.left(request, by_itself)
        self.link.ended(request, by_itself)

    def failed(self, instance: InstanceState, certain: bool) -> None:
        """Count a failure against an instance, here and at the coordinator."""
        super().failed(instance, certain)
        self.link.failed(instance, certain)

    def lost(self, instance: InstanceState) -> None:
        """Take an instance out of service, and tell the coordinator."""
        super().lost(instance)
        self.link.failed(instance, certain=True)

    def _longest_step(self, instance: InstanceState) -> float:
        """Return how long a step of an instance may take; other proxies send it prompts, too."""
        seconds, engine = super()._longest_step(instance), instance.engine
        ours = sum(not request.generating for request in self.placements.on(instance))
        if engine is None or engine.waiting <= ours:
            return seconds
        return seconds + allowance(0.0, 0, engine.max_model_len)

    def _carry_out(self, request: LiveRequest, target: InstanceState, why: str) -> None:
        self.background(self._move(request, target, why))

    async def _move(self, request: LiveRequest, target: InstanceState, why: str) -> None:
        ended = MoveOutcome("gone")
        try:
            assert self.mover is not None
            ended = await self.mover(request, target, why)
        finally:
            self.link.moved(request, ended)

"""Two proxies and their coordinator, without sockets: whatever becomes of what they say."""

import asyncio
import functools
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
from coordinating import shared_by_sessions
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from live_requests import TOKENIZER, instance_state

from rescheduler.coordination.coordinated_cluster import CoordinatedDispatcher, WatchedPlacements
from rescheduler.coordination.link import FAR, Link
from rescheduler.coordination.messages import CoordinationError, Notice, RefusedMessages, Report
from rescheduler.coordinator.coordinator import Sessions
from rescheduler.coordinator.session import Mirror, Session
from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.openai.openai_request import COMPLETIONS, ClientRequest
from rescheduler.openai.request_reader import read_request
from rescheduler.placement.accounts import Accounts
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import MoveOutcome, Placeable
from rescheduler.placement.request_states import (
    Copying,
    Decoding,
    Landing,
    Placed,
    Prefilling,
    Waiting,
)
from rescheduler.step_time.profile import MeanStepTime
from rescheduler.transfer.control_client import ControlClient

OPTIONS = ProxyOptions(prefill_concurrency=2, ahead=4, pool=64, pool_seconds=3600.0)
SILENT, LOST, BEAT = 1.5, 10.0, 0.25
DIGEST = "digest"
CLIENT = read_request(COMPLETIONS, b'{"prompt": "a a a a a a a a", "max_tokens": 100}')


def instances() -> list[InstanceState]:
    """Each process knows them by objects of its own."""
    named = ["prefill-0", "decode-0", "decode-1", "decode-2"]
    control = cast(ControlClient, object())  # that there is one lets requests move
    return [instance_state(name, name.partition("-")[0], OPTIONS, control) for name in named]


class Proxy:
    """A proxy's end, with requests whose engines are this test."""

    def __init__(self, name: str, model: "Model") -> None:
        self.model, self.instances = model, instances()
        self.connection = name.encode()
        self.up: list[Report] = []
        self.down: list[Notice] = []
        self.flows: dict[LiveRequest, asyncio.Task[None]] = {}
        self.moves: dict[LiveRequest, InstanceState] = {}
        self.numbers = itertools.count()
        step = MeanStepTime()
        self.link = Link(
            name, self.instances, DIGEST, SILENT, model.clock, step, self.carry_out, lambda: None
        )
        self.placements = WatchedPlacements(self.link.changed)
        self.placer = CoordinatedDispatcher(
            self.link,
            self.placements,
            self.instances,
            OPTIONS,
            step,
            model.clock,
            Accounts(OPTIONS.accounts),
        )

    def carry_out(self, request: LiveRequest, target: InstanceState, why: str) -> None:
        assert request.can_move
        assert request not in self.moves, "two moves of one request"
        assert request.instance is not target
        self.moves[request] = target
        request.move_to(target)

    async def flow(self, request: LiveRequest) -> None:
        """To a prefill instance, or a decode instance where there is none or after a prefill."""
        prefilled = request.prompt_tokens == 1  # as the prefill reports; a guess is longer
        if prefilled or await self.placer.take_prefill(request) is None:
            await self.placer.place(request)

    def start(self, request: LiveRequest) -> None:
        self.flows[request] = self.model.background(self.flow(request))

    def send(self, beat: bool) -> None:
        if beat:
            self.link.give_up()
        report = self.link.report(beat)
        if report is not None:
            self.up.append(report)

    def running(self, *kinds: type) -> list[LiveRequest]:
        return [request for request in self.flows if isinstance(request.state, kinds)]


def where_and_how_long(request: Placeable) -> tuple[str | None, int]:
    instance = request.instance
    return None if instance is None else instance.name, request.generated_tokens


async def turns() -> None:
    """Let the event loop do what is due."""
    for _ in range(12):
        await asyncio.sleep(0)


async def end_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def in_loop(step: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a step of the machine of a coroutine: with all that comes of it at once."""

    @functools.wraps(step)
    def run(self: "Model", **drawn: Any) -> None:
        async def both() -> None:
            await step(self, **drawn)
            await turns()

        self.loop.run_until_complete(both())
        assert self.errors == []

    return run


class Model(RuleBasedStateMachine):
    """The network loses, delays, doubles and reorders; processes die and start again."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now = 1000.0
        self.names = itertools.count()
        self.tasks: set[asyncio.Task[None]] = set()
        self.errors: list[BaseException] = []

    def clock(self) -> float:
        return self.now

    def background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.errors.append(cast(BaseException, task.exception()))

    @initialize()
    @in_loop
    async def start(self) -> None:
        self.proxies = [Proxy(f"p{next(self.names)}", self) for _ in range(2)]
        self.start_coordinator()

    def start_coordinator(self) -> None:
        refused = RefusedMessages("refused", "proxy", clock=self.clock)
        name = f"c{next(self.names)}"
        self.shared = shared_by_sessions(name, instances(), OPTIONS, self.clock, self.background)
        self.placed = self.shared.cluster.placements
        self.sessions = Sessions(self.shared, DIGEST, LOST, refused)
        self.ordered: list[asyncio.Task[MoveOutcome]] = []

    # What happens to requests.

    @rule(p=st.integers(0, 1))
    @in_loop
    async def arrive(self, p: int) -> None:
        if len(self.proxies[p].flows) < 6:
            self.begin(self.proxies[p], CLIENT)

    def begin(self, proxy: Proxy, client: ClientRequest) -> None:
        id = f"{proxy.link.session}/{next(proxy.numbers)}"
        request = LiveRequest(id, id, client, {}, self.now, TOKENIZER, proxy.placements)
        proxy.start(request)

    @rule(p=st.integers(0, 1), data=st.data(), succeeds=st.booleans())
    @in_loop
    async def end_prefill(self, p: int, data: st.DataObject, succeeds: bool) -> None:
        proxy = self.proxies[p]
        running = proxy.running(Prefilling)
        if running:
            request = data.draw(st.sampled_from(running))
            if succeeds:
                request.prefilled({}, 1)
            else:
                request.prefill_failed()
            proxy.placer.wake()
            proxy.start(request)

    @rule(p=st.integers(0, 1), data=st.data())
    @in_loop
    async def generate(self, p: int, data: st.DataObject) -> None:
        running = self.proxies[p].running(Placed, Decoding, Landing)
        if running:
            request = data.draw(st.sampled_from(running))
            if request.on_its_way:
                request.accepted()
            request.untracked_tokens(3, self.now)

    @rule(p=st.integers(0, 1), data=st.data())
    @in_loop
    async def fail(self, p: int, data: st.DataObject) -> None:
        """An instance fails a request, which is placed anew."""
        proxy = self.proxies[p]
        running = [one for one in proxy.running(Placed, Decoding) if one not in proxy.moves]
        if running:
            request = data.draw(st.sampled_from(running))
            request.fail(unsent=False)
            proxy.start(request)

    @rule(p=st.integers(0, 1), data=st.data())
    @in_loop
    async def end(self, p: int, data: st.DataObject) -> None:
        """A request ends, or its client leaves while it waits."""
        proxy = self.proxies[p]
        if proxy.flows:
            request = data.draw(st.sampled_from(list(proxy.flows)))
            await self._end(proxy, request)

    async def _end(self, proxy: Proxy, request: LiveRequest) -> None:
        flow = proxy.flows.pop(request)
        flow.cancel()
        await asyncio.gather(flow, return_exceptions=True)
        request.finish()
        if proxy.moves.pop(request, None) is not None:
            proxy.link.moved(request, MoveOutcome("ended"))
        proxy.link.ended(request, by_itself=True)

    @rule(p=st.integers(0, 1), data=st.data(), lands=st.booleans())
    @in_loop
    async def end_move(self, p: int, data: st.DataObject, lands: bool) -> None:
        proxy = self.proxies[p]
        moving = [one for one in proxy.moves if isinstance(one.state, Copying)]
        if moving:
            self._end_move(proxy, data.draw(st.sampled_from(moving)), lands)

    def _end_move(self, proxy: Proxy, request: LiveRequest, lands: bool) -> None:
        target = proxy.moves.pop(request)
        if lands:
            request.freeze()
            request.frozen([], {})
            request.land()
            request.untracked_tokens(1, self.now)
            assert request.instance is target
        else:
            request.not_copied()
        proxy.link.moved(request, MoveOutcome("moved" if lands else "no_room"))

    @rule(data=st.data())
    @in_loop
    async def order(self, data: st.DataObject) -> None:
        """The planner has a request move."""
        known = [
            (session, mirror)
            for session in self.sessions.by_name.values()
            for mirror in session.mirrors.values()
            if mirror.can_move
        ]
        if known:
            session, mirror = data.draw(st.sampled_from(known))
            targets = [one for one in self.shared.cluster.all[1:] if one is not mirror.instance]
            target = data.draw(st.sampled_from(targets))
            self.ordered.append(self.loop.create_task(session.move(mirror, target, "test")))

    # What happens to messages.

    @rule(p=st.integers(0, 1), beat=st.booleans())
    @in_loop
    async def proxy_sends(self, p: int, beat: bool) -> None:
        self.proxies[p].send(beat)

    @rule(beat=st.booleans())
    @in_loop
    async def coordinator_sends(self, beat: bool) -> None:
        await self._coordinator_sends(beat)

    async def _coordinator_sends(self, beat: bool) -> None:
        async for session, notice in self.sessions.notices(beat):
            for proxy in self.proxies:
                if proxy.connection == session.peer:
                    proxy.down.append(notice)

    @rule(p=st.integers(0, 1), data=st.data(), keep=st.booleans())
    @in_loop
    async def report_comes(self, p: int, data: st.DataObject, keep: bool) -> None:
        """Any of those on their way, which may come once more."""
        waiting = self.proxies[p].up
        if waiting:
            at = data.draw(st.integers(0, len(waiting) - 1))
            report = waiting[at] if keep else waiting.pop(at)
            await self._hears(self.proxies[p], report)

    @in_loop
    async def report_comes_first(self, p: int) -> None:
        await self._hears(self.proxies[p], self.proxies[p].up.pop(0))

    async def _hears(self, proxy: Proxy, report: Report) -> None:
        heard = self.sessions.receive(report, proxy.connection, None)
        assert await heard is None

    @rule(p=st.integers(0, 1), data=st.data(), keep=st.booleans())
    @in_loop
    async def notice_comes(self, p: int, data: st.DataObject, keep: bool) -> None:
        proxy = self.proxies[p]
        if proxy.down:
            at = data.draw(st.integers(0, len(proxy.down) - 1))
            proxy.link.receive(proxy.down[at] if keep else proxy.down.pop(at))

    @rule(p=st.integers(0, 1), up=st.booleans(), data=st.data())
    @in_loop
    async def message_is_lost(self, p: int, up: bool, data: st.DataObject) -> None:
        queue: list[Any] = self.proxies[p].up if up else self.proxies[p].down
        if queue:
            queue.pop(data.draw(st.integers(0, len(queue) - 1)))

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 11.0]))
    @in_loop
    async def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # What a peer does that lies.

    @rule(p=st.integers(0, 1), ahead=st.sampled_from([1, 100, 2**20, 2**39]), whole=st.booleans())
    @in_loop
    async def another_connection_speaks_for_a_proxy(self, p: int, ahead: int, whole: bool) -> None:
        """Even if it knew what only the proxy knows, the name of its session."""
        session = self.sessions.by_name.get(self.proxies[p].link.session)
        if session is not None and session.peer is not None:
            peer, known, last = session.peer, session.known, session._heard.last
            forged = Report(session.name, last + ahead, "", 0, DIGEST, whole)
            assert await self.sessions.receive(forged, b"forger", None) is None
            assert (session.peer, session.known, session._heard.last) == (peer, known, last)

    @rule(p=st.integers(0, 1), far=st.integers(FAR + 1, 2**39), whole=st.booleans())
    @in_loop
    async def a_number_jumps(self, p: int, far: int, whole: bool) -> None:
        """As of a proxy out of its mind: what it says next is heard nevertheless."""
        session = self.sessions.by_name.get(self.proxies[p].link.session)
        if session is not None:
            jumped = Report(session.name, session._heard.last + far, "", 0, DIGEST, whole)
            await self._hears(self.proxies[p], jumped)

    @rule(p=st.integers(0, 1), far=st.integers(FAR + 1, 2**39))
    @in_loop
    async def a_notice_jumps(self, p: int, far: int) -> None:
        link = self.proxies[p].link
        with pytest.raises(CoordinationError, match=f"notice {far + link._heard.last} after"):
            link.receive(Notice(link._incarnation, link._heard.last + far))

    @rule(p=st.integers(0, 1))
    @in_loop
    async def a_connection_is_lost(self, p: int) -> None:
        """The proxy comes back on another one, which has to wait until the first is gone."""
        proxy = self.proxies[p]
        session = self.sessions.by_name.get(proxy.link.session)
        proxy.connection = f"{proxy.link.session}#{next(self.names)}".encode()
        if session is not None and session.peer is not None:
            await self._hears(proxy, Report(session.name, 2**39, "", 0, DIGEST, True))
            assert session.peer != proxy.connection
            self.sessions.disconnected(session)

    # What happens to processes.

    @rule()
    @in_loop
    async def coordinator_dies(self) -> None:
        for task in self.ordered:
            task.cancel()
        for session in self.sessions.by_name.values():
            await session.close()
        self.start_coordinator()

    @rule(p=st.integers(0, 1))
    @in_loop
    async def proxy_dies(self, p: int) -> None:
        for flow in self.proxies[p].flows.values():
            flow.cancel()
        self.proxies[p] = Proxy(f"p{next(self.names)}", self)

    # And whatever happened: once messages come through, everybody knows what is.

    @rule()
    @in_loop
    async def all_agree_in_the_end(self) -> None:
        for _ in range(60):
            for proxy in self.proxies:  # also what is ordered only now
                for request in list(proxy.moves):
                    self._end_move(proxy, request, lands=True)
            await turns()
            await self._converse()
        here = {
            (proxy.link.session, request.id): where_and_how_long(request)
            for proxy in self.proxies
            for request in proxy.flows
        }
        there = {
            (name, mirror.id): where_and_how_long(mirror)
            for name, session in self.sessions.by_name.items()
            for mirror in session.mirrors.values()
        }
        assert there == here
        on = {one.name: len(self.placed.on(one)) for one in self.shared.cluster.all}
        for name, count in on.items():
            assert count == sum(where == name for where, _ in here.values()), "a lost slot"
        assert all(task.done() for task in self.ordered), "an order without an end"
        for proxy in self.proxies:
            assert not proxy.moves
            waits = proxy.running(Waiting)
            prefilling = [r for one in self.proxies for r in one.running(Prefilling)]
            assert not waits or len(prefilling) >= OPTIONS.prefill_concurrency, "nobody decides"

    @in_loop
    async def converse(self, beats: int) -> None:
        for _ in range(beats):
            await self._converse()

    @in_loop
    async def do(self, action: Callable[[], object]) -> None:
        action()

    def generating(self, p: int) -> LiveRequest:
        """A request that has been placed and generates tokens, as everybody knows."""
        proxy = self.proxies[p]
        self.arrive(p=p)
        self.converse(beats=4)
        (request,) = proxy.running(Prefilling)
        self.do(action=lambda: request.prefilled({}, 1))
        self.do(action=lambda: proxy.start(request))
        self.converse(beats=4)
        self.do(action=request.accepted)
        self.do(action=lambda: request.untracked_tokens(3, self.now))
        self.converse(beats=4)
        return request

    def session(self, p: int) -> Session:
        return self.sessions.by_name[self.proxies[p].link.session]

    def mirror(self, p: int) -> Mirror:
        """Its only request, as the coordinator knows it."""
        (mirror,) = self.session(p).mirrors.values()
        return mirror

    def order_elsewhere(self, p: int) -> InstanceState:
        """Have its only request move; return where to."""
        session, mirror = self.session(p), self.mirror(p)
        target = next(one for one in self.shared.cluster.all[1:] if one is not mirror.instance)
        moving = session.move(mirror, target, "test")
        self.do(action=lambda: self.ordered.append(self.loop.create_task(moving)))
        return target

    async def _converse(self) -> None:
        """All say what there is, and hear it."""
        self.now += BEAT
        for proxy in self.proxies:
            proxy.send(beat=True)
        await self._deliver()
        await self._coordinator_sends(beat=True)
        await self._deliver()

    async def _deliver(self) -> None:
        await turns()
        for proxy in self.proxies:
            while proxy.up or proxy.down:
                if proxy.up:
                    await self._hears(proxy, proxy.up.pop(0))
                if proxy.down:
                    proxy.link.receive(proxy.down.pop(0))

    def teardown(self) -> None:
        try:
            if hasattr(self, "proxies"):
                self.all_agree_in_the_end()
        finally:
            self.loop.run_until_complete(end_all())
            self.loop.close()

"""Background requests take what all others leave, and give it back."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from coordinated_cluster import Coordinated
from hypothesis import given
from hypothesis import strategies as st
from live_requests import instance_state, live_request
from routing_views import view_of
from scripted_cluster import PROMPT, Cluster, cluster, until
from tokenizers import Tokenizer

from benchmarks.support.engine_states import engine_state
from predictor.forecasts.forecast import SurvivalForecast
from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView
from rescheduler.engines.deployment import Deployment
from rescheduler.engines.proxy_options import BackgroundOptions, ProxyOptions
from rescheduler.openai.openai_request import COMPLETIONS
from rescheduler.openai.request_reader import read_forwarded, read_request
from rescheduler.placement.account import Account
from rescheduler.placement.background import _MOST_AT_ONCE, has_leftover
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import Decision, Placements
from rescheduler.routing import JSQ
from rescheduler.step_time.profile import MeanStepTime

FLEX = {"service_tier": "flex"}
HALF = BackgroundOptions(slots=0.5, prefill=1.0)
ALL = BackgroundOptions(slots=1.0, prefill=1.0)


def view(
    running: list[int],
    context: int = 100,
    slots: int = 8,
    capacity: int = 1_000,
    queued: list[int] | None = None,
    waits: int = 100,
    ends: float | None = None,
) -> ClusterView:
    """Instances with so many requests of so many tokens; all end after so many steps."""
    n, total = len(running), sum(running)

    def forecast(k: int) -> SurvivalForecast | None:
        if ends is None:
            return None
        edges = np.array([0.0, ends, ends + 1.0, 1e6])
        survival = np.tile([1.0, 1.0, 0.0, 0.0], (k, 1))
        return SurvivalForecast.new(edges, survival, np.full(k, np.inf))

    return view_of(
        np.full(n, slots),
        np.repeat(np.arange(n), running),
        np.full(total, context),
        [waits],
        kv_capacity=np.full(n, capacity, dtype=np.int64),
        queued=np.array(queued or [0] * n),
        forecast=forecast(total),
        waiting_forecast=forecast(1),
    )


def leftover(shown: ClusterView, slots: float = 1.0, kv: float = 1.0) -> list[bool]:
    found: list[bool] = has_leftover(shown, BackgroundOptions(slots=slots, kv=kv)).tolist()
    return found


def test_a_share_of_the_places_is_left_to_others() -> None:
    assert leftover(view([0, 1, 3, 4, 7], context=1), slots=0.5) == [True] * 3 + [False] * 2


def test_a_share_of_the_memory_is_left_to_others() -> None:
    """100 tokens each, and 100 that wait: 5 of 1,000 are half."""
    assert leftover(view([0, 3, 4, 5]), kv=0.5) == [True, True, True, False]


def test_what_requests_will_hold_counts_where_it_is_forecast() -> None:
    """All go on for at least 128 steps: two hold 456 by then, three 684."""
    assert leftover(view([0, 1, 2, 3], ends=130.0), kv=0.5) == [True, True, False, False]


def test_nothing_is_begun_beside_what_has_not_begun() -> None:
    assert leftover(view([1, 1], queued=[0, 1])) == [True, False]


@pytest.mark.parametrize("ends", [None, 130.0])
def test_an_instance_with_nothing_on_it_takes_any(ends: float | None) -> None:
    assert leftover(view([0, 0], waits=5_000, ends=ends), kv=0.1, slots=0.01) == [True, True]


def test_an_instance_that_does_not_say_what_it_holds_takes_one_at_a_time() -> None:
    shown = view([0, 1], capacity=int(UNLIMITED), slots=int(UNLIMITED))
    assert leftover(shown) == [True, False]


def sized(name: str, slots: int, blocks: int = 100) -> InstanceState:
    state = instance_state(name)
    state.engine = engine_state(max_num_seqs=slots, num_blocks=blocks, free_blocks=blocks)
    return state


class Watched(LiveRequest):
    """A request that calls something just before it is placed."""

    watch: Callable[["Watched", InstanceState], None]

    def place(self, instance: InstanceState, decision: Decision | None = None) -> None:
        self.watch(self, instance)
        super().place(instance, decision)


class Rarely(JSQ):
    """Decides after a while, so that requests wait though there is room."""

    def decide_every(self) -> float:
        return 0.05


EVENTS = st.lists(
    st.tuples(st.sampled_from(["online", "flex", "begin", "end", "pause"]), st.integers(0, 99)),
    min_size=10,
    max_size=60,
)


@given(EVENTS)
def test_no_background_request_is_placed_while_another_one_waits(
    events: list[tuple[str, int]],
) -> None:
    asyncio.run(_served(events))


async def _served(events: list[tuple[str, int]]) -> None:
    """Let requests come, begin and end in some order; look at each that is placed."""
    placements, loop = Placements[LiveRequest](), asyncio.get_running_loop()
    states = [sized("a", 4), sized("b", 4)]
    options = ProxyOptions(background=BackgroundOptions(slots=0.5, kv=0.5, prefill=1.0))
    dispatcher = Dispatcher[LiveRequest](
        placements, states, Rarely(), options, MeanStepTime(), loop.time
    )
    waiting: set[LiveRequest] = set()
    tasks: list[asyncio.Task[InstanceState]] = []
    wrong: list[str] = []  # the dispatcher goes on after any error

    def placing(request: Watched, instance: InstanceState) -> None:
        on = placements.on(instance)
        waiting.discard(request)
        if request.background and waiting:
            wrong.append("another one waits")
        if request.background and not all(other.generating for other in on):
            wrong.append("another one has not begun")
        if len(on) >= (2 if request.background else 4):
            wrong.append("of four places, two are left to others")

    def come(background: bool, number: int) -> None:
        made = live_request(str(number))
        request = Watched(str(number), str(number), made.client, {}, loop.time(), None, placements)
        request.watch, request.background = placing, background
        tasks.append(asyncio.create_task(placed(request)))

    async def placed(request: Watched) -> InstanceState:
        if not request.background:
            waiting.add(request)
        return await dispatcher.place(request)

    def on_which(request: LiveRequest) -> InstanceState:
        assert request.instance is not None
        return request.instance

    def on() -> list[LiveRequest]:
        return [request for state in states for request in placements.on(state)]

    def step(what: str, number: int) -> None:
        placed = on()
        if what in ("online", "flex"):
            come(what == "flex", number)
        elif placed:
            request = placed[number % len(placed)]
            if what == "begin" and not request.generating:
                request.token(loop.time())
                dispatcher.began(request, on_which(request))
            elif what == "end":
                request.finish()
                dispatcher.wake()

    for what, number in events:
        step(what, number)
        await asyncio.sleep(0.021 if what == "pause" else 0)
    async with asyncio.timeout(30):
        while any(not task.done() for task in tasks):
            for request in on():
                if not request.generating:
                    request.token(loop.time())
                request.finish()
            dispatcher.wake()
            await asyncio.sleep(0.001)
    assert wrong == []
    for task in tasks:
        task.result()


async def test_an_instance_rests_after_the_prompt_of_a_background_request() -> None:
    """It took a second: none is begun for nine, so that a tenth is theirs; others are."""
    ahead, state, placements = 0.0, sized("a", 8), Placements[LiveRequest]()
    options = ProxyOptions(background=BackgroundOptions(prefill=0.1))
    loop = asyncio.get_running_loop()

    def clock() -> float:
        return loop.time() + ahead

    dispatcher = Dispatcher[LiveRequest](placements, [state], JSQ(), options, MeanStepTime(), clock)
    first, second, online = (live_request(name, placements=placements) for name in "abc")
    first.background = second.background = True

    async def begun(request: LiveRequest) -> None:
        nonlocal ahead
        assert await dispatcher.place(request) is state
        ahead += 1.0
        request.token(clock())
        dispatcher.began(request, state)

    await begun(first)
    waiting = asyncio.create_task(begun(second))
    ahead += 8.0
    dispatcher.wake()
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await begun(online)
    ahead += 1.0
    dispatcher.wake()
    await waiting


def dispatching(*states: InstanceState) -> tuple[Dispatcher[LiveRequest], Placements[LiveRequest]]:
    placements, now = Placements[LiveRequest](), asyncio.get_running_loop().time
    options = ProxyOptions(background=ALL)
    return Dispatcher(placements, states, JSQ(), options, MeanStepTime(), now), placements


def placing(
    dispatcher: Dispatcher[LiveRequest], request: LiveRequest, background: bool, model: str = ""
) -> asyncio.Task[InstanceState]:
    request.background, request.model = background, model
    dispatcher.arrived(request)
    return asyncio.create_task(dispatcher.place(request))


@pytest.mark.parametrize("misfits", [63, 64, 200])
async def test_however_many_accounts_wait_for_what_is_full_others_go_elsewhere(
    misfits: int,
) -> None:
    full, other = sized("full", 1), sized("other", 8)
    full.models, other.models = frozenset({"m", "adapter"}), frozenset({"m"})
    dispatcher, placements = dispatching(full, other)
    runs = live_request("runs", placements=placements)
    await placing(dispatcher, runs, False, "adapter")
    runs.token(0.0)
    waiting = []
    for i in range(misfits):
        request = live_request(f"x{i}", placements=placements)
        request.account = Account(f"x{i}")
        waiting.append(placing(dispatcher, request, True, "adapter"))
    await asyncio.sleep(0.05)
    fits = live_request("fits", placements=placements)
    fits.account = Account("fits")
    assert await asyncio.wait_for(placing(dispatcher, fits, True, "m"), 20.0) is other
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_who_waits_for_an_adapter_leaves_other_instances_to_the_background() -> None:
    """One request that waits for what is full does not stop the background of all."""
    full, other = sized("full", 1), sized("other", 8)
    full.models, other.models = frozenset({"m", "adapter"}), frozenset({"m"})
    dispatcher, placements = dispatching(full, other)
    runs, waits, flex, more = (live_request(name, placements=placements) for name in "abcd")
    assert await placing(dispatcher, runs, False, "adapter") is full
    runs.token(0.0)
    held = placing(dispatcher, waits, False, "adapter")
    async with asyncio.timeout(5):
        assert await placing(dispatcher, flex, True, "m") is other
    flex.token(0.0)
    dispatcher.began(flex, other)
    waiting = placing(dispatcher, more, False, "m")
    assert await waiting is other
    assert not flex.gives_way, "it is on no instance that the one that waits may go to"
    assert not held.done()
    held.cancel()


async def test_who_cannot_be_prefilled_yet_leaves_prefill_instances_to_the_background() -> None:
    """What is prefilled for a full adapter fills its part of the room ahead: others may be."""
    prefill, full, other = instance_state("p", "prefill"), sized("full", 1), sized("other", 8)
    prefill.models = full.models = frozenset({"m", "adapter"})
    other.models = frozenset({"m"})
    dispatcher, placements = dispatching(prefill, full, other)
    waits, runs = (live_request(name, placements=placements) for name in "ab")
    waits.model = "adapter"
    dispatcher._pool.for_prefill[waits] = asyncio.get_running_loop().create_future()
    assert dispatcher._background._wanted_by_others() == {prefill, full}
    runs.model = "adapter"
    runs.place(full)
    assert dispatcher._background._wanted_by_others() == {full}


async def test_in_one_look_an_account_without_room_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = [sized(f"d{i}", 8) for i in range(8)]
    dispatcher, placements = dispatching(*states)
    asked_of: list[str] = []
    background = dispatcher._background

    def with_leftover(request: LiveRequest) -> list[InstanceState]:
        asked_of.append(request.id)
        free = [state for state in states if not placements.on(state)]
        return [] if request.id.startswith("large") else free

    monkeypatch.setattr(background, "_with_leftover", with_leftover)
    requests = [live_request(f"large{i}", placements=placements) for i in range(20)]
    requests += [live_request(f"small{i}", placements=placements) for i in range(8)]
    for request in requests:
        request.account = Account(request.id if request.id.startswith("large") else "small")
    tasks = [placing(dispatcher, request, True) for request in requests]
    async with asyncio.timeout(5):
        await asyncio.gather(*tasks[20:])
    assert max(Counter(asked_of).values()) <= 2, "and once more in the next look"
    for task in tasks:
        task.cancel()


async def test_a_promise_is_kept_beside_background_requests() -> None:
    """These have an account of their own, which is ahead or behind of nobody's."""
    state = sized("a", 8)
    dispatcher, placements = dispatching(state)
    promised, flex = (live_request(name, placements=placements) for name in "ab")
    promised.promised_level, promised.finish_by = 0.95, asyncio.get_running_loop().time() + 60
    assert await placing(dispatcher, promised, False) is state
    group = promised.group
    promised.account.settled[group] = dispatcher.accounts.virtual_times[group] = 20_000.0
    promised.token(0.0)
    dispatcher.began(promised, state)
    assert dispatcher.suspended(promised) == "last"
    async with asyncio.timeout(5):
        assert await placing(dispatcher, flex, True) is state
    assert dispatcher.suspended(flex) == "first"
    assert dispatcher.suspended(promised) == "last"


async def test_a_look_gives_so_many_places_and_the_next_one_the_rest() -> None:
    states = [sized(f"d{i}", 64) for i in range(_MOST_AT_ONCE + 4)]
    dispatcher, placements = dispatching(*states)
    requests = [live_request(f"{i}", placements=placements) for i in range(len(states))]
    ends = [placing(dispatcher, request, True) for request in requests]
    on = []
    async with asyncio.timeout(5):
        while len(on) < len(states):
            before = len(on)
            await asyncio.sleep(0)
            on = [one for state in states for one in placements.on(state)]
            assert len(on) - before <= _MOST_AT_ONCE
        await asyncio.gather(*ends)


def running(it: Cluster, background: bool) -> int:
    return sum(one.background == background and one.generating for one in it.requests())


def asked(it: Cluster, tokens: int, **fields: Any) -> asyncio.Task[Any]:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": tokens, **fields}
    return asyncio.create_task(it.post(body))


def text_of(answer: Any) -> tuple[int, str]:
    status, body, _ = answer
    return status, body["choices"][0]["text"]


@pytest.mark.cluster(decodes=1, background=HALF)
async def test_background_requests_wait_behind_those_that_come_later(it: Cluster) -> None:
    await it.resized(2)
    engine = it.decodes[0]
    engine.hangs = True
    first = [asked(it, 5) for _ in range(2)]
    await until(lambda: len(engine.running) == 2)
    dispatcher = it.proxy.cluster.dispatcher
    flex = asked(it, 5, **FLEX)
    await until(lambda: dispatcher.waiting_in_background == 1)
    later = [asked(it, 5) for _ in range(3)]
    await until(lambda: it.waiting == 3)
    assert await it.metric("headway_proxy_num_background_requests_waiting") == 1
    order: list[str] = []
    for name, task in [("first", one) for one in first] + [("later", one) for one in later]:
        task.add_done_callback(lambda _, name=name: order.append(name))
    flex.add_done_callback(lambda _: order.append("flex"))
    engine.hangs = False
    answers = await asyncio.gather(flex, *first, *later)
    assert {text_of(one) for one in answers} == {(200, it.tokenizer.decode(it.expected(5)))}
    assert order[-1] == "flex"


@pytest.mark.parametrize("decodes", [1, 2])
async def test_a_background_request_gives_way_and_loses_nothing(
    tokenizer: Tokenizer, decodes: int
) -> None:
    async with cluster(tokenizer, decodes=decodes, background=ALL) as it:
        await it.resized(2)
        flex = [asked(it, 300, **FLEX) for _ in range(2 * decodes)]
        await until(lambda: running(it, background=True) == 2 * decodes)
        for _ in range(3):
            status, body, _ = await asked(it, 5)
            assert (status, body["usage"]["completion_tokens"]) == (200, 5)
        assert not any(one.done() for one in flex), "they were in nobody's way"
        for answer in await asyncio.gather(*flex):
            assert text_of(answer) == (200, it.tokenizer.decode(it.expected(300)))
        assert await it.metric("headway_proxy_background_requests_that_gave_way_total") >= 1
        assert await it.metric("headway_proxy_instance_failures_total") == 0


@pytest.mark.cluster(decodes=1, background=ALL)
async def test_background_requests_are_suspended_before_others(it: Cluster) -> None:
    for fields, wanted in ((FLEX, "first"), ({}, None)):
        assert (await asked(it, 5, **fields))[0] == 200
        assert it.asked[-1]["kv_transfer_params"]["headway"].get("suspended") == wanted


@pytest.mark.cluster(decodes=1, background=ALL)
async def test_streams_of_background_requests_stay(it: Cluster) -> None:
    await it.resized(1)
    flex = asyncio.create_task(it.answered(100, **FLEX))
    await until(lambda: running(it, background=True) == 1)
    online = asked(it, 5)
    await flex
    assert (await online)[0] == 200


@pytest.mark.cluster(decodes=1, background=BackgroundOptions(pool=2), pool=1)
async def test_they_have_a_pool_of_their_own(it: Cluster) -> None:
    await it.resized(1)
    engine = it.decodes[0]
    engine.hangs = True
    first = asked(it, 5)
    await until(lambda: len(engine.running) == 1)
    flex = [asked(it, 5, **FLEX) for _ in range(2)]
    dispatcher = it.proxy.cluster.dispatcher
    await until(lambda: dispatcher.waiting_in_background == 2)
    status, body, headers = await asked(it, 5, **FLEX)
    assert (status, headers["Retry-After"]) == (429, "5")
    assert body["error"]["message"].startswith("2 background requests wait already")
    online = asked(it, 5)
    await until(lambda: it.waiting == 1)
    engine.hangs = False
    assert [answer[0] for answer in await asyncio.gather(first, online, *flex)] == [200] * 4


def deployed(*arguments: str, of_instances: Sequence[list[str]] = ([], [])) -> Deployment:
    instances = [
        {"name": f"d{i}", "role": "decode", "url": f"http://d{i}:1", "arguments": words}
        for i, words in enumerate(of_instances)
    ]
    values = {"model": "m", "instances": instances, "engine": {"arguments": list(arguments)}}
    return Deployment.from_values(values)


def test_whether_engines_go_by_priority_is_read_from_their_flags() -> None:
    assert deployed("--scheduling-policy", "priority").schedules_by_priority
    assert deployed("--scheduling_policy=priority").schedules_by_priority
    assert not deployed("--scheduling-policy", "fcfs").schedules_by_priority
    assert not deployed().schedules_by_priority
    flag = ["--scheduling-policy=priority"]
    assert deployed(of_instances=[flag, flag]).schedules_by_priority
    assert not deployed(of_instances=[flag, []]).schedules_by_priority
    assert not deployed(
        *flag, of_instances=[["--scheduling-policy=fcfs"], []]
    ).schedules_by_priority


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/responses"])
@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("ranks", [False, True])
def test_background_requests_get_the_last_priority_where_engines_go_by_it(
    path: str, forward: bool, ranks: bool
) -> None:
    read = read_request if path == COMPLETIONS else read_forwarded

    def priority(**fields: Any) -> tuple[bool, Any]:
        raw = json.dumps({"prompt": "x", "priority": 7, **fields}).encode()
        client = read(path, raw, forward, ranks)
        given = client.body.get("priority")
        return client.background, None if given is None else json.loads(bytes(given))

    assert priority(**FLEX) == (True, 2**31 - 1 if ranks else None)
    for other in ({}, {"service_tier": "auto"}, {"service_tier": None}, {"service_tier": 3}):
        assert priority(**other) == (False, 7 if forward else None)


async def test_a_coordinator_serves_none(many: Coordinated) -> None:
    status, body, _ = await asked(many.proxies[0], 3, **FLEX)
    assert status == 400
    assert body["error"]["param"] == "service_tier"
    assert "not served behind a coordinator" in body["error"]["message"]

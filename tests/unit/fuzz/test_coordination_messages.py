"""What proxies and the coordinator say to each other, damaged or extreme: both go on."""

import asyncio
from typing import Any

import msgspec
from coordinating import RECORD, shared_by_sessions
from damage import ODD_VALUES, changed, damaged_bytes
from fuzzing import fuzzed
from hypothesis import example, given
from hypothesis import strategies as st

from rescheduler.coordination.cluster_loads import ClusterLoads
from rescheduler.coordination.link import Link
from rescheduler.coordination.messages import (
    MOST,
    MOST_REQUESTS,
    MOST_TOKENS,
    TOPIC,
    Answer,
    CoordinationError,
    Ended,
    Failure,
    Load,
    MoveEnded,
    MoveOrder,
    Notice,
    ProxyLoad,
    Record,
    Refusal,
    RefusedMessages,
    Report,
    View,
    decode,
    encode,
)
from rescheduler.coordinator.sessions import Sessions
from rescheduler.engines.deployment import Instance, ProxyOptions
from rescheduler.placement.dispatcher import MeanStepTime
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import Placements

OPTIONS = ProxyOptions(pool=8, ahead=4, prefill_concurrency=2)
PACKABLE = ODD_VALUES.filter(lambda one: not isinstance(one, int) or -(2**63) <= one < 2**64)

NUMBERS = st.sampled_from([0, 1, 2, 33, MOST - 1, MOST])
TOKENS = st.sampled_from([0, 1, 100, MOST_TOKENS])
HOPS = st.sampled_from([-1, 0, 1, MOST])
SECONDS = st.sampled_from([0.0, 5e-324, 1e-9, 0.05, 60.0])
WHERE = st.integers(-1, 3)  # of 0 to 2
NAMES = st.sampled_from(["victim-1", "other"])
RECORDS = st.builds(
    Record,
    handle=NUMBERS,
    id=NAMES,
    name=NAMES,
    external_id=NAMES,
    ticket=NUMBERS,
    for_prefill=st.booleans(),
    waited=st.sampled_from([0.0, 1.0, 1e6]),
    instance=WHERE,
    destination=WHERE,
    hop=HOPS,
    prompt_tokens=TOKENS,
    generated_tokens=TOKENS,
    generated_at_move=st.none() | TOKENS,
    max_tokens=st.none() | TOKENS,
    movable=st.booleans(),
    several=st.booleans(),
    can_move=st.booleans(),
    moving=st.booleans(),
    generating=st.booleans(),
    on_its_way=st.booleans(),
    avoid=st.lists(WHERE, max_size=3),
)
PACKED = st.lists(st.sampled_from([-1, 0, 1, MOST]), max_size=3).map(
    lambda values: b"".join(one.to_bytes(8, "little", signed=True) for one in values)
)
REPORTS = st.builds(
    Report,
    session=st.sampled_from(["victim", "liar", "another"]),
    number=NUMBERS,
    incarnation=st.sampled_from(["", "c", "c/1", "c/2"]),
    heard=NUMBERS,
    deployment=st.sampled_from(["digest", "digest", "digest", "other"]),
    listening=st.sampled_from(["", "ipc://a", "tcp://127.0.0.1:22", "tcp://127.0.0.1:5000"]),
    whole=st.booleans(),
    records=st.lists(RECORDS, max_size=4),
    ended=st.lists(st.builds(Ended, NUMBERS, st.booleans(), TOKENS), max_size=2),
    moves=st.lists(st.builds(MoveEnded, NUMBERS, HOPS, st.just("moved"), SECONDS), max_size=2),
    failures=st.lists(st.builds(Failure, WHERE, st.booleans()), max_size=2),
    handles=PACKED,
    tokens=PACKED,
    step_seconds=SECONDS,
    draining=st.lists(WHERE, max_size=2),
)
LOADS = st.builds(
    Load,
    st.lists(st.sampled_from([0, 1, MOST_REQUESTS]), min_size=2, max_size=4),
    st.lists(st.sampled_from([0, 1, MOST]), min_size=2, max_size=4),
)
NOTICES = st.builds(
    Notice,
    incarnation=st.sampled_from(["c/1", "c/2"]),
    number=NUMBERS,
    proxy=NUMBERS,
    whole_please=st.booleans(),
    answers=st.lists(
        st.builds(
            Answer,
            NUMBERS,
            WHERE,
            st.none() | st.builds(Refusal, st.sampled_from([429, 503]), st.just("no"), st.none()),
        ),
        max_size=3,
    ),
    moves=st.lists(st.builds(MoveOrder, NUMBERS, HOPS, WHERE, WHERE, st.just("why")), max_size=3),
    view=st.none()
    | st.builds(
        View,
        st.lists(st.booleans(), min_size=2, max_size=4),
        NUMBERS,
        st.lists(st.builds(ProxyLoad, NUMBERS, st.just(""), LOADS), max_size=3),
    ),
    refused=st.none() | st.just("no"),
)
WAITS = msgspec.structs.replace(
    RECORD, id="victim-1", name="victim-1", external_id="victim-1", ticket=1
)


def instances() -> list[InstanceState]:
    return [
        InstanceState(Instance(name, role, f"http://{name}:1"), OPTIONS, None)
        for name, role in (("p", "prefill"), ("d0", "decode"), ("d1", "decode"))
    ]


class Coordinating:
    """The coordinator's end, for as long as a test's event loop."""

    def __init__(self) -> None:
        clock = asyncio.get_running_loop().time
        self.tasks: list[asyncio.Task[None]] = []
        shared = shared_by_sessions("c", instances(), OPTIONS, clock, self.background)
        refused = RefusedMessages("refused", "proxy")
        self.sessions = Sessions(shared, "digest", 10.0, refused)

    def background(self, work: Any) -> "asyncio.Task[None]":
        self.tasks.append(asyncio.get_running_loop().create_task(work))
        return self.tasks[-1]

    async def hears(self, report: Report, peer: bytes) -> None:
        frames = encode(report)
        await self.sessions.receive(decode(frames, Report), peer, "127.0.0.1")

    async def says(self) -> dict[bytes, Notice]:
        for _ in range(12):
            await asyncio.sleep(0)
        said = {}
        async for session, notice in self.sessions.notices(True):
            assert session.peer is not None
            said[session.peer] = decode(encode(notice), Notice)
        return said

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        for ended in await asyncio.gather(*self.tasks, return_exceptions=True):
            assert ended is None or isinstance(ended, asyncio.CancelledError), ended


@fuzzed(batch=5)
@given(st.lists(REPORTS, min_size=5, max_size=5))
async def test_a_proxy_gets_its_place_whatever_another_one_says(reports: list[Report]) -> None:
    coordinator = Coordinating()
    victim = Report("victim", 1, "", 0, "digest", "", whole=True)
    await coordinator.hears(victim, b"victim")
    for report in reports:
        await coordinator.hears(report, b"liar")
        await coordinator.says()
    asks = msgspec.structs.replace(victim, number=2, whole=False, records=[WAITS])
    await coordinator.hears(asks, b"victim")
    (answer,) = (await coordinator.says())[b"victim"].answers
    assert answer.ticket == 1
    assert answer.instance in (1, 2)
    await coordinator.end()


def link(clock: Any) -> Link:
    ignore: Any = lambda *_: None  # noqa: E731
    step = MeanStepTime()
    return Link("session", instances(), "digest", 1.5, clock, step, ignore, ignore)


@fuzzed(batch=5)
@given(st.lists(NOTICES, min_size=5, max_size=5))
async def test_a_proxy_hears_the_next_view_whatever_came_before(notices: list[Notice]) -> None:
    heard = link(asyncio.get_running_loop().time)
    for notice in notices:
        try:
            heard.receive(decode(encode(notice), Notice))
        except CoordinationError as error:
            assert error.reason in ("content", "number")
        report = heard.report(beat=True)
        assert report is not None
        decode(encode(report), Report)
    view = View([False] * 3, 12_345, [])
    heard.receive(Notice("c/3", 1, view=view))
    assert heard.view == view


@fuzzed()
@given(st.lists(st.tuples(NUMBERS, LOADS), max_size=4))
def test_loads_are_few_requests_whatever_peers_say(said: list[tuple[int, Load]]) -> None:
    states = instances()
    loads = ClusterLoads(Placements[LiveRequest](), states, 10.0, lambda: 0.0)
    for proxy, load in said:
        loads.peer(proxy, decode(encode(load), Load))
    for instance in states:
        on = loads.on(instance)
        assert len(on) <= 1_024
        assert 0 <= sum(request.context_tokens for request in on) <= MOST


MESSAGES: list[Any] = [
    Report("a", 1, "", 0, "digest", "", True, [WAITS], [Ended(1, True, 1)]),
    Notice(
        "c/1", 1, answers=[Answer(1, 0)], view=View([True], 1, [ProxyLoad(1, "", Load([1], [1]))])
    ),
    Load([1], [1]),
]


@st.composite
def damaged_frames(draw: st.DrawFn) -> list[bytes]:
    """The frames of a message, which may be none."""
    message = draw(st.sampled_from(MESSAGES))
    payload = draw(
        changed(msgspec.to_builtins(message), PACKABLE).map(msgspec.msgpack.encode)
        | damaged_bytes(encode(message)[1])
        | st.binary(max_size=60)
    )
    return draw(st.just([TOPIC, payload]) | st.lists(st.binary(max_size=30), max_size=4))


@fuzzed()
@given(damaged_frames())
@example([TOPIC, b"\x91" * 100_000])
def test_what_is_no_message_is_refused_as_such(frames: list[bytes]) -> None:
    for kind in (Report, Notice, Load):
        try:
            read = decode(frames, kind)
        except CoordinationError as error:
            assert str(error).isprintable()
        else:
            assert decode(encode(read), kind) == read

"""What proxies and the coordinator say to each other, damaged or extreme: both go on."""

import asyncio
from typing import Any

import msgspec
from coordinating import RECORD, shared_by_sessions
from fuzzing import fuzzed, structs
from hypothesis import given
from hypothesis import strategies as st

from rescheduler.coordination.link import Link
from rescheduler.coordination.messages import (
    MOST,
    CoordinationError,
    Notice,
    RefusedMessages,
    Report,
    View,
    decode,
    encode,
)
from rescheduler.coordinator.coordinator import Sessions
from rescheduler.engines.deployment import Instance, ProxyOptions
from rescheduler.placement.instance_state import InstanceState
from rescheduler.step_time.mean_step_time import MeanStepTime

OPTIONS = ProxyOptions(pool=8, ahead=4, prefill_concurrency=2)
WHERE = st.integers(-1, 3)  # of 0 to 2
NAMES = st.sampled_from(["victim-1", "other"])
PLACES = {"instance": WHERE, "source": WHERE, "target": WHERE, "destination": WHERE}
PACKED = st.lists(st.sampled_from([-1, 0, 1, MOST]), max_size=3).map(
    lambda values: b"".join(one.to_bytes(8, "little", signed=True) for one in values)
)
REPORTS = structs(
    Report,
    session=st.sampled_from(["victim", "liar", "another"]),
    incarnation=st.sampled_from(["", "c", "c/1", "c/2"]),
    deployment=st.sampled_from(["digest", "digest", "digest", "other"]),
    handles=PACKED,
    tokens=PACKED,
    draining=st.lists(WHERE, max_size=2),
    avoid=st.lists(WHERE, max_size=3),
    **dict.fromkeys(("id", "name", "external_id"), NAMES),
    **PLACES,
)
NOTICES = structs(
    Notice,
    incarnation=st.sampled_from(["c/1", "c/2"]),
    draining=st.lists(st.booleans(), min_size=2, max_size=4),
    **PLACES,
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
    victim = Report("victim", 1, "", 0, "digest", whole=True)
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
    view = View([False] * 3, 12_345)
    heard.receive(Notice("c/3", 1, view=view))
    assert heard.view == view

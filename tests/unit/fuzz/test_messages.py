"""Messages, damaged or extreme: whoever reads them goes on, and hears the next valid one."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from coordinating import RECORD, shared_by_sessions
from fuzzing import PACKABLE, damaged_frames, fuzzed, structs
from hypothesis import assume, example, given
from hypothesis import strategies as st
from live_requests import instance_state

from benchmarks.support.engine_states import engine_state
from predictor.live.telemetry_messages import (
    TOPIC,
    Finished,
    FinishedEvent,
    Forecasts,
    Gauges,
    Message,
    RequestForecast,
    Snapshot,
    encode_message,
    encode_survival,
)
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
from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.step_time.profile import MeanStepTime
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.telemetry.telemetry_view import InstanceKey, TelemetryView
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import TOPIC as CONTROL_TOPIC
from rescheduler.transfer.control_messages import (
    Command,
    ControlError,
    EngineState,
    GetState,
    Refused,
    Released,
    Reply,
    decode_command,
    decode_reply,
    number_of_reply,
)
from rescheduler.transfer.control_messages import encode as encode_control
from rescheduler.transfer.control_server import ControlServer

STATE = engine_state(frozen=["a"])
NEAR = {"number": st.integers(0, 1), "params": st.just({"remote_block_ids": [[4, 7]]})}
COMMANDS = damaged_frames(CONTROL_TOPIC, structs(Command, **NEAR))
REPLIES = damaged_frames(CONTROL_TOPIC, structs(Reply, **NEAR))
DEEP = [CONTROL_TOPIC, b"\x81" * 100_000]


def packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


@pytest.fixture(scope="module")
def peer() -> Iterator[zmq.Socket[bytes]]:
    """A socket that is connected to an engine whose scheduler never takes a command."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0

        def answer(command: Command) -> Reply | None:
            return STATE if isinstance(command, GetState) else None

        server = ControlServer("tcp://127.0.0.1:*", None, answer)
        socket.connect(server._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        yield socket
        server.close()


@fuzzed()
@given(COMMANDS)
@example(DEEP)
@example([CONTROL_TOPIC, packed({"type": "release", "number": 2**64 - 1, "id": "a", "hop": 2**63})])
def test_a_server_answers_whatever_came_before(
    peer: zmq.Socket[bytes], frames: list[bytes]
) -> None:
    try:
        command = decode_command(frames)
    except ControlError:
        command = None
    peer.send_multipart(frames or [b""])
    peer.send_multipart(encode_control(GetState(number=0)))
    first = {None: [Refused], GetState: [EngineState]}.get(command and type(command), [])
    for kind in (*first, EngineState):
        assert peer.poll(120_000)
        got = decode_reply(peer.recv_multipart())
        assert isinstance(got, kind) and (kind is Refused or got == STATE)


COUNTS = ("num_blocks", "free_blocks", "running", "waiting", "max_num_seqs")
EXTREMES = st.sampled_from([0, 1, 2**16, 2**20, 2**32, 2**40, 2**53, 2**63, 2**64 - 1])
STATES = structs(
    EngineState,
    version=st.sampled_from(["v", "v" * 1_000]),
    frozen=st.sampled_from([[], ["a"], ["a" * 300], ["a"] * 70_000]),
    **dict.fromkeys(("block_size", "max_model_len", *COUNTS), EXTREMES),
)


@fuzzed()
@given(STATES)
@example(msgspec.structs.replace(STATE, max_num_seqs=2**63))
@example(msgspec.structs.replace(STATE, num_blocks=2**32, block_size=2**20))
@example(msgspec.structs.replace(STATE, free_blocks=STATE.num_blocks + 1))
def test_a_state_is_plausible_or_refused(state: EngineState) -> None:
    try:
        read = decode_reply(encode_control(state))
    except ControlError as error:
        assert len(str(error)) < 2_000
        return
    assert isinstance(read, EngineState)
    assert read.num_blocks * read.block_size <= 2**40
    assert read.free_blocks <= read.num_blocks
    assert max(read.max_num_seqs, read.running, read.waiting) <= 2**20
    assert min(read.block_size, read.max_model_len) > 0


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("frozen", "output_token_ids", [2**31]),
        ("frozen", "output_token_ids", [-1]),
        ("frozen", "output_token_ids", [0] * (2**21 + 1)),
        ("frozen", "params", {"a": "x" * 5_000_000}),
        ("snapshot_taken", "token_ids", [2**63]),
        ("snapshot_taken", "params", {str(i): 0 for i in range(65)}),
        ("not_frozen", "reason", "x" * 1_001),
    ],
)
def test_a_reply_beyond_the_bounds_names_its_field(kind: str, field: str, value: Any) -> None:
    empty = {"frozen": "output_token_ids", "snapshot_taken": "token_ids"}
    rest = {empty[kind]: [], "params": {}} if kind in empty else {}
    with pytest.raises(ControlError, match=field):
        decode_reply([CONTROL_TOPIC, packed({"type": kind, "number": 1, **rest, field: value})])


@pytest.fixture(scope="module")
def engine() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.bind("tcp://127.0.0.1:*")
        yield socket


@fuzzed(batch=10)
@given(st.lists(REPLIES, min_size=10, max_size=10))
@example([DEEP])
async def test_a_client_hears_the_reply_whatever_came_before(
    engine: zmq.Socket[bytes], batch: list[list[bytes]]
) -> None:
    assume(not any(number_of_reply(damaged) == 2 for damaged in batch))
    client = ControlClient(engine.getsockopt_string(zmq.LAST_ENDPOINT))
    try:
        asking = asyncio.create_task(client.release("a", 0, 120))
        peer, *frames = await asyncio.to_thread(engine.recv_multipart)
        number = decode_command(frames).number
        for damaged in batch:
            engine.send_multipart([peer, *damaged])
        engine.send_multipart([peer, *encode_control(Released(number=number, done=True))])
        try:
            heard = await asking is True
        except ControlError:  # of another kind of reply, or of one that is none
            heard = False
        assert heard or any(number_of_reply(damaged) == number for damaged in batch)
        state = asyncio.create_task(client.state(120))
        peer, *frames = await asyncio.to_thread(engine.recv_multipart)
        number = decode_command(frames).number
        answer = msgspec.structs.replace(STATE, number=number)
        engine.send_multipart([peer, *encode_control(answer)])
        assert await state == answer
    finally:
        client.close()


OPTIONS = ProxyOptions(pool=8, ahead=4, prefill_concurrency=2)
WHERE = st.integers(-1, 3)  # of 0 to 2
NAMES = st.sampled_from(["victim-1", "other"])
PLACES = {"instance": WHERE, "source": WHERE, "target": WHERE, "destination": WHERE}
PACKED = st.lists(st.sampled_from([-1, 0, 1, MOST]), max_size=3).map(
    lambda values: b"".join(one.to_bytes(8, "little", signed=True) for one in values)
)
CHAINS = st.sampled_from([bytes(8), bytes(range(16)), bytes(9), b"\xff" * 512])
REPORTS = structs(
    Report,
    session=st.sampled_from(["victim", "liar", "another"]),
    incarnation=st.sampled_from(["", "c", "c/1", "c/2"]),
    deployment=st.sampled_from(["digest", "digest", "digest", "other"]),
    handles=PACKED,
    tokens=PACKED,
    draining=st.lists(WHERE, max_size=2),
    avoid=st.lists(WHERE, max_size=3),
    chain=CHAINS,
    **dict.fromkeys(("id", "name", "external_id"), NAMES),
    **PLACES,
)
NOTICES = structs(
    Notice,
    incarnation=st.sampled_from(["c/1", "c/2"]),
    draining=st.lists(st.booleans(), min_size=2, max_size=4),
    chain=CHAINS,
    **PLACES,
)
WAITS = msgspec.structs.replace(
    RECORD, id="victim-1", name="victim-1", external_id="victim-1", ticket=1
)


def instances() -> list[InstanceState]:
    named = {"p": "prefill", "d0": "decode", "d1": "decode"}
    return [instance_state(name, role, OPTIONS) for name, role in named.items()]


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
        decode(encode(report), Report)
    view = View([False] * 3, 12_345)
    heard.receive(Notice("c/3", 1, view=view))
    assert heard.view == view


EDGES = [0, 1, 5, 20, 100]
CURVE = encode_survival(np.exp(-np.array(EDGES) / 30.0)[None])[0]
REQUEST = RequestForecast("cmpl-a-0-0123abcd", 7, 20, 20, 400, CURVE)
HEADER: dict[str, Any] = {"instance": "gpu0", "rank": 0, "epoch": 5, "step": 3, "time": 1.5}
MESSAGES: list[Message] = [
    Forecasts(**HEADER, seq=0, edges=EDGES, requests=[REQUEST]),
    Snapshot(
        **HEADER,
        seq=1,
        gauges=Gauges(1, 2, 0.25, 1_000, 512.0),
        model="acme/small",
        checkpoint="0123456789ab",
        k=20,
        edges=EDGES,
        requests=[REQUEST],
    ),
    Finished(**HEADER, seq=2, requests=[FinishedEvent(REQUEST.request_id, "stop", 7, 60, 400)]),
]
ODD = PACKABLE | st.sampled_from(
    [CURVE, CURVE[:-1], CURVE[::-1], b"", EDGES, EDGES[::-1], [0, 2**63]]
)
DAMAGED = damaged_frames(TOPIC, st.sampled_from(MESSAGES), ODD)

NUMBERS = ("rank", "epoch", "seq", "step", "k", "running", "waiting", "kv_capacity_tokens")
NUMBERS += ("prompt_tokens", "generated_tokens", "forecast_at", "tokens_left", "total_tokens")
LIMITS = st.sampled_from([0, 1, 2**16 - 1, 2**20, 2**30, 2**31, 2**40, 2**53, 2**63 - 1, 2**64 - 1])
SHARES = st.sampled_from([float("nan"), float("inf"), -1.0, 0.0, 1.0, 1.5, 1e308, None])


@st.composite
def extreme_frames(draw: st.DrawFn) -> list[bytes]:
    """A message of the right shape, in any name, with numbers that no engine has."""
    edges = draw(st.sampled_from([EDGES, list(range(600)), [0, 2**53], [0, 2**64 - 1], [0]]))
    own = dict.fromkeys((*NUMBERS, "max_tokens"), LIMITS)
    own |= dict.fromkeys(("time", "kv_usage", "prefill_budget"), SHARES)
    own |= {
        "instance": st.sampled_from(["gpu0", "the next", "gpu" * 1_000]),
        "request_id": st.sampled_from([REQUEST.request_id, "x" * 1_024, "r"]),
        "edges": st.just(edges),
        "survival": st.just(b"\xff\xff" * len(edges)),
    }
    kind, within = draw(
        st.sampled_from([(Forecasts, RequestForecast), (Snapshot, RequestForecast)])
        | st.just((Finished, FinishedEvent))
    )
    times = draw(st.sampled_from([0, 1, 2, 9_000]))
    requests = [draw(structs(within, **own))] * times
    return [TOPIC, msgspec.msgpack.encode(draw(structs(kind, **own, requests=st.just(requests))))]


@fuzzed(batch=2)
@given(st.booleans(), st.lists(DAMAGED | extreme_frames(), min_size=1, max_size=8))
@example(True, [[TOPIC, b"\x81\xa4junk" + b"\x91" * 100_000]])
def test_a_connection_says_what_it_will_and_another_engine_is_heard(
    history: bool, batch: list[list[bytes]]
) -> None:
    view, now = TelemetryView(history=history), 0.0
    key = InstanceKey("the next", 0)
    view.receive(snapshot_of("x", 0), now, "honest", "the next")
    for seq, frames in enumerate(batch, start=1):
        now += 0.5
        for finished in view.receive(frames, now, "lying"):
            finished.forecast().median()
        view.receive(snapshot_of("x", seq), now, "honest", "the next")
        assert view.instances[key].received == now
        assert set(view.instances[key].requests) == {REQUEST.request_id}
    assert all(len(one.edges) <= 512 for one in view.instances.values())
    for forecasts in view.take_batches():
        assert len(forecasts.names) == len(forecasts.survival)
    for known in view.instances if history else ():
        names, forecast = view.forecast(known)
        assert len(names) == len(forecast.mean()) and np.isfinite(forecast.mean()).all()
    for one in view.instances.values():
        assert 0 <= one.gauges.kv_usage <= 1
        assert one.gauges.prefill_budget is None or abs(one.gauges.prefill_budget) <= 2**40


def snapshot_of(instance: str, seq: int = 1) -> list[bytes]:
    """A valid snapshot of another engine."""
    message = msgspec.structs.replace(MESSAGES[1], instance=instance, seq=seq)
    return [TOPIC, encode_message(message)]


@pytest.fixture(scope="module")
def subscriber() -> Iterator[tuple[TelemetrySubscriber, zmq.Socket[bytes]]]:
    """A subscriber, and the socket of an engine that it hears."""
    with (
        TelemetrySubscriber(
            bind="tcp://127.0.0.1:*", view=TelemetryView(history=False)
        ) as telemetry,
        zmq.Context() as context,
        context.socket(zmq.PUB) as engine,
    ):
        engine.linger = 0
        engine.connect(telemetry.endpoints[0])
        hears(telemetry, engine, "the first")
        yield telemetry, engine


def hears(telemetry: TelemetrySubscriber, engine: zmq.Socket[bytes], name: str) -> bool:
    """Return whether a subscriber takes a valid snapshot, which is sent until it does."""
    key, deadline, seq = InstanceKey(name, 0), time.monotonic() + 120, 0
    while time.monotonic() < deadline:
        engine.send_multipart(snapshot_of(name, seq))
        seq += 1
        for _ in range(100):
            with telemetry.lock:
                if telemetry.view.instances.pop(key, None) is not None:
                    return True
            time.sleep(0.0005)
    return False


@fuzzed(batch=5)
@given(batch=st.lists(DAMAGED, min_size=5, max_size=5))
def test_a_subscriber_hears_the_next_snapshot_whatever_came_before(
    subscriber: tuple[TelemetrySubscriber, zmq.Socket[bytes]],
    batch: list[list[bytes]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    telemetry, engine = subscriber
    for frames in batch:
        engine.send_multipart(frames or [b""])
    assert hears(telemetry, engine, "the next")
    forecasts = LiveForecasts(telemetry)
    forecasts.refresh()
    assert len(forecasts.forecast([])) == 0
    assert not caplog.records

"""Control messages, damaged: whoever reads them goes on, and answers the next valid one."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from fuzzing import damaged_frames, fuzzed, structs
from hypothesis import assume, example, given
from hypothesis import strategies as st

from benchmarks.support.engine_states import engine_state
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import (
    TOPIC,
    Command,
    ControlError,
    EngineState,
    GetState,
    Refused,
    Released,
    Reply,
    decode_command,
    decode_reply,
    encode,
    number_of_reply,
)
from rescheduler.transfer.control_server import ControlServer

STATE = engine_state(frozen=["a"])
NEAR = {"number": st.integers(0, 1), "params": st.just({"remote_block_ids": [[4, 7]]})}
COMMANDS = damaged_frames(TOPIC, structs(Command, **NEAR))
REPLIES = damaged_frames(TOPIC, structs(Reply, **NEAR))
DEEP = [TOPIC, b"\x81" * 100_000]


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
@example([TOPIC, packed({"type": "release", "number": 2**64 - 1, "id": "a", "hop": 2**63})])
def test_a_server_answers_whatever_came_before(
    peer: zmq.Socket[bytes], frames: list[bytes]
) -> None:
    try:
        command = decode_command(frames)
    except ControlError:
        command = None
    peer.send_multipart(frames or [b""])
    peer.send_multipart(encode(GetState(number=0)))
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
        read = decode_reply(encode(state))
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
        decode_reply([TOPIC, packed({"type": kind, "number": 1, **rest, field: value})])


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
        engine.send_multipart([peer, *encode(Released(number=number, done=True))])
        try:
            heard = await asking is True
        except ControlError:  # of another kind of reply, or of one that is none
            heard = False
        assert heard or any(number_of_reply(damaged) == number for damaged in batch)
        state = asyncio.create_task(client.state(120))
        peer, *frames = await asyncio.to_thread(engine.recv_multipart)
        number = decode_command(frames).number
        answer = msgspec.structs.replace(STATE, number=number)
        engine.send_multipart([peer, *encode(answer)])
        assert await state == answer
    finally:
        client.close()

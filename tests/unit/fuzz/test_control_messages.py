"""Control messages, damaged: whoever reads them goes on, and answers the next valid one."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from damage import ODD_VALUES, changed, damaged_bytes
from fuzzing import fuzzed
from hypothesis import assume, example, given
from hypothesis import strategies as st

from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import (
    TOPIC,
    Command,
    ControlError,
    EngineState,
    Freeze,
    Frozen,
    GetState,
    NotFrozen,
    Refused,
    Release,
    Released,
    Reply,
    Snapshot,
    TakeSnapshot,
    Unfreeze,
    Unfrozen,
    decode_command,
    decode_reply,
    encode,
    number_of_reply,
)
from rescheduler.transfer.control_server import ControlServer

COMMANDS: list[Command] = [
    Freeze(number=1, id="a", hop=0),
    Unfreeze(number=1, id="a"),
    Release(number=1, id="a", hop=2),
    TakeSnapshot(number=1, id="a"),
    GetState(number=1),
]
STATE = EngineState(
    number=0,
    version="0.32.0",
    block_size=16,
    max_num_seqs=64,
    max_model_len=4096,
    prefix_caching=True,
    num_blocks=1000,
    free_blocks=900,
    running=2,
    waiting=0,
    frozen=["a"],
)
REPLIES: list[Reply] = [
    Frozen(number=1, output_token_ids=[3, 1], params={"remote_block_ids": [[4, 7]]}),
    NotFrozen(number=0, reason="it ended by itself"),
    Unfrozen(number=1, done=True),
    Released(number=0, done=False),
    Snapshot(number=0, token_ids=[0] * 64, params={}),
    STATE,
    Refused(number=0, reason="no command"),
]
PACKABLE = (
    ODD_VALUES.filter(lambda value: not isinstance(value, int) or -(2**63) <= value < 2**64)
    | st.binary(max_size=9)
    | st.datetimes()
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=9))
)


def damaged_frames(messages: list[Any]) -> st.SearchStrategy[list[bytes]]:
    """The frames of a message, which may be none."""
    values = [msgspec.to_builtins(message) for message in messages]
    payload = st.one_of(
        st.sampled_from(values).flatmap(lambda value: changed(value, PACKABLE)).map(packed),
        st.sampled_from(messages).flatmap(lambda message: damaged_bytes(encode(message)[1])),
        st.binary(max_size=60),
    )
    whole = payload.map(lambda data: [TOPIC, data])
    return whole | whole.flatmap(st.permutations) | st.lists(st.binary(max_size=30), max_size=4)


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
@given(damaged_frames(COMMANDS))
@example([TOPIC, b"\x81" * 100_000])
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
    expected = [STATE]
    if command is None:
        expected = [Refused, STATE]
    elif isinstance(command, GetState):
        expected = [STATE, STATE]
    for reply in expected:
        assert peer.poll(120_000)
        got = decode_reply(peer.recv_multipart())
        assert got == reply or (isinstance(got, Refused) and reply is Refused)


EXTREMES = st.sampled_from([0, 1, 2**16, 2**20, 2**32, 2**40, 2**53, 2**63, 2**64 - 1])
NUMBERS = (
    "block_size",
    "max_num_seqs",
    "max_model_len",
    "num_blocks",
    "free_blocks",
    "running",
    "waiting",
)
STATES = st.fixed_dictionaries(
    {
        "type": st.just("engine_state"),
        "number": st.just(1),
        "version": st.sampled_from(["v", "v" * 1_000]),
        "prefix_caching": st.booleans(),
        "frozen": st.sampled_from([[], ["a"], ["a" * 300], ["a"] * 70_000]),
        **dict.fromkeys(
            (
                "block_size",
                "max_num_seqs",
                "max_model_len",
                "num_blocks",
                "free_blocks",
                "running",
                "waiting",
            ),
            EXTREMES,
        ),
    }
)


@fuzzed()
@given(STATES)
@example({**msgspec.to_builtins(STATE), "max_num_seqs": 2**63})
@example({**msgspec.to_builtins(STATE), "num_blocks": 2**32, "block_size": 2**20})
@example({**msgspec.to_builtins(STATE), "free_blocks": STATE.num_blocks + 1})
def test_a_state_is_plausible_or_refused(state: dict[str, Any]) -> None:
    try:
        read = decode_reply([TOPIC, packed(state)])
    except ControlError as error:
        assert len(str(error)) < 2_000
        return
    assert isinstance(read, EngineState)
    assert read.num_blocks * read.block_size <= 2**40
    assert read.free_blocks <= read.num_blocks
    assert max(read.max_num_seqs, read.running, read.waiting) <= 2**20
    assert min(read.block_size, read.max_model_len) > 0


@pytest.mark.parametrize(
    ("reply", "field"),
    [
        ({"type": "frozen", "output_token_ids": [2**31], "params": {}}, "output_token_ids"),
        ({"type": "frozen", "output_token_ids": [-1], "params": {}}, "output_token_ids"),
        (
            {"type": "frozen", "output_token_ids": [0] * (2**21 + 1), "params": {}},
            "output_token_ids",
        ),
        ({"type": "snapshot_taken", "token_ids": [2**63], "params": {}}, "token_ids"),
        (
            {"type": "snapshot_taken", "token_ids": [], "params": {str(i): 0 for i in range(65)}},
            "params",
        ),
        ({"type": "frozen", "output_token_ids": [], "params": {"a": "x" * 5_000_000}}, "params"),
        ({"type": "not_frozen", "reason": "x" * 1_001}, "reason"),
    ],
)
def test_a_reply_beyond_the_bounds_names_its_field(reply: dict[str, Any], field: str) -> None:
    with pytest.raises(ControlError, match=field):
        decode_reply([TOPIC, packed({"number": 1, **reply})])


@pytest.fixture(scope="module")
def engine() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.bind("tcp://127.0.0.1:*")
        yield socket


@fuzzed(batch=10)
@given(st.lists(damaged_frames(REPLIES), min_size=10, max_size=10))
@example([[TOPIC, b"\x81" * 100_000]])
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

"""The control socket between a proxy and an engine: what it says, and whom it hears."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from predictor.live.telemetry_messages import TelemetryError
from predictor.live.zmq_sockets import create_keys
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import (
    TOPIC,
    Command,
    ControlError,
    Freeze,
    Frozen,
    GetState,
    NotFrozen,
    NotFrozenError,
    Release,
    Released,
    Reply,
    Unfreeze,
    decode_command,
    encode,
)
from rescheduler.transfer.control_server import ControlServer
from rescheduler.transfer.migration_params import ConnectorConfig, connector_config


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([TOPIC], "1 frames"),
        ([b"headway-control/9", b"\x80"], "headway-control/9"),
        ([TOPIC, b"\xc1"], "malformed"),
        ([TOPIC, msgspec.msgpack.encode({"type": "freeze"})], "missing required field"),
        (
            [TOPIC, msgspec.msgpack.encode({"type": "freeze", "number": 1, "id": "", "hop": 0})],
            "id",
        ),
        ([TOPIC, encode(Release(number=1, id="aaaa", hop=0))[1].replace(b"a", b"\xff")], "invalid"),
        ([TOPIC, msgspec.msgpack.encode({"type": "kill", "number": 1})], "kill"),
        ([TOPIC, encode(Frozen(number=1, output_token_ids=[], params={}))[1]], "frozen"),
    ],
)
def test_a_malformed_command_says_what_is_wrong(frames: list[bytes], said: str) -> None:
    with pytest.raises(ControlError, match=said):
        decode_command(frames)


class Engine:
    """A server whose scheduler is a thread that answers what has been handed to it."""

    def __init__(self, keys: str | None = None) -> None:
        with zmq.Context() as context, context.socket(zmq.PAIR) as free:
            port = free.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.carried_out: list[Command] = []
        self.server = ControlServer(self.endpoint, keys, self.answer)
        self._closing = threading.Event()
        self._steps = threading.Thread(target=self._step)
        self._steps.start()

    def answer(self, command: Command) -> Reply | None:
        if isinstance(command, GetState):
            raise RuntimeError("scripted")
        if isinstance(command, Release):
            return Released(number=command.number, done=False)
        return None

    def _step(self) -> None:
        while not self._closing.wait(0.01):
            for asked in self.server.take():
                self.carried_out.append(asked.command)
                reply: Reply = NotFrozen(number=asked.command.number, reason="it has ended")
                if isinstance(asked.command, Freeze) and asked.command.id == "runs":
                    tokens = list(range(asked.command.hop))
                    reply = Frozen(
                        number=asked.command.number, output_token_ids=tokens, params={"a": 1}
                    )
                elif isinstance(asked.command, Unfreeze):
                    continue  # never answered
                self.server.reply(asked.peer, reply)

    def close(self) -> None:
        self._closing.set()
        self._steps.join()
        self.server.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


@contextmanager
def connected(endpoint: str, keys: Path | None = None) -> Iterator[ControlClient]:
    client = ControlClient(endpoint, keys)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[ControlClient]:
    with connected(engine.endpoint) as client:
        yield client


async def test_replies_find_the_calls_they_belong_to(client: ControlClient) -> None:
    replies = await asyncio.gather(*(client.freeze("runs", hop, 120) for hop in range(20)))
    assert [len(reply.output_token_ids) for reply in replies] == list(range(20))
    assert replies[0].params == {"a": 1}


async def test_what_needs_no_scheduler_does_not_reach_it(
    engine: Engine, client: ControlClient
) -> None:
    assert await client.release("gone", 0, 120) is False
    assert engine.carried_out == []


async def test_a_request_that_is_not_frozen_raises_with_the_reason(client: ControlClient) -> None:
    with pytest.raises(NotFrozenError, match="it has ended"):
        await client.freeze("ended", 0, 120)
    with pytest.raises(NotFrozenError, match="it has ended"):
        await client.snapshot("ended", 120)


async def test_no_answer_in_time_is_an_error_and_the_client_goes_on(client: ControlClient) -> None:
    with pytest.raises(ControlError, match=r"no answer within 0\.2 s"):
        await client.unfreeze("never answered", 0.2)
    assert (await client.freeze("runs", 1, 120)).output_token_ids == [0]


async def test_a_command_does_not_wait_for_an_engine_that_starts_later() -> None:
    engine = Engine()
    engine.close()
    arrived: list[Command] = []

    def answer(command: Command) -> Reply:
        arrived.append(command)
        return Released(number=command.number, done=False)

    with connected(engine.endpoint) as client:
        with pytest.raises(ControlError, match="no answer"):
            await client.freeze("runs", 0, 0.2)
        server = ControlServer(client.endpoint, None, answer)
        await client.release("gone", 0, 120)
        server.close()
    assert [type(command) for command in arrived] == [Release]


async def test_a_command_that_fails_is_refused_and_the_server_goes_on(
    client: ControlClient,
) -> None:
    with pytest.raises(ControlError, match="it failed; see the engine's log"):
        await client.state(120)
    assert await client.release("gone", 0, 120) is False


async def test_a_closed_client_ends_its_calls(engine: Engine, client: ControlClient) -> None:
    asking = asyncio.create_task(client.unfreeze("never answered", 120))
    while not engine.carried_out:
        await asyncio.sleep(0.01)
    client.close()
    with pytest.raises(ControlError, match="closed"):
        await asking


async def test_keys_admit_their_owner_and_nobody_else(tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    create_keys(tmp_path / "others")
    engine = Engine(str(tmp_path / "keys"))
    try:
        with connected(engine.endpoint, tmp_path / "keys") as owner:
            assert (await owner.freeze("runs", 2, 120)).output_token_ids == [0, 1]
        for wrong in (tmp_path / "others", None):
            with (
                connected(engine.endpoint, wrong) as stranger,
                pytest.raises(ControlError, match="do its keys match"),
            ):
                await stranger.freeze("runs", 2, 0.5)
        assert len(engine.carried_out) == 1
    finally:
        engine.close()


@pytest.mark.parametrize("side", ["server", "client"])
async def test_an_open_endpoint_without_keys_is_refused(side: str) -> None:
    with pytest.raises(TelemetryError, match="keys"):
        if side == "server":
            ControlServer("tcp://0.0.0.0:0", None, lambda command: None)
        else:
            ControlClient("tcp://10.1.2.3:5000")


def test_a_port_in_use_is_said(engine: Engine) -> None:
    with pytest.raises(ControlError, match="in use"):
        ControlServer(engine.endpoint, None, lambda command: None)


def test_the_connector_s_configuration() -> None:
    assert connector_config({}) == ConnectorConfig()
    assert connector_config({"headway": {"control": "tcp://127.0.0.1:1"}}).time_to_live == 15
    for wrong, said in [
        ({"ttl": 3}, "ttl"),
        ({"time_to_live": 5}, "time_to_live"),
        ({"control": 4}, "control"),
    ]:
        with pytest.raises(ValueError, match=f"kv_connector_extra_config.headway.*{said}"):
            connector_config({"headway": wrong})

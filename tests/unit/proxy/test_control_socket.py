"""The control socket between a proxy and an engine: what it says, whom it hears, and keys."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from chosen_ports import free_port
from hypothesis import given
from hypothesis import strategies as st

from predictor.live import zmq_sockets
from predictor.live.telemetry_messages import TelemetryError
from predictor.live.zmq_sockets import create_keys, shared_secret
from rescheduler.openai.openai_request import CHAT, COMPLETIONS, EngineBodies
from rescheduler.openai.request_reader import read_request
from rescheduler.telemetry.subscriber import TelemetrySubscriber
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
from rescheduler.transfer.migration_params import (
    ConnectorConfig,
    connector_config,
    is_signed,
    signed,
)


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
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
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
    with closing(Engine()) as engine:
        yield engine


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[ControlClient]:
    with closing(ControlClient(engine.endpoint)) as client:
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

    with closing(ControlClient(engine.endpoint)) as client:
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
    with closing(Engine(str(tmp_path / "keys"))) as engine:
        with closing(ControlClient(engine.endpoint, tmp_path / "keys")) as owner:
            assert (await owner.freeze("runs", 2, 120)).output_token_ids == [0, 1]
        for wrong in (tmp_path / "others", None):
            with (
                closing(ControlClient(engine.endpoint, wrong)) as stranger,
                pytest.raises(ControlError, match="do its keys match"),
            ):
                await stranger.freeze("runs", 2, 0.5)
        assert len(engine.carried_out) == 1


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


SECRET = b"s" * 32

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
objects = st.dictionaries(st.text(), values, max_size=4)


@given(objects, objects)
def test_what_was_signed_is_recognised_after_its_way_through_json(
    rest: dict[str, Any], headway: dict[str, Any]
) -> None:
    params = signed({**rest, "headway": headway}, SECRET)
    assert is_signed(json.loads(json.dumps(params)), SECRET)
    assert is_signed({**params, "prompt_token_ids": [1, 2]}, SECRET)
    assert not is_signed(params, b"t" * 32)


@given(st.data())
def test_any_other_parameter_needs_another_signature(data: st.DataObject) -> None:
    headway = {"id": "a", "hop": 0, "generated": 3}
    params = {"remote_request_id": "x", "remote_port": 1, "remote_block_ids": [[1, 2]]}
    given_out = signed({**params, "headway": headway}, SECRET)
    forged = json.loads(json.dumps(given_out))
    inside = data.draw(st.booleans())
    part = forged["headway"] if inside else forged
    names = [name for name in part if name not in ("headway", "signature")]
    name = data.draw(st.sampled_from(names) | st.text(min_size=1).map(lambda t: "new " + t))
    if data.draw(st.booleans()) and name in part:
        del part[name]
    else:
        before = part.get(name, ...)
        part[name] = data.draw(
            values.filter(lambda value: json.dumps(value) != json.dumps(before))
            if before is not ...
            else values
        )
    assert not is_signed(forged, SECRET)


@given(values)
def test_nothing_that_a_stranger_sends_is_taken_for_signed(value: Any) -> None:
    assert not is_signed({"headway": value}, SECRET)
    assert not is_signed({"headway": {"signature": value}}, SECRET)
    assert not is_signed({"do_remote_prefill": True}, SECRET)


def test_both_sides_of_the_keys_agree_and_nobody_else(tmp_path: Path) -> None:
    folder, other = tmp_path / "keys", tmp_path / "other"
    create_keys(folder)
    create_keys(other)
    secret = shared_secret(folder, "engine")
    assert len(secret) == 32
    assert shared_secret(folder, "watcher") == secret
    (folder / "watcher.key_secret").unlink()  # as on the engines' machine
    assert shared_secret(folder, "engine") == secret
    assert shared_secret(other, "engine") != secret
    (other / "engine.key_secret").unlink()
    with pytest.raises(TelemetryError, match=r"engine\.key_secret: no such key"):
        shared_secret(other, "engine")


def test_all_that_an_engine_is_asked_is_signed() -> None:
    bodies = EngineBodies(SECRET)
    for path in (COMPLETIONS, CHAT):
        prompt = {"messages": []} if path == CHAT else {"prompt": "a"}
        asked = read_request(path, json.dumps({"model": "m", **prompt}).encode())
        for body in (
            bodies.prefill(asked, "id", 0),
            bodies.decode(asked, "id", 0, {"remote_port": 1}),
            bodies.resumed(asked, "id", 1, [1], [2], {"remote_port": 1}),
            bodies.copy(asked, "id", 1, [1, 2], {"remote_port": 1}),
        ):
            assert is_signed(json.loads(body)["kv_transfer_params"], SECRET)


class Network:
    """Carries connections to a server, and can lose the first one without closing it."""

    def __init__(self, server: int) -> None:
        self.lost = False
        self.connections = 0
        self.from_clients = Counter[int]()
        self.changed = asyncio.Condition()
        self._server = server

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.connections
        self.connections += 1
        async with AsyncExitStack() as open_ends:
            there, back = await asyncio.open_connection("127.0.0.1", self._server)
            for end in (writer, back):
                open_ends.callback(end.close)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._carry(reader, back, number, counted=True))
                ways.create_task(self._carry(there, writer, number, counted=False))

    @property
    def most_from_clients(self) -> int:
        """How often something came from a client, on the connection where it came most often."""
        return max(self.from_clients.values(), default=0)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(120), self.changed:
            await self.changed.wait_for(holds)

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, number: int, counted: bool
    ) -> None:
        while data := await source.read(1 << 16):
            if not (self.lost and number == 0):
                sink.write(data)
            self.from_clients[number] += counted
            async with self.changed:
                self.changed.notify_all()
        sink.close()


@asynccontextmanager
async def network(kind: int) -> AsyncIterator[tuple[Network, str]]:
    """A network before a socket of this kind, and the endpoint to connect to."""
    with zmq.Context() as context, context.socket(kind) as engine:
        carrier = Network(engine.bind_to_random_port("tcp://127.0.0.1"))
        listening = await asyncio.start_server(carrier.connect, "127.0.0.1", 0)
        try:
            yield carrier, f"tcp://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        finally:
            listening.close()
            engine.close(linger=0)


PINGED = 6
"""More than a handshake has: without pings, nothing follows it."""
CLIENTS: list[Any] = [(ControlClient, zmq.ROUTER), (TelemetrySubscriber, zmq.PUB)]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_sockets, "_SILENT_SECONDS", 1.0)


@pytest.mark.slow
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(("client", "server"), CLIENTS)
async def test_a_machine_that_is_gone_is_connected_to_again(
    client: Callable[[str], Any], server: int
) -> None:
    async with network(server) as (carrier, endpoint):
        with closing(client(endpoint)):
            await carrier.until(lambda: carrier.most_from_clients > PINGED)
            carrier.lost = True
            await carrier.until(lambda: carrier.connections > 1)


@pytest.mark.slow
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(("client", "server"), CLIENTS)
async def test_an_engine_with_nothing_to_say_stays_connected(
    client: Callable[[str], Any], server: int
) -> None:
    async with network(server) as (carrier, endpoint):
        with closing(client(endpoint)):
            # One may be given up where this process itself stood still; another one stays.
            await carrier.until(lambda: carrier.most_from_clients > PINGED + 2)

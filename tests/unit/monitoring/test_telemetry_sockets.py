"""Telemetry over sockets: whose is heard, with keys and without, and what is refused."""

import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec.structs import replace
from published_telemetry import KEY, Engine, endpoint_of, frames, publisher

from predictor.live.telemetry_messages import MOST_REQUESTS, TOPIC, TelemetryError
from predictor.live.zmq_sockets import apply_curve, create_keys, is_loopback, refuse_open_endpoint
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.telemetry.telemetry_view import FinishedForecasts, InstanceKey


def until(condition: Callable[[], bool], send: Callable[[], object]) -> None:
    """Send again and again until a condition holds, as ZMQ connects when it pleases."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "nothing came"
        send()
        time.sleep(0.01)


def messages_in(subscriber: TelemetrySubscriber) -> int:
    with subscriber.lock:
        return subscriber.view.instances[KEY].seq if subscriber.view.instances else -1


def publish(
    engine: Engine, sender: zmq.Socket[bytes], subscriber: TelemetrySubscriber, messages: int = 0
) -> None:
    """Publish snapshots until a subscriber has taken so many after the first."""
    until(
        lambda: messages_in(subscriber) >= messages,
        lambda: sender.send_multipart(frames(engine.snapshot())),
    )


def test_telemetry_crosses_a_socket_and_garbage_does_no_harm() -> None:
    engine = Engine()
    with publisher(bind=True) as sender, TelemetrySubscriber(endpoint_of(sender)) as subscriber:
        publish(engine, sender, subscriber)
        for garbage in ([b"headway/2", b"x"], [TOPIC], [TOPIC, b"x"], [TOPIC, b"", b""]):
            sender.send_multipart(garbage)
        sender.send_multipart(frames(engine.start()))
        sender.send_multipart(frames(engine.finish()))
        finished: list[FinishedForecasts] = []
        until(lambda: bool(finished), lambda: finished.extend(subscriber.take_finished()))
        assert [request.event.request_id for request in finished] == ["request-1"]
        assert subscriber.view.malformed == 4
    subscriber.close()  # a second time


@pytest.fixture
def two_folders(tmp_path: Path) -> tuple[Path, Path]:
    create_keys(tmp_path / "ours")
    create_keys(tmp_path / "theirs")
    return tmp_path / "ours", tmp_path / "theirs"


def test_an_engine_with_keys_is_heard_with_its_watchers_keys_only(
    two_folders: tuple[Path, Path],
) -> None:
    ours, theirs = two_folders
    mixed = theirs.parent / "mixed"  # knows the engine, and is not admitted by it
    mixed.mkdir()
    (mixed / "watcher.key_secret").write_bytes((theirs / "watcher.key_secret").read_bytes())
    (mixed / "engine.key").write_bytes((ours / "engine.key").read_bytes())
    engine = Engine()
    with (
        publisher(ours, bind=True) as sender,
        TelemetrySubscriber(endpoint_of(sender), keys=ours) as good,
        TelemetrySubscriber(endpoint_of(sender), keys=theirs) as wrong,
        TelemetrySubscriber(endpoint_of(sender), keys=mixed) as not_admitted,
        TelemetrySubscriber(endpoint_of(sender)) as without,
    ):
        publish(engine, sender, good, 50)
        assert [messages_in(s) for s in (wrong, not_admitted, without)] == [-1, -1, -1]


def test_a_watcher_with_keys_hears_its_engines_only(two_folders: tuple[Path, Path]) -> None:
    ours, theirs = two_folders
    good, bad = Engine(epoch=1), Engine(epoch=2)
    with (
        TelemetrySubscriber(bind="tcp://127.0.0.1:*", keys=ours) as subscriber,
        publisher(ours) as admitted,
        publisher(theirs) as refused,
        publisher() as plain,
    ):
        for sender in (admitted, refused, plain):
            sender.connect(subscriber.endpoints[0])

        def send() -> None:
            admitted.send_multipart(frames(good.snapshot()))
            for sender in (refused, plain):
                sender.send_multipart(frames(bad.snapshot()))

        until(lambda: messages_in(subscriber) >= 50, send)
        with subscriber.lock:
            assert subscriber.view.instances[KEY].epoch == good.epoch


def test_without_its_handler_of_keys_a_socket_admits_nobody(two_folders: tuple[Path, Path]) -> None:
    ours, _ = two_folders
    context, engine = zmq.Context(), Engine()
    receiver = context.socket(zmq.SUB)
    receiver.setsockopt(zmq.SUBSCRIBE, b"")
    authenticator = apply_curve(receiver, ours, "watcher", serves=True)
    authenticator.stop()
    receiver.bind("tcp://127.0.0.1:*")
    with publisher(ours) as sender:
        sender.connect(endpoint_of(receiver))
        for _ in range(50):
            sender.send_multipart(frames(engine.snapshot()))
            assert not receiver.poll(10)
    receiver.close(linger=0)
    context.term()


def test_one_context_has_one_handler_of_keys(two_folders: tuple[Path, Path]) -> None:
    context = zmq.Context()
    sockets = [context.socket(zmq.SUB) for _ in range(2)]
    authenticator = apply_curve(sockets[0], two_folders[0], "watcher", serves=True)
    with pytest.raises(TelemetryError, match="a context of its own"):
        apply_curve(sockets[1], two_folders[0], "watcher", serves=True)
    for opened in sockets:
        opened.close()
    authenticator.stop()
    context.term()


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        *(
            (f"tcp://{host}", True)
            for host in ("127.0.0.1:1", "127.8.8.8:*", "localhost:1", "[::1]:1")
        ),
        *((endpoint, True) for endpoint in ("ipc://telemetry", "inproc://headway")),
        *((f"tcp://{host}:5557", False) for host in ("0.0.0.0", "*", "[::]", "eth0", "10.0.0.1")),
        *((f"tcp://{host}.example.org:5557", False) for host in ("127.0.0.1", "localhost")),
        ("tcp://127.0.0.1:0;10.0.0.1:5557", False),
        *((endpoint, False) for endpoint in ("udp://127.0.0.1:5557", "127.0.0.1:5557")),
    ],
)
def test_telemetry_leaves_the_machine_with_keys_only(endpoint: str, local: bool) -> None:
    assert is_loopback(endpoint) is local
    refuse_open_endpoint(endpoint, keys=Path("keys"))
    if local:
        refuse_open_endpoint(endpoint, keys=None)
        return
    for arguments in ({"connect": endpoint}, {"bind": endpoint}):
        with pytest.raises(TelemetryError, match="headway keys") as refused:
            TelemetrySubscriber(**arguments)
        assert str(refused.value).startswith(endpoint)


def test_an_endpoint_that_cannot_be_used_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(TelemetryError, match=f"{endpoint}: the port is in use"):
            TelemetrySubscriber(bind=endpoint)
    with pytest.raises(TelemetryError, match="not a ZMQ endpoint"):
        TelemetrySubscriber("tcp://127.0.0.1:none")
    with pytest.raises(TelemetryError, match="some to connect to"):
        TelemetrySubscriber([])


def test_keys_are_private_and_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    create_keys(folder)
    names = ["engine.key", "engine.key_secret", "watcher.key", "watcher.key_secret"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in ("engine.key_secret", "watcher.key_secret"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    before = (folder / "engine.key_secret").read_bytes()
    with pytest.raises(TelemetryError, match="not empty"):
        create_keys(folder)
    assert (folder / "engine.key_secret").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("watcher.key_secret", None, "watcher.key_secret: no such key.*headway keys"),
        ("engine.key", None, "engine.key: no such key"),
        ("engine.key", "nothing", "engine.key: invalid key"),
        ("watcher.key_secret", 'public-key = "x"', "holds no secret key"),
        ("watcher.key_secret", 'public-key = "x"\nsecret-key = "y"', "invalid keys of the watcher"),
    ],
)
def test_keys_that_cannot_be_used_are_named(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    folder = tmp_path / "keys"
    create_keys(folder)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(TelemetryError, match=message):
        TelemetrySubscriber("tcp://127.0.0.1:5557", keys=folder)


def test_a_message_that_fails_does_not_end_the_subscription(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with TelemetrySubscriber(bind="tcp://127.0.0.1:*") as telemetry:
        received = telemetry.view.receive
        fails = [True]

        def failing(*message: Any) -> Any:
            if fails.pop() if fails else False:
                raise OverflowError("scripted")
            return received(*message)

        monkeypatch.setattr(telemetry.view, "receive", failing)
        with publisher() as sender:
            sender.connect(telemetry.endpoints[0])
            publish(Engine(), sender, telemetry)
    assert "a telemetry message failed" in caplog.text


def test_each_endpoint_is_heard_in_the_name_of_its_engine_only() -> None:
    honest, liar = Engine(instance="honest"), Engine(epoch=2**63 - 1, instance="honest")
    with publisher(bind=True) as one, publisher(bind=True) as other:
        names = {endpoint_of(one): "honest", endpoint_of(other): "liar"}
        with TelemetrySubscriber(names) as subscriber:

            def send() -> None:
                other.send_multipart(frames(liar.snapshot()))
                one.send_multipart(frames(honest.snapshot()))

            until(lambda: len(subscriber.view.instances) == 2, send)
            with subscriber.lock:
                epochs = {key.name: v.epoch for key, v in subscriber.view.instances.items()}
            assert epochs == {"honest": honest.epoch, "liar": liar.epoch}


def test_of_engines_that_connect_the_first_of_a_name_is_heard_while_it_speaks() -> None:
    first, second = Engine(epoch=1), Engine(epoch=2)
    with (
        TelemetrySubscriber(bind="tcp://127.0.0.1:*") as subscriber,
        publisher() as one,
        publisher() as other,
    ):
        one.connect(subscriber.endpoints[0])
        publish(first, one, subscriber)
        other.connect(subscriber.endpoints[0])

        def send() -> None:
            one.send_multipart(frames(first.snapshot()))
            other.send_multipart(frames(second.snapshot()))

        until(lambda: subscriber.view.foreign >= 3, send)
        assert subscriber.view.instances[KEY].epoch == 1


def test_an_engine_that_sends_too_much_waits_itself() -> None:
    """Each message of one takes long to read; the other is heard soon nevertheless."""
    slow, quick = Engine(instance="slow"), Engine(instance="quick")
    begun = slow.start()
    (one,) = begun.requests
    many = [replace(one, request_id=f"r{i}") for i in range(MOST_REQUESTS)]
    big = frames(replace(begun, requests=many))
    with (
        publisher(bind=True) as flooding,
        publisher(bind=True) as sender,
        TelemetrySubscriber([endpoint_of(flooding), endpoint_of(sender)]) as subscriber,
    ):
        key = InstanceKey("quick", 0)

        def send() -> None:
            for _ in range(3):
                flooding.send_multipart(big)
            sender.send_multipart(frames(quick.snapshot()))

        until(lambda: key in subscriber.view.instances, send)

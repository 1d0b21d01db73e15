"""A subscriber that keeps every telemetry message, in the order they came."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from predictor.live.telemetry_messages import TOPIC, Message, Snapshot, decode_message


class Listener:
    """What was published so far by the engines that connect to its endpoint."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.messages: list[Message] = []
        self._came = threading.Condition()

    def add(self, message: Message) -> None:
        with self._came:
            self.messages.append(message)
            self._came.notify_all()

    def wait_until(self, condition: Callable[[list[Message]], object]) -> None:
        """Wait until a condition holds of all messages so far."""
        with self._came:
            came = self._came.wait_for(lambda: condition(self.messages), 300)
        assert came, f"{len(self.messages)} messages came, and never what was waited for"

    def wait_until_idle(self) -> None:
        """Wait for two snapshots in a row, from now on, of an engine that runs nothing."""
        since = len(self.messages)

        def idle(messages: list[Message]) -> bool:
            new = [one for one in messages[since:] if isinstance(one, Snapshot)][-2:]
            return len(new) == 2 and not any(one.gauges.running or one.requests for one in new)

        self.wait_until(idle)


@contextmanager
def listener() -> Iterator[Listener]:
    """Listen to engines that connect to a port of the loopback."""
    ended = threading.Event()
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe(b"")
        port = subscriber.bind_to_random_port("tcp://127.0.0.1")
        heard = Listener(f"tcp://127.0.0.1:{port}")

        def listen() -> None:
            while not ended.is_set():
                if subscriber.poll(100):
                    topic, payload = subscriber.recv_multipart()
                    assert topic == TOPIC
                    heard.add(decode_message(payload))

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield heard
        finally:
            ended.set()
            thread.join()

"""Telemetry as an engine publishes it, one message at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import zmq
from msgspec.structs import replace

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
from predictor.live.zmq_sockets import apply_curve
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.telemetry.telemetry_view import InstanceKey, TelemetryView

EDGES = [0, 1, 5, 20, 100, 400]
KEY = InstanceKey("gpu0", 0)
MAX_TOKENS = 400


def coded_curve(mean: float) -> bytes:
    return encode_survival(np.exp(-np.array(EDGES) / mean)[None])[0]


class Engine:
    """An engine that publishes what it does, one message at a time."""

    def __init__(
        self, epoch: int = 1, max_tokens: int = MAX_TOKENS, instance: str = KEY.name
    ) -> None:
        self.instance = instance
        self.epoch = epoch
        self.seq = 0
        self.step = 0
        self.started = 0
        self.max_tokens = max_tokens
        self.running: dict[str, RequestForecast] = {}
        self.generated: dict[str, int] = {}

    def start(self) -> Forecasts:
        self.started += 1
        name = f"request-{self.started}"
        self.running[name] = RequestForecast(name, 7, 0, 0, self.max_tokens, coded_curve(30.0))
        self.generated[name] = 0
        return Forecasts(**self._header(), edges=EDGES, requests=[self.running[name]])

    def decode(self, steps: int = 3) -> None:
        self.step += steps
        self.generated = {name: n + steps for name, n in self.generated.items()}

    def snapshot(self, predicts: bool = True) -> Snapshot:
        for name, n in self.generated.items():
            published = self.running[name]
            at, curve = published.forecast_at, published.survival
            if predicts:
                at, curve = n, coded_curve(30.0 + n)
            self.running[name] = RequestForecast(name, 7, n, at, self.max_tokens - at, curve)
        return Snapshot(
            **self._header(),
            gauges=Gauges(len(self.running), 2, 0.25, 1_000),
            model="acme/small",
            checkpoint="0123456789ab",
            k=3,
            edges=EDGES,
            requests=list(self.running.values()),
        )

    def finish(self, reason: str = "stop", name: str | None = None) -> Finished:
        name = name or next(iter(self.running), f"never-published-{self.seq}")
        self.running.pop(name, None)
        n = self.generated.pop(name, 0)
        event = FinishedEvent(name, reason, 7, n, self.max_tokens)
        return Finished(**self._header(), requests=[event])

    def _header(self) -> dict[str, str | int | float]:
        seq, self.seq = self.seq, self.seq + 1
        header = {"instance": self.instance, "rank": 0, "epoch": self.epoch, "seq": seq}
        return header | {"step": self.step, "time": 0.0}


def snapshot(
    instance: str,
    requests: Sequence[RequestForecast] = (),
    edges: Sequence[int] = EDGES,
    seq: int = 0,
    epoch: int = 1,
    **gauges: float,
) -> Snapshot:
    """What an engine publishes of all that it runs."""
    said = {"gauges": Gauges(**gauges), "edges": [*edges], "requests": [*requests]}
    return replace(Engine(epoch, instance=instance).snapshot(), seq=seq, step=seq, **said)


class GivenTelemetry(TelemetrySubscriber):
    """A proxy's subscriber whose messages are given to it."""

    def __init__(self) -> None:
        super().__init__("tcp://127.0.0.1:9", view=TelemetryView(history=False))

    def hear(self, *messages: list[bytes], at: float = 0.0) -> None:
        with self.lock:
            for message in messages:
                self._finished.extend(self.view.receive(message, at))


def frames(message: Message) -> list[bytes]:
    return [TOPIC, encode_message(message)]


@contextmanager
def publisher(keys: Path | None = None, bind: bool = False) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    sender = context.socket(zmq.PUB)
    authenticator = apply_curve(sender, keys, "engine", bind) if keys else None
    if bind:
        sender.bind("tcp://127.0.0.1:*")
    try:
        yield sender
    finally:
        sender.close(linger=0)
        if authenticator is not None:
            authenticator.stop()
        context.term()


def endpoint_of(sender: zmq.Socket[bytes]) -> str:
    last = sender.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(last, bytes)
    return last.rstrip(b"\0").decode()

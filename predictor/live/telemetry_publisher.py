"""Publish an engine's forecasts over ZMQ, from a thread that never blocks the engine."""

import logging
import socket
import threading
import time
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from data_collection.capture.requests import FinishedRequest
from predictor.live.engine_forecasts import EngineForecasts, TelemetryConfig
from predictor.live.telemetry_messages import (
    MOST_EDGES,
    MOST_REQUESTS,
    MOST_TOKENS,
    TOPIC,
    Finished,
    FinishedEvent,
    Forecasts,
    Gauges,
    Message,
    RequestForecast,
    Snapshot,
    TelemetryError,
    encode_message,
    encode_survival,
)
from predictor.live.zmq_sockets import (
    apply_curve,
    bind_socket,
    connect_socket,
    raised_port,
    refuse_open_endpoint,
)

logger = logging.getLogger("headway.telemetry")


class TelemetryPublisher:
    """Publishes what runs in an engine and what is expected of it.

    The engine's thread only puts into a queue. The publishing thread codes curves, keeps the
    latest forecast of every running request, and sends a `Snapshot` on every k-th step, when the
    last request has ended, and at least each ``snapshot_seconds``, also when the engine is idle or
    stuck; `Forecasts` of requests that were just prefilled; and `Finished` as requests end. A slow
    subscriber loses messages, which it sees by their numbers; the next snapshot is whole again.

    Args:
        config: where to publish.
        rank: data-parallel rank; raises the bound port.
        model: name of the serving model.
        checkpoint: fingerprint of the predictor.
        k: steps between two predictions.
        edges: [n_edges] grid of the curves, in tokens.
        generated: kept up to date by the engine's thread with n of every running request.

    Raises:
        TelemetryError: an endpoint cannot be bound or may not be open, keys are missing, or the
            grid has more edges than a message may have.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        rank: int,
        model: str,
        checkpoint: str,
        k: int,
        edges: list[int],
        generated: Mapping[str, int],
    ) -> None:
        if len(edges) > MOST_EDGES:
            raise TelemetryError(
                f"a grid of {len(edges)} edges cannot be published, only {MOST_EDGES} at most: "
                "train a predictor with a coarser grid"
            )
        self._config = config
        self._rank = rank
        self._model = model
        self._checkpoint = checkpoint
        self._k = k
        self._edges = edges
        self._generated = generated
        self._epoch = time.time_ns()
        self._seq = 0
        self._step = 0
        self._gauges = Gauges()
        self._latest: dict[str, RequestForecast] = {}
        self._queue: SimpleQueue[EngineForecasts | list[FinishedRequest] | None] = SimpleQueue()
        self.thread_seconds = 0.0
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        try:
            self._socket, self.endpoint = self._open()
        except Exception:
            if self._authenticator is not None:
                self._authenticator.stop()
            self._context.destroy(linger=0)
            raise
        self._instance = config.instance or (
            f"{socket.gethostname()}:{self.endpoint.rpartition(':')[2]}"
        )
        self._thread = threading.Thread(target=self._publish, name="headway-telemetry", daemon=True)
        self._thread.start()

    # The engine's thread.

    def forecasts(self, forecasts: EngineForecasts) -> None:
        """Queue the predictions of a step."""
        self._queue.put(forecasts)

    def finished(self, finished: list[FinishedRequest]) -> None:
        """Queue the ends of requests."""
        self._queue.put(finished)

    def at_step(self, step: int, gauges: Gauges | None) -> None:
        """Note where the engine is; sent with the next snapshot."""
        self._step = step
        if gauges is not None:
            self._gauges = gauges

    def close(self) -> None:
        """Send what is queued and close the socket."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    # The publishing thread.

    def _publish(self) -> None:
        try:
            self._send_all()
        except Exception:  # the engine must keep running
            logger.exception("telemetry stopped")
        finally:
            self._socket.close(linger=200)
            if self._authenticator is not None:
                self._authenticator.stop()
            self._context.term()

    def _send_all(self) -> None:
        next_snapshot = time.monotonic()
        while True:
            try:
                item = self._queue.get(timeout=max(0.0, next_snapshot - time.monotonic()))
            except Empty:
                item = []
            if item is None:
                return
            whole = isinstance(item, EngineForecasts) and self._take(item)
            if isinstance(item, list) and item:
                self._tell_finished(item)
                whole = not self._generated  # idle from now on, which somebody may wait for
            if whole or time.monotonic() >= next_snapshot:
                self._send_snapshot()
                next_snapshot = time.monotonic() + self._config.snapshot_seconds
            self.thread_seconds = time.thread_time()

    def _take(self, forecasts: EngineForecasts) -> bool:
        """Keep a step's forecasts; return whether it was a k-th step, else publish the new ones."""
        coded = encode_survival(forecasts.survival)
        requests = [
            RequestForecast(*fields)
            for fields in zip(
                forecasts.request_ids,
                forecasts.prompt_tokens,
                forecasts.generated_tokens,
                forecasts.generated_tokens,
                [min(left, MOST_TOKENS) for left in forecasts.tokens_left],
                coded,
                strict=True,
            )
        ]
        running = self._generated.keys()
        requests = [request for request in requests if request.request_id in running]
        self._latest |= {request.request_id: request for request in requests}
        if forecasts.step % self._k == 0:
            return True
        self._send(
            Forecasts(**self._header(), edges=self._edges, requests=requests[:MOST_REQUESTS])
        )
        return False

    def _tell_finished(self, finished: list[FinishedRequest]) -> None:
        for request in finished:
            self._latest.pop(request.request_id, None)
        events = [
            FinishedEvent(
                request_id=request.request_id,
                finish_reason=request.finish_reason,
                prompt_tokens=request.prompt_tokens,
                total_tokens=request.total_tokens,
                max_tokens=min(request.max_tokens, MOST_TOKENS),
            )
            for request in finished
        ]
        self._send(Finished(**self._header(), requests=events))

    def _send_snapshot(self) -> None:
        generated = dict(self._generated)
        requests = []
        for name, request in self._latest.items():
            n = generated.get(name)
            if n is not None:
                now = max(n, request.forecast_at)
                requests.append(msgspec.structs.replace(request, generated_tokens=now))
        self._send(
            Snapshot(
                **self._header(),
                gauges=self._gauges,
                model=self._model,
                checkpoint=self._checkpoint,
                k=self._k,
                edges=self._edges,
                requests=requests[:MOST_REQUESTS],
            )
        )

    def _header(self) -> dict[str, Any]:
        seq, self._seq = self._seq, self._seq + 1
        return {
            "instance": self._instance,
            "rank": self._rank,
            "epoch": self._epoch,
            "seq": seq,
            "step": self._step,
            "time": time.time(),
        }

    def _send(self, message: Message) -> None:
        self._socket.send_multipart([TOPIC, encode_message(message)])

    def _open(self) -> tuple[zmq.Socket[bytes], str]:
        config = self._config
        if config.keys is not None and config.bind and config.connect:
            raise TelemetryError(
                "telemetry with keys either binds or connects: who binds is the CURVE server. "
                'Give bind: "" beside forecast.telemetry.connect in --additional-config'
            )
        publisher = self._context.socket(zmq.PUB)
        for endpoint in (config.bind, *config.connect):
            if endpoint:
                refuse_open_endpoint(endpoint, config.keys)
        if config.keys is not None:
            self._authenticator = apply_curve(
                publisher, config.keys, side="engine", serves=bool(config.bind)
            )
        bound = raised_port(config.bind, self._rank)
        if bound:
            try:
                bind_socket(publisher, bound)
            except zmq.ZMQError as error:
                raise TelemetryError(
                    f"telemetry cannot bind {bound}: {error.strerror}. Give another "
                    "forecast.telemetry.bind in --additional-config, or stop what uses it"
                ) from error
        for endpoint in config.connect:
            connect_socket(publisher, endpoint)
        last = publisher.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(last, bytes)
        return publisher, last.rstrip(b"\0").decode()

"""Predict for all running requests of an engine in one batch."""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from threadpoolctl import ThreadpoolController

from data_collection.capture.capture_hook import Cadence, CapturedRows
from data_collection.capture.requests import FinishedRequest
from data_collection.models import identify
from predictor.live.engine_forecasts import (
    FORECASTS_ATTRIBUTE,
    GAUGES_ATTRIBUTE,
    REPETITION_ATTRIBUTE,
    EngineForecasts,
    LiveConfig,
)
from predictor.live.telemetry_publisher import TelemetryPublisher
from predictor.models.checkpoint import load_predictor
from predictor.models.hidden_state_mlp import (
    INPUTS,
    NO_REPETITION,
    PROMPT_LAYER,
    CheckpointError,
    ModelMismatchError,
    RequestRows,
)
from predictor.models.survival_mlp import SurvivalMLP

_UNKNOWN = 2**31
_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class _OnTheWay:
    """Curves whose copy to the host may still be under way."""

    rows: CapturedRows
    tokens_left: list[int]
    curves: torch.Tensor
    copied: torch.cuda.Event | None

    def has_arrived(self) -> bool:
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]


class Forecaster:
    """A `RowConsumer` that forecasts every running request each k-th step, and each new one.

    All memory it needs on the device is taken when it is made, so that vLLM's profiling
    counts it: the weights, and one batch of inputs. On a GPU the network runs as a CUDA
    graph, one for each power of two up to the largest batch, and the curves are copied to
    the host on a side stream; they are handed on when they have arrived, at the next step at
    the latest. On a CPU it computes on one thread.

    Args:
        predictor: on the CPU; it is moved to the device.
        device: the engine's.
        max_requests: most requests in a step (``max_num_seqs``).
        publisher: publishes forecasts and ends; None publishes nothing.
    """

    cadence: Cadence = "step"

    def __init__(
        self,
        predictor: SurvivalMLP,
        device: torch.device,
        max_requests: int,
        publisher: TelemetryPublisher | None,
    ) -> None:
        self._predictor = predictor
        self._edges = predictor.edges.double().numpy().copy()
        predictor.to(device)
        predictor.requires_grad_(False)
        self._device = device
        self._publisher = publisher
        self._threads = ThreadpoolController()  # vLLM makes torch's own setting do nothing
        self._handing_on_seconds = 0.0
        self._forecasts = 0
        self._pending: deque[_OnTheWay] = deque()
        self._repetition: dict[str, tuple[float, float]] = {}
        largest = next((size for size in _BUCKETS if size >= max_requests), max_requests)
        self._sizes = sorted({*(size for size in _BUCKETS if size < largest), largest})
        self._inputs = RequestRows(
            torch.zeros(largest, predictor.hidden_size, device=device),
            torch.zeros(largest, len(INPUTS), device=device),
        )
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        if device.type == "cuda":
            self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._capture_graphs()

    def on_rows(self, rows: CapturedRows) -> None:
        """Predict for the rows of a step and start the curves' way to the host.

        Requests with a LoRA adapter that the predictor has not learned from have no forecast.
        """
        rows = rows.of_adapter(self._predictor.adapter)
        if not rows.request_ids:
            return
        self._forecasts += len(rows.request_ids)
        left = [
            max(1, cap - n) if cap else _UNKNOWN
            for cap, n in zip(rows.max_tokens, rows.generated_tokens, strict=True)
        ]
        repetition = [self._repetition.get(name, NO_REPETITION) for name in rows.request_ids]
        columns = [rows.generated_tokens, rows.prompt_tokens, left, rows.temperatures]
        numbers = torch.tensor([*columns, *zip(*repetition, strict=True)], dtype=torch.float32).T
        if self._device.type == "cuda":
            self._predict_on_gpu(rows, numbers, left)
        else:
            inputs = RequestRows(rows.hidden_states.float(), numbers)
            with torch.inference_mode(), self._threads.limit(limits=1, user_api="openmp"):
                curves = self._predictor.survival(inputs)
            self._pending.append(_OnTheWay(rows, left, curves, None))

    def before_step(self, step: int, scheduled: Any) -> None:
        """Learn what the scheduler says of the engine and of answers, for the rows from here on."""
        if self._publisher is not None:
            self._publisher.at_step(step, getattr(scheduled, GAUGES_ATTRIBUTE, None))
        self._repetition.update(getattr(scheduled, REPETITION_ATTRIBUTE, {}))

    def on_finished(self, finished: list[FinishedRequest]) -> None:
        """Report requests that ended."""
        for request in finished:
            self._repetition.pop(request.request_id, None)
        if self._publisher is not None:
            self._publisher.finished(finished)

    def take_arrived(self) -> list[EngineForecasts]:
        """Return the forecasts that have reached the host since the last call, and publish them."""
        started = time.thread_time()
        arrived = []
        while self._pending and self._pending[0].has_arrived():
            arrived.append(self._as_forecasts(self._pending.popleft()))
        if self._publisher is not None:
            for forecasts in arrived:
                self._publisher.forecasts(forecasts)
        self._handing_on_seconds += time.thread_time() - started
        return arrived

    def attach_arrived(self, output: Any) -> None:
        """Add the forecasts that have arrived to a step's output, for the scheduler."""
        arrived = self.take_arrived()
        if arrived:
            setattr(output, FORECASTS_ATTRIBUTE, arrived)

    def status(self) -> dict[str, Any]:
        """Return what forecasts and telemetry cost."""
        publisher = self._publisher
        return {
            "forecasts": self._forecasts,
            "handing_on_seconds": self._handing_on_seconds,
            "telemetry_endpoint": publisher.endpoint if publisher else None,
            "telemetry_seconds": publisher.thread_seconds if publisher else 0.0,
        }

    def close(self) -> None:
        """Stop the telemetry."""
        if self._publisher is not None:
            self._publisher.close()

    def _as_forecasts(self, item: _OnTheWay) -> EngineForecasts:
        rows = item.rows
        curves = item.curves.numpy().astype(np.float64)
        return EngineForecasts(
            step=rows.step,
            request_ids=rows.request_ids,
            prompt_tokens=rows.prompt_tokens,
            generated_tokens=rows.generated_tokens,
            tokens_left=item.tokens_left,
            edges=self._edges,
            survival=self._predictor.recalibration.apply(curves),
        )

    def _predict_on_gpu(self, rows: CapturedRows, numbers: torch.Tensor, left: list[int]) -> None:
        n = len(rows.request_ids)
        size = next(size for size in self._sizes if size >= n)
        self._inputs.hidden_states[:n].copy_(rows.hidden_states)
        self._inputs.numbers[:n].copy_(numbers.pin_memory(), non_blocking=True)
        graph, curves = self._graphs[size]
        graph.replay()
        self._copy_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copy_stream):
            on_host = torch.empty((n, curves.shape[1]), dtype=curves.dtype, pin_memory=True)
            on_host.copy_(curves[:n], non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._copy_stream)
        # The next replay overwrites the graph's output: it must wait for this copy.
        torch.cuda.current_stream(self._device).wait_stream(self._copy_stream)
        self._pending.append(_OnTheWay(rows, left, on_host, copied))

    def _capture_graphs(self) -> None:
        with torch.inference_mode():
            for size in reversed(self._sizes):
                inputs = RequestRows(self._inputs.hidden_states[:size], self._inputs.numbers[:size])
                self._predictor.survival(inputs)  # warm up what a capture may not allocate
                torch.cuda.synchronize(self._device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    curves = self._predictor.survival(inputs)
                self._graphs[size] = (graph, curves)


def load_survival(checkpoint: str) -> SurvivalMLP:
    """Load a checkpoint that an engine forecasts with.

    Raises:
        CheckpointError: it is none, or no survival model of hidden states.
    """
    predictor = load_predictor(checkpoint)
    if not isinstance(predictor, SurvivalMLP):
        raise CheckpointError(
            f"{checkpoint} holds a {predictor.kind} model; the engine forecasts with "
            "a survival model: train one with configs/predictor/survival.yaml"
        )
    if predictor.layer == PROMPT_LAYER:
        raise CheckpointError(
            f"{checkpoint} reads prompts, not hidden states: give it as prompt_checkpoint"
        )
    if predictor.layer != "last" and not predictor.layer.isdecimal():
        raise CheckpointError(f"{checkpoint}: no layer is called {predictor.layer!r}")
    return predictor


def load_forecaster(
    config: LiveConfig,
    predictor: SurvivalMLP,
    vllm_config: Any,
    states: tuple[str, float, int],
    device: torch.device,
    generated: dict[str, int],
) -> Forecaster:
    """Return what forecasts in an engine with this configuration of vLLM.

    ``states`` are the layer that is captured, the half-life of its averages, and d; ``generated``
    is kept up to date with the tokens of every running request.

    Raises:
        ModelMismatchError: the predictor was trained on other hidden states.
        TelemetryError: the telemetry's endpoint cannot be used.
    """
    assert config.forecast is not None
    telemetry = config.forecast.telemetry
    identity = identify(vllm_config.model_config.model)
    try:
        predictor.refuse_other_states(identity.name, identity.revision, *states)
    except ModelMismatchError as error:
        raise ModelMismatchError(f"{config.forecast.checkpoint}: {error}") from error
    if predictor.adapter and vllm_config.lora_config is None:
        raise ModelMismatchError(
            f"{config.forecast.checkpoint} has learned from requests of the LoRA adapter "
            f"{predictor.adapter}, and this engine has no adapters: give --enable-lora and "
            "--lora-modules"
        )
    publisher = None
    if telemetry is not None:
        publisher = TelemetryPublisher(
            telemetry,
            rank=vllm_config.parallel_config.data_parallel_rank,
            model=identity.name,
            checkpoint=predictor.fingerprint(),
            k=config.k,
            edges=[int(edge) for edge in predictor.edges.tolist()],
            generated=generated,
        )
    most = vllm_config.scheduler_config.max_num_seqs
    return Forecaster(predictor, device, most, publisher)

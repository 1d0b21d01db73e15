"""Parts that need PyTorch alone: the forecaster, and capture from a replayed CUDA graph."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_check.findings import Findings, Here
from data_collection.capture.capture_config import RecordConfig
from data_collection.capture.capture_hook import CapturedRows, CaptureHook, RowConsumer
from data_collection.capture.recorder import Recorder
from data_collection.capture.requests import FinishedRequest
from data_collection.dataset.dataset_schema import Session
from predictor.evaluation.evaluate import median_latency_ms
from predictor.live.engine_forecasts import EngineForecasts
from predictor.live.forecaster import Forecaster
from predictor.models.checkpoint import load_predictor
from predictor.models.hidden_state_mlp import NO_REPETITION, RequestRows
from predictor.models.survival_mlp import SurvivalMLP
from predictor.training.row_table import load_rows

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "smollm2-135m-instruct"
_BATCH, _STEPS, _PROMPT = 256, 64, 10
_STEPS_ON_CPU = 8
CURVES_WITHIN = 1e-4
"""Of a probability: float32 on both sides, in another order."""
_GOAL_MS = 0.1


class _RecurrentModel:
    """A language model whose every step overwrites the hidden states of the one before.

    h ← norm(h + MLP(h) + E[t]), t ← argmax E h: in one CUDA graph on a GPU, as vLLM runs a
    decode step. What still reads h after the next replay reads another step's.
    """

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        torch.manual_seed(0)
        width = 4 * hidden_size
        self._embedding = torch.randn(1024, hidden_size).to(device)
        self._up = (torch.randn(hidden_size, width) / hidden_size**0.5).to(device)
        self._down = (torch.randn(width, hidden_size) / width**0.5).to(device)
        self.hidden = torch.zeros(_BATCH, hidden_size, device=device)
        self._tokens = torch.zeros(_BATCH, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                self._step()
            torch.cuda.synchronize(device)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._step()
        self.begin()

    def begin(self) -> None:
        self.hidden.zero_()
        self._tokens.copy_(torch.arange(_BATCH))

    def step(self) -> None:
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()

    def _step(self) -> None:
        mixed = torch.relu(self.hidden @ self._up) @ self._down
        mixed = self.hidden + mixed + self._embedding[self._tokens]
        self.hidden.copy_(torch.nn.functional.layer_norm(mixed, mixed.shape[1:]))
        self._tokens.copy_((self.hidden @ self._embedding.T).argmax(dim=1))


@dataclass(frozen=True)
class _Replayed:
    """What a run of the model left; seconds of a step with capture and without."""

    expected: torch.Tensor  # [n_steps, n_requests, d] hidden states, read one step at a time
    with_hook: float
    without_hook: float


def forecaster(findings: Findings, here: Here) -> None:
    """The shipped predictor as the engine runs it, against the CPU; and how long it takes."""
    device = torch.device(here.device)
    model = _RecurrentModel(_predictor().hidden_size, device)
    for _ in range(3):
        model.step()
    hidden = model.hidden.cpu()
    for size in (1, 3, _BATCH):
        made = Forecaster(_predictor(), device, _BATCH, publisher=None)
        hook = CaptureHook(1, [made])
        names = _add_requests(hook, size)
        hook.step_done(names, lambda rows, _behind: model.hidden[rows], [])
        (forecasts,) = _wait_for(made.take_arrived, 1)
        findings.require_at_most(
            f"largest_difference_of_{size}",
            _difference([forecasts], hidden[None, :size]),
            CURVES_WITHIN,
        )
    on_cpu = _prediction_ms(torch.device("cpu"), hidden)
    findings.note(
        predict_256_ms=_prediction_ms(device, hidden),
        predict_256_ms_on_one_core=on_cpu,
        predict_256_ms_goal=_GOAL_MS,
    )


def replayed_capture(findings: Findings, here: Here) -> None:
    """The recorder's rows are those of their step, though the next one overwrites them at once."""
    dataset = here.folder / "dataset"
    predictor = _predictor()
    session = Session(
        name="replayed",
        model="recurrent",
        revision="seed 0",
        hidden_size=predictor.hidden_size,
        dtype="float32",
        k=1,
        engine="PyTorch",
        runner="graph",
        headway="",
        model_dtype="float32",
        started="",
    )
    config = RecordConfig(path=str(dataset), dtype="float32", queue_rows=_BATCH * _STEPS)
    replayed = _replay(here, predictor.hidden_size, [Recorder(config, session)])
    rows = load_rows(dataset)
    findings.require_at_least("rows", len(rows), _BATCH * _steps(here))
    number = np.array([int(name) for name in rows.requests.request_id])[rows.request]
    expected = replayed.expected[rows.generated_tokens, number]
    wrong = (torch.from_numpy(rows.vectors()) != expected).any(dim=1)
    findings.require_at_most("rows_of_another_step", int(wrong.sum()), 0)
    _note_times(findings, replayed)


def replayed_forecasts(findings: Findings, here: Here) -> None:
    """The forecasts, too, are of their step."""
    predictor = _predictor()
    made = Forecaster(_predictor(), torch.device(here.device), _BATCH, publisher=None)
    arrived: list[EngineForecasts] = []
    replayed = _replay(
        here, predictor.hidden_size, [made], lambda: arrived.extend(made.take_arrived())
    )
    arrived += _wait_for(made.take_arrived, _steps(here) - len(arrived))
    findings.require_at_least("steps_forecast", len(arrived), _steps(here))
    worst = _difference(arrived, replayed.expected)
    findings.require_at_most("largest_difference", worst, CURVES_WITHIN)
    _note_times(findings, replayed)


def _predictor() -> SurvivalMLP:
    predictor = load_predictor(str(CHECKPOINT))
    assert isinstance(predictor, SurvivalMLP)
    return predictor


def _steps(here: Here) -> int:
    return _STEPS if here.device == "cuda" else _STEPS_ON_CPU


def _replay(
    here: Here,
    hidden_size: int,
    consumers: list[RowConsumer],
    after_step: Callable[[], None] = lambda: None,
) -> _Replayed:
    """Run the model once step by step, then at full speed without and with capture."""
    device = torch.device(here.device)
    model = _RecurrentModel(hidden_size, device)
    steps = _steps(here)
    expected = torch.empty(steps, _BATCH, hidden_size)
    for step in range(steps):
        model.step()
        expected[step] = model.hidden.cpu()
    model.begin()
    started = time.perf_counter()
    for _ in range(steps):
        model.step()
    _synchronize(device)
    without_hook = time.perf_counter() - started
    model.begin()
    hook = CaptureHook(1, consumers)
    names = _add_requests(hook, _BATCH)

    def gather(positions: list[int], behind: list[int]) -> torch.Tensor:
        rows = torch.tensor(positions, pin_memory=device.type == "cuda")
        return torch.index_select(model.hidden, 0, rows.to(device, non_blocking=True))

    started = time.perf_counter()
    for step in range(steps):
        model.step()
        if step:
            for name in names:
                hook.request_scheduled(name, _PROMPT + step - 1, 1, step)
        hook.step_done(names, gather, [])
        after_step()
    _synchronize(device)
    with_hook = time.perf_counter() - started
    ends = [
        FinishedRequest(name, "stop", _PROMPT, steps, _STEPS, [0] * _PROMPT, [0] * steps, {})
        for name in names
    ]
    hook.step_done((), gather, ends)
    hook.close()
    return _Replayed(expected, with_hook / steps, without_hook / steps)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _add_requests(hook: CaptureHook, count: int) -> list[str]:
    """Let requests end their prefill in the hook's next step."""
    names = [str(number) for number in range(count)]
    for name in names:
        hook.request_added(name, _PROMPT, _STEPS)
        hook.request_scheduled(name, 0, _PROMPT, 0)
    return names


def _wait_for(take: Callable[[], list[EngineForecasts]], count: int) -> list[EngineForecasts]:
    arrived = take()
    while len(arrived) < count:
        arrived += take()
    return arrived


def _difference(forecasts: Sequence[EngineForecasts], hidden: torch.Tensor) -> float:
    """Return by how much the curves of steps differ, at most, from those that the CPU computes."""
    columns = [[one.generated_tokens, one.prompt_tokens, one.tokens_left] for one in forecasts]
    counts = torch.tensor(columns, dtype=torch.float32).transpose(1, 2)
    n_steps, n, _ = counts.shape
    others = torch.tensor([1.0, *NO_REPETITION]).expand(n_steps, n, 3)
    numbers = torch.cat([counts, others], dim=2)
    rows = RequestRows(hidden[:n_steps].flatten(0, 1), numbers.flatten(0, 1))
    expected = _predictor().forecast(rows).survival.reshape(n_steps, n, -1)
    made = np.stack([one.survival for one in forecasts])
    return float(np.abs(made - expected).max())


def _prediction_ms(device: torch.device, hidden: torch.Tensor) -> float:
    """Return how long forecasts of a full batch take until they are on the host."""
    made = Forecaster(_predictor(), device, _BATCH, publisher=None)
    names = [str(number) for number in range(_BATCH)]
    prompts, generated, caps = [_PROMPT] * _BATCH, [0] * _BATCH, [_STEPS] * _BATCH
    warm = [1.0] * _BATCH
    rows = CapturedRows(
        1, names, prompts, generated, caps, warm, [""] * len(names), hidden.to(device)
    )

    def predict() -> None:
        made.on_rows(rows)
        _wait_for(made.take_arrived, 1)

    return median_latency_ms(predict)


def _note_times(findings: Findings, replayed: _Replayed) -> None:
    findings.note(
        step_ms_with_capture=1e3 * replayed.with_hook, step_ms_without=1e3 * replayed.without_hook
    )

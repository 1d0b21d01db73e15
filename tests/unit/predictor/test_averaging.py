"""Forecasts of a request averaged with its earlier ones, offline and in the engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from data_collection.capture.capture_hook import CaptureHook
from data_collection.capture.requests import FinishedRequest
from predictor import RequestRows, SurvivalForecast, SurvivalMLP
from predictor.forecasts.forecast import RunningAverages, average_requests, averaged
from predictor.forecasts.kaplan_meier import Recalibration
from predictor.live.engine_forecasts import EngineForecasts
from predictor.live.forecaster import Forecaster

EDGES = np.array([0.0, 5, 10, 20, 50, 100, 400])
D, PROMPT, CAP = 6, 9, 300


def curves_of(hazards: np.ndarray) -> np.ndarray:
    """[n, bins] in [0, 1] -> [n, edges]."""
    ones = np.ones((len(hazards), 1))
    return np.concatenate([ones, np.cumprod(1 - hazards, axis=1)], axis=1)


hazard_rows = arrays(np.float64, (5, len(EDGES) - 1), elements=st.floats(0.0, 1.0))
gaps = st.lists(st.integers(0, 60), min_size=5, max_size=5)


@given(hazard_rows, hazard_rows, gaps, st.floats(1.0, 500.0))
def test_an_average_is_a_survival_curve_between_its_parts(
    before: np.ndarray, now: np.ndarray, since: list[int], half_life: float
) -> None:
    earlier, current = curves_of(before), curves_of(now)
    found = averaged(EDGES, earlier, np.array(since), current, half_life)
    aged = SurvivalForecast.new(EDGES, earlier).aged(since).at(EDGES)
    SurvivalForecast.new(EDGES, found)  # starts at 1 and never rises, or it is refused
    assert (found >= np.minimum(aged, current) - 1e-12).all()
    assert (found <= np.maximum(aged, current) + 1e-12).all()
    only_aged = averaged(EDGES, earlier, np.array(since), current, half_life=1e18)
    np.testing.assert_allclose(only_aged, aged, rtol=1e-12, atol=1e-12)


def test_an_earlier_forecast_counts_half_after_the_half_life() -> None:
    memoryless = np.exp(-EDGES / 40)[None]
    certain = np.array([[1.0, 1, 1, 1, 1, 1, 1]])
    fine = np.arange(0, 401.0)
    found = averaged(
        fine, np.exp(-fine / 40)[None], np.array([30]), np.ones((1, 401)), half_life=30
    )
    np.testing.assert_allclose(found[0, :300], (np.exp(-fine[:300] / 40) + 1) / 2)
    same = averaged(EDGES, memoryless, np.array([0]), certain, half_life=30)
    # A row computed again changes nothing, but that no request passes the last edge.
    np.testing.assert_allclose(same[:, :-1], memoryless[:, :-1])
    assert same[0, -1] == 0


@given(
    hazard_rows,
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 90)), min_size=5, max_size=5, unique=True),
)
def test_rows_in_any_order_are_averaged_as_they_were_when_they_came(
    hazards: np.ndarray, places: list[tuple[int, int]]
) -> None:
    curves = curves_of(hazards)
    request, generated = np.array(places).T
    offline = average_requests(EDGES, curves, request, generated, 30.0)
    running = RunningAverages(EDGES, 30.0)
    for i in sorted(range(5), key=lambda i: (places[i][1], places[i][0])):
        found = running.take([str(request[i])], [int(generated[i])], curves[i : i + 1])
        np.testing.assert_array_equal(found[0], offline[i])
    assert len(running) == len(set(request.tolist()))
    running.forget(["0", "1", "never seen"])
    assert len(running) == 0


# The forecaster in the engine's step, against the same rows offline.


def predictor() -> SurvivalMLP:
    torch.manual_seed(0)
    made = SurvivalMLP(
        edges=EDGES.astype(int).tolist(),
        averaging_half_life=30.0,
        model="m",
        model_revision="r",
        hidden_size=D,
        k=20,
        widths=[16],
        inputs=["generated_tokens", "prompt_tokens"],
    )
    made.recalibrate(Recalibration([0.0, 0.5, 1.0], [0.0, 0.4, 1.0]))
    return made.eval()


class Engine:
    """What an engine tells the hook of its requests, and what comes of it."""

    def __init__(self, k: int) -> None:
        self.forecaster = Forecaster(predictor(), torch.device("cpu"), 8, publisher=None)
        self.hook = CaptureHook(k, [self.forecaster])
        self.made: list[EngineForecasts] = []

    def step(self, scheduled: dict[str, tuple[int, int, int]], ended: Sequence[str] = ()) -> None:
        """Compute tokens: name -> (computed before, scheduled, generated tokens that exist)."""
        for name, tokens in scheduled.items():
            self.hook.request_scheduled(name, *tokens)
        states = torch.stack([state(name, c + s - PROMPT) for name, (c, s, _) in scheduled.items()])
        finished = [FinishedRequest(name, "stop", PROMPT, 9, CAP, None, [], {}) for name in ended]
        self.hook.step_done(list(scheduled), lambda rows, _behind: states[rows], finished)
        self.made += self.forecaster.take_arrived()

    def curve(self, name: str, n: int) -> npt.NDArray[Any]:
        """Return the last forecast of a request at n generated tokens."""
        found: list[npt.NDArray[Any]] = [
            made.survival[i]
            for made in self.made
            for i, one in enumerate(made.request_ids)
            if (one, made.generated_tokens[i]) == (name, n)
        ]
        return found[-1]


def state(name: str, n: int) -> torch.Tensor:
    """Return the hidden state of a request at n tokens: the same whenever it is computed."""
    number = sum(name.encode())
    return torch.randn(D, generator=torch.Generator().manual_seed(1000 * number + n))


def offline(name: str, places: Sequence[int]) -> npt.NDArray[Any]:
    """Return the curves of a request's rows, one after another."""
    hidden = torch.stack([state(name, n) for n in places])
    counts = torch.tensor([[n, PROMPT, CAP - n] for n in places], dtype=torch.float32)
    request = torch.zeros(len(places), dtype=torch.int64)
    return predictor().forecast(RequestRows(hidden, counts, request)).survival


def test_requests_of_an_adapter_that_is_not_known_have_no_forecast() -> None:
    engine = Engine(k=2)
    for name, adapter in {"a": "", "b": "poet", "c": ""}.items():
        engine.hook.request_added(name, PROMPT, CAP, adapter=adapter)
    engine.step({"b": (0, PROMPT, 0)})
    assert not engine.made
    engine.step({"a": (0, PROMPT, 0), "b": (PROMPT, 1, 1), "c": (0, PROMPT, 0)})
    assert [made.request_ids for made in engine.made] == [["a", "c"]]
    for name in ("a", "c"):
        np.testing.assert_allclose(engine.curve(name, 0), offline(name, [0])[-1], atol=1e-6)


def test_the_engine_averages_as_an_offline_pass_over_the_same_rows() -> None:
    engine = Engine(k=2)
    for name in ("a", "b"):
        engine.hook.request_added(name, PROMPT, CAP)
    engine.step({"a": (0, PROMPT, 0)})
    engine.step({"a": (PROMPT, 1, 1), "b": (0, 4, 0)})  # b's prompt in two parts
    engine.step({"a": (PROMPT + 1, 1, 2), "b": (4, PROMPT - 4, 0)})
    for n in range(3, 8):
        engine.step({"a": (PROMPT + n - 1, 1, n), "b": (PROMPT + n - 3, 1, n - 2)})
    for name, places in (("a", [0, 1, 3, 5, 7]), ("b", [0, 1, 3, 5])):
        for n, expected in zip(places, offline(name, places), strict=True):
            np.testing.assert_allclose(engine.curve(name, n), expected, atol=1e-6)


@given(st.sampled_from([0, 40]), st.lists(st.booleans(), min_size=2, max_size=5))
def test_a_request_goes_on_with_its_average(began: int, preempted: list[bool]) -> None:
    """It began here or on another engine; a preempted one is computed again, in two parts."""
    engine = Engine(k=1)
    engine.hook.request_added("a", PROMPT, CAP)
    engine.step({"a": (PROMPT + began - 1, 1, began) if began else (0, PROMPT, 0)})
    for n, again in enumerate(preempted, start=began + 1):
        if again:
            engine.step({"a": (0, 5, n)})
        engine.step({"a": (5, PROMPT + n - 5, n) if again else (PROMPT + n - 1, 1, n)})
    places = range(began, began + len(preempted) + 1)
    for n, expected in zip(places, offline("a", places), strict=True):
        np.testing.assert_allclose(engine.curve("a", n), expected, atol=1e-6)


def test_a_later_request_of_the_same_name_knows_nothing_of_the_first() -> None:
    engine = Engine(k=1)
    engine.hook.request_added("a", PROMPT, CAP)
    engine.step({"a": (0, PROMPT, 0)})
    engine.step({"a": (PROMPT, 1, 1)})
    engine.hook.request_added("b", PROMPT, CAP)
    engine.step({"b": (0, PROMPT, 0)}, ended=["a"])
    engine.hook.request_added("a", PROMPT, CAP)
    engine.step({"a": (0, PROMPT, 0)})
    np.testing.assert_allclose(engine.curve("a", 0), offline("a", [0])[0], atol=1e-6)
    assert engine.forecaster._averages is not None
    assert len(engine.forecaster._averages) == 2  # what ended is not kept


def test_without_a_half_life_each_row_speaks_for_itself() -> None:
    places = [0, 20, 40]
    alone = SurvivalMLP(
        edges=[0, 5, 20], model="m", model_revision="r", hidden_size=D, k=20, widths=[16]
    )
    hidden = torch.stack([state("a", n) for n in places])
    counts = torch.tensor([[n, PROMPT, CAP - n] for n in places], dtype=torch.float32)
    rows = RequestRows(hidden, counts, torch.zeros(3, dtype=torch.int64))
    np.testing.assert_array_equal(
        alone.forecast(rows).survival, alone.forecast(rows._replace(request=None)).survival
    )
    assert alone.running_averages() is None

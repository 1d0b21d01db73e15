"""What forecasts in an engine's step, against the same rows offline."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_collection.capture.capture_hook import CaptureHook
from predictor import RequestRows, SurvivalMLP
from predictor.forecasts.kaplan_meier import Recalibration
from predictor.live.engine_forecasts import EngineForecasts
from predictor.live.forecaster import Forecaster

EDGES = [0, 5, 10, 20, 50, 100, 400]
D, PROMPT, CAP = 6, 9, 300


def predictor() -> SurvivalMLP:
    torch.manual_seed(0)
    made = SurvivalMLP(
        edges=EDGES,
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

    def step(self, scheduled: dict[str, tuple[int, int, int]]) -> None:
        """Compute tokens: name -> (computed before, scheduled, generated tokens that exist)."""
        for name, tokens in scheduled.items():
            self.hook.request_scheduled(name, *tokens)
        states = torch.stack([state(name, c + s - PROMPT) for name, (c, s, _) in scheduled.items()])
        self.hook.step_done(list(scheduled), lambda rows, _behind: states[rows], [])
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
    """Return the curves of a request's rows."""
    hidden = torch.stack([state(name, n) for n in places])
    counts = torch.tensor([[n, PROMPT, CAP - n] for n in places], dtype=torch.float32)
    return predictor().forecast(RequestRows(hidden, counts)).survival


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


def test_the_engine_forecasts_as_an_offline_pass_over_the_same_rows() -> None:
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
def test_a_request_is_forecast_wherever_it_began(began: int, preempted: list[bool]) -> None:
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

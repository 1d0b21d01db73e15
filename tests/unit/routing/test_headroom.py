"""The chance of an overflow that headroom accepts, and that requests as they were recorded have."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from routing_views import cluster

from predictor.forecasts.forecast import SurvivalForecast
from predictor.forecasts.forecast_recording import ForecastRecording, read_recording
from predictor.forecasts.kaplan_meier import KaplanMeierCurve
from rescheduler.cluster.cluster_view import ClusterView
from rescheduler.routing import Headroom

FloatArray = npt.NDArray[np.float64]

RECORDINGS = Path(__file__).parents[3] / "recordings"
DRAWS = 4000
CLUSTERS = 16


@pytest.fixture(scope="module")
def recording() -> ForecastRecording:
    return read_recording(RECORDINGS / "smollm2-135m-instruct.parquet")


def recorded(made: ForecastRecording, rows: npt.ArrayLike, age: npt.ArrayLike) -> SurvivalForecast:
    """What was forecast of requests that had run so many tokens."""
    rows, age = np.asarray(rows), np.asarray(age)
    renewed = np.minimum(age // made.interval, made.n_rows[rows] - 1)
    limit = made.max_tokens[rows] - renewed * made.interval
    curves = made.curves[made.first_row[rows] + renewed]
    return SurvivalForecast.new(made.edges, curves, limit).aged(age - renewed * made.interval)


def by_age(made: ForecastRecording, rows: npt.ArrayLike, age: npt.ArrayLike) -> SurvivalForecast:
    """What is known of requests of which one knows their age alone."""
    curve = KaplanMeierCurve.estimate(made.output, made.cut)
    edges = np.arange(0.0, made.output.max() + 1, 8)
    survival = np.tile(curve.at(edges), (np.size(rows), 1))
    survival[:, -1] = 0.0
    return SurvivalForecast.new(edges, survival).aged(np.asarray(age))


FORECASTS = {"recorded": recorded, "age": by_age}


def one_instance(
    made: ForecastRecording, kind: str, running: int, generator: np.random.Generator
) -> ClusterView:
    """So many requests at random ages, as one finds them, and a new one."""
    rows = generator.choice(len(made), running, p=made.output / made.output.sum())
    age = (generator.uniform(size=running) * made.output[rows]).astype(np.int64)
    new = generator.integers(len(made), size=1)
    view = cluster([[(1, 1)] * running], [(1, 1)])
    return replace(
        view,
        prompt_tokens=made.prompt[rows],
        generated_tokens=age,
        forecast=FORECASTS[kind](made, rows, age),
        waiting_prompt_tokens=made.prompt[new],
        waiting_generated_tokens=np.zeros(1, dtype=np.int64),
        waiting_forecast=FORECASTS[kind](made, new, [0]),
    )


def holding(view: ClusterView, capacity: int) -> ClusterView:
    return replace(view, kv_capacity=np.array([capacity]))


def least_capacity(view: ClusterView, policy: Headroom) -> int:
    """The smallest KV cache with which the policy places the new request."""
    low, high = 0, 1_000_000
    while high - low > 1:
        middle = (low + high) // 2
        placed = policy.assign(holding(view, middle)).instance[0] == 0
        low, high = (low, middle) if placed else (middle, high)
    return high


def looked_at(view: ClusterView, policy: Headroom) -> tuple[FloatArray, FloatArray]:
    """Survival and tokens of all requests, [n, P], at the steps until half the load has ended."""
    assert view.forecast is not None and view.waiting_forecast is not None
    points = policy.points()
    survival = np.vstack([view.forecast.at(points), view.waiting_forecast.at(points)])
    context = np.append(view.context_tokens, view.waiting_prompt_tokens)
    tokens = context[:, None] + points.astype(np.float64)
    lasts = (survival * tokens).sum(axis=0) >= 0.5 * tokens.sum(axis=0)
    last = len(points) if lasts.all() else int(lasts.argmin())
    return survival[:, :last], tokens[:, :last]


def accepted(tokens: FloatArray, policy: Headroom) -> FloatArray:
    """The chance of an overflow that is worth it, [P]: ε a (h + 1) / (n β (s + h))."""
    gained: FloatArray = tokens[-1] - tokens[-1, 0] + 1
    return policy.epsilon * gained / (len(tokens) * policy.prefill_cost * tokens[-1])


def overflows(
    survival: FloatArray, tokens: FloatArray, capacity: float, generator: np.random.Generator
) -> tuple[FloatArray, float]:
    """How often the load passes the capacity: at each step, [P], and at any."""
    lasting = generator.uniform(size=(DRAWS, len(survival), 1))
    load = np.zeros((DRAWS, survival.shape[1]))
    for i in range(len(survival)):
        load += (lasting[:, i] < survival[i]) * tokens[i]
    over = load > capacity
    return over.mean(axis=0), float(over.any(axis=1).mean())


@pytest.mark.parametrize("kind", FORECASTS)
@pytest.mark.parametrize("running", [1, 2, 5, 20, 60])
def test_the_cache_overflows_no_more_often_than_accepted(
    recording: ForecastRecording, kind: str, running: int
) -> None:
    generator = np.random.default_rng((running, len(kind)))
    for epsilon in (0.02, 0.1, 0.4):
        # A token computed again counts as one gained, so that ε bounds the chance itself too.
        policy = Headroom(epsilon=epsilon, prefill_cost=1 / (running + 1))
        at_any, wasted = [], []
        for _ in range(CLUSTERS):
            view = one_instance(recording, kind, running, generator)
            survival, tokens = looked_at(view, policy)
            capacity = least_capacity(view, policy)
            at_a_step, within = overflows(survival, tokens, capacity, generator)
            most = accepted(tokens, policy)
            assert (at_a_step <= most + 5 * np.sqrt(most / DRAWS)).all()
            at_any.append(within)
            wasted.append(1 - (survival * tokens).sum(axis=0).max() / capacity)
        assert np.mean(at_any) <= epsilon
        assert np.mean(wasted) < 0.6

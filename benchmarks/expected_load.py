"""What it takes to know the expected load of a large cluster, on one core.

    python -m benchmarks.expected_load [--quick] --json OUT

256 instances run 64 requests each, in no order, and are looked at over 128 decode steps. The
curves, on the grid of a predictor, are random: only time is measured. Reported, as medians of
this thread's CPU time with compiled code in place: one full pass; the same sum by
`SurvivalForecast.at`, added up in numpy, and how many times longer it takes (``ratio``).
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.support.report import arguments, report
from predictor.forecasts.expected_load import ExpectedLoad, expected_load
from predictor.forecasts.forecast import SurvivalForecast
from predictor.forecasts.kaplan_meier import survival_edges

N_INSTANCES, REQUESTS_PER_INSTANCE = 256, 64
HORIZON = 128
LIMIT = 8192
PREDICTED_EVERY = 20

IntArray = npt.NDArray[np.int64]


def main() -> None:
    """Measure, and print the medians."""
    options = arguments("the expected load of 256 instances with 64 requests each").parse_args()
    passes, naive_passes = (5, 1) if options.quick else (200, 5)
    report("expected_load", measure(passes, naive_passes), options.json)


def measure(passes: int, naive_passes: int) -> dict[str, float]:
    """Time full passes and the plain sum on one random cluster."""
    forecast, instance, context = random_cluster(np.random.default_rng(0))
    load = expected_load(forecast, instance, context, N_INSTANCES, HORIZON)
    plain = plain_sum(forecast, instance, context)
    np.testing.assert_allclose(load.mean, plain.mean, rtol=1e-9)

    full = median_seconds(
        lambda _: expected_load(forecast, instance, context, N_INSTANCES, HORIZON), passes
    )
    naive = median_seconds(lambda _: plain_sum(forecast, instance, context), naive_passes)

    return {
        "instances": N_INSTANCES,
        "requests": len(forecast),
        "horizon": HORIZON,
        "edges": len(forecast.edges),
        "full_pass_ms": 1e3 * full,
        "naive_ms": 1e3 * naive,
        "ratio": naive / full,
    }


def random_cluster(
    generator: np.random.Generator,
) -> tuple[SurvivalForecast, IntArray, IntArray]:
    """Return forecasts of n requests, the instance of each [n], and its context [n]."""
    n_requests = N_INSTANCES * REQUESTS_PER_INSTANCE
    edges = survival_edges(LIMIT)
    hazards = generator.uniform(0, 0.12, (n_requests, len(edges) - 1))
    start = np.ones((n_requests, 1))
    curves = np.cumprod(np.concatenate([start, 1 - hazards], axis=1), axis=1)
    limit = generator.integers(PREDICTED_EVERY + 1, LIMIT, n_requests)
    age = generator.integers(0, PREDICTED_EVERY, n_requests)
    instance = np.repeat(np.arange(N_INSTANCES), REQUESTS_PER_INSTANCE)
    return (
        SurvivalForecast.new(edges, curves, limit).aged(age),
        generator.permutation(instance),
        generator.integers(1, LIMIT, n_requests),
    )


def plain_sum(forecast: SurvivalForecast, instance: IntArray, context: IntArray) -> ExpectedLoad:
    """Return the same load by `SurvivalForecast.at`, as numpy users would write it."""
    steps = np.arange(HORIZON + 1)
    survival = forecast.at(steps)
    tokens = context[:, None] + steps
    mean, variance = np.zeros((2, N_INSTANCES, HORIZON + 1))
    np.add.at(mean, instance, survival * tokens)
    np.add.at(variance, instance, survival * (1 - survival) * tokens**2)
    return ExpectedLoad(mean, variance, np.bincount(instance, minlength=N_INSTANCES))


def median_seconds(call: Callable[[int], Any], repeats: int) -> float:
    """Return the median CPU time of the calls with 0, 1, .. in this thread."""
    seconds = []
    for number in range(repeats):
        start = time.thread_time()
        call(number)
        seconds.append(time.thread_time() - start)
    return float(np.median(seconds))


if __name__ == "__main__":
    main()

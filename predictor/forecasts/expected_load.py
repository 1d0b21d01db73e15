"""Expected KV load of every instance over the decode steps to come, and its variance."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

import predictor.compilation  # noqa: F401  (says where machine code is kept)
from predictor.forecasts.curve import EXCESS, draw_steps
from predictor.forecasts.forecast import Forecast, SurvivalForecast

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedLoad:
    r"""The load that the requests on each instance are expected to be h decode steps from now.

    A request i with c_i tokens in its KV cache holds c_i + h of them at step h if it still
    runs, with probability S_i(h), and none otherwise. Requests end independently, so that

    .. math::
        \Lambda_g(h) &= \sum_{i \text{ on } g} S_i(h)\,(c_i + h) \\
        V_g(h) &= \sum_{i \text{ on } g} S_i(h)\,\big(1 - S_i(h)\big)\,(c_i + h)^2 .

    Source: BF-IO lookahead, paper 'expected load'; Headway's own.

    Attributes:
        mean: [n_instances, horizon + 1] Λ, in tokens.
        variance: [n_instances, horizon + 1] V, in tokens².
        requests: [n_instances] how many requests are counted.
    """

    mean: FloatArray
    variance: FloatArray
    requests: IntArray


def expected_load(
    forecast: Forecast,
    instance: npt.NDArray[np.integer[Any]],
    context_tokens: npt.NDArray[np.integer[Any]],
    n_instances: int,
    horizon: int,
) -> ExpectedLoad:
    """Return Λ and V of every instance at the decode steps h = 0 .. horizon, see `ExpectedLoad`.

    S is as ``forecast.at`` gives it. One pass on one core, summed in float64; other threads
    may run meanwhile. A `SurvivalForecast` is walked bin by bin, any other forecast is first
    laid on a grid of every token to the horizon. The first call compiles, for some seconds,
    unless an earlier process has.

    Args:
        forecast: of the n_requests running requests.
        instance: [n_requests] where each runs, from 0.
        context_tokens: [n_requests] c, tokens in its KV cache now.
        n_instances: instances in the cluster, with or without requests.
        horizon: the last decode step.

    Raises:
        ValueError: arrays of another length than the forecast or not of integers, an instance
            outside the cluster, a negative context, number of instances or horizon.
    """
    if horizon < 0 or n_instances < 0:
        raise ValueError(f"no load of {n_instances} instances over {horizon} steps")
    where = _per_request("instance", instance, len(forecast))
    context = _per_request("context_tokens", context_tokens, len(forecast))
    if len(where) and not 0 <= where.min() <= where.max() < n_instances:
        wrong = where[(where < 0) | (where >= n_instances)][0]
        raise ValueError(f"instance {wrong} is not one of {n_instances}")
    if (context < 0).any():
        raise ValueError(f"a request cannot have a context of {context.min()} tokens")
    mean, variance = np.zeros((2, n_instances, horizon + 1))
    if not isinstance(forecast, SurvivalForecast):
        forecast = forecast.on_grid(np.arange(horizon + 2))
    _accumulate(*forecast.arrays(), where, context, mean, variance)
    return ExpectedLoad(mean, variance, np.bincount(where, minlength=n_instances))


@njit(cache=True, nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def _accumulate(
    edges: FloatArray,
    survival: npt.NDArray[np.floating[Any]],
    age: FloatArray,
    limit: FloatArray,
    instance: IntArray,
    context_tokens: IntArray,
    mean: FloatArray,
    variance: FloatArray,
) -> None:
    """Add what each request contributes to Λ and V of its instance, in place."""
    n_steps = mean.shape[1]
    curve = np.ones(n_steps + EXCESS)
    for i in range(len(instance)):
        stop = draw_steps(edges, survival[i], age[i], limit[i], n_steps, curve)
        g = instance[i]
        context = float(context_tokens[i])
        for h in range(stop):
            tokens = context + h
            expected = curve[h] * tokens
            mean[g, h] += expected
            variance[g, h] += expected * (tokens - expected)


def _per_request(name: str, numbers: npt.ArrayLike, n_requests: int) -> IntArray:
    array = np.asarray(numbers)
    if array.shape != (n_requests,):
        raise ValueError(f"{name} has shape {array.shape}, the forecast is of {n_requests}")
    if n_requests and array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, not {array.dtype}")
    return np.ascontiguousarray(array, dtype=np.int64)

"""Expected KV load of every instance over the decode steps to come, and its variance."""

from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

import predictor.compilation  # noqa: F401  (says where machine code is kept)
from predictor.forecasts.forecast import Forecast, ForecastError, SurvivalForecast

__all__ = ["ExpectedLoad", "expected_load"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_LANES = 8
"""Doubles in the widest vector register of a CPU, a power of two."""
_CACHE_LINE = 64
"""Bytes that memory delivers at once."""
_AHEAD = 4
"""Requests between asking for a curve and reading it."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedLoad:
    r"""The load that the requests on each instance are expected to be h decode steps from now.

    A request i with c_i tokens in its KV cache holds c_i + h of them at step h if it still
    runs, with probability S_i(h), and none otherwise. Requests end independently, so that

    .. math::
        \Lambda_g(h) &= \sum_{i \text{ on } g} S_i(h)\,(c_i + h) \\
        V_g(h) &= \sum_{i \text{ on } g} S_i(h)\,\big(1 - S_i(h)\big)\,(c_i + h)^2 .

    `add`, `remove` and `advance` change one request in place, in O(horizon). They round as any
    sum in float64 does: after n of them a value is off by about n · 10⁻¹⁶ of the largest it
    had, never below 0, and exactly 0 on an instance without requests.

    Source: BF-IO lookahead, paper 'expected load'; Headway's own.

    Attributes:
        mean: [n_instances, horizon + 1] Λ, in tokens.
        variance: [n_instances, horizon + 1] V, in tokens².
        requests: [n_instances] how many requests are counted.
    """

    mean: FloatArray
    variance: FloatArray
    requests: IntArray

    def add(self, instance: int, context_tokens: int, forecast: Forecast) -> None:
        """Count one more request on an instance.

        Args:
            instance: where it runs, from 0.
            context_tokens: c, tokens in its KV cache now.
            forecast: of this one request, as of now.

        Raises:
            ValueError: no such instance, a negative context, or a forecast of more or fewer
                requests than one.
        """
        self._check(instance, context_tokens, forecast)
        self._accumulate(instance, context_tokens, forecast, 1.0)
        self.requests[instance] += 1

    def remove(self, instance: int, context_tokens: int, forecast: Forecast) -> None:
        """Undo the `add` that had the same arguments.

        Raises:
            ValueError: as `add`, or no request is on the instance.
        """
        self._check(instance, context_tokens, forecast)
        if self.requests[instance] == 0:
            raise ValueError(f"no request is on instance {instance}: nothing to remove")
        self._accumulate(instance, context_tokens, forecast, -1.0)
        self.requests[instance] -= 1
        for rows in (self.mean, self.variance):
            if self.requests[instance] == 0:
                rows[instance] = 0.0
            else:
                np.maximum(rows[instance], 0.0, out=rows[instance])

    def advance(self, instance: int, context_tokens: int, forecast: Forecast, tokens: int) -> None:
        """Let one request generate tokens and still run: its context grows, its curve ages.

        Args:
            instance: where it runs, from 0.
            context_tokens: its context before these tokens, as in its `add`.
            forecast: of this one request before these tokens, as in its `add`.
            tokens: generated since.

        Raises:
            ValueError: as `remove`, or ``tokens`` is negative.
        """
        aged = forecast.aged(tokens)
        self.remove(instance, context_tokens, forecast)
        self.add(instance, context_tokens + tokens, aged)

    def copy(self) -> "ExpectedLoad":
        """Return a copy that shares no array: a what-if that leaves this one as it is."""
        return ExpectedLoad(self.mean.copy(), self.variance.copy(), self.requests.copy())

    def _check(self, instance: int, context_tokens: int, forecast: Forecast) -> None:
        if not 0 <= instance < len(self.requests):
            raise ValueError(f"instance {instance} is not one of {len(self.requests)}")
        if context_tokens < 0:
            raise ValueError(f"a request cannot have a context of {context_tokens} tokens")
        if len(forecast) != 1:
            raise ValueError(f"one request changes, but the forecast is of {len(forecast)}")

    def _accumulate(
        self, instance: int, context_tokens: int, forecast: Forecast, sign: float
    ) -> None:
        _accumulate(
            *_curves(forecast, self.mean.shape[1] - 1),
            np.array([instance], dtype=np.int64),
            np.array([context_tokens], dtype=np.int64),
            sign,
            self.mean,
            self.variance,
        )


def expected_load(
    forecast: Forecast,
    instance: npt.NDArray[np.integer[Any]],
    context_tokens: npt.NDArray[np.integer[Any]],
    n_instances: int,
    horizon: int,
) -> ExpectedLoad:
    r"""Return Λ and V of every instance at the decode steps h = 0 .. horizon.

    .. math:: \Lambda_g(h) = \sum_i S_i(h)(c_i + h), \quad
              V_g(h) = \sum_i S_i(h)\big(1 - S_i(h)\big)(c_i + h)^2

    with S as ``forecast.at`` gives it. One pass on one core, summed in float64; other threads
    may run meanwhile. A `SurvivalForecast` is walked bin by bin, any other forecast is first
    laid on a grid of every token to the horizon. The first call compiles, for some seconds,
    unless an earlier process has.

    Source: BF-IO lookahead, paper 'expected load'; Headway's own.

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
    _accumulate(*_curves(forecast, horizon), where, context, 1.0, mean, variance)
    return ExpectedLoad(mean, variance, np.bincount(where, minlength=n_instances))


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(_typing: Any, address: Any) -> Any:
    """Ask for the cache line at an address without waiting for it."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        read, keep, data = flag(0), flag(3), flag(1)
        builder.call(prefetch, [builder.inttoptr(arguments[0], pointer), read, keep, data])

    return types.void(address), emit


@njit(cache=True, nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def _accumulate(
    edges: FloatArray,
    survival: npt.NDArray[np.floating[Any]],
    age: FloatArray,
    limit: FloatArray,
    instance: IntArray,
    context_tokens: IntArray,
    sign: float,
    mean: FloatArray,
    variance: FloatArray,
) -> None:
    """Add ``sign`` times what each request contributes to Λ and V of its instance.

    Seen from now, S of a request is a line from (0, 1) to its first edge yet to come, and from
    each edge to the next. The lines are drawn one after the other into ``curve``, so that the
    loop over h has neither search nor division. The curves of a cluster outgrow the cache, so
    that those of the requests ahead are asked for early. Shapes as in `SurvivalForecast` and
    `expected_load`.
    """
    n_requests = len(instance)
    if n_requests == 0:
        return
    n_steps = mean.shape[1]
    address, row_bytes = np.int64(survival.ctypes.data), survival.shape[1] * survival.itemsize
    read_from = (np.searchsorted(edges, age.min(), "right") - 1) * survival.itemsize
    read_to = (np.searchsorted(edges, age.max() + n_steps) + 1) * survival.itemsize
    curve = np.ones(n_steps + _LANES)
    for i in range(n_requests):
        ahead = address + min(i + _AHEAD, n_requests - 1) * row_bytes
        for offset in range(read_from, read_to + _CACHE_LINE, _CACHE_LINE):
            _prefetch(ahead + offset)
        left = max(min(limit[i], edges[-1]) - age[i], 1.0)
        stop = ceil(min(left, float(n_steps)))  # S(h) = 0 from here on
        right = 0
        alive = 1.0
        if stop > 1:
            right = np.searchsorted(edges, age[i], "right")
            low = np.float64(survival[i, right - 1])
            part = (age[i] - edges[right - 1]) / (edges[right] - edges[right - 1])
            alive = low + part * (survival[i, right] - low)
            if not alive > 0.0:
                stop = 1
        h = 1
        here, value_here = 0.0, 1.0
        while h < stop:
            edge = edges[right] - age[i]
            value_at_edge = min(survival[i, right] / alive, 1.0)
            slope = (value_at_edge - value_here) / (edge - here)
            first = value_here + slope * (h - here)
            end = ceil(min(edge, float(stop)))
            # Whole registers are faster than a remainder; the next line overwrites the excess.
            for step in range((end - h + _LANES - 1) & -_LANES):
                # Unsigned, or the compiler has to allow for indices that count from the end.
                curve[np.uint64(h) + np.uint64(step)] = first + slope * step
            h = end
            here, value_here = edge, value_at_edge
            right += 1
        g = instance[i]
        context = float(context_tokens[i])
        for h in range(stop):
            tokens = context + h
            expected = curve[h] * tokens
            mean[g, h] += sign * expected
            variance[g, h] += sign * (expected * (tokens - expected))


def _curves(
    forecast: Forecast, horizon: int
) -> tuple[FloatArray, npt.NDArray[np.floating[Any]], FloatArray, FloatArray]:
    """Return edges, survival, age and limit as `_accumulate` reads them: it checks no bounds."""
    if not isinstance(forecast, SurvivalForecast):
        forecast = forecast.on_grid(np.arange(horizon + 2))
    kept = forecast.survival.dtype if forecast.survival.dtype == np.float32 else np.float64
    edges = np.ascontiguousarray(forecast.edges, dtype=np.float64)
    survival = np.ascontiguousarray(forecast.survival, dtype=kept)
    age = np.ascontiguousarray(forecast.age, dtype=np.float64)
    limit = np.ascontiguousarray(forecast.limit, dtype=np.float64)
    if survival.shape != (len(age), len(edges)) or limit.shape != age.shape:
        raise ForecastError(
            f"survival has shape {survival.shape}, with {len(edges)} edges, {len(age)} ages and "
            f"{len(limit)} limits"
        )
    return edges, survival, age, limit


def _per_request(name: str, numbers: npt.ArrayLike, n_requests: int) -> IntArray:
    array = np.asarray(numbers)
    if array.shape != (n_requests,):
        raise ValueError(f"{name} has shape {array.shape}, the forecast is of {n_requests}")
    if n_requests and array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, not {array.dtype}")
    return np.ascontiguousarray(array, dtype=np.int64)

r"""The load ahead: what runs, what follows once there is room for it, and when that is.

Requests that run end by their survival curves. Those that wait start in their order, each on the
instance whose expected number of requests and of context tokens leaves room for it first, and
count there from then on:

.. math::

    N_g(h) &= \sum_{i \text{ on } g} S_i(h - s_i) \\
    \Lambda_g(h) &= \sum_{i \text{ on } g} S_i(h - s_i)\,(c_i + h - s_i) \\
    s_j &= \min_g \min \{ h : N_g(h) + 1 \le B_g,\; \Lambda_g(h) + c_j \le K_g \}

with :math:`s = 0` of those that run. It is a fluid: an expected half of a place that is free is no
place. Requests that are yet to come are not in it.

Source: `predictor.forecasts.expected_load` without what waits; the list scheduling is Graham's.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled_core
from predictor.forecasts.forecast import Forecast, PointForecast

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

STEPS = np.unique(np.concatenate([np.arange(8), np.geomspace(8, 2**16, 64).round()]))
"""Decode steps at which the load is known, [P]; between them it is taken to be linear."""

_LEFT = 0.1
ANYWHERE = -1
"""In place of the instance that a waiting request is on already."""


@dataclass(frozen=True, slots=True)
class Queue:
    """Requests that wait, in the order in which they will start.

    Attributes:
        survival: [n, P] probability that each has more tokens to generate than `STEPS`.
        context: [n] tokens that each needs to start.
        instance: [n] where each waits; `ANYWHERE` if it may go to any.
    """

    survival: FloatArray
    context: IntArray
    instance: IntArray


@dataclass(frozen=True, slots=True)
class LoadAhead:
    """The load of G instances at P points ahead, and when n waiting requests start.

    Attributes:
        load: [4, G, P] expected number of requests, the variance of that, expected context tokens,
            and the variance of these, lengths being independent.
        start: [n] decode steps until each starts; infinite: not within the last point.
        instance: [n] where; `ANYWHERE` if not within the last point.
        slots: [G] B.
        capacity: [G] K.
        takes: [G] whether an instance takes further requests.
        drained: [G] decode steps until all that runs now has ended, with a probability of 0.9 or
            so: an expected 0.1 requests are left.
    """

    load: FloatArray
    start: FloatArray
    instance: IntArray
    slots: FloatArray
    capacity: FloatArray
    takes: npt.NDArray[np.bool_]
    drained: FloatArray

    def next_start(self, context: int) -> float:
        """Return the steps until one more request would start that comes after all others."""
        return self._next(context)[0]

    def with_one_more(self, survival: FloatArray, context: int) -> "LoadAhead":
        """Return the load with one more request that waits; this one is not to be used any more.

        The probability that it has more tokens to generate than `STEPS` is ``survival``, [P].
        """
        start, g = self._next(context)
        if start < np.inf:
            _add(STEPS, survival, float(context), start, self.load, g)
        return replace(
            self, start=np.append(self.start, start), instance=np.append(self.instance, g)
        )

    def _next(self, context: int) -> tuple[float, int]:
        start, where = np.inf, ANYWHERE
        for g in np.flatnonzero(self.takes).tolist():
            requests, _, tokens, _ = self.load[:, g]
            s = _first_room(STEPS, requests, tokens, context, self.slots[g], self.capacity[g])
            if s < start:
                start, where = s, g
        # Those for which there is no room at all are not waited for.
        behind = self.start[np.isfinite(self.start)].max(initial=0.0)
        return max(start, float(behind)), where

    def at(self, steps: float) -> FloatArray:
        """Return the load that many steps ahead, [4, G]."""
        right = min(max(int(np.searchsorted(STEPS, steps, "left")), 1), len(STEPS) - 1)
        part = (steps - STEPS[right - 1]) / (STEPS[right] - STEPS[right - 1])
        low, high = self.load[..., right - 1], self.load[..., right]
        return np.asarray(low + min(max(part, 0.0), 1.0) * (high - low))


def load_ahead(
    forecast: Forecast,
    instance: IntArray,
    context: IntArray,
    slots: IntArray,
    capacity: IntArray,
    queue: Queue,
    takes: npt.NDArray[np.bool_] | None = None,
) -> LoadAhead:
    """Return the load ahead of requests that run, and of those that wait.

    Args:
        forecast: of the n_running requests that run.
        instance: [n_running] where each runs.
        context: [n_running] tokens that it has.
        slots: [G] requests that an instance runs at a time.
        capacity: [G] tokens that its KV cache holds.
        queue: those that wait.
        takes: [G] whether an instance takes requests that may go to any; None: all do.
    """
    n_instances, n_waiting = len(slots), len(queue.context)
    load = np.zeros((4, n_instances, len(STEPS)))
    requests, requests_variance, tokens, tokens_variance = load
    if len(instance):
        survival = forecast.at(STEPS)
        held = context[:, None] + STEPS
        ends = survival * (1.0 - survival)
        np.add.at(requests, instance, survival)
        np.add.at(requests_variance, instance, ends)
        np.add.at(tokens, instance, survival * held)
        np.add.at(tokens_variance, instance, ends * held**2)
    drained = np.array([_falls_to(_LEFT, requests[g]) for g in range(n_instances)])
    start = np.full(n_waiting, np.inf)
    where = np.full(n_waiting, ANYWHERE, dtype=np.int64)
    room, places = capacity.astype(np.float64), slots.astype(np.float64)
    open_to_all = np.ones(n_instances, dtype=np.bool_) if takes is None else takes
    if n_waiting:
        curves = np.ascontiguousarray(queue.survival)
        needs = queue.context.astype(np.float64)
        at = queue.instance
        _start_all(STEPS, curves, needs, at, places, room, open_to_all, load, start, where)
    return LoadAhead(
        load=load,
        start=start,
        instance=where,
        slots=places,
        capacity=room,
        takes=open_to_all,
        drained=drained,
    )


def compile_load_ahead() -> None:
    """Compute a load once, so that no request waits for a compiler."""
    one, room = np.ones(1, dtype=np.int64), np.full(1, 100)
    queue = Queue(np.ones((1, len(STEPS))), one, one - 1)
    found = load_ahead(PointForecast.new([1.0]), one - 1, one, room, room, queue)
    found.with_one_more(np.ones(len(STEPS)), 1)


def _falls_to(level: float, values: FloatArray) -> float:
    """Return the steps until values that only fall are down to a level; the last step at most."""
    below = int((values > level).sum())
    if below in (0, len(STEPS)):
        return float(STEPS[min(below, len(STEPS) - 1)])
    high, low = values[below - 1], values[below]
    part = (high - level) / (high - low)
    return float(STEPS[below - 1] + part * (STEPS[below] - STEPS[below - 1]))


@compiled_core
def _start_all(
    steps: FloatArray,
    curves: FloatArray,
    context: FloatArray,
    fixed: IntArray,
    slots: FloatArray,
    capacity: FloatArray,
    takes: npt.NDArray[np.bool_],
    load: FloatArray,
    start: FloatArray,
    where: IntArray,
) -> None:
    """Start waiting requests one after the other, in place."""
    for j in range(len(context)):
        best, best_tokens = np.inf, np.inf
        for g in range(len(slots)):
            if fixed[j] != g and (fixed[j] != ANYWHERE or not takes[g]):
                continue
            s = _first_room(steps, load[0, g], load[2, g], context[j], slots[g], capacity[g])
            if s < best or (s == best and s < np.inf and load[2, g, 0] < best_tokens):
                best, best_tokens, where[j] = s, load[2, g, 0], g
        start[j] = best
        if best < np.inf:
            _add(steps, curves[j], context[j], best, load, where[j])


@compiled_core
def _first_room(
    steps: FloatArray,
    requests: FloatArray,
    tokens: FloatArray,
    context: float,
    slots: float,
    capacity: float,
) -> float:
    """Return the steps until an instance has room for a request; infinite: not within the last."""
    needs = min(context, capacity)  # whether it ever fits is not for this to say
    for p in range(len(steps)):
        over_requests = requests[p] + 1.0 - slots
        over_tokens = tokens[p] + needs - capacity
        if over_requests > 1e-9 or over_tokens > 1e-9:
            continue
        if p == 0:
            return 0.0
        part = 0.0
        before = requests[p - 1] + 1.0 - slots
        if before > 0.0:
            part = max(part, before / max(before - over_requests, 1e-12))
        before = tokens[p - 1] + needs - capacity
        if before > 0.0:
            part = max(part, before / max(before - over_tokens, 1e-12))
        return steps[p - 1] + min(part, 1.0) * (steps[p] - steps[p - 1])  # type: ignore[no-any-return]
    return np.inf


@compiled_core
def _add(
    steps: FloatArray, curve: FloatArray, context: float, start: float, load: FloatArray, g: int
) -> None:
    """Count a request on an instance from its start on."""
    i = 0
    for p in range(len(steps)):
        since = steps[p] - start
        if since < 0.0:
            continue
        while i + 2 < len(steps) and steps[i + 1] <= since:
            i += 1
        part = min((since - steps[i]) / (steps[i + 1] - steps[i]), 1.0)
        alive = curve[i] + part * (curve[i + 1] - curve[i])
        held, ends = context + since, alive * (1.0 - alive)
        load[0, g, p] += alive
        load[1, g, p] += ends
        load[2, g, p] += alive * held
        load[3, g, p] += ends * held * held

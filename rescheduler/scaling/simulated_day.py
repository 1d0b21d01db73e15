"""A day of a fleet under a rule: replicas that start and drain, and what its requests got."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from rescheduler.scaling.capacity import Lengths, operating_point
from rescheduler.scaling.days import MINUTE, Day
from rescheduler.scaling.fleet import (
    CUT,
    DRAIN_SECONDS,
    MOVED,
    NOW,
    PAID_SECONDS,
    PREEMPTED,
    READY,
    STARTING,
    Fleet,
    Machine,
    advance,
    drain,
    empty_fleet,
    expected_load,
    observed_load,
    start,
    waiting_load,
)
from rescheduler.scaling.lengths import LengthForecast
from rescheduler.scaling.rules import Ahead, Autoscaler, Rule, Seen

__all__ = ["DayResult", "Operation", "Victim", "simulate_day"]

FloatArray = npt.NDArray[np.float64]

Victim = Literal["soonest", "newest", "random"]
"""Which replica is stopped first: the one that empties soonest by forecast, or without any."""

_AFTER_SECONDS = 1800.0


@dataclass(frozen=True)
class Operation:
    """How a fleet is run.

    Attributes:
        start_seconds: until a new replica is ready.
        interval: seconds between two decisions.
        least: replicas.
        most: replicas.
        tolerance: of the `Autoscaler`.
        stabilisation: of the `Autoscaler`.
        victim: which replica is stopped.
        drain_seconds: until what is left of it moves, or is cut.
    """

    start_seconds: float = 120.0
    interval: float = 15.0
    least: int = 1
    most: int = 64
    tolerance: float = 0.1
    stabilisation: float = 300.0
    victim: Victim = "soonest"
    drain_seconds: float = 60.0


class DayResult(NamedTuple):
    """What came of a day.

    Attributes:
        figures: name -> figure: ``slo`` (share of requests in time), ``ttft_p99`` and ``tpot_p99``
            (s), ``hours`` (of replicas that start, serve or drain), ``drain_hours``, ``mean`` and
            ``peak`` (replicas), ``starts``, ``moved``, ``cut`` and ``preempted`` (requests).
        time: [n] seconds of each decision.
        paid: [n] replicas that start, serve or drain.
        ready: [n] replicas that serve.
        demand: [n] replicas at full load that the requests there need.
    """

    figures: dict[str, float]
    time: FloatArray
    paid: FloatArray
    ready: FloatArray
    demand: FloatArray


def simulate_day(
    day: Day,
    machine: Machine,
    operation: Operation,
    rule: Rule | None,
    target: float,
    lengths: Lengths,
    forecast: LengthForecast,
    rates: FloatArray,
    slo: tuple[float, float],
    seed: int = 0,
) -> DayResult:
    """Simulate a day, and its last requests until they end.

    Args:
        day: the requests.
        machine: of all replicas.
        operation: of the fleet.
        rule: that decides; None: always as many replicas as the target.
        target: of the rule.
        lengths: of past requests.
        forecast: of these requests' lengths; the rule and the choice of a victim use it.
        rates: [n_minutes, n] as `forecast_rates` returns them.
        slo: TTFT and TPOT in seconds.
        seed: of random victims.
    """
    scaler = Autoscaler(
        target, operation.least, operation.most, operation.tolerance, operation.stabilisation
    )
    generator = np.random.default_rng(seed)
    share = 0.5 if rule is None else min(max(target, 0.05), 1.0)
    step = operating_point(machine, lengths, share).step
    block = day.block
    before = day.history[-1] if len(day.history) else day.counts[0]
    most = 2 * max(operation.most, math.ceil(target))  # those that drain need places, too
    fleet = empty_fleet(block.arrival, block.prompt, block.output, machine, most)
    # Every rule begins with what the first minute needs if a replica is half full.
    first = _seen(fleet, machine, operation, day, lengths, step, forecast, rates, before).steady(
        2 * day.counts[0] / MINUTE
    )
    ready = min(max(math.ceil(first), operation.least), operation.most)
    fleet.state[: round(target) if rule is None else ready] = READY
    kept, starts = [], 0
    while fleet.clock[NOW] < day.seconds - 1e-9:
        now = float(fleet.clock[NOW])
        seen = _seen(fleet, machine, operation, day, lengths, step, forecast, rates, before)
        _, starting, serving, draining = np.bincount(fleet.state, minlength=4).tolist()
        current = starting + serving
        kept.append((now, current + draining, serving, seen.present))
        if rule is not None:
            desired = scaler.desired(now, rule.demand(seen), current)
            for _ in range(desired - current):
                starts += start(fleet, operation.start_seconds)
            for _ in range(current - desired):
                m = _victim(fleet, operation, forecast, operation.drain_seconds / step, generator)
                drain(fleet, m, operation.drain_seconds)
        advance(fleet, machine, min(now + operation.interval, day.seconds))
    paid_hours = fleet.clock[PAID_SECONDS] / 3600
    drain_hours = fleet.clock[DRAIN_SECONDS] / 3600
    advance(fleet, machine, day.seconds + _AFTER_SECONDS)
    time, paid_at, ready_at, demand = np.array(kept).T
    figures = _service(fleet, slo) | {
        "hours": float(paid_hours),
        "drain_hours": float(drain_hours),
        "mean": float(paid_hours * 3600 / day.seconds),
        "peak": float(paid_at.max()),
        "starts": float(starts),
        "moved": float(fleet.counts[MOVED]),
        "cut": float(fleet.counts[CUT]),
        "preempted": float(fleet.counts[PREEMPTED]),
    }
    return DayResult(figures, time, paid_at, ready_at, demand)


def _seen(
    fleet: Fleet,
    machine: Machine,
    operation: Operation,
    day: Day,
    lengths: Lengths,
    step: float,
    forecast: LengthForecast,
    rates: FloatArray,
    before: float,
) -> Seen:
    now = float(fleet.clock[NOW])
    running, waiting, held = observed_load(fleet)
    unplaced = waiting_load(fleet)
    minute = int(now // MINUTE)

    def ahead() -> Ahead:
        steps = operation.start_seconds / step
        last = len(fleet.state) - 1
        requests, variance, tokens = expected_load(fleet, forecast, 0, last, steps)
        # Those without a place are as others are at their beginning.
        p = float(lengths.at(np.array(steps)))
        requests += p * unplaced[0]
        variance += p * (1 - p) * unplaced[0]
        tokens += p * (unplaced[1] + steps * unplaced[0])
        return Ahead(
            requests,
            variance,
            tokens,
            operation.start_seconds,
            rates[minute],
            now - MINUTE * minute,
        )

    rate = (day.counts[minute - 1] if minute > 0 else before) / MINUTE
    return Seen(
        running=running,
        waiting=waiting,
        held=held,
        unplaced=unplaced,
        rate=rate,
        step=step,
        slots=machine.slots,
        capacity=machine.capacity,
        lengths=lengths,
        ahead=ahead,
    )


def _victim(
    fleet: Fleet,
    operation: Operation,
    forecast: LengthForecast,
    steps: float,
    generator: np.random.Generator,
) -> int:
    """Return a replica that starts, if one does, and else the one that the operation says."""
    starting = np.flatnonzero(fleet.state == STARTING)
    candidates = starting if len(starting) else np.flatnonzero(fleet.state == READY)
    if operation.victim == "random" and not len(starting):
        return int(generator.choice(candidates))
    if operation.victim == "newest" or len(starting):
        return int(candidates[np.argmax(fleet.started_at[candidates])])
    left = [expected_load(fleet, forecast, m, m, steps)[2] for m in candidates]
    return int(candidates[np.argmin(left)])


def _service(fleet: Fleet, slo: tuple[float, float]) -> dict[str, float]:
    ttft = fleet.first - fleet.arrival
    several = fleet.output > 1
    tpot = np.zeros(len(ttft))
    np.divide(fleet.end - fleet.first, fleet.output - 1, out=tpot, where=several)
    kept = (ttft <= slo[0]) & (tpot <= slo[1]) & ~np.isnan(fleet.end)
    # One that had no first token in half an hour is later than all others.
    waited = np.where(np.isnan(ttft), np.inf, ttft)
    return {
        "slo": float(kept.mean()),
        "ttft_p99": float(np.quantile(waited, 0.99, method="higher")),
        "tpot_p99": float(np.nanquantile(tpot, 0.99)),
        "unfinished": float(np.isnan(fleet.end).sum() - fleet.counts[CUT]),
    }

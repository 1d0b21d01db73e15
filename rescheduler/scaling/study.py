"""Rules compared: each with the cheapest target that keeps the objectives on days of training."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from rescheduler.scaling.arrivals import forecast_rates, known_rates, last_rates
from rescheduler.scaling.capacity import Lengths, past_lengths, sustained_rate
from rescheduler.scaling.days import MINUTE, Day, DayProfile, made_up_day, recorded_day
from rescheduler.scaling.fleet import Machine
from rescheduler.scaling.lengths import LengthForecast, LengthKnowledge, length_forecast
from rescheduler.scaling.rules import RULES, Rule
from rescheduler.scaling.simulated_day import DayResult, Operation, simulate_day
from rescheduler.simulator.workloads.trace import ResampledTrace

__all__ = ["FIXED", "Arm", "Found", "ScalingStudy", "Traffic", "Tried"]

FloatArray = npt.NDArray[np.float64]

FIXED = "fixed"
"""The rule that never changes the number of replicas."""

_TRIES = 6
_KEPT_DAYS = 4


class Arm(NamedTuple):
    """What is compared.

    Attributes:
        rule: of `RULES`, or `FIXED`.
        lengths: what is known of the requests' lengths.
    """

    rule: str
    lengths: LengthKnowledge = "age"


class Tried(NamedTuple):
    """A target on the days of training: a point of the frontier.

    Attributes:
        target: of the rule.
        slo: share of requests in time, on the worst of these days until one failed.
        hours: of replicas, on an average one of them.
    """

    target: float
    slo: float
    hours: float


@dataclass
class Found:
    """What came of an arm.

    Attributes:
        target: the greatest that kept the objectives, else the one that kept most.
        tried: all targets.
        days: seed -> figures of `DayResult`.
        shown: the first of these days.
    """

    target: float
    tried: list[Tried]
    days: dict[int, dict[str, float]] = field(default_factory=dict)
    shown: DayResult | None = None


@dataclass(frozen=True)
class Traffic:
    """Days of requests like those of a trace.

    Attributes:
        trace: of the requests.
        profile: of made-up days.
        mean: requests a second.
        period: seconds of a day.
        times: ``day``: made up; ``recorded``: the trace's own.
    """

    trace: ResampledTrace
    profile: DayProfile
    mean: float
    period: float
    times: Literal["day", "recorded"] = "day"

    @cached_property
    def lengths(self) -> Lengths:
        """What past requests were like."""
        return past_lengths(self.trace.recorded.prompt, self.trace.recorded.output)

    def day(self, seed: int) -> Day:
        """Return a day; all seeds have the same one where times are recorded."""
        if self.times == "recorded":
            return recorded_day(self.trace, self.mean, self.period)
        return made_up_day(self.trace, self.profile, self.mean, self.period, seed)


@dataclass
class ScalingStudy:
    """Rules on days of requests.

    Attributes:
        traffic: the days.
        machine: of all replicas.
        operation: of the fleet.
        slo: TTFT and TPOT in seconds.
        keep: share of the requests that are to be in time.
        training: seeds of the days on which targets are chosen.
        seeds: of the days on which rules are compared.
        simulated: called after each simulated day.
    """

    traffic: Traffic
    machine: Machine
    operation: Operation
    slo: tuple[float, float]
    keep: float
    training: Sequence[int]
    seeds: Sequence[int]
    simulated: Callable[[], None] = lambda: None
    _days: dict[int, Day] = field(default_factory=dict, init=False)
    _rates: dict[tuple[int, str], FloatArray] = field(default_factory=dict, init=False)
    _forecasts: dict[tuple[int, str], LengthForecast] = field(default_factory=dict, init=False)

    def runs(self, arms: int) -> int:
        """Return how many days are simulated for so many arms and one start time."""
        return arms * (_TRIES * len(self.training) + len(self.seeds))

    def compare(self, arms: Sequence[Arm], start_seconds: float) -> dict[Arm, Found]:
        """Return what comes of arms, on the same days.

        Args:
            arms: that are compared.
            start_seconds: until a new replica is ready.
        """
        operation = replace(self.operation, start_seconds=start_seconds)
        found = {arm: self.tuned(arm, operation) for arm in arms}
        for seed in self.seeds:
            for arm, one in found.items():
                result = self.simulate(arm, operation, one.target, seed)
                one.days[seed] = result.figures
                one.shown = one.shown or result
        return found

    def tuned(self, arm: Arm, operation: Operation) -> Found:
        """Find the greatest target that keeps the objectives on each day of training.

        By bisection of its logarithm, since a greater target never has more replicas; of
        `FIXED`, the fewest replicas.
        """
        tried: list[Tried] = []
        fixed = arm.rule == FIXED
        # Of a fixed number both ends are taken to be known: one too few, and one too many.
        ends = operation.least - 1.0, operation.most + 1.0
        low, high = ends if fixed else RULES[arm.rule].targets
        while high - low > 1 if fixed else len(tried) < _TRIES:
            target = math.sqrt(max(low, 0.5) * high)
            if fixed:
                target = min(max(float(round(target)), low + 1), high - 1)
            days = []
            for seed in self.training:
                days.append(self.simulate(arm, operation, target, seed).figures)
                if days[-1]["slo"] < self.keep:
                    break
            slo = min(day["slo"] for day in days)
            tried.append(Tried(target, slo, float(np.mean([day["hours"] for day in days]))))
            if (slo >= self.keep) != fixed:
                low = target
            else:
                high = target
        keeps = [one for one in tried if one.slo >= self.keep]
        chosen = (
            min(keeps, key=lambda one: one.hours) if keeps else max(tried, key=lambda one: one.slo)
        )
        return Found(chosen.target, tried)

    def simulate(self, arm: Arm, operation: Operation, target: float, seed: int) -> DayResult:
        """Simulate a day of an arm."""
        rule = None if arm.rule == FIXED else RULES[arm.rule]
        day = self.day(seed)
        result = simulate_day(
            day,
            self.machine,
            operation,
            rule,
            target,
            self.traffic.lengths,
            self._forecast("exact" if rule and rule.knows else arm.lengths, day, seed),
            self._ahead(rule, day, seed, operation),
            self.slo,
            seed,
        )
        self.simulated()
        return result

    def day(self, seed: int) -> Day:
        """Return a day; few are kept, since they are large."""
        if seed not in self._days:
            while len(self._days) >= _KEPT_DAYS:
                del self._days[next(iter(self._days))]
            self._days[seed] = self.traffic.day(seed)
        return self._days[seed]

    def needed(self, seed: int) -> FloatArray:
        """Return replicas that each minute's arrivals need if all are as busy as they may be."""
        smooth = np.convolve(np.pad(self.day(seed).counts, 2, "edge"), np.full(5, 0.2), "valid")
        return smooth / MINUTE / sustained_rate(self.machine, self.traffic.lengths, self.slo[1])

    def _forecast(self, knows: LengthKnowledge, day: Day, seed: int) -> LengthForecast:
        if (seed, knows) not in self._forecasts:
            while len(self._forecasts) >= _KEPT_DAYS:
                del self._forecasts[next(iter(self._forecasts))]
            past = self.traffic.trace.recorded.output
            self._forecasts[seed, knows] = length_forecast(knows, past, day.block.output, seed)
        return self._forecasts[seed, knows]

    def _ahead(self, rule: Rule | None, day: Day, seed: int, operation: Operation) -> FloatArray:
        ahead = math.ceil(operation.start_seconds / MINUTE) + 1
        kind = "last"
        if rule is not None and (rule.knows or rule.forecasts_arrivals):
            kind = "known" if rule.knows else "season"
        key = seed, f"{kind} {ahead}"
        if key not in self._rates:
            make = {"last": last_rates, "known": known_rates, "season": forecast_rates}[kind]
            self._rates[key] = make(day, ahead)
        return self._rates[key]

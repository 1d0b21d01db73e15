"""What a trace's simulations say of routing and forecasts: gains, intervals, and a choice."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rescheduler.simulator.advice.cases import Case, Scenario
from rescheduler.simulator.config.simulation_config import SLOConfig
from rescheduler.simulator.results.metrics import half_interval

__all__ = ["WORTH", "Gain", "Judgement", "Quality", "gain", "judge", "judge_quality"]

WORTH = 0.01
"""Least relative gain for which a more demanding router is recommended."""

Runs = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Case's key -> seed -> figures of the run, all of one scenario."""

_LESS_IS_BETTER = {"latency"}


class Gain(NamedTuple):
    """How much better one router is than another; above 0 is better.

    Attributes:
        mean: relative, over seeds.
        half: half the width of its 95% confidence interval; NaN for a single seed.
        seeds: that both routers were run with.
    """

    mean: float
    half: float
    seeds: int

    @property
    def measurable(self) -> bool:
        """Whether 0 is outside the interval, on either side."""
        return abs(self.mean) > self.half

    @property
    def better(self) -> bool:
        """Whether it is measurably better."""
        return self.mean > self.half

    @property
    def pays(self) -> bool:
        """Whether it is measurably better, and by no trifle."""
        return self.better and self.mean >= WORTH


class Judgement(NamedTuple):
    """One scenario's verdict.

    Attributes:
        scenario: which.
        figure: that is judged, see `judged_figure`.
        today: the count-based router that everything is compared with.
        blind: the best router without lookahead.
        loads: the best router by loads.
        ages: the best that looks ahead with Kaplan-Meier given age.
        by_load: gain of ``loads`` over ``today``.
        ahead: gain over ``blind`` of each router that looks ahead, by its key.
        choice: the recommended router, see `judge`.
        wait_p95: seconds that 95% of the requests wait less than, with ``blind``.
        step: seconds a token takes there on average.
    """

    scenario: Scenario
    figure: str
    today: Case
    blind: Case
    loads: Case
    ages: Case
    by_load: Gain
    ahead: dict[str, Gain]
    choice: Case
    wait_p95: float
    step: float


class Quality(NamedTuple):
    """Gains of bfio over the best router without lookahead, by the quality of its forecasts.

    Attributes:
        scenario: that they were simulated in.
        figure: that is judged.
        blind: the router compared with.
        gains: title of the forecast -> gain; "σ 0" is the truth.
        sigma: spread of real forecasts, whose gain is under the title "real".
        lasts: largest σ up to which all gains are measurable; None if not even the truth's is.
    """

    scenario: Scenario
    figure: str
    blind: Case
    gains: dict[str, Gain]
    sigma: float
    lasts: float | None


def judged_figure(scenario: Scenario, slo: SLOConfig | None) -> str:
    """Return what is to be gained: throughput when overloaded, else goodput or mean latency.

    With arrivals in time every router finishes what arrives, so that throughput says nothing; an
    overloaded cluster's requests arrive when there is room for them, so that latency does not.
    """
    if scenario.load is None:
        return "throughput"
    return "latency" if slo is None else "goodput"


def gain(
    runs: Mapping[int, Mapping[str, float]], base: Mapping[int, Mapping[str, float]], figure: str
) -> Gain:
    r"""Return the gain over a base, paired by seed: both routers serve the same requests.

    .. math:: \bar x \pm t_{0.975,\,n-1}\, s / \sqrt n, \qquad
              x_i = \pm\Big(\frac{f_i}{f^{base}_i} - 1\Big)

    with minus for figures of which less is better. Goodput can be 0, and is related to the
    requests finished per second instead.

    Raises:
        ValueError: the two have no seed in common.
    """
    seeds = sorted(runs.keys() & base.keys())
    if not seeds:
        raise ValueError("nothing to compare: no seed was run with both")
    related = "requests_per_s" if figure == "goodput" else figure
    values = np.array(
        [(runs[s][figure] - base[s][figure]) / max(base[s][related], 1e-300) for s in seeds]
    )
    if figure in _LESS_IS_BETTER:
        values = -values
    half = float(half_interval(values)) if len(seeds) > 1 else math.nan
    return Gain(float(values.mean()), half, len(seeds))


def judge(
    scenario: Scenario, cases: Sequence[Case], runs: Runs, slo: SLOConfig | None
) -> Judgement:
    """Return what the runs of one scenario say.

    The choice begins with the first router, and goes on to one that needs to know more only if
    that is measurably better than the chosen one, by `WORTH` at least; one that looks ahead must
    be so against the best router without lookahead too. One that knows the truth is never chosen.
    """
    figure = judged_figure(scenario, slo)
    today = choice = cases[0]
    over_today = {case.key: gain(runs[case.key], runs[today.key], figure) for case in cases}

    def best(*knowledge: str) -> Case:
        return max(
            (case for case in cases if case.knows in knowledge),
            key=lambda case: over_today[case.key].mean,
        )

    blind = best("counts", "loads")
    ahead = {
        case.key: gain(runs[case.key], runs[blind.key], figure)
        for case in cases
        if case.knows in ("ages", "forecasts", "truth")
    }
    for case in cases[1:]:
        if case.knows == "truth" or (case.key in ahead and not ahead[case.key].pays):
            continue
        if gain(runs[case.key], runs[choice.key], figure).pays:
            choice = case
    loads = best("loads")
    served = list(runs[blind.key].values())
    return Judgement(
        scenario=scenario,
        figure=figure,
        today=today,
        blind=blind,
        loads=loads,
        ages=best("ages"),
        by_load=over_today[loads.key],
        ahead=ahead,
        choice=choice,
        wait_p95=float(np.mean([run["wait_p95"] for run in served])),
        step=float(np.mean([run["tpot"] for run in served])),
    )


def judge_quality(judgement: Judgement, titles: Sequence[str], runs: Runs, sigma: float) -> Quality:
    """Return how good forecasts must be in the scenario of a judgement.

    Args:
        judgement: of the scenario.
        titles: of forecasts from good to bad, "σ 0.25" and so on, and of others.
        runs: of each title, of the ladder's "bfio_oracle" and "bfio_measured", and of the base.
        sigma: of "bfio_measured".
    """
    base, figure = runs[judgement.blind.key], judgement.figure
    gains = {"σ 0": judgement.ahead["bfio_oracle"]}
    gains |= {title: gain(runs[title], base, figure) for title in titles if title in runs}
    lasts = None
    for title, value in gains.items():
        if not title.startswith("σ"):
            continue
        if not value.better:
            break
        lasts = float(title.split()[1])
    gains["real"] = judgement.ahead["bfio_measured"]
    return Quality(judgement.scenario, figure, judgement.blind, gains, sigma, lasts)

"""What another order of service than that of arrival gains on a trace, and what its tail pays."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rescheduler.ordering import create_order
from rescheduler.routing import create_policy
from rescheduler.simulator.advice.verdicts import WORTH, Clock, Gain, gain
from rescheduler.simulator.config.simulation_config import ArrivalsConfig, SimulationConfig
from rescheduler.simulator.engine.step_metrics import power_model
from rescheduler.simulator.forecasts.forecast_sources import create_forecast
from rescheduler.simulator.results.metrics import run_metrics
from rescheduler.simulator.simulation import RunSetup, run
from rescheduler.simulator.workloads.forecast_recording import MEASURED_INTERVAL
from rescheduler.simulator.workloads.trace import ResampledTrace
from rescheduler.step_time.step_time import StepTime

LOAD = 1.2
"""Of the capacity: who goes first matters where somebody waits."""

_POLICY = "jsq_load"


class OrderCase(NamedTuple):
    """An order of service and what it knows.

    Attributes:
        key: in results.
        order: {name, ...} of the order.
        forecast: {name, ...} of its source of forecasts.
    """

    key: str
    order: dict[str, Any]
    forecast: dict[str, Any]


class OrderGains(NamedTuple):
    """Gains of boosts over the order of arrival, by what they know.

    Attributes:
        clock: of the instances.
        latency: key of the case → gain in mean latency.
        tail: key of the case → gain in P99 latency.
        pays: key of the case that is recommended; None where none gains measurably.
    """

    clock: Clock
    latency: dict[str, Gain]
    tail: dict[str, Gain]
    pays: str | None


def order_cases(sigma: float) -> list[OrderCase]:
    """Return orders from knowing nothing to knowing the truth."""
    boost = {"name": "boost"}
    noisy = {"name": "noisy", "sigma": sigma, "interval": MEASURED_INTERVAL}
    return [
        OrderCase("fcfs", {"name": "fcfs"}, {"name": "none"}),
        OrderCase("past_lengths", boost, {"name": "kaplan_meier"}),
        OrderCase("real_forecasts", boost, noisy),
        OrderCase("true_lengths", boost, {"name": "oracle"}),
    ]


def order_figures(
    case: OrderCase,
    seed: int,
    config: SimulationConfig,
    trace: ResampledTrace,
    step_time: StepTime,
    rate: float,
) -> dict[str, float]:
    """Simulate one order with one seed; requests come at random at so many a second."""
    setup = RunSetup(
        config=replace(config, arrivals=ArrivalsConfig("poisson", rate=rate)),
        trace=trace,
        forecast=create_forecast(**case.forecast),
        step_time=step_time,
        power=power_model(config.power),
    )
    policy, order = create_policy(_POLICY), create_order(**case.order)
    return run_metrics(run(setup, policy, seed, case.key, order=order))


def order_gains(
    clock: Clock, cases: Sequence[OrderCase], runs: Mapping[str, Mapping[int, Mapping[str, float]]]
) -> OrderGains:
    """Return what the runs say; one that needs forecasts must gain more than one that does not."""
    base, others = cases[0], cases[1:]
    latency = {case.key: gain(runs[case.key], runs[base.key], "latency") for case in others}
    tail = {
        case.key: gain(_as_latency(runs[case.key]), _as_latency(runs[base.key]), "latency")
        for case in others
    }
    pays = "past_lengths" if latency["past_lengths"].pays else None
    over = base.key if pays is None else pays
    further = gain(runs["real_forecasts"], runs[over], "latency")
    if further.better and further.mean >= WORTH:
        pays = "real_forecasts"
    return OrderGains(clock, latency, tail, pays)


def _as_latency(runs: Mapping[int, Mapping[str, float]]) -> dict[int, dict[str, float]]:
    return {seed: {"latency": figures["latency_p99"]} for seed, figures in runs.items()}

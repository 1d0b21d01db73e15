"""Everything one simulated run needs, created from its configuration."""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from rescheduler.migration import MigrationPolicy, create_migration_policy
from rescheduler.ordering import ServiceOrder, create_order
from rescheduler.routing import RoutingPolicy, create_policy
from rescheduler.simulator.config.service_rules import service_rules
from rescheduler.simulator.config.simulation_config import PolicyChoice, SimulationConfig, checked
from rescheduler.simulator.engine.step_metrics import PowerModel, power_model
from rescheduler.simulator.forecasts.forecast_sources import ForecastSource, create_forecast
from rescheduler.simulator.workloads.trace import Trace
from rescheduler.simulator.workloads.trace_files import create_trace
from rescheduler.step_time.step_time import StepTime, create_step_time

__all__ = ["Candidate", "RunSetup", "create_candidates", "create_policies", "run_setup"]


@dataclass(frozen=True)
class RunSetup:
    """What all runs of a simulation share.

    Attributes:
        config: of the simulation; its plain values (cluster, clock, pool_limit, drift ...) are
            read from here.
        trace: its requests; a run draws its own blocks with a generator of its seed.
        forecast: published to the policies.
        step_time: seconds of a step.
        power: watts of a GPU.
    """

    config: SimulationConfig
    trace: Trace
    forecast: ForecastSource
    step_time: StepTime
    power: PowerModel


class Candidate(NamedTuple):
    """A routing policy, a migration planner and an order of service, created.

    Attributes:
        policy: places requests.
        planner: moves them; None moves nothing.
        setup: of its runs, with the forecasts that are published to it.
        order: in which waiting requests are served.
    """

    policy: RoutingPolicy
    planner: MigrationPolicy | None
    setup: RunSetup
    order: ServiceOrder


def run_setup(config: SimulationConfig) -> RunSetup:
    """Return what a configuration describes.

    Raises:
        ValueError: an unknown name or option, or a value that is refused, with its key.
    """
    trace = checked("trace", create_trace, config.trace)
    if config.arrivals.kind == "trace" and not trace.has_arrivals:
        raise ValueError(
            f"arrivals.kind: trace, but {trace.name} has no arrival times; "
            "choose revelation, poisson or gamma"
        )
    forecast = checked("forecast", create_forecast, config.forecast)
    forecast.refuse_other_trace(trace)
    slots = config.cluster.slots
    step_time = checked("step_time", partial(create_step_time, slots=slots), config.step_time)
    service_rules(config, step_time)
    return RunSetup(
        config=config,
        trace=trace,
        forecast=forecast,
        step_time=step_time,
        power=power_model(config.power),
    )


def create_policies(config: SimulationConfig) -> dict[str, RoutingPolicy]:
    """Return the configured policies by label.

    Raises:
        ValueError: an unknown policy or option, with its key.
    """
    return {
        choice.label: checked(
            f"policies.{i}", create_policy, {"name": choice.name} | choice.options
        )
        for i, choice in enumerate(config.policy_choices())
    }


def create_candidates(setup: RunSetup) -> dict[str, Candidate]:
    """Return every configured policy with every configured planner and order, by label.

    Raises:
        ValueError: an unknown policy, planner, order or option, with its key.
    """
    config = setup.config
    policies = create_policies(config)
    planners = {}
    for i, choice in enumerate(config.planner_choices()):
        planners[choice.label] = _planner(setup, f"migration.planners.{i}", choice)
    orders = {
        choice.label: checked(f"orders.{i}", create_order, {"name": choice.name} | choice.options)
        for i, choice in enumerate(config.order_choices())
    }
    found = {}
    for candidate in config.candidate_choices():
        planner, forecast = planners[candidate.planner.label]
        own = setup if forecast is None else replace(setup, forecast=forecast)
        policy, order = policies[candidate.policy.label], orders[candidate.order.label]
        found[candidate.label] = Candidate(policy, planner, own, order)
    return found


def _planner(
    setup: RunSetup, key: str, choice: PolicyChoice
) -> tuple[MigrationPolicy | None, ForecastSource | None]:
    """Return the planner, and its own forecasts if it has any."""
    options, transfer = dict(choice.options), setup.config.transfer
    own_forecast = options.pop("forecast", None)
    forecast = None
    if own_forecast is not None:
        forecast = checked(f"{key}.forecast", create_forecast, own_forecast)
        forecast.refuse_other_trace(setup.trace)
    if choice.name == "none":
        return checked(key, _nobody, options), forecast
    costs = {
        "handshake_seconds": transfer.handshake_s,
        "bandwidth": transfer.gigabits_per_second * 1e9 / 8,
        "kv_bytes_per_token": transfer.bytes_per_token,
    }
    planner = checked(key, create_migration_policy, {"name": choice.name} | costs | options)
    return planner, forecast


def _nobody() -> None:
    """Return the planner called none."""

"""Everything one simulated run needs, created from its configuration."""

from dataclasses import dataclass
from functools import partial

from rescheduler.routing import RoutingPolicy, create_policy
from rescheduler.simulator.energy import PowerModel, power_model
from rescheduler.simulator.forecast_sources import ForecastSource, create_forecast
from rescheduler.simulator.simulation_config import SimulationConfig, checked
from rescheduler.simulator.step_time import StepTime, create_step_time
from rescheduler.simulator.trace import Trace
from rescheduler.simulator.trace_files import create_trace

__all__ = ["RunSetup", "create_policies", "run_setup"]


@dataclass(frozen=True)
class RunSetup:
    """What all runs of a simulation share.

    Attributes:
        config: of the simulation; its plain values (cluster, clock, pool_limit, drift ...) are
            read from here.
        trace: its requests; a run draws its own blocks with a generator of its seed.
        forecast: what the policies are told.
        step_time: seconds of a step.
        power: watts of a GPU.
    """

    config: SimulationConfig
    trace: Trace
    forecast: ForecastSource
    step_time: StepTime
    power: PowerModel


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
    return RunSetup(
        config=config,
        trace=trace,
        forecast=forecast,
        step_time=checked("step_time", partial(create_step_time, slots=slots), config.step_time),
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

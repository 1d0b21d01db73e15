"""How many requests the simulator serves in a second of one core.

    python -m benchmarks.simulator [--quick] --json OUT

Requests as in BurstGPT, in a pool that is never empty, with a barrier, 72 slots an instance.
Counted is the CPU time of the whole run, drawing the requests included, with compiled code in
place: FCFS and BF-IO looking 80 steps ahead (the truth) on 8 instances, and Fast-Φ, with
Kaplan-Meier's curve of the lengths, on 256 instances (``fast_phi_g256_s``, seconds for 100,000
requests). Replicas with clocks of their own take a step at a time: 16 of them, with chunked
prefill and instant dispatch, for ``chunked_g16_steps_per_s``.
"""

import time

from benchmarks.support.report import arguments, report
from rescheduler.routing import create_policy
from rescheduler.simulator.config.simulation_config import (
    ArrivalsConfig,
    ClusterConfig,
    PrefillConfig,
    SimulationConfig,
)
from rescheduler.simulator.simulation import run, run_setup

SLOTS = 72


def main() -> None:
    options = arguments("requests that the simulator serves in a second of a core").parse_args()
    few = 10 if options.quick else 1
    fcfs = cpu_seconds("fcfs", 8, 1_000_000 // few, "none")
    bfio = cpu_seconds("bfio", 8, 200_000 // few, "oracle", horizon=80)
    fast_phi = cpu_seconds("fast_phi", 256, 100_000 // few, "kaplan_meier")
    figures = {
        "fcfs_g8_requests_per_s": 1_000_000 // few / fcfs,
        "bfio_g8_requests_per_s": 200_000 // few / bfio,
        "fast_phi_g256_s": fast_phi,
        "fast_phi_g256_requests": 100_000 // few,
        "chunked_g16_steps_per_s": replica_steps_per_second(40_000 // few),
    }
    report("simulator", figures, options.json)


def cpu_seconds(
    policy: str, instances: int, requests: int, forecast: str, **options: object
) -> float:
    """Return the CPU seconds of one run, after a short one that compiles."""
    for count in (instances, requests):  # the first compiles
        config = SimulationConfig(
            cluster=ClusterConfig(instances, SLOTS),
            trace={"name": "burstgpt_like", "requests": count},
            forecast={"name": forecast},
        )
        seconds, _ = _timed(config, policy, **options)
    return seconds


def replica_steps_per_second(requests: int) -> float:
    """Return how many steps of independent replicas are simulated in a CPU second."""
    for count in (16, requests):
        config = SimulationConfig(
            cluster=ClusterConfig(16, SLOTS),
            trace={"name": "lognormal", "requests": count},
            clock="independent",
            dispatch="instant",
            prefill=PrefillConfig("chunked"),
            step_time={"name": "batch", "a": 8e-3, "b": 2e-4, "c": 5e-8},
            arrivals=ArrivalsConfig("poisson", rate=40.0),
        )
        seconds, steps = _timed(config, "jsq_load")
    return steps / seconds


def _timed(config: SimulationConfig, policy: str, **options: object) -> tuple[float, int]:
    setup = run_setup(config)
    start = time.process_time()
    result = run(setup, create_policy(policy, **options), seed=0)
    seconds = time.process_time() - start
    assert len(result.requests.number) == config.trace["requests"]
    return seconds, result.steps


if __name__ == "__main__":
    main()

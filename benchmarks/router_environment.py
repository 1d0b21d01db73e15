"""Decisions of the routing environment in a CPU second, and what one costs a deployed router.

    python -m benchmarks.router_environment [--quick] --json OUT

The environment is that of `configs/rl/paper.yaml`: four instances, 2,000 requests at 20 a second, a
decision every 0.02 s. Counted is the CPU time of `step`, rewards and observations included, with
random actions until the requests are served: ``vector_decisions_per_s`` of 16 simulations side by
side, ``single_decisions_per_s`` of one. ``policy_us`` is the median time in which the policy `rl`
decides on a live cluster's view with 60 running and 20 waiting requests, its arrays included;
``kernel_us`` without them.
"""

import time
from itertools import pairwise

import numpy as np

from benchmarks.support.report import arguments, report
from predictor.forecasts.forecast import PointForecast
from rescheduler.cluster.cluster_view import ClusterView
from rescheduler.papers.jain_router.environment import RouterVectorEnvironment
from rescheduler.papers.jain_router.router_config import RouterConfig
from rescheduler.routing import LearnedRouter
from rescheduler.routing.inputs import empty_target
from rescheduler.routing.learned.rl import learned_router
from rescheduler.routing.learned.router_network import RouterCheckpoint
from rescheduler.routing.learned.router_state import state_size
from rescheduler.simulator.config.config_parser import read_config
from rescheduler.simulator.run_setup import run_setup

INSTANCES, SLOTS, CAPACITY = 4, 128, 10_240


def main() -> None:
    """Measure, and print."""
    options = arguments("decisions of the routing environment").parse_args()
    steps = 500 if options.quick else 8000
    figures = {
        "vector_decisions_per_s": decisions_per_second(16, steps),
        "single_decisions_per_s": decisions_per_second(1, steps),
    }
    figures |= policy_microseconds(200 if options.quick else 5000)
    report("router_environment", figures, options.json)


def decisions_per_second(simulations: int, steps: int) -> float:
    """Return decisions of all simulations in a CPU second, after some that compile."""
    config = read_config(
        {
            "cluster": {"instances": INSTANCES, "slots": SLOTS, "kv_capacity": CAPACITY},
            "clock": "independent",
            "dispatch": "instant",
            "pool": {"limit": 512},
            "prefill": {"kind": "chunked", "max_batched_tokens": 4096},
            "step_time": {"name": "batch", "a": 0.02, "b": 3.2e-4, "c": 0.0},
            "trace": {"name": "five_tasks", "requests": 2000},
            "arrivals": {"kind": "poisson", "rate": 20.0},
            "forecast": {"name": "classified"},
        }
    )
    environment = RouterVectorEnvironment([run_setup(config)], RouterConfig(), simulations)
    generator = np.random.default_rng(0)
    actions = generator.integers(0, INSTANCES + 1, (steps, simulations))
    environment.reset(seed=0)
    environment.step(actions[0])
    decided, began = 0, time.process_time()
    for row in actions:
        *_, ended, _, _ = environment.step(row)
        decided += int((~ended).sum())
        if ended.all():
            break
    return decided / (time.process_time() - began)


def policy_microseconds(repeats: int) -> dict[str, float]:
    """Return the median microseconds of a decision of an untrained router."""
    generator = np.random.default_rng(0)
    task = RouterConfig()
    sizes = [state_size(INSTANCES, len(task.edges)), 64, 64, INSTANCES + 1]
    layers = [
        (generator.normal(size=(n_out, n_in)), generator.normal(size=n_out))
        for n_in, n_out in pairwise(sizes)
    ]
    scales = task.scales(SLOTS)
    router = LearnedRouter(
        RouterCheckpoint("baseline", INSTANCES, task.edges, task.interval, scales, layers)
    )
    running, waiting = 60, 20
    view = ClusterView(
        slots=np.full(INSTANCES, SLOTS),
        kv_capacity=np.full(INSTANCES, CAPACITY),
        queued=np.zeros(INSTANCES, dtype=np.int64),
        instance=generator.integers(0, INSTANCES, running),
        prompt_tokens=generator.integers(10, 200, running),
        generated_tokens=generator.integers(0, 300, running),
        forecast=PointForecast.new(generator.uniform(1, 500, running)),
        waiting_prompt_tokens=generator.integers(10, 200, waiting),
        waiting_generated_tokens=np.zeros(waiting, dtype=np.int64),
        waiting_forecast=PointForecast.new(generator.uniform(1, 500, waiting)),
        waited_steps=np.zeros(waiting, dtype=np.int64),
        instant=True,
    )
    inputs, parameters = router.inputs(view), router.parameters()
    target = empty_target(inputs)
    whole, kernel = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        router.assign(view)
        whole.append(time.perf_counter() - began)
        began = time.perf_counter()
        learned_router(inputs, parameters, target)
        kernel.append(time.perf_counter() - began)
    return {
        "policy_us": float(np.median(whole)) * 1e6,
        "kernel_us": float(np.median(kernel)) * 1e6,
    }


if __name__ == "__main__":
    main()

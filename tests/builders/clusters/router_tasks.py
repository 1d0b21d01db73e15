"""Small clusters for learned routers, and networks that are not trained."""

from itertools import pairwise
from typing import Any

import numpy as np

from rescheduler.papers.jain_router.environment import RouterConfig
from rescheduler.routing.learned.rl import Layers, RouterCheckpoint, state_size
from rescheduler.simulator.config.simulation_config import SimulationConfig, read_config
from rescheduler.simulator.simulation import RunSetup, run_setup

TASK = RouterConfig(edges=(0, 64, 256), max_seconds=60.0)


def small_config(**changes: Any) -> SimulationConfig:
    """Two instances whose memory holds a few requests, and forty requests."""
    prompts = {"name": "lognormal", "prompt_median": 60, "prompt_max": 400}
    values: dict[str, Any] = {
        "cluster": {"instances": 2, "slots": 16, "kv_capacity": 1000},
        "clock": "independent",
        "dispatch": "instant",
        "prefill": {"kind": "chunked", "max_batched_tokens": 1024},
        "step_time": {"name": "batch", "a": 0.02, "b": 3.2e-4, "c": 0.0},
        "trace": prompts | {"requests": 40, "output_median": 40, "output_max": 500},
        "arrivals": {"kind": "poisson", "rate": 10.0},
        "forecast": {"name": "noisy", "sigma": 0.3},
        "policies": "round_robin",
        "seeds": 1,
    }
    return read_config(values | changes)


def small_setup(**changes: Any) -> RunSetup:
    return run_setup(small_config(**changes))


def random_layers(n_instances: int, seed: int = 0) -> Layers:
    """Weights of a network that prefers nothing in particular."""
    generator = np.random.default_rng(seed)
    sizes = [state_size(n_instances, len(TASK.edges)), 16, 8, n_instances + 1]
    return [
        (
            generator.normal(size=(n_out, n_in)).astype(np.float32),
            generator.normal(size=n_out).astype(np.float32),
        )
        for n_in, n_out in pairwise(sizes)
    ]


def checkpoint(layers: Layers, n_instances: int = 2) -> RouterCheckpoint:
    return RouterCheckpoint(
        variant="baseline",
        n_instances=n_instances,
        edges=TASK.edges,
        interval=TASK.interval,
        scales=TASK.scales(16),
        layers=layers,
    )


def constant_layers(n_instances: int, action: int) -> Layers:
    """Weights of a network that always prefers one action."""
    bias = np.zeros(n_instances + 1, dtype=np.float32)
    bias[action] = 1.0
    size = state_size(n_instances, len(TASK.edges))
    return [(np.zeros((n_instances + 1, size), dtype=np.float32), bias)]

"""A run that was never simulated, small enough to work out by hand."""

from dataclasses import replace
from typing import Any

import numpy as np

from rescheduler.simulator.results.metrics import LoadSeries, RequestRecords, RunResult


def requests(**columns: Any) -> RequestRecords:
    """Three requests: 1, 3 and 5 tokens, arrived at 0, 0 and 1 second."""
    given: dict[str, Any] = {
        "number": [0, 1, 2],
        "instance": [0, 1, 0],
        "arrival": [0.0, 0.0, 1.0],
        "placed": [0.5, 0.5, 2.0],
        "start": [1.0, 1.0, 2.0],
        "first_token": [2.0, 2.0, 4.0],
        "end": [2.0, 6.0, 10.0],
        "prompt": [10, 20, 30],
        "output": [1, 3, 5],
        "preemptions": [0, 0, 1],
        "migrations": [0, 0, 0],
        "tpot_worst": [np.nan, np.nan, np.nan],
        "client": [0, 0, 0],
        **columns,
    }
    return RequestRecords(**{name: np.array(values) for name, values in given.items()})


def run_result(policy: str = "fcfs", seed: int = 0, **changes: Any) -> RunResult:
    steps = np.arange(8)
    load = np.stack([10 * steps, 5 * steps], axis=1)
    result = RunResult(
        policy=policy,
        seed=seed,
        n_instances=2,
        requests=requests(),
        prefilled_first_token=False,
        steps=8,
        seconds=10.0,
        busy_seconds=9.0,
        tokens=9,
        imbalance=17.5,
        max_minus_min=17.5,
        idle_share=0.25,
        execution_variance=4e-6,
        most_held=70,
        energy_load_joules=5000.0,
        energy_mfu_joules=3000.0,
        preemptions=1,
        migrations=0,
        decisions=2,
        plans=0,
        itl_histogram=np.array([0, 4, 0, 2, 0]),
        itl_edges=np.array([0.25, 0.5, 1.0, 2.0, 4.0, 8.0]),
        series=LoadSeries(
            steps,
            steps * 1.25,
            load,
            np.full(8, 2),
            np.linspace(300.0, 400.0, 8),
            np.full(8, 4e-6),
            load.max(axis=1),
            np.minimum(steps, 1),
            np.zeros(8, dtype=np.int64),
        ),
    )
    return replace(result, **changes)

"""What simulator, planners, forecasts and shipped checkpoints gave before, to the last bit.

A change of structure must leave these results as they are. Where a change of behaviour is meant,
write them anew with ``HEADWAY_WRITE_GOLDEN=1 python -m pytest tests/unit/test_golden_results.py``
and say in the commit why they differ.
"""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from migration_views import view

from predictor import PointForecast, RequestRows, SurvivalForecast, load_predictor
from predictor.forecasts.expected_load import expected_load
from rescheduler.commands.command_line import main
from rescheduler.migration import create_migration_policy

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"

_SMALL = ("--seeds", "1")
_POLICIES = (
    *("fcfs", "jsq", "jsq_load", "jsq_tokens", "round_robin", "power_of_d", "random", "vllm"),
    *("max_capacity", "br0", "brh", "balance_future_dp", "fast_phi", "overflow", "bfio"),
    *("decode_balancer", "dedicated_small_large", "min_min", "max_min", "throttled"),
)
_INSTANT = ("configs/simulate/instant.yaml", "--trace.requests", "600")
_POOL = ("configs/papers/bfio_table1.yaml", "--trace.requests", "1500", "--cluster.instances", "4")
_MOVES = ("configs/simulate/instant.yaml", "--trace.requests", "600", "--cluster.slots", "24")
SIMULATIONS: dict[str, tuple[str, ...]] = {
    "instant": (*_INSTANT, "--policies", f"[{', '.join(_POLICIES)}]"),
    "pool": (*_POOL, "--policies", f"[{', '.join(_POLICIES)}]"),
    "pool, forecasts in bins": (
        *(*_POOL, "--policies", "[{name: bfio, horizon: 20}, fast_phi, brh]"),
        *("--forecast", "{name: binned, bins: 4}"),
    ),
    "pool, Kaplan-Meier": (
        *(*_POOL, "--policies", "[{name: bfio, horizon: 20}, fast_phi, overflow]"),
        *("--forecast", "{name: kaplan_meier}"),
    ),
    "moves, exact": (
        *(*_MOVES, "--policies", "[round_robin]"),
        *("--migration", "{interval: 20, planners: [none, star, survival]}"),
    ),
    "moves, Kaplan-Meier": (
        *(*_MOVES, "--policies", "[round_robin, jsq_load]", "--forecast", "{name: kaplan_meier}"),
        *("--migration", "{interval: 20, planners: [star, survival]}"),
    ),
    "chunked prefill": (
        *("configs/simulate/moe.yaml", "--trace.requests", "600", "--policies", "[jsq, bfio]"),
    ),
}


def _digest(array: npt.ArrayLike) -> str:
    numbers = np.ascontiguousarray(array)
    return f"{numbers.dtype}{list(numbers.shape)} " + hashlib.sha256(numbers.tobytes()).hexdigest()


def _same_as_kept(name: str, result: dict[str, Any]) -> None:
    file = GOLDEN / f"{name.replace(',', '').replace(' ', '_')}.json"
    text = json.dumps(result, indent=1, sort_keys=True) + "\n"
    if os.environ.get("HEADWAY_WRITE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert result == json.loads(file.read_text())


@pytest.mark.parametrize("name", SIMULATIONS)
def test_simulations(name: str, tmp_path: Path) -> None:
    config, *options = SIMULATIONS[name]
    out = tmp_path / "results.json"
    arguments = ["simulate", "--config", str(ROOT / config), *options, *_SMALL, "--json", str(out)]
    assert main(arguments) == 0
    result = json.loads(out.read_text())
    del result["_about"]
    assert result
    _same_as_kept(f"simulation {name}", result)


def _curves(n: int, generator: np.random.Generator) -> SurvivalForecast:
    edges = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 400, 1024])
    hazard = generator.uniform(0.002, 0.2, (n, len(edges) - 1))
    survival = np.concatenate([np.ones((n, 1)), np.cumprod(1 - hazard, axis=1)], axis=1)
    forecast = SurvivalForecast.new(edges, survival)
    return forecast.aged(generator.integers(0, 300, n)).capped(generator.integers(1, 900, n))


def test_forecasts() -> None:
    generator = np.random.default_rng(5)
    curves = _curves(200, generator)
    points = PointForecast.new(generator.uniform(1, 500, 200))
    instance, context = generator.integers(0, 7, 200), generator.integers(1, 2000, 200)
    result = {}
    for name, forecast in (("curves", curves), ("points", points), ("grid", curves.aged(3))):
        load = expected_load(forecast, instance, context, n_instances=7, horizon=64)
        result[name] = {
            "at": _digest(forecast.at([0, 1, 3.5, 20, 100, 999])),
            "mean": _digest(forecast.mean()),
            "median": _digest(forecast.quantile(0.5)),
            "tail": _digest(forecast.quantile(0.9)),
            "aged": _digest(forecast.aged(11).at([1, 2, 40])),
            "load": _digest(load.mean),
            "variance": _digest(load.variance),
        }
    _same_as_kept("forecasts", result)


def test_planners() -> None:
    generator = np.random.default_rng(6)
    result = {}
    for planner in ("star", "survival"):
        policy = create_migration_policy(planner)
        for trial in range(6):
            sizes = generator.integers(2, 14, 4) * np.array([1, 1, 1, 3])
            placed = [[(int(generator.integers(50, 3000)), 1.0)] * int(n) for n in sizes]
            seen = view(*placed, slots=60, capacity=90_000)
            n = len(seen.instance)
            known = (
                _curves(n, generator)
                if trial % 2
                else PointForecast.new(generator.uniform(1, 500, n))
            )
            plan = policy.plan(replace(seen, forecast=known))
            moves = [(int(m.request), int(m.source), int(m.target)) for m in plan.migrations]
            result[f"{planner} {trial}"] = [list(move) for move in moves]
    assert any(result.values())
    _same_as_kept("planners", result)


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "smollm2-135m-instruct-star"])
def test_shipped_checkpoints(name: str) -> None:
    predictor = load_predictor(ROOT / "checkpoints" / name)
    generator = torch.Generator().manual_seed(7)
    rows = RequestRows(
        torch.randn(64, 576, generator=generator),
        torch.randint(1, 900, (64, 3), generator=generator).to(torch.float32),
    )
    forecast = predictor.forecast(rows)
    # Threads and instruction sets change the last bits of a matrix product.
    medians = [float(f"{value:.4g}") for value in forecast.quantile(0.5)]
    _same_as_kept(f"checkpoint {name}", {"median": medians})

"""Forecasts, policies, planners and simulations give exactly what `golden/results.json` has.

A change that is meant to leave results alone must pass this test without touching the file. One
that is meant to change them rewrites the file and says in its commit why:

    HEADWAY_GOLDEN=write python -m pytest tests/unit/test_golden_results.py

On the kind of machine that the file was written on, simulations are compared bit by bit, and the
arrays of single decisions to eight digits. Another's compiler adds in another order and fuses other
products, and its powers and exponentials round otherwise, even on a CPU of the same name: there a
few numbers of each decision and of each simulation are compared, counts exactly and the others to
`SAME`.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from llvmlite import binding

from predictor.forecasts.expected_load import expected_load
from predictor.forecasts.forecast import Forecast, PointForecast, SurvivalForecast
from predictor.models.checkpoint import load_predictor
from predictor.models.hidden_state_mlp import RequestRows
from rescheduler.cluster.cluster_view import CANNOT_MOVE, NEVER_MOVED, ClusterView
from rescheduler.migration import create_migration_policy
from rescheduler.routing import create_policy, policy_names
from rescheduler.simulator.config.simulation_config import read_config
from rescheduler.simulator.simulation import create_candidates, run, run_setup

GOLDEN = Path(__file__).parent / "golden" / "results.json"
ROOT = Path(__file__).parents[2]
CHECKPOINTS = ROOT / "checkpoints"
WRITE = os.environ.get("HEADWAY_GOLDEN") == "write"
SAME = 1e-9
"""Relative difference that is one of rounding. Recorded on a Zen 5 with vectors of 512 bits, these
figures of all simulations are equal to the last bit on a Zen 3 with 256: no decision hangs on a
rounded tie. Digests of all numbers differ there, as numpy's powers do, which histograms' edges are.
"""
FIGURES = ("imbalance", "seconds")
COUNTS = ("steps", "migrations", "preemptions")

EDGES = np.array([0, 1, 2, 4, 8, 16, 64, 400])
STEPS = np.array([0, 1, 3, 7, 20, 63, 64, 100, 399, 400, 1000])
SHORT = {
    "brh": {"horizon": 12},
    "overflow": {"horizon": 12},
    "bfio": {"horizon": 12},
    "rl": {"checkpoint": str(CHECKPOINTS / "rl-router")},
}
RECORDING = str(ROOT / "recordings" / "smollm2-135m-instruct.parquet")

FORECASTS: dict[str, dict[str, Any]] = {
    "exact": {"forecast": {"name": "oracle"}},
    "noisy": {"forecast": {"name": "noisy", "sigma": 0.6}},
    "binned": {"forecast": {"name": "binned", "bins": 4, "context": 2000, "sigma": 0.3}},
    "classified": {"forecast": {"name": "classified", "edges": [0, 64, 256]}},
    "kaplan_meier": {"forecast": {"name": "kaplan_meier"}},
    "recorded": {
        "forecast": {"name": "replay", "recording": RECORDING},
        "trace": {"name": "replay", "requests": 200, "recording": RECORDING},
    },
}
CLUSTER: dict[str, Any] = {
    "cluster": {"instances": 4, "slots": 12, "kv_capacity": 8000},
    "step_time": {"name": "batch", "a": 0.01, "b": 1e-5, "c": 1e-5},
    "transfer": {"gigabits_per_second": 8, "bytes_per_token": 10_000},
    "trace": {
        "name": "lognormal",
        "requests": 200,
        "output_sigma": 1.2,
        "output_max": 1500,
        "prompt_max": 900,
    },
    "seeds": 1,
}
DISPATCH: dict[str, dict[str, Any]] = {
    "pool, barrier": {"clock": "barrier"},
    "pool, independent": {
        "clock": "independent",
        "arrivals": {"kind": "poisson", "rate": 20.0},
        "pool": {"limit": 16},
        "prefill": {"kind": "chunked", "max_batched_tokens": 512},
    },
    "instant": {
        "clock": "independent",
        "dispatch": "instant",
        "arrivals": {"kind": "gamma", "rate": 10.0, "cv": 2.0},
        "prefill": {"kind": "stage", "instances": 2},
        "slo": {"ttft_s": 1.0, "tpot_s": 0.05},
    },
}


def bits(value: Any, digest: Any) -> None:
    """Add every bit of a nested value to a digest."""
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype.str}{value.shape}".encode() + value.tobytes())
    elif is_dataclass(value):
        for field in fields(value):
            bits(getattr(value, field.name), digest)
    elif isinstance(value, tuple | list):
        for part in value:
            bits(part, digest)
    else:
        digest.update(repr(value).encode())


def sha256(*values: Any) -> str:
    digest = hashlib.sha256()
    bits(values, digest)
    return digest.hexdigest()[:32]


def machine() -> str:
    """What numbers depend on: the CPU that is compiled for, and how numpy rounds on this system."""
    x = np.linspace(0.01, 30.0, 10_000)
    rounded = (np.exp(x), np.log(x), np.log1p(x), x**0.3, x**-2.5, 10**x, np.tanh(x))
    return f"{binding.get_host_cpu_name()} {sha256(*rounded)[:12]}"


MACHINE = machine()


def random_forecast(kind: str, generator: np.random.Generator, n: int) -> Forecast:
    """Forecasts of which some are old, some have outlived their curve, and some are cut soon."""
    age, limit = generator.integers(0, 30, n), generator.integers(1, 300, n)
    limit = np.where(generator.uniform(size=n) < 0.3, np.inf, limit)
    if kind == "point":
        return PointForecast.new(generator.integers(1, 90, n) / 2).aged(age).capped(limit)
    hazard = generator.uniform(0.0, 0.3, (n, len(EDGES) - 1))
    hazard[generator.uniform(size=n) < 0.1, 3:] = 1.0
    survival = np.cumprod(np.concatenate([np.ones((n, 1)), 1 - hazard], axis=1), axis=1)
    if kind == "float32":
        survival = survival.astype(np.float32)
    return SurvivalForecast.new(EDGES, survival).aged(age).capped(limit)


KINDS = ("point", "float32", "float64")


def forecasts(kind: str) -> dict[str, npt.NDArray[Any]]:
    generator = np.random.default_rng(1)
    forecast = random_forecast(kind, generator, 300)
    older = forecast.aged(generator.integers(0, 50, 300))
    return {
        "at": forecast.at(STEPS),
        "at_each": forecast.at_each(generator.integers(0, 80, 300)),
        "mean": forecast.mean(),
        "quantile": forecast.quantile([0.1, 0.5, 0.9]),
        "aged at": older.at(STEPS),
        "aged mean": older.mean(),
        "on_grid": forecast.on_grid([0, 1, 5, 50, 500]).survival,
    }


def loads(kind: str) -> dict[str, npt.NDArray[Any]]:
    generator = np.random.default_rng(2)
    forecast = random_forecast(kind, generator, 400)
    instance, context = generator.integers(0, 9, 400), generator.integers(1, 3000, 400)
    load = expected_load(forecast, instance, context, 10, 130)
    return {"mean": load.mean, "variance": load.variance, "requests": load.requests}


def random_view(kind: str, seed: int) -> ClusterView:
    """A cluster with tight memory, requests of all ages, and a pool."""
    generator = np.random.default_rng(seed)
    n_instances, n, waiting = 4, int(generator.integers(5, 60)), int(generator.integers(1, 9))
    instance = generator.integers(0, generator.integers(1, n_instances + 1), n)
    prompt, generated = generator.integers(1, 300, n), generator.integers(0, 90, n)
    load = np.bincount(instance, weights=prompt + generated, minlength=n_instances)
    running = np.bincount(instance, minlength=n_instances)
    return ClusterView(
        slots=running + generator.integers(0, 4, n_instances),
        kv_capacity=load.astype(np.int64) + generator.integers(0, 3000, n_instances),
        queued=np.minimum(running, generator.integers(0, 3, n_instances)),
        instance=instance,
        prompt_tokens=prompt,
        generated_tokens=generated,
        forecast=random_forecast(kind, generator, n),
        waiting_prompt_tokens=generator.integers(1, 400, waiting),
        waiting_generated_tokens=generator.integers(0, 2, waiting),
        waiting_forecast=random_forecast(kind, generator, waiting),
        waited_steps=generator.integers(0, 100, waiting),
        dispatched=seed,
        instant=seed % 5 == 0,
        since_move=generator.choice([0, 50, 400, int(NEVER_MOVED), int(CANNOT_MOVE)], n),
        prefill_budget=generator.integers(-500, 3000, n_instances).astype(np.float64),
    )


def assignments(name: str) -> dict[str, npt.NDArray[Any]]:
    policy = create_policy(name, **SHORT.get(name, {}))
    placed = {}
    for kind in KINDS:
        views = [random_view(kind, seed) for seed in range(12)]
        placed[kind] = np.concatenate([policy.assign(view).instance for view in views])
    return placed


FOR_BALANCE = {"tolerance": 1.0, "crowded": 100.0}
"""Moves for balance, whatever overflows; survival makes none if more waits than fits."""
PLANNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "star": ("star", FOR_BALANCE),
    "star without prediction": ("star", FOR_BALANCE | {"prediction": False}),
    "star, weighted": ("star", FOR_BALANCE | {"underloaded": "below_mean", "stride": 8}),
    "survival": ("survival", FOR_BALANCE | {"payback": 2.0, "crowded": 1.0}),
    "survival, strided": (
        "survival",
        FOR_BALANCE | {"payback": 1.0, "stride": 4, "horizon": 64, "crowded": 1.0},
    ),
}


def plans(label: str) -> dict[str, npt.NDArray[Any]]:
    name, options = PLANNERS[label]
    quick = {"handshake_seconds": 1e-3, "bandwidth": 1e12}
    planner = create_migration_policy(name, **quick | options)
    moves = []
    for kind in KINDS:
        for seed in range(25):
            for move in planner.plan(random_view(kind, seed)).migrations:
                moves.append([seed, move.request, move.source, move.target, move.gain])
    return {"moves": np.array(moves, dtype=np.float64)}


def migration_inputs(kind: str) -> dict[str, npt.NDArray[Any]]:
    """What a planner is asked to decide on, without the planner."""
    planner = create_migration_policy("survival", stride=8)
    seen: list[npt.NDArray[Any]] = []
    shown = planner.__class__

    class Watched(shown):  # type: ignore[misc, valid-type]
        def decide(self, inputs: Any) -> Any:
            rows = np.arange(len(inputs.source))
            forecasts = inputs.forecasts_of(rows, np.linspace(0, 90, len(rows)))
            seen.extend([inputs.ahead, *forecasts])
            return super().decide(inputs)

    watched = Watched(stride=8)
    for seed in range(8):
        watched.plan(random_view(kind, seed))
    return {"inputs": np.concatenate([array.ravel() for array in seen])}


def simulated(changes: dict[str, Any]) -> dict[str, Any]:
    """Some figures of a small simulation, and a digest of every number of its result."""
    setup = run_setup(read_config(CLUSTER | changes))
    found: dict[str, Any] = {}
    for label, (policy, planner, own, _) in create_candidates(setup).items():
        result = run(own, policy, 0, label, planner)
        found[label] = {
            "digest": sha256(*(getattr(result, field.name) for field in fields(result)[1:])),
            "steps": result.steps,
            "migrations": result.migrations,
            "preemptions": result.preemptions,
            "imbalance": float(result.imbalance),
            "seconds": float(result.seconds),
        }
    return found


def checkpoint_forecasts(name: str) -> dict[str, npt.NDArray[Any]]:
    """What a shipped checkpoint forecasts of hidden states drawn at random."""
    predictor = load_predictor(str(CHECKPOINTS / name))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((32, predictor.hidden_size), generator=generator)
    n = torch.arange(32, dtype=torch.float32)
    numbers = torch.stack([5 * n, 7 * n + 1, 200 - n, n / 32, 0.02 * n, n], 1)
    forecast = predictor.forecast(RequestRows(hidden, numbers))
    return {"mean": forecast.mean(), "at": forecast.at([1, 10, 50])}


def recorded(find: Callable[[], dict[str, npt.NDArray[Any]]]) -> dict[str, Any]:
    """The arrays as the file has them: all bits as a digest, and a few numbers of each."""
    arrays = find()
    few = {
        name: np.ravel(values)[:: max(1, values.size // 6)][:8].astype(float).tolist()
        for name, values in arrays.items()
    }
    return {"digest": sha256(*map(shortened, arrays.values())), "numbers": few}


def shortened(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Floats to eight digits: the last bits of compiled sums depend on what was compiled first."""
    if values.dtype.kind != "f":
        return values
    fraction, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.round(fraction, 8), exponent) + 0.0


EXACT: dict[str, Callable[[], dict[str, npt.NDArray[Any]]]] = {
    **{f"forecasts: {kind}": partial(forecasts, kind) for kind in KINDS},
    **{f"loads: {kind}": partial(loads, kind) for kind in KINDS},
    **{f"assignments: {n}": partial(assignments, n) for n in policy_names()},
    **{f"plans: {label}": partial(plans, label) for label in PLANNERS},
    **{f"migration inputs: {kind}": partial(migration_inputs, kind) for kind in KINDS},
}
ANYWHERE = sorted({*policy_names()} - {"pab", "rl", "headroom"})
"""Policies that need neither what engines report nor a cluster like that of their training, and
that place a request as soon as it fits."""

SIMULATED: dict[str, dict[str, Any]] = {
    **{
        f"routing: {dispatch}": changes
        | {"policies": [{"name": name, **SHORT.get(name, {})} for name in ANYWHERE]}
        for dispatch, changes in DISPATCH.items()
    },
    "routing: instant, chunked": DISPATCH["instant"]
    | {"prefill": {"kind": "chunked", "max_batched_tokens": 512}}
    | {"policies": ["pab", "jsq", {"name": "rl", **SHORT["rl"]}]},
    **{
        f"forecast: {name}, {dispatch}": DISPATCH[dispatch]
        | changes
        | {"policies": ["brh", "min_min"]}
        for name, changes in FORECASTS.items()
        for dispatch in ("pool, barrier", "instant")
    },
    **{
        f"migration: {name}": DISPATCH["instant"]
        | {"prefill": {"kind": "none"}, "policies": ["jsq"]}
        | changes
        | {
            "migration": {
                "planners": [
                    {"name": name, "label": label, **options}
                    for label, (name, options) in PLANNERS.items()
                ]
            }
        }
        for name, changes in FORECASTS.items()
    },
}
PREDICTED = ("smollm2-135m-instruct", "smollm2-135m-instruct-star")


@cache
def golden() -> dict[str, Any]:
    """The file; empty while it is rewritten."""
    if WRITE or not GOLDEN.exists():
        return {"machine": MACHINE}
    found: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def expect() -> Iterator[Callable[[str, dict[str, Any]], dict[str, Any]]]:
    """Return what the file has of a case; when it is rewritten, what was found."""
    written: dict[str, Any] = {"machine": MACHINE}

    def wanted(case: str, found: dict[str, Any]) -> dict[str, Any]:
        written[case] = found
        return found if WRITE else golden()[case]

    yield wanted
    if WRITE:
        GOLDEN.parent.mkdir(exist_ok=True)
        lines = (f"{json.dumps(case)}: {json.dumps(found)}" for case, found in written.items())
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


Expect = Callable[[str, dict[str, Any]], dict[str, Any]]


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare the runs of a case, bit by bit where they were recorded."""
    if golden()["machine"] == MACHINE:
        assert found == wanted
        return
    assert found.keys() == wanted.keys()
    for label, figures in wanted.items():
        counted = {name: found[label][name] for name in COUNTS}
        assert counted == {name: figures[name] for name in COUNTS}, label
        for name in FIGURES:
            where = f"{label}: {name}"
            np.testing.assert_allclose(found[label][name], figures[name], SAME, err_msg=where)


@pytest.mark.parametrize("case", EXACT)
def test_forecasts_loads_and_decisions_are_as_recorded(case: str, expect: Expect) -> None:
    found = recorded(EXACT[case])
    wanted = expect(case, found)
    for name, numbers in wanted["numbers"].items():
        np.testing.assert_allclose(found["numbers"][name], numbers, rtol=SAME, err_msg=name)
    if golden()["machine"] == MACHINE:
        assert found["digest"] == wanted["digest"]


@pytest.mark.parametrize("case", SIMULATED)
def test_simulations_are_as_recorded(case: str, expect: Expect) -> None:
    found = simulated(SIMULATED[case])
    compare(found, expect(case, found))


@pytest.mark.parametrize("name", PREDICTED)
def test_shipped_checkpoints_forecast_as_recorded(name: str, expect: Expect) -> None:
    arrays = checkpoint_forecasts(name)  # threads and vector units sum in another order
    found = {key: np.round(values, 6).tolist() for key, values in arrays.items()}
    for key, values in expect(name, found).items():
        np.testing.assert_allclose(found[key], values, rtol=1e-4, atol=1e-5, err_msg=key)

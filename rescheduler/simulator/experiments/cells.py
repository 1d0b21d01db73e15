"""The cells of an experiment: a policy and a planner, a seed, a combination of what varies."""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from data_collection.files import read_text, write_text_atomically
from data_collection.versions import source_commit
from rescheduler.simulator.config.simulation_config import SimulationConfig, read_config

__all__ = [
    "Cell",
    "Figures",
    "Group",
    "cells_of",
    "changed_config",
    "groups",
    "read_cell",
    "run_cell",
    "write_cell",
]

Figures = dict[str, float]
"""Of one run, by name, see `run_metrics`."""


class Cell(NamedTuple):
    """What one worker computes at a time.

    Attributes:
        key: of its file; the same for the same work, whichever experiment it belongs to.
        config: of the simulation, with this policy alone.
        seed: of the run.
        title: for people.
    """

    key: str
    config: dict[str, Any]
    seed: int
    title: str


class Group(NamedTuple):
    """One policy in one case and one combination, over all seeds.

    Attributes:
        case: its name; empty where there are none.
        varied: key -> value, of what varies and of what makes the case.
        policy: label.
        cells: one for each seed.
    """

    case: str
    varied: dict[str, Any]
    policy: str
    cells: list[Cell]


def groups(
    base: SimulationConfig, vary: Mapping[str, Sequence[Any]], case: str = ""
) -> list[Group]:
    """Return every combination of the varied values with every policy.

    Args:
        base: what does not vary.
        vary: key -> values. A key is a path with dots, such as ``cluster.instances``; a policy is
            named by its label or by its place: ``policies.bfio.horizon``, ``policies.0.horizon``.
        case: that the groups are of.

    Raises:
        ValueError: a key that does not exist, no values, or a value that its key refuses.
    """
    for key, values in vary.items():
        if not isinstance(values, (list, tuple)) or not values:
            raise ValueError(f"vary.{key}: a list of values, not {values!r}")
    found = []
    for values in itertools.product(*vary.values()):
        varied = dict(zip(vary, values, strict=True))
        said = ", ".join(f"{key}={value}" for key, value in varied.items()) or "as configured"
        config = changed_config(base, varied)
        for choice in config.candidate_choices():
            alone = asdict(config)
            del alone["seeds"]
            policy, planner, order = choice.policy, choice.planner, choice.order
            alone["policies"] = [{"name": policy.name, **policy.options}]
            alone["migration"]["planners"] = [{"name": planner.name, **planner.options}]
            alone["orders"] = [{"name": order.name, **order.options}]
            cells = [
                Cell(_key(alone, seed), alone, seed, f"{choice.label}, {said}, seed {seed}")
                for seed in range(config.seeds)
            ]
            found.append(Group(case, varied, choice.label, cells))
    return found


def changed_config(
    base: SimulationConfig, changes: Mapping[str, Any], option: str = "vary"
) -> SimulationConfig:
    """Return a configuration in which some keys have other values; keys as `groups` takes them.

    Raises:
        ValueError: a key that does not exist, or a value that its key refuses.
    """
    plain = deepcopy(asdict(base))
    plain["policies"] = [choice.plain for choice in base.policy_choices()]
    plain["migration"]["planners"] = [choice.plain for choice in base.planner_choices()]
    plain["orders"] = [choice.plain for choice in base.order_choices()]
    for key, value in changes.items():
        _set(plain, key, value)
    try:
        return read_config(plain)
    except ValueError as error:
        said = ", ".join(f"{key} = {value}" for key, value in changes.items())
        raise ValueError(f"{option}: {said}: {error}") from error


def cells_of(found: Sequence[Group]) -> list[Cell]:
    """Return the cells of all groups, each once.

    A policy that a varied key does not concern has the same cell whatever that key is.
    The seeds come first, so that all combinations have some results early on.
    """
    each = {cell.key: cell for group in found for cell in group.cells}
    return sorted(each.values(), key=lambda cell: cell.seed)


def run_cell(cell: Cell) -> Figures:
    """Simulate one cell; return its figures."""
    # In the worker, so that the process that hands out the work starts at once.
    from rescheduler.simulator.results.metrics import run_metrics
    from rescheduler.simulator.run_setup import create_candidates, run_setup
    from rescheduler.simulator.simulation import run

    simulation = read_config(cell.config)
    (candidate,) = create_candidates(run_setup(simulation)).values()
    policy, planner, setup, order = candidate
    return run_metrics(run(setup, policy, cell.seed, planner=planner, order=order), simulation.slo)


def write_cell(folder: Path, cell: Cell, figures: Figures) -> None:
    """Write the figures of a cell to its file."""
    document = {
        "title": cell.title,
        "seed": cell.seed,
        "commit": source_commit(),
        "figures": figures,
        "config": cell.config,
    }
    text = json.dumps(document, indent=1) + "\n"
    write_text_atomically(folder / f"{cell.key}.json", text)


def read_cell(folder: Path, cell: Cell) -> tuple[Figures, str] | None:
    """Return the figures of a cell that was finished before, and the commit they were made at."""
    path = folder / f"{cell.key}.json"
    if not path.exists():
        return None
    try:
        document = json.loads(read_text(path))
        return {name: float(v) for name, v in document["figures"].items()}, document["commit"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # is computed again, and replaced


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    """Change one value in place."""
    parts = key.split(".")
    place: Any = config
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if isinstance(place, list):
            at = _policy(place, part, key)
            if last:
                place[at] = value
            place = place[at]
        elif isinstance(place, dict):
            if last:
                place[part] = value
            elif part not in place:
                raise ValueError(f"vary.{key}: there is no {'.'.join(parts[: i + 1])}")
            else:
                place = place[part]
        else:
            raise ValueError(f"vary.{key}: {'.'.join(parts[:i])} has no keys of its own")


def _policy(policies: list[dict[str, Any]], part: str, key: str) -> int:
    labels = [policy["label"] for policy in policies]
    if part in labels:
        return labels.index(part)
    if part.isdecimal() and int(part) < len(policies):
        return int(part)
    raise ValueError(f"vary.{key}: no policy {part!r}; there are: {', '.join(labels)}")


def _key(config: dict[str, Any], seed: int) -> str:
    """Return a name that depends on everything that the cell's figures depend on."""
    files = {}  # of the same name, they may have other contents another time
    for section in ("trace", "forecast", "step_time"):
        for option, value in config[section].items():
            if option != "name" and isinstance(value, str) and Path(value).exists():
                status = Path(value).stat()
                files[f"{section}.{option}"] = [status.st_size, status.st_mtime_ns]
    text = json.dumps([config, seed, files], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]

"""Where jobs such as the cells of an experiment are computed: cores here, or a Ray cluster."""

import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from threading import Thread
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from threadpoolctl import threadpool_limits

from data_collection.files import read_text, write_text_atomically
from data_collection.versions import source_commit
from predictor.compilation import is_kept
from rescheduler.commands.event_loop import held_interrupts
from rescheduler.simulator.config.simulation_config import SimulationConfig, read_config
from rescheduler.simulator.engine.engine import advance

Job = TypeVar("Job")
Result = TypeVar("Result")


def compile_notice() -> None:
    """Announce on standard error that compiling takes a while, unless compiled code is cached."""
    if not is_kept(advance):
        print("compiling the simulator: about a minute, only once", file=sys.stderr, flush=True)


def progress_bar() -> Progress:
    """Return a bar on standard error, which shows nothing where that is not a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def gather(
    results: Generator[tuple[Job, Result], None, None],
    total: int,
    keep: Callable[[Job, Result], None],
    title: Callable[[Job], str],
) -> bool:
    """Keep each result as soon as it is computed; return whether Ctrl-C ended that early.

    A result that is being kept when Ctrl-C arrives is kept whole.
    """
    with progress_bar() as bar:
        task = bar.add_task("", total=total)
        try:
            for job, result in results:
                with held_interrupts():
                    keep(job, result)
                bar.update(task, advance=1, description=title(job))
        except KeyboardInterrupt:
            return True
        finally:
            results.close()
    return False


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
    from rescheduler.simulator.simulation import create_candidates, run, run_setup

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


Outcomes = Generator[tuple[Job, Result | str], None, None]
"""Jobs with their results, or with what went wrong."""

_DIED = "its process died; was it out of memory?"
_LONGEST_ERROR = 400
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS", "NUMBA")}


def available_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_locally(
    jobs: Sequence[Job], workers: int, compute: Callable[[Job], Result], first_alone: bool = False
) -> Outcomes[Job, Result]:
    """Compute jobs in processes of their own; yield each as it finishes.

    A process that dies takes those jobs with it that were being computed. They are computed
    again, one at a time, so that only the one that kills its process is lost.

    Args:
        jobs: to compute.
        workers: processes at once.
        compute: of a module, as the processes import it by name.
        first_alone: compute the first job alone, which compiles for all others.
    """
    suspects: list[Job] = []
    waiting = deque(jobs)
    while waiting:
        yield from _in_pool(waiting, workers, compute, suspects, first_alone)
        first_alone = False
    for job in suspects:
        died: list[Job] = []
        yield from _in_pool(deque([job]), 1, compute, died)
        if died:
            yield job, _DIED


def run_on_ray(cells: Sequence[Cell], address: str) -> Outcomes[Cell, Figures]:
    """Compute cells as tasks of a Ray cluster, a core each; yield each as it finishes.

    Args:
        cells: to compute. Headway, and the files that they name, must be on every node.
        address: of the cluster; ``auto`` for the one this machine belongs to, ``local`` for a
            new one here.

    Raises:
        RuntimeError: Ray is not installed, or the cluster cannot be reached.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise RuntimeError(
            "--ray needs Ray, which is not installed: pip install ray; "
            "without --ray the sweep runs on the cores of this machine"
        ) from error
    try:
        ray.init(address=address, runtime_env={"env_vars": _ONE_THREAD}, log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        raise RuntimeError(f"no Ray cluster at {address!r}: {error}") from error
    try:
        task = ray.remote(num_cpus=1, max_retries=1)(run_cell)
        pending = {task.remote(cell): cell for cell in cells}
        while pending:
            done, _ = ray.wait(list(pending))
            for reference in done:
                cell = pending.pop(reference)
                try:
                    yield cell, ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    yield cell, _said(error.cause)
                except ray.exceptions.RayError as error:
                    yield cell, _said(error)
    finally:
        ray.shutdown()


def run_in_threads(
    jobs: Sequence[Job], compute: Callable[[Job], Figures], workers: int
) -> Generator[tuple[Job, Figures], None, None]:
    """Compute jobs that share data in threads of this process; yield each as it finishes.

    Compiled code lets threads run side by side. The first error ends all.

    Args:
        jobs: to compute, first ones first.
        compute: returns the figures of a job.
        workers: threads at once.
    """
    with ThreadPoolExecutor(workers) as threads:
        try:
            waiting = {threads.submit(compute, job): job for job in jobs}
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        except BaseException:  # Ctrl-C among them: do not wait for the others
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _in_pool(
    waiting: deque[Job],
    workers: int,
    compute: Callable[[Job], Result],
    suspects: list[Job],
    first_alone: bool = False,
) -> Outcomes[Job, Result]:
    """Compute jobs until none waits or a process dies; then add those under way to suspects."""
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        min(workers, len(waiting)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_prepare,
    )
    running: dict[Future[Result], Job] = {}
    broken, at_once = False, 1 if first_alone else workers
    try:
        while not broken and (waiting or running):
            while waiting and len(running) < at_once:
                running[pool.submit(compute, waiting[0])] = waiting[0]
                waiting.popleft()
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            at_once = workers
            for future in done:
                job = running.pop(future)
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    broken = True
                    suspects.append(job)
                elif error is not None:
                    yield job, _said(error)
                else:
                    yield job, future.result()
    except BrokenProcessPool:  # on handing out the next job, which goes on waiting
        broken = True
    except BaseException:  # Ctrl-C: do not wait for the jobs under way
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    suspects += running.values()


def _prepare() -> None:
    """Keep a worker to one core, leave Ctrl-C to the process that started it, and end with it."""
    os.environ.update(_ONE_THREAD)  # for libraries that are loaded later on
    threadpool_limits(limits=1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End when who started this process has: two must not write one job's state."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _said(error: Any) -> str:
    return shorten(f"{type(error).__name__}: {error}", _LONGEST_ERROR, placeholder=" ...")

"""Where the cells of an experiment are computed: the cores of this machine, or a Ray cluster."""

import importlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from textwrap import shorten
from typing import Any, TypeVar

from threadpoolctl import threadpool_limits

from rescheduler.simulator.experiments.cells import Cell, Figures, run_cell

__all__ = ["available_cores", "run_in_threads", "run_locally", "run_on_ray"]

Job = TypeVar("Job")

Outcome = tuple[Cell, Figures | str]
"""A cell with its figures, or with what went wrong."""

Outcomes = Generator[Outcome, None, None]

_DIED = "its process died; was it out of memory?"
_LONGEST_ERROR = 400
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS", "NUMBA")}


def available_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_locally(cells: Sequence[Cell], workers: int) -> Outcomes:
    """Compute cells in processes of their own; yield each as it finishes.

    A process that dies takes those cells with it that were being computed. They are computed
    again, one at a time, so that only the one that kills its process is lost.

    Args:
        cells: to compute. The first is computed alone, which compiles for all others.
        workers: processes at once.
    """
    suspects: list[Cell] = []
    waiting, first = deque(cells), True
    while waiting:
        yield from _in_pool(waiting, workers, suspects, first_alone=first)
        first = False
    for cell in suspects:
        died: list[Cell] = []
        yield from _in_pool(deque([cell]), 1, died)
        if died:
            yield cell, _DIED


def run_on_ray(cells: Sequence[Cell], address: str) -> Outcomes:
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
        pending = {task.remote(cell.config, cell.seed): cell for cell in cells}
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
    waiting: deque[Cell], workers: int, suspects: list[Cell], first_alone: bool = False
) -> Outcomes:
    """Compute cells until none waits or a process dies; then add those under way to suspects."""
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        min(workers, len(waiting)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_prepare,
    )
    running: dict[Future[Figures], Cell] = {}
    broken, at_once = False, 1 if first_alone else workers
    try:
        while not broken and (waiting or running):
            while waiting and len(running) < at_once:
                running[pool.submit(run_cell, waiting[0].config, waiting[0].seed)] = waiting[0]
                waiting.popleft()
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            at_once = workers
            for future in done:
                cell = running.pop(future)
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    broken = True
                    suspects.append(cell)
                elif error is not None:
                    yield cell, _said(error)
                else:
                    yield cell, future.result()
    except BrokenProcessPool:  # on handing out the next cell, which goes on waiting
        broken = True
    except BaseException:  # Ctrl-C: do not wait for the cells under way
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    suspects += running.values()


def _prepare() -> None:
    """Keep a worker to one core, and leave Ctrl-C to the process that started it."""
    os.environ.update(_ONE_THREAD)  # for libraries that are loaded later on
    threadpool_limits(limits=1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _said(error: Any) -> str:
    return shorten(f"{type(error).__name__}: {error}", _LONGEST_ERROR, placeholder=" ...")

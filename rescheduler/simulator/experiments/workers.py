"""Where jobs such as the cells of an experiment are computed: cores here, or a Ray cluster."""

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
from threading import Thread
from typing import Any, TypeVar

from threadpoolctl import threadpool_limits

from rescheduler.simulator.experiments.cells import Cell, Figures, run_cell

__all__ = ["available_cores", "run_in_threads", "run_locally", "run_on_ray"]

Job = TypeVar("Job")
Result = TypeVar("Result")

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

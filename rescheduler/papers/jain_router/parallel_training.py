"""Several trainings at once, each in a process of its own."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from multiprocessing.queues import SimpleQueue
from threading import Thread

import torch

from rescheduler.papers.jain_router.environment import RouterVectorEnvironment
from rescheduler.papers.jain_router.training import (
    Episodes,
    Job,
    Trained,
    finished_training,
    train_router,
)
from rescheduler.simulator.experiments.progress import progress_bar
from rescheduler.simulator.experiments.workers import available_cores
from rescheduler.simulator.run_setup import run_setup

__all__ = ["train_all"]

_LOOK_SECONDS = 0.5


_Reports = SimpleQueue[tuple[int, Episodes]]

_reports: _Reports
"""In a process that trains: what its parent shows."""


def train_all(jobs: Sequence[Job], workers: int | None = None) -> list[Trained]:
    """Train routers, or resume those that were interrupted, and show their progress.

    Args:
        jobs: the trainings.
        workers: processes at once; one per core when None.

    Raises:
        ValueError: a folder has the state of another training.
        KeyboardInterrupt: Ctrl-C; what each has trained by then is kept.
    """
    found = [finished_training(job) for job in jobs]
    left = [job for job, trained in zip(jobs, found, strict=True) if trained is None]
    if left:
        setups = [run_setup(config) for config in left[0].configs]
        RouterVectorEnvironment(setups, left[0].router, left[0].training.simulations)  # or refuses
    made = iter(_train_in_pool(left, workers) if left else [])
    return [trained if trained is not None else next(made) for trained in found]


def _train_in_pool(jobs: Sequence[Job], workers: int | None) -> list[Trained]:
    context = multiprocessing.get_context("spawn")
    reports: _Reports = context.SimpleQueue()
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        min(workers or available_cores(), len(jobs)), context, _prepare, (reports,)
    )
    try:
        running = [pool.submit(_train, at, job) for at, job in enumerate(jobs)]
        _show(jobs, running, reports)
        return [each.result() for each in running]
    except BaseException:  # Ctrl-C, or one that failed: the others have kept what they trained
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        reports.close()


def _show(jobs: Sequence[Job], running: Sequence[Future[Trained]], reports: _Reports) -> None:
    """Show a bar for each training, or a line for each episode, until one fails or all end."""
    with progress_bar() as bar:
        tasks = [
            bar.add_task(f"{job.variant}, seed {job.seed}", total=job.training.episodes)
            for job in jobs
        ]
        pending = set(running)
        while pending and not any(each.done() and each.exception() for each in running):
            _, pending = wait(pending, _LOOK_SECONDS)
            while not reports.empty():
                at, episodes = reports.get()
                job = jobs[at]
                said = f"{job.variant}, seed {job.seed}: {episodes}"
                bar.update(tasks[at], completed=episodes.done, description=said)
                if not sys.stderr.isatty():
                    print(f"{said}, episode {episodes.done}", file=sys.stderr, flush=True)


def _prepare(reports: _Reports) -> None:
    global _reports
    _reports = reports
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # the network is too small for more
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which is for the process that started this one


def _end_with_parent() -> None:
    """End when who started this process has: two must not write one training's state."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _train(at: int, job: Job) -> Trained:
    def report(episodes: Episodes) -> None:
        _reports.put((at, episodes))

    return train_router(job, report)

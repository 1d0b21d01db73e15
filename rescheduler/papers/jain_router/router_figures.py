"""Pictures of a router study, as the figures 1 and 5 of Jain et al. 2025 are."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rescheduler.papers.jain_router.router_study import CaseFigures
from rescheduler.papers.jain_router.training import Trained, Variant
from rescheduler.simulator.results.figures import (
    COLOURS,
    create_panels,
    finish_axes,
    running_mean,
)
from rescheduler.simulator.results.metrics import time_per_output_token
from rescheduler.simulator.results.run_result import RequestRecords

__all__ = ["draw_episode", "draw_training"]

FloatArray = npt.NDArray[np.float64]


def draw_episode(case: CaseFigures) -> Any:
    """Return four panels: end-to-end time, TTFT by arrival, TBT, and queues at the instances.

    The first has means over all episodes with their intervals, the others the first episode.
    """
    figure, panels = create_panels(4, 2, (6.5, 4.0), sharex=False, sharey=False)
    quantiles = []
    for row, (label, summary) in enumerate(case.summaries.items()):
        half, requests = summary.ci95.get("end_to_end", 0.0), case.first[label]
        colour = COLOURS[row % len(COLOURS)]
        drawn: dict[str, Any] = {"color": colour, "linestyle": "-" if row < len(COLOURS) else "--"}
        panels[0].errorbar(
            summary.mean["end_to_end"], row, xerr=half, fmt="o", color=colour, capsize=3
        )
        ttft = (requests.first_token - requests.arrival)[np.argsort(requests.arrival)]
        panels[1].plot(running_mean(ttft, 40, whole=True), label=label, linewidth=1.2, **drawn)
        tbt = time_per_output_token(requests, prefilled_first_token=True)
        quantiles.append(tbt[~np.isnan(tbt)] * 1e3)
        panels[3].plot(*_queue(requests), linewidth=1.0, **drawn)
    panels[0].set_yticks(range(len(case.summaries)), list(case.summaries))
    panels[2].boxplot(quantiles, orientation="horizontal", showfliers=False, whis=(1, 99))
    panels[2].set_yticks(range(1, len(quantiles) + 1), list(case.first))
    panels[1].legend(frameon=False, fontsize="small", ncols=2)
    for panel in (panels[0], panels[2]):
        panel.invert_yaxis()
    finish_axes(panels[0], "until all requests are served, s")
    finish_axes(panels[1], "request, by arrival", "TTFT, s")
    finish_axes(panels[2], "time between tokens of a request, ms (1st to 99th percentile)")
    finish_axes(panels[3], "time, s", "requests queued at instances")
    return figure


def draw_training(trained: Mapping[Variant, Sequence[Trained]]) -> Any:
    """Return mean rewards of the training episodes and the validation, a line a training."""
    figure, panels = create_panels(2, 2, (5.5, 3.8), sharex=False, sharey=False)
    for i, (variant, runs) in enumerate(trained.items()):
        for j, run in enumerate(runs):
            episodes = range(1, len(run.rewards) + 1)
            label = variant if j == 0 else None
            panels[0].plot(episodes, run.rewards, color=COLOURS[i], label=label)
            panels[1].plot(episodes, run.latencies, color=COLOURS[i])
    panels[0].set_ylabel("mean reward of a decision")
    panels[1].set_ylabel("validation, mean request latency, s")
    panels[1].set_yscale("log")
    for panel in panels:
        finish_axes(panel, "round of episodes")
        panel.xaxis.get_major_locator().set_params(integer=True)
    panels[0].legend(frameon=False)
    return figure


def _queue(requests: RequestRecords) -> tuple[FloatArray, FloatArray]:
    """Return seconds, and how many were placed by then and not started."""
    time = np.linspace(0.0, float(requests.end.max()), 400)
    placed = np.searchsorted(np.sort(requests.placed), time, "right")
    started = np.searchsorted(np.sort(requests.start), time, "right")
    return time, (placed - started).astype(np.float64)

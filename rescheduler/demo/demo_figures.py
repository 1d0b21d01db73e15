"""Figures of what a load's clients saw: goodput, TPOT, TTFT, preemptions, migrations."""

import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from rescheduler.demo.demo_load import ServedRequest
from rescheduler.engines.deployment import Deployment

__all__ = ["Objectives", "load_figures", "metric_total", "preemptions"]

_METRICS_SECONDS = 10.0


@dataclass(frozen=True)
class Objectives:
    """The latencies that a request must meet to count for goodput.

    Attributes:
        ttft_s: seconds to its first token, at most.
        tpot_s: seconds per token after it, at most.
    """

    ttft_s: float
    tpot_s: float

    def met(self, served: ServedRequest) -> bool:
        """Return whether a request ended well and in time."""
        if served.error or served.ttft is None or served.ttft > self.ttft_s:
            return False
        # A request of one token has no time between tokens that could be too long.
        return served.tpot is None or served.tpot <= self.tpot_s


def load_figures(
    served: Sequence[ServedRequest], seconds: float, objectives: Objectives
) -> dict[str, float]:
    """Return the figures of one run of a load.

    ``goodput`` counts the requests per second that meet the objectives, ``met`` their share;
    ``tpot`` and ``ttft`` are seconds over requests, as percentiles; ``gap_p99`` is the 99th
    percentile of each request's longest time between two chunks; ``throughput`` is tokens per
    second.

    Args:
        served: all requests of the load.
        seconds: from its start to its last answer.
        objectives: of the goodput.
    """
    good = sum(map(objectives.met, served))
    figures = {
        "requests": float(len(served)),
        "failed": float(sum(bool(s.error) for s in served)),
        "seconds": seconds,
        "goodput": good / seconds,
        "met": good / len(served),
        "throughput": sum(s.tokens for s in served) / seconds,
    }
    columns = {
        "tpot": [s.tpot for s in served if s.tpot is not None],
        "ttft": [s.ttft for s in served if s.ttft is not None],
    }
    for name, values in columns.items():
        for percentile in (50, 99):
            value = float(np.percentile(values, percentile)) if values else float("nan")
            figures[f"{name}_p{percentile}"] = value
    gaps = [s.longest_gap for s in served if s.tokens > 1]
    figures["gap_p99"] = float(np.percentile(gaps, 99)) if gaps else float("nan")
    return figures


def preemptions(deployment: Deployment) -> float:
    """Return how many requests the decode engines have preempted since they started."""
    return sum(
        metric_total(f"{instance.url}/metrics", "vllm:num_preemptions_total")
        for instance in deployment.decode
    )


def metric_total(url: str, name: str, **labels: str) -> float:
    """Return the sum of a Prometheus metric over its labels, of those that have these values.

    Raises:
        OSError: nothing answers there.
    """
    with urllib.request.urlopen(url, timeout=_METRICS_SECONDS) as response:
        families = text_string_to_metric_families(response.read().decode())
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

"""The figures of simulated runs, and their means over seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from rescheduler.simulator.config.simulation_config import SLOConfig

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class RequestRecords(NamedTuple):
    """The requests that finished or were turned away, [n] each, in order of that.

    Attributes:
        number: of the request in the trace, from 0.
        instance: where it ended.
        arrival: seconds at which it became visible.
        placed: seconds at which the policy gave it to an instance.
        start: seconds at which it was first admitted; of one that was turned away this is NaN,
            as the times before and after are, but for its arrival.
        first_token: seconds at which its first token was there.
        end: seconds at which its last token was there.
        prompt: tokens.
        output: tokens.
        preemptions: times it lost its place.
        migrations: times it moved.
        tpot_worst: its worst running mean of seconds per output token, see `SLOConfig`; NaN
            where that is not asked for, and of a single token.
        client: number of the account that sent it, see `TraceBlock`.
    """

    number: IntArray
    instance: IntArray
    arrival: FloatArray
    placed: FloatArray
    start: FloatArray
    first_token: FloatArray
    end: FloatArray
    prompt: IntArray
    output: IntArray
    preemptions: IntArray
    migrations: IntArray
    tpot_worst: FloatArray
    client: IntArray


class LoadSeries(NamedTuple):
    """Evenly thinned samples of a run's steps, at most 4,096.

    Attributes:
        step: [s] number of the step.
        time: [s] seconds at which it began.
        load: [s, G] context tokens on each instance.
        running: [s] requests on all instances.
        power: [s] mean watts of a GPU during the step, utilisation being own load / max load.
        execution_variance: [s] of the instances' step times, in seconds squared.
        held: [s] most tokens that an instance's KV cache holds, reserved ones included.
        preemptions: [s] until then.
        migrations: [s] until then.
    """

    step: IntArray
    time: FloatArray
    load: IntArray
    running: IntArray
    power: FloatArray
    execution_variance: FloatArray
    held: IntArray
    preemptions: IntArray
    migrations: IntArray


@dataclass(frozen=True, slots=True)
class RunResult:
    r"""One policy with one seed.

    Attributes:
        policy: its label.
        seed: of the run.
        n_instances: G.
        requests: those that finished, and those that were turned away.
        prefilled_first_token: a simulated prefill gave each first token.
        steps: steps recorded.
        seconds: from 0 to the last end.
        busy_seconds: sum of the steps' durations.
        tokens: generated, first ones included.
        imbalance: mean over steps of :math:`G \max_g L_g - \sum_g L_g`, in tokens.
        max_minus_min: mean over steps of :math:`\max_g L_g - \min_g L_g`, in tokens.
        idle_share: mean over steps of :math:`1 - \bar L / \max_g L_g`.
        execution_variance: mean over steps (or seconds, without a barrier) of the variance of the
            instances' step times, in seconds squared.
        most_held: most tokens that an instance's KV cache held, reserved ones included.
        energy_load_joules: of all GPUs, utilisation being own load / max load.
        energy_mfu_joules: of all GPUs, utilisation being mfu / mfu_sat.
        preemptions: requests that lost their place.
        migrations: requests that moved.
        decisions: times the policy was asked.
        plans: times the migration planner was asked.
        itl_histogram: [bins] tokens by the time since the token before.
        itl_edges: [bins + 1] seconds, log-spaced.
        series: loads and power over time.
    """

    policy: str
    seed: int
    n_instances: int
    requests: RequestRecords
    prefilled_first_token: bool
    steps: int
    seconds: float
    busy_seconds: float
    tokens: int
    imbalance: float
    max_minus_min: float
    idle_share: float
    execution_variance: float
    most_held: int
    energy_load_joules: float
    energy_mfu_joules: float
    preemptions: int
    migrations: int
    decisions: int
    plans: int
    itl_histogram: IntArray
    itl_edges: FloatArray
    series: LoadSeries


_PERCENTILES = (50, 95, 99)
_ROUNDING = 1e-9
"""Seconds by which times are off that batches were formed to meet exactly."""


class Summary(NamedTuple):
    """One policy over its seeds.

    Attributes:
        mean: of each figure over the runs.
        ci95: half the width of its 95% confidence interval (Student's t); nothing for one run.
        runs: number of them.
    """

    mean: dict[str, float]
    ci95: dict[str, float]
    runs: int

    @property
    def plain(self) -> dict[str, Any]:
        """Its values as JSON takes them."""
        return {"runs": self.runs, **self.mean, "ci95": self.ci95}


def run_metrics(result: RunResult, slo: SLOConfig | None = None) -> dict[str, float]:
    r"""Return the figures of one run. Times are in seconds, energies in joules.

    ``imbalance`` (:math:`G \max_g L_g - \sum_g L_g`), ``max_minus_min``, ``idle_share`` and
    ``execution_variance`` (of the instances' step times, in seconds squared) are means over
    steps; ``kv_peak`` is the most tokens that an instance held; ``throughput`` is tokens and
    ``requests_per_s`` finished requests per second of ``makespan``; ``offered_per_s`` is all
    requests over the time in which they arrived. ``latency`` is end − arrival, ``ttft`` is
    first_token − arrival, ``wait`` is start − arrival, ``tpot`` see `time_per_output_token`,
    ``tpot_worst`` see `SLOConfig`, ``itl`` the time between two tokens of a request: each a mean,
    with ``_p50``, ``_p95`` and ``_p99`` beside it; ``itl_max`` is the longest, as of one that was
    suspended. ``goodput`` counts the requests per second that
    meet both objectives, ``violated`` is the share of those that do not, the ``rejected`` ones
    among them. Where several clients sent requests, ``latency_of_clients`` is the mean over them
    of each one's mean latency, and ``latency_worst_client`` is the highest. ``energy`` reads
    utilisation as own load / max load, ``energy_mfu`` as mfu / mfu_sat. Figures that the run has
    no data for are left out.

    Args:
        result: of the run.
        slo: the objectives of ``goodput`` and ``violated``, which are left out without them.

    Source: Chen et al. 2026, §6.3, equations (7) to (10).
    """
    requests, seconds = result.requests, result.seconds
    figures = {
        "imbalance": result.imbalance,
        "max_minus_min": result.max_minus_min,
        "idle_share": result.idle_share,
        "execution_variance": result.execution_variance,
        "kv_peak": result.most_held,
    }
    if seconds > 0:
        figures["throughput"] = result.tokens / seconds
        figures["requests_per_s"] = np.count_nonzero(~np.isnan(requests.end)) / seconds
    last_arrival = requests.arrival.max(initial=0.0)
    if last_arrival > 0:
        figures["offered_per_s"] = len(requests.number) / last_arrival
    ttft = requests.first_token - requests.arrival
    tpot = time_per_output_token(requests, result.prefilled_first_token)
    figures |= _distribution("latency", requests.end - requests.arrival)
    figures |= _of_clients(requests)
    figures |= _distribution("ttft", ttft)
    figures |= _distribution("tpot", tpot)
    figures |= _distribution("tpot_worst", requests.tpot_worst)
    figures |= _inter_token_latency(result)
    figures |= _distribution("wait", requests.start - requests.arrival)
    if slo is not None and seconds > 0:
        figures |= _within(slo, ttft, tpot if slo.tpot == "mean" else requests.tpot_worst, seconds)
    figures |= {
        "rejected": int(np.count_nonzero(np.isnan(requests.end))),
        "preemptions": result.preemptions,
        "migrations": result.migrations,
        "decisions": result.decisions,
        "energy": result.energy_load_joules,
        "energy_mfu": result.energy_mfu_joules,
        "makespan": seconds,
        "steps": result.steps,
    }
    return {name: float(value) for name, value in figures.items()}


def time_per_output_token(requests: RequestRecords, prefilled_first_token: bool) -> FloatArray:
    """Return each request's seconds per output token, [n].

    Args:
        requests: [n] finished.
        prefilled_first_token: whether the first token came of a simulated prefill. If so, the
            time is (end − first_token) / (output − 1), and NaN for requests of one token; else
            every token is decoded, and it is (end − start) / output.

    Source: Chen et al. 2026, §6.3, equation (9), for the second reading.
    """
    if not prefilled_first_token:
        return (requests.end - requests.start) / requests.output
    tpot = np.full(len(requests.end), np.nan)
    several = requests.output > 1
    np.divide(requests.end - requests.first_token, requests.output - 1, out=tpot, where=several)
    return tpot


def histogram_quantile(
    histogram: npt.NDArray[np.int64], edges: FloatArray, levels: npt.ArrayLike
) -> FloatArray:
    """Return quantiles of counted values, log-linear within a bin.

    Args:
        histogram: [bins] counts, not all 0.
        edges: [bins + 1] ascending, above 0.
        levels: in [0, 1].
    """
    below = np.concatenate([[0.0], np.cumsum(histogram)])
    filled = histogram > 0  # flat parts of the distribution have no inverse
    keep = np.concatenate([[False], filled]) | np.concatenate([filled, [False]])
    wanted = np.asarray(levels, dtype=np.float64) * below[-1]
    return np.asarray(np.exp(np.interp(wanted, below[keep], np.log(edges[keep]))))


def half_interval(values: FloatArray) -> FloatArray:
    r"""Return half the width of the 95% confidence interval of a mean, by Student's t.

    .. math:: t_{0.975, n-1}\, s / \sqrt n

    Args:
        values: [n, ...] independent values, at least two.
    """
    n = len(values)
    return np.asarray(stdtrit(n - 1, 0.975) * values.std(axis=0, ddof=1) / np.sqrt(n))


def summarise(runs: Sequence[dict[str, float]]) -> Summary:
    """Return means over runs, with half their confidence intervals beside them.

    Args:
        runs: figures of each, at least one; only figures that all have are summarised.
    """
    names = [name for name in runs[0] if all(name in run for run in runs)]
    values = np.array([[run[name] for name in names] for run in runs])
    n = len(runs)
    ci95: dict[str, float] = {}
    if n > 1:
        ci95 = dict(zip(names, half_interval(values).tolist(), strict=True))
    return Summary(dict(zip(names, values.mean(axis=0).tolist(), strict=True)), ci95, n)


def _within(slo: SLOConfig, ttft: FloatArray, tpot: FloatArray, seconds: float) -> dict[str, float]:
    # A request of one token has no time between tokens that could be too long; one that was
    # turned away has no first token, which is never in time.
    longest = slo.ttft_s + _ROUNDING, slo.tpot_s + _ROUNDING
    met = np.count_nonzero((ttft <= longest[0]) & ~(tpot > longest[1]))
    return {"goodput": met / seconds, "violated": 1 - met / len(ttft)}


def _distribution(name: str, values: FloatArray) -> dict[str, float]:
    values = values[~np.isnan(values)]
    if len(values) == 0:
        return {}
    quantiles = np.quantile(values, [percentile / 100 for percentile in _PERCENTILES])
    return {name: values.mean()} | _named(name, quantiles)


def _of_clients(requests: RequestRecords) -> dict[str, float]:
    ended = ~np.isnan(requests.end)
    client, latency = requests.client[ended], (requests.end - requests.arrival)[ended]
    clients, sent_by = np.unique(client, return_inverse=True)
    if len(clients) < 2:
        return {}
    means = np.bincount(sent_by, weights=latency) / np.bincount(sent_by)
    return {"latency_of_clients": means.mean(), "latency_worst_client": means.max()}


def _inter_token_latency(result: RunResult) -> dict[str, float]:
    histogram, edges = result.itl_histogram, result.itl_edges
    if histogram.sum() == 0:
        return {}
    mean = np.average(np.sqrt(edges[1:] * edges[:-1]), weights=histogram)
    levels = [percentile / 100 for percentile in _PERCENTILES]
    of_levels = histogram_quantile(histogram, edges, [*levels, 1.0])
    return {"itl": mean} | _named("itl", of_levels[:-1]) | {"itl_max": of_levels[-1]}


def _named(name: str, quantiles: npt.NDArray[np.floating[Any]]) -> dict[str, float]:
    return {
        f"{name}_p{percentile}": value
        for percentile, value in zip(_PERCENTILES, quantiles, strict=True)
    }

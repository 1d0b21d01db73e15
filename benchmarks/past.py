"""What the traffic's own past says of lengths, and what serving by it gains, on public traces.

    python -m benchmarks.past --traces DIR [--quick] [--json OUT]

DIR has Mooncake's conversation trace (``mooncake_conversation*.jsonl.gz``) and samples of
ServeGen's clients (``servegen_deepseek_r1*.csv.gz``). A figure whose trace is not there is null.

*Rank correlations* are of forecasts with lengths, by Spearman: learnt as the next request arrives,
and learnt only when as many later ones have arrived as a queue holds. *known* are the requests that
share more than the first block with an earlier one. *siblings*: the shipped transcripts' answers to
one prompt, one after the other, once so many others have ended; *at*: of a second answer once the
first has ended or has so many tokens (*ended*: where only what has ended is known).

*held_out* and *new_tasks*: of the shipped predictor of prompts, of the past of each task as if it
were a client, and of both, on transcripts.

*Gains*: one instance with as many places as serve so much of the trace's tokens in its time, a step
of 30 ms, no limit of memory, arrivals spread over the 3 s that the trace rounds them to, and a
pool that takes all. Orders are relative to order of arrival. γ is a multiple of 1 / the mean excess
of the latency over its median, as served in order of arrival.
"""

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.support.report import arguments, report
from data_collection.workload.prompts import load_transcripts
from predictor.past.length_memory import LengthMemory, Recalled
from predictor.prompts.prompt_predictor import PromptPredictor
from rescheduler.ordering import ServiceOrder, create_order
from rescheduler.routing import create_policy
from rescheduler.simulator.config.simulation_config import (
    ArrivalsConfig,
    ClusterConfig,
    PoolConfig,
    SimulationConfig,
)
from rescheduler.simulator.forecasts.forecast_sources import create_forecast
from rescheduler.simulator.simulation import RunSetup, run
from rescheduler.simulator.workloads.trace import TraceBlock, first_requests
from rescheduler.simulator.workloads.trace_files import TraceFile
from rescheduler.step_time.step_time import StepTime

FloatArray = npt.NDArray[np.float64]

LOADS = (1.0, 1.1, 1.2)
GAMMAS = (1.0, 0.3, 0.1, 0.03)
STEP_SECONDS = 0.03
ROUNDED_SECONDS = 3.0
SERVEGEN_REQUESTS = 60_000
QUEUED = 200
MILLION = 1 << 20
ROOT = Path(__file__).parents[1]
TRANSCRIPTS = ROOT / "transcripts" / "smollm2-135m-instruct"
PROMPT_CHECKPOINT = ROOT / "checkpoints" / "smollm2-135m-instruct-prompt"
PROMPTS_AT_ONCE, SHUFFLES = 64, 6
AGES = (80, 320)
MOST_ENDED = 2
"""Fewer than 300 prompts have more answers than three."""


class Foreseen(NamedTuple):
    """Forecasts of a trace's requests.

    Attributes:
        correlation: of all, with their lengths.
        known: of the requests with a known prefix.
        share: of these.
        covered: share of the lengths in their 80% interval.
        microseconds: of processor time to forecast and to learn one.
    """

    correlation: float
    known: float
    share: float
    covered: float
    microseconds: float


def main() -> None:
    parser = arguments("what the past says of lengths, and what serving by it gains")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of public traces")
    parser.add_argument("--seeds", type=int, default=3, help="jittered arrivals (default: 3)")
    options = parser.parse_args()
    most, seeds = (1500, 1) if options.quick else (MILLION, options.seeds)
    figures = dict[str, float]()
    mooncake = find(options.traces, "mooncake_conversation*.jsonl.gz", most)
    servegen = find(options.traces, "servegen_deepseek_r1*.csv.gz", min(most, SERVEGEN_REQUESTS))
    synthetic = find(options.traces, "mooncake_synthetic*.jsonl.gz", most)
    figures |= correlations("mooncake", mooncake)
    figures |= correlations("mooncake_synthetic", synthetic)
    figures |= correlations("servegen_r1", servegen)
    figures |= siblings()
    figures |= together()
    figures |= gains(mooncake, seeds)
    figures["microseconds_per_request"] = figures["microseconds_per_request_mooncake"]
    figures |= memory(1 << 14 if options.quick else MILLION)
    report("past", figures, options.json)


def find(folder: Path | None, pattern: str, most: int) -> TraceBlock | None:
    """Return the first requests of the trace of that name, None where there is none."""
    paths = [] if folder is None else sorted(folder.glob(pattern))
    if not paths:
        print(f"no {pattern}: its figures are null")
        return None
    return first_requests(TraceFile(paths[0]), np.random.default_rng(0), most)


def correlation(values: FloatArray, others: FloatArray) -> float:
    """Return Spearman's rank correlation; NaN of fewer than two."""
    from scipy.stats import spearmanr  # benchmarks that start vLLM import this module

    return float(spearmanr(values, others).statistic) if len(values) > 1 else math.nan


def foreseen(trace: TraceBlock, behind: int) -> Foreseen:
    """Forecast a trace's requests, each learnt once so many more have arrived."""
    n = len(trace.prompt)
    raw = trace.prefixes if len(trace.prefixes) else [b""] * n
    chains = [np.frombuffer(keys, dtype=np.uint64) for keys in raw]
    memory = LengthMemory(salt=bytes(32))
    running: deque[tuple[Recalled, int]] = deque()
    warm = LengthMemory()
    warm.learn(warm.recall(1, 1, chains[0]), 1)
    mean, spread, known = np.empty(n), np.empty(n), np.empty(n, dtype=bool)
    clients, outputs = trace.client.tolist(), trace.output.tolist()
    began = time.process_time()
    for i in range(n):
        recalled = memory.recall(1, clients[i] + 1, chains[i])
        mean[i], spread[i] = recalled.length
        known[i] = recalled.known > 1
        running.append((recalled, outputs[i]))
        if len(running) > behind:
            memory.learn(*running.popleft())
    seconds = time.process_time() - began
    length = np.log(trace.output)
    return Foreseen(
        correlation(mean, length),
        correlation(mean[known], length[known]),
        float(known.mean()),
        float((np.abs(length - mean) < 1.2816 * spread).mean()),
        1e6 * seconds / n,
    )


def correlations(name: str, trace: TraceBlock | None) -> dict[str, float]:
    """Return the rank correlations of one trace."""
    if trace is None:
        names = ("rank_correlation", "microseconds_per_request")
        return {f"{figure}_{name}": math.nan for figure in names}
    at_once, late = foreseen(trace, 0), foreseen(trace, QUEUED)
    by_prompt = correlation(trace.prompt.astype(np.float64), np.log(trace.output))
    found = {
        f"requests_{name}": float(len(trace.prompt)),
        f"rank_correlation_{name}": at_once.correlation,
        f"rank_correlation_{name}_{QUEUED}_later": late.correlation,
        f"rank_correlation_{name}_by_input_length": by_prompt,
        f"covered_by_80_percent_interval_{name}": at_once.covered,
        f"microseconds_per_request_{name}": at_once.microseconds,
    }
    if len(trace.prefixes):
        found[f"rank_correlation_{name}_known"] = at_once.known
        found[f"rank_correlation_{name}_known_{QUEUED}_later"] = late.known
        found[f"share_known_{name}"] = at_once.share
    return found


def siblings() -> dict[str, float]:
    """Return the rank correlations for answers whose prompt has had so many answers already."""
    answers: dict[bytes, list[int]] = {}
    for path in sorted(TRANSCRIPTS.glob("*.parquet")):
        for one in load_transcripts(path).transcripts:
            prompt = np.array(one.prompt, dtype=np.int64).tobytes()
            answers.setdefault(blake2b(prompt, digest_size=8).digest(), []).append(len(one.answer))
    several = [(prompt, lengths) for prompt, lengths in answers.items() if len(lengths) > 1]
    memory, generator = LengthMemory(salt=bytes(32)), np.random.default_rng(0)
    rows: dict[int, list[tuple[float, float]]] = {}
    for i in generator.permutation(len(several)).tolist():
        prompt, lengths = several[i]
        for ended, length in enumerate(generator.permutation(lengths).tolist()):
            recalled = memory.recall(1, 1, np.frombuffer(prompt, dtype=np.uint64))
            rows.setdefault(ended, []).append((recalled.length.mean, math.log(length)))
            memory.learn(recalled, length)
    found = running_siblings(several)
    for ended in range(MOST_ENDED + 1):
        found[f"rank_correlation_siblings_{ended}_ended"] = correlation(*np.array(rows[ended]).T)
        found[f"requests_siblings_{ended}_ended"] = float(len(rows[ended]))
    return found


def together() -> dict[str, float]:
    """Return those of prompts' forecasts, of the past of a task, and of both, on transcripts.

    A task stands for a client. ``held-out`` has prompts that the predictor has not learned from,
    ``new-tasks`` tasks of which it has seen none.
    """
    predictor, found = PromptPredictor.load(str(PROMPT_CHECKPOINT)), {}
    for name in ("held-out", "new-tasks"):
        answers = load_transcripts(TRANSCRIPTS / f"{name}.parquet").transcripts
        forecasts: list[float] = []
        for i in range(0, len(answers), PROMPTS_AT_ONCE):
            some = answers[i : i + PROMPTS_AT_ONCE]
            prompts: list[Any] = [one.prompt for one in some]
            temperatures = [1.0 if one.temperature is None else one.temperature for one in some]
            most = [one.max_tokens for one in some]
            forecasts += predictor.forecast(prompts, temperatures, most).mean().tolist()
        rows = []
        for seed in range(SHUFFLES):
            memory, generator = LengthMemory(salt=bytes(32)), np.random.default_rng(seed)
            shuffled = []
            for i in generator.permutation(len(answers)).tolist():
                one, by_prompt = answers[i], forecasts[i]
                task = int.from_bytes(blake2b(one.task.encode(), digest_size=7).digest(), "little")
                recalled = memory.recall(1, task, np.ones(1, dtype=np.uint64))
                past = recalled.expected(one.max_tokens)
                both = recalled.expected(one.max_tokens, by_prompt)
                shuffled.append((by_prompt, past, both, len(one.answer)))
                memory.learn(recalled, len(one.answer), one.finish_reason != "stop")
            *by, length = np.array(shuffled).T
            rows.append([correlation(forecast, length) for forecast in by])
        means = np.mean(rows, axis=0).tolist()
        for source, value in zip(("prompt", "past", "both"), means, strict=True):
            found[f"rank_correlation_{name.replace('-', '_')}_{source}"] = value
    return found


def running_siblings(several: list[tuple[bytes, list[int]]]) -> dict[str, float]:
    """Return those of second answers, as the first ones have ended or have so many tokens."""
    found = {}
    for age in AGES:
        memory, generator = LengthMemory(salt=bytes(32)), np.random.default_rng(0)
        rows = []
        for i in generator.permutation(len(several)).tolist():
            prompt, lengths = several[i]
            first, second = generator.permutation(lengths)[:2].tolist()
            chain = np.frombuffer(prompt, dtype=np.uint64)
            before = memory.recall(1, 1, chain)
            if first <= age:
                memory.learn(before, first)
            known = memory.recall(1, 1, chain)
            beside = known if first <= age else known.beside(age, 0)
            rows.append((known.length.mean, beside.length.mean, math.log(second)))
            if first > age:
                memory.learn(before, first)
            memory.learn(beside, second)
        ended, beside_it, length = np.array(rows).T
        found[f"rank_correlation_siblings_at_{age}_ended"] = correlation(ended, length)
        found[f"rank_correlation_siblings_at_{age}"] = correlation(beside_it, length)
    return found


@dataclass(frozen=True)
class Jittered:
    """A trace whose arrivals are spread over the seconds to which they are rounded."""

    block: TraceBlock
    name: str = "jittered"
    has_arrivals: bool = True

    def blocks(self, generator: np.random.Generator) -> Iterator[TraceBlock]:
        (draws,) = generator.spawn(1)
        arrival = self.block.arrival + draws.uniform(0, ROUNDED_SECONDS, len(self.block.arrival))
        order = np.argsort(arrival)
        timed: list[Any] = [*self.block._replace(arrival=arrival)]
        yield TraceBlock(*(column[order] for column in timed if len(column)))


def served(
    block: TraceBlock, places: int, forecast: str, order: ServiceOrder, seed: int
) -> FloatArray:
    """Return the latencies of a trace's requests in one run."""
    config = SimulationConfig(
        cluster=ClusterConfig(1, places, None),
        clock="independent",
        arrivals=ArrivalsConfig("trace"),
        pool=PoolConfig(MILLION),
        trace={"path": "-"},
    )
    step = StepTime(STEP_SECONDS, 0.0, 0.0, 0.0)
    setup = RunSetup(config, Jittered(block), create_forecast(forecast), step)
    requests = run(setup, create_policy("jsq"), seed, order=order).requests
    return np.asarray(requests.end - requests.arrival)


def gains(trace: TraceBlock | None, seeds: int) -> dict[str, float]:
    """Return what orders gain over order of arrival, by load, as means over seeds."""
    if trace is None:
        return {"latency_gain_mooncake_110": math.nan, "p99_change_mooncake_110": math.nan}
    found = dict[str, float]()
    work = float(trace.output.sum()) * STEP_SECONDS / float(trace.arrival[-1] + ROUNDED_SECONDS)
    for load in LOADS:
        places, percent = round(work / load), round(100 * load)
        found[f"places_mooncake_{percent}"] = places
        rows: dict[str, list[tuple[float, ...]]] = {}
        for seed in range(seeds):
            first = served(trace, places, "none", create_order("fcfs"), seed)
            rate = 1 / float((first - np.median(first)).clip(0).mean() * 2)
            arms = [("shortest", create_order("shortest"), name) for name in ("past", "oracle")]
            if load == LOADS[1]:
                for factor in GAMMAS:
                    boost = create_order("boost", gamma=factor * rate)
                    arms += [(f"boost_{factor:g}", boost, name) for name in ("past", "oracle")]
            arms += [("boost", create_order("boost"), name) for name in ("kaplan_meier", "past")]
            for label, order, forecast in arms:
                latency = served(trace, places, forecast, order, seed)
                rows.setdefault(f"{label}_{forecast}", []).append(
                    (
                        100 * float(latency.mean() / first.mean() - 1),
                        100 * float(np.percentile(latency, 99) / np.percentile(first, 99) - 1),
                        float(np.median(latency)),
                    )
                )
            rows.setdefault("fcfs", []).append((0.0, 0.0, float(np.median(first))))
        for arm, values in rows.items():
            mean, tail, median = np.mean(values, axis=0).tolist()
            if arm != "fcfs":
                found[f"latency_change_mooncake_{percent}_{arm}"] = mean
                found[f"p99_change_mooncake_{percent}_{arm}"] = tail
            found[f"median_seconds_mooncake_{percent}_{arm}"] = median
    found["latency_gain_mooncake_110"] = found["latency_change_mooncake_110_shortest_past"]
    found["p99_change_mooncake_110"] = found["p99_change_mooncake_110_shortest_past"]
    return found


def memory(keys: int) -> dict[str, float]:
    """Return what a full memory takes, and how long a request takes there."""
    filled, generator = LengthMemory(keys), np.random.default_rng(0)
    chain = 23  # keys of a request, as many as Mooncake's have
    n = 2 * keys // chain
    names = generator.integers(1, 1 << 62, (n, chain), dtype=np.uint64)
    began = time.process_time()
    for i in range(n):
        filled.learn(filled.recall(1, 1 + i % 1000, names[i]), 1 + i % 1000)
    seconds = time.process_time() - began
    return {
        "keys_when_full": filled.known,
        "megabytes_per_million_keys": filled.nbytes / (1 << 20) * MILLION / filled.known,
        "microseconds_per_request_when_full": 1e6 * seconds / n,
    }


if __name__ == "__main__":
    main()

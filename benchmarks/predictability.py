"""How much of a length can be known: SmolLM2's own continuations beside what is forecast.

    python -m benchmarks.predictability [--continuations 16] [--prefixes 150] [--report]
        [--out FOLDER] [--figure PNG] [--quick] [--json OUT]

Prefixes are prompts that no predictor has learned from (``held-out`` of the transcripts), with the
first 0, 80 and 320 tokens of their answers. SmolLM2 goes on with each of them again and again, at
its temperature and up to its cap. The lengths that come are what a perfect forecaster of that
prefix would know: nobody can say more of the next one than their distribution.

*Integrated Brier scores* are of P(R > h), over h up to the cap (see `integrated_brier`), on the
same continuations for all. The bound is that of the true distribution, without the bias of few
continuations: the mean of n / (n - 1) S(h) (1 - S(h)) with S the share of n that are longer than h.
``way`` is how far a forecast is from Kaplan and Meier's curve (of all rounds, by age) on the
way to it. *Rank correlations* are of forecast means with single lengths, by Spearman; the bound is
the root of that of two continuations of one prefix. Intervals are of a bootstrap over prefixes.
``cool`` are answers at temperatures below 0.8, which go on much the same each time: who knows them
has computed them. ``warm`` are the others.

What has been generated is kept in the folder, and more continuations go on from there: each takes
some ten minutes on two cores for all prefixes. Those of an age that are interrupted begin anew.
"""

import itertools
import os
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from benchmarks.support.report import Cells, arguments, report, resumable
from data_collection.files import find_shipped
from data_collection.models import resolve_model
from data_collection.workload.prompts import Transcript, load_transcripts
from predictor.forecasts.forecast import SurvivalForecast
from predictor.forecasts.forecast_recording import ForecastRecording, read_recording
from predictor.forecasts.kaplan_meier import KaplanMeierCurve

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

AGES = (0, 80, 320)
FOLDER = "transcripts/smollm2-135m-instruct"
RECORDING = "recordings/smollm2-135m-instruct-prompts.parquet"
LEARNED_FROM = ("round-1", "round-2", "round-3")
STEP, RESAMPLES = 8, 1000
AT_ONCE = 144  # of some 1,200 tokens: more preempt each other in 4 GiB of KV cache
COMPILED_FROM = 3000  # continuations: fewer are made sooner than a model is compiled


class Prefixes(NamedTuple):
    """Prefixes of one age: their rows in the transcripts, tokens to the cap, and what came then.

    ``recorded`` are their rows in the recording of forecasts, ``warm`` those at a temperature of at
    least 0.8.
    """

    age: int
    rows: IntArray
    recorded: IntArray
    left: IntArray
    rest: IntArray
    warm: npt.NDArray[np.bool_]


class Scores(NamedTuple):
    """Of one forecaster: its squared errors [n_prefixes, n_horizons], and its means."""

    squared: FloatArray
    means: FloatArray


def main() -> None:
    parser = arguments("how much of a length can be known")
    parser.add_argument("--continuations", type=int, help="of each prefix (default: 16)")
    parser.add_argument("--prefixes", type=int, help="of each age (default: 150)")
    parser.add_argument("--report", action="store_true", help="only of what has been generated")
    out = Path("benchmarks/results/predictability")
    parser.add_argument("--out", type=Path, default=out, help=f"what is kept (default: {out})")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="draw the scores")
    options = parser.parse_args()
    n_prefixes = (4 if options.quick else 150) if options.prefixes is None else options.prefixes
    most = (2 if options.quick else 16) if options.continuations is None else options.continuations
    if n_prefixes < 2 or most < 1:
        parser.error("--prefixes must be at least 2, and --continuations at least 1")
    answers = load_transcripts(find_shipped(f"{FOLDER}/held-out.parquet")).transcripts
    recording = read_recording(find_shipped(RECORDING))
    recorded = _recorded(answers, recording)
    prefixes = [_drawn(answers, recorded, age, n_prefixes) for age in AGES]
    kept = Cells(options.out, {"prefixes": n_prefixes})
    if not options.report:
        with resumable():
            _generate(answers, prefixes, kept, most)
    figures: dict[str, float] = {}
    for one in prefixes:
        rests = _rests(one, kept, most)
        scores = _scores(one, rests, recording)
        everything = np.arange(len(one.rows))
        figures |= figures_of(one, rests, scores, everything, str(one.age))
        for name, part in (("cool", ~one.warm), ("warm", one.warm)):
            if part.any():
                rows = np.flatnonzero(part)
                figures |= figures_of(one, rests, scores, rows, f"{one.age}_{name}")
    if "rank_correlation_prompt_0" in figures:  # of the prompt alone, before any token
        figures["rank_correlation_prompt"] = figures["rank_correlation_prompt_0"]
    report("predictability", figures, options.json)
    if options.figure is not None:
        _draw(figures, options.figure)


def _recorded(answers: list[Transcript], recording: ForecastRecording) -> IntArray:
    """Return the row of each answer in the recording: some were recorded in another order."""
    rows: dict[tuple[int, int], list[int]] = defaultdict(list)
    sizes = zip(recording.prompt.tolist(), recording.output.tolist(), strict=True)
    for row, size in enumerate(sizes):
        rows[size].append(row)
    try:
        found = [rows[len(one.prompt), len(one.answer)].pop(0) for one in answers]
    except IndexError:
        raise ValueError(f"{RECORDING} is not of the held-out transcripts") from None
    return np.array(found)


def _drawn(answers: list[Transcript], recorded: IntArray, age: int, n: int) -> Prefixes:
    """Return prefixes of answers that are longer, the same ones whenever it is asked."""
    lengths = np.array([len(one.answer) for one in answers])
    caps = np.array([one.max_tokens for one in answers])
    rows = np.random.default_rng(age).permutation(len(answers))
    rows = rows[lengths[rows] > age][:n]
    # Those with vLLM's default, 1, and what was kept as float32.
    warm = np.array([one.temperature is None or one.temperature > 0.79 for one in answers])
    left, rest = caps[rows] - age, lengths[rows] - age
    return Prefixes(age, rows, recorded[rows], left, rest, warm[rows])


def _generate(answers: list[Transcript], prefixes: list[Prefixes], kept: Cells, most: int) -> None:
    """Continue every prefix so often, and keep the lengths after each age of each round."""
    wanted = [
        (number, one)
        for number, one in itertools.product(range(most), prefixes)
        if kept.read(_name(one, number)) is None
    ]
    if not wanted:
        return
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # In one process all cores compute: an engine that waits for its worker keeps one of them busy.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = LLM(
        model=resolve_model("smollm2"),
        max_model_len=4096,
        max_num_seqs=AT_ONCE,
        distributed_executor_backend="uni",
        enforce_eager=len(wanted) * len(prefixes[0].rows) < COMPILED_FROM,
        # Requests cannot have seeds of their own on a CPU: a later run draws others.
        seed=wanted[0][0],
    ).llm_engine
    due: dict[str, tuple[Prefixes, int, int]] = {}
    for number, one in wanted:
        for i, (row, left) in enumerate(zip(one.rows.tolist(), one.left.tolist(), strict=True)):
            answer = answers[row]
            sampling = SamplingParams(
                temperature=1.0 if answer.temperature is None else answer.temperature,
                top_p=1.0 if answer.top_p is None else answer.top_p,
                max_tokens=left,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prefix = {"prompt_token_ids": [*answer.prompt, *answer.answer[: one.age]]}
            name = f"{number}/{one.age}/{i}"
            engine.add_request(name, prefix, sampling)
            due[name] = one, number, i
    lengths = {(one.age, number): np.zeros(len(one.rows)) for one, number, _ in due.values()}
    with tqdm(total=len(due), desc="continuations") as progress:
        while due:
            for output in engine.step():
                one, number, i = due.pop(output.request_id)
                found = lengths[one.age, number]
                found[i] = len(output.outputs[0].token_ids)
                progress.update()
                if found.all():
                    kept.write(_name(one, number), found.astype(int).tolist())


def _name(prefixes: Prefixes, number: int) -> str:
    return f"after-{prefixes.age}/{number:02}"


def _rests(prefixes: Prefixes, kept: Cells, most: int) -> IntArray:
    """Return the lengths that came, [n_prefixes, n]: the answer itself, and its continuations."""
    found = (kept.read(_name(prefixes, number)) for number in range(most))
    return np.stack([prefixes.rest, *(one for one in found if one is not None)], axis=1)


def _scores(prefixes: Prefixes, rests: IntArray, recording: ForecastRecording) -> dict[str, Scores]:
    """Return the scores of everything that says how long these prefixes go on."""
    age, rows, left = prefixes.age, prefixes.recorded, prefixes.left
    horizons = np.arange(1, max(2, int(left.max())), STEP)
    longer = rests[:, :, None] > horizons
    scores = {"bound": Scores(bound(longer), rests.mean(axis=1))}
    curves = recording.curves[recording.first_row[rows] + age // recording.interval]
    forecasts = {"ours": SurvivalForecast.new(recording.edges, curves, left)}
    if age == 0 and recording.prompt_curves is not None:
        curves = recording.prompt_curves[rows]
        forecasts["prompt"] = SurvivalForecast.new(recording.edges, curves, left)
    edges = np.arange(0, int(left.max()) + 1).astype(np.float64)
    curve = _kaplan_meier().at(age + edges) / _kaplan_meier().at(age)
    same = np.tile(curve, (len(rows), 1))
    forecasts["kaplan_meier"] = SurvivalForecast.new(edges, same, left)
    for name, forecast in forecasts.items():
        squared = ((forecast.at(horizons)[:, None] - longer) ** 2).mean(axis=1)
        scores[name] = Scores(squared, forecast.mean())
    return scores


def bound(longer: npt.NDArray[np.bool_]) -> FloatArray:
    r"""Return the score of the true distribution, [n_prefixes, n_horizons]; NaN of one length each.

    .. math:: E[\mathrm{Brier}] = S (1 - S) = E\Big[\frac{n}{n - 1}\, \hat S (1 - \hat S)\Big]

    Args:
        longer: [n_prefixes, n, n_horizons], whether each of n lengths is.
    """
    n, share = longer.shape[1], longer.mean(axis=1)
    return n / (n - 1) * share * (1 - share) if n > 1 else np.full(share.shape, np.nan)


@cache
def _kaplan_meier() -> KaplanMeierCurve:
    """Return the curve of all lengths in the transcripts that predictors learned from."""
    files = (find_shipped(f"{FOLDER}/{name}.parquet") for name in LEARNED_FROM)
    known = [one for file in files for one in load_transcripts(file).transcripts]
    lengths = np.array([len(one.answer) for one in known])
    cut = np.array([one.finish_reason != "stop" for one in known])
    return KaplanMeierCurve.estimate(lengths, cut)


def figures_of(
    prefixes: Prefixes, rests: IntArray, scores: Mapping[str, Scores], rows: IntArray, name: str
) -> dict[str, float]:
    """Return the figures of some prefixes of one age, with half a 95% interval each."""
    horizons = np.arange(1, max(2, int(prefixes.left.max())), STEP)
    counts = prefixes.left[:, None] > horizons
    draws = [rows, *rows[np.random.default_rng(1).integers(0, len(rows), (RESAMPLES, len(rows)))]]
    samples = [_of(drawn, rests, scores, counts) for drawn in draws]
    figures = {f"prefixes_{name}": float(len(rows))}
    figures[f"continuations_{name}"] = rests.shape[1] - 1.0
    for figure, value in samples[0].items():
        drawn = np.array([one[figure] for one in samples[1:]])
        figures[f"{figure}_{name}"] = value
        known = drawn[~np.isnan(drawn)]
        half = np.diff(np.percentile(known, [2.5, 97.5]))[0] / 2 if len(known) else np.nan
        figures[f"{figure}_{name}_half_interval"] = float(half)
    return figures


def _of(
    rows: IntArray, rests: IntArray, scores: Mapping[str, Scores], counts: npt.NDArray[np.bool_]
) -> dict[str, float]:
    """Return the figures of some of the prefixes."""
    weight = counts[rows].sum(axis=0)
    known = weight > 0
    figures = {}
    for name, score in scores.items():
        by_horizon = (score.squared[rows] * counts[rows]).sum(axis=0)[known] / weight[known]
        figures[f"ibs_{name}"] = float(by_horizon.mean())
    possible = figures["ibs_kaplan_meier"] - figures["ibs_bound"]
    for name in scores:
        if name not in ("bound", "kaplan_meier"):
            gained = figures["ibs_kaplan_meier"] - figures[f"ibs_{name}"]
            figures[f"way_{name}"] = 100 * gained / possible
            means = scores[name].means[rows]
            correlation = _mean_correlation([(means, rest) for rest in rests[rows].T])
            figures[f"rank_correlation_{name}"] = correlation
    pairs = list(itertools.combinations(rests[rows].T, 2))
    if pairs:
        figures["rank_correlation_bound"] = max(_mean_correlation(pairs[:15]), 0.0) ** 0.5
    return figures


def _mean_correlation(pairs: list[tuple[Any, Any]]) -> float:
    from scipy.stats import spearmanr  # vLLM's worker, which loads this module, trips over it

    if any(np.ptp(values) == 0 for pair in pairs for values in pair):
        return np.nan  # all alike: there is no order
    return float(np.mean([spearmanr(one, other).statistic for one, other in pairs]))


def _draw(figures: Mapping[str, float], out: Path) -> None:
    """Draw the scores of all forecasters at each age, with the bound as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = {"kaplan_meier": "lengths of others", "prompt": "prompt", "ours": "hidden state"}
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for i, age in enumerate(AGES):
        names = [name for name in shown if f"ibs_{name}_{age}" in figures]
        for j, name in enumerate(names):
            height, half = (figures[f"ibs_{name}_{age}{end}"] for end in ("", "_half_interval"))
            at, label = i + (j - (len(names) - 1) / 2) * 0.25, shown[name] if i == 0 else None
            colour = f"C{list(shown).index(name)}"
            axes.bar(at, height, 0.22, yerr=half, color=colour, label=label, capsize=3)
        bound = figures[f"ibs_bound_{age}"]
        label = "nobody can do better" if i == 0 else ""
        axes.hlines(bound, i - 0.42, i + 0.42, color="black", label=label)
    axes.set_xticks(range(len(AGES)), [f"after {age} tokens" for age in AGES])
    axes.set_ylabel("integrated Brier score")
    figure.legend(loc="outside upper center", frameon=False, ncols=4)
    axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main()

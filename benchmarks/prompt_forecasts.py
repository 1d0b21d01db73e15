"""What a forecast from the prompt is worth beside one from the hidden state.

    python -m benchmarks.prompt_forecasts [--quick] [--seeds N] [--recording FILE] --json OUT

A recording has, of the same requests, what was forecast of the prompt before prefill and of the
hidden state at the first token (`headway record --prompt-checkpoint`). First table: how well each
tells the length of the answer, beside the lengths of the others; rank correlation of the mean,
concordance, integrated Brier score and coverage of the 80% interval. Second: what it gains to serve
in order of each, at 100 and 120% of capacity, with prompts computed among decode steps (chunked)
and by instances of their own (staged): mean latency, P99 and time to first token relative to the
order of arrival, paired by seed, with half a 95% interval.
"""

from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks.order import BASE, FCFS, Arm, Runs, Setting, change, simulated
from benchmarks.room import BY_AGE, EXACT, Case, filled
from benchmarks.support.report import arguments, write_report
from predictor.evaluation.survival_metrics import (
    Outcomes,
    concordance,
    coverage,
    integrated_brier,
    levels_of,
)
from predictor.forecasts.forecast import SurvivalForecast
from predictor.forecasts.kaplan_meier import KaplanMeierCurve
from rescheduler.simulator.results.report import markdown_table
from rescheduler.simulator.workloads.forecast_recording import ForecastRecording, read_recording

RECORDING = "recordings/smollm2-135m-instruct-prompts.parquet"
LOADS = (1.2, 1.0)
FIGURES = ("latency", "latency_p99", "ttft", "slowdown")
BOOST, SHORTEST = {"name": "boost"}, {"name": "shortest"}


def main() -> None:
    parser = arguments("what a forecast from the prompt is worth")
    parser.add_argument("--recording", type=Path, default=Path(RECORDING))
    parser.add_argument("--seeds", type=int, default=6, help="runs of each arm (default: 6)")
    options = parser.parse_args()
    seeds, requests = (2, 300) if options.quick else (options.seeds, 3_000)
    recorded = read_recording(options.recording)
    scores = {name: quality(forecast, recorded) for name, forecast in forecasts(recorded).items()}
    figures = {
        f"{score}_{name}": value for name, of in scores.items() for score, value in of.items()
    }
    tables = [quality_table(scores)]
    replay = {"name": "replay", "recording": str(options.recording)}
    case = Case("smollm2", filled(replay | {"requests": requests}, 10_240), ())
    for setting in (Setting(case), Setting(case, staged=True)):
        for load in LOADS:
            runs = simulated(setting, arms(replay), load, seeds)
            tables.append(table(f"{setting.name}, {load:.0%} load", runs))
            for label in runs:
                for figure in FIGURES if label != BASE else ():
                    estimate = change(runs, label, figure)
                    key = f"{figure}_{setting.name}_{100 * load:.0f}_{label}"
                    figures |= {key: estimate.mean, f"{key}_half_interval": estimate.half}
    print("\n\n".join(tables))
    write_report("prompt_forecasts", figures, options.json, tables=tables)


def arms(replay: dict[str, Any]) -> dict[str, Arm]:
    prompts, states = replay | {"reads": "prompts"}, replay | {"reads": "hidden_states"}
    return {
        BASE: Arm(FCFS),
        "boost, no forecasts": Arm(BOOST, BY_AGE),
        "boost, prompts": Arm(BOOST, prompts),
        "boost, hidden states": Arm(BOOST, states),
        "boost, prompts and hidden states": Arm(BOOST, replay),
        "boost, exact": Arm(BOOST, EXACT),
        "shortest, prompts and hidden states": Arm(SHORTEST, replay),
        "shortest, exact": Arm(SHORTEST, EXACT),
    }


def forecasts(recorded: ForecastRecording) -> dict[str, SurvivalForecast]:
    """Return what is known of each request before its first token, and with it."""
    if recorded.prompt_curves is None:
        raise SystemExit("the recording has no forecasts of prompts")
    cap = recorded.max_tokens.astype(np.float64)
    curve = KaplanMeierCurve.estimate(recorded.output, recorded.cut).at(recorded.edges)
    others = np.tile(np.minimum.accumulate(curve), (len(recorded), 1))
    return {
        "lengths of others": SurvivalForecast.new(recorded.edges, others, cap),
        "prompt": SurvivalForecast.new(recorded.edges, recorded.prompt_curves, cap),
        "hidden state": SurvivalForecast.new(
            recorded.edges, recorded.curves[recorded.first_row], cap
        ),
    }


def quality(forecast: SurvivalForecast, recorded: ForecastRecording) -> dict[str, float]:
    outcomes = Outcomes(recorded.output, recorded.cut, recorded.max_tokens)
    levels = levels_of(forecast, outcomes)
    return {
        "rank_correlation": float(spearmanr(forecast.mean(), recorded.output).statistic),
        "concordance": concordance(forecast, outcomes) or 0.5,
        "integrated_brier": integrated_brier(forecast, outcomes),
        "coverage_80": coverage(levels, recorded.cut, 0.8),
    }


def quality_table(scores: dict[str, dict[str, float]]) -> str:
    names = list(next(iter(scores.values())))
    rows = [[name, *(f"{of[score]:.3f}" for score in names)] for name, of in scores.items()]
    return "\n".join(["### quality", *markdown_table(["forecast from", *names], rows)])


def table(title: str, runs: Runs) -> str:
    rows = []
    for label in runs:
        if label == BASE:
            cells = [f"{np.mean([one[figure] for one in runs[BASE]]):.3g} s" for figure in FIGURES]
        else:
            estimates = [change(runs, label, figure) for figure in FIGURES]
            cells = [f"{one.mean:+.0f} ± {one.half:.0f}%" for one in estimates]
        rows.append([label, *cells])
    return "\n".join([f"### {title}", *markdown_table(["order", *FIGURES], rows)])


if __name__ == "__main__":
    main()

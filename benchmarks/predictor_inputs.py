"""What each input of the survival model, and averaging its forecasts, gains on held-out prompts.

    python -m benchmarks.predictor_inputs DATASET --splits 4 --json OUT

Every variant is trained on several splits by prompt, as ``configs/predictor/survival.yaml`` does,
and measured on the part that neither trained nor stopped it. Variants share the splits, so that
the gain over the first of them is paired; its standard error is over the splits.
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping

from benchmarks.support.report import arguments, write_report
from predictor.evaluation.comparators import KaplanMeier
from predictor.evaluation.survival_metrics import Outcomes, coverage, integrated_brier, levels_of
from predictor.forecasts.forecast import Forecast, SurvivalForecast
from predictor.models.survival_mlp import SurvivalMLP
from predictor.training.row_table import RowTable
from predictor.training.rows_data_module import RowsDataModule, request_rows
from predictor.training.survival_training import SurvivalTraining

COUNTS = ("generated_tokens", "prompt_tokens")
REPETITION = ("repetition", "repeated_suffix")
INPUTS = {
    "generated, prompt": COUNTS,
    "+ temperature": (*COUNTS, "temperature"),
    "+ repetition": (*COUNTS, *REPETITION),
    "+ temperature, repetition": (*COUNTS, "temperature", *REPETITION),
}
HALF_LIVES = (0, 15, 30, 60)


class Scores(NamedTuple):
    """Of one variant on one split."""

    below_kaplan_meier: float
    mae: float
    mae_kaplan_meier: float
    covered: float


def main() -> None:
    """Train all variants on all splits and print a table."""
    parser = arguments("inputs of the survival model, and averaging its forecasts", quick=False)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--splits", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--patience", type=int, default=10)
    parser.add_argument("--requests", type=int, help="train on so many requests only")
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: dict[str, list[Scores]] = {}
    for split in range(given.splits):
        data = RowsDataModule(
            given.dataset,
            batch_size=512,
            split_seed=split,
            train_requests=given.requests,
            cut_requests="censor",
        )
        data.setup("fit")
        for name, inputs in INPUTS.items():
            predictor = _trained(data, inputs, given.lr, given.patience)
            for half_life in HALF_LIVES:
                scores = _measured(predictor, data, half_life)
                found.setdefault(f"{name}; half-life {half_life}", []).append(scores)
        _print(found)
    figures = {
        f"{name} {field}": float(np.mean([getattr(one, field) for one in scores]))
        for name, scores in found.items()
        for field in Scores._fields
    }
    write_report("predictor_inputs", figures, given.json, splits=given.splits)


def _trained(
    data: RowsDataModule, inputs: Sequence[str], lr: float, patience: int
) -> SurvivalTraining:
    """Train as `headway train fit` does, and return the training with its best epoch's weights."""
    L.seed_everything(0, verbose=False)
    training = SurvivalTraining(inputs=tuple(inputs), lr=lr)
    best = _BestWeights()
    trainer = L.Trainer(
        max_epochs=100,
        callbacks=[EarlyStopping(training.monitor, patience=patience), best],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        trainer.fit(training, datamodule=data)
    training.load_state_dict(best.weights)
    return training.eval()


class _BestWeights(L.Callback):
    """Keeps the weights of the epoch with the lowest validation figure."""

    def __init__(self) -> None:
        self.figure = float("inf")
        self.weights: Mapping[str, torch.Tensor] = {}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, SurvivalTraining)
        figure = float(trainer.callback_metrics[pl_module.monitor])
        if not trainer.sanity_checking and figure < self.figure:
            self.figure = figure
            self.weights = {name: w.clone() for name, w in pl_module.state_dict().items()}


def _measured(training: SurvivalTraining, data: RowsDataModule, half_life: float) -> Scores:
    predictor = training.predictor
    assert isinstance(predictor, SurvivalMLP)
    predictor.averaging_half_life = half_life
    training.finish(data)  # recalibrated with this averaging
    test = data.parts["test"].ran_to_their_end()
    comparator = KaplanMeier()
    comparator.fit(data.parts["train"], data.parts["validation"])
    outcomes = Outcomes(test.remaining_tokens, test.censored, test.tokens_left())
    forecast, by_age = predictor.forecast(request_rows(test)), comparator.forecast(test)
    return Scores(
        1 - integrated_brier(forecast, outcomes) / integrated_brier(by_age, outcomes),
        _mae(forecast, test),
        _mae(by_age, test),
        _covered(forecast, outcomes),
    )


def _mae(forecast: Forecast, rows: RowTable) -> float:
    return float(np.abs(forecast.median() - rows.remaining_tokens).mean())


def _covered(forecast: SurvivalForecast, outcomes: Outcomes) -> float:
    return coverage(levels_of(forecast, outcomes), outcomes.cut, 0.8)


def _print(found: Mapping[str, Sequence[Scores]]) -> None:
    print("\n| inputs | below Kaplan-Meier | over the first | MAE | its | 80% covers |")
    print("|---|---:|---:|---:|---:|---:|")
    first = np.array([one.below_kaplan_meier for one in next(iter(found.values()))])
    for name, scores in found.items():
        below = np.array([one.below_kaplan_meier for one in scores])
        gain = below - first
        error = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else np.nan
        mean = np.mean(scores, axis=0)
        print(
            f"| {name} | {below.mean():.1%} | {gain.mean():+.1%} ± {error:.1%} | {mean[1]:.1f} | "
            f"{mean[2]:.1f} | {mean[3]:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

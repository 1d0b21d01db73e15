"""`headway train tune`: search a predictor's shape and training with Optuna (STAR §4.4)."""

import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping

from data_collection.files import write_text_atomically
from predictor.training.predictor_training import (
    PredictorTraining,
    RemainingLengthTraining,
    SurvivalTraining,
)
from predictor.training.rows_data_module import RowsDataModule

if TYPE_CHECKING:
    import optuna


def tune(
    dataset: Path,
    predictor: Literal["survival", "star"] = "survival",
    out: Path = Path("runs/tune"),
    trials: int = 20,
    max_epochs: int = 100,
    patience: int = 10,
    limit: int | None = None,
    seed: int = 0,
) -> None:
    """Search depth 2-6, width 256-1024, learning rate 1e-4-1e-3 and batch size.

    The search space comes from STAR §4.4, with batches of 16-128. For the survival model it has
    depth 2-4, batches of 128-1024 and the noise, too. Every trial trains with early stopping on
    the validation figure (MAE, or the censored likelihood). Median pruning cuts hopeless trials
    short. The study is kept in ``OUT/study.db``: run the command again to go on after an
    interruption. Writes ``OUT/trials.md`` and ``OUT/trials.csv``, and prints the training command
    of the best trial.

    Args:
        dataset: folder of the dataset.
        predictor: the survival model, or STAR's regressor.
        out: Folder of the study and its table.
        trials: Trials to have in the end. Earlier runs' trials count.
        max_epochs: Most epochs of a trial.
        patience: Epochs without a better validation MAE after which a trial stops.
        limit: Last edge of the survival model's grid: the serving model's context in tokens. If not
            set, 8,192, or as many as the longest answer has.
        seed: Seed of the search, the split and every training.

    Raises:
        DatasetError: the dataset cannot be used.
        ValueError: fewer than one trial.
    """
    import optuna

    if trials < 1:
        raise ValueError(f"trials must be at least 1, not {trials}")
    survival = predictor == "survival"
    data = RowsDataModule(
        dataset, split_seed=seed, cut_requests="censor" if survival else "leave_out"
    )
    data.setup("fit")
    out.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name=f"headway-{predictor}-{dataset.resolve().name}",
        storage=f"sqlite:///{out / 'study.db'}",
        direction="minimize",
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=5),
        load_if_exists=True,
    )
    finished = len([trial for trial in study.trials if trial.state.is_finished()])
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

    def objective(trial: optuna.Trial) -> float:
        depth = trial.suggest_int("depth", 2, 4 if survival else 6)
        width = trial.suggest_int("width", 256, 1024, step=128)
        batches = [128, 256, 512, 1024] if survival else [16, 32, 64, 128]
        data.batch_size = trial.suggest_categorical("batch_size", batches)
        lr = trial.suggest_float("lr", 1e-4, 1e-3, log=True)
        widths = (width,) * (depth - 1)
        L.seed_everything(seed, verbose=False)
        training: PredictorTraining
        if survival:
            noise = trial.suggest_float("noise", 0.0, 3.0)
            training = SurvivalTraining(limit=limit, widths=widths, lr=lr, noise=noise)
        else:
            training = RemainingLengthTraining(widths=widths, lr=lr)
        return _train(trial, data, training, max_epochs, patience)

    study.optimize(objective, n_trials=max(0, trials - finished), show_progress_bar=True)
    _write_table(study, out)
    best = study.best_trial.params
    widths = [best["width"]] * (best["depth"] - 1)
    noise = f" --model.init_args.noise {best['noise']:.2f}" if survival else ""
    print(
        f"best validation figure {study.best_value:.4g}; train it with\n"
        f"  headway train fit --config configs/predictor/{predictor}.yaml --data.dataset {dataset} "
        f"--model.init_args.widths '{widths}' --model.init_args.lr {best['lr']:.2e}{noise} "
        f"--data.batch_size {best['batch_size']}"
    )


class _ReportToStudy(L.Callback):
    """Report every epoch's validation figure to the study, which may stop the trial early."""

    def __init__(self, trial: "optuna.Trial", monitor: str) -> None:
        self._trial = trial
        self._monitor = monitor
        self.best = float("inf")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        import optuna

        figure = float(trainer.callback_metrics[self._monitor])
        self.best = min(self.best, figure)
        self._trial.report(figure, trainer.current_epoch)
        if self._trial.should_prune():
            raise optuna.TrialPruned


def _train(
    trial: "optuna.Trial",
    data: RowsDataModule,
    training: PredictorTraining,
    max_epochs: int,
    patience: int,
) -> float:
    report = _ReportToStudy(trial, training.monitor)
    trainer = L.Trainer(
        max_epochs=max_epochs,
        callbacks=[EarlyStopping(training.monitor, patience=patience), report],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        deterministic=True,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        trainer.fit(training, datamodule=data)
    return report.best


def _write_table(study: "optuna.Study", out: Path) -> None:
    searched = list(study.best_trial.params)
    heads = ["trial", "state", *searched, "epochs", "validation figure"]
    rows = []
    for trial in sorted(study.trials, key=lambda trial: trial.value or 0.0):
        if trial.value is not None:
            values = [trial.params[name] for name in searched]
            cells = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in values]
            ends = [str(len(trial.intermediate_values)), f"{trial.value:.4f}"]
            rows.append([str(trial.number), trial.state.name.lower(), *cells, *ends])
    lines = [f"| {' | '.join(heads)} |", "|" + "---:|" * len(heads)]
    table = "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
    csv = [",".join(head.replace(" ", "_") for head in heads), *map(",".join, rows)]
    write_text_atomically(out / "trials.md", table + "\n")
    write_text_atomically(out / "trials.csv", "\n".join(csv) + "\n")
    print(table)

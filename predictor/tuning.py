"""`headway tune`: search the MLP's shape and training with Optuna (STAR §4.4)."""

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping

from data_collection.atomic_file import write_text_atomically
from predictor.rows_data_module import RowsDataModule
from predictor.training import RemainingLengthTraining

if TYPE_CHECKING:
    import optuna

__all__ = ["tune"]


def tune(
    dataset: Path,
    out: Path = Path("runs/tune"),
    trials: int = 20,
    max_epochs: int = 100,
    patience: int = 10,
    seed: int = 0,
) -> None:
    """Search depth 2-6, width 256-1024, learning rate 1e-4-1e-3 and batch size 16-128.

    The search space is that of STAR §4.4; every trial trains with early stopping on the
    validation MAE, and hopeless ones are cut short by median pruning. The study is kept in
    ``OUT/study.db``: run the command again to go on after an interruption. Writes
    ``OUT/trials.md`` and ``OUT/trials.csv``, and prints the training command of the best.

    Args:
        dataset: folder of the dataset.
        out: where the study and its table go.
        trials: how many to have in the end, those of earlier runs counted in.
        max_epochs: of a trial.
        patience: epochs without a better validation MAE before a trial stops.
        seed: of the search, the split and every training.

    Raises:
        DatasetError: the dataset cannot be used.
        ValueError: fewer than one trial.
    """
    import optuna

    if trials < 1:
        raise ValueError(f"trials must be at least 1, not {trials}")
    data = RowsDataModule(dataset, split_seed=seed)
    data.setup("fit")
    out.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name=f"headway-{dataset.resolve().name}",
        storage=f"sqlite:///{out / 'study.db'}",
        direction="minimize",
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=5),
        load_if_exists=True,
    )
    finished = len([trial for trial in study.trials if trial.state.is_finished()])
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

    def objective(trial: optuna.Trial) -> float:
        depth = trial.suggest_int("depth", 2, 6)
        width = trial.suggest_int("width", 256, 1024, step=128)
        data.batch_size = trial.suggest_categorical("batch_size", [16, 32, 64, 128])
        lr = trial.suggest_float("lr", 1e-4, 1e-3, log=True)
        L.seed_everything(seed, verbose=False)
        return _train(trial, data, (width,) * (depth - 1), lr, max_epochs, patience)

    study.optimize(objective, n_trials=max(0, trials - finished), show_progress_bar=True)
    _write_table(study, out)
    best = study.best_trial
    widths = [best.params["width"]] * (best.params["depth"] - 1)
    print(
        f"best validation MAE {best.value:.1f} tokens; train it with\n"
        f"  headway train fit --config configs/predictor/star.yaml --data.dataset {dataset} "
        f"--model.widths '{widths}' --model.lr {best.params['lr']:.2e} "
        f"--data.batch_size {best.params['batch_size']}"
    )


class _ReportToStudy(L.Callback):
    """Tell the study every epoch's validation MAE; it may cut the trial short."""

    def __init__(self, trial: "optuna.Trial") -> None:
        self._trial = trial
        self.best = float("inf")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        import optuna

        mae = float(trainer.callback_metrics["val_mae"])
        self.best = min(self.best, mae)
        self._trial.report(mae, trainer.current_epoch)
        if self._trial.should_prune():
            raise optuna.TrialPruned


def _train(
    trial: "optuna.Trial",
    data: RowsDataModule,
    widths: Sequence[int],
    lr: float,
    max_epochs: int,
    patience: int,
) -> float:
    report = _ReportToStudy(trial)
    trainer = L.Trainer(
        max_epochs=max_epochs,
        callbacks=[EarlyStopping("val_mae", patience=patience), report],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        deterministic=True,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        trainer.fit(RemainingLengthTraining(widths=tuple(widths), lr=lr), datamodule=data)
    return report.best


def _write_table(study: "optuna.Study", out: Path) -> None:
    finished = [trial for trial in study.trials if trial.value is not None]
    lines = ["| trial | state | depth | width | lr | batch size | epochs | validation MAE |"]
    lines.append("|---:|---|---:|---:|---:|---:|---:|---:|")
    csv = ["trial,state,depth,width,lr,batch_size,epochs,validation_mae"]
    for trial in sorted(finished, key=lambda trial: trial.value or 0.0):
        p, state, epochs = trial.params, trial.state.name.lower(), len(trial.intermediate_values)
        cells = [trial.number, state, p["depth"], p["width"], f"{p['lr']:.2e}", p["batch_size"]]
        cells += [epochs, f"{trial.value:.2f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
        csv.append(",".join(map(str, cells)))
    write_text_atomically(out / "trials.md", "\n".join(lines) + "\n")
    write_text_atomically(out / "trials.csv", "\n".join(csv) + "\n")
    print("\n".join(lines))

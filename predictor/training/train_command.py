"""`headway train`: Lightning's command line around the predictor's training."""

import shutil
import sys
import time
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from data_collection.files import read_text, write_text_atomically
from data_collection.versions import machine, source_commit, versions
from predictor.models.checkpoint import export_checkpoint
from predictor.training.predictor_training import (
    PredictorTraining,
    RemainingLengthTraining,
    SurvivalTraining,
)
from predictor.training.rows_data_module import RowsDataModule


class _KeptEpochs(ModelCheckpoint):
    """The best epoch and the last one, in a folder that may be moved.

    Lightning writes absolute paths into checkpoints. It forgets the best epoch where they differ
    from the folder's, or looks for it where it was. Here the best epoch is beside the checkpoint
    that training goes on from, wherever that is.
    """

    @property
    def state_key(self) -> str:
        """The name of the state in checkpoints: that of Lightning's class, as it always was."""
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__name__, 1)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Let the paths in a checkpoint be those of this folder, with the best epoch in it."""
        state = checkpoint["callbacks"].get(self.state_key)
        if state is None or self.dirpath is None or trainer.ckpt_path is None:
            return
        resumed, folder = Path(trainer.ckpt_path).resolve(), Path(self.dirpath)
        best = resumed.parent / Path(state["best_model_path"]).name
        state |= {"dirpath": self.dirpath, "last_model_path": str(folder / "last.ckpt")}
        if not best.is_file():
            print(
                f"{best}: the best epoch until now is missing: the best from {resumed.name} on is "
                "taken",
                file=sys.stderr,
            )
            state |= {"best_model_path": str(resumed), "best_model_score": None}
            state |= {"best_k_models": {}, "kth_best_model_path": "", "kth_value": self.kth_value}
            return
        kept = folder / best.name
        if kept != best:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(best, kept)
        state |= {"best_model_path": str(kept), "kth_best_model_path": str(kept)}
        state["best_k_models"] = {str(kept): state["best_model_score"]}


class ExportCheckpoint(Callback):
    """When training ends, write the best epoch as a checkpoint with its card."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started = 0.0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note when training began."""
        self._started = time.monotonic()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Load the best epoch's weights and write the checkpoint."""
        assert isinstance(pl_module, PredictorTraining)
        assert pl_module.predictor is not None
        best = next(c for c in trainer.callbacks if isinstance(c, ModelCheckpoint))  # type: ignore[attr-defined]
        if not best.best_model_path:
            return  # nothing was trained (a dry run)
        state = torch.load(best.best_model_path, weights_only=True)["state_dict"]
        pl_module.load_state_dict(state)
        data: RowsDataModule = trainer.datamodule  # type: ignore[attr-defined]
        pl_module.eval()
        pl_module.finish(data)
        figure = float(best.best_model_score or "nan")
        provenance = self._provenance(trainer, data) | {pl_module.monitor: figure}
        self.folder.mkdir(parents=True, exist_ok=True)
        if data.embedding is not None:
            data.embedding.save(self.folder)
        export_checkpoint(pl_module.predictor.cpu(), self.folder, provenance)
        if data.dataset.is_dir():
            card = read_text(data.dataset / "README.md")
        else:
            n_requests = len(data.parts["train"].requests)
            card = f"Transcripts: `{data.dataset.name}`, {n_requests} requests.\n"
        write_text_atomically(self.folder / "dataset_card.md", card)
        print(f"best {pl_module.monitor} {figure:.4g}; wrote {self.folder}")

    def _provenance(self, trainer: L.Trainer, data: RowsDataModule) -> dict[str, Any]:
        train = data.parts["train"]
        return {
            "command": "headway " + " ".join(sys.argv[1:]),
            "commit": source_commit(),
            "versions": versions(),
            "machine": machine(),
            "dataset": f"{data.dataset.name}: {len(train.requests)} requests, engine "
            f"{train.session.engine}, sampling {train.session.sampling}",
            "rows": {name: len(part) for name, part in data.parts.items()},
            "rows of cut requests": f"{data.censored_rows} ({data.cut_requests})",
            "split_seed": data.split_seed,
            "seed": int(torch.initial_seed()),
            "epochs": trainer.current_epoch,
            "training_seconds": round(time.monotonic() - self._started, 1),
        }


TRAININGS = (SurvivalTraining, RemainingLengthTraining)
"""What ``--model`` may name."""


class _TrainCLI(LightningCLI):
    """Adds the output folder, the patience, and the logs of every training."""

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Refuse a checkpoint that cannot be read by its name, before Lightning reads it."""
        super().parse_arguments(parser, args)
        chosen = self.config.get(self.config.get("subcommand") or "") or {}
        path = chosen.get("ckpt_path")
        if path and Path(path).is_file():
            message = f"--ckpt-path {path}: not a whole checkpoint such as OUT/training/last.ckpt"
            try:
                state = torch.load(path, weights_only=True, map_location="cpu")
            except (RuntimeError, ValueError, TypeError, EOFError, UnpicklingError) as error:
                raise ValueError(message) from error
            if not isinstance(state, dict) or "loops" not in state:
                raise ValueError(message)
            if "averaging_half_life" in state.get("hyper_parameters", {}):
                raise ValueError(
                    f"--ckpt-path {path}: of an earlier version, whose forecasts were averaged; "
                    "train anew, without it"
                )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the arguments that belong to neither model, data nor trainer."""
        parser.add_argument(
            "--out", type=Path, default=Path("runs/predictor"), help="folder of the checkpoint"
        )
        parser.add_argument(
            "--patience",
            type=int,
            default=10,
            help="stop after this many epochs without a better validation figure",
        )

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Add callbacks and logs, all below ``out``."""
        chosen = self.config[self.subcommand] if self.subcommand else self.config
        out: Path = chosen["out"]
        callbacks = [
            EarlyStopping(self.model.monitor, patience=chosen["patience"]),
            _KeptEpochs(
                out / "training",
                monitor=self.model.monitor,
                save_last=True,
                enable_version_counter=False,  # last.ckpt is the newest
            ),
            ExportCheckpoint(out),
        ]
        kwargs["callbacks"] = callbacks + list(kwargs.get("callbacks") or [])
        logs = out / "logs"
        kwargs["logger"] = [
            CSVLogger(logs, name="csv"),
            TensorBoardLogger(logs, name="tensorboard"),
        ]
        return super().instantiate_trainer(**kwargs)


def train(
    arguments: list[str], parser_class: type[LightningArgumentParser] = LightningArgumentParser
) -> None:
    """Run ``headway train fit|validate|test`` with Lightning's command line.

    ``--model`` is SurvivalTraining or RemainingLengthTraining; the files in
    ``configs/predictor/`` choose one.
    """
    _TrainCLI(
        PredictorTraining,
        RowsDataModule,
        parser_class=parser_class,
        parser_kwargs={"prog": "headway train"},
        subclass_mode_model=True,
        args=arguments,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        trainer_defaults={
            "accelerator": "auto",
            "devices": 1,
            "deterministic": True,
            "enable_model_summary": False,
        },
    )

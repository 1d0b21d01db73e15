"""`headway train`: Lightning's command line around the predictor's training."""

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from predictor.training.export import ExportCheckpoint
from predictor.training.predictor_training import PredictorTraining
from predictor.training.regression_training import RemainingLengthTraining
from predictor.training.rows_data_module import RowsDataModule
from predictor.training.survival_training import SurvivalTraining

__all__ = ["TRAININGS", "train"]

TRAININGS = (SurvivalTraining, RemainingLengthTraining)
"""What ``--model`` may name."""


class _TrainCLI(LightningCLI):
    """Adds the output folder, the patience, and the logs of every training."""

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
            ModelCheckpoint(out / "training", monitor=self.model.monitor, save_last=True),
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

    Args:
        arguments: of the command line.
        parser_class: how they are read.
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

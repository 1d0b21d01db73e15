"""Trainings as a user starts them, sized for tests."""

from pathlib import Path

from rescheduler.commands.command_line import main

CONFIGS = Path(__file__).parents[3] / "configs" / "predictor"

QUIET = ("--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu")
"""No progress bar, and the CPU whatever the machine has, so that runs can be repeated."""

SURVIVAL = ("--model.init_args.limit", "512", "--data.batch_size", "64", "--patience", "4")
"""For the survival model: a short grid, and batches of a small dataset."""

FEW_ROWS = (
    "--model.init_args.widths=[32]",
    "--model.init_args.lr=3e-3",
    "--model.init_args.weight_decay=0.01",
    "--model.init_args.noise=0.1",
    "--trainer.max_epochs=12",
)
"""A small network that a few thousand rows of eight values teach."""


def fit(predictor: str, dataset: Path, out: Path, *options: str) -> Path:
    """Train by ``configs/predictor/PREDICTOR.yaml`` and return the checkpoint's folder."""
    arguments = ["train", "fit", "--config", str(CONFIGS / f"{predictor}.yaml")]
    arguments += ["--data.dataset", str(dataset)]
    assert main([*arguments, "--out", str(out), *QUIET, *options]) == 0
    return out

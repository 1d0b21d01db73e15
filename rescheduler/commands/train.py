"""`headway train`, its options read as those of the other verbs."""

from lightning.pytorch.cli import LightningArgumentParser

from predictor.training import train_command
from rescheduler.commands.command_parser import CommandParser


class _TrainParser(CommandParser, LightningArgumentParser):
    """Lightning's parser."""


def train(arguments: list[str]) -> None:
    """Run ``headway train`` with a command line."""
    if arguments[:1] == ["fit"]:  # Lightning's other subcommands have an option of this name
        arguments = [argument for argument in arguments if argument != "--verbose"]
    train_command.train(arguments, _TrainParser)

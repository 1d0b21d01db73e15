"""A simulation's configuration from a mapping, as a YAML file holds it."""

from argparse import ArgumentError
from dataclasses import fields
from functools import cache
from typing import Any

from rescheduler.commands.command_parser import CommandParser
from rescheduler.simulator.config.simulation_config import SimulationConfig

__all__ = ["read_config"]


def read_config(values: dict[str, Any]) -> SimulationConfig:
    """Return the simulation that a mapping of keys describes, as a YAML file would.

    Raises:
        ValueError: an unknown key, or a value that its key cannot take.
    """
    parser = _parser()
    try:
        made = parser.instantiate(parser.parse_object(values))
    except ArgumentError as error:
        raise ValueError(" ".join(str(error).split())) from error
    return SimulationConfig(**{key.name: made[key.name] for key in fields(SimulationConfig)})


@cache
def _parser() -> CommandParser:
    """Return the parser, which takes longer to make than to use."""
    parser = CommandParser(exit_on_error=False)
    parser.add_class_arguments(SimulationConfig)
    return parser

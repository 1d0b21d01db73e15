"""A simulation's configuration from YAML, from a command line, and from a mapping."""

from argparse import ArgumentError
from dataclasses import fields
from typing import Any

from rescheduler.commands.command_parser import CommandParser
from rescheduler.simulator.config.simulation_config import SimulationConfig

__all__ = ["config_parser", "parsed_config", "read_config"]


def config_parser(verb: str, description: str) -> Any:
    """Return a command line that takes every key of `SimulationConfig`, and ``--config``."""
    parser = CommandParser(prog=f"headway {verb}", description=description)
    parser.add_argument("--config", action="config", help="YAML file; what follows overrides it.")
    parser.add_class_arguments(SimulationConfig)
    return parser


def parsed_config(parser: Any, given: Any) -> SimulationConfig:
    """Return the simulation that a parsed command line describes.

    Raises:
        ValueError: a value or a combination that means nothing.
    """
    made = parser.instantiate(given)
    return SimulationConfig(**{key.name: made[key.name] for key in fields(SimulationConfig)})


def read_config(values: dict[str, Any]) -> SimulationConfig:
    """Return the simulation that a mapping of keys describes, as a YAML file would.

    Raises:
        ValueError: an unknown key, or a value that its key cannot take.
    """
    parser = CommandParser(exit_on_error=False)
    parser.add_class_arguments(SimulationConfig)
    try:
        return parsed_config(parser, parser.parse_object(values))
    except ArgumentError as error:
        raise ValueError(" ".join(str(error).split())) from error

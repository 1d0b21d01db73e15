"""A verb's command line, made from the signature and the docstring of its function.

Every parameter is an option, or a positional argument when it has no default. A parameter named
``config`` is a whole configuration: each of its keys is an option of the verb and a key of the
verb's YAML file. What is required and comes after ``config`` is an option.
"""

import inspect
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any

import msgspec

from rescheduler.commands.command_parser import CommandParser
from rescheduler.commands.struct_arguments import add_struct_arguments, struct_of

__all__ = ["command_arguments", "command_parser", "run_command"]

_CONFIG_HELP = "YAML file of these options; what follows it overrides it."
_VERBOSE_HELP = "Also show the messages of the libraries that are used."
_SECTIONS = ("Args:", "Returns:", "Raises:")


def run_command(function: Callable[..., Any], arguments: list[str], prog: str) -> Any:
    """Parse a command line for a function, and return what the function returns.

    Raises:
        SystemExit: with status 2 after a usage error, with 0 after help.
        ValueError: values that do not fit together.
    """
    return function(**command_arguments(function, arguments, prog))


def command_arguments(
    function: Callable[..., Any], arguments: list[str], prog: str
) -> dict[str, Any]:
    """Return what a command line gives a function; raises as `run_command` does before it runs."""
    parser = command_parser(function, prog)
    given = parser.parse_args(arguments)
    made = parser.instantiate(given)
    parameters = inspect.signature(function).parameters
    keywords = {name: made[name] for name in parameters if name != "config"}
    if "config" in parameters:
        kind, optional = _config_type(function)
        if issubclass(kind, msgspec.Struct):
            keywords["config"] = struct_of(kind, parser, given, optional)
        else:
            keywords["config"] = kind(**{key.name: made[key.name] for key in fields(kind)})
    return keywords


def command_parser(function: Callable[..., Any], prog: str) -> CommandParser:
    """Return the parser of a verb."""
    parser = CommandParser(prog=prog, description=_description(function))
    parser.add_argument("--config", action="config", help=_CONFIG_HELP)
    parameters = list(inspect.signature(function).parameters)
    if "verbose" not in parameters:
        parser.add_argument("--verbose", type=bool, default=False, help=_VERBOSE_HELP)
    before = parameters.index("config") if "config" in parameters else len(parameters)
    options: dict[str, Any] = {"as_group": False, "sub_configs": True}
    first: set[str | int] = set(parameters[:before])
    last: set[str | int] = set(parameters[before:])
    parser.add_function_arguments(function, as_positional=True, skip=last, **options)
    if last:
        skipped = first | {"config"}
        parser.add_function_arguments(function, as_positional=False, skip=skipped, **options)
        kind, optional = _config_type(function)
        if is_dataclass(kind):
            parser.add_class_arguments(kind, as_group=False)
        else:
            add_struct_arguments(parser, kind, hidden=optional)
    positionals = [action.dest for action in parser._actions if not action.option_strings]
    parser.usage = " ".join([prog, *map(str.upper, positionals), "[options]"])
    return parser


def _config_type(function: Callable[..., Any]) -> tuple[Any, bool]:
    """Return the type of a function's configuration, and whether it can do without one."""
    hint = typing.get_type_hints(function)["config"]
    members = typing.get_args(hint) or (hint,)
    return next(member for member in members if member is not NoneType), NoneType in members


def _description(function: Callable[..., Any]) -> str:
    paragraphs = []
    for paragraph in (inspect.getdoc(function) or "").split("\n\n"):
        if paragraph.startswith(_SECTIONS):
            break
        paragraphs.append(" ".join(paragraph.split()))
    return "\n\n".join(paragraphs)

"""A verb's command line, made from the signature and the docstring of its function.

Every parameter is an option, or a positional argument when it has no default; one that may be None
may be left out. A parameter named ``config`` is a whole configuration, a dataclass or a msgspec
struct: each of its keys is an option of the verb and a key of the verb's YAML file. What is
required and comes after ``config`` is an option.
"""

import inspect
import typing
from argparse import SUPPRESS
from collections.abc import Callable
from dataclasses import fields
from types import NoneType
from typing import Any

import msgspec
from docstring_parser import parse as parse_docstring
from jsonargparse import Namespace

from rescheduler.commands.command_parser import CommandParser

__all__ = ["command_arguments", "command_parser", "run_command"]

_CONFIG_HELP = "YAML file of these options, or the name of a shipped one; what follows overrides it"
_VERBOSE_HELP = "also show the messages of the libraries that are used"
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
    keywords = {name: made.get(name) for name in parameters if name != "config"}
    if "config" in parameters:
        kind, optional = _config_type(function)
        if _is_struct(kind):
            keywords["config"] = _struct_of(kind, parser, given, optional)
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
    hints = typing.get_type_hints(function)
    left_out = {
        name
        for name, one in inspect.signature(function).parameters.items()
        if one.default is one.empty and NoneType in typing.get_args(hints[name])
    } - {"config"}
    skipped = last | left_out
    parser.add_function_arguments(function, as_positional=True, skip=skipped, **options)
    docs = {one.arg_name: one.description for one in parse_docstring(function.__doc__ or "").params}
    for name in left_out:
        text = " ".join((docs.get(name) or "").split())
        # With None as its default, argparse would overrule what a file says.
        parser.add_argument(name, nargs="?", type=hints[name], default=SUPPRESS, help=text)
    if last:
        skipped = first | {"config"}
        parser.add_function_arguments(function, as_positional=False, skip=skipped, **options)
        kind, optional = _config_type(function)
        if _is_struct(kind):
            _add_struct(parser, kind, hidden=optional)
        else:
            parser.add_class_arguments(kind, as_group=False)
    positionals = [
        f"[{action.dest.upper()}]" if action.nargs == "?" else action.dest.upper()
        for action in parser._actions
        if not action.option_strings
    ]
    parser.usage = " ".join([prog, *positionals, "[options]"])
    return parser


def _config_type(function: Callable[..., Any]) -> tuple[Any, bool]:
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


def _add_struct(parser: CommandParser, struct: Any, prefix: str = "", hidden: bool = False) -> None:
    """Add an option for each key of a struct and of the structs in it, as its docstring says.

    Required keys become options without a default: `_struct_of` reports what is missing.
    """
    hints = typing.get_type_hints(struct)
    docs = [parse_docstring(one.__doc__ or "").params for one in reversed(struct.__mro__)]
    described = {key.arg_name: key.description for params in docs for key in params}
    for field in msgspec.structs.fields(struct):
        kind = hints[field.name]
        if _is_struct(kind):
            _add_struct(parser, kind, f"{prefix}{field.name}.", hidden)
            continue
        if any(map(_is_struct, typing.get_args(kind))):
            one = dict[str, Any]
            kind = list[one] if typing.get_origin(kind) is list else one | None
        default: Any = None
        if field.default is not msgspec.NODEFAULT:
            default = field.default
        elif field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        else:
            kind = kind | None
        text = SUPPRESS if hidden else " ".join((described.get(field.name) or "").split())
        parser.add_argument(f"--{prefix}{field.name}", type=kind, default=default, help=text)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _struct_of(struct: Any, parser: CommandParser, given: Namespace, optional: bool) -> Any:
    """Return the struct that a parsed command line describes, by its ``from_values``.

    If it is optional, None stands for one whose required keys were not given. Errors name the file.
    """
    values = {field.name: given.get(field.name) for field in msgspec.structs.fields(struct)}
    required = [field.name for field in msgspec.structs.fields(struct) if field.required]
    missing = [name for name in required if values[name] is None]
    if len(missing) == len(required) and optional:
        return None
    if missing:
        parser.error(f"--config FILE.yaml is required, with {' and '.join(missing)}")
    plain = {
        name: value.as_dict() if isinstance(value, Namespace) else value
        for name, value in values.items()
    }
    try:
        return struct.from_values(plain)
    except ValueError as error:
        files = ", ".join(str(path) for path in given.get("config") or [])
        raise type(error)(f"{files}: {error}" if files else str(error)) from error

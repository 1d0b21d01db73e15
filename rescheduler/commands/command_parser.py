"""The parser of every verb: one spelling of options, and errors of two lines."""

import inspect
import json
import re
import sys
import textwrap
import typing
from argparse import SUPPRESS, Action
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import msgspec
import yaml
from docstring_parser import parse as parse_docstring
from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace, get_loader, set_loader

from data_collection.files import find_config, read_text
from rescheduler.commands.verbs import example_of

_BOOLEANS = {"true", "false", "yes", "no"}
_KEY_VALUE = re.compile(r"[\w.-]+=")
_INLINE = re.compile(r"[\s{:]|^-?$")
"""In a ``--config`` that is YAML itself, or the standard input."""


def normalised(parser: Any, arguments: Sequence[str]) -> list[str]:
    """Return a command line as jsonargparse reads it.

    - ``--kv-capacity 3`` becomes ``--kv_capacity 3``: parameters have underscores.
    - ``--overwrite`` becomes ``--overwrite=true`` where the option is a boolean.
    - ``--only a b`` becomes ``--only=["a", "b"]`` where it is a sequence of strings or files, and
      ``--start-seconds 120 480`` becomes ``--start_seconds=[120, 480]`` where it is one of numbers.
    - ``--vary KEY=VALUE`` becomes ``--vary.KEY VALUE`` where it is a mapping.
    - ``--config NAME`` becomes ``--config=FILE`` where a shipped configuration has that name.
    - ``A B OUT`` becomes ``["A", "B"] OUT`` where the first of two arguments is a list.

    What the parser does not know is left as it is.
    """
    subcommands = parser._subcommands_action
    result: list[str] = []
    rest = _as_list(parser, list(arguments))
    while rest:
        word = rest.pop(0)
        if subcommands and word in subcommands.choices:
            return [*result, word, *normalised(subcommands.choices[word], rest)]
        if word == "--":
            return [*result, word, *rest]
        if not word.startswith("--"):
            result.append(word)
            continue
        typed, equals, value = word.partition("=")
        option, kind = resolved(parser, typed)
        following = rest[0] if rest and not rest[0].startswith("-") else None
        if option == "--config" and (equals or following is not None):
            result.append(f"--config={_config(parser, value if equals else rest.pop(0))}")
        elif equals:
            result.append(f"{option}={value}")
        elif kind is bool and str(following).lower() not in _BOOLEANS:
            result.append(f"{option}=true")
        elif _is_words(kind) and following is not None and not following.startswith("["):
            values = []
            while rest and not rest[0].startswith("-"):
                values.append(rest.pop(0))
            result.append(f"{option}={json.dumps(values)}")
        elif _is_numbers(kind) and following is not None and following[:1].isdigit():
            values = []
            while rest and rest[0][:1].isdigit():
                values.append(rest.pop(0))
            result.append(f"{option}=[{', '.join(values)}]")
        elif _is_mapping(kind) and following is not None and _KEY_VALUE.match(following):
            key, _, value = rest.pop(0).partition("=")
            result += [f"{option}.{key}", value]
        elif _has_labels(kind) and following is not None and not following.startswith(("{", "[")):
            parser.error(f"{typed} {following}: expected KEY=VALUE")
        else:
            result.append(option)
    return result


def _as_list(parser: Any, arguments: list[str]) -> list[str]:
    """Return a command line whose first words are one list, if the first argument is one."""
    named = [action for action in parser._actions if not action.option_strings]
    if not named or get_origin(getattr(named[0], "_typehint", None)) is not list:
        return arguments
    option = (i for i, word in enumerate(arguments) if word.startswith("-"))
    words = arguments[: next(option, len(arguments))]
    last = len(words) - len(named) + 1
    if last < 1 or words[0].startswith("["):
        return arguments
    return [json.dumps(words[:last]), *arguments[last:]]


def resolved(parser: Any, typed: str) -> tuple[str, Any]:
    """Return an option as the parser spells it, and the type of its value, if it is known.

    Below an option, as in ``--migration.interval-seconds``, are names of options too, unless
    it maps labels of the user's own to something.
    """
    known = parser._option_string_actions
    parts = typed.removeprefix("--").split(".")
    for length in range(len(parts), 0, -1):
        head = ".".join(parts[:length])
        for spelling in (f"--{head}", f"--{head.replace('-', '_')}"):
            if spelling not in known:
                continue
            kind = getattr(known[spelling], "_typehint", None)
            if length == len(parts):
                return spelling, kind
            below = ".".join(parts[length:])
            if not _has_labels(kind):
                below = below.replace("-", "_")
            return f"{spelling}.{below}", None
    return typed, None


def _config(parser: Any, given: str) -> str:
    if _INLINE.search(given):
        return given
    try:
        return str(find_config(given))
    except ValueError as error:
        parser.error(f"--config {error}")
        raise


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _is_words(kind: Any) -> bool:
    return _lists(kind, lambda item: item in (str, Path) or get_origin(item) is Literal)


def _is_numbers(kind: Any) -> bool:
    return _lists(kind, lambda item: item in (int, float))


def _lists(kind: Any, of: Callable[[Any], bool]) -> bool:
    return any(
        get_origin(member) in (list, Sequence) and all(map(of, get_args(member)))
        for member in _members(kind)
    )


def _is_mapping(kind: Any) -> bool:
    return any(get_origin(member) is dict for member in _members(kind))


def _has_labels(kind: Any) -> bool:
    """Return whether keys are labels that the user chose, in place of names of options."""
    mappings = [member for member in _members(kind) if get_origin(member) is dict]
    return any(get_args(mapping)[1] is not Any for mapping in mappings)


_UNKNOWN = re.compile(
    r"unrecognized arguments: (?P<dashes>--)(?P<option>[\w.-]+)"
    r"|(?:^Option|does not accept option) '(?P<key>[\w.-]+)'"
)
_CLASS = re.compile(r"<class\s+'[\w.]*?(\w+)'>")
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w.]*_[\w.]*")

_INVALID_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError)
"""What PyYAML raises; the last three for values that do not fit their tags, as ``!!bool x``."""

set_loader("yaml", get_loader("yaml"), _INVALID_YAML)


_DOCUMENTED = "(documented elsewhere)"
"""The text of options that the help leaves to the documentation; they are printed as others are."""


class _HelpFormatter(DefaultHelpFormatter):
    """Keeps the paragraphs of a description apart, and says types as a user knows them."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            textwrap.fill(paragraph, width, initial_indent=indent, subsequent_indent=indent)
            for paragraph in text.split("\n\n")
        )

    def add_argument(self, action: Action) -> None:
        of_class = any(
            re.fullmatch(r"--(?!model\.).*\.help", name) for name in action.option_strings
        )
        if not of_class and action.help not in ("Path to a configuration file.", _DOCUMENTED):
            super().add_argument(action)

    def _format_action_invocation(self, action: Action) -> str:
        return str(super()._format_action_invocation(action)).replace(" \b[=flags]", "")

    def _expand_help(self, action: Action) -> str:
        if "--print_config" in action.option_strings:
            return "Print the configuration as YAML, and exit."
        text = str(super()._expand_help(action))
        return _as_sentence(re.sub(r"type: Literal\[[^\]]*\](?:, )?", "", text), _choices(action))


def _choices(action: Action) -> list[str]:
    kinds = _members(getattr(action, "_typehint", None))
    return [str(name) for kind in kinds if get_origin(kind) is Literal for name in get_args(kind)]


_TYPED = re.compile(r" ?\((?:(required), )?(?:type: (.*?))?(?:, )?(?:default: (.*))?\)$", re.DOTALL)


def _as_sentence(text: str, choices: Sequence[str]) -> str:
    """Return a help text that begins with a capital, ends with a stop, and says the default last.

    A value that is not set is said so: ``null`` and ``None`` are how files and code write it.
    What begins with one of the choices stays as it is typed.
    """
    typed = _TYPED.search(text)
    said = text[: typed.start()] if typed else text
    said = said.strip()
    kind = re.sub(r"^Optional\[(.*)\]$", r"\1", ((typed and typed[2]) or "").replace(" | null", ""))
    first = re.match(r"[a-z]+(?![\w./:-])", said)
    if first and first[0] not in choices:
        said = said[0].upper() + said[1:]
    if said and not said.endswith((".", "!", "?", ":")):
        said += "."
    if not typed or not (typed[2] or typed[3] or typed[1]):
        return said
    if kind.startswith("Literal["):
        kind = f"one of {', '.join(choices)}"
    default = typed[3]
    if default in ("null", "None", "()", "[]", "", "==SUPPRESS=="):
        default = "not set" if default is not None else None
    parts = [kind] if kind else []
    if default is not None:
        parts.append(default if default == "not set" else f"default: {default}")
    elif typed[1]:
        parts.append("required")
    return f"{said} ({', '.join(parts)})" if parts else said


class CommandParser(ArgumentParser):
    """The parser of a verb.

    Options are spelt with dashes, as ``--kv-capacity``; underscores are accepted too. An unknown
    option or YAML key is reported with the closest known one.
    """

    def __init__(self, *args: Any, formatter_class: Any = _HelpFormatter, **options: Any) -> None:
        super().__init__(*args, formatter_class=formatter_class, **options)
        self._reading: Any = ""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *more: Any, **options: Any
    ) -> Any:
        """Parse options spelt with dashes or underscores."""
        given = sys.argv[1:] if args is None else args
        return super().parse_args(normalised(self, given), *more, **options)

    def parse_path(self, path: Any, *more: Any, **options: Any) -> Any:
        """Parse a configuration, which is refused here unless it is text.

        Raises:
            ValueError: it is not, with its name.
        """
        self._reading = path
        if not Path(path).is_fifo():  # a pipe can be read only once
            read_text(Path(path))
        try:
            return super().parse_path(path, *more, **options)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not plain UTF-8 text: {error}") from error

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Report what is wrong, and exit with status 2."""
        message = _shortened(message.replace('"<unicode string>"', str(self._reading)))
        unknown = _UNKNOWN.search(message)
        if unknown is not None and "did you mean" not in message:
            message += _suggestion(self, unknown)
        super().error(_dashed(message), ex)

    def format_help(self, *args: Any, **options: Any) -> str:
        """Return the help, its options spelt with dashes."""
        if self.usage is None:
            self.usage = f"{self.prog.replace(' [options]', '')} [options]"
        text = super().format_help(*args, **options).replace("{true,false}", "[true|false]")
        example = example_of(self.prog.replace(" [options]", ""))
        text = f"{text.rstrip()}\n\nexample:\n  {example}\n" if example else text
        return _dashed(_CLASS.sub(r"\1", text)).replace("``", "`")

    def print_usage(self, file: Any = None) -> None:
        """Print the usage where it is asked for, but not before an error."""
        if file is not sys.stderr:
            super().print_usage(file)


_NO_MODEL = (
    "the following arguments are required: fit.model",
    "the following arguments are required: validate.model",
    "the following arguments are required: test.model",
)


def _shortened(message: str) -> str:
    """Return a message without the whole file, or the types that were tried, around the mistake."""
    if message.endswith(_NO_MODEL):
        return "no predictor to train: add --config survival or --config star, or --model CLASS"
    if message.startswith("Problems parsing config: while "):
        *_, wrong, where = (line.strip() for line in message.splitlines())
        return f"{where.removeprefix('in ')}: {wrong}"
    if message.startswith("Unexpected config"):
        return "the configuration must be a mapping of options to their values"
    key = re.match(r'Parser key "([\w.-]+)":\n', message)
    found = re.search(r"Option '[\w.-]+' is not accepted.*", message)
    if key and found:
        return f"{key[1]}: {found[0]}"
    nested = re.search(r"NestedArg\(key='([^']+)', val='([^']*)'\)", message)
    if key and nested and "list[" in message:
        return f"{key[1]}.{nested[1]}: a list of values such as [{nested[2]}], not {nested[2]}"
    choices = re.search(r"Expected a typing\.Literal\[(.+?)\]", message)
    given = re.search(r"(?:Given|Got) value: (.*)", message)
    if key and choices and given:
        return f"{key[1]}: one of {choices[1].replace(chr(39), '')}, not {given[1]!r}"
    if key and key[1] == "trace" and given and "Expected a <class 'dict'>" in message:
        return f"trace: a file is given as --trace.path {given[1]}"
    return _CLASS.sub(r"\1", message)


def _suggestion(parser: Any, unknown: re.Match[str]) -> str:
    known = {option.removeprefix("--") for option in _options(parser)}
    if unknown["option"]:
        dashed = {option.replace("_", "-") for option in known}
        near = get_close_matches(unknown["option"].replace("_", "-"), sorted(dashed), n=1)
        return f"; did you mean --{near[0]}?" if near else ""
    near = get_close_matches(unknown["key"], sorted(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _options(parser: Any) -> Iterator[str]:
    yield from parser._option_string_actions
    subcommands = parser._subcommands_action
    for subparser in subcommands.choices.values() if subcommands else ():
        yield from _options(subparser)


def _dashed(text: str) -> str:
    return _OPTION.sub(lambda option: option[0].replace("_", "-"), text)


_CONFIG_HELP = (
    "YAML file of these options, or the name of a shipped one. What follows overrides it."
)
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
            documented = getattr(kind, "documented", "")
            _add_struct(parser, kind, hidden=SUPPRESS if optional else documented and _DOCUMENTED)
            parser.description = "\n\n".join(filter(None, [parser.description, documented]))
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


def _add_struct(parser: CommandParser, struct: Any, prefix: str = "", hidden: str = "") -> None:
    """Add an option for each key of a struct and of the structs in it, as its docstring says.

    Required keys become options without a default: `_struct_of` reports what is missing. With
    ``hidden`` as their text, the help leaves them out.
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
        if _is_struct(type(default)):
            default = msgspec.to_builtins(default)
        text = hidden or " ".join((described.get(field.name) or "").split())
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
        parser.error(
            f"--config FILE.yaml is required, with {' and '.join(missing)}; to try a shipped one: "
            "--config local-pd"
        )
    plain = {
        name: value.as_dict() if isinstance(value, Namespace) else value
        for name, value in values.items()
    }
    try:
        return struct.from_values(plain)
    except ValueError as error:
        files = ", ".join(str(path) for path in given.get("config") or [])
        raise type(error)(f"{files}: {error}" if files else str(error)) from error

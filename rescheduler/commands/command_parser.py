"""The parser of every verb: one spelling of options, and errors of two lines."""

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, get_loader, set_loader

from data_collection.text_file import read_text
from rescheduler.commands.option_spelling import normalised

__all__ = ["CommandParser"]

_UNKNOWN = re.compile(
    r"unrecognized arguments: (?P<dashes>--)(?P<option>[\w.-]+)"
    r"|(?:^Option|does not accept option) '(?P<key>[\w.-]+)'"
)
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w.]*_[\w.]*")

_INVALID_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError)
"""What PyYAML raises; the last three for values that do not fit their tags, as ``!!bool x``."""

set_loader("yaml", get_loader("yaml"), _INVALID_YAML)


class _HelpFormatter(DefaultHelpFormatter):
    """Keeps the paragraphs of a description apart."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            textwrap.fill(paragraph, width, initial_indent=indent, subsequent_indent=indent)
            for paragraph in text.split("\n\n")
        )


class CommandParser(ArgumentParser):
    """The parser of a verb.

    Options are spelt with dashes, as ``--kv-capacity``; underscores are accepted too. An unknown
    option or YAML key is reported with the closest known one.
    """

    def __init__(self, *args: Any, formatter_class: Any = _HelpFormatter, **options: Any) -> None:
        super().__init__(*args, formatter_class=formatter_class, **options)

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
        if not Path(path).is_fifo():  # a pipe can be read only once
            read_text(Path(path))
        try:
            return super().parse_path(path, *more, **options)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not plain UTF-8 text: {error}") from error

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Report what is wrong, and exit with status 2."""
        message = _shortened(message)
        unknown = _UNKNOWN.search(message)
        if unknown is not None and "did you mean" not in message:
            message += _suggestion(self, unknown)
        super().error(_dashed(message), ex)

    def format_help(self, *args: Any, **options: Any) -> str:
        """Return the help, its options spelt with dashes."""
        text = super().format_help(*args, **options).replace("{true,false}", "[true|false]")
        return _dashed(text).replace("``", "`")

    def print_usage(self, file: Any = None) -> None:
        """Print the usage where it is asked for, but not before an error."""
        if file is not sys.stderr:
            super().print_usage(file)


def _shortened(message: str) -> str:
    """Return a message without the whole file, or the types that were tried, around the mistake."""
    if message.startswith("Unexpected config"):
        return "the configuration must be a mapping of options to their values"
    key = re.match(r'Parser key "([\w.-]+)":\n', message)
    found = re.search(r"Option '[\w.-]+' is not accepted.*", message)
    if key and found:
        return f"{key[1]}: {found[0]}"
    choices = re.search(r"Expected a typing\.Literal\[(.+?)\]", message)
    given = re.search(r"(?:Given|Got) value: (.*)", message)
    if key and choices and given:
        return f"{key[1]}: one of {choices[1].replace(chr(39), '')}, not {given[1]!r}"
    return message


def _suggestion(parser: Any, unknown: re.Match[str]) -> str:
    known = {option.removeprefix("--") for option in _options(parser)}
    if unknown["option"]:
        dashed = {option.replace("_", "-") for option in known}
        near = get_close_matches(unknown["option"].replace("_", "-"), sorted(dashed), n=1)
        return f"; did you mean --{near[0]}?" if near else ""
    near = get_close_matches(unknown["key"], sorted(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _options(parser: Any) -> Iterator[str]:
    """Yield the options of a parser and of its subcommands."""
    yield from parser._option_string_actions
    subcommands = parser._subcommands_action
    for subparser in subcommands.choices.values() if subcommands else ():
        yield from _options(subparser)


def _dashed(text: str) -> str:
    return _OPTION.sub(lambda option: option[0].replace("_", "-"), text)

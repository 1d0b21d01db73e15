"""Command lines that tell a mistake in two lines."""

import re
import sys
from difflib import get_close_matches
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

__all__ = ["CommandParser"]

_UNKNOWN = re.compile(
    r"unrecognized arguments: (?P<dashes>--)(?P<option>[\w.-]+)"
    r"|^Option '(?P<key>[\w.-]+)' is not accepted"
)


class CommandParser(ArgumentParser):
    """Names the option or the key that was meant, and leaves out the usage that would hide it."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Tell what is wrong, and exit with status 2."""
        unknown = _UNKNOWN.search(message)
        if unknown is not None:
            known = [option.removeprefix("--") for option in self._option_string_actions]
            for near in get_close_matches(unknown["option"] or unknown["key"], known, n=1):
                message += f"; did you mean {unknown['dashes'] or ''}{near}?"
        super().error(message, ex)

    def print_usage(self, file: Any = None) -> None:
        """Print it where it is asked for, but not before an error."""
        if file is not sys.stderr:
            super().print_usage(file)
